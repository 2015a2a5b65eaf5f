//! Memory, spill and store read as one. They are looked at in the order in which a value passes through them, so that
//! none is missed on its way.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use super::{LatestCache, late};
use crate::counters::count;
use store::{
    BoxFuture, LatestPage, LatestQuery, LatestStore, LatestValue, PAGE_BYTES, PageBuilder, PageToken,
    Selection, StoreError,
};

impl LatestCache {
    /// The value of `topic` of `device`, or without a device the newest over all devices. Includes what is
    /// not yet in the store; if the store cannot be read, a value that is not yet there is still returned.
    ///
    /// # Errors
    /// At once while the store is known to be away.
    pub async fn get(&self, topic: &str, device: Option<&str>) -> Result<Option<LatestValue>, StoreError> {
        let pending = match device {
            Some(device) => {
                let (stripe, hash) = self.place(device, topic);
                self.stripes[stripe].0.lock().get(hash, device, topic)
            }
            None => self.newest_pending(topic),
        };
        let local = match self.spilled() {
            Some(spill) => newer(pending, spill.get(topic, device).await?),
            None => pending,
        };
        let reads = self.options.reads.check();
        let away = self.state.is_down() || reads.is_err();
        if away && (local.is_some() || self.options.memory_reads) {
            return Ok(local);
        }
        reads?;
        match self.read_noted(self.store.get(topic, device)).await {
            Ok(stored) => Ok(newer(local, stored)),
            Err(_) if local.is_some() => Ok(local),
            Err(StoreError::Unavailable(_)) if self.options.memory_reads => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// One page by device and topic, including what is not yet in the store.
    ///
    /// # Errors
    /// At once while the store is known to be away.
    pub async fn list(&self, query: LatestQuery) -> Result<LatestPage, StoreError> {
        let selection = Selection::new(query.clone())?;
        if selection.devices.is_empty() && !self.lists_all() {
            return Err(StoreError::NeedsDevices);
        }
        let reads = self.options.reads.check();
        if !self.options.memory_reads {
            reads.clone()?;
        }
        let (mut merged, mut end) = self.select_pending(&selection);
        if let Some(spill) = self.spilled() {
            end = merge(&mut merged, end, spill.list(query.clone()).await?)?;
        }
        if !(self.options.memory_reads && (self.state.is_down() || reads.is_err())) {
            match self.read_noted(self.store.list(query)).await {
                Ok(page) => end = merge(&mut merged, end, page)?,
                Err(StoreError::Unavailable(_)) if self.options.memory_reads => {}
                Err(error) => return Err(error),
            }
        }
        if let Some(end) = &end {
            merged.retain(|key, _| *key <= *end);
        }
        let mut page = PageBuilder::new(selection.limit);
        for value in merged.into_values() {
            if page.is_full() {
                return Ok(page.cut());
            }
            page.push(value);
        }
        Ok(page.searched_to(end))
    }

    /// Returns whether [`LatestCache::list`] works without device ids.
    pub fn lists_all(&self) -> bool {
        self.store.lists_all()
    }

    /// The spill, while something is in it.
    fn spilled(&self) -> Option<&dyn LatestStore> {
        self.spill.as_ref().filter(|spill| spill.len() > 0).map(|spill| spill as &dyn LatestStore)
    }

    /// As [`Self::read`]; a failure is looked into.
    async fn read_noted<T>(&self, read: BoxFuture<'_, Result<T, StoreError>>) -> Result<T, StoreError> {
        let result = self.read(read).await;
        self.options.reads.note(&result);
        result
    }

    /// Waits for the store, at most `read_timeout`.
    pub(super) async fn read<T>(&self, read: BoxFuture<'_, Result<T, StoreError>>) -> Result<T, StoreError> {
        let limit: Duration = self.options.read_timeout;
        tokio::time::timeout(limit, read).await.unwrap_or_else(|_| {
            count(|c| c.latest_read_timeouts.add(1));
            Err(late())
        })
    }

    fn newest_pending(&self, topic: &str) -> Option<LatestValue> {
        let mut newest: Option<LatestValue> = None;
        self.visit_pending(|pending| {
            let newer = newest.as_ref().is_none_or(|newest| newest.version < pending.version());
            if newer && **pending.names().1 == *topic {
                newest = Some(pending.value());
            }
        });
        newest
    }

    /// The first values in memory that `selection` asks for, and the last of them if there are more.
    fn select_pending(&self, selection: &Selection) -> (BTreeMap<PageToken, LatestValue>, Option<PageToken>) {
        let mut keys = BTreeSet::new();
        let mut more = false;
        self.visit_pending(|pending| {
            let (device, topic) = pending.names();
            if selection.selects(device.as_str(), topic) {
                keys.insert(PageToken::new(device.as_str(), topic));
                if keys.len() > selection.limit {
                    keys.pop_last();
                    more = true;
                }
            }
        });
        let mut end = if more { keys.last().cloned() } else { None };
        let mut values = BTreeMap::new();
        let mut bytes = 0;
        for key in keys {
            if bytes >= PAGE_BYTES {
                end = values.last_key_value().map(|(key, _): (&PageToken, _)| key.clone());
                break;
            }
            let (stripe, hash) = self.place(&key.device, &key.topic);
            // Absent if it has moved on meanwhile, to a place that is looked at next.
            if let Some(value) = self.stripes[stripe].0.lock().get(hash, &key.device, &key.topic) {
                bytes += value.payload.len();
                values.insert(key, value);
            }
        }
        (values, end)
    }
}

/// The one with the higher version; the first if they are the same.
fn newer(a: Option<LatestValue>, b: Option<LatestValue>) -> Option<LatestValue> {
    match (a, b) {
        (Some(a), Some(b)) if b.version > a.version => Some(b),
        (Some(a), _) => Some(a),
        (None, b) => b,
    }
}

/// Adds the values of `page` where they are newer. Returns up to where all that was merged is complete.
fn merge(
    merged: &mut BTreeMap<PageToken, LatestValue>,
    end: Option<PageToken>,
    page: LatestPage,
) -> Result<Option<PageToken>, StoreError> {
    for value in page.values {
        let key = PageToken::new(value.device.as_str(), &value.topic);
        if merged.get(&key).is_none_or(|known| known.version < value.version) {
            merged.insert(key, value);
        }
    }
    Ok(match (PageToken::parse(&page.next)?, end) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    })
}
