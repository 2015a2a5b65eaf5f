//! The durable side of a persistent session: deliveries that are on disk as well as in memory, and those on disk only.
//!
//! QoS 1 to a client that keeps up is sent at once and written meanwhile, unless its PUBACK comes first. Everything
//! else goes to the tail and is read back when there is room. So QoS 2 is sent only after it was written: a message
//! that a client has begun to receive is never forgotten, and its packet identifier is never given to another.

use std::{
    collections::{BTreeSet, VecDeque},
    ops::Range,
    sync::Arc,
};

use gateway_core::{
    Budget, Commit, DropReason, Durability, JournalPage, Message, Offer, Outcome, QoS, QueueEntry, QueueOp,
    Receipt, StoredEntry, Tail, Timestamp, limits::OverflowPolicy, part_of_qos_0,
};

use super::{
    Outbound, SessionExtras,
    inflight::{InflightStage, Released},
    pending::{Awaited, OnDisk, PendingDelivery},
    receipts::dropped,
};
use crate::{Disk, Env};

/// Messages and bytes that wait in memory for a connected client of a persistent session.
const WINDOW: usize = 1_000;
const WINDOW_BYTES: usize = 1 << 20;
/// More is read while fewer bytes than this wait in memory.
const LOW_BYTES: usize = JournalPage::BYTES / 2;
/// The smallest read, in bytes: one message, or more if they are small.
const LEAST: usize = 4 << 10;

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

impl Outbound {
    /// Takes over the state that an earlier process left.
    pub fn restore(&mut self, left: &StoredQueue<'_>) {
        let rare = self.rare();
        if left.next > 0 {
            rare.backlog = Some(Box::new(Backlog::restored(left)));
        }
        rare.received.restore(left.received);
    }

    /// The connection has ended: has the disk note, for the next process, what the client may have begun to receive, unless
    /// it knows already. One place says it all, since what was sent is always at the front of the queue.
    pub fn note_sent(&mut self, env: &Env<'_>) {
        let (Some(Disk { journal, queue }), Some(rare)) = (env.disk, self.rare.as_mut()) else { return };
        let on_disk_only = rare.backlog.as_mut().and_then(|backlog| backlog.note_sent());
        if let Some(below) = rare.inflight.note_sent().max(on_disk_only) {
            journal.submit(QueueOp::NoteSent { queue, below });
        }
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
        let backlog = self.rare.as_ref().and_then(|rare| rare.backlog.as_ref());
        backlog.is_some_and(|backlog| backlog.may_have_sent(place, qos))
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
            rare.dropped += 1;
            DropReason::QueueFull.count(1);
            if keeps || disconnect || backlog.tail.messages() == 0 {
                rare.overflowed = disconnect && !keeps;
                return Outcome::Dropped(DropReason::QueueFull);
            }
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
}

impl SessionExtras {
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
            self.note_dropped(DropReason::Expired);
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
        Self::Waits(env.waits_until(received))
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
        Lifetime::Sent => entry.note_sent(),
        Lifetime::Waits(_) => entry.expires = bound.until(entry.expires),
    }
    entry.group = offer.group_queue;
    entry.ids = if offer.ids.is_empty() { None } else { Some(offer.ids.into()) };
    let entry = Arc::new(entry);
    disk.journal.submit(QueueOp::Append(Arc::clone(&entry)));
    entry
}

/// The part of a persistent session's queue that is on disk only: its [`Tail`], and what the session must know about
/// the messages there.
///
/// A shared group's queue has a [`Tail`] as well. The rest differs: a session's messages belong to one client, which
/// may have begun to receive them, so that their packet identifiers must stay; the oldest are trimmed if the policy
/// says so; and publishers may wait until they are sent. A group's messages may go to any member until one has them.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    /// Its next place is the next delivery's.
    pub(super) tail: Tail,
    /// Places below this are of an earlier process, which may have sent them: their entries say whether it did.
    restored: u64,
    /// Places below this it may have sent although their entries do not say so.
    begun: u64,
    /// The client may have begun to receive QoS 2 messages in places below this from an earlier process.
    exact: u64,
    /// Bytes of the budget for what is being read.
    reserved: usize,
    /// Something was trimmed since the read began. It is all at or after the read's mark, but may be in what is read.
    trimmed_meanwhile: bool,
    /// Publishers that wait for messages of the tail, in order of place.
    awaited: VecDeque<Publisher>,
    /// Places that the last consecutive trims have emptied.
    trimmed: Range<u64>,
    /// Places of the tail whose message went back to its shared group. They stay on disk until another queue has the
    /// message, and are not reread. Those that a read no longer finds are forgotten.
    given: BTreeSet<u64>,
}

/// A publisher that waits for one message.
#[derive(Debug)]
struct Publisher {
    place: u64,
    /// Time from which the message may be removed from disk unsent.
    until: Option<Timestamp>,
    receipt: Arc<Receipt>,
}

impl Backlog {
    /// Restores what an earlier process left.
    fn restored(left: &StoredQueue<'_>) -> Self {
        let &StoredQueue { first, next, exact, begun, messages, bytes, .. } = left;
        let tail = Tail::restored(first..next, messages, bytes);
        Self { tail, restored: next, begun, exact, ..Self::default() }
    }

    /// Returns whether an earlier process may have sent this entry.
    fn is_sent(&self, entry: &StoredEntry<u32>) -> bool {
        entry.seq < self.restored && (entry.sent || entry.seq < self.begun)
    }

    /// One more than the last place that may have been sent without the disk knowing; the caller tells it.
    fn note_sent(&mut self) -> Option<u64> {
        let begun = std::mem::take(&mut self.begun);
        (begun > self.tail.from()).then_some(begun)
    }

    /// Gives the next place to a delivery that is on disk only. Whoever waits for it is told if it is removed unsent.
    fn append(&mut self, cost: u64, receipt: Option<&Arc<Receipt>>, until: Option<Timestamp>) -> u64 {
        let place = self.tail.append(1, cost);
        self.awaited.extend(receipt.map(|receipt| Publisher { place, until, receipt: Arc::clone(receipt) }));
        place
    }

    /// Returns to the tail a delivery that was to be sent from memory.
    fn take_back(&mut self, place: u64, cost: u64, receipt: Option<&Arc<Receipt>>, until: Option<Timestamp>) {
        self.tail.take_back(place, 1, cost);
        if let Some(receipt) = receipt {
            self.awaited.push_front(Publisher { place, until, receipt: Arc::clone(receipt) });
        }
    }

    /// The first place that may be trimmed. That excludes what is being read, since it may be sent by then, and what
    /// the client may have begun to receive at QoS 2, since it would keep the packet identifier for ever.
    fn oldest(&self) -> u64 {
        self.tail.loading().unwrap_or_else(|| self.tail.from()).max(self.exact)
    }

    /// One message at or after [`Self::oldest`] is trimmed; whoever waits for it is told. Its size is not known here,
    /// so the mean is taken. Nor is its place, as some may be empty, but n trims in a row surely empty the first n
    /// places.
    fn note_trimmed(&mut self) {
        let oldest = self.oldest();
        if !(self.trimmed.start..=self.trimmed.end).contains(&oldest) {
            self.trimmed = oldest..oldest;
        }
        self.trimmed.end += 1;
        let from = self.awaited.partition_point(|waiting| waiting.place < oldest);
        let to = self.awaited.partition_point(|waiting| waiting.place < self.trimmed.end);
        for waiting in self.awaited.drain(from..to) {
            dropped(Some(&waiting.receipt), DropReason::QueueFull);
        }
        self.tail.note_gone(1, self.tail.bytes() / self.tail.messages().max(1) as u64);
        self.trimmed_meanwhile = true;
    }

    /// Trims all messages that may be trimmed, and tells publishers that wait for them. Returns the first place that was
    /// trimmed, and about how many messages that were: their number is not always known.
    pub(super) fn purge(&mut self, budget: &dyn Budget) -> (u64, usize) {
        // Messages that are being read have not been sent, and are not taken up then.
        self.stop_loading(budget);
        let from = self.oldest();
        let first = self.awaited.partition_point(|waiting| waiting.place < from);
        for waiting in self.awaited.drain(first..) {
            dropped(Some(&waiting.receipt), DropReason::Purged);
        }
        let messages = self.tail.messages();
        self.tail.note_gone(messages, self.tail.bytes());
        (from, messages)
    }

    /// Returns whether the client may have begun to receive the message in this place, or is about to.
    fn may_have_sent(&self, place: u64, qos: QoS) -> bool {
        self.tail.loading().is_some()
            || place < self.tail.from()
            || (qos == QoS::ExactlyOnce && place < self.exact)
    }

    /// Returns whether there is something to read and no read is under way.
    fn wants_load(&self) -> bool {
        self.tail.loading().is_none() && !self.tail.is_empty()
    }

    /// Begins a read, if the budget has room for it beside the `held` bytes of the session, and returns how many bytes
    /// to read. While memory is short these are fewer; a session that holds nothing always gets its next message.
    fn begin_load(&mut self, held: usize, budget: &dyn Budget) -> Option<usize> {
        let wanted = usize::try_from(self.tail.bytes()).unwrap_or(usize::MAX).min(JournalPage::BYTES);
        let sizes = [wanted, wanted.min(JournalPage::BYTES / 16), wanted.min(LEAST)];
        let mut reserved = sizes.into_iter().find(|bytes| budget.charge(held, *bytes));
        if reserved.is_none() && held == 0 {
            budget.force(sizes[2]);
            reserved = Some(sizes[2]);
        }
        self.reserved = reserved?;
        self.trimmed_meanwhile = false;
        self.tail.begin_load(self.tail.next());
        // The count is not exact and must not end a page early.
        Some(if self.reserved == wanted { JournalPage::BYTES } else { self.reserved })
    }

    /// A read is over, whatever came of it.
    pub(super) fn stop_loading(&mut self, budget: &dyn Budget) {
        self.tail.stop_loading();
        budget.release(std::mem::take(&mut self.reserved));
    }

    /// The entries of a page that count; `None` if no read is under way.
    fn loaded(&mut self, page: JournalPage, budget: &dyn Budget) -> Option<Vec<StoredEntry<u32>>> {
        let JournalPage { mut entries, next, end } = page;
        let mark = self.tail.loading()?;
        let limit = if self.trimmed_meanwhile { mark } else { self.tail.next() };
        let read = self.tail.loaded(next, end, limit)?;
        self.stop_loading(budget);
        entries.retain(|entry| entry.seq < read.end);
        let is_there = |place: &u64| entries.binary_search_by_key(place, |entry| entry.seq).is_ok();
        self.given.retain(|place| !read.contains(place) || is_there(place));
        entries.retain(|entry| !self.given.contains(&entry.seq));
        Some(entries)
    }

    /// The messages of these places were given away, after everything else that waited was returned to the tail. Places
    /// before the tail are never read again, so they need not be remembered.
    pub(super) fn give(&mut self, places: impl Iterator<Item = u64>) {
        let from = self.tail.from();
        self.given = self.given.split_off(&from);
        self.given.extend(places.filter(|place| *place >= from));
    }

    /// Tells whoever waits for messages below `place` that they are gone: trimmed, expired on disk, or refused by it.
    fn give_up_before(&mut self, place: u64) {
        while let Some(waiting) = self.awaited.pop_front_if(|waiting| waiting.place < place) {
            dropped(Some(&waiting.receipt), DropReason::QueueFull);
        }
    }

    /// Messages have expired on disk: tells whoever waits for one whose time has come, unless it is just being read.
    fn give_up_expired(&mut self, now: Timestamp) {
        if self.tail.loading().is_some() {
            return;
        }
        self.awaited.retain(|waiting| {
            let expired = waiting.until.is_some_and(|until| until <= now);
            if expired {
                dropped(Some(&waiting.receipt), DropReason::Expired);
            }
            !expired
        });
    }

    /// Tells the oldest publishers that their messages are gone while more wait than there can be messages on disk.
    fn limit_awaited(&mut self, most: usize) {
        let oldest = self.oldest();
        while self.awaited.len() > most {
            let first = self.awaited.partition_point(|waiting| waiting.place < oldest);
            let Some(waiting) = self.awaited.remove(first) else { return };
            dropped(Some(&waiting.receipt), DropReason::QueueFull);
        }
    }

    fn take_receipt(&mut self, place: u64) -> Option<Arc<Receipt>> {
        self.give_up_before(place);
        self.awaited.pop_front_if(|waiting| waiting.place == place).map(|waiting| waiting.receipt)
    }

    /// The session ends: tells whoever waits.
    pub(super) fn give_up(&mut self, budget: &dyn Budget) {
        self.stop_loading(budget);
        for waiting in self.awaited.drain(..) {
            dropped(Some(&waiting.receipt), DropReason::SessionEnded);
        }
    }

    /// Returns whether a replay, which can wait, may add messages.
    pub(super) fn has_room(&self) -> bool {
        self.tail.messages() < Tail::LOW
    }
}
