//! The part of a persistent session's queue that is on disk only.

use std::{
    collections::{BTreeSet, VecDeque},
    sync::Arc,
};

use super::{Budget, outbound::dropped};
use crate::types::{DropReason, Page, QoS, ReadBack, Receipt};

/// Below so many waiting messages and bytes more are read.
pub(super) const LOW: usize = 128;
pub(super) const LOW_BYTES: usize = Page::BYTES / 2;

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
    /// Places below are of an earlier process, which may have sent them.
    pub(super) restored: u64,
    /// QoS 2 in places below may be what the client began to receive from an earlier process.
    exact: u64,
    /// While more is being read.
    loading: Option<Loading>,
    /// Publishers that wait for messages of the tail, by place.
    awaited: VecDeque<(u64, Arc<Receipt>)>,
    /// Places of the tail whose message was given to the session's shared group: they are on disk until another queue has
    /// it, and are not read again. Those that a read does not find any more are forgotten.
    given: BTreeSet<u64>,
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
    pub(super) fn restored(first: u64, next: u64, exact: u64, messages: usize, bytes: u64) -> Self {
        Self { next, from: first, messages, bytes, restored: next, exact, ..Self::default() }
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

    /// Gives the next place to a delivery on disk only.
    pub(super) fn append(&mut self, cost: u64, receipt: Option<&Arc<Receipt>>) -> u64 {
        let place = self.next;
        self.next += 1;
        self.messages += 1;
        self.bytes += cost;
        self.awaited.extend(receipt.map(|receipt| (place, Arc::clone(receipt))));
        place
    }

    /// Takes back a delivery that was to be sent from memory.
    pub(super) fn take_back(&mut self, place: u64, cost: u64, receipt: Option<&Arc<Receipt>>) {
        self.from = self.from.min(place);
        self.messages += 1;
        self.bytes += cost;
        if let Some(receipt) = receipt {
            self.awaited.push_front((place, Arc::clone(receipt)));
        }
    }

    /// The first place that may be trimmed: neither what is being read, for it may be sent by then, nor what the client
    /// may have begun to receive at QoS 2, whose packet identifier it would hold for ever.
    pub(super) fn oldest(&self) -> u64 {
        self.loading.as_ref().map_or(self.from, |loading| loading.mark).max(self.exact)
    }

    /// One message from [`Self::oldest`] on is trimmed. Its size is not known here: the mean.
    pub(super) fn note_trimmed(&mut self) {
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

    /// A read begins, if the budget has room for it.
    pub(super) fn begin_load(&mut self, budget: &dyn Budget) -> bool {
        let reserved = usize::try_from(self.bytes).unwrap_or(usize::MAX).min(Page::BYTES);
        let fits = budget.charge(reserved);
        if fits {
            self.loading = Some(Loading { mark: self.next, trimmed: false, reserved });
        }
        fits
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
        while let Some((_, receipt)) = self.awaited.pop_front_if(|(waiting, _)| *waiting < place) {
            dropped(Some(&receipt), DropReason::QueueFull);
        }
    }

    pub(super) fn take_receipt(&mut self, place: u64) -> Option<Arc<Receipt>> {
        self.give_up_before(place);
        if self.awaited.front().is_some_and(|(waiting, _)| *waiting == place) {
            return self.awaited.pop_front().map(|(_, receipt)| receipt);
        }
        None
    }

    /// The session ends: whoever waits is told.
    pub(super) fn give_up(&mut self, budget: &dyn Budget) {
        self.stop_loading(budget);
        for (_, receipt) in self.awaited.drain(..) {
            dropped(Some(&receipt), DropReason::SessionEnded);
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
