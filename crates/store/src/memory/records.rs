//! Records in memory, for the tests of others: writes can be held up, and can fail.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Bound,
    sync::Arc,
};

use bytes::Bytes;
use gateway_core::Commit;
use parking_lot::Mutex;
use tokio::sync::{oneshot, watch};

use crate::{
    BoxFuture, Record, RecordChange, RecordKind, RecordOutcome, RecordRange, RecordStore, RecordWaiter,
    RecordWrite, StoreError, StoreHealth,
};

/// A [`RecordStore`] that ends with the process.
#[derive(Default)]
pub struct MemoryRecords {
    table: Arc<Mutex<MemoryTable>>,
    /// Writes wait while it is true.
    held: watch::Sender<bool>,
    /// Reads wait and fail, too.
    is_remote: bool,
}

#[derive(Default)]
struct MemoryTable {
    /// Values; `None` of a damaged record.
    records: BTreeMap<(RecordKind, Bytes), Option<Bytes>>,
    failing: bool,
    waiting: VecDeque<(RecordWrite, RecordWaiter)>,
    /// Never told anything.
    lost: Vec<RecordWaiter>,
    writes: usize,
}

impl MemoryRecords {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty one whose reads wait and fail as its writes do: all of it can be away.
    pub fn remote() -> Self {
        Self { is_remote: true, ..Self::default() }
    }

    /// Sets whether writes wait until [`Self::settle`] is called; those that have waited are made when they need no more.
    pub fn hold(&self, held: bool) {
        self.held.send_replace(held);
        if !held {
            self.settle(usize::MAX);
        }
    }

    /// Sets whether writes fail; those that nobody waits for are made when they no more do.
    pub fn fail(&self, failing: bool) {
        self.table.lock().failing = failing;
        if !failing && !*self.held.borrow() {
            self.settle(usize::MAX);
        }
    }

    /// Loses all that waits, as a crash does: whoever waits for it is told nothing.
    pub fn crash(&self) {
        self.held.send_replace(false);
        let mut table = self.table.lock();
        let lost: Vec<_> = table.waiting.drain(..).map(|(_, waiter)| waiter).collect();
        table.lost.extend(lost);
    }

    /// Returns the number of waiting writes.
    pub fn waiting(&self) -> usize {
        self.table.lock().waiting.len()
    }

    /// Returns the number of writes made.
    pub fn writes(&self) -> usize {
        self.table.lock().writes
    }

    /// Returns the number of records.
    pub fn stored(&self) -> usize {
        self.table.lock().records.len()
    }

    /// Damages a record.
    pub fn damage(&self, kind: RecordKind, key: &[u8]) {
        self.table.lock().records.insert((kind, Bytes::copy_from_slice(key)), None);
    }

    /// Makes at most `most` of the writes that wait, in order.
    pub fn settle(&self, most: usize) -> usize {
        let mut settled = 0;
        while settled < most {
            let mut table = self.table.lock();
            let Some((write, waiter)) = table.waiting.pop_front() else { break };
            if table.failing && waiter.is_nobody() {
                table.waiting.push_front((write, waiter));
                break;
            }
            let result = table.apply(&write);
            if result.is_err() {
                table.keep_removals(write.changes);
            }
            drop(table);
            waiter.tell(result);
            settled += 1;
        }
        settled
    }

    fn take(&self, write: RecordWrite, waiter: RecordWaiter) {
        let mut table = self.table.lock();
        if *self.held.borrow() || (table.failing && waiter.is_nobody()) {
            return table.waiting.push_back((write, waiter));
        }
        let result = table.apply(&write);
        if result.is_err() {
            table.keep_removals(write.changes);
        }
        drop(table);
        waiter.tell(result);
    }
}

fn unavailable() -> StoreError {
    StoreError::Unavailable("it was told to fail".to_owned())
}

impl MemoryTable {
    fn apply(&mut self, write: &RecordWrite) -> Result<RecordOutcome, StoreError> {
        if self.failing || !write.is_valid() {
            return Err(unavailable());
        }
        let is_met = |kind, key: &Bytes, expect: &crate::Expect| {
            expect.is_met(self.records.get(&(kind, key.clone())).map(Option::as_deref))
        };
        if let Some(fence) = &write.fence
            && !is_met(fence.kind, &fence.key, &crate::Expect::Version(fence.version))
        {
            return Ok(RecordOutcome::Fenced);
        }
        if !write.changes.iter().all(|change| is_met(change.kind, &change.key, &change.expect)) {
            return Ok(RecordOutcome::Conflict);
        }
        self.writes += 1;
        for RecordChange { kind, key, value, .. } in write.changes.iter().cloned() {
            match value {
                Some(value) => self.records.insert((kind, key), Some(value)),
                None => self.records.remove(&(kind, key)),
            };
        }
        Ok(RecordOutcome::Done)
    }

    fn keep_removals(&mut self, mut changes: Vec<RecordChange>) {
        changes.retain(RecordChange::is_removal);
        if !changes.is_empty() {
            self.waiting.push_back((RecordWrite { changes, fence: None }, RecordWaiter::Nobody));
        }
    }
}

impl RecordStore for MemoryRecords {
    fn submit(&self, changes: Vec<RecordChange>, commit: Option<Arc<Commit>>) {
        let waiter = commit.map_or(RecordWaiter::Nobody, RecordWaiter::Commit);
        self.take(RecordWrite { changes, fence: None }, waiter);
    }

    fn write(&self, write: RecordWrite) -> BoxFuture<'static, Result<RecordOutcome, StoreError>> {
        let (reply, answer) = oneshot::channel();
        self.take(write, RecordWaiter::Call(reply));
        Box::pin(async move { answer.await.map_err(|_| unavailable())? })
    }

    fn read(&self, range: RecordRange) -> BoxFuture<'static, Result<Vec<Record>, StoreError>> {
        let RecordRange { kind, prefix, after, limit, value_bytes } = range;
        let from = match after.filter(|after| *after >= prefix) {
            Some(after) => Bound::Excluded((kind, after)),
            None => Bound::Included((kind, prefix.clone())),
        };
        let (table, is_remote, mut held) = (Arc::clone(&self.table), self.is_remote, self.held.subscribe());
        Box::pin(async move {
            if is_remote {
                held.wait_for(|held| !held).await.map_err(|_| unavailable())?;
            }
            let table = table.lock();
            if is_remote && table.failing {
                return Err(unavailable());
            }
            let records = table.records.range((from, Bound::Unbounded));
            let in_range = records.take_while(|((of, key), _)| *of == kind && key.starts_with(&prefix));
            let cut =
                |value: &Option<Bytes>| Some(value.as_ref()?.slice(..value.as_ref()?.len().min(value_bytes)));
            Ok(in_range
                .take(limit)
                .map(|((_, key), value)| Record { key: key.clone(), value: cut(value) })
                .collect())
        })
    }

    fn restore(&self, kind: RecordKind, into: &mut dyn FnMut(Bytes, Bytes)) -> Result<(), StoreError> {
        let records = {
            let mut table = self.table.lock();
            table.records.retain(|(of, _), value| *of != kind || value.is_some());
            table.records.clone()
        };
        for ((_, key), value) in records.into_iter().filter(|((of, _), _)| *of == kind) {
            into(key, value.unwrap_or_default());
        }
        Ok(())
    }

    fn accepts(&self) -> bool {
        true
    }

    fn health(&self) -> StoreHealth {
        if self.table.lock().failing { StoreHealth::Failing } else { StoreHealth::Sound }
    }
}
