//! Small records in LMDB: a table for each kind, one writer thread with group commit, reads on the blocking pool.
//!
//! ```text
//! turns   writes that wait, and which are in the next transaction
//! work    conditions and changes, in the writer's transaction
//! room    bound of all shadows
//! ```
//!
//! Damage: a file that is no database or was cut short is set aside at open. A damaged record is reported and counted; it is
//! removed when everything of its kind is read at the start, and met again and again otherwise: it is not what a write
//! expects, and not to be taken for one that is not there.

mod room;
#[cfg(test)]
mod tests;
mod turns;
mod work;

use std::{
    ops::Bound,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use bytes::Bytes;
use gateway_core::Commit;
use tokio::sync::oneshot;

use super::{
    DurableOptions,
    committer::{Committer, Lazy},
    counters::count,
    environment::Environment,
    readers::ReadPermits,
    table::Table,
};
use room::ShadowRoom;
use store::encoding::fields;
use store::{
    BoxFuture, DataDir, Record, RecordChange, RecordKind, RecordOutcome, RecordRange, RecordStore,
    RecordWaiter, RecordWrite, StoreError, StoreHealth,
};
use turns::{RecordOp, Turns};
use work::RecordWork;

/// Number of kinds, and of tables.
const KINDS: usize = RecordKind::ALL.len();

/// Reads of a kind at once; more wait.
const READERS: usize = 4;

/// A read ends after so many bytes of values.
const MAX_READ: usize = 4 << 20;

/// Settings of the store of records.
#[derive(Debug, Clone)]
pub struct RecordOptions {
    /// Settings of the environment; its bound of what waits for the disk is for idempotency keys, scheduled messages and commands
    /// together.
    pub durable: DurableOptions,
    /// The same bound for changes of consumer groups.
    pub max_waiting_groups: usize,
    /// The same bound for changes of shadows.
    pub max_waiting_shadows: usize,
    /// Bytes of all shadows together.
    pub max_shadow_bytes: u64,
}

impl Default for RecordOptions {
    fn default() -> Self {
        let durable = DurableOptions { map_size: 64 << 20, ..DurableOptions::default() };
        let max_waiting = durable.max_waiting_bytes;
        Self {
            durable,
            max_waiting_groups: max_waiting,
            max_waiting_shadows: max_waiting,
            max_shadow_bytes: u64::MAX,
        }
    }
}

/// The tables.
#[derive(Clone, Copy)]
struct RecordTables([Table; KINDS]);

impl RecordTables {
    /// Opens or creates them, in the newest format.
    fn open(environment: &Environment) -> Result<Self, StoreError> {
        environment.open_tables(|txn| {
            let mut create = |kind: RecordKind| environment.table(txn, kind.name());
            let [answers, scheduled, commands, groups, shadows] = RecordKind::ALL;
            Ok(Self([
                create(answers)?,
                create(scheduled)?,
                create(commands)?,
                create(groups)?,
                create(shadows)?,
            ]))
        })
    }

    fn of(&self, kind: RecordKind) -> Table {
        self.0[kind as usize]
    }
}

/// A [`RecordStore`] in the data directory.
pub struct EmbeddedRecords {
    environment: Arc<Environment>,
    tables: RecordTables,
    committer: Committer<RecordWork>,
    readers: [ReadPermits; KINDS],
    shadow_bytes: Arc<AtomicU64>,
}

impl EmbeddedRecords {
    /// Opens the store in the folder `records` of the data directory. Blocks on the disk.
    ///
    /// # Errors
    /// [`StoreError::Format`] if a newer version has written it; nothing is changed then.
    pub fn open(directory: &Arc<DataDir>, options: &RecordOptions) -> Result<Self, StoreError> {
        let RecordOptions { durable, max_waiting_groups, max_waiting_shadows, max_shadow_bytes } = options;
        let environment =
            Arc::new(Environment::open(directory, durable.environment("records", KINDS as u32))?);
        let tables = RecordTables::open(&environment)?;
        let filled = environment.reading(|txn| room::filled(tables.of(RecordKind::Shadows), txn))?;
        let shadow_bytes = Arc::new(AtomicU64::new(filled));
        let limits = [durable.max_waiting_bytes, *max_waiting_groups, *max_waiting_shadows];
        let (turns, inboxes) = Turns::new(limits);
        let room = ShadowRoom::new(*max_shadow_bytes, Arc::clone(&shadow_bytes));
        let work = RecordWork { tables, room, turns, outcomes: Vec::new(), buffer: Vec::new() };
        let committer =
            Committer::start("records-writer", Arc::clone(&environment), work, inboxes, Lazy::default())?;
        let readers = RecordKind::ALL.map(|_| ReadPermits::new(READERS));
        Ok(Self { environment, tables, committer, readers, shadow_bytes })
    }

    /// Bytes that all shadows count for, as of the last change.
    pub fn shadow_bytes(&self) -> u64 {
        self.shadow_bytes.load(Relaxed)
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

    /// The home is another gateway's, and whoever could be told of an answer is gone: what waits is refused, and so is all that comes.
    pub fn give_up(&self) {
        self.committer.give_up();
    }
}

impl RecordStore for EmbeddedRecords {
    fn submit(&self, changes: Vec<RecordChange>, commit: Option<Arc<Commit>>) {
        let urgent = commit.is_some();
        let waiter = commit.map_or(RecordWaiter::Nobody, RecordWaiter::Commit);
        self.committer.submit(RecordOp { write: RecordWrite { changes, fence: None }, waiter }, urgent);
    }

    fn write(&self, write: RecordWrite) -> BoxFuture<'static, Result<RecordOutcome, StoreError>> {
        let (reply, answer) = oneshot::channel();
        self.committer.submit(RecordOp { write, waiter: RecordWaiter::Call(reply) }, true);
        Box::pin(async move { answer.await.map_err(|_| StoreError::closed())? })
    }

    fn read(&self, range: RecordRange) -> BoxFuture<'static, Result<Vec<Record>, StoreError>> {
        let RecordRange { kind, prefix, after, limit, value_bytes } = range;
        let (table, environment) = (self.tables.of(kind), Arc::clone(&self.environment));
        let read = move |txn: &heed::RoTxn<'_, heed::WithoutTls>| {
            // The record of `after` itself is not wanted.
            let after = after.filter(|after| *after >= prefix);
            let begin = match &after {
                Some(after) => Bound::Excluded(&after[..]),
                // LMDB has no empty keys.
                None if prefix.is_empty() => Bound::Unbounded,
                None => Bound::Included(&prefix[..]),
            };
            let (mut records, mut bytes) = (Vec::new(), 0);
            for entry in table.range(txn, &(begin, Bound::Unbounded))? {
                let (key, value) = entry?;
                if !key.starts_with(&prefix) || records.len() >= limit || bytes > MAX_READ {
                    break;
                }
                let value = fields::open(value).map(|input| &input.0[..input.0.len().min(value_bytes)]);
                if value.is_none() {
                    report_damage(kind, key);
                }
                bytes += value.map_or(0, <[u8]>::len);
                records.push(Record {
                    key: Bytes::copy_from_slice(key),
                    value: value.map(Bytes::copy_from_slice),
                });
            }
            Ok(records)
        };
        Box::pin(self.readers[kind as usize].clone().run(move || environment.reading(read)))
    }

    fn restore(&self, kind: RecordKind, into: &mut dyn FnMut(Bytes, Bytes)) -> Result<(), StoreError> {
        let table = self.tables.of(kind);
        let damaged = self.environment.reading(|txn| {
            let mut damaged = Vec::new();
            for entry in table.iter(txn)? {
                let (key, value) = entry?;
                let Some(value) = fields::open(value) else {
                    report_damage(kind, key);
                    damaged.push(RecordChange::remove(kind, Bytes::copy_from_slice(key)));
                    continue;
                };
                into(Bytes::copy_from_slice(key), Bytes::copy_from_slice(value.0));
            }
            Ok(damaged)
        })?;
        if !damaged.is_empty() {
            self.submit(damaged, None);
        }
        Ok(())
    }

    fn accepts(&self) -> bool {
        self.committer.admits()
    }

    fn health(&self) -> StoreHealth {
        self.committer.health()
    }
}

/// Returns whether a record is as it was written; for the tools.
pub(super) fn is_sound(record: &[u8]) -> bool {
    fields::open(record).is_some()
}

/// Shadow in a record, as the tools read it; `None` if damaged.
pub(super) fn shadow(key: &[u8], record: &[u8]) -> Option<store::ShadowRecord> {
    store::shadow_record(key, &Bytes::copy_from_slice(fields::open(record)?.0))
}

/// Counts and says that a record cannot be read.
fn report_damage(kind: RecordKind, key: &[u8]) {
    count(|c| c.store_damaged_records.add(1));
    let key = key.escape_ascii();
    gateway_core::error_limited!(table = kind.name(), %key, "stored record is damaged");
}
