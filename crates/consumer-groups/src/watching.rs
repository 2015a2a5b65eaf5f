//! Passes messages on to the groups that want them as soon as they are durable.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::*},
};

use ahash::RandomState;
use gateway_core::{GroupId, LogRecord, Partition};
use hashbrown::HashMap;
use parking_lot::RwLock;
use store::LogWatcher;
use tokio::sync::Notify;

use super::live::Live;

/// The groups by number.
pub(super) struct GroupTable {
    groups: RwLock<HashMap<GroupId, Arc<Live>, RandomState>>,
    /// All that is durable before this place of the log was told to the groups that want it.
    told: AtomicU64,
    max_log_bytes: u64,
    /// A group, or the log, has more than it may.
    over: Notify,
}

impl GroupTable {
    /// An empty one, of a log that may have so many bytes.
    pub(super) fn new(max_log_bytes: u64) -> Self {
        Self { groups: RwLock::default(), told: AtomicU64::new(0), max_log_bytes, over: Notify::new() }
    }

    pub(super) fn insert(&self, id: GroupId, live: Arc<Live>) {
        self.groups.write().insert(id, live);
    }

    pub(super) fn remove(&self, id: GroupId) {
        self.groups.write().remove(&id);
    }

    pub(super) fn clear(&self) {
        self.groups.write().clear();
    }

    pub(super) fn all(&self) -> Vec<Arc<Live>> {
        self.groups.read().values().cloned().collect()
    }

    /// The place in the log before which groups know of all that is theirs. It is one for all partitions: offsets are those
    /// of the whole log.
    pub(super) fn told(&self) -> u64 {
        self.told.load(Acquire)
    }

    /// Resolves when a group, or the log, has more than it may since the last call.
    pub(super) async fn over(&self) {
        self.over.notified().await;
    }
}

impl LogWatcher for GroupTable {
    /// One step for each group and batch: its lock is taken once, and each member is woken once.
    fn appended(&self, records: &[(Partition, LogRecord)]) {
        let mut own: HashMap<GroupId, Vec<usize>, RandomState> = HashMap::default();
        for (at, (_, record)) in records.iter().enumerate() {
            for group in &*record.groups {
                own.entry(*group).or_default().push(at);
            }
        }
        let groups: Vec<(Arc<Live>, Vec<usize>)> = {
            let table = self.groups.read();
            own.into_iter().filter_map(|(id, own)| Some((Arc::clone(table.get(&id)?), own))).collect()
        };
        let mut is_over = groups.first().is_some_and(|(live, _)| live.log.bytes() > self.max_log_bytes);
        for (live, own) in groups {
            is_over |= live.appended(records, &own);
        }
        if let Some(end) = records.iter().map(|(_, record)| record.offset + 1).max() {
            self.told.fetch_max(end, Release);
        }
        if is_over {
            self.over.notify_one();
        }
    }
}
