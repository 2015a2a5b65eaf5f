//! What the gateway remembers beyond a process: traits for each role and their backends.
//!
//! Callers know the traits; only the backends know a database. Nothing here knows the protocol.
//!
//! ```text
//! sessions queues retained       traits: who there is, what waits for whom, what topics keep
//! latest stripe versions         latest values with write-behind, over the trait `LatestStore`
//! history                        every message of some topics with write-behind, over the trait `HistoryStore`
//! memory                         latest values without a disk
//! publisher                      trait: what the gRPC Publisher must not forget
//! shadows                        trait: documents of device shadows
//! log group_state                traits: what consumer groups read, and how far they are
//! data_dir clock_mark            the directory and its lock, where its time goes on
//! embedded                       all of them in LMDB, one environment (folder) each:
//!   open environment reserve         opening, growing, room for removals on a full disk
//!   check verify marker              damage: files read page by page, and which were closed cleanly
//!   committer waiting pending        one writer thread per environment, group commit
//!   fields keys message record       what records look like
//!   sessions queues retained publisher   tables and writers; `queues` has readers of its own
//!   write read                       latest values
//!   groups log                       state of consumer groups, and their log in segment files
//!   shadows                          device shadows
//!   tool                             check, compact, back up, export, import
//! ```
//!
//! Whoever submits a change gives a [`Commit`](gateway_core::Commit) along if it waits for the disk; the writer ends
//! its part after the transaction, or refuses it.

mod clock_mark;
mod data_dir;
#[cfg(feature = "lmdb")]
mod embedded;
mod group_state;
mod history;
mod latest;
mod log;
#[cfg(test)]
mod memory;
#[cfg(any(test, feature = "test-util"))]
mod memory_group_state;
#[cfg(any(test, feature = "test-util"))]
mod memory_log;
mod memory_publisher;
#[cfg(any(test, feature = "test-util"))]
mod memory_shadows;
mod page;
mod publisher;
mod queues;
mod retained;
#[cfg(feature = "scylla")]
mod scylla;
mod server_id;
mod sessions;
mod shadows;
#[cfg(test)]
#[cfg(feature = "lmdb")]
mod spill_tests;
mod stripe;
#[cfg(test)]
mod suite;
#[cfg(test)]
mod suite_group_state;
#[cfg(test)]
mod suite_log;
#[cfg(test)]
mod suite_shadows;
#[cfg(test)]
mod tests;
mod versions;

use std::{future::Future, pin::Pin, sync::Arc};

use bytes::Bytes;
use thiserror::Error;

pub use clock_mark::ClockMark;
pub use data_dir::{DataDir, Verify};
#[cfg(feature = "lmdb")]
pub use embedded::{
    CommitHook, DurableOptions, EmbeddedGroupState, EmbeddedLatest, EmbeddedLog, EmbeddedOptions,
    EmbeddedPublisher, EmbeddedQueues, EmbeddedRetained, EmbeddedSessions, EmbeddedShadows, LogHook,
    LogMemory, LogOptions, LogStep, QueueGauges, QueueOptions, fuzz_log, fuzz_log_frame, tool,
};
use gateway_core::{ClientId, Properties, QoS, Timestamp};
pub use group_state::{Epoch, Expect, GroupState, StateChange, StateError, StateRecord};
#[cfg(any(test, feature = "test-util"))]
pub use history::memory::MemoryHistory;
pub use history::{
    BucketPart, History, HistoryEntry, HistoryGauges, HistoryOptions, HistoryPage, HistoryPlace,
    HistoryQuery, HistoryRule, HistoryStore, Removal, Walk,
};
pub use latest::{Condition, Latest, LatestGauges, LatestOptions, ReadWatch};
pub use log::{
    LogFull, LogWatcher, Mark, Missing, MissingReason, PartitionBounds, PartitionedLog, ReadLimit, Reading,
    Slice,
};
#[cfg(test)]
pub(crate) use memory::MemoryLatest;
#[cfg(any(test, feature = "test-util"))]
pub use memory_group_state::MemoryGroupState;
#[cfg(any(test, feature = "test-util"))]
pub use memory_log::{MemoryLog, MemoryLogOptions};
pub use memory_publisher::MemoryPublisher;
#[cfg(any(test, feature = "test-util"))]
pub use memory_shadows::MemoryShadows;
pub use page::{PageBuilder, PageToken, Selection};
pub use publisher::{PublisherChange, PublisherStore, PublisherTable};
pub use queues::{Expiry, Loaded, QueueStore, QueueSummary, StoreHealth};
pub use retained::{LoadedRetained, RetainedStore};
#[cfg(feature = "scylla")]
pub use scylla::{ScyllaHistory, ScyllaLatest, ScyllaOptions, ScyllaShadows, TtlRule};
pub use server_id::server_id;
pub use sessions::{Restore, SessionOp, SessionStore, StoredSession, StoredSubscription, StoredWill};
pub use shadows::{MAX_SHADOW_DEVICE, MAX_SHADOW_NAME, ShadowPut, ShadowRecord, ShadowStore};
pub(crate) use versions::VersionClock;
pub use versions::{VersionMark, version_offset};

/// A boxed future, as store traits return.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

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

/// The last payload of a (device, topic).
#[derive(Debug, Clone, PartialEq)]
pub struct LatestValue {
    /// Who sent it.
    pub device: ClientId,
    /// On which topic.
    pub topic: Arc<str>,
    /// Payload.
    pub payload: Bytes,
    /// QoS of the publish.
    pub qos: QoS,
    /// RETAIN as the device set it.
    pub retain: bool,
    /// MQTT 5 properties, if any.
    pub properties: Option<Arc<Properties>>,
    /// When the gateway received it.
    pub received: Timestamp,
    /// Order of writes: grows with every value of the process, never goes back.
    pub version: u64,
    /// Id of the gateway that recorded it; `None` is this one.
    pub server: Option<Arc<str>>,
}

/// Which latest values to list.
#[derive(Debug, Clone, Default)]
pub struct LatestQuery {
    /// Only these devices; empty is all.
    pub devices: Vec<String>,
    /// Only topics that match this MQTT filter.
    pub filter: Option<String>,
    /// Most values in the page (1 to 10,000).
    pub limit: usize,
    /// `next` of the page before.
    pub page_token: String,
}

/// One page of latest values, ordered by device, then topic.
///
/// A page may hold fewer values than the limit, even none, and still have a `next`: it also ends after a number of
/// bytes, or after some work without a match.
#[derive(Debug, Clone, Default)]
pub struct LatestPage {
    /// The values.
    pub values: Vec<LatestValue>,
    /// Token of the next page, a [`PageToken`] of the last key this page covers; empty at the end.
    pub next: String,
}

/// Keeps the latest value of every (device, topic).
///
/// A value with a lower `version` than the stored one never replaces it.
pub trait LatestStore: Send + Sync + 'static {
    /// Writes all of `batch`. Durable when it returns `Ok`; with [`StoreError::Partly`] all but the values named there
    /// are. A value that the store can never take is dropped and counted, and does not fail the rest. Idempotent.
    /// Dropped before it is done, it may or may not write, but leaves nothing behind that grows with every such call.
    fn upsert(&self, batch: Arc<[LatestValue]>) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Removes the values of these devices and topics, unless they are newer than `version` there says; durable when it
    /// returns `Ok`. Where one was the newest of its topic over all devices, none is until the next is written.
    /// Idempotent. Called while no [`LatestStore::upsert`] of an older version is under way.
    fn remove(&self, batch: Arc<[LatestValue]>) -> BoxFuture<'_, Result<(), StoreError>>;

    /// The value of `topic` of `device`, or without a device the newest over all devices.
    fn get<'a>(
        &'a self,
        topic: &'a str,
        device: Option<&'a str>,
    ) -> BoxFuture<'a, Result<Option<LatestValue>, StoreError>>;

    /// One page of values.
    fn list(&self, query: LatestQuery) -> BoxFuture<'_, Result<LatestPage, StoreError>>;

    /// Whether [`LatestStore::list`] works without device ids; if not, it fails with [`StoreError::NeedsDevices`].
    fn lists_all(&self) -> bool {
        true
    }
}

/// A [`LatestStore`] on this machine that keeps what another one does not take.
pub trait SpillStore: LatestStore {
    /// How many values there are. Quick.
    fn count(&self) -> usize;

    /// About the bytes that they take on the disk.
    fn bytes(&self) -> u64;
}
