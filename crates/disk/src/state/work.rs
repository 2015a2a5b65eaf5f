//! The writer of all parts: what each of them chose goes into one transaction, and each hears what became of it.
//!
//! Changes of sessions and retained messages that wait are in every transaction, whatever waits for queues: a flood of messages
//! delays the record of a CONNECT by one commit at most.

use std::time::Duration;

use gateway_core::QueueOp;

use super::{
    queues::{QueueInbox, QueueJob, QueueWork},
    retained::{RetainedChanges, RetainedOp},
    sessions::{SessionChange, SessionChanges},
};
use crate::{
    committer::{EnvironmentWriter, Inbox},
    table::WriteTxn,
    waiting::{WaitingChanges, WaitingWork},
};
use store::SessionOp;

/// One change, or a read of a queue.
pub(super) enum StateOp {
    Queue(QueueJob),
    Session(SessionChange),
    Retained(RetainedOp),
}

impl From<QueueOp> for StateOp {
    fn from(op: QueueOp) -> Self {
        Self::Queue(QueueJob::Op(op))
    }
}

impl From<SessionOp> for StateOp {
    fn from(op: SessionOp) -> Self {
        Self::Session(SessionChange::Op(op))
    }
}

impl StateOp {
    /// Returns whether somebody waits for it who does not ask the store to hurry.
    pub(super) fn is_urgent(&self) -> bool {
        match self {
            Self::Queue(job) => job.is_urgent(),
            Self::Session(SessionChange::Op(op)) => match op {
                SessionOp::Put(_, commit) | SessionOp::Remove(_, commit) => commit.is_some(),
                SessionOp::Subscribe(..) | SessionOp::Unsubscribe(..) => true,
                SessionOp::Group(..) | SessionOp::RemoveGroup(_) => false,
            },
            Self::Session(SessionChange::NoteSent(..)) | Self::Retained(_) => false,
        }
    }
}

/// The inboxes of the parts, under one lock: all see changes in one order.
pub(super) struct StateInbox {
    queues: QueueInbox,
    sessions: WaitingChanges<SessionChanges>,
    retained: WaitingChanges<RetainedChanges>,
}

impl Inbox for StateInbox {
    type Op = StateOp;

    fn push(&mut self, op: StateOp) {
        match op {
            StateOp::Queue(job) => {
                // In the order of its queue, since reads must see it, and with the record that comes next, which does not wait
                // for the queue.
                if let &QueueJob::Op(QueueOp::NoteSent { queue, below }) = &job {
                    self.sessions.push(SessionChange::NoteSent(queue, below));
                }
                self.queues.push(job);
            }
            StateOp::Session(op) => self.sessions.push(op),
            StateOp::Retained(op) => self.retained.push(op),
        }
    }

    fn len(&self) -> usize {
        self.queues.len() + self.sessions.len() + self.retained.len()
    }
}

/// The work of a part, and its two inboxes, which are empty.
pub(super) type WithInboxes<W> = (W, [<W as EnvironmentWriter>::Inbox; 2]);

/// See the module.
pub(super) struct StateWork {
    queues: Part<QueueWork>,
    sessions: Part<WaitingWork<SessionChanges>>,
    retained: Part<WaitingWork<RetainedChanges>>,
}

/// The work of a part.
struct Part<W> {
    work: W,
    /// Something of the part is in the transaction.
    planned: bool,
}

impl<W: EnvironmentWriter> Part<W> {
    fn new(work: W) -> Self {
        Self { work, planned: false }
    }

    fn plan(&mut self, may: bool, redo: usize) -> bool {
        self.planned = may && self.work.plan(redo);
        self.planned
    }

    fn apply(&mut self, txn: &mut WriteTxn<'_>) -> Result<(), heed::Error> {
        if self.planned { self.work.apply(txn) } else { Ok(()) }
    }

    fn adds(&self) -> bool {
        self.planned && self.work.adds()
    }

    fn committed(&mut self) {
        if std::mem::take(&mut self.planned) {
            self.work.committed();
        }
    }

    fn failed(&mut self) {
        if std::mem::take(&mut self.planned) {
            self.work.failed();
        }
    }
}

impl StateWork {
    /// All parts.
    pub(super) fn new(
        (queues, [queue_inbox, queue_spare]): WithInboxes<QueueWork>,
        (sessions, [session_inbox, session_spare]): WithInboxes<WaitingWork<SessionChanges>>,
        (retained, [retained_inbox, retained_spare]): WithInboxes<WaitingWork<RetainedChanges>>,
    ) -> (Self, [StateInbox; 2]) {
        let work =
            Self { queues: Part::new(queues), sessions: Part::new(sessions), retained: Part::new(retained) };
        let inbox = StateInbox { queues: queue_inbox, sessions: session_inbox, retained: retained_inbox };
        let spare = StateInbox { queues: queue_spare, sessions: session_spare, retained: retained_spare };
        (work, [inbox, spare])
    }
}

impl EnvironmentWriter for StateWork {
    type Inbox = StateInbox;

    fn accept(&mut self, inbox: &mut StateInbox) {
        self.queues.work.accept(&mut inbox.queues);
        self.sessions.work.accept(&mut inbox.sessions);
        self.retained.work.accept(&mut inbox.retained);
    }

    fn plan(&mut self, redo: usize) -> bool {
        let queues = self.queues.plan(true, redo);
        if queues {
            self.retained.work.changes().close_units(self.queues.work.closed_units());
        }
        let others = !self.queues.work.sweeps_alone();
        let sessions = self.sessions.plan(others, redo);
        let retained = self.retained.plan(others, redo);
        queues || sessions || retained
    }

    fn apply(&mut self, txn: &mut WriteTxn<'_>) -> Result<(), heed::Error> {
        self.queues.apply(txn)?;
        self.sessions.apply(txn)?;
        self.retained.apply(txn)
    }

    fn adds(&self) -> bool {
        self.queues.adds() || self.sessions.adds() || self.retained.adds()
    }

    fn committed(&mut self) {
        self.queues.committed();
        self.sessions.committed();
        self.retained.committed();
    }

    fn failed(&mut self) {
        self.queues.failed();
        self.sessions.failed();
        self.retained.failed();
    }

    fn more(&self) -> bool {
        self.queues.work.more() || self.sessions.work.more() || self.retained.work.more()
    }

    fn tick(&self) -> Option<Duration> {
        self.queues.work.tick()
    }

    fn close(&mut self) {
        self.queues.work.close();
        self.sessions.work.close();
        self.retained.work.close();
    }
}
