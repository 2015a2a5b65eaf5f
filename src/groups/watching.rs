//! What becomes durable goes to the groups that want it.

use std::sync::Arc;

use ahash::RandomState;
use gateway_core::{GroupId, LogRecord, Partition};
use hashbrown::HashMap;
use parking_lot::RwLock;
use store::LogWatcher;

use super::live::Live;

/// The groups by number.
#[derive(Default)]
pub(super) struct GroupTable(RwLock<HashMap<GroupId, Arc<Live>, RandomState>>);

impl GroupTable {
    pub(super) fn insert(&self, id: GroupId, live: Arc<Live>) {
        self.0.write().insert(id, live);
    }

    pub(super) fn remove(&self, id: GroupId) {
        self.0.write().remove(&id);
    }

    pub(super) fn clear(&self) {
        self.0.write().clear();
    }

    pub(super) fn all(&self) -> Vec<Arc<Live>> {
        self.0.read().values().cloned().collect()
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
            let table = self.0.read();
            own.into_iter().filter_map(|(id, own)| Some((Arc::clone(table.get(&id)?), own))).collect()
        };
        for (live, own) in groups {
            live.appended(records, &own);
        }
    }
}
