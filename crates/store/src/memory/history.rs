//! History without a database, for tests: it can be away or hang, and counts what is asked.

use std::{
    collections::BTreeMap,
    ops::Bound::{Excluded, Included},
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
};

use std::sync::Arc;

use parking_lot::Mutex;

use crate::{
    BoxFuture, HistoryEntry, HistoryPage, HistoryPlace, HistoryQuery, HistoryRemoval, HistoryStore,
    LatestValue, StoreError, Walk, bucket,
};

/// A row's key: device, topic, bucket, received, version.
type RowKey = (String, String, u64, HistoryPlace);

/// See the module.
#[derive(Default)]
pub struct MemoryHistory {
    rows: Mutex<BTreeMap<RowKey, LatestValue>>,
    /// Version of the last deletion of a partition.
    removed: Mutex<BTreeMap<(String, String, u64), u64>>,
    /// Calls fail.
    pub away: AtomicBool,
    /// Neither answers nor fails.
    pub hangs: AtomicBool,
    /// Calls that append.
    pub appends: AtomicUsize,
    /// Entries with an empty payload are not written now.
    pub partly: AtomicBool,
}

impl MemoryHistory {
    async fn check(&self) -> Result<(), StoreError> {
        if self.hangs.load(SeqCst) {
            std::future::pending::<()>().await;
        }
        if self.away.load(SeqCst) { Err(StoreError::Unavailable("away".into())) } else { Ok(()) }
    }

    /// Messages kept.
    #[allow(clippy::len_without_is_empty, reason = "tests compare it with a number")]
    pub fn len(&self) -> usize {
        self.rows.lock().len()
    }

    fn read(&self, query: &HistoryQuery) -> Result<HistoryPage, StoreError> {
        let rows = self.rows.lock();
        let mut walk = Walk::new(query)?;
        while let Some(part) = walk.next_part() {
            let key = |place| (query.device.clone(), query.topic.clone(), part.bucket, place);
            let found =
                rows.range((Included(key(part.low)), Excluded(key(part.high)))).map(|(_, value)| value);
            let found: Vec<_> = if query.oldest_first { found.collect() } else { found.rev().collect() };
            for value in found {
                if !walk.is_full() {
                    walk.push(value.clone());
                }
            }
        }
        Ok(walk.page())
    }
}

impl HistoryStore for MemoryHistory {
    fn append(&self, batch: Arc<[HistoryEntry]>) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            self.appends.fetch_add(1, SeqCst);
            tokio::task::yield_now().await;
            self.check().await?;
            let mut unwritten = Vec::new();
            for (number, HistoryEntry { value, .. }) in batch.iter().enumerate() {
                if self.partly.load(SeqCst) && value.payload.is_empty() {
                    unwritten.push(number);
                    continue;
                }
                let place = HistoryPlace { received: value.received.0, version: value.version };
                let names = (value.device.as_str().to_owned(), value.topic.to_string());
                let partition = (names.0.clone(), names.1.clone(), bucket(place.received));
                if self.removed.lock().get(&partition).is_some_and(|version| *version >= value.version) {
                    continue;
                }
                self.rows.lock().insert((names.0, names.1, bucket(place.received), place), value.clone());
            }
            let reason = "a node is away".to_owned();
            if unwritten.is_empty() { Ok(()) } else { Err(StoreError::Partly { unwritten, reason }) }
        })
    }

    fn page(&self, query: HistoryQuery) -> BoxFuture<'_, Result<HistoryPage, StoreError>> {
        Box::pin(async move {
            self.check().await?;
            self.read(&query)
        })
    }

    fn remove(&self, removal: HistoryRemoval) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            self.check().await?;
            for (topic, bucket) in removal.partitions() {
                let partition = (removal.device.clone(), topic.to_string(), bucket);
                self.rows.lock().retain(|(device, topic, bucket, place), _| {
                    (device, topic, bucket) != (&partition.0, &partition.1, &partition.2)
                        || place.version > removal.version
                });
                self.removed.lock().insert(partition, removal.version);
            }
            Ok(())
        })
    }
}
