//! The part of a queue that is on disk only.
//!
//! A queue with a store has its oldest messages in memory, on their way to whoever takes them. Behind them is the tail:
//! what came when memory had no room for it, or nobody was there to take it. It is read into memory page by page. The
//! queues of persistent sessions and of shared groups both work like this, and this is their common part: the places,
//! the counts and the page that is being read.

use std::{num::NonZero, ops::Range};

/// Places `from..next` of a queue, which are on disk only. What is before them is in memory or gone.
#[derive(Debug, Default)]
pub struct Tail {
    from: u64,
    next: u64,
    /// Inexact while messages expire on disk or are refused by it, exact again once everything is read.
    messages: usize,
    bytes: u64,
    /// While a page is being read: the queue's next place when that began.
    mark: Option<NonZero<u64>>,
}

impl Tail {
    /// A page is read while fewer messages than this are in memory.
    pub const LOW: usize = 128;

    /// Restores the tail that an earlier process left on disk.
    pub fn restored(places: Range<u64>, messages: usize, bytes: u64) -> Self {
        Self { from: places.start, next: places.end, messages, bytes, mark: None }
    }

    /// The first place; [`Self::next`] if there is none.
    #[inline]
    pub fn from(&self) -> u64 {
        self.from
    }

    /// One more than the last place.
    #[inline]
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Returns whether nothing is on disk only. This is exact where [`Self::messages`] may be wrong.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.from >= self.next
    }

    /// About how many messages there are.
    #[inline]
    pub fn messages(&self) -> usize {
        self.messages
    }

    /// About how much they cost.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// While a page is being read, the `mark` of [`Self::begin_load`].
    #[inline]
    pub fn loading(&self) -> Option<u64> {
        self.mark.map(NonZero::get)
    }

    /// Gives the next places to messages that are in memory; returns the first. The tail must be empty.
    #[inline]
    pub fn pass(&mut self, messages: u64) -> u64 {
        debug_assert!(self.is_empty());
        let place = self.next;
        self.next += messages;
        self.from = self.next;
        place
    }

    /// Gives the next places to messages that are on disk only; returns the first.
    #[inline]
    pub fn append(&mut self, messages: usize, bytes: u64) -> u64 {
        let place = self.next;
        self.next += messages as u64;
        self.messages += messages;
        self.bytes += bytes;
        place
    }

    /// The tail begins at `place` again: the messages from there up to it have left memory.
    pub fn take_back(&mut self, place: u64, messages: usize, bytes: u64) {
        self.from = self.from.min(place);
        self.messages += messages;
        self.bytes += bytes;
    }

    /// Begins to read a page from [`Self::from`] on; [`Self::loaded`] or [`Self::stop_loading`] follows. The tail must
    /// not be empty. `mark` is the queue's next place: everything below it has been submitted to the store, so that the
    /// read finds it unless it is gone.
    pub fn begin_load(&mut self, mark: u64) {
        debug_assert!(!self.is_empty());
        self.mark = NonZero::new(mark);
    }

    /// A page was read, up to `next` or to the `end` of what is on disk; of it only places below `limit` count. Returns
    /// the places that left the tail with it, or `None` if no read is under way.
    pub fn loaded(&mut self, next: u64, end: bool, limit: u64) -> Option<Range<u64>> {
        let mark = self.mark.take()?.get();
        let next = if end { next.max(mark) } else { next };
        let read = self.from..next.min(limit);
        self.from = read.end;
        self.note_gone(0, 0);
        Some(read)
    }

    /// Ends the read, if one is under way, without a result; returns whether one was.
    pub fn stop_loading(&mut self) -> bool {
        self.mark.take().is_some()
    }

    /// Messages have left the tail: they were read, trimmed or refused by the disk, or have expired.
    pub fn note_gone(&mut self, messages: usize, bytes: u64) {
        self.messages = self.messages.saturating_sub(messages);
        self.bytes = self.bytes.saturating_sub(bytes);
        if self.is_empty() {
            (self.messages, self.bytes) = (0, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The failure: what is appended while the last page is being read is taken for read and lost.
    #[test]
    fn what_comes_during_a_read_stays_in_the_tail() {
        let mut tail = Tail::restored(3..5, 2, 20);
        tail.begin_load(tail.next());
        assert_eq!(tail.append(1, 10), 5);
        assert_eq!(tail.loaded(5, true, tail.next()), Some(3..5));
        tail.note_gone(2, 20);
        assert_eq!((tail.from(), tail.messages(), tail.bytes()), (5, 1, 10));
        assert_eq!(tail.loaded(6, true, tail.next()), None, "nobody asked");
    }

    /// The failure: messages that expired on disk count for ever, and the queue is full although it is empty.
    #[test]
    fn counts_are_exact_again_when_all_is_read() {
        let mut tail = Tail::default();
        tail.append(3, 30);
        tail.begin_load(tail.next());
        // Nothing is there.
        assert_eq!(tail.loaded(0, true, tail.next()), Some(0..3));
        assert_eq!((tail.is_empty(), tail.messages(), tail.bytes()), (true, 0, 0));
        assert_eq!(tail.pass(1), 3);
    }
}
