//! Shadows in memory, for the tests of others: the store can be held up and can fail.

use std::{collections::BTreeMap, ops::Bound, sync::Arc};

use bytes::Bytes;
use gateway_core::ClientId;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::{BoxFuture, ShadowPut, ShadowRecord, ShadowStore, StoreError};

type MemoryShadowKey = (ClientId, Arc<str>);

/// A [`ShadowStore`] that ends with the process.
pub struct MemoryShadows {
    records: Mutex<BTreeMap<MemoryShadowKey, ShadowRecord>>,
    /// Calls wait while it is true.
    held: watch::Sender<bool>,
    failing: watch::Sender<bool>,
}

impl Default for MemoryShadows {
    fn default() -> Self {
        Self {
            records: Mutex::default(),
            held: watch::Sender::new(false),
            failing: watch::Sender::new(false),
        }
    }
}

impl MemoryShadows {
    /// Sets whether calls wait until this is called again.
    pub fn hold(&self, held: bool) {
        self.held.send_replace(held);
    }

    /// Sets whether calls fail.
    pub fn fail(&self, failing: bool) {
        self.failing.send_replace(failing);
    }

    async fn ready(&self) -> Result<(), StoreError> {
        // The sender is in this value.
        let _ = self.held.subscribe().wait_for(|held| !held).await;
        if *self.failing.borrow() {
            return Err(StoreError::Unavailable("it was told to fail".to_owned()));
        }
        Ok(())
    }

    fn change(
        &self,
        key: MemoryShadowKey,
        to: Option<ShadowRecord>,
        fits: impl FnOnce(Option<&ShadowRecord>) -> bool,
    ) -> ShadowPut {
        let mut records = self.records.lock();
        if !fits(records.get(&key)) {
            return ShadowPut::Conflict;
        }
        match to {
            Some(record) => records.insert(key, record),
            None => records.remove(&key),
        };
        ShadowPut::Written
    }
}

fn key(device: &str, name: &str) -> MemoryShadowKey {
    (ClientId::new(device), Arc::from(name))
}

impl ShadowStore for MemoryShadows {
    fn get<'a>(
        &'a self,
        device: &'a str,
        name: &'a str,
    ) -> BoxFuture<'a, Result<Option<ShadowRecord>, StoreError>> {
        Box::pin(async move {
            self.ready().await?;
            Ok(self.records.lock().get(&key(device, name)).cloned())
        })
    }

    fn put(&self, record: ShadowRecord, expected: u64) -> BoxFuture<'_, Result<ShadowPut, StoreError>> {
        Box::pin(async move {
            self.ready().await?;
            let key = (record.device.clone(), Arc::clone(&record.name));
            Ok(self.change(key, Some(record), |there| there.map_or(0, |there| there.version) == expected))
        })
    }

    fn forget<'a>(
        &'a self,
        device: &'a str,
        name: &'a str,
        version: u64,
    ) -> BoxFuture<'a, Result<ShadowPut, StoreError>> {
        Box::pin(async move {
            self.ready().await?;
            let is_left = |there: &ShadowRecord| there.version == version && there.document.is_none();
            Ok(self.change(key(device, name), None, |there| there.is_some_and(is_left)))
        })
    }

    fn list<'a>(
        &'a self,
        device: &'a str,
        after: Option<&'a str>,
        limit: usize,
        documents: bool,
    ) -> BoxFuture<'a, Result<Vec<ShadowRecord>, StoreError>> {
        Box::pin(async move {
            self.ready().await?;
            let from = match after {
                Some(after) => Bound::Excluded(key(device, after)),
                None => Bound::Included(key(device, "")),
            };
            let records = self.records.lock();
            let of_device = records.range((from, Bound::Unbounded)).map(|(_, record)| record);
            let mut found: Vec<_> = of_device
                .take_while(|record| record.device.as_str() == device)
                .take(limit)
                .cloned()
                .collect();
            if !documents {
                for record in &mut found {
                    record.document = record.document.take().map(|_| Bytes::new());
                }
            }
            Ok(found)
        })
    }
}
