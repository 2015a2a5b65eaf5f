//! Values that the store did not take, on this machine's disk, and their way to the store.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use store::{BoxFuture, LatestPage, LatestQuery, LatestStore, LatestValue, SpillStore, StoreError};

use crate::counters::count;

/// A [`SpillStore`] that remembers how much it holds.
pub(super) struct Spill {
    store: Arc<dyn SpillStore>,
    values: AtomicUsize,
}

impl Spill {
    pub(super) fn new(store: Arc<dyn SpillStore>) -> Self {
        let values = store.count();
        if values > 0 {
            tracing::info!(values, "latest values in the data directory go to the store once it takes them");
        }
        Self { store, values: AtomicUsize::new(values) }
    }

    /// Returns the number of values.
    pub(super) fn len(&self) -> usize {
        self.values.load(Relaxed)
    }

    /// About the bytes that they take on the disk.
    pub(super) fn bytes(&self) -> u64 {
        self.store.bytes()
    }

    /// Moves up to `most` values to `target`, with their versions, so that none replaces a newer one. True if there are
    /// more. Cancelled, it has moved all, some or none, and a value may be in both.
    pub(super) async fn replay(&self, target: &dyn LatestStore, most: usize) -> Result<bool, StoreError> {
        let query = LatestQuery { limit: most, ..LatestQuery::default() };
        let page = self.store.list(query).await?;
        // A page with none but damaged records leaves nothing to move.
        let more = !page.next.is_empty() && !page.values.is_empty();
        let mut result = Ok(());
        if !page.values.is_empty() {
            let values: Arc<[LatestValue]> = page.values.into();
            result = target.upsert(Arc::clone(&values)).await;
            let moved = match &result {
                Ok(()) => values,
                Err(StoreError::Partly { unwritten, .. }) => {
                    let places = values.iter().enumerate();
                    let moved = places.filter(|(place, _)| unwritten.binary_search(place).is_err());
                    moved.map(|(_, value)| value.clone()).collect()
                }
                Err(_) => return result.map(|()| more),
            };
            count(|c| c.latest_replayed.add(moved.len() as u64));
            self.store.remove(moved).await?;
        }
        if result.is_err() {
            self.values.store(self.store.count(), Relaxed);
            return result.map(|()| more);
        }
        // Records that are left cannot be read and were reported: they are not worth another look before the next start.
        self.values.store(if more { self.store.count() } else { 0 }, Relaxed);
        if !more {
            tracing::info!("latest values from the data directory are in the store");
        }
        Ok(more)
    }
}

impl LatestStore for Spill {
    fn upsert(&self, batch: Arc<[LatestValue]>) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            // Before the values leave memory, so that no read misses them.
            self.values.fetch_add(batch.len(), Relaxed);
            let result = self.store.upsert(batch).await;
            self.values.store(self.store.count(), Relaxed);
            result
        })
    }

    fn remove(&self, batch: Arc<[LatestValue]>) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            let result = self.store.remove(batch).await;
            self.values.store(self.store.count(), Relaxed);
            result
        })
    }

    fn get<'a>(
        &'a self,
        topic: &'a str,
        device: Option<&'a str>,
    ) -> BoxFuture<'a, Result<Option<LatestValue>, StoreError>> {
        self.store.get(topic, device)
    }

    fn list(&self, query: LatestQuery) -> BoxFuture<'_, Result<LatestPage, StoreError>> {
        self.store.list(query)
    }
}
