//! The part of a persistent session's queue that is on disk only: its [`Tail`], and what the session must know about
//! the messages there.
//!
//! A shared group's queue has a [`Tail`] as well. The rest differs: a session's messages belong to one client, which
//! may have begun to receive them, so that their packet identifiers must stay; the oldest are trimmed if the policy
//! says so; and publishers may wait until they are sent. A group's messages may go to any member until one has them.

use std::{
    collections::{BTreeSet, VecDeque},
    ops::Range,
    sync::Arc,
};

use gateway_core::{Budget, DropReason, JournalPage, QoS, Receipt, StoredEntry, Tail, Timestamp};

use super::{durable::StoredQueue, outbound::dropped};

/// More is read while fewer bytes than this wait in memory.
pub(super) const LOW_BYTES: usize = JournalPage::BYTES / 2;
/// The smallest read, in bytes: one message, or more if they are small.
const LEAST: usize = 4 << 10;

/// See the module.
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
    pub(super) fn restored(left: &StoredQueue<'_>) -> Self {
        let &StoredQueue { first, next, exact, begun, messages, bytes, .. } = left;
        let tail = Tail::restored(first..next, messages, bytes);
        Self { tail, restored: next, begun, exact, ..Self::default() }
    }

    /// Returns whether an earlier process may have sent this entry.
    pub(super) fn is_sent(&self, entry: &StoredEntry<u32>) -> bool {
        entry.seq < self.restored && (entry.sent || entry.seq < self.begun)
    }

    /// One more than the last place that may have been sent without the disk knowing; the caller tells it.
    pub(super) fn note_sent(&mut self) -> Option<u64> {
        let begun = std::mem::take(&mut self.begun);
        (begun > self.tail.from()).then_some(begun)
    }

    /// Gives the next place to a delivery that is on disk only. Whoever waits for it is told if it is removed unsent.
    pub(super) fn append(
        &mut self,
        cost: u64,
        receipt: Option<&Arc<Receipt>>,
        until: Option<Timestamp>,
    ) -> u64 {
        let place = self.tail.append(1, cost);
        self.awaited.extend(receipt.map(|receipt| Publisher { place, until, receipt: Arc::clone(receipt) }));
        place
    }

    /// Returns to the tail a delivery that was to be sent from memory.
    pub(super) fn take_back(
        &mut self,
        place: u64,
        cost: u64,
        receipt: Option<&Arc<Receipt>>,
        until: Option<Timestamp>,
    ) {
        self.tail.take_back(place, 1, cost);
        if let Some(receipt) = receipt {
            self.awaited.push_front(Publisher { place, until, receipt: Arc::clone(receipt) });
        }
    }

    /// The first place that may be trimmed. That excludes what is being read, since it may be sent by then, and what
    /// the client may have begun to receive at QoS 2, since it would keep the packet identifier for ever.
    pub(super) fn oldest(&self) -> u64 {
        self.tail.loading().unwrap_or_else(|| self.tail.from()).max(self.exact)
    }

    /// One message at or after [`Self::oldest`] is trimmed; whoever waits for it is told. Its size is not known here,
    /// so the mean is taken. Nor is its place, as some may be empty, but n trims in a row surely empty the first n
    /// places.
    pub(super) fn note_trimmed(&mut self) {
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
    pub(super) fn may_have_sent(&self, place: u64, qos: QoS) -> bool {
        self.tail.loading().is_some()
            || place < self.tail.from()
            || (qos == QoS::ExactlyOnce && place < self.exact)
    }

    /// Returns whether there is something to read and no read is under way.
    pub(super) fn wants_load(&self) -> bool {
        self.tail.loading().is_none() && !self.tail.is_empty()
    }

    /// Begins a read, if the budget has room for it beside the `held` bytes of the session, and returns how many bytes
    /// to read. While memory is short these are fewer; a session that holds nothing always gets its next message.
    pub(super) fn begin_load(&mut self, held: usize, budget: &dyn Budget) -> Option<usize> {
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
    pub(super) fn loaded(&mut self, page: JournalPage, budget: &dyn Budget) -> Option<Vec<StoredEntry<u32>>> {
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
    pub(super) fn give_up_before(&mut self, place: u64) {
        while let Some(waiting) = self.awaited.pop_front_if(|waiting| waiting.place < place) {
            dropped(Some(&waiting.receipt), DropReason::QueueFull);
        }
    }

    /// Messages have expired on disk: tells whoever waits for one whose time has come, unless it is just being read.
    pub(super) fn give_up_expired(&mut self, now: Timestamp) {
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
    pub(super) fn limit_awaited(&mut self, most: usize) {
        let oldest = self.oldest();
        while self.awaited.len() > most {
            let first = self.awaited.partition_point(|waiting| waiting.place < oldest);
            let Some(waiting) = self.awaited.remove(first) else { return };
            dropped(Some(&waiting.receipt), DropReason::QueueFull);
        }
    }

    pub(super) fn take_receipt(&mut self, place: u64) -> Option<Arc<Receipt>> {
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
