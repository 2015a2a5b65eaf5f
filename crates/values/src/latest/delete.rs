//! Deleting from memory, spill and store, so that no write under way brings a value back.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use gateway_core::{ClientId, QoS, Timestamp};
use tokio::time::timeout;

use super::{LatestCache, late};
use store::{LatestQuery, LatestStore, LatestValue, StoreError};

/// Values deleted at once.
const PAGE: usize = 256;

impl LatestCache {
    /// Deletes the values of `device` on all topics that match `filter`, and says which: all that were recorded before
    /// the call, wherever they are. A value recorded meanwhile may go or stay. Where one was the newest of its topic
    /// over all devices, [`LatestCache::get`] without a device finds none until the next.
    ///
    /// If it fails or is cancelled, a part is deleted; deleting again does the rest.
    ///
    /// # Errors
    /// As the store's; also if the store is away: it could bring back what it still has.
    pub async fn delete(
        &self,
        device: &str,
        filter: &str,
        now: Timestamp,
    ) -> Result<Vec<Arc<str>>, StoreError> {
        let mut query = LatestQuery {
            devices: vec![device.to_owned()],
            filter: Some(filter.to_owned()),
            limit: PAGE,
            page_token: String::new(),
        };
        let mut deleted = Vec::new();
        loop {
            let page = self.list(query.clone()).await?;
            let topics: Vec<_> = page.values.into_iter().map(|value| value.topic).collect();
            self.delete_topics(device, &topics, now).await?;
            deleted.extend(topics);
            if page.next.is_empty() {
                return Ok(deleted);
            }
            query.page_token = page.next;
        }
    }

    async fn delete_topics(
        &self,
        device: &str,
        topics: &[Arc<str>],
        now: Timestamp,
    ) -> Result<(), StoreError> {
        if topics.is_empty() {
            return Ok(());
        }
        // No value goes from memory to the store, or from the spill, between the steps: it could come after its deletion.
        let _nothing_moves = self.flushing.lock().await;
        let version = self.clock.next(now);
        let id = ClientId::new(device);
        let removal = |topic: &Arc<str>| LatestValue {
            device: id.clone(),
            topic: Arc::clone(topic),
            payload: Bytes::new(),
            qos: QoS::AtMostOnce,
            retain: false,
            properties: None,
            received: now,
            version,
            server: None,
        };
        let batch: Arc<[LatestValue]> = topics.iter().map(removal).collect();
        let limit: Duration = self.options.write_timeout;
        let from_stores = async {
            self.reserve_versions(version).await?;
            self.store.remove(Arc::clone(&batch)).await?;
            match self.spill.as_ref().filter(|spill| spill.len() > 0) {
                Some(spill) => spill.remove(batch).await,
                None => Ok(()),
            }
        };
        timeout(limit, from_stores).await.unwrap_or_else(|_| Err(late()))?;

        let places: Vec<_> = topics.iter().map(|topic| (self.place(device, topic), &**topic)).collect();
        let Some(((stripe, _), _)) = places.first().copied() else { return Ok(()) };
        let places: Vec<_> = places.into_iter().map(|((_, hash), topic)| (hash, topic)).collect();
        let mut stripe = self.stripes[stripe].0.lock();
        self.apply(stripe.forget(device, &places, version));
        Ok(())
    }
}
