//! [`Unit`].

use std::sync::Arc;

use super::{Commit, CommitRefused};
use crate::{Journal, Message, QueueId, QueueOp};

/// A message whose unit is open while it is routed. Of the queues that have a part of it the store writes nothing after an
/// open unit: whatever happens, a panic too, it is closed when this goes.
pub struct Unit<'a, 'm> {
    message: &'a Message<'m>,
    journal: &'a dyn Journal,
    closed: bool,
}

/// The change that closes the unit of an incoming QoS 2 message.
#[derive(Debug, Clone, Copy)]
pub struct Received {
    /// The publishing session.
    pub queue: QueueId,
    /// Its packet identifier.
    pub packet_id: u16,
    /// The client has released it meanwhile: the identifier is free again.
    pub released: bool,
}

impl<'a, 'm> Unit<'a, 'm> {
    /// To be made before the message is routed.
    pub fn new(message: &'a Message<'m>, journal: &'a dyn Journal) -> Self {
        Self { message, journal, closed: false }
    }

    /// Closes the unit with what `close` makes of its commit, if one was begun; false if none was.
    pub fn close(mut self, close: impl FnOnce(Arc<Commit>) -> QueueOp) -> bool {
        self.close_with(close)
    }

    /// The commit of the unit, if one was begun, with a part for the operation that closes it: the caller submits that.
    pub fn hand_over(mut self) -> Option<Arc<Commit>> {
        self.closed = true;
        self.part()
    }

    /// The message is not routed completely: the unit is for somebody else to close.
    pub fn keep_open(mut self) {
        self.closed = true;
    }

    fn close_with(&mut self, close: impl FnOnce(Arc<Commit>) -> QueueOp) -> bool {
        self.closed = true;
        self.part().map(|commit| self.journal.submit(close(commit))).is_some()
    }

    fn part(&self) -> Option<Arc<Commit>> {
        self.message.issued().filter(|commit| commit.is_unit()).map(Commit::part)
    }
}

impl Drop for Unit<'_, '_> {
    fn drop(&mut self) {
        if !self.closed {
            self.close_with(|commit| QueueOp::Remove { queue: QueueId::NONE, seq: 0, unit: Some(commit) });
        }
    }
}

impl Received {
    /// Closes a unit that was handed over, when what must come before is done: what the message leaves in other stores must be
    /// safe first, for the unit's end makes a repeated PUBLISH a duplicate that goes nowhere. If that was refused the unit is too.
    pub fn close(self, unit: Arc<Commit>, journal: Arc<dyn Journal>) {
        let Some(before) = unit.before().cloned() else { return self.submit(unit, &*journal) };
        let own = Arc::clone(&before);
        before.then(move |result| {
            if result == Err(CommitRefused) {
                unit.add();
                unit.refuse();
            }
            self.submit(unit, &*journal);
        });
        // All parts for stores have been given out by now.
        own.done();
    }

    fn submit(self, unit: Arc<Commit>, journal: &dyn Journal) {
        let Self { queue, packet_id, released } = self;
        journal.submit(QueueOp::Receive { queue, packet_id, commit: unit });
        if released {
            journal.submit(QueueOp::Forget { queue, packet_id, commit: Commit::new() });
        }
    }
}
