//! A [`GroupState`] in memory, for the tests of others: it can be held up and can fail.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use bytes::Bytes;
use gateway_core::GroupId;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::{
    BoxFuture, Epoch, Expect, GroupState, StateChange, StateError, StateRecord, StoreError, StoreHealth,
};

/// Records of groups in memory.
#[derive(Default)]
pub struct MemoryGroupState(Arc<Mutex<MemoryRecords>>);

#[derive(Default)]
struct MemoryRecords {
    epochs: BTreeMap<GroupId, Epoch>,
    records: BTreeMap<(GroupId, Bytes), Bytes>,
    held: bool,
    failing: bool,
    waiting: VecDeque<(MemoryWrite, oneshot::Sender<Result<(), StateError>>)>,
    writes: usize,
}

struct MemoryWrite {
    group: GroupId,
    epoch: Epoch,
    /// `None` removes the group.
    changes: Option<Vec<StateChange>>,
}

impl MemoryGroupState {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets whether writes wait until [`Self::settle`] is called.
    pub fn hold(&self, held: bool) {
        self.0.lock().held = held;
    }

    /// Sets whether writes and acquisitions fail.
    pub fn fail(&self, failing: bool) {
        self.0.lock().failing = failing;
    }

    /// Returns the number of waiting writes.
    pub fn waiting(&self) -> usize {
        self.0.lock().waiting.len()
    }

    /// Returns the number of writes made.
    pub fn writes(&self) -> usize {
        self.0.lock().writes
    }

    /// Makes at most `most` of the writes that wait, in order.
    pub fn settle(&self, most: usize) -> usize {
        let mut settled = 0;
        while settled < most {
            let mut state = self.0.lock();
            let Some((write, reply)) = state.waiting.pop_front() else { break };
            let result = state.apply(write);
            drop(state);
            let _ = reply.send(result);
            settled += 1;
        }
        settled
    }

    fn submit(&self, write: MemoryWrite) -> BoxFuture<'static, Result<(), StateError>> {
        let mut state = self.0.lock();
        if state.held {
            let (reply, answer) = oneshot::channel();
            state.waiting.push_back((write, reply));
            return Box::pin(async move { answer.await.map_err(|_| unavailable())? });
        }
        let result = state.apply(write);
        Box::pin(async move { result })
    }
}

fn unavailable() -> StoreError {
    StoreError::Unavailable("it was told to fail".to_owned())
}

impl MemoryRecords {
    fn apply(&mut self, write: MemoryWrite) -> Result<(), StateError> {
        if self.failing {
            return Err(unavailable().into());
        }
        if self.epochs.get(&write.group).copied().unwrap_or_default() != write.epoch {
            return Err(StateError::Fenced);
        }
        self.writes += 1;
        let Some(changes) = write.changes else {
            self.records.retain(|(group, _), _| *group != write.group);
            return Ok(());
        };
        let as_expected = |change: &StateChange| {
            let value = self.records.get(&(write.group, change.key.clone()));
            match &change.expect {
                Expect::Any => true,
                Expect::Absent => value.is_none(),
                Expect::Value(expected) => value == Some(expected),
            }
        };
        if !changes.iter().all(as_expected) {
            return Err(StateError::Conflict);
        }
        for StateChange { key, value, .. } in changes {
            match value {
                Some(value) => self.records.insert((write.group, key), value),
                None => self.records.remove(&(write.group, key)),
            };
        }
        Ok(())
    }
}

impl GroupState for MemoryGroupState {
    fn groups(&self) -> BoxFuture<'static, Result<Vec<GroupId>, StoreError>> {
        let state = self.0.lock();
        let mut groups: Vec<GroupId> = state.records.keys().map(|(group, _)| *group).collect();
        groups.dedup();
        Box::pin(async move { Ok(groups) })
    }

    fn epoch(&self, group: GroupId) -> BoxFuture<'static, Result<Epoch, StoreError>> {
        let epoch = self.0.lock().epochs.get(&group).copied().unwrap_or_default();
        Box::pin(async move { Ok(epoch) })
    }

    fn acquire(&self, group: GroupId, after: Epoch) -> BoxFuture<'static, Result<Epoch, StateError>> {
        let mut state = self.0.lock();
        let failing = state.failing;
        let epoch = state.epochs.entry(group).or_default();
        let result = if failing {
            Err(unavailable().into())
        } else if *epoch != after {
            Err(StateError::Fenced)
        } else {
            epoch.0 += 1;
            Ok(*epoch)
        };
        Box::pin(async move { result })
    }

    fn write(
        &self,
        group: GroupId,
        epoch: Epoch,
        changes: Vec<StateChange>,
    ) -> BoxFuture<'static, Result<(), StateError>> {
        self.submit(MemoryWrite { group, epoch, changes: Some(changes) })
    }

    fn read(
        &self,
        group: GroupId,
        prefix: Bytes,
        after: Option<Bytes>,
        limit: usize,
    ) -> BoxFuture<'static, Result<Vec<StateRecord>, StoreError>> {
        let state = self.0.lock();
        let from = after.clone().unwrap_or_default().max(prefix.clone());
        let records = state.records.range((group, from)..);
        let found = records
            .take_while(|((of, key), _)| *of == group && key.starts_with(&prefix))
            .filter(|((_, key), _)| after.as_ref().is_none_or(|after| key > after))
            .map(|((_, key), value)| StateRecord { key: key.clone(), value: value.clone() })
            .take(limit)
            .collect();
        Box::pin(async move { Ok(found) })
    }

    fn remove(&self, group: GroupId, epoch: Epoch) -> BoxFuture<'static, Result<(), StateError>> {
        self.submit(MemoryWrite { group, epoch, changes: None })
    }

    fn health(&self) -> StoreHealth {
        if self.0.lock().failing { StoreHealth::Failing } else { StoreHealth::Sound }
    }
}
