//! Latest values in memory: for tests and for gateways that need none after a restart.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Bound,
    sync::Arc,
};

use gateway_core::ClientId;
use parking_lot::RwLock;

use crate::{
    BoxFuture, LatestPage, LatestQuery, LatestStore, LatestValue, PageBuilder, Selection, StoreError,
    counters::count,
};

type ValueKey = (ClientId, Arc<str>);

/// A [`LatestStore`] that ends with the process.
#[derive(Debug)]
pub struct MemoryLatest {
    state: RwLock<Contents>,
    topics_per_device: usize,
}

#[derive(Debug, Default)]
struct Contents {
    values: BTreeMap<ValueKey, LatestValue>,
    newest: HashMap<Arc<str>, (u64, ClientId)>,
    topics: HashMap<ClientId, usize>,
}

impl MemoryLatest {
    /// An empty store that keeps at most `topics_per_device` topics of a device.
    pub fn new(topics_per_device: usize) -> Self {
        Self { state: RwLock::default(), topics_per_device }
    }

    fn write(&self, value: &LatestValue) {
        let mut state = self.state.write();
        let state = &mut *state;
        let key = (value.device.clone(), Arc::clone(&value.topic));
        match state.values.get_mut(&key) {
            Some(stored) if stored.version >= value.version => return,
            Some(stored) => *stored = value.clone(),
            None => {
                let topics = state.topics.entry(value.device.clone()).or_default();
                if *topics >= self.topics_per_device {
                    count(|c| c.latest_dropped_topics.add(1));
                    return;
                }
                *topics += 1;
                state.values.insert(key, value.clone());
            }
        }
        let newest =
            state.newest.entry(Arc::clone(&value.topic)).or_insert_with(|| (0, value.device.clone()));
        if newest.0 <= value.version {
            *newest = (value.version, value.device.clone());
        }
    }

    fn drop_value(&self, value: &LatestValue) {
        let mut state = self.state.write();
        let Contents { values, newest, topics } = &mut *state;
        let key = (value.device.clone(), Arc::clone(&value.topic));
        if values.get(&key).is_none_or(|stored| stored.version > value.version) {
            return;
        }
        values.remove(&key);
        if newest.get(&value.topic).is_some_and(|(_, device)| *device == value.device) {
            newest.remove(&value.topic);
        }
        if let Some(count) = topics.get_mut(&value.device) {
            *count -= 1;
            if *count == 0 {
                topics.remove(&value.device);
            }
        }
    }

    fn read(&self, topic: &str, device: Option<&str>) -> Option<LatestValue> {
        let state = self.state.read();
        let device = match device {
            Some(device) => ClientId::new(device),
            None => state.newest.get(topic)?.1.clone(),
        };
        state.values.get(&(device, Arc::from(topic))).cloned()
    }

    fn scan(&self, query: LatestQuery) -> Result<LatestPage, StoreError> {
        let selection = Selection::new(query)?;
        let start = match &selection.after {
            Some(after) => Bound::Excluded((ClientId::new(&after.device), Arc::from(&*after.topic))),
            None => Bound::Unbounded,
        };
        let mut page = PageBuilder::new(selection.limit);
        let state = self.state.read();
        for ((device, topic), value) in state.values.range((start, Bound::Unbounded)) {
            if page.is_full() {
                return Ok(page.cut());
            }
            if selection.selects(device.as_str(), topic) {
                page.push(value.clone());
            }
        }
        Ok(page.searched_to(None))
    }
}

impl LatestStore for MemoryLatest {
    fn upsert(&self, batch: Arc<[LatestValue]>) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            batch.iter().for_each(|value| self.write(value));
            Ok(())
        })
    }

    fn remove(&self, batch: Arc<[LatestValue]>) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            batch.iter().for_each(|value| self.drop_value(value));
            Ok(())
        })
    }

    fn get<'a>(
        &'a self,
        topic: &'a str,
        device: Option<&'a str>,
    ) -> BoxFuture<'a, Result<Option<LatestValue>, StoreError>> {
        Box::pin(async move { Ok(self.read(topic, device)) })
    }

    fn list(&self, query: LatestQuery) -> BoxFuture<'_, Result<LatestPage, StoreError>> {
        Box::pin(async move { self.scan(query) })
    }
}
