//! Owners of durable queues: the session of each. Small, since there is an entry for every persistent session.

use ahash::RandomState;
use gateway_core::QueueId;
use hashbrown::HashTable;

/// Slots of sessions by the lower half of their queues' numbers.
#[derive(Default)]
pub(super) struct Owners {
    table: HashTable<QueueOwner>,
    hasher: RandomState,
}

struct QueueOwner {
    slot: u32,
    queue: u32,
}

fn low(queue: QueueId) -> u32 {
    queue.0 as u32
}

impl Owners {
    pub(super) fn insert(&mut self, queue: QueueId, slot: u32) {
        let owner = QueueOwner { slot, queue: low(queue) };
        let hasher = &self.hasher;
        self.table.insert_unique(hasher.hash_one(owner.queue), owner, |owner| hasher.hash_one(owner.queue));
    }

    pub(super) fn remove(&mut self, queue: QueueId, slot: u32) {
        // The slot may belong to another session by now.
        let queue = low(queue);
        let hash = self.hasher.hash_one(queue);
        let own = |owner: &QueueOwner| owner.slot == slot && owner.queue == queue;
        if let Ok(entry) = self.table.find_entry(hash, own) {
            entry.remove();
        }
    }

    /// Slots whose session may own the queue; the caller checks.
    pub(super) fn candidates(&self, queue: QueueId) -> Vec<u32> {
        let hash = self.hasher.hash_one(low(queue));
        let same = self.table.iter_hash(hash).filter(|owner| owner.queue == low(queue));
        same.map(|owner| owner.slot).collect()
    }
}
