//! Shared groups by number and by name.

use std::{collections::HashMap, sync::Arc};

use ahash::RandomState;
use hashbrown::HashTable;

use super::SharedGroup;

/// All groups by id and by full name. Ids are not reused, so that a late message for a group that is gone finds nobody.
#[derive(Default)]
pub(crate) struct SharedGroups {
    by_id: HashMap<u32, Arc<SharedGroup>, RandomState>,
    names: HashTable<u32>,
    hasher: RandomState,
    last: u32,
}

impl SharedGroups {
    pub(crate) fn find(&self, full_name: &str) -> Option<&Arc<SharedGroup>> {
        let hash = self.hasher.hash_one(full_name);
        let same = |id: &u32| self.by_id.get(id).is_some_and(|group| group.full_name() == full_name);
        self.by_id.get(self.names.find(hash, same)?)
    }

    pub(crate) fn get(&self, id: u32) -> Option<&Arc<SharedGroup>> {
        self.by_id.get(&id)
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<SharedGroup>> {
        self.by_id.values()
    }

    /// Adds the group that `make` builds for a new id.
    pub(crate) fn add(&mut self, make: impl FnOnce(u32) -> SharedGroup) -> Arc<SharedGroup> {
        // 31 bits; skips 0 and, after wrapping, ids in use.
        loop {
            self.last = (self.last + 1) & (crate::subscriber::GROUP - 1);
            if self.last != 0 && !self.by_id.contains_key(&self.last) {
                break;
            }
        }
        let group = Arc::new(make(self.last));
        let hash = self.hasher.hash_one(group.full_name());
        self.by_id.insert(group.id(), Arc::clone(&group));
        let (by_id, hasher) = (&self.by_id, &self.hasher);
        let rehash = |id: &u32| hasher.hash_one(by_id.get(id).map_or("", |group| group.full_name()));
        self.names.insert_unique(hash, group.id(), rehash);
        group
    }

    pub(crate) fn remove(&mut self, id: u32) {
        let Some(group) = self.by_id.remove(&id) else { return };
        let hash = self.hasher.hash_one(group.full_name());
        if let Ok(entry) = self.names.find_entry(hash, |other| *other == id) {
            entry.remove();
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.by_id.len()
    }
}
