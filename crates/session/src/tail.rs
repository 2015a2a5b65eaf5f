//! The part of a persistent session's queue that is on disk only.

use std::{
    collections::{BTreeSet, VecDeque},
    ops::Range,
    sync::Arc,
};

use gateway_core::{Budget, DropReason, Page, QoS, ReadBack, Receipt, Timestamp};

use super::{durable::Left, outbound::dropped};

/// Below so many waiting messages and bytes more are read.
pub(super) const LOW: usize = 128;
pub(super) const LOW_BYTES: usize = Page::BYTES / 2;
/// What is read at least: one message, and more if they are small.
const LEAST: usize = 4 << 10;

/// What is on disk only.
#[derive(Debug, Default)]
pub(super) struct Tail {
    /// The next delivery's place.
    pub(super) next: u64,
    /// First place that is on disk only; `next` if there is none.
    pub(super) from: u64,
    /// Messages and bytes from there on; not exact while messages expire there, exact again when all is read.
    pub(super) messages: usize,
    pub(super) bytes: u64,
    /// Places below are of an earlier process, which may have sent them: their entries say whether it has.
    restored: u64,
    /// Places below it may have sent although their entries do not say so.
    begun: u64,
    /// QoS 2 in places below may be what the client began to receive from an earlier process.
    exact: u64,
    /// While more is being read.
    loading: Option<Loading>,
    /// Publishers that wait for messages of the tail, by place.
    awaited: VecDeque<Waiting>,
    /// Places of which nothing is left, because of the last trims in a row.
    trimmed: Range<u64>,
    /// Places of the tail whose message was given to the session's shared group: they are on disk until another queue has
    /// it, and are not read again. Those that a read does not find any more are forgotten.
    given: BTreeSet<u64>,
}

/// A publisher that waits for one message.
#[derive(Debug)]
struct Waiting {
    place: u64,
    /// When the message may go from disk unsent.
    until: Option<Timestamp>,
    receipt: Arc<Receipt>,
}

/// A read that is under way.
#[derive(Debug)]
struct Loading {
    /// `next` of when it began.
    mark: u64,
    /// What was trimmed meanwhile, all from `mark` on, may be in what is read.
    trimmed: bool,
    /// Bytes of the budget for what is read.
    reserved: usize,
}

impl Tail {
    /// What an earlier process left.
    pub(super) fn restored(left: &Left<'_>) -> Self {
        let &Left { first, next, exact, begun, messages, bytes, .. } = left;
        Self { next, from: first, messages, bytes, restored: next, begun, exact, ..Self::default() }
    }

    /// Whether an earlier process may have sent what was read.
    pub(super) fn is_sent(&self, entry: &ReadBack) -> bool {
        entry.place < self.restored && (entry.sent || entry.place < self.begun)
    }

    /// One more than the last place here of which the disk does not know that it may have been sent, but does from now on.
    pub(super) fn note_sent(&mut self) -> Option<u64> {
        let begun = std::mem::take(&mut self.begun);
        (begun > self.from).then_some(begun)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.from >= self.next
    }

    pub(super) fn is_loading(&self) -> bool {
        self.loading.is_some()
    }

    /// Gives the next place to a delivery that stays in memory.
    pub(super) fn pass(&mut self) -> u64 {
        let place = self.next;
        self.next += 1;
        self.from = self.next;
        place
    }

    /// Gives the next place to a delivery on disk only. Whoever waits for it is told if it must go from disk unsent.
    pub(super) fn append(
        &mut self,
        cost: u64,
        receipt: Option<&Arc<Receipt>>,
        until: Option<Timestamp>,
    ) -> u64 {
        let place = self.next;
        self.next += 1;
        self.messages += 1;
        self.bytes += cost;
        self.awaited.extend(receipt.map(|receipt| Waiting { place, until, receipt: Arc::clone(receipt) }));
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
        self.from = self.from.min(place);
        self.messages += 1;
        self.bytes += cost;
        if let Some(receipt) = receipt {
            self.awaited.push_front(Waiting { place, until, receipt: Arc::clone(receipt) });
        }
    }

    /// The first place that may be trimmed: neither what is being read, for it may be sent by then, nor what the client
    /// may have begun to receive at QoS 2, whose packet identifier it would hold for ever.
    pub(super) fn oldest(&self) -> u64 {
        self.loading.as_ref().map_or(self.from, |loading| loading.mark).max(self.exact)
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
        self.bytes -= self.bytes / self.messages.max(1) as u64;
        self.messages = self.messages.saturating_sub(1);
        if let Some(loading) = &mut self.loading {
            loading.trimmed = true;
        }
    }

    /// Whether the client may have begun to receive what is in this place, or does so soon.
    pub(super) fn may_have_sent(&self, place: u64, qos: QoS) -> bool {
        self.is_loading() || place < self.from || (qos == QoS::ExactlyOnce && place < self.exact)
    }

    /// A read of so many bytes begins, if the budget has room for it beside the `held` bytes of the session. While memory
    /// is short fewer are read, and who holds nothing always gets the next message.
    pub(super) fn begin_load(&mut self, held: usize, budget: &dyn Budget) -> Option<usize> {
        let wanted = usize::try_from(self.bytes).unwrap_or(usize::MAX).min(Page::BYTES);
        let sizes = [wanted, wanted.min(Page::BYTES / 16), wanted.min(LEAST)];
        let mut reserved = sizes.into_iter().find(|bytes| budget.charge(held, *bytes));
        if reserved.is_none() && held == 0 {
            budget.force(sizes[2]);
            reserved = Some(sizes[2]);
        }
        self.loading = reserved.map(|reserved| Loading { mark: self.next, trimmed: false, reserved });
        // A count that is not exact does not end a page early.
        reserved.map(|reserved| if reserved == wanted { Page::BYTES } else { reserved })
    }

    /// A read is over, whatever came of it.
    pub(super) fn stop_loading(&mut self, budget: &dyn Budget) -> bool {
        let Some(Loading { reserved, .. }) = self.loading.take() else { return false };
        budget.release(reserved);
        true
    }

    /// What was read: of its entries those that count, if it was asked for.
    pub(super) fn loaded(&mut self, page: Page, budget: &dyn Budget) -> Option<Vec<ReadBack>> {
        let Page { mut entries, next, end } = page;
        let loading = self.loading.as_ref()?;
        let (mark, trimmed) = (loading.mark, loading.trimmed);
        self.stop_loading(budget);
        let next = if end { next.max(mark) } else { next };
        let below = next.min(if trimmed { mark } else { self.next });
        entries.retain(|entry| entry.place < below);
        let read = std::mem::replace(&mut self.from, below)..below;
        let is_there = |place: &u64| entries.binary_search_by_key(place, |entry| entry.place).is_ok();
        self.given.retain(|place| !read.contains(place) || is_there(place));
        entries.retain(|entry| !self.given.contains(&entry.place));
        Some(entries)
    }

    /// The messages of these places were given away, after what else waited has gone back to the tail. Below its first
    /// place nothing is ever read again.
    pub(super) fn give(&mut self, places: impl Iterator<Item = u64>) {
        self.given = self.given.split_off(&self.from);
        self.given.extend(places.filter(|place| *place >= self.from));
    }

    pub(super) fn subtract(&mut self, messages: usize, bytes: u64) {
        self.messages = self.messages.saturating_sub(messages);
        self.bytes = self.bytes.saturating_sub(bytes);
        if self.is_empty() {
            (self.messages, self.bytes) = (0, 0);
        }
    }

    /// Whoever waits for messages below `place` is told that they are gone: trimmed, expired on disk, or refused by it.
    pub(super) fn give_up_before(&mut self, place: u64) {
        while let Some(waiting) = self.awaited.pop_front_if(|waiting| waiting.place < place) {
            dropped(Some(&waiting.receipt), DropReason::QueueFull);
        }
    }

    /// Messages have expired on disk: whoever waits for one whose time has come is told, unless it is just being read.
    pub(super) fn give_up_expired(&mut self, now: Timestamp) {
        if self.is_loading() {
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

    pub(super) fn sizes(&self) -> (usize, u64) {
        (self.messages, self.bytes)
    }

    /// Whether messages that may wait a little may be added.
    pub(super) fn has_room(&self) -> bool {
        self.messages < LOW
    }
}
