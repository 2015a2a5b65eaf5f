//! What waits for a group while no member takes it.

use std::{collections::VecDeque, sync::Arc};

use crate::{
    config::Limits,
    types::{SharedMessage, Timestamp},
};

/// Bounds of a group's queue.
#[derive(Debug, Clone, Copy)]
pub(in crate::broker) struct Most {
    messages: usize,
    bytes: usize,
    /// Milliseconds from the arrival of a message; 0 is no limit.
    age: u64,
}

impl Most {
    pub(in crate::broker) fn new(limits: &Limits) -> Self {
        Self {
            messages: limits.group_queue_messages,
            bytes: limits.group_queue_bytes.0,
            age: limits.offline_age.millis(),
        }
    }

    /// When a message that came at `received` and expires at `expires` may wait no longer.
    pub(super) fn until(&self, received: Timestamp, expires: Option<Timestamp>) -> Option<Timestamp> {
        let aged = (self.age > 0).then(|| received.plus_millis(self.age));
        aged.into_iter().chain(expires).min()
    }
}

/// The queue, in order.
#[derive(Default)]
pub(super) struct Queue {
    messages: VecDeque<Waiting>,
    /// What they cost.
    bytes: usize,
    /// Place of the next message.
    pub(super) next: u64,
    /// The group is gone: nothing may be added.
    pub(super) closed: bool,
}

/// A message with its place.
pub(super) struct Waiting {
    pub(super) message: Arc<SharedMessage>,
    pub(super) place: u64,
}

impl Queue {
    pub(super) fn len(&self) -> usize {
        self.messages.len()
    }

    /// Whether a message of this cost is too much.
    pub(super) fn is_full(&self, cost: usize, most: &Most) -> bool {
        self.messages.len() >= most.messages || self.bytes + cost > most.bytes
    }

    pub(super) fn push(&mut self, waiting: Waiting) {
        self.bytes += waiting.message.cost();
        self.next = waiting.place + 1;
        self.messages.push_back(waiting);
    }

    pub(super) fn pop(&mut self) -> Option<Waiting> {
        let waiting = self.messages.pop_front()?;
        self.bytes -= waiting.message.cost();
        Some(waiting)
    }

    pub(super) fn put_back(&mut self, waiting: Waiting) {
        self.bytes += waiting.message.cost();
        self.messages.push_front(waiting);
    }

    /// Closes it; what waited.
    pub(super) fn close(&mut self) -> VecDeque<Waiting> {
        (self.closed, self.bytes) = (true, 0);
        std::mem::take(&mut self.messages)
    }
}
