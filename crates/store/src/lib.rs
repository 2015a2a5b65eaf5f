//! The gateway's memory beyond a process: traits for each role, with suites for their backends and twins in memory.
//!
//! Callers know the traits; only the backends know a database: LMDB and files in `disk`, Cassandra and Scylla in `cassandra`.
//! Latest values and history reach theirs through the write-behind of `values`. Nothing here knows the protocol.
//!
//! ```text
//! state sessions queues          trait: who there is, what waits for whom, what topics keep
//! latest history page            traits: latest values, every message of some topics; pages of both
//! records                        trait: small records with conditions, of idempotency keys, commands, consumer groups, shadows
//! shadows shadow_records         trait: documents of device shadows; over a store of records
//! log                            trait: what consumer groups read
//! data_dir clock_mark versions server_id   the directory and its lock, where its time, versions and name go on
//! encoding threads               bytes of records, and the end of a thread, for the backends in the data directory
//! memory                         twins: stores in memory that can be away; `NoRecords` also serves
//! suite                          tests that every backend of a trait must pass
//! ```
//!
//! A caller that waits for the disk submits a change with a part of a [`Commit`](gateway_core::Commit); the writer ends the part
//! after the transaction, or refuses it.

mod clock_mark;
pub mod counters;
mod data_dir;
pub mod encoding;
mod history;
mod latest;
mod log;
mod memory;
mod page;
mod queues;
mod records;
mod server_id;
mod sessions;
mod shadow_records;
mod shadows;
mod state;
#[cfg(any(test, feature = "test-util"))]
pub mod suite;
mod threads;
mod versions;

use std::{future::Future, pin::Pin};

use gateway_core::{Effort, Message};
use thiserror::Error;

pub use clock_mark::ClockMark;
pub use data_dir::{DataDir, FileShipping, Verify, replace_file, sync_directory};
pub use history::{
    BUCKET_MS, BucketPart, HistoryEntry, HistoryPage, HistoryPlace, HistoryQuery, HistoryRemoval,
    HistoryStore, Walk, bucket,
};
pub use latest::{LatestPage, LatestQuery, LatestStore, LatestValue, SpillStore};
pub use log::{
    LogFull, LogRead, LogWatcher, Mark, MissingReason, MissingRecords, PartitionBounds, PartitionedLog,
    ReadLimit, Slice,
};
pub use memory::NoRecords;
#[cfg(any(test, feature = "test-util"))]
pub use memory::{
    MemoryHistory, MemoryLatest, MemoryLog, MemoryLogOptions, MemoryRecords, MemoryState, StateContents,
    StateFaults,
};
pub use page::{PAGE_BYTES, PageBuilder, PageToken, Selection};
pub use queues::{Expiry, Loaded, QueueSummary};
pub use records::{
    DAMAGED_VERSION, Expect, MAX_RECORD_KEY, Record, RecordChange, RecordFence, RecordKind, RecordOutcome,
    RecordRange, RecordStore, RecordWaiter, RecordWrite,
};
pub use server_id::server_id;
pub use sessions::{Restore, SessionOp, StoredSession, StoredSubscription, StoredWill};
pub use shadow_records::{RecordShadows, is_deleted_shadow, shadow_change, shadow_record};
pub use shadows::{MAX_SHADOW_DEVICE, MAX_SHADOW_NAME, ShadowPut, ShadowRecord, ShadowStore};
pub use state::{LoadedRetained, StateStore, StoreHealth};
pub use threads::join;
pub use versions::{VersionClock, VersionMark, version_offset};

/// A boxed future, as store traits return.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Keeps messages beside their delivery.
pub trait Recorder: Send + Sync + 'static {
    /// Takes note of a message that was accepted, if it is one to be kept, and spends what that costs.
    /// Called for each, on the way of a PUBLISH: never waits.
    fn record(&self, message: &Message<'_>, effort: &mut Effort);
}

/// Why a store call failed.
#[derive(Debug, Clone, Error)]
pub enum StoreError {
    /// The store cannot be reached or answered with an error; a retry may succeed.
    #[error("store unavailable: {0}")]
    Unavailable(String),
    /// Some values of a batch are not written; all others are.
    #[error("store unavailable for {} values: {reason}", .unwritten.len())]
    Partly {
        /// Their places in the batch, in order.
        unwritten: Vec<usize>,
        /// Why the first of them is not.
        reason: String,
    },
    /// The data cannot be read; see the operations guide.
    #[error("store damaged: {0}")]
    Damaged(String),
    /// The data is of a version that this one does not know.
    #[error("store format: {0}")]
    Format(String),
    /// The page token is not one of ours.
    #[error("page token is not valid")]
    BadPageToken,
    /// The store lists the values of given devices only.
    #[error("this store lists by device id only")]
    NeedsDevices,
}

impl StoreError {
    /// The error of calls that a store has not answered when it ends.
    pub fn closed() -> Self {
        Self::Unavailable("the store is closed".to_owned())
    }
}
