//! The writer's side: checks and makes what was submitted, in order.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use gateway_core::{GroupId, metrics::count};
use heed::{RoTxn, RwTxn};
use tokio::sync::oneshot;

use super::{EPOCH, RECORD, REMOVED_AT_ONCE, key};
use crate::{
    Epoch, Expect, StateChange, StateError, StoreError,
    embedded::{
        committer::{Inbox, Work},
        environment::Table,
        fields,
        reserve::RESERVE,
    },
};

/// Bytes counted for an operation and for each change of it, besides key and value.
const OVERHEAD: usize = 100;

/// Bytes that one transaction changes, about: a commit must not take long.
const BATCH_BYTES: usize = 8 << 20;

/// What is submitted.
pub(super) enum Op {
    Acquire {
        group: GroupId,
        after: Epoch,
        reply: oneshot::Sender<Result<Epoch, StateError>>,
    },
    Write {
        group: GroupId,
        epoch: Epoch,
        changes: Vec<StateChange>,
        reply: oneshot::Sender<Result<(), StateError>>,
    },
    /// Answered with the number of records that it removed.
    Remove {
        group: GroupId,
        epoch: Epoch,
        reply: oneshot::Sender<Result<usize, StateError>>,
    },
}

/// An operation, and what it counts for.
pub(super) struct Submitted {
    op: Op,
    bytes: usize,
}

/// What became of an operation.
#[derive(Clone, Copy)]
enum Done {
    Acquired(Epoch),
    Written,
    Removed(usize),
    Fenced,
    Conflict,
}

/// Operations that wait. Beyond a limit they are refused.
pub(super) struct StateInbox {
    ops: Vec<Submitted>,
    bytes: usize,
    in_hand: Arc<AtomicUsize>,
    limit: usize,
}

/// The writer's.
pub(super) struct StateWork {
    table: Table,
    ops: std::collections::VecDeque<Submitted>,
    /// How many of them are in the transaction, and what became of each.
    planned: usize,
    done: Vec<Done>,
    in_hand: Arc<AtomicUsize>,
    key: Vec<u8>,
    value: Vec<u8>,
}

impl Submitted {
    pub(super) fn new(op: Op) -> Self {
        let bytes = match &op {
            Op::Write { changes, .. } => {
                let bytes = |change: &StateChange| {
                    let expected = match &change.expect {
                        Expect::Value(value) => value.len(),
                        Expect::Any | Expect::Absent => 0,
                    };
                    OVERHEAD
                        + change.key.len()
                        + change.value.as_ref().map_or(0, |value| value.len())
                        + expected
                };
                changes.iter().map(bytes).sum()
            }
            Op::Acquire { .. } | Op::Remove { .. } => 0,
        };
        Self { op, bytes: bytes + OVERHEAD }
    }

    fn fail(self, error: StoreError) {
        // Whoever is gone wants no answer.
        match self.op {
            Op::Acquire { reply, .. } => drop(reply.send(Err(error.into()))),
            Op::Write { reply, .. } => drop(reply.send(Err(error.into()))),
            Op::Remove { reply, .. } => drop(reply.send(Err(error.into()))),
        }
    }

    fn answer(self, done: Done) {
        let refusal = match done {
            Done::Fenced => Err(StateError::Fenced),
            Done::Conflict => Err(StateError::Conflict),
            Done::Acquired(_) | Done::Written | Done::Removed(_) => Ok(()),
        };
        match (self.op, done) {
            (Op::Acquire { reply, .. }, Done::Acquired(epoch)) => drop(reply.send(Ok(epoch))),
            (Op::Acquire { reply, .. }, _) => drop(reply.send(refusal.map(|()| Epoch::default()))),
            (Op::Write { reply, .. }, _) => drop(reply.send(refusal)),
            (Op::Remove { reply, .. }, Done::Removed(removed)) => drop(reply.send(Ok(removed))),
            (Op::Remove { reply, .. }, _) => drop(reply.send(refusal.map(|()| 0))),
        }
    }
}

/// The last epoch of a group.
pub(super) fn epoch(table: Table, txn: &RoTxn<'_>, group: GroupId) -> Result<Epoch, heed::Error> {
    let value = table.get(txn, &key(group, EPOCH, b""))?;
    let epoch = value.map(|value| fields::open(value).and_then(|mut input| input.u64()));
    match epoch {
        None => Ok(Epoch(0)),
        Some(Some(epoch)) => Ok(Epoch(epoch)),
        Some(None) => {
            count(|c| c.store_damaged_records.add(1));
            gateway_core::error_limited!(group = group.0, "stored epoch of a group is damaged");
            // Nobody has one so high: it is acquired anew.
            Ok(Epoch(u64::MAX >> 1))
        }
    }
}

impl Inbox for StateInbox {
    type Op = Submitted;

    fn push(&mut self, op: Submitted) {
        if self.bytes + self.in_hand.load(Relaxed) > self.limit {
            count(|c| c.store_refused_groups.add(1));
            return op
                .fail(StoreError::Unavailable("too many changes of groups wait for the disk".to_owned()));
        }
        self.bytes += op.bytes;
        self.ops.push(op);
    }

    fn len(&self) -> usize {
        self.ops.len()
    }
}

impl StateWork {
    /// The writer's side, and two inboxes that take `limit` bytes together with it.
    pub(super) fn new(table: Table, limit: usize) -> (Self, [StateInbox; 2]) {
        let in_hand = Arc::new(AtomicUsize::new(0));
        let inbox = || StateInbox { ops: Vec::new(), bytes: 0, in_hand: Arc::clone(&in_hand), limit };
        let inboxes = [inbox(), inbox()];
        let work = Self {
            table,
            ops: std::collections::VecDeque::new(),
            planned: 0,
            done: Vec::new(),
            in_hand,
            key: Vec::new(),
            value: Vec::new(),
        };
        (work, inboxes)
    }

    fn take_planned(&mut self) -> impl Iterator<Item = (Submitted, Option<Done>)> {
        let planned = std::mem::take(&mut self.planned);
        let bytes: usize = self.ops.iter().take(planned).map(|op| op.bytes).sum();
        self.in_hand.fetch_sub(bytes, Relaxed);
        let mut done = std::mem::take(&mut self.done).into_iter();
        self.ops.drain(..planned).map(move |op| (op, done.next())).collect::<Vec<_>>().into_iter()
    }

    fn set_key(&mut self, group: GroupId, name: &[u8]) {
        self.key.clear();
        self.key.extend_from_slice(&group.0.to_be_bytes());
        self.key.push(RECORD);
        self.key.extend_from_slice(name);
    }

    fn write(
        &mut self,
        txn: &mut RwTxn<'_>,
        group: GroupId,
        changes: &[StateChange],
    ) -> Result<Done, heed::Error> {
        for StateChange { key, expect, .. } in changes {
            let expected = match expect {
                Expect::Any => continue,
                Expect::Absent => None,
                Expect::Value(value) => Some(&value[..]),
            };
            self.set_key(group, key);
            let value = self.table.get(txn, &self.key)?;
            // What is damaged is not what was expected.
            let found = value.map(|value| fields::open(value).map(|input| input.0));
            if found != expected.map(Some) {
                return Ok(Done::Conflict);
            }
        }
        for StateChange { key, value, .. } in changes {
            self.set_key(group, key);
            match value {
                Some(value) => {
                    fields::begin(&mut self.value);
                    self.value.extend_from_slice(value);
                    fields::seal(&mut self.value);
                    self.table.put(txn, &self.key, &self.value)?;
                }
                None => {
                    self.table.delete(txn, &self.key)?;
                }
            }
        }
        Ok(Done::Written)
    }

    fn make(&mut self, txn: &mut RwTxn<'_>, op: &Op) -> Result<Done, heed::Error> {
        match op {
            Op::Acquire { group, after, .. } if epoch(self.table, txn, *group)? != *after => Ok(Done::Fenced),
            Op::Acquire { group, after, .. } => {
                let epoch = Epoch(after.0.saturating_add(1));
                fields::begin(&mut self.value);
                self.value.extend_from_slice(&epoch.0.to_le_bytes());
                fields::seal(&mut self.value);
                self.table.put(txn, &key(*group, EPOCH, b""), &self.value)?;
                Ok(Done::Acquired(epoch))
            }
            Op::Write { group, epoch: own, .. } | Op::Remove { group, epoch: own, .. }
                if epoch(self.table, txn, *group)? != *own =>
            {
                Ok(Done::Fenced)
            }
            Op::Write { group, changes, .. } => self.write(txn, *group, changes),
            Op::Remove { group, .. } => {
                let first = key(*group, RECORD, b"");
                let keys = self.table.prefix_iter(txn, &first)?.take(REMOVED_AT_ONCE);
                let keys: Vec<Vec<u8>> =
                    keys.map(|entry| entry.map(|(key, _)| key.to_vec())).collect::<Result<_, _>>()?;
                for key in &keys {
                    self.table.delete(txn, key)?;
                }
                Ok(Done::Removed(keys.len()))
            }
        }
    }
}

impl Work for StateWork {
    type Inbox = StateInbox;

    fn accept(&mut self, inbox: &mut StateInbox) {
        self.in_hand.fetch_add(inbox.bytes, Relaxed);
        inbox.bytes = 0;
        self.ops.extend(inbox.ops.drain(..));
    }

    fn plan(&mut self) -> bool {
        let mut bytes = 0;
        let fits = |op: &&Submitted| {
            bytes += op.bytes;
            bytes <= BATCH_BYTES
        };
        self.planned = self.ops.iter().take_while(fits).count().max(1).min(self.ops.len());
        self.planned > 0
    }

    fn apply(&mut self, txn: &mut RwTxn<'_>) -> Result<(), heed::Error> {
        let ops = std::mem::take(&mut self.ops);
        let done: Result<_, _> =
            ops.iter().take(self.planned).map(|submitted| self.make(txn, &submitted.op)).collect();
        self.ops = ops;
        self.done = done?;
        Ok(())
    }

    /// A group that cannot note what was acknowledged cannot free its messages either: notes may use the reserve, of which
    /// they need little again and again. What is large, as dead letters are, may not.
    fn adds(&self) -> bool {
        self.ops.iter().take(self.planned).map(|op| op.bytes).sum::<usize>() > RESERVE / 4
    }

    fn committed(&mut self) {
        for (op, done) in self.take_planned() {
            match done {
                Some(done) => op.answer(done),
                None => op.fail(crate::embedded::closed()),
            }
        }
    }

    fn failed(&mut self) {
        self.done.clear();
        for (op, _) in self.take_planned() {
            op.fail(StoreError::Unavailable("the disk does not take changes of groups".to_owned()));
        }
    }

    fn more(&self) -> bool {
        !self.ops.is_empty()
    }

    fn close(&mut self) {
        self.planned = self.ops.len();
        self.failed();
    }
}
