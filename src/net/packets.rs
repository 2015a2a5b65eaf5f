//! What each packet of a connected client does.

use std::sync::Arc;

use parking_lot::MutexGuard;
use tracing::info;

use super::{connection::Connection, device::Slot, durable::Closing, ending::End, shard::Work};
use crate::{
    broker::{Session, SubscribeError, SubscribeRequest, Target, Turn},
    codec::{self, Ack, AckKind, Frame, Packet, Publish, SubAck, Subscribe, Unsubscribe, reason},
    session::{Begin, PublishError, refusal},
    telemetry::{count, trace_clients},
    types::{Message, OpenUnit, Origin, OriginKind, QoS, Ticket, Timestamp},
};

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
    /// Handles every complete frame in `bytes`. Answers and deliveries are left in `work`.
    pub(super) fn handle_frames(&mut self, bytes: &[u8], work: &mut Work) -> Handled {
        let mut handled = Handled { used: 0, messages: 0, end: None };
        if !bytes.is_empty() {
            handled.end = self.handle_each(bytes, &mut handled, work).err();
        }
        handled
    }

    fn handle_each(&mut self, bytes: &[u8], handled: &mut Handled, work: &mut Work) -> Result<(), End> {
        let Work { turn, answers, now, .. } = work;
        let max = self.device.shared.limits.max_packet_size.0;
        let traced = self.is_traced();
        loop {
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
                Begin::Duplicate(ticket) => {
                    return self.acknowledge(
                        publish.qos,
                        publish.packet_id,
                        reason::SUCCESS,
                        ticket,
                        answers,
                    );
                }
                Begin::Exceeded => return Err(End::Protocol(reason::RECEIVE_MAXIMUM_EXCEEDED)),
            }
        }
        self.route(&publish, topic, now, turn, answers)
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
        let unit = stores.map(|stores| OpenUnit::new(&message, &*stores.queues));
        let published = self.device.shared.broker.publish(&message, turn);
        if publish.qos == QoS::AtMostOnce {
            return Ok(());
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
        let ticket = message.issued().cloned();
        self.close_unit(publish.packet_id, unit);
        if let Some(ticket) = &ticket {
            ticket.done();
        }
        self.acknowledge(publish.qos, publish.packet_id, code, ticket, answers)
    }

    /// Completes a unit with the packet identifier of its QoS 2 message.
    fn close_unit(&self, packet_id: u16, unit: Option<OpenUnit<'_, '_>>) {
        let Some(stores) = self.device.shared.broker.stores() else { return };
        let Some(ticket) = unit.and_then(OpenUnit::hand_over) else { return };
        let queue = self.device.core().queue();
        // Also if another connection has taken the session meanwhile, and its client may have gone on.
        let kept = self.device.lock().out.keep_received(packet_id, Arc::clone(&ticket));
        Closing::new(queue, packet_id, ticket, !kept, Arc::clone(&stores.queues)).close_when_safe();
    }

    fn refuse_publish(&mut self, publish: &Publish<'_>, code: u8, answers: &mut Vec<u8>) -> Result<(), End> {
        let Some(code) = refusal(self.inbound.protocol(), publish.qos, code) else {
            // 3.x has no negative acknowledgement [MQTT-3.3.5-2]; v5 QoS 0 none either.
            return Err(End::Protocol(code));
        };
        // In its turn, behind those that wait for the disk [MQTT-4.6.0-2], [MQTT-4.6.0-3].
        self.acknowledge(publish.qos, publish.packet_id, code, None, answers)
    }

    fn handle_other(
        &mut self,
        frame: &Frame<'_>,
        now: Timestamp,
        turn: &mut Turn,
        answers: &mut Vec<u8>,
    ) -> Result<(), End> {
        let protocol = self.inbound.protocol();
        let packet =
            codec::decode_from_client(frame, protocol).map_err(|error| End::Protocol(error.reason_code()))?;
        match packet {
            Packet::PubAck(ack) | Packet::PubRec(ack) | Packet::PubRel(ack) | Packet::PubComp(ack) => {
                self.handle_ack(frame.first, &ack, now, turn, answers)
            }
            Packet::Subscribe(subscribe) => self.handle_subscribe(&subscribe, now, answers),
            Packet::Unsubscribe(unsubscribe) => self.handle_unsubscribe(&unsubscribe, now, answers),
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
        let env = self.device.env(now);
        let mut slot = self.lock_open()?;
        let held = match first >> 4 {
            4 => {
                slot.out.handle_puback(ack.packet_id, ack.code, &env);
                None
            }
            5 => slot.out.handle_pubrec(ack.packet_id, ack.code, &env).map(|held| (AckKind::PubRel, held)),
            6 => slot.out.handle_pubrel(ack.packet_id, &env).map(|held| (AckKind::PubComp, held)),
            _ => {
                slot.out.handle_pubcomp(ack.packet_id, &env);
                None
            }
        };
        self.let_go(slot, turn);
        match held {
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
        for id in ids {
            slot.out.handle_puback(id, 0, &env);
            acks += 1;
        }
        self.let_go(slot, turn);
        count(|c| c.packets_in.add(acks as u64));
        Ok(acks)
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

    fn handle_subscribe(
        &mut self,
        subscribe: &Subscribe,
        now: Timestamp,
        answers: &mut Vec<u8>,
    ) -> Result<(), End> {
        let protocol = self.inbound.protocol();
        let ticket = self.device.is_durable().then(Ticket::new);
        let mut codes = Vec::with_capacity(subscribe.filters.len());
        for wanted in &subscribe.filters {
            let request = SubscribeRequest {
                filter: &wanted.filter,
                qos: wanted
                    .qos
                    .min(QoS::from_bits(self.device.shared.limits.max_qos).unwrap_or(QoS::ExactlyOnce)),
                no_local: wanted.no_local,
                retain_as_published: wanted.retain_as_published,
                retain_handling: wanted.retain_handling,
                id: subscribe.id,
                ticket: ticket.as_ref(),
            };
            let code = match self.subscribe_one(&request, now) {
                Ok(qos) => qos as u8,
                Err(SubscribeError::NoLocalShared) => return Err(End::Protocol(reason::PROTOCOL_ERROR)),
                Err(error) if protocol.is_v5() => subscribe_code(error),
                Err(_) => 0x80,
            };
            codes.push(code);
        }
        let suback = SubAck { packet_id: subscribe.packet_id, reason_string: None, user: Vec::new(), codes };
        self.answer(&Packet::SubAck(suback), ticket, answers)
    }

    fn subscribe_one(
        &mut self,
        request: &SubscribeRequest<'_>,
        now: Timestamp,
    ) -> Result<QoS, SubscribeError> {
        let limits = &self.device.shared.limits;
        let levels = request.filter.bytes().filter(|b| *b == b'/').count() + 1;
        if request.filter.len() > limits.max_topic_bytes || levels > limits.max_topic_levels {
            return Err(SubscribeError::Invalid);
        }
        if !self.identity.may_subscribe(request.filter) {
            return Err(SubscribeError::NotAuthorized);
        }
        let session: Arc<dyn Session> = Arc::clone(&self.device) as Arc<dyn Session>;
        let subscribed = self.device.shared.broker.subscribe(&session, request, now)?;
        if let Some(cursor) = subscribed.replay {
            // One for a filter, whatever is left of an earlier one: their number is bounded by that of subscriptions.
            self.end_replay(request.filter);
            self.rare().replays.push_back(cursor);
        }
        if subscribed.group_queue {
            // Taken up like a replay; nobody else would, until the next message.
            self.rare().group_queues = true;
        }
        Ok(subscribed.qos)
    }

    fn handle_unsubscribe(
        &mut self,
        unsubscribe: &Unsubscribe,
        now: Timestamp,
        answers: &mut Vec<u8>,
    ) -> Result<(), End> {
        let session: Arc<dyn Session> = Arc::clone(&self.device) as Arc<dyn Session>;
        let ticket = self.device.is_durable().then(Ticket::new);
        let mut codes = Vec::with_capacity(unsubscribe.filters.len());
        for filter in &unsubscribe.filters {
            let existed = self.device.shared.broker.unsubscribe(&session, filter, now, ticket.as_ref());
            // [MQTT-3.10.4-2]
            self.end_replay(filter);
            codes.push(if existed { reason::SUCCESS } else { reason::NO_SUBSCRIPTION_EXISTED });
        }
        let unsuback =
            SubAck { packet_id: unsubscribe.packet_id, reason_string: None, user: Vec::new(), codes };
        self.answer(&Packet::UnsubAck(unsuback), ticket, answers)
    }

    /// Appends an answer whose length depends on the request. One above the client's maximum is discarded, as if it
    /// had been sent [MQTT-3.1.2-24].
    fn answer(
        &mut self,
        packet: &Packet<'_>,
        ticket: Option<Arc<Ticket>>,
        answers: &mut Vec<u8>,
    ) -> Result<(), End> {
        let Some(max) = self.device.lock_owned(self.epoch).map(|slot| slot.out.maximum_packet_size()) else {
            return Err(End::Superseded);
        };
        let Some(ticket) = ticket else {
            codec::encode_within(packet, self.inbound.protocol(), max, answers);
            return Ok(());
        };
        let mut bytes = Vec::new();
        codec::encode_within(packet, self.inbound.protocol(), max, &mut bytes);
        ticket.done();
        self.send_when_safe(bytes, ticket, answers)
    }
}

fn subscribe_code(error: SubscribeError) -> u8 {
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
