//! The twin of the store, with a commit point that may advance at any time, and reads that are answered at any time later.

use std::{
    ops::Deref,
    task::{Context, Poll, Waker},
};

use gateway_core::{Journal, JournalPage, QueueId, QueueOp, Timestamp};
use parking_lot::Mutex;
use store::{
    BoxFuture, Loaded, MemoryState, QueueSummary, SessionOp, StateStore as _, StoreError, StoredSession,
};

use crate::StoredQueue;

/// The journal and what is committed of it.
#[derive(Default)]
pub(super) struct Disk {
    state: MemoryState,
    read: Mutex<Option<BoxFuture<'static, Result<Loaded, StoreError>>>>,
}

impl Deref for Disk {
    type Target = MemoryState;

    fn deref(&self) -> &MemoryState {
        &self.state
    }
}

impl Journal for Disk {
    fn submit(&self, op: QueueOp) {
        self.state.submit(op);
    }
}

impl Disk {
    /// Submits a session's record.
    pub(super) fn put_session(&self, session: StoredSession) {
        self.state.submit_session(SessionOp::Put(Box::new(session), None));
    }

    /// Begins a read, whose answer comes after all that was submitted before.
    pub(super) fn load(&self, queue: QueueId, from: u64) {
        self.fault(|faults| faults.holding = true);
        *self.read.lock() = Some(self.state.load(queue, from, usize::MAX, usize::MAX));
    }

    /// Forgets the read.
    pub(super) fn cancel_load(&self) {
        *self.read.lock() = None;
    }

    /// Answers the read, if that may be, with at most `most` entries of what is committed by now.
    pub(super) fn read(&self, queue: QueueId, most: usize, now: Timestamp) -> Option<JournalPage> {
        self.state.answer();
        self.fault(|faults| faults.holding = true);
        let mut read = self.read.lock();
        let Poll::Ready(loaded) = read.as_mut()?.as_mut().poll(&mut Context::from_waker(Waker::noop()))
        else {
            return None;
        };
        *read = None;
        let Loaded { mut entries, next, end, .. } = loaded.expect("a read");
        let is_whole = entries.len() <= most;
        entries.truncate(most);
        let next = if is_whole { next } else { entries.last().map_or(0, |entry| entry.seq + 1) };
        for entry in &mut entries {
            let expires = self.contents(|disk| disk.entries[&(queue, entry.seq)].1);
            if !entry.sent && expires.is_some_and(|at| at <= now) {
                entry.message = entry.message.take().map(|message| message.expired());
            }
        }
        let group = |queue: QueueId| u32::try_from(queue.0).expect("the model's groups are few");
        let entries = entries.into_iter().map(|entry| entry.with_group(group)).collect();
        Some(JournalPage { entries, next, end: end && is_whole })
    }

    /// Commits about `most` operations, or fails them.
    pub(super) fn commit(&self, most: usize, fails: bool) {
        self.fault(|faults| faults.failing = fails);
        self.commit_some(most);
        self.fault(|faults| faults.failing = false);
    }

    /// Commits all that can be.
    pub(super) fn commit_all(&self) {
        self.commit(usize::MAX, false);
    }

    /// Loses what is not committed.
    pub(super) fn crash(&self) {
        self.state.crash();
        self.cancel_load();
    }

    /// A queue as the start finds it, with the packet identifiers that came in apart.
    pub(super) fn summary(&self, queue: QueueId) -> (StoredQueue<'static>, Vec<u16>) {
        let summaries = self.summaries().expect("no fault");
        let found = summaries.into_iter().find(|summary| summary.queue == queue).unwrap_or_default();
        let QueueSummary { messages, bytes, first, next, exact, begun, received, .. } = found;
        (StoredQueue { first, next, exact, begun, messages, bytes, received: &[] }, received)
    }
}
