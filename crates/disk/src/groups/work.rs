//! Makes what was submitted: checks it against what is there, and writes it.

use gateway_core::GroupId;
use heed::{RoTxn, RwTxn};
use tokio::sync::oneshot;

use super::keys::{EPOCH, RECORD, key};
use crate::{
    answered::{AnsweredOperation, Maker},
    counters::count,
    environment::Table,
    fields,
    reserve::RESERVE,
};
use store::{Epoch, Expect, StateChange, StateError, StoreError};

/// Bytes counted for an operation and for each change of it, besides key and value.
const OVERHEAD: usize = 100;

/// Records that one step of a removal takes.
pub(super) const REMOVED_AT_ONCE: usize = 10_000;

/// Operation that is submitted.
pub(super) enum GroupOp {
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

/// Result of an operation.
#[derive(Clone, Copy)]
pub(super) enum Done {
    Acquired(Epoch),
    Written,
    Removed(usize),
    Fenced,
    Conflict,
}

/// The writer's.
pub(super) struct StateMaker {
    table: Table,
    key: Vec<u8>,
    value: Vec<u8>,
}

/// Bytes of a change.
fn size(change: &StateChange) -> usize {
    let expected = match &change.expect {
        Expect::Value(value) => value.len(),
        Expect::Any | Expect::Absent => 0,
    };
    OVERHEAD + change.key.len() + change.value.as_ref().map_or(0, |value| value.len()) + expected
}

impl AnsweredOperation for GroupOp {
    type Done = Done;
    const CHANGES: &'static str = "changes of groups";

    fn bytes(&self) -> usize {
        OVERHEAD
            + match self {
                Self::Write { changes, .. } => changes.iter().map(size).sum(),
                Self::Acquire { .. } | Self::Remove { .. } => 0,
            }
    }

    fn answer(self, done: Done) {
        let refusal = match done {
            Done::Fenced => Err(StateError::Fenced),
            Done::Conflict => Err(StateError::Conflict),
            Done::Acquired(_) | Done::Written | Done::Removed(_) => Ok(()),
        };
        match (self, done) {
            (Self::Acquire { reply, .. }, Done::Acquired(epoch)) => drop(reply.send(Ok(epoch))),
            (Self::Acquire { reply, .. }, _) => drop(reply.send(refusal.map(|()| Epoch::default()))),
            (Self::Write { reply, .. }, _) => drop(reply.send(refusal)),
            (Self::Remove { reply, .. }, Done::Removed(removed)) => drop(reply.send(Ok(removed))),
            (Self::Remove { reply, .. }, _) => drop(reply.send(refusal.map(|()| 0))),
        }
    }

    fn fail(self, error: StoreError) {
        // A caller that is gone wants no answer.
        match self {
            Self::Acquire { reply, .. } => drop(reply.send(Err(error.into()))),
            Self::Write { reply, .. } => drop(reply.send(Err(error.into()))),
            Self::Remove { reply, .. } => drop(reply.send(Err(error.into()))),
        }
    }

    fn count_refused() {
        count(|c| c.store_refused_groups.add(1));
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

impl StateMaker {
    pub(super) fn new(table: Table) -> Self {
        Self { table, key: Vec::new(), value: Vec::new() }
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
            // A damaged record is not the expected one.
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
}

impl Maker for StateMaker {
    type Op = GroupOp;

    fn make(&mut self, txn: &mut RwTxn<'_>, op: &GroupOp) -> Result<Done, heed::Error> {
        match op {
            GroupOp::Acquire { group, after, .. } if epoch(self.table, txn, *group)? != *after => {
                Ok(Done::Fenced)
            }
            GroupOp::Acquire { group, after, .. } => {
                let epoch = Epoch(after.0.saturating_add(1));
                fields::begin(&mut self.value);
                self.value.extend_from_slice(&epoch.0.to_le_bytes());
                fields::seal(&mut self.value);
                self.table.put(txn, &key(*group, EPOCH, b""), &self.value)?;
                Ok(Done::Acquired(epoch))
            }
            GroupOp::Write { group, epoch: own, .. } | GroupOp::Remove { group, epoch: own, .. }
                if epoch(self.table, txn, *group)? != *own =>
            {
                Ok(Done::Fenced)
            }
            GroupOp::Write { group, changes, .. } => self.write(txn, *group, changes),
            GroupOp::Remove { group, .. } => {
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

    /// A group that cannot note what was acknowledged cannot free its messages either: notes may use the reserve, of which
    /// they need little again and again. What is large, as dead letters are, may not.
    fn adds<'a>(_ops: impl Iterator<Item = &'a GroupOp>, bytes: usize) -> bool {
        bytes > RESERVE / 4
    }
}
