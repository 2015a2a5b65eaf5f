//! The frames of a connected client, one after the other: the session says what each asks for, and it is done here.

use std::sync::Arc;

use broker::{Charge, CloseReason, MemoryKind, Routing, Session, SubscribeError, Target, Turn};
use codec::{DecodeError, Frame, Packet, reason};
use device::{Device, trace};
use gateway_core::{
    Commit, Effort, Message, Origin, OriginKind, QoS, Received, Timestamp, Unit, limits::Limits,
};
use session::{Effect, Enhanced, Env, Inbound, InboundOwner, Incoming, Outbound, Violation};
use telemetry::{ClientTrace, trace_clients};
use tracing::info;

use super::{Connection, ConnectionExtras, ending::End, fault::PacketFault, unfinished::Publishing};
use crate::{NetShared, local::PacketWork};
use auth::{ClientRights, ConnectionPermits};

/// PUBLISH packets of one read between two flushes: small ones would fill the queue of a receiver that keeps up.
const MESSAGES_PER_FLUSH: u32 = 256;

/// Result of handling a piece of input.
pub(crate) struct Handled {
    /// Bytes of complete frames.
    pub used: usize,
    /// PUBLISH packets among them.
    pub messages: u32,
    /// The connection must end.
    pub end: Option<End>,
}

impl Connection {
    /// Finishes the packet that was begun and handles the complete frames in `bytes`, all of them or until the account is
    /// spent; then `unread` is set. Answers and deliveries are left in `work`.
    pub(crate) fn handle_frames(&mut self, bytes: &[u8], work: &mut PacketWork) -> Handled {
        let mut handled = Handled { used: 0, messages: 0, end: None };
        if !bytes.is_empty() || self.is_unfinished() {
            self.device.core().set_handling(true);
            handled.end = self.handle_each(bytes, &mut handled, work).err();
            self.device.core().set_handling(false);
        }
        handled
    }

    fn handle_each(&mut self, bytes: &[u8], handled: &mut Handled, work: &mut PacketWork) -> Result<(), End> {
        let PacketWork { turn, answers, now, .. } = work;
        let max = self.device.broker().limits().max_packet_size.0;
        let traced = trace_clients().of(self.device.core().client_id().as_str());
        self.go_on(*now, turn, answers)?;
        let mut incoming = Incoming::default();
        loop {
            if turn.effort.is_spent() {
                self.unread = true;
                return Ok(());
            }
            debug_assert!(!self.is_unfinished(), "only a spent account leaves a packet unfinished");
            let rest = &bytes[handled.used..];
            if traced.is_none() {
                let (inbound, effort, _, mut owner) = self.split(*now, turn);
                let acks = inbound.handle_plain_pubacks(rest, effort, &mut owner)?;
                if acks > 0 {
                    handled.used += acks * codec::PLAIN_PUBACK;
                    continue;
                }
            }
            let frame = codec::frame(rest, max).map_err(|error| self.refuse(rest, error, max))?;
            let Some(frame) = frame else { return Ok(()) };
            if let Some(traced) = &traced {
                self.trace(traced, &frame);
            }
            handled.used += frame.len;
            handled.messages += u32::from(frame.is_publish());
            let (inbound, effort, mut permits, mut owner) = self.split(*now, turn);
            let effect = inbound.handle(&frame, &mut incoming, effort, &mut permits, &mut owner);
            let answered = answers.len();
            let result = match effect {
                Ok(Effect::Publish) => self.route(&incoming, *now, turn, answers),
                Ok(Effect::Later) => {
                    // The frame is kept, and handled again when the answer has come.
                    handled.used -= frame.len;
                    handled.messages -= 1;
                    self.unread = true;
                    return Ok(());
                }
                Ok(effect) => self.carry_out(effect, *now, turn, answers),
                Err(end) => Err(end),
            };
            if frame.is_publish() && handled.messages.is_multiple_of(MESSAGES_PER_FLUSH) {
                turn.flush();
            }
            if answers.len() > answered {
                session::counters::count(|c| c.packets_out.add(1));
            }
            result.inspect_err(|end| self.note_fault(*end, &frame))?;
        }
    }

    /// The end of a connection for a packet whose head is reason enough; kept for the log.
    #[cold]
    fn refuse(&mut self, rest: &[u8], error: DecodeError, max: usize) -> Violation {
        self.rare().fault = Some(Box::new(PacketFault::of_head(rest, &error, max)));
        Violation::from(error)
    }

    /// Keeps for the log for which packet the connection ends.
    #[cold]
    fn note_fault(&mut self, end: End, frame: &Frame<'_>) {
        if let End::Protocol(_) = end {
            let protocol = self.inbound.protocol();
            self.rare().fault = Some(Box::new(PacketFault::of_frame(frame, protocol)));
        }
    }

    /// Returns the inbound half of the session, and what it is lent: the client's rights, and the parts of the connection that
    /// it needs.
    #[inline]
    fn split<'a>(
        &'a mut self,
        now: Timestamp,
        turn: &'a mut Turn,
    ) -> (&'a mut Inbound, &'a mut Effort, ConnectionPermits<'a>, Owned<'a>) {
        let Self { shared, device, epoch, inbound, rights, rare, .. } = self;
        let permits = permits(shared, device, *epoch, rights, now);
        let owned = Owned { device, epoch: *epoch, rare, now, dirty: &mut turn.dirty };
        (inbound, &mut turn.effort, permits, owned)
    }

    /// Returns the rights of the client, at the time of arrival of its packet.
    pub(crate) fn permits(&mut self, now: Timestamp) -> ConnectionPermits<'_> {
        permits(&self.shared, &self.device, self.epoch, &mut self.rights, now)
    }

    /// Does what the session leaves to us, but for messages.
    fn carry_out(
        &mut self,
        effect: Effect,
        now: Timestamp,
        turn: &mut Turn,
        answers: &mut Vec<u8>,
    ) -> Result<(), End> {
        match effect {
            Effect::Publish | Effect::Done | Effect::Later => Ok(()),
            Effect::Subscribe(filters) => self.handle_subscribe(filters, now, turn, answers),
            Effect::Unsubscribe(filters) => self.handle_unsubscribe(filters, now, turn, answers),
            Effect::Reply(reply) => self.reply(reply, answers),
            Effect::Authenticate(presented) => self.authenticate(presented),
            Effect::Pong => {
                codec::encode_pingresp(answers);
                Ok(())
            }
            Effect::Disconnect { code, expiry } => Err(End::Disconnect { code, expiry }),
        }
    }

    /// Tells of a packet: the log its type and size, never content, and those who watch what they asked for.
    #[cold]
    fn trace(&self, traced: &ClientTrace, frame: &Frame<'_>) {
        trace::show(traced, frame, self.inbound.protocol(), true);
        if !traced.is_logged {
            return;
        }
        let core = self.device.core();
        let info = core.connection(self.epoch);
        let peer = info.as_ref().map(|info| tracing::field::display(info.peer));
        let listener = info.as_ref().map(|info| info.listener.as_str());
        info!(peer, client_id = %core.client_id(), listener, first = frame.first, bytes = frame.len, "packet received");
    }

    /// Routes a message and answers its PUBLISH; leaves it unfinished if it has very many receivers.
    fn route(
        &mut self,
        incoming: &Incoming<'_>,
        now: Timestamp,
        turn: &mut Turn,
        answers: &mut Vec<u8>,
    ) -> Result<(), End> {
        let publish = &incoming.publish;
        let core = self.device.core();
        let origin =
            Origin { kind: OriginKind::Device, client_id: Some(core.client_id()), slot: core.slot() };
        let topic = incoming.topic();
        let mut message = Message::new(topic, publish.payload, now, origin);
        message.qos = publish.qos;
        message.retain = publish.retain;
        message.properties = publish.properties.as_ref();
        message.expires = publish.expiry.map(|seconds| now.plus_secs(seconds));
        if publish.qos != QoS::AtMostOnce {
            message.durability = self.device.broker().durability(topic, self.durability);
        }
        // Its packet identifier goes to disk with it, if both outlive the process.
        message.unit = publish.qos == QoS::ExactlyOnce && self.device.is_durable();
        let stores = self.device.broker().stores().filter(|_| message.unit);
        let unit = stores.map(|stores| Unit::new(&message, &*stores.state));
        let published = match self.device.broker().publish_some(&message, turn) {
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
            drop(unit);
            return self.refuse_routed(publish.qos, publish.packet_id, answers);
        }
        let commit = message.issued().cloned();
        if let Some(unit) = unit.and_then(Unit::hand_over) {
            close_unit(&self.device, publish.packet_id, unit);
        }
        if let Some(commit) = &commit {
            commit.done();
        }
        let reply = self.inbound.routed(publish.qos, publish.packet_id, published.matched, commit);
        reply.map_or(Ok(()), |reply| self.reply(reply, answers))
    }

    /// Answers a PUBLISH whose message the broker has refused.
    fn refuse_routed(&mut self, qos: QoS, packet_id: u16, answers: &mut Vec<u8>) -> Result<(), End> {
        self.log_refusal("PUBLISH", reason::QUOTA_EXCEEDED);
        if qos == QoS::ExactlyOnce {
            // Also if another connection has the session now: this message was not routed.
            self.device.lock().out.abort_received(packet_id);
        }
        let reply = self.inbound.refused(qos, packet_id, reason::QUOTA_EXCEEDED)?;
        reply.map_or(Ok(()), |reply| self.reply(reply, answers))
    }

    /// Appends an answer whose length depends on the request. One above the client's maximum is discarded, as if it
    /// had been sent [MQTT-3.1.2-24].
    pub(crate) fn answer(
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

#[inline]
fn permits<'a>(
    shared: &'a NetShared,
    device: &'a Device,
    epoch: u32,
    rights: &'a mut ClientRights,
    now: Timestamp,
) -> ConnectionPermits<'a> {
    let NetShared { authority, broker, .. } = shared;
    ConnectionPermits { rights, authority: authority.as_ref(), broker, core: device.core(), epoch, now }
}

/// A connection as its session's inbound half sees it.
struct Owned<'a> {
    device: &'a Arc<Device>,
    epoch: u32,
    rare: &'a mut Option<Box<ConnectionExtras>>,
    now: Timestamp,
    dirty: &'a mut Vec<Arc<dyn Target>>,
}

impl InboundOwner for Owned<'_> {
    type End = End;

    fn limits(&self) -> &Limits {
        self.device.broker().limits()
    }

    fn now(&self) -> Timestamp {
        self.now
    }

    fn enhanced(&mut self) -> Option<&mut Enhanced> {
        Some(&mut self.rare.as_mut()?.reauthentication.as_mut()?.enhanced)
    }

    fn hold_aliases(&mut self, bytes: usize) -> Result<(), End> {
        let charged = self.rare.as_ref().and_then(|rare| rare.aliases.as_ref()).map_or(0, Charge::bytes);
        if bytes == charged {
            return Ok(());
        }
        let aliases = &mut self.rare.get_or_insert_with(Box::default).aliases;
        let account = self.device.broker().account();
        if aliases.get_or_insert_with(|| Charge::new(account, MemoryKind::Aliases)).set(bytes) {
            return Ok(());
        }
        broker::counters::count(|c| c.memory_aliases.add(1));
        Err(End::Close(CloseReason::Memory))
    }

    #[inline]
    fn outbound<R>(&mut self, act: impl FnOnce(&mut Outbound, &Env<'_>) -> R) -> Result<R, End> {
        let Some(mut slot) = self.device.lock_owned(self.epoch) else { return Err(End::Superseded) };
        // The next connection has looked at what it must wait for: nothing may be added to that.
        if let Some(close) = slot.link.as_ref().and_then(|link| link.close) {
            return Err(End::Close(close));
        }
        let result = act(&mut slot.out, &self.device.env(self.now));
        // Messages that acknowledgements made room for are sent at the end of the turn.
        let dirty = slot.mark_dirty();
        drop(slot);
        if dirty {
            self.dirty.push(Arc::clone(self.device) as Arc<dyn Target>);
        }
        Ok(result)
    }
}

impl From<Violation> for End {
    fn from(Violation(code): Violation) -> Self {
        Self::Protocol(code)
    }
}

/// Completes a unit with the packet identifier of its QoS 2 message.
pub(crate) fn close_unit(device: &Device, packet_id: u16, commit: Arc<Commit>) {
    let Some(stores) = device.broker().stores() else { return };
    let queue = device.core().queue();
    // Also if another connection has taken the session meanwhile, and its client may have gone on.
    let kept = device.lock().out.keep_received(packet_id, Arc::clone(&commit));
    Received { queue, packet_id, released: !kept }.close(commit, Arc::clone(&stores.state) as _);
}

/// The v5 reason code of a refused filter.
pub(crate) fn subscribe_code(error: SubscribeError) -> u8 {
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
