//! The durable side of a persistent session: deliveries that are on disk as well as in memory, and those on disk only.
//!
//! QoS 1 to a client that keeps up is sent at once and written meanwhile, unless its PUBACK comes first. Everything
//! else goes to the tail and is read back when there is room. So QoS 2 is sent only after it was written: a message
//! that a client has begun to receive is never forgotten, and its packet identifier is never given to another.

use std::sync::Arc;

use gateway_core::{
    Commit, DropReason, Durability, Journal, JournalPage, Message, Offer, Outcome, QoS, QueueEntry, QueueId,
    QueueOp, Receipt, StoredEntry, Tail, Timestamp, limits::OverflowPolicy, part_of_qos_0,
};

use super::{
    Env, Outbound,
    backlog::{Backlog, LOW_BYTES},
    inflight::{InflightStage, Released},
    outbound::dropped,
    pending::{Awaited, PendingDelivery},
};

/// Messages and bytes that wait in memory for a connected client of a persistent session.
const WINDOW: usize = 1_000;
const WINDOW_BYTES: usize = 1 << 20;

/// Destination of the durable state of one session.
#[derive(Clone, Copy)]
pub struct Disk<'a> {
    /// Takes changes of the queue.
    pub journal: &'a dyn Journal,
    /// The session's queue.
    pub queue: QueueId,
}

/// State that an earlier process left on disk for a session.
#[derive(Debug, Clone, Copy, Default)]
pub struct StoredQueue<'a> {
    /// The first place in use.
    pub first: u64,
    /// One more than the last.
    pub next: u64,
    /// One more than the last QoS 2 place that the process may have begun to send.
    pub exact: u64,
    /// One more than the last place that it may have begun to send although the entry does not say so.
    pub begun: u64,
    /// Messages.
    pub messages: usize,
    /// Their cost.
    pub bytes: u64,
    /// Packet identifiers of QoS 2 messages received from the client and not released.
    pub received: &'a [u16],
}

/// Result of [`Outbound::begin_load`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BacklogLoad {
    /// There is nothing to read, or no room for it.
    Nothing,
    /// Read this many bytes from this place on, or one message.
    From(u64, usize),
    /// The memory budget is used up; try again later.
    NoRoom,
}

/// State of a delivery on disk.
#[derive(Debug, Clone)]
pub(super) enum OnDisk {
    /// Nowhere.
    No,
    /// On its way to the disk, or there.
    Submitted(Arc<QueueEntry>),
    /// On disk.
    Stored,
}

impl OnDisk {
    /// The session is over: what is not written yet need not be written.
    pub(super) fn settle(&self) {
        if let Self::Submitted(entry) = self {
            entry.settle();
        }
    }

    /// The delivery of `place` is over.
    pub(super) fn remove(&self, place: u64, env: &Env<'_>) {
        let written = match self {
            Self::No => false,
            Self::Submitted(entry) => !entry.settle(),
            Self::Stored => true,
        };
        if written && let Some(Disk { journal, queue }) = env.disk {
            journal.submit(QueueOp::Remove { queue, seq: place, unit: None });
        }
    }
}

impl PendingDelivery {
    /// Keeps an offer in memory, and submits it with this lifetime unless the message's durability says that memory is
    /// enough.
    fn submitted(
        message: &Message<'_>,
        qos: QoS,
        offer: Offer<'_>,
        place: u64,
        bound: Lifetime,
        disk: Disk<'_>,
    ) -> Self {
        let mut delivery = Self::keep(message, qos, offer);
        delivery.place = place;
        if message.durability != Durability::None {
            delivery.on_disk = OnDisk::Submitted(submit(message, qos, offer, place, bound, disk));
        }
        delivery
    }

    /// Submits a delivery that is in memory only; does nothing to others.
    fn write(&mut self, place: u64, bound: Lifetime, disk: Disk<'_>) {
        if !matches!(self.on_disk, OnDisk::No) || self.qos == QoS::AtMostOnce {
            return;
        }
        let mut message = self.message.borrow();
        message.durability = Durability::Interval;
        let entry = submit(&message, self.qos, self.offer(), place, bound, disk);
        drop(message);
        self.on_disk = OnDisk::Submitted(entry);
    }
}

impl Outbound {
    /// Takes over the state that an earlier process left.
    pub fn restore(&mut self, left: &StoredQueue<'_>) {
        let rare = self.rare();
        if left.next > 0 {
            rare.backlog = Some(Box::new(Backlog::restored(left)));
        }
        rare.received.extend(left.received.iter().map(|id| (*id, Some(safe()))));
    }

    /// The connection has ended: has the disk note, for the next process, what the client may have begun to receive.
    /// `None` if the disk knows already, else a commit that is done when it does. One place says it all, since what was
    /// sent is always at the front of the queue.
    pub fn note_sent(&mut self, env: &Env<'_>) -> Option<Arc<Commit>> {
        let Disk { journal, queue } = env.disk?;
        let rare = self.rare.as_mut()?;
        let on_disk_only = rare.backlog.as_mut().and_then(|backlog| backlog.note_sent());
        let below = rare.inflight.note_sent().max(on_disk_only)?;
        let commit = Commit::new();
        journal.submit(QueueOp::NoteSent { queue, below, commit: Arc::clone(&commit) });
        Some(commit)
    }

    /// Messages that were on disk only have expired there.
    pub fn note_expired(&mut self, messages: usize, bytes: u64, now: Timestamp) {
        let Some(rare) = &mut self.rare else { return };
        rare.dropped += messages as u64;
        if let Some(backlog) = &mut rare.backlog {
            backlog.tail.note_gone(messages, bytes);
            backlog.give_up_expired(now);
        }
    }

    /// Returns whether the client may have begun to receive the message on disk in this place. Then it must stay there
    /// although it has expired, and the session removes it in the end.
    pub fn may_have_sent(&self, place: u64, qos: QoS) -> bool {
        self.backlog().is_some_and(|backlog| backlog.may_have_sent(place, qos))
    }

    /// Begins a read from disk, if there is room and no other is under way. The caller reads and then calls
    /// [`Self::loaded`] or [`Self::load_failed`].
    pub fn begin_load(&mut self, env: &Env<'_>) -> BacklogLoad {
        if !self.wants_load() {
            return BacklogLoad::Nothing;
        }
        let held = self.rare.as_ref().map_or(0, |rare| rare.held());
        match self.rare.as_mut().and_then(|rare| rare.backlog.as_mut()) {
            Some(backlog) => match backlog.begin_load(held, env.budget) {
                Some(bytes) => BacklogLoad::From(backlog.tail.from(), bytes),
                None => BacklogLoad::NoRoom,
            },
            None => BacklogLoad::Nothing,
        }
    }

    fn backlog(&self) -> Option<&Backlog> {
        self.rare.as_ref()?.backlog.as_deref()
    }

    /// Returns whether [`Self::begin_load`] would begin a read, if the memory budget had room.
    pub fn wants_load(&self) -> bool {
        self.is_online()
            && self.rare.as_ref().is_some_and(|rare| {
                rare.pending.len() + rare.inflight.unsent() < Tail::LOW
                    && rare.pending.bytes() < LOW_BYTES
                    && rare.backlog.as_ref().is_some_and(|backlog| backlog.wants_load())
            })
    }

    /// Takes the page that was read.
    pub fn loaded(&mut self, page: JournalPage, env: &Env<'_>) {
        let Some(mut rare) = self.rare.take() else { return };
        if let Some(backlog) = &mut rare.backlog
            && let Some(entries) = backlog.loaded(page, env.budget)
        {
            let bytes =
                entries.iter().flat_map(|entry| &entry.message).map(|message| message.cost() as u64).sum();
            backlog.tail.note_gone(entries.len(), bytes);
            let receipts: Vec<_> = entries.iter().map(|entry| backlog.take_receipt(entry.seq)).collect();
            backlog.give_up_before(backlog.tail.from());
            let sent: Vec<_> = entries.iter().map(|entry| backlog.is_sent(entry)).collect();
            for ((entry, receipt), again) in entries.into_iter().zip(receipts).zip(sent) {
                rare.take_up(entry, again, receipt, env);
            }
        }
        self.rare = Some(rare);
        self.pump(env);
    }

    /// The read failed; [`Self::begin_load`] may begin another.
    pub fn load_failed(&mut self, env: &Env<'_>) {
        if let Some(backlog) = self.rare.as_mut().and_then(|rare| rare.backlog.as_mut()) {
            backlog.stop_loading(env.budget);
        }
    }

    /// Returns the commits that must be done before the next connection may be answered, since its first packets may be
    /// PUBRELs.
    pub fn unsafe_releases(&self) -> Vec<Arc<Commit>> {
        self.rare.as_ref().map_or_else(Vec::new, |rare| rare.inflight.unsafe_releases().cloned().collect())
    }

    /// Takes a message of a persistent session.
    pub(super) fn offer_durable(
        &mut self,
        message: &Message<'_>,
        qos: QoS,
        offer: Offer<'_>,
        env: &Env<'_>,
        disk: Disk<'_>,
    ) -> Outcome {
        let can_send = self.can_send_now();
        let online = self.is_online();
        let window = usize::from(self.window);
        let rare = self.rare();
        let tail = &rare.backlog.get_or_insert_with(Box::default).tail;
        let passes = online && qos == QoS::AtLeastOnce && tail.is_empty() && tail.loading().is_none();
        let fits = passes && can_send && rare.inflight.has_room(window, tail.next());
        if fits && self.affords(message.cost(), env) {
            let place = self.rare().backlog.get_or_insert_with(Box::default).tail.pass(1);
            if !self.append_publish(message, qos, offer, place, env.now) {
                return self.too_large();
            }
            self.rare()
                .inflight
                .push(place, PendingDelivery::submitted(message, qos, offer, place, Lifetime::Sent, disk));
            return Outcome::Sent;
        }
        let rare = self.rare();
        let held = rare.held();
        if passes
            && rare.pending.len() < WINDOW.min(env.limits.mailbox_messages)
            && rare.pending.bytes() < WINDOW_BYTES
            // Otherwise it waits on disk, which is the place for it while memory is short.
            && env.budget.charge(held, message.cost())
        {
            let place = rare.backlog.get_or_insert_with(Box::default).tail.pass(1);
            let bound = Lifetime::waiting(message.received, env);
            rare.pending.push(PendingDelivery::submitted(message, qos, offer, place, bound, disk));
            return Outcome::Sent;
        }
        if offer.group != 0 && qos == QoS::AtLeastOnce && !offer.queue_offline {
            // Another member may have room, and once it is on disk only it cannot go to another member. Not counted as
            // a drop: the group's queue takes it.
            return Outcome::Dropped(DropReason::QueueFull);
        }
        self.append_to_tail(message, qos, offer, env, disk)
    }

    fn append_to_tail(
        &mut self,
        message: &Message<'_>,
        qos: QoS,
        offer: Offer<'_>,
        env: &Env<'_>,
        disk: Disk<'_>,
    ) -> Outcome {
        let online = self.is_online();
        let cost = message.cost() as u64;
        let rare = self.rare();
        let backlog = rare.backlog.get_or_insert_with(Box::default);
        let (most, most_bytes) = match qos {
            // The last room is for messages that somebody waits for.
            QoS::AtMostOnce => {
                (part_of_qos_0(env.limits.offline_messages), part_of_qos_0(env.limits.offline_bytes.0))
            }
            _ => (env.limits.offline_messages, env.limits.offline_bytes.0),
        };
        while backlog.tail.messages() >= most || backlog.tail.bytes() + cost > most_bytes as u64 {
            let disconnect = env.limits.overflow == OverflowPolicy::Disconnect && online;
            let oldest = backlog.oldest();
            let keeps = qos == QoS::AtMostOnce
                || env.limits.overflow == OverflowPolicy::DropNewest
                || oldest >= backlog.tail.next();
            if keeps || disconnect || backlog.tail.messages() == 0 {
                rare.dropped += 1;
                DropReason::QueueFull.count(1);
                rare.overflowed = disconnect && !keeps;
                return Outcome::Dropped(DropReason::QueueFull);
            }
            rare.dropped += 1;
            DropReason::QueueFull.count(1);
            disk.journal.submit(QueueOp::Trim { queue: disk.queue, from: oldest, count: 1 });
            backlog.note_trimmed();
        }
        let bound = Lifetime::waiting(message.received, env);
        let place = backlog.append(cost, message.receipt.filter(|_| online), bound.until(message.expires));
        backlog.limit_awaited(env.limits.offline_messages + WINDOW);
        submit(message, qos, offer, place, bound, disk);
        if online { Outcome::Sent } else { Outcome::Queued }
    }

    /// The connection ended: drops from memory what is also on disk, except what a shared group may give to other
    /// members.
    pub(super) fn offload(&mut self, env: &Env<'_>) {
        let Some(disk) = env.disk else { return };
        let Some(rare) = &mut self.rare else { return };
        let Some(backlog) = &mut rare.backlog else { return };
        for (place, delivery) in rare.inflight.publishes() {
            delivery.write(place, Lifetime::Sent, disk);
        }
        for mut delivery in rare.pending.take_end().into_iter().rev() {
            let cost = delivery.message.cost();
            env.budget.release(cost);
            let bound = Lifetime::waiting(delivery.message.received, env);
            delivery.write(delivery.place, bound, disk);
            let until = bound.until(delivery.message.expires);
            backlog.take_back(delivery.place, cost as u64, delivery.receipt(), until);
        }
        backlog.stop_loading(env.budget);
    }

    /// A PUBREC has come for the delivery in `place`. The PUBREL must wait for the commit, if one is returned.
    pub(super) fn release(delivery: &PendingDelivery, place: u64, env: &Env<'_>) -> Released {
        let receipt = delivery.receipt().cloned();
        let on_disk = delivery.on_disk.clone();
        let disk = env.disk.filter(|_| !matches!(on_disk, OnDisk::No));
        let commit = disk.map(|Disk { journal, queue }| {
            let commit = Commit::new();
            journal.submit(QueueOp::Release { queue, seq: place, commit: Arc::clone(&commit) });
            commit
        });
        Released { receipt, on_disk, commit }
    }
}

impl super::outbound::SessionExtras {
    /// Takes up an entry that was read. If an earlier process may have sent it, it keeps its packet identifier and is
    /// sent `again`, since otherwise the client might keep that identifier for ever.
    fn take_up(
        &mut self,
        entry: StoredEntry<u32>,
        again: bool,
        receipt: Option<Arc<Receipt>>,
        env: &Env<'_>,
    ) {
        let StoredEntry { seq: place, qos, retain, sent, group, ids, message } = entry;
        let again =
            again && qos != QoS::AtMostOnce && self.inflight.fits(place) && !self.pending.has_acknowledged();
        let expired = message.as_ref().is_some_and(|message| message.is_expired(env.now));
        if expired {
            self.dropped += 1;
            DropReason::Expired.count(1);
            dropped(receipt.as_ref(), DropReason::Expired);
        }
        let Some(message) = message.filter(|_| !expired) else {
            if again && qos == QoS::ExactlyOnce {
                let released = Released { receipt: None, on_disk: OnDisk::Stored, commit: None };
                self.inflight.restore(place, InflightStage::Release(released), sent);
            } else {
                OnDisk::Stored.remove(place, env);
            }
            return;
        };
        let awaited = if receipt.is_some() { Awaited::Unsent } else { Awaited::No };
        let message = receipt.map_or_else(|| Arc::clone(&message), |receipt| message.with_receipt(receipt));
        let delivery = PendingDelivery {
            message,
            ids,
            place,
            group,
            qos,
            retain,
            awaited,
            until: None,
            on_disk: OnDisk::Stored,
        };
        if again {
            self.inflight.restore(place, InflightStage::Publish(delivery), sent);
        } else {
            // There was room when the read began.
            env.budget.force(delivery.message.cost());
            self.pending.push(delivery);
        }
    }
}

/// Until when a message may wait that has been on disk, or without a connection, since `since`; `None` if for ever.
pub(super) fn waits_until(since: Timestamp, env: &Env<'_>) -> Option<Timestamp> {
    let age = env.limits.offline_age.millis();
    (age > 0).then(|| since.plus_millis(age))
}

/// Time for which the store keeps an entry that the session does not remove.
#[derive(Clone, Copy)]
enum Lifetime {
    /// For ever: it has been sent.
    Sent,
    /// Until its message expires or until this time, whichever is sooner, unless it may have been sent by then.
    Waits(Option<Timestamp>),
}

impl Lifetime {
    fn waiting(received: Timestamp, env: &Env<'_>) -> Self {
        Self::Waits(waits_until(received, env))
    }

    /// Returns the time from which the store may remove an entry whose message expires at `expires`, if ever.
    fn until(self, expires: Option<Timestamp>) -> Option<Timestamp> {
        match self {
            Self::Sent => None,
            Self::Waits(until) => expires.into_iter().chain(until).min(),
        }
    }
}

/// Submits one delivery.
fn submit(
    message: &Message<'_>,
    qos: QoS,
    offer: Offer<'_>,
    place: u64,
    bound: Lifetime,
    disk: Disk<'_>,
) -> Arc<QueueEntry> {
    let commit = message.commit().cloned();
    let mut entry = QueueEntry::new(disk.queue, place, Arc::clone(message.share()), qos, commit);
    entry.retain = offer.retain;
    match bound {
        Lifetime::Sent => entry.sent = true,
        Lifetime::Waits(_) => entry.expires = bound.until(entry.expires),
    }
    entry.group = offer.group_queue;
    entry.ids = if offer.ids.is_empty() { None } else { Some(offer.ids.into()) };
    let entry = Arc::new(entry);
    disk.journal.submit(QueueOp::Append(Arc::clone(&entry)));
    entry
}

/// A commit that is done.
fn safe() -> Arc<Commit> {
    let commit = Commit::new();
    commit.done();
    commit
}
