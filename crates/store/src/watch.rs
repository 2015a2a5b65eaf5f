//! Following latest values: changes since the last look, the newest per (device, topic).

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use ahash::AHashSet;
use gateway_core::clock;
use gateway_core::{ClientId, Message, matches};
use hashbrown::HashMap;
use parking_lot::{Mutex, RwLock};
use tokio::sync::Notify;

use super::LatestValue;

/// Most (device, topic) pairs that wait for one watcher.
const MAX_KEYS: usize = 100_000;

/// Most payload bytes that wait for one watcher.
const MAX_BYTES: usize = 64 << 20;

/// What to watch.
#[derive(Debug, Clone, Default)]
pub struct WatchSelector {
    /// Only these devices; empty is all.
    pub devices: Vec<String>,
    /// Only topics that match this MQTT filter.
    pub filter: Option<String>,
}

/// A watcher of latest values. Ends when dropped.
///
/// Start to watch, then list: whatever the list missed is in the changes, and versions tell what is newer.
pub struct Watch {
    inner: Arc<Inner>,
    all: Arc<Watchers>,
    lagged: bool,
}

impl Watch {
    /// The newest values of what changed since the last call, in the order of their versions; waits until
    /// something did. Empty only when [`Watch::lagged`] is true. Cancel safe.
    pub async fn next(&mut self) -> Vec<LatestValue> {
        loop {
            let changes = {
                let mut state = self.inner.state.lock();
                self.lagged |= std::mem::take(&mut state.lagged);
                state.bytes = 0;
                std::mem::take(&mut state.values)
            };
            if self.lagged || !changes.is_empty() {
                let mut changes: Vec<_> = changes.into_values().collect();
                changes.sort_unstable_by_key(|value| value.version);
                return changes;
            }
            self.inner.changed.notified().await;
        }
    }

    /// Whether changes were lost since the last call, as too many waited: list again.
    pub fn lagged(&mut self) -> bool {
        std::mem::take(&mut self.lagged)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut list = self.all.list.write();
        list.retain(|watcher| !Arc::ptr_eq(watcher, &self.inner));
        self.all.count.store(list.len(), Ordering::Release);
    }
}

/// All watchers of a [`super::Latest`].
#[derive(Default)]
pub(super) struct Watchers {
    count: AtomicUsize,
    list: RwLock<Vec<Arc<Inner>>>,
}

struct Inner {
    devices: AHashSet<String>,
    filter: Option<String>,
    state: Mutex<Unread>,
    changed: Notify,
}

#[derive(Default)]
struct Unread {
    values: HashMap<(ClientId, Arc<str>), LatestValue, ahash::RandomState>,
    bytes: usize,
    lagged: bool,
}

impl Watchers {
    pub(super) fn add(self: &Arc<Self>, selector: WatchSelector) -> Watch {
        let inner = Arc::new(Inner {
            devices: selector.devices.into_iter().collect(),
            filter: selector.filter,
            state: Mutex::default(),
            changed: Notify::new(),
        });
        let mut list = self.list.write();
        list.push(Arc::clone(&inner));
        self.count.store(list.len(), Ordering::Release);
        drop(list);
        Watch { inner, all: Arc::clone(self), lagged: false }
    }

    /// Whether anybody watches: one load.
    pub(super) fn any(&self) -> bool {
        self.count.load(Ordering::Acquire) > 0
    }

    /// Passes a recorded message to the watchers that want it.
    pub(super) fn notify(&self, device: &ClientId, message: &Message<'_>, version: u64) {
        let mut value = None;
        for watcher in self.list.read().iter().filter(|w| w.selects(device.as_str(), message.topic)) {
            let value = value.get_or_insert_with(|| {
                let shared = message.share();
                LatestValue {
                    device: device.clone(),
                    topic: Arc::clone(&shared.topic),
                    payload: shared.payload.clone(),
                    qos: shared.qos,
                    retain: shared.retain,
                    properties: shared.properties.clone(),
                    received: clock::to_wall(shared.received),
                    version,
                    server: None,
                }
            });
            watcher.push(value);
        }
    }
}

impl Inner {
    fn selects(&self, device: &str, topic: &str) -> bool {
        (self.devices.is_empty() || self.devices.contains(device))
            && self.filter.as_ref().is_none_or(|filter| matches(filter, topic))
    }

    fn push(&self, value: &LatestValue) {
        let first = {
            let mut state = self.state.lock();
            let first = state.values.is_empty() && !state.lagged;
            state.push(value);
            first
        };
        if first {
            self.changed.notify_one();
        }
    }
}

impl Unread {
    fn push(&mut self, value: &LatestValue) {
        let key = (value.device.clone(), Arc::clone(&value.topic));
        let known = self.values.get(&key);
        if known.is_some_and(|known| known.version >= value.version) {
            return;
        }
        let before = known.map_or(0, |known| known.payload.len());
        let bytes = self.bytes - before + value.payload.len();
        if bytes > MAX_BYTES || known.is_none() && self.values.len() >= MAX_KEYS {
            self.lagged = true;
            return;
        }
        self.bytes = bytes;
        self.values.insert(key, value.clone());
    }
}
