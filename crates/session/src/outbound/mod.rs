//! The half of a session that outlives its connection: what we send, and which QoS 2 messages we have already received.
//!
//! A message that is offered goes into the out-buffer if it can go now. Else it waits, in memory ([`pending`]) or on disk
//! ([`durable`]), until [`Outbound::pump`] finds room for it. At QoS 1 and 2 it stays in the window ([`inflight`]) until the
//! client has acknowledged it. These parts know nothing of the whole, but for two that have methods of [`Outbound`], since
//! they are about more than one part: `durable`, which only a persistent session needs, and [`queue`].

mod durable;
mod inflight;
mod pending;
mod queue;
mod receipts;
mod received;

use std::{collections::VecDeque, num::NonZeroU32, sync::Arc};

use codec::{AckKind, PublishFrame, encode_ack, reason};
use gateway_core::{
    Budget, Commit, DropReason, Message, Offer, Outcome, Protocol, QoS, Receipt, SharedMessage, Timestamp,
    limits::OverflowPolicy, part_of_qos_0,
};

use self::{
    durable::Backlog,
    inflight::{Inflight, InflightStage, Released, Unacked, id},
    pending::{Awaited, PendingDelivery, PendingQueue},
    receipts::{ReceiptMark, dropped},
    received::ReceivedIds,
};
use crate::{
    Env, Gate, Reply,
    alias::{AliasUse, OutboundAliases},
    buffers::{recycle, take_buffer},
    counters::count,
    reservation::{FREE, SessionReservation},
};

pub use durable::{BacklogLoad, StoredQueue};
pub(crate) use inflight::WrongStep;
pub(crate) use received::Qos2Begin;

/// Bytes that may wait in the out-buffer; beyond it deliveries wait as messages.
pub const OUT_BUFFER: usize = 64 << 10;

/// Bytes that a session under a [`Gate`] has beside the gate, which others have only when something waits for them.
pub const GATED: usize = size_of::<SessionExtras>();

/// Parameters of a new connection.
#[derive(Debug, Clone, Copy)]
pub struct LinkParams {
    /// Protocol level.
    pub protocol: Protocol,
    /// Un-acknowledged messages that the client takes (v5 Receive Maximum).
    pub receive_maximum: u16,
    /// Largest packet that the client takes.
    pub maximum_packet_size: u32,
    /// Topic aliases that the client takes.
    pub topic_alias_maximum: u16,
}

/// State that few sessions need, made when first used.
#[derive(Debug, Default)]
struct SessionExtras {
    inflight: Inflight,
    pending: PendingQueue,
    received: ReceivedIds,
    backlog: Option<Box<Backlog>>,
    aliases: Option<OutboundAliases>,
    /// Bytes of the budget that messages in flight and aliases hold.
    reservation: SessionReservation,
    marks: VecDeque<ReceiptMark>,
    dropped: u64,
    /// The queue is full, and the policy is to end the connection then.
    overflowed: bool,
    /// Bytes beyond which deliveries wait as messages, if fewer than [`OUT_BUFFER`].
    room: Option<NonZeroU32>,
    /// Gate that looks at each message, if there is one.
    gate: Option<Box<dyn Gate>>,
}

/// See the module.
#[derive(Debug)]
pub struct Outbound {
    out: Vec<u8>,
    rare: Option<Box<SessionExtras>>,
    /// Bytes that left the out-buffer on this connection.
    taken: u64,
    maximum_packet_size: u32,
    /// Most messages in flight, at least 1; 0 while there is no connection.
    window: u16,
    protocol: Protocol,
    ended: bool,
}

/// Connections of the session, one after the other.
impl Outbound {
    /// A session that has no connection yet.
    pub fn new() -> Self {
        Self {
            out: Vec::new(),
            rare: None,
            taken: 0,
            maximum_packet_size: u32::MAX,
            window: 0,
            protocol: Protocol::V4,
            ended: false,
        }
    }

    /// A connection begins: its first bytes are `connack`, then what earlier connections left un-acknowledged
    /// [MQTT-4.4.0-1], then what waits.
    pub fn attach(&mut self, link: LinkParams, connack: &[u8], env: &Env<'_>) {
        if self.is_online() {
            self.detach(env);
        }
        self.protocol = link.protocol;
        self.window = link.receive_maximum.min(env.limits.max_inflight).max(1);
        self.maximum_packet_size = link.maximum_packet_size;
        self.append(connack);
        if let Some(rare) = &mut self.rare {
            rare.aliases = None;
        }
        if link.protocol.is_v5() && link.topic_alias_maximum > 0 {
            self.rare().aliases = Some(OutboundAliases::new(link.topic_alias_maximum));
        }
        self.pump(env);
    }

    /// The connection ended: unsent bytes are lost, QoS 1 and 2 will be sent again.
    pub fn detach(&mut self, env: &Env<'_>) {
        self.window = 0;
        recycle(std::mem::take(&mut self.out));
        self.taken = 0;
        if let Some(rare) = &mut self.rare {
            rare.inflight.rewind();
            rare.aliases = None;
            rare.pending.limit(env.waits_until(env.now));
            // QoS 1 and 2 are not lost: they get new marks when they are sent again.
            for mark in rare.marks.drain(..).filter(|mark| mark.id == 0) {
                dropped(Some(&mark.receipt), DropReason::ConnectionLost);
            }
        }
        self.offload(env);
        self.settle(env.budget);
    }

    /// Returns whether there is a connection.
    pub fn is_online(&self) -> bool {
        self.window != 0
    }

    /// Returns whether [`Self::end`] was called.
    pub fn is_ended(&self) -> bool {
        self.ended
    }

    /// Protocol level of the current or last connection.
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// Largest packet that the client takes.
    pub fn maximum_packet_size(&self) -> usize {
        usize::try_from(self.maximum_packet_size).unwrap_or(usize::MAX)
    }

    /// Has each message looked at before it is delivered, or no longer; returns who did that so far.
    pub fn set_gate(&mut self, gate: Option<Box<dyn Gate>>) -> Option<Box<dyn Gate>> {
        if gate.is_none() && self.rare.is_none() {
            return None;
        }
        std::mem::replace(&mut self.rare().gate, gate)
    }

    /// Returns the gate that looks at each message, if there is one.
    pub fn gate(&mut self) -> Option<&mut (dyn Gate + 'static)> {
        self.rare.as_mut()?.gate.as_deref_mut()
    }

    /// Lets fewer bytes than [`OUT_BUFFER`] wait in the out-buffer: beyond `room` deliveries wait as messages. One always
    /// has room in an empty buffer.
    pub fn set_room(&mut self, room: Option<NonZeroU32>) {
        if room.is_some() || self.rare.is_some() {
            self.rare().room = room;
        }
    }
}

/// Messages for the client.
impl Outbound {
    /// Takes one message: into the out-buffer if it can go now, else into the queue, else drops it.
    pub fn offer(&mut self, message: &Message<'_>, offer: Offer<'_>, env: &Env<'_>) -> Outcome {
        if self.ended {
            DropReason::SessionEnded.count(1);
            return Outcome::Dropped(DropReason::SessionEnded);
        }
        let qos = offer.qos.min(message.qos);
        if let Some(rare) = &mut self.rare
            && let Some(gate) = &mut rare.gate
            && !message.direct
            && !gate.admits(message.topic)
        {
            count(|c| c.deliveries_withheld.add(1));
            // Another member of a group may have it.
            let shared = offer.group != 0;
            return if shared { Outcome::Dropped(DropReason::NotAuthorized) } else { Outcome::Ignored };
        }
        if let Some(disk) = env.disk
            && (qos != QoS::AtMostOnce || env.limits.offline_qos0 && offer.queue_offline && !self.is_online())
            && (self.is_online() || offer.queue_offline)
        {
            return self.offer_durable(message, qos, offer, env, disk);
        }
        if self.is_online() {
            if qos == QoS::AtMostOnce {
                if self.out.len() < OUT_BUFFER
                    && self
                        .rare
                        .as_ref()
                        .is_none_or(|rare| !rare.pending.has_qos0() && self.out.len() < rare.room())
                {
                    let taken = self.send_qos0(message, offer, env.now);
                    if self.rare.as_ref().is_some_and(|rare| rare.aliases.is_some()) {
                        self.settle(env.budget);
                    }
                    return taken;
                }
            } else if self.can_send_now() && self.affords(message.cost(), env) {
                return self.send_acknowledged(message, qos, offer, env.now);
            }
        } else if !offer.queue_offline || (qos == QoS::AtMostOnce && !env.limits.offline_qos0) {
            DropReason::Offline.count(1);
            if let Some(rare) = &mut self.rare {
                rare.dropped += 1;
            }
            return Outcome::Dropped(DropReason::Offline);
        }
        self.enqueue(message, qos, offer, env)
    }

    fn send_qos0(&mut self, message: &Message<'_>, offer: Offer<'_>, now: Timestamp) -> Outcome {
        let frame = OutgoingPublish {
            message,
            qos: QoS::AtMostOnce,
            retain: offer.retain,
            ids: offer.ids,
            packet_id: 0,
            dup: false,
        };
        if !self.append_frame(&frame, now) {
            return self.too_large();
        }
        count(|c| c.messages_out_0.add(1));
        if let Some(receipt) = message.receipt {
            self.mark(receipt, 0);
        }
        Outcome::Sent
    }

    /// Sends a new message of a session that is not persistent. The caller has checked `can_send_now`.
    fn send_acknowledged(
        &mut self,
        message: &Message<'_>,
        qos: QoS,
        offer: Offer<'_>,
        now: Timestamp,
    ) -> Outcome {
        let place = self.rare().inflight.next_place();
        if !self.append_publish(message, qos, offer, place, now) {
            return self.too_large();
        }
        self.rare().inflight.push(place, PendingDelivery::keep(message, qos, offer));
        Outcome::Sent
    }

    /// Appends a QoS 1 or 2 message for `place`; false if it is too large for the client.
    fn append_publish(
        &mut self,
        message: &Message<'_>,
        qos: QoS,
        offer: Offer<'_>,
        place: u64,
        now: Timestamp,
    ) -> bool {
        let packet_id = id(place);
        let frame =
            OutgoingPublish { message, qos, retain: offer.retain, ids: offer.ids, packet_id, dup: false };
        if !self.append_frame(&frame, now) {
            return false;
        }
        count_sent(qos);
        if let Some(receipt) = message.receipt {
            self.mark(receipt, packet_id);
        }
        true
    }

    /// Lets a message wait in memory, if the limits have room for it.
    fn enqueue(&mut self, message: &Message<'_>, qos: QoS, offer: Offer<'_>, env: &Env<'_>) -> Outcome {
        let online = self.is_online();
        let (most, most_bytes) = if online {
            (env.limits.mailbox_messages, env.limits.mailbox_bytes.0)
        } else {
            (env.limits.offline_messages, env.limits.offline_bytes.0)
        };
        // The last room is for messages that somebody waits for.
        let (most, most_bytes) = match qos {
            QoS::AtMostOnce => (part_of_qos_0(most), part_of_qos_0(most_bytes)),
            _ => (most, most_bytes),
        };
        let rare = self.rare();
        let cost = message.cost();
        while rare.pending.len() >= most || rare.pending.bytes() + cost > most_bytes {
            let full = rare.note_dropped(DropReason::QueueFull);
            if qos == QoS::AtMostOnce || env.limits.overflow == OverflowPolicy::DropNewest {
                return full;
            }
            if env.limits.overflow == OverflowPolicy::Disconnect && online {
                rare.overflowed = true;
                return full;
            }
            let Some(oldest) = rare.pending.pop() else { return full };
            env.budget.release(oldest.message.cost());
            dropped(oldest.receipt(), DropReason::QueueFull);
            oldest.on_disk.remove(oldest.place, env);
        }
        if !env.budget.charge(rare.held(), cost) {
            return rare.note_dropped(DropReason::Memory);
        }
        let mut delivery = PendingDelivery::keep(message, qos, offer);
        if online {
            rare.pending.push(delivery);
            return Outcome::Sent;
        }
        // Nobody waits for it, even if it is sent before deliveries that somebody waits for.
        delivery.awaited = Awaited::No;
        delivery.until = env.waits_until(message.received);
        rare.pending.push(delivery);
        Outcome::Queued
    }

    /// Returns whether a new QoS 1 or 2 message may go into the out-buffer, as far as buffer and window are concerned.
    fn can_send_now(&self) -> bool {
        self.out.len() < OUT_BUFFER
            && self
                .rare
                .as_ref()
                .is_none_or(|rare| self.out.len() < rare.room() && rare.can_send(self.window))
    }

    /// Returns whether a paced replay may offer more now without queueing.
    pub fn has_room(&self) -> bool {
        self.is_online()
            && self.out.len() < OUT_BUFFER / 2
            && self.rare.as_ref().is_none_or(|rare| {
                self.out.len() < rare.room().div_ceil(2)
                    && rare.can_send(self.window)
                    && rare.backlog.as_ref().is_none_or(|backlog| backlog.has_room())
            })
    }

    /// Returns whether [`Self::pump`] may find a message to send.
    pub fn has_waiting(&self) -> bool {
        self.rare.as_ref().is_some_and(|rare| !rare.pending.is_empty() || !rare.inflight.is_resent())
    }

    /// Fills the out-buffer from what must be sent again and what waits. True if bytes were added.
    pub fn pump(&mut self, env: &Env<'_>) -> bool {
        if !self.is_online() || self.rare.is_none() {
            return false;
        }
        let before = self.out.len();
        let room = self.rare.as_ref().map_or(OUT_BUFFER, |rare| rare.room());
        while self.out.len() < room && self.resend_one(env) {}
        while self.out.len() < room && self.send_one_pending(env) {}
        self.settle(env.budget);
        self.out.len() != before
    }

    /// Sends the next packet again that an earlier connection has sent. False if there is none, or no room in the window.
    fn resend_one(&mut self, env: &Env<'_>) -> bool {
        let window = usize::from(self.window);
        let Some(mut rare) = self.rare.take() else { return false };
        let Some((id, place, entry)) = rare.inflight.next_resend(window) else {
            self.rare = Some(rare);
            return false;
        };
        let mut fits = true;
        match &entry.stage {
            InflightStage::Publish(delivery)
                if SessionExtras::withholds(&mut rare.gate, &delivery.message) =>
            {
                DropReason::NotAuthorized.count(1);
                rare.dropped += 1;
                dropped(delivery.receipt(), DropReason::NotAuthorized);
                if delivery.qos == QoS::ExactlyOnce {
                    // The client may have it from before, and then keeps its identifier until PUBREL: the handshake goes
                    // on as if PUBREC had come. Should the disk not know that before a crash, the next process decides
                    // about the message again.
                    let released = Released { receipt: None, ..Released::of(delivery, place, env) };
                    rare.inflight.release(id, released);
                } else {
                    delivery.on_disk.remove(place, env);
                    rare.inflight.remove(id);
                }
                self.rare = Some(rare);
                return true;
            }
            InflightStage::Release(_) => {
                let protocol = self.protocol;
                encode_ack(AckKind::PubRel, id, reason::SUCCESS, protocol, self.out());
            }
            InflightStage::Publish(delivery) => {
                let message = delivery.message.borrow();
                let frame = OutgoingPublish {
                    message: &message,
                    qos: delivery.qos,
                    retain: delivery.retain,
                    ids: delivery.ids.as_deref().unwrap_or_default(),
                    packet_id: id,
                    // [MQTT-3.3.1-1]
                    dup: true,
                };
                let mut aliases = rare.aliases.take();
                fits = self.append_with(&frame, env.now, aliases.as_mut());
                rare.aliases = aliases;
                if fits {
                    count_sent(delivery.qos);
                    if let Some(receipt) = delivery.receipt().filter(|_| delivery.awaited == Awaited::Unsent)
                    {
                        let end = self.taken + self.out.len() as u64;
                        rare.marks.push_back(ReceiptMark { end, id, receipt: Arc::clone(receipt) });
                    }
                } else {
                    DropReason::TooLarge.count(1);
                    dropped(delivery.receipt(), DropReason::TooLarge);
                    delivery.on_disk.remove(place, env);
                }
            }
        }
        if fits {
            rare.inflight.advance();
        } else {
            rare.inflight.remove(id);
        }
        self.rare = Some(rare);
        true
    }

    /// Sends, or drops, the message that has waited longest in memory. False if there is none, or no room in the window.
    fn send_one_pending(&mut self, env: &Env<'_>) -> bool {
        let window = usize::from(self.window);
        let Some(rare) = &mut self.rare else { return false };
        let Some(front) = rare.pending.front() else { return false };
        let place = match env.disk {
            Some(_) => front.place,
            None => rare.inflight.next_place(),
        };
        let over = if front.is_expired(env.now) {
            Some(DropReason::Expired)
        } else {
            SessionExtras::withholds(&mut rare.gate, &front.message).then_some(DropReason::NotAuthorized)
        };
        if over.is_none()
            && front.qos != QoS::AtMostOnce
            && !(rare.inflight.is_resent() && rare.inflight.has_room(window, place))
        {
            return false;
        }
        let Some(delivery) = rare.pending.pop() else { return false };
        env.budget.release(delivery.message.cost());
        if let Some(reason) = over {
            rare.note_dropped(reason);
            dropped(delivery.receipt(), reason);
            delivery.on_disk.remove(place, env);
            return true;
        }
        let mut message = delivery.message.borrow();
        message.receipt = delivery.receipt();
        let offer = delivery.offer();
        let taken = match delivery.qos {
            QoS::AtMostOnce => self.send_qos0(&message, offer, env.now),
            qos if self.append_publish(&message, qos, offer, place, env.now) => Outcome::Sent,
            _ => self.too_large(),
        };
        drop(message);
        if let Outcome::Dropped(reason) = taken {
            dropped(delivery.receipt(), reason);
        }
        if taken == Outcome::Sent && delivery.qos != QoS::AtMostOnce {
            self.rare().inflight.push(place, delivery);
        } else {
            delivery.on_disk.remove(place, env);
        }
        true
    }

    /// A packet above the client's maximum is dropped as if sent [MQTT-3.1.2-25].
    fn too_large(&mut self) -> Outcome {
        self.rare().note_dropped(DropReason::TooLarge)
    }

    fn mark(&mut self, receipt: &Arc<Receipt>, id: u16) {
        let end = self.taken + self.out.len() as u64;
        self.rare().marks.push_back(ReceiptMark { end, id, receipt: Arc::clone(receipt) });
    }

    fn append_frame(&mut self, frame: &OutgoingPublish<'_, '_>, now: Timestamp) -> bool {
        let has_aliases = self.rare.as_ref().is_some_and(|rare| rare.aliases.is_some());
        if !has_aliases {
            return self.append_with(frame, now, None);
        }
        let mut aliases = self.rare().aliases.take();
        let appended = self.append_with(frame, now, aliases.as_mut());
        self.rare().aliases = aliases;
        appended
    }

    fn append_with(
        &mut self,
        frame: &OutgoingPublish<'_, '_>,
        now: Timestamp,
        aliases: Option<&mut OutboundAliases>,
    ) -> bool {
        let message = frame.message;
        let v5 = self.protocol.is_v5();
        let used = aliases.as_ref().map_or(AliasUse::None, |aliases| aliases.choose(message.topic));
        let (topic, alias) = match used {
            AliasUse::None => (message.topic, None),
            AliasUse::Set(alias) => (message.topic, Some(alias)),
            AliasUse::Known(alias) => ("", Some(alias)),
        };
        let encoded = PublishFrame {
            protocol: self.protocol,
            topic,
            payload: message.payload,
            qos: frame.qos,
            dup: frame.dup,
            retain: frame.retain,
            packet_id: frame.packet_id,
            alias,
            expiry: if v5 { message.expires.map(|at| now.secs_until(at)) } else { None },
            ids: if v5 { frame.ids } else { &[] },
            properties: if v5 { message.properties.map(|properties| &**properties) } else { None },
        };
        if self.maximum_packet_size != u32::MAX && encoded.encoded_len() > self.maximum_packet_size as usize {
            return false;
        }
        encoded.encode(self.out());
        count(|c| {
            c.packets_out.add(1);
            let bytes = match frame.qos {
                QoS::AtMostOnce => &c.payload_bytes_out_0,
                QoS::AtLeastOnce => &c.payload_bytes_out_1,
                QoS::ExactlyOnce => &c.payload_bytes_out_2,
            };
            bytes.add(message.payload.len() as u64);
        });
        if let (Some(aliases), AliasUse::Set(alias)) = (aliases, used) {
            aliases.assign(message.topic, alias);
        }
        true
    }
}

/// The handshakes of QoS 1 and 2, both directions.
impl Outbound {
    /// PUBACK [MQTT-4.3.2-5]. False if the id is not in flight.
    pub(crate) fn handle_puback(&mut self, id: u16, code: u8, env: &Env<'_>) -> Result<bool, WrongStep> {
        let Some(rare) = &mut self.rare else { return Ok(false) };
        let known = rare.inflight.handle_puback(id, code, env)?;
        if known {
            self.pump(env);
        }
        Ok(known)
    }

    /// Several PUBACK packets, all with success. What they make room for is sent once.
    pub(crate) fn handle_pubacks(
        &mut self,
        mut ids: impl Iterator<Item = u16>,
        env: &Env<'_>,
    ) -> Result<(), WrongStep> {
        let Some(rare) = &mut self.rare else {
            // None of them is in flight.
            ids.for_each(drop);
            return Ok(());
        };
        let result = ids.try_for_each(|id| rare.inflight.handle_puback(id, reason::SUCCESS, env).map(drop));
        self.pump(env);
        result
    }

    /// PUBREC. The caller sends the PUBREL, if one is returned, after the answers before it, also where it waits for nothing:
    /// PUBRELs keep the order of their PUBRECs [MQTT-4.6.0-4].
    pub(crate) fn handle_pubrec(
        &mut self,
        id: u16,
        code: u8,
        env: &Env<'_>,
    ) -> Result<Option<Reply>, WrongStep> {
        let mut nothing = Inflight::default();
        let inflight = self.rare.as_mut().map_or(&mut nothing, |rare| &mut rare.inflight);
        let reply = inflight.handle_pubrec(id, code, env)?;
        if reply.is_none() {
            // The delivery is over, and another may have its place.
            self.pump(env);
        }
        self.settle(env.budget);
        Ok(reply)
    }

    /// PUBCOMP. False if the id is not in flight.
    pub(crate) fn handle_pubcomp(&mut self, id: u16, env: &Env<'_>) -> Result<bool, WrongStep> {
        let Some(rare) = &mut self.rare else { return Ok(false) };
        let known = rare.inflight.handle_pubcomp(id, env)?;
        if known {
            self.pump(env);
        }
        Ok(known)
    }

    /// An inbound QoS 2 PUBLISH arrives.
    pub(crate) fn begin_received(&mut self, id: u16, receive_maximum: u16) -> Qos2Begin {
        self.rare().received.begin(id, receive_maximum)
    }

    /// Returns the commit that the answer to the PUBLISH of `id` waits for. The outer `None`: no such PUBLISH is open.
    pub(crate) fn received_before(&self, id: u16) -> Option<Option<Arc<Commit>>> {
        self.rare.as_ref()?.received.commit(id)
    }

    /// The PUBLISH of `id` has parts on disk, as the id itself: it is remembered until PUBREL, also by the next process.
    /// False if it was forgotten meanwhile: the disk must forget it too.
    #[must_use]
    pub fn keep_received(&mut self, id: u16, commit: Arc<Commit>) -> bool {
        self.rare.as_mut().is_some_and(|rare| rare.received.keep(id, commit))
    }

    /// The PUBLISH was refused in its PUBREC: the id is free again [MQTT-4.3.3-9].
    pub fn abort_received(&mut self, id: u16) {
        if let Some(rare) = &mut self.rare {
            rare.received.abort(id);
        }
    }

    /// PUBREL: PUBCOMP is to follow.
    pub(crate) fn handle_pubrel(&mut self, id: u16, env: &Env<'_>) -> Reply {
        self.rare().received.release(id, env)
    }
}

/// The out-buffer.
impl Outbound {
    /// Appends a control packet, however full the buffer is: control packets only answer the peer's own packets.
    pub fn append(&mut self, bytes: &[u8]) {
        self.out().extend_from_slice(bytes);
    }

    /// The out-buffer, made if it is not there.
    fn out(&mut self) -> &mut Vec<u8> {
        if self.out.capacity() == 0 {
            self.out = take_buffer();
        }
        &mut self.out
    }

    /// Bytes in the out-buffer.
    pub fn buffered(&self) -> usize {
        self.out.len()
    }

    /// Bytes that were taken for writing on this connection.
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// Takes the out-buffer for writing; it begins and ends at frame boundaries.
    pub fn take_out(&mut self) -> Vec<u8> {
        self.taken += self.out.len() as u64;
        std::mem::take(&mut self.out)
    }

    /// The socket has taken everything but the last `unsent` bytes.
    pub fn note_written(&mut self, unsent: usize) {
        let Some(rare) = &mut self.rare else { return };
        let written = self.taken.saturating_sub(unsent as u64);
        while let Some(ReceiptMark { id, receipt, .. }) = rare.marks.pop_front_if(|mark| mark.end <= written)
        {
            receipt.update(|state| {
                state.sent += 1;
                state.acked += u32::from(id == 0);
            });
            if let Some((_, Unacked { stage: InflightStage::Publish(delivery), .. })) =
                rare.inflight.get_mut(id)
                && delivery.receipt().is_some_and(|awaited| Arc::ptr_eq(awaited, &receipt))
            {
                delivery.awaited = Awaited::Sent;
            }
        }
    }
}

/// Memory.
impl Outbound {
    fn rare(&mut self) -> &mut SessionExtras {
        self.rare.get_or_insert_with(Box::default)
    }

    /// Bytes on the budget.
    pub fn held(&self) -> usize {
        self.rare.as_ref().map_or(0, |rare| rare.held())
    }

    /// Returns whether the budget has room for `cost` more bytes in flight.
    fn affords(&mut self, cost: usize, env: &Env<'_>) -> bool {
        let Some(rare) = &mut self.rare else { return cost <= FREE || self.affords_first(cost, env) };
        let needed = rare.inflight.bytes() + rare.alias_bytes() + cost;
        rare.reservation.covers(needed, rare.pending.bytes(), env.budget)
    }

    #[cold]
    fn affords_first(&mut self, cost: usize, env: &Env<'_>) -> bool {
        self.rare().reservation.covers(cost, 0, env.budget)
    }

    /// Brings the budget up to what is in flight.
    fn settle(&mut self, budget: &dyn Budget) {
        if let Some(rare) = &mut self.rare {
            rare.settle(budget);
        }
    }
}

impl SessionExtras {
    /// Counts a message that is dropped.
    fn note_dropped(&mut self, reason: DropReason) -> Outcome {
        self.dropped += 1;
        reason.count(1);
        Outcome::Dropped(reason)
    }

    /// Returns whether the gate, if there is one, withholds a message that was taken before.
    fn withholds(gate: &mut Option<Box<dyn Gate>>, message: &SharedMessage) -> bool {
        !message.direct && gate.as_mut().is_some_and(|gate| !gate.admits(&message.topic))
    }

    /// Bytes that may wait in the out-buffer.
    fn room(&self) -> usize {
        self.room.map_or(OUT_BUFFER, |room| room.get() as usize)
    }

    /// Returns whether a new QoS 1 or 2 message may be sent before anything else.
    fn can_send(&self, window: u16) -> bool {
        self.pending.is_empty()
            && self.inflight.is_resent()
            && self.inflight.has_room(window.into(), self.inflight.next_place())
    }

    fn alias_bytes(&self) -> usize {
        self.aliases.as_ref().map_or(0, OutboundAliases::bytes)
    }

    /// All bytes charged to the session, which decide how much more it may have.
    fn held(&self) -> usize {
        self.pending.bytes() + self.reservation.charged()
    }

    /// Adjusts the charge for what is held besides the queue.
    fn settle(&mut self, budget: &dyn Budget) {
        self.reservation.settle(self.inflight.bytes() + self.alias_bytes(), budget);
    }
}

impl Default for Outbound {
    fn default() -> Self {
        Self::new()
    }
}

struct OutgoingPublish<'m, 'a> {
    message: &'m Message<'a>,
    qos: QoS,
    retain: bool,
    ids: &'m [u32],
    packet_id: u16,
    dup: bool,
}

fn count_sent(qos: QoS) {
    count(|c| match qos {
        QoS::AtMostOnce => c.messages_out_0.add(1),
        QoS::AtLeastOnce => c.messages_out_1.add(1),
        QoS::ExactlyOnce => c.messages_out_2.add(1),
    });
}
