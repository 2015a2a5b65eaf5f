//! Trait: every message of some topics, in the order in which they were received.

mod walk;

use std::sync::Arc;

use super::{BoxFuture, LatestValue, StoreError};

pub use walk::{BUCKET_MS, BucketPart, HistoryPage, HistoryPlace, HistoryQuery, Walk, bucket};

const BUCKET: usize = BUCKET_MS as usize;

/// A message to keep.
#[derive(Debug, Clone, PartialEq)]
pub struct HistoryEntry {
    /// The message. Its device, topic, `received` and `version` name it, over all gateways.
    pub value: LatestValue,
    /// Seconds that it is kept, above 0.
    pub ttl: u32,
}

/// Keeps messages of (device, topic) pairs in the order in which they were received.
pub trait HistoryStore: Send + Sync + 'static {
    /// Writes all of `batch`. Durable when it returns `Ok`; with [`StoreError::Partly`] all but the entries named there
    /// are. Idempotent: an entry that comes again changes nothing. One that the store can never take is dropped and
    /// counted. Dropped before it is done, it may or may not write.
    fn append(&self, batch: Arc<[HistoryEntry]>) -> BoxFuture<'_, Result<(), StoreError>>;

    /// One page of messages.
    fn page(&self, query: HistoryQuery) -> BoxFuture<'_, Result<HistoryPage, StoreError>>;

    /// Deletes what `removal` names and was recorded with its version or a lower one, even if it is written only later.
    fn remove(&self, removal: HistoryRemoval) -> BoxFuture<'_, Result<(), StoreError>>;
}

/// History to delete.
#[derive(Debug, Clone)]
pub struct HistoryRemoval {
    /// Client id.
    pub device: String,
    /// Topics, each with the first and the last bucket that may hold messages of it.
    pub topics: Vec<(Arc<str>, u64, u64)>,
    /// The deletion's own version, above those of all messages recorded before it.
    pub version: u64,
}

impl HistoryRemoval {
    /// Topic and bucket of each partition.
    pub fn partitions(&self) -> impl Iterator<Item = (&Arc<str>, u64)> {
        self.topics.iter().flat_map(|(topic, first, last)| {
            (*first..=*last).step_by(BUCKET).map(move |bucket| (topic, bucket))
        })
    }
}
