//! Slot numbers of receivers. A slot is a small number that stands for a session or stream in the index.

use std::sync::Arc;

use parking_lot::RwLock;

use crate::{Session, Target, slab::Slab};

/// Slots visited under one lock.
pub(crate) const TURN: u32 = 256;

/// Receivers by slot; slot 0 is nobody.
#[derive(Default)]
pub(crate) struct Slots {
    targets: RwLock<SlotTable>,
}

/// The table behind the lock, for resolving many slots at once.
pub(crate) struct SlotTable(Slab<Arc<dyn Target>>);

impl Default for SlotTable {
    fn default() -> Self {
        Self(Slab::starting_at(1))
    }
}

impl SlotTable {
    pub(crate) fn get(&self, slot: u32) -> Option<&Arc<dyn Target>> {
        self.0.get(slot)
    }

    /// The sessions among `count` slots from `from`, with their slots.
    pub(crate) fn sessions(&self, from: u32, count: u32) -> Vec<(u32, Arc<dyn Session>)> {
        let targets = self.0.range(from, count);
        targets.filter_map(|(slot, target)| Some((slot, Arc::clone(target).into_session()?))).collect()
    }

    /// The first slot that was never used.
    pub(crate) fn end(&self) -> u32 {
        self.0.end()
    }
}

impl Slots {
    /// A slot for a receiver that is about to be made.
    pub(crate) fn reserve(&self) -> u32 {
        self.targets.write().0.reserve()
    }

    /// Fills a reserved slot.
    pub(crate) fn set(&self, slot: u32, target: Arc<dyn Target>) {
        self.targets.write().0.set(slot, target);
    }

    /// Frees a slot. The index must no longer refer to it, or a message could reach its next owner.
    pub(crate) fn free(&self, slot: u32) {
        let target = self.targets.write().0.remove(slot);
        drop(target);
    }

    /// Lets go of all receivers.
    pub(crate) fn clear(&self) {
        let table = std::mem::take(&mut *self.targets.write());
        // Not under the lock: receivers end here, and may look for others.
        drop(table);
    }

    /// The sessions among `count` slots from `from`.
    pub(crate) fn sessions(&self, from: u32, count: u32) -> Vec<Arc<dyn Session>> {
        self.targets.read().sessions(from, count).into_iter().map(|(_, session)| session).collect()
    }

    /// The first slot that was never used.
    pub(crate) fn end(&self) -> u32 {
        self.targets.read().end()
    }

    /// The session of a slot.
    pub(crate) fn session(&self, slot: u32) -> Option<Arc<dyn Session>> {
        Arc::clone(self.targets.read().get(slot)?).into_session()
    }

    /// Calls `visit` for every session, under no lock.
    pub(crate) fn for_each_session(&self, mut visit: impl FnMut(Arc<dyn Session>)) {
        let mut from = 1;
        loop {
            let (sessions, end) = {
                let table = self.targets.read();
                (table.sessions(from, TURN), table.end())
            };
            for (_, session) in sessions {
                visit(session);
            }
            from += TURN;
            if from >= end {
                return;
            }
        }
    }

    /// Locks the table for reading, for the time of one match.
    pub(crate) fn read(&self) -> parking_lot::RwLockReadGuard<'_, SlotTable> {
        self.targets.read()
    }
}
