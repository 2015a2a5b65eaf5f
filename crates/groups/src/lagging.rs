//! A key whose messages wait although its partition has been read further.

use std::collections::VecDeque;

use gateway_core::Timestamp;

use super::config::MAX_REMEMBERED;

/// A message to be delivered (again).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Undelivered {
    pub(crate) offset: u64,
    /// Deliveries so far.
    pub(crate) attempts: u32,
}

/// Remainder of a key in the part of its partition that has been read: the remembered places, in order, and after them all its
/// messages from `scan` on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Lagging {
    pub(crate) todo: VecDeque<Undelivered>,
    pub(crate) scan: Option<u64>,
    /// Nothing is delivered before this time.
    pub(crate) due: Option<Timestamp>,
    /// The first of what waits has failed: it is delivered alone.
    pub(crate) alone: bool,
    /// This one was delivered alone, and nothing else is until it is settled.
    pub(crate) blocked: Option<u64>,
    /// Why the first was given back.
    pub(crate) reason: Option<Box<str>>,
}

impl Lagging {
    /// Returns the place to read next, if there is something to read now.
    pub(crate) fn place(&self) -> Option<u64> {
        if self.due.is_some() || self.blocked.is_some() {
            return None;
        }
        self.todo.front().map(|first| first.offset).or(self.scan)
    }

    /// Returns whether the key is an ordinary one again.
    pub(crate) fn is_done(&self) -> bool {
        self.todo.is_empty() && self.scan.is_none() && self.blocked.is_none()
    }

    /// The first place that is not settled, as far as it waits here.
    pub(crate) fn first(&self) -> Option<u64> {
        self.todo.front().map(|first| first.offset).or(self.scan)
    }

    /// Adds a message that was delivered before, or is known otherwise. False if it is there.
    pub(crate) fn give_back(&mut self, waiting: Undelivered) -> bool {
        if self.scan.is_some_and(|scan| waiting.offset >= scan) {
            return false;
        }
        insert(&mut self.todo, waiting)
    }

    /// Adds a message that was read and cannot be delivered yet. True if its place takes memory.
    pub(crate) fn skip(&mut self, offset: u64) -> bool {
        if self.scan.is_some() {
            return false;
        }
        if self.todo.len() >= MAX_REMEMBERED && self.todo.back().is_some_and(|last| last.offset < offset) {
            self.scan = Some(offset);
            return false;
        }
        insert(&mut self.todo, Undelivered { offset, attempts: 0 })
    }

    /// Returns whether a message of the key waits here.
    pub(crate) fn holds(&self, offset: u64) -> bool {
        self.scan.is_some_and(|scan| offset >= scan)
            || self.todo.binary_search_by_key(&offset, |waiting| waiting.offset).is_ok()
    }
}

/// Puts it into its place. False if it is there.
pub(crate) fn insert(waiting: &mut VecDeque<Undelivered>, one: Undelivered) -> bool {
    if waiting.back().is_none_or(|last| last.offset < one.offset) {
        waiting.push_back(one);
        return true;
    }
    match waiting.binary_search_by_key(&one.offset, |waiting| waiting.offset) {
        Ok(at) => {
            waiting[at].attempts = waiting[at].attempts.max(one.attempts);
            false
        }
        Err(at) => {
            waiting.insert(at, one);
            true
        }
    }
}
