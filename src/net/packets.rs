//! What each packet of a connected client does.

use std::sync::Arc;

use broker::{Charge, CloseReason, Kind, Routing, Session, SubscribeError, Target, Turn};
use codec::{Ack, AckKind, Frame, Packet, Publish, reason};
use gateway_core::{Commit, Effort, Message, Origin, OriginKind, QoS, Timestamp, Unit, metrics::count};
use parking_lot::MutexGuard;
use session::{Begin, PublishError, Refusal, WrongStep, refusal};
use tracing::info;

use super::{
    connection::Connection,
    device::{Device, Slot},
    durable::Closing,
    ending::End,
    shard::Work,
    unfinished::Publishing,
};
use crate::telemetry::trace_clients;

/// PUBLISH packets of one read between two flushes: small ones would fill the queue of a receiver that keeps up.
const MESSAGES_PER_FLUSH: u32 = 256;

/// PUBACK packets that are handled under one lock: whoever delivers to the device waits for them.
const ACKS_PER_LOCK: usize = 16;

/// What came of a piece of input.
pub(super) struct Handled {
    /// Bytes of complete frames.
    pub(super) used: usize,
    /// PUBLISH packets among them.
    pub(super) messages: u32,
    /// The connection must end.
    pub(super) end: Option<End>,
}

impl Connection {
    /// Finishes the packet that was begun and handles the complete frames in `bytes`, all of them or until the account is
    /// spent; then `unread` is set. Answers and deliveries are left in `work`.
    pub(super) fn handle_frames(&mut self, bytes: &[u8], work: &mut Work) -> Handled {
        let mut handled = Handled { used: 0, messages: 0, end: None };
        if !bytes.is_empty() || self.is_unfinished() {
            handled.end = self.handle_each(bytes, &mut handled, work).err();
        }
        handled
    }

    fn handle_each(&mut self, bytes: &[u8], handled: &mut Handled, work: &mut Work) -> Result<(), End> {
        let Work { turn, answers, now, .. } = work;
        let max = self.device.shared.limits.max_packet_size.0;
        let traced = self.is_traced();
        self.go_on(*now, turn, answers)?;
        loop {
            if turn.effort.is_spent() {
                self.unread = true;
                return Ok(());
            }
            debug_assert!(!self.is_unfinished(), "only a spent account leaves a packet unfinished");
            let rest = &bytes[handled.used..];
            if !traced {
                let acks = self.handle_plain_pubacks(rest, *now, turn)?;
                if acks > 0 {
                    handled.used += acks * codec::PLAIN_PUBACK;
                    continue;
                }
            }
            let frame = codec::frame(rest, max).map_err(|error| End::Protocol(error.reason_code()))?;
            let Some(frame) = frame else { return Ok(()) };
            count(|c| c.packets_in.add(1));
            turn.effort.spend(Effort::PACKET);
            if traced {
                self.trace(&frame);
            }
            handled.used += frame.len;
            let answered = answers.len();
            let result = if frame.first >> 4 == 3 {
                handled.messages += 1;
                let routed = self.handle_publish_frame(&frame, *now, turn, answers);
                if handled.messages.is_multiple_of(MESSAGES_PER_FLUSH) {
                    turn.flush();
                }
                routed
            } else {
                self.handle_other(&frame, *now, turn, answers)
            };
            if answers.len() > answered {
                count(|c| c.packets_out.add(1));
            }
            result?;
        }
    }

    /// Type and size, never content.
    fn trace(&self, frame: &Frame<'_>) {
        let core = self.device.core();
        let info = core.connection(self.epoch);
        let peer = info.as_ref().map(|info| tracing::field::display(info.peer));
        let listener = info.as_ref().map(|info| info.listener.as_str());
        info!(peer, client_id = %core.client_id(), listener, first = frame.first, bytes = frame.len, "packet received");
    }

    fn is_traced(&self) -> bool {
        let traced = trace_clients();
        traced.any() && traced.is_traced(self.device.core().client_id().as_str())
    }

    fn handle_publish_frame(
        &mut self,
        frame: &Frame<'_>,
        now: Timestamp,
        turn: &mut Turn,
        answers: &mut Vec<u8>,
    ) -> Result<(), End> {
        let protocol = self.inbound.protocol();
        let publish = frame
            .check_length(protocol)
            .and_then(|()| codec::decode_publish(frame.first, frame.body, protocol))
            .map_err(|error| End::Protocol(error.reason_code()))?;
        count(|c| {
            let (messages, bytes) = match publish.qos {
                QoS::AtMostOnce => (&c.messages_in_0, &c.payload_bytes_in_0),
                QoS::AtLeastOnce => (&c.messages_in_1, &c.payload_bytes_in_1),
                QoS::ExactlyOnce => (&c.messages_in_2, &c.payload_bytes_in_2),
            };
            messages.add(1);
            bytes.add(publish.payload.len() as u64);
        });
        let alias = match self.inbound.check_publish(&publish, &self.device.shared.limits) {
            Ok(alias) => alias,
            Err(PublishError::Fatal(code)) => return Err(End::Protocol(code)),
            Err(PublishError::Refused(code)) => return self.refuse_publish(&publish, code, answers),
        };
        if publish.alias.is_some() {
            self.settle_aliases()?;
        }
        let topic = alias.as_deref().unwrap_or(publish.topic);
        if !self.identity.may_publish(topic) {
            return self.refuse_publish(&publish, reason::NOT_AUTHORIZED, answers);
        }
        if publish.qos == QoS::ExactlyOnce {
            let maximum = self.device.shared.limits.receive_maximum;
            let begun = match self.device.lock_owned(self.epoch) {
                Some(mut slot) => slot.out.begin_received(publish.packet_id, maximum),
                None => return Err(End::Superseded),
            };
            match begun {
                Begin::New => {}
                Begin::Duplicate(commit) => {
                    return self.acknowledge(
                        publish.qos,
                        publish.packet_id,
                        reason::SUCCESS,
                        commit,
                        answers,
                    );
                }
                Begin::Exceeded => return Err(End::Protocol(reason::RECEIVE_MAXIMUM_EXCEEDED)),
            }
        }
        self.route(&publish, topic, now, turn, answers)
    }

    /// Charges the client's topic aliases. Their number was granted, so that nothing else than the connection's end says
    /// that one cannot be kept.
    fn settle_aliases(&mut self) -> Result<(), End> {
        let bytes = self.inbound.alias_bytes();
        let charged = self.rare.as_ref().and_then(|rare| rare.aliases.as_ref()).map_or(0, Charge::bytes);
        if bytes == charged {
            return Ok(());
        }
        let device = Arc::clone(&self.device);
        let charge = self
            .rare()
            .aliases
            .get_or_insert_with(|| Charge::new(device.shared.broker.account(), Kind::Aliases));
        if charge.set(bytes) {
            return Ok(());
        }
        count(|c| c.memory_aliases.add(1));
        Err(End::Close(CloseReason::Memory))
    }

    fn route(
        &mut self,
        publish: &Publish<'_>,
        topic: &str,
        now: Timestamp,
        turn: &mut Turn,
        answers: &mut Vec<u8>,
    ) -> Result<(), End> {
        let core = self.device.core();
        let origin =
            Origin { kind: OriginKind::Device, client_id: Some(core.client_id()), slot: core.slot() };
        let mut message = Message::new(topic, publish.payload, now, origin);
        message.qos = publish.qos;
        message.retain = publish.retain;
        message.properties = publish.properties.as_ref();
        message.expires = publish.expiry.map(|seconds| now.plus_secs(seconds));
        if publish.qos != QoS::AtMostOnce {
            message.durability = self.device.shared.broker.durability(topic, self.durability);
        }
        // Its packet identifier goes to disk with it, if both outlive the process.
        message.unit = publish.qos == QoS::ExactlyOnce && self.device.is_durable();
        let stores = self.device.shared.broker.stores().filter(|_| message.unit);
        let unit = stores.map(|stores| Unit::new(&message, &*stores.queues));
        let published = match self.device.shared.broker.publish_some(&message, turn) {
            Routing::Done(published) => published,
            Routing::More(spread) => {
                let _ = unit.map(Unit::keep_open);
                self.put_off(Publishing { spread, qos: publish.qos, packet_id: publish.packet_id });
                return Ok(());
            }
        };
        if publish.qos == QoS::AtMostOnce {
            return Ok(());
        }
        if published.refused.is_some() {
            self.log_refusal("PUBLISH", reason::QUOTA_EXCEEDED);
        }
        if published.refused.is_some() {
            if publish.qos == QoS::ExactlyOnce {
                // Also if another connection has the session now: this message was not routed.
                self.device.lock().out.abort_received(publish.packet_id);
            }
            drop(unit);
            return self.refuse_publish(publish, reason::QUOTA_EXCEEDED, answers);
        }
        let code = if published.matched == 0 { reason::NO_MATCHING_SUBSCRIBERS } else { reason::SUCCESS };
        let commit = message.issued().cloned();
        if let Some(unit) = unit.and_then(Unit::hand_over) {
            close_unit(&self.device, publish.packet_id, unit);
        }
        if let Some(commit) = &commit {
            commit.done();
        }
        self.acknowledge(publish.qos, publish.packet_id, code, commit, answers)
    }

    fn refuse_publish(&mut self, publish: &Publish<'_>, code: u8, answers: &mut Vec<u8>) -> Result<(), End> {
        if code != reason::QUOTA_EXCEEDED {
            count(|c| c.refused_not_accepted.add(1));
        }
        match refusal(self.inbound.protocol(), publish.qos, code) {
            // In its turn, behind those that wait for the disk [MQTT-4.6.0-2], [MQTT-4.6.0-3].
            Refusal::Acknowledge(code) => {
                self.acknowledge(publish.qos, publish.packet_id, code, None, answers)
            }
            Refusal::Drop => Ok(()),
            Refusal::Close => Err(End::Protocol(code)),
        }
    }

    fn handle_other(
        &mut self,
        frame: &Frame<'_>,
        now: Timestamp,
        turn: &mut Turn,
        answers: &mut Vec<u8>,
    ) -> Result<(), End> {
        let protocol = self.inbound.protocol();
        let filters = codec::count_filters(frame, protocol);
        if filters > self.device.shared.limits.max_filters_per_packet {
            return Err(End::Protocol(reason::QUOTA_EXCEEDED));
        }
        turn.effort.spend_each(Effort::NODE, filters);
        let packet =
            codec::decode_from_client(frame, protocol).map_err(|error| End::Protocol(error.reason_code()))?;
        match packet {
            Packet::PubAck(ack) | Packet::PubRec(ack) | Packet::PubRel(ack) | Packet::PubComp(ack) => {
                self.handle_ack(frame.first, &ack, now, turn, answers)
            }
            Packet::Subscribe(subscribe) => self.handle_subscribe(subscribe, now, turn, answers),
            Packet::Unsubscribe(unsubscribe) => self.handle_unsubscribe(unsubscribe, now, turn, answers),
            Packet::PingReq => {
                codec::encode_pingresp(answers); // [MQTT-3.12.4-1]
                Ok(())
            }
            Packet::Disconnect(disconnect) => {
                if self.expiry == 0 && disconnect.session_expiry.is_some_and(|seconds| seconds != 0) {
                    return Err(End::Protocol(reason::PROTOCOL_ERROR)); // [MQTT-3.14.2-2]
                }
                let most = self.device.shared.limits.session_expiry_max;
                let expiry = disconnect.session_expiry.map(|seconds| seconds.min(most));
                Err(End::Disconnect { code: disconnect.code, expiry })
            }
            // A second CONNECT [MQTT-3.1.0-2], AUTH without a method [MQTT-4.12.0-6], and what only servers send.
            _ => Err(End::Protocol(reason::PROTOCOL_ERROR)),
        }
    }

    fn handle_ack(
        &mut self,
        first: u8,
        ack: &Ack,
        now: Timestamp,
        turn: &mut Turn,
        answers: &mut Vec<u8>,
    ) -> Result<(), End> {
        turn.effort.spend(Effort::STEP);
        let env = self.device.env(now);
        let mut slot = self.lock_open()?;
        let step = match first >> 4 {
            4 => slot.out.handle_puback(ack.packet_id, ack.code, &env).map(|_| None),
            5 => {
                let held = slot.out.handle_pubrec(ack.packet_id, ack.code, &env);
                held.map(|held| held.map(|held| (AckKind::PubRel, held)))
            }
            6 => Ok(slot.out.handle_pubrel(ack.packet_id, &env).map(|held| (AckKind::PubComp, held))),
            _ => slot.out.handle_pubcomp(ack.packet_id, &env).map(|_| None),
        };
        self.let_go(slot, turn);
        match step.map_err(|WrongStep| End::Protocol(reason::PROTOCOL_ERROR))? {
            Some((kind, held)) => self.step_when_safe(kind, ack.packet_id, held, answers),
            None => Ok(()),
        }
    }

    /// Handles PUBACK packets that `bytes` begin with, if they are plain, some under one lock. Says how many.
    fn handle_plain_pubacks(&mut self, bytes: &[u8], now: Timestamp, turn: &mut Turn) -> Result<usize, End> {
        let mut ids = codec::plain_pubacks(bytes).take(ACKS_PER_LOCK).peekable();
        if ids.peek().is_none() {
            return Ok(0);
        }
        let env = self.device.env(now);
        let mut slot = self.lock_open()?;
        let mut acks = 0;
        let mut result = Ok(());
        for id in ids {
            acks += 1;
            if let Err(WrongStep) = slot.out.handle_puback(id, 0, &env) {
                result = Err(End::Protocol(reason::PROTOCOL_ERROR));
                break;
            }
        }
        self.let_go(slot, turn);
        turn.effort.spend_each(Effort::STEP, acks);
        count(|c| c.packets_in.add(acks as u64));
        result.map(|()| acks)
    }

    /// Unlocks the slot; what acknowledgements made room for is sent at the end of the turn.
    fn let_go(&self, mut slot: MutexGuard<'_, Slot>, turn: &mut Turn) {
        let dirty = slot.mark_dirty();
        drop(slot);
        if dirty {
            turn.dirty.push(Arc::clone(&self.device) as Arc<dyn Target>);
        }
    }

    /// The slot, while the session is ours and we need not close.
    fn lock_open(&self) -> Result<MutexGuard<'_, Slot>, End> {
        let Some(slot) = self.device.lock_owned(self.epoch) else { return Err(End::Superseded) };
        // The next connection has looked at what it must wait for: nothing may be added to that.
        match slot.link.as_ref().and_then(|link| link.close) {
            Some(close) => Err(End::Close(close)),
            None => Ok(slot),
        }
    }

    /// Appends an answer whose length depends on the request. One above the client's maximum is discarded, as if it
    /// had been sent [MQTT-3.1.2-24].
    pub(super) fn answer(
        &mut self,
        packet: &Packet<'_>,
        commit: Option<Arc<Commit>>,
        answers: &mut Vec<u8>,
    ) -> Result<(), End> {
        let Some(max) = self.device.lock_owned(self.epoch).map(|slot| slot.out.maximum_packet_size()) else {
            return Err(End::Superseded);
        };
        let Some(commit) = commit else {
            codec::encode_within(packet, self.inbound.protocol(), max, answers);
            return Ok(());
        };
        let mut bytes = Vec::new();
        codec::encode_within(packet, self.inbound.protocol(), max, &mut bytes);
        commit.done();
        self.send_when_safe(bytes, commit, answers)
    }
}

/// Completes a unit with the packet identifier of its QoS 2 message.
pub(super) fn close_unit(device: &Device, packet_id: u16, commit: Arc<Commit>) {
    let Some(stores) = device.shared.broker.stores() else { return };
    let queue = device.core().queue();
    // Also if another connection has taken the session meanwhile, and its client may have gone on.
    let kept = device.lock().out.keep_received(packet_id, Arc::clone(&commit));
    Closing::new(queue, packet_id, commit, !kept, Arc::clone(&stores.queues)).close_when_safe();
}

/// The v5 reason code of a refused filter.
pub(super) fn subscribe_code(error: SubscribeError) -> u8 {
    match error {
        SubscribeError::Invalid => reason::TOPIC_FILTER_INVALID,
        SubscribeError::NoLocalShared => reason::PROTOCOL_ERROR,
        SubscribeError::Quota => reason::QUOTA_EXCEEDED,
        SubscribeError::NotAuthorized => reason::NOT_AUTHORIZED,
        SubscribeError::WildcardUnavailable => reason::WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED,
        SubscribeError::SharedUnavailable => reason::SHARED_SUBSCRIPTIONS_NOT_SUPPORTED,
        SubscribeError::IdUnavailable => reason::SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED,
    }
}
