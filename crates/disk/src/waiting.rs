//! Changes that wait to be written where only the last change of a key counts, so that even while the disk hangs there are never
//! more changes than keys: retained messages and sessions.

use std::{
    mem,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
};

use gateway_core::{Commit, Feeder, SharedMessage, Shares};

use super::committer::{EnvironmentWriter, Inbox};
use crate::table::WriteTxn;

/// The last change of each key, in the order of keys.
pub(super) trait Changes: Default + Send + 'static {
    /// One change, and who waits for it.
    type Op: Send;
    /// Tables to which changes are written.
    type Tables: Send + 'static;

    /// Adds a change to them and to `tally`, or refuses it if that is full and somebody can be told.
    fn push(&mut self, op: Self::Op, tally: &mut Tally);

    /// Adds what came later.
    fn merge(&mut self, later: Self);

    fn is_empty(&self) -> bool;

    /// Bytes that the values count for.
    fn bytes(&self) -> usize;

    /// Returns whether there is a new value to write that somebody waits for.
    fn has_offer(&self) -> bool;

    /// Drops offered values, which could not be written; all else stays, to be tried again.
    fn fail(&mut self);

    /// Writes them; `buffer` is for records.
    fn apply(
        &self,
        tables: &mut Self::Tables,
        txn: &mut WriteTxn<'_>,
        buffer: &mut Vec<u8>,
    ) -> Result<(), heed::Error>;

    /// The transaction of the last `apply` is durable.
    fn committed(_tables: &Self::Tables) {}

    /// Drops what was written. Commits that wait for it without being in the tally are added to `done`.
    fn clear(&mut self, _done: &mut Vec<Arc<Commit>>) {
        *self = Self::default();
    }

    /// Takes commits out that wait for what could not be written, without being in the tally; with `all`, for anything.
    fn refused(&mut self, _all: bool) -> Vec<Arc<Commit>> {
        Vec::new()
    }
}

/// Weight of the changes, and the commits that wait for them.
pub(super) struct Tally {
    pub(super) commits: Vec<Arc<Commit>>,
    /// Bytes that the values here count for.
    pub(super) bytes: usize,
    operations: usize,
    /// Number of the next change that asks for one.
    next_number: Arc<AtomicU64>,
    /// Bytes of values that the writer has taken.
    in_hand: Arc<AtomicUsize>,
    limit: usize,
    /// Bytes that came since the writer took the last, by sender; where senders share the room.
    shares: Shares,
}

impl Tally {
    /// Tells whether there is room for the message of this sender under a new key.
    pub(super) fn admits(&self, message: &SharedMessage) -> bool {
        let others = (self.bytes + self.in_hand.load(Relaxed)).saturating_sub(self.shares.total());
        self.shares.admit_beside(others, message.qos, message.cost(), || Feeder::from(message)).is_ok()
    }

    /// Notes that values that took `before` bytes take `now`, by a change of this sender.
    pub(super) fn resize(&mut self, feeder: Feeder, before: usize, now: usize) {
        self.bytes = self.bytes + now - before;
        match now.checked_sub(before) {
            Some(more) => self.shares.take(feeder, more),
            // The larger value may have been another sender's.
            None => self.shares.give_back(feeder, (before - now).min(self.shares.held(feeder))),
        }
    }

    /// A number for a change, larger than those of earlier ones.
    pub(super) fn number(&self) -> u64 {
        self.next_number.fetch_add(1, Relaxed)
    }

    pub(super) fn is_full(&self) -> bool {
        self.bytes + self.in_hand.load(Relaxed) > self.limit
    }
}

/// Changes on their way to the writer, and with it.
pub(super) struct WaitingChanges<C> {
    changes: C,
    tally: Tally,
}

impl<C: Changes> WaitingChanges<C> {
    /// The writer's and its two inboxes, all empty. They are full with more than `limit` bytes in an inbox and in the
    /// writer's together.
    pub(super) fn three(limit: usize) -> (Self, [Self; 2]) {
        let (in_hand, next_number) = (Arc::default(), Arc::new(AtomicU64::new(1)));
        let tally = || Tally {
            commits: Vec::new(),
            bytes: 0,
            operations: 0,
            next_number: Arc::clone(&next_number),
            in_hand: Arc::clone(&in_hand),
            limit,
            shares: Shares::new(limit),
        };
        let new = || Self { changes: C::default(), tally: tally() };
        (new(), [new(), new()])
    }
}

impl<C: Changes> Inbox for WaitingChanges<C> {
    type Op = C::Op;

    fn push(&mut self, op: C::Op) {
        self.tally.operations += 1;
        self.changes.push(op, &mut self.tally);
    }

    fn len(&self) -> usize {
        self.tally.operations
    }
}

/// Writes what waits.
pub(super) struct WaitingWork<C: Changes> {
    tables: C::Tables,
    batch: WaitingChanges<C>,
    buffer: Vec<u8>,
}

impl<C: Changes> WaitingWork<C> {
    /// `batch` is an empty one.
    pub(super) fn new(tables: C::Tables, batch: WaitingChanges<C>) -> Self {
        Self { tables, batch, buffer: Vec::new() }
    }

    /// The changes with the writer.
    pub(super) fn changes(&mut self) -> &mut C {
        &mut self.batch.changes
    }

    fn note_bytes(&self) {
        self.batch.tally.in_hand.store(self.batch.changes.bytes(), Relaxed);
    }
}

impl<C: Changes> EnvironmentWriter for WaitingWork<C> {
    type Inbox = WaitingChanges<C>;

    fn accept(&mut self, inbox: &mut WaitingChanges<C>) {
        self.batch.changes.merge(mem::take(&mut inbox.changes));
        self.batch.tally.commits.append(&mut inbox.tally.commits);
        (inbox.tally.bytes, inbox.tally.operations) = (0, 0);
        inbox.tally.shares.clear();
        self.note_bytes();
    }

    /// All that waits is one unit. What comes later to a queue must find its session, or its group, and whoever waits does so for all
    /// of it.
    fn plan(&mut self, _redo: usize) -> bool {
        self.more()
    }

    fn apply(&mut self, txn: &mut WriteTxn<'_>) -> Result<(), heed::Error> {
        self.batch.changes.apply(&mut self.tables, txn, &mut self.buffer)
    }

    /// Changes that nobody waits for are written even from the reserve: they cannot be refused, and there is a bound to them.
    fn adds(&self) -> bool {
        self.batch.changes.has_offer()
    }

    fn committed(&mut self) {
        let WaitingChanges { changes, tally } = &mut self.batch;
        C::committed(&self.tables);
        changes.clear(&mut tally.commits);
        self.note_bytes();
        for commit in self.batch.tally.commits.drain(..) {
            commit.done();
        }
    }

    fn failed(&mut self) {
        let WaitingChanges { changes, tally } = &mut self.batch;
        changes.fail();
        tally.commits.extend(changes.refused(false));
        self.note_bytes();
        for commit in self.batch.tally.commits.drain(..) {
            commit.refuse();
        }
    }

    fn more(&self) -> bool {
        !self.batch.changes.is_empty() || !self.batch.tally.commits.is_empty()
    }

    fn close(&mut self) {
        let WaitingChanges { changes, tally } = &mut self.batch;
        tally.commits.extend(changes.refused(true));
        self.failed();
    }
}
