//! State of consumer groups in LMDB: one writer thread with group commit, reads on the blocking pool.
//!
//! Every write of a commit is checked against what the writes before it leave; one that fails its check changes nothing and
//! holds up no other.

mod keys;
#[cfg(test)]
mod tests;
mod work;

use std::{ops::Bound, path::PathBuf, sync::Arc};

use bytes::Bytes;
use gateway_core::GroupId;
use tokio::sync::oneshot;

use super::{
    DurableOptions,
    answered::AnsweredWork,
    committer::{Committer, Lazy},
    environment::{Environment, Table},
    fields,
    readers::ReadPermits,
};
use crate::counters::count;
use keys::{RECORD, key, split};
use store::{
    BoxFuture, DataDir, Epoch, GroupState, StateChange, StateError, StateRecord, StoreError, StoreHealth,
};
use work::{GroupOp, REMOVED_AT_ONCE, StateMaker};

/// Longest key of a record.
const MAX_KEY: usize = 400;

/// Reads at once; more wait.
const READERS: usize = 4;

/// A read ends after so many bytes of values.
const MAX_READ: usize = 4 << 20;

/// A [`GroupState`] in the data directory.
pub struct EmbeddedGroupState {
    environment: Arc<Environment>,
    table: Table,
    committer: Arc<Committer<AnsweredWork<StateMaker>>>,
    readers: ReadPermits,
}

impl EmbeddedGroupState {
    /// Opens the store in the folder `groups` of the data directory. Blocks on the disk.
    ///
    /// # Errors
    /// [`StoreError::Format`] if a newer version has written it; nothing is changed then.
    pub fn open(directory: &Arc<DataDir>, options: &DurableOptions) -> Result<Self, StoreError> {
        let environment = Arc::new(Environment::open(directory, options.environment("groups", 1))?);
        let table = environment.open_tables(|txn| environment.env.create_database(txn, Some("groups")))?;
        let (work, inboxes) = AnsweredWork::new(StateMaker::new(table), options.max_waiting_bytes);
        let committer =
            Committer::start("groups-writer", Arc::clone(&environment), work, inboxes, Lazy::default())?;
        Ok(Self { environment, table, committer: Arc::new(committer), readers: ReadPermits::new(READERS) })
    }

    /// Returns the path to which a damaged file was moved at open, if there was one.
    pub fn set_aside(&self) -> Option<&PathBuf> {
        self.environment.set_aside()
    }

    /// Notes on disk that nothing is written from now on, so that the next start need not verify a large file. Dropping
    /// the last handle does the same.
    pub fn note_closed(&self) {
        self.environment.note_closed();
    }

    fn submit<T>(&self, op: impl FnOnce(oneshot::Sender<T>) -> GroupOp) -> oneshot::Receiver<T> {
        let (reply, answer) = oneshot::channel();
        self.committer.submit(op(reply), true);
        answer
    }

    fn read_table<T: Send + 'static>(
        &self,
        read: impl FnOnce(&heed::RoTxn<'_, heed::WithoutTls>) -> Result<T, heed::Error> + Send + 'static,
    ) -> BoxFuture<'static, Result<T, StoreError>> {
        let environment = Arc::clone(&self.environment);
        Box::pin(self.readers.clone().run(move || environment.reading(read)))
    }
}

impl GroupState for EmbeddedGroupState {
    fn groups(&self) -> BoxFuture<'static, Result<Vec<GroupId>, StoreError>> {
        let table = self.table;
        self.read_table(move |txn| {
            let (mut groups, mut next) = (Vec::new(), 0_u32);
            // One look for each group, however many records it has.
            while let Some((key, _)) =
                table.get_greater_than_or_equal_to(txn, &key(GroupId(next), RECORD, b""))?
            {
                let Some((group, kind)) = split(key) else { break };
                if kind == RECORD {
                    groups.push(group);
                    let Some(following) = group.0.checked_add(1) else { break };
                    next = following;
                } else {
                    next = group.0;
                }
            }
            Ok(groups)
        })
    }

    fn epoch(&self, group: GroupId) -> BoxFuture<'static, Result<Epoch, StoreError>> {
        let table = self.table;
        let read = move |txn: &heed::RoTxn<'_, heed::WithoutTls>| work::epoch(table, txn, group);
        self.read_table(read)
    }

    fn acquire(&self, group: GroupId, after: Epoch) -> BoxFuture<'static, Result<Epoch, StateError>> {
        let answer = self.submit(|reply| GroupOp::Acquire { group, after, reply });
        Box::pin(async move { answer.await.map_err(|_| super::closed())? })
    }

    fn write(
        &self,
        group: GroupId,
        epoch: Epoch,
        changes: Vec<StateChange>,
    ) -> BoxFuture<'static, Result<(), StateError>> {
        if changes.iter().any(|change| change.key.len() > MAX_KEY) {
            let error = StoreError::Unavailable("the key of a group's record is too long".to_owned());
            return Box::pin(async move { Err(error.into()) });
        }
        let answer = self.submit(|reply| GroupOp::Write { group, epoch, changes, reply });
        Box::pin(async move { answer.await.map_err(|_| super::closed())? })
    }

    fn read(
        &self,
        group: GroupId,
        prefix: Bytes,
        after: Option<Bytes>,
        limit: usize,
    ) -> BoxFuture<'static, Result<Vec<StateRecord>, StoreError>> {
        let table = self.table;
        let read = move |txn: &heed::RoTxn<'_, heed::WithoutTls>| {
            let start = key(group, RECORD, &prefix);
            // The record of `after` itself is not wanted.
            let after = after.map(|after| key(group, RECORD, &after)).filter(|after| *after >= start);
            let begin = match &after {
                Some(after) => Bound::Excluded(&after[..]),
                None => Bound::Included(&start[..]),
            };
            let skip = start.len() - prefix.len();
            let (mut records, mut bytes) = (Vec::new(), 0);
            for entry in table.range(txn, &(begin, Bound::Unbounded))? {
                let (key, value) = entry?;
                if !key.starts_with(&start) || records.len() >= limit || bytes > MAX_READ {
                    break;
                }
                let Some(value) = fields::open(value) else {
                    count(|c| c.store_damaged_records.add(1));
                    gateway_core::error_limited!(
                        group = group.0,
                        "stored record of a group is damaged and was skipped"
                    );
                    continue;
                };
                bytes += value.0.len();
                let key = Bytes::copy_from_slice(&key[skip..]);
                records.push(StateRecord { key, value: Bytes::copy_from_slice(value.0) });
            }
            Ok(records)
        };
        self.read_table(read)
    }

    fn remove(&self, group: GroupId, epoch: Epoch) -> BoxFuture<'static, Result<(), StateError>> {
        let committer = Arc::clone(&self.committer);
        Box::pin(async move {
            loop {
                let (reply, answer) = oneshot::channel();
                committer.submit(GroupOp::Remove { group, epoch, reply }, true);
                let removed: usize = answer.await.map_err(|_| super::closed())??;
                if removed < REMOVED_AT_ONCE {
                    return Ok(());
                }
            }
        })
    }

    fn health(&self) -> StoreHealth {
        self.committer.health()
    }
}
