//! The half of a session that outlives its connection: what we send, and which QoS 2 messages we have already received.

use std::{
    collections::{HashMap, VecDeque},
    num::NonZeroU32,
    sync::Arc,
};

use codec::{AckKind, encode_ack};
use gateway_core::{
    Budget, Commit, DropReason, Message, Offer, Outcome, Protocol, QoS, QueueOp, Receipt, SharedMessage,
    Tail, Timestamp, Yielded,
    limits::{Limits, OverflowPolicy},
};

use super::{
    alias::OutboundAliases,
    backlog::Backlog,
    buffers::{recycle, take_buffer},
    durable::{Disk, waits_until},
    gate::Gate,
    inflight::{Inflight, InflightStage, Unacked},
    ledger::{self, Ledger},
    pending::{Awaited, PendingQueue},
};
use crate::counters::count;

/// Bytes that may wait in the out-buffer; beyond it deliveries wait as messages.
pub const OUT_BUFFER: usize = 64 << 10;

/// Bytes that a session under a [`Gate`] has beside the gate, which others have only when something waits for them.
pub const GATED: usize = size_of::<SessionExtras>();

/// Environment of a call: bounds, clock, budget and disk.
pub struct Env<'a> {
    /// Bounds.
    pub limits: &'a Limits,
    /// Now.
    pub now: Timestamp,
    /// Budget.
    pub budget: &'a dyn Budget,
    /// Destination of the durable state of a persistent session; `None` for other sessions.
    pub disk: Option<Disk<'a>>,
}

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

/// Answer to an inbound QoS 2 PUBLISH.
#[derive(Debug, Clone)]
pub(crate) enum Qos2Begin {
    /// First time: route it, then PUBREC.
    New,
    /// Seen: PUBREC only [MQTT-4.3.3-10], once the commit is done, if there is one.
    Duplicate(Option<Arc<Commit>>),
    /// More than Receive Maximum at once (0x93) [MQTT-3.3.4-7].
    Exceeded,
}

/// State that few sessions need, made when first used.
#[derive(Debug, Default)]
pub(super) struct SessionExtras {
    pub(super) inflight: Inflight,
    pub(super) pending: PendingQueue,
    /// Inbound QoS 2 ids, each with a commit if it is on disk or on its way there.
    pub(super) received: HashMap<u16, Option<Arc<Commit>>, ahash::RandomState>,
    /// Inbound QoS 2 ids that are being removed from disk, one entry for each.
    pub(super) forgetting: Vec<(u16, Arc<Commit>)>,
    pub(super) backlog: Option<Box<Backlog>>,
    pub(super) aliases: Option<OutboundAliases>,
    /// Bytes of the budget that messages in flight and aliases hold.
    pub(super) ledger: Ledger,
    pub(super) marks: VecDeque<ReceiptMark>,
    pub(super) dropped: u64,
    /// The queue is full, and the policy is to end the connection then.
    pub(super) overflowed: bool,
    /// Bytes beyond which deliveries wait as messages, if fewer than [`OUT_BUFFER`].
    pub(super) room: Option<NonZeroU32>,
    /// Gate that looks at each message, if there is one.
    pub(super) gate: Option<Box<dyn Gate>>,
}

/// A position in the stream of bytes: when the socket has taken everything before it, `receipt` is told.
#[derive(Debug)]
pub(super) struct ReceiptMark {
    pub(super) end: u64,
    /// Packet id, 0 at QoS 0.
    pub(super) id: u16,
    pub(super) receipt: Arc<Receipt>,
}

/// See the module.
#[derive(Debug)]
pub struct Outbound {
    pub(super) out: Vec<u8>,
    pub(super) rare: Option<Box<SessionExtras>>,
    /// Bytes that left the out-buffer on this connection.
    pub(super) taken: u64,
    pub(super) maximum_packet_size: u32,
    /// Most messages in flight, at least 1; 0 while there is no connection.
    pub(super) window: u16,
    pub(super) protocol: Protocol,
    pub(super) ended: bool,
}

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
            rare.pending.limit(waits_until(env.now, env));
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

    /// Largest packet that the client takes.
    pub fn maximum_packet_size(&self) -> usize {
        usize::try_from(self.maximum_packet_size).unwrap_or(usize::MAX)
    }

    /// Protocol level of the current or last connection.
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// (in flight, waiting, bytes waiting, dropped).
    pub fn sizes(&self) -> (usize, usize, usize, u64) {
        self.rare.as_ref().map_or((0, 0, 0, 0), |rare| {
            let tail = rare.backlog.as_ref().map(|backlog| &backlog.tail);
            let (on_disk, bytes) = tail.map_or((0, 0), |tail| (tail.messages(), tail.bytes()));
            let bytes = rare.pending.bytes() + usize::try_from(bytes).unwrap_or(usize::MAX);
            (rare.inflight.len(), rare.pending.len() + on_disk, bytes, rare.dropped)
        })
    }

    /// Messages dropped since the session began.
    pub fn dropped(&self) -> u64 {
        self.rare.as_ref().map_or(0, |rare| rare.dropped)
    }

    /// Returns whether the last offer was dropped because the queue is full and the policy is to end the connection;
    /// the next call returns false.
    pub fn take_overflow(&mut self) -> bool {
        self.rare.as_mut().is_some_and(|rare| std::mem::take(&mut rare.overflowed))
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

    /// Appends a control packet, however full the buffer is: control packets only answer the peer's own packets.
    pub fn append(&mut self, bytes: &[u8]) {
        self.out().extend_from_slice(bytes);
    }

    /// The out-buffer, made if it is not there.
    pub(super) fn out(&mut self) -> &mut Vec<u8> {
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
        while rare.marks.front().is_some_and(|mark| mark.end <= written) {
            let Some(ReceiptMark { id, receipt, .. }) = rare.marks.pop_front() else { return };
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

    /// Returns what a shared group queued here and was not sent yet. It is not reread from disk, even if it stays
    /// there.
    pub fn yield_shared(&mut self, env: &Env<'_>) -> Vec<Yielded> {
        let Some(rare) = &mut self.rare else { return Vec::new() };
        let taken = rare.pending.extract(|delivery| delivery.group != 0);
        let yielded: Vec<_> = taken
            .into_iter()
            .map(|delivery| {
                env.budget.release(delivery.message.cost());
                let place = delivery.place;
                delivery.into_shared(place)
            })
            .collect();
        self.offload(env);
        if let Some(backlog) = self.rare.as_mut().and_then(|rare| rare.backlog.as_mut()) {
            backlog.give(yielded.iter().filter_map(|yielded| yielded.place));
        }
        yielded
    }

    /// The session is over. Returns what a shared group may give to another member: what waits, and QoS 1 in flight,
    /// but never QoS 2 in flight [MQTT-4.8.2-5].
    pub fn end(&mut self, env: &Env<'_>) -> Vec<Yielded> {
        self.detach(&Env { disk: None, ..*env });
        self.ended = true;
        let Some(mut rare) = self.rare.take() else { return Vec::new() };
        let mut shared = Vec::new();
        rare.ledger.settle(0, env.budget);
        if let Some(backlog) = &mut rare.backlog {
            backlog.give_up(env.budget);
        }
        // The caller removes everything on disk at once.
        for (place, entry) in rare.inflight.drain() {
            match entry.stage {
                InflightStage::Publish(delivery)
                    if delivery.group != 0 && delivery.qos == QoS::AtLeastOnce =>
                {
                    shared.push(delivery.into_shared(place));
                }
                InflightStage::Publish(delivery) => {
                    delivery.on_disk.settle();
                    dropped(delivery.receipt(), DropReason::SessionEnded);
                }
                InflightStage::Release(released) => {
                    dropped(released.receipt.as_ref(), DropReason::SessionEnded)
                }
            }
        }
        while let Some(delivery) = rare.pending.pop() {
            env.budget.release(delivery.message.cost());
            if delivery.group != 0 {
                let place = delivery.place;
                shared.push(delivery.into_shared(place));
            } else {
                delivery.on_disk.settle();
                DropReason::SessionEnded.count(1);
                dropped(delivery.receipt(), DropReason::SessionEnded);
            }
        }
        shared
    }

    /// Tells whoever waits for a message that is in memory and has expired, before the window has room again and it is dropped.
    /// Returns how many deliveries were looked at: each once in its life.
    pub fn tell_expired(&mut self, now: Timestamp) -> usize {
        let Some(rare) = self.rare.as_mut() else { return 0 };
        rare.pending.tell_expired(now, |delivery| dropped(delivery.receipt(), DropReason::Expired))
    }

    /// Drops all that waits for the client, in memory and on disk, and tells whoever waits for it. What is in flight stays, as
    /// the client may have it, and so does what a shared group has queued here, which other members may get. Returns about how
    /// many messages that were.
    pub fn purge(&mut self, env: &Env<'_>) -> usize {
        let Some(rare) = self.rare.as_mut() else { return 0 };
        let gone = rare.pending.extract(|delivery| delivery.group == 0);
        let mut messages = gone.len();
        for delivery in gone {
            env.budget.release(delivery.message.cost());
            dropped(delivery.receipt(), DropReason::Purged);
            delivery.on_disk.remove(delivery.place, env);
        }
        if let Some((disk, backlog)) = env.disk.zip(rare.backlog.as_mut())
            && !backlog.tail.is_empty()
        {
            let (from, on_disk) = backlog.purge(env.budget);
            disk.journal.submit(QueueOp::Trim { queue: disk.queue, from, count: usize::MAX });
            messages += on_disk;
        }
        rare.dropped += messages as u64;
        DropReason::Purged.count(messages as u64);
        self.settle(env.budget);
        messages
    }

    /// Returns messages in memory for the client, those in flight first, from the index `from` on and at most `most`:
    /// each with its QoS and whether it is in flight. Also returns the first place of the messages on disk, if there
    /// are more.
    #[expect(clippy::type_complexity, reason = "one caller, which names the parts")]
    pub fn queued(&self, from: usize, most: usize) -> (Vec<(Arc<SharedMessage>, QoS, bool)>, Option<u64>) {
        let Some(rare) = &self.rare else { return (Vec::new(), None) };
        let inflight = rare.inflight.messages().map(|delivery| (delivery, true));
        let sent: Vec<_> = inflight.skip(from).take(most).collect();
        let first = from.saturating_sub(rare.inflight.messages().count());
        let waiting = rare.pending.skip(first).map(|delivery| (delivery, false));
        let listed = sent.into_iter().chain(waiting).take(most);
        let listed = listed.map(|(delivery, sent)| (Arc::clone(&delivery.message), delivery.qos, sent));
        let tail = rare.backlog.as_ref().map(|backlog| &backlog.tail).filter(|tail| !tail.is_empty());
        (listed.collect(), tail.map(Tail::from))
    }

    /// Bytes on the budget.
    pub fn held(&self) -> usize {
        self.rare.as_ref().map_or(0, |rare| rare.held())
    }

    /// Memory is short. A persistent session drops from memory what is also on disk. Another drops the QoS 0
    /// messages that wait and, if the policy is to drop the oldest, further ones until half of the waiting bytes are gone.
    /// False if that freed nothing.
    pub fn give_back(&mut self, env: &Env<'_>) -> bool {
        let before = self.held();
        self.offload(env);
        if let Some(rare) = self.rare.as_mut().filter(|_| env.disk.is_none()) {
            let most = rare.pending.bytes() / 2;
            let mut gone = rare.pending.extract(|delivery| delivery.qos == QoS::AtMostOnce);
            while rare.pending.bytes() > most && env.limits.overflow == OverflowPolicy::DropOldest {
                gone.extend(rare.pending.pop());
            }
            for delivery in gone {
                env.budget.release(delivery.message.cost());
                rare.dropped += 1;
                DropReason::Memory.count(1);
                dropped(delivery.receipt(), DropReason::Memory);
            }
        }
        self.settle(env.budget);
        self.held() < before
    }

    /// Notes that `messages` QoS 0 messages were lost with the connection.
    pub fn note_lost(&mut self, messages: u64) {
        if messages > 0 {
            DropReason::ConnectionLost.count(messages);
            self.rare().dropped += messages;
        }
    }

    pub(super) fn rare(&mut self) -> &mut SessionExtras {
        self.rare.get_or_insert_with(Box::default)
    }

    pub(super) fn can_send_now(&self) -> bool {
        self.out.len() < OUT_BUFFER
            && self
                .rare
                .as_ref()
                .is_none_or(|rare| self.out.len() < rare.room() && rare.can_send(self.window))
    }

    /// Returns whether the budget has room for `cost` more bytes in flight.
    pub(super) fn affords(&mut self, cost: usize, env: &Env<'_>) -> bool {
        let Some(rare) = &mut self.rare else { return cost <= ledger::FREE || self.affords_first(cost, env) };
        let needed = rare.inflight.bytes() + rare.alias_bytes() + cost;
        rare.ledger.covers(needed, rare.pending.bytes(), env.budget)
    }

    #[cold]
    fn affords_first(&mut self, cost: usize, env: &Env<'_>) -> bool {
        self.rare().ledger.covers(cost, 0, env.budget)
    }

    /// Brings the budget up to what is in flight.
    pub(super) fn settle(&mut self, budget: &dyn Budget) {
        if let Some(rare) = &mut self.rare {
            rare.settle(budget);
        }
    }

    pub(super) fn append_ack(&mut self, kind: AckKind, id: u16, code: u8) {
        let protocol = self.protocol;
        encode_ack(kind, id, code, protocol, self.out());
    }
}

impl SessionExtras {
    pub(super) fn alias_bytes(&self) -> usize {
        self.aliases.as_ref().map_or(0, OutboundAliases::bytes)
    }

    /// Adjusts the charge for what is held besides the queue.
    pub(super) fn settle(&mut self, budget: &dyn Budget) {
        self.ledger.settle(self.inflight.bytes() + self.alias_bytes(), budget);
    }

    /// All bytes charged to the session, which decide how much more it may have.
    pub(super) fn held(&self) -> usize {
        self.pending.bytes() + self.ledger.charged()
    }

    /// Returns whether the gate, if there is one, withholds a message that was taken before.
    pub(super) fn withholds(gate: &mut Option<Box<dyn Gate>>, message: &SharedMessage) -> bool {
        !message.direct && gate.as_mut().is_some_and(|gate| !gate.admits(&message.topic))
    }

    /// Bytes that may wait in the out-buffer.
    pub(super) fn room(&self) -> usize {
        self.room.map_or(OUT_BUFFER, |room| room.get() as usize)
    }

    /// Returns whether a new QoS 1 or 2 message may be sent before anything else.
    fn can_send(&self, window: u16) -> bool {
        self.pending.is_empty()
            && self.inflight.is_resent()
            && self.inflight.has_room(window.into(), self.inflight.next_place())
    }
}

impl Default for Outbound {
    fn default() -> Self {
        Self::new()
    }
}

pub(super) fn answered(receipt: Option<&Arc<Receipt>>, code: u8) {
    if let Some(receipt) = receipt {
        receipt.update(|state| state.answered(code));
    }
}

pub(super) fn dropped(receipt: Option<&Arc<Receipt>>, reason: DropReason) {
    if let Some(receipt) = receipt {
        receipt.update(|state| state.given_up(reason));
    }
}
