//! What of a persistent session's queue is on disk only: its [`Tail`], and what the session must know of messages there.
//!
//! A shared group's queue has a tail as well and the rest is its own, for other reasons. A session's messages are the client's:
//! it may have begun to receive them, so their packet identifiers are kept; the oldest are trimmed where the policy says so;
//! and publishers wait until they are sent. A group's messages may go to any member until one has them.

use std::{
    collections::{BTreeSet, VecDeque},
    ops::Range,
    sync::Arc,
};

use gateway_core::{Budget, DropReason, Page, QoS, Receipt, StoredEntry, Tail, Timestamp};

use super::{durable::Left, outbound::dropped};

/// Below so many waiting bytes more are read.
pub(super) const LOW_BYTES: usize = Page::BYTES / 2;
/// What is read at least: one message, and more if they are small.
const LEAST: usize = 4 << 10;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    /// Its next place is the next delivery's.
    pub(super) tail: Tail,
    /// Places below are of an earlier process, which may have sent them: their entries say whether it has.
    restored: u64,
    /// Places below it may have sent although their entries do not say so.
    begun: u64,
    /// QoS 2 in places below may be what the client began to receive from an earlier process.
    exact: u64,
    /// Bytes of the budget for what is being read.
    reserved: usize,
    /// What was trimmed since a read began, all from its mark on, may be in what is read.
    trimmed_meanwhile: bool,
    /// Publishers that wait for messages of the tail, by place.
    awaited: VecDeque<Publisher>,
    /// Places of which nothing is left, because of the last trims in a row.
    trimmed: Range<u64>,
    /// Places of the tail whose message was given to the session's shared group: they are on disk until another queue has
    /// it, and are not read again. Those that a read does not find any more are forgotten.
    given: BTreeSet<u64>,
}

/// A publisher that waits for one message.
#[derive(Debug)]
struct Publisher {
    place: u64,
    /// When the message may go from disk unsent.
    until: Option<Timestamp>,
    receipt: Arc<Receipt>,
}

impl Backlog {
    /// What an earlier process left.
    pub(super) fn restored(left: &Left<'_>) -> Self {
        let &Left { first, next, exact, begun, messages, bytes, .. } = left;
        let tail = Tail::restored(first..next, messages, bytes);
        Self { tail, restored: next, begun, exact, ..Self::default() }
    }

    /// Whether an earlier process may have sent what was read.
    pub(super) fn is_sent(&self, entry: &StoredEntry<u32>) -> bool {
        entry.seq < self.restored && (entry.sent || entry.seq < self.begun)
    }

    /// One more than the last place here of which the disk does not know that it may have been sent, but does from now on.
    pub(super) fn note_sent(&mut self) -> Option<u64> {
        let begun = std::mem::take(&mut self.begun);
        (begun > self.tail.from()).then_some(begun)
    }

    /// Gives the next place to a delivery on disk only. Whoever waits for it is told if it must go from disk unsent.
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

    /// Takes back a delivery that was to be sent from memory.
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

    /// The first place that may be trimmed: neither what is being read, for it may be sent by then, nor what the client
    /// may have begun to receive at QoS 2, whose packet identifier it would hold for ever.
    pub(super) fn oldest(&self) -> u64 {
        self.tail.loading().unwrap_or_else(|| self.tail.from()).max(self.exact)
    }

    /// One message from [`Self::oldest`] on is trimmed, and whoever waits for it is told. Its size is not known here: the
    /// mean. Nor is its place, as some may be empty; but so many trims leave nothing in as many places.
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

    /// Whether the client may have begun to receive what is in this place, or does so soon.
    pub(super) fn may_have_sent(&self, place: u64, qos: QoS) -> bool {
        self.tail.loading().is_some()
            || place < self.tail.from()
            || (qos == QoS::ExactlyOnce && place < self.exact)
    }

    /// Whether there is something to read, and nobody reads it yet.
    pub(super) fn wants_load(&self) -> bool {
        self.tail.loading().is_none() && !self.tail.is_empty()
    }

    /// A read of so many bytes begins, if the budget has room for it beside the `held` bytes of the session. While memory
    /// is short fewer are read, and who holds nothing always gets the next message.
    pub(super) fn begin_load(&mut self, held: usize, budget: &dyn Budget) -> Option<usize> {
        let wanted = usize::try_from(self.tail.bytes()).unwrap_or(usize::MAX).min(Page::BYTES);
        let sizes = [wanted, wanted.min(Page::BYTES / 16), wanted.min(LEAST)];
        let mut reserved = sizes.into_iter().find(|bytes| budget.charge(held, *bytes));
        if reserved.is_none() && held == 0 {
            budget.force(sizes[2]);
            reserved = Some(sizes[2]);
        }
        self.reserved = reserved?;
        self.trimmed_meanwhile = false;
        self.tail.begin_load(self.tail.next());
        // A count that is not exact does not end a page early.
        Some(if self.reserved == wanted { Page::BYTES } else { self.reserved })
    }

    /// A read is over, whatever came of it.
    pub(super) fn stop_loading(&mut self, budget: &dyn Budget) {
        self.tail.stop_loading();
        budget.release(std::mem::take(&mut self.reserved));
    }

    /// What was read: of its entries those that count, if it was asked for.
    pub(super) fn loaded(&mut self, page: Page, budget: &dyn Budget) -> Option<Vec<StoredEntry<u32>>> {
        let Page { mut entries, next, end } = page;
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

    /// The messages of these places were given away, after what else waited has gone back to the tail. Below its first
    /// place nothing is ever read again.
    pub(super) fn give(&mut self, places: impl Iterator<Item = u64>) {
        let from = self.tail.from();
        self.given = self.given.split_off(&from);
        self.given.extend(places.filter(|place| *place >= from));
    }

    /// Whoever waits for messages below `place` is told that they are gone: trimmed, expired on disk, or refused by it.
    pub(super) fn give_up_before(&mut self, place: u64) {
        while let Some(waiting) = self.awaited.pop_front_if(|waiting| waiting.place < place) {
            dropped(Some(&waiting.receipt), DropReason::QueueFull);
        }
    }

    /// Messages have expired on disk: whoever waits for one whose time has come is told, unless it is just being read.
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

    /// More publishers wait than the disk may hold messages, as some of theirs are gone: the oldest are told so.
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

    /// The session ends: whoever waits is told.
    pub(super) fn give_up(&mut self, budget: &dyn Budget) {
        self.stop_loading(budget);
        for waiting in self.awaited.drain(..) {
            dropped(Some(&waiting.receipt), DropReason::SessionEnded);
        }
    }

    /// Whether messages that may wait a little may be added.
    pub(super) fn has_room(&self) -> bool {
        self.tail.messages() < Tail::LOW
    }
}
