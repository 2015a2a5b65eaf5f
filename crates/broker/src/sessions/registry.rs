//! Sessions by client id, in shards, so that connects on different threads rarely meet.
//!
//! Holds slots only; the sessions are in [`Slots`], which is locked for reading under a shard's lock.
//! [`Session::core`] is the one session method called then: it must be a plain accessor.

use std::sync::Arc;

use ahash::RandomState;
use hashbrown::HashTable;
use parking_lot::{Mutex, MutexGuard};

use super::slots::Slots;
use crate::{Session, half_hash::widen};

const SHARDS: usize = 64;

/// All sessions.
pub(crate) struct SessionRegistry {
    hasher: RandomState,
    shards: Box<[Mutex<HashTable<SessionKey>>]>,
}

/// A session's slot with half of its client id's hash, so that growing the table reads no client id.
pub(crate) struct SessionKey {
    slot: u32,
    hash: u32,
}

/// A locked shard with the hash of the client id in question.
pub(crate) struct ClientLock<'a> {
    shard: MutexGuard<'a, HashTable<SessionKey>>,
    hash: u32,
    slots: &'a Slots,
}

impl SessionRegistry {
    pub(crate) fn new(hasher: RandomState) -> Self {
        let shards = std::iter::repeat_with(Mutex::default).take(SHARDS).collect();
        Self { hasher, shards }
    }

    /// Locks the shard of a client id, so that opens and ends of one client happen one after the other.
    pub(crate) fn lock<'a>(&'a self, client_id: &str, slots: &'a Slots) -> ClientLock<'a> {
        let hash = self.hasher.hash_one(client_id);
        let shard = self.shards[(hash >> 48) as usize % SHARDS].lock();
        ClientLock { shard, hash: hash as u32, slots }
    }
}

impl ClientLock<'_> {
    /// The session of the client id that the shard was locked for.
    pub(crate) fn find(&self, client_id: &str) -> Option<Arc<dyn Session>> {
        let mut found = None;
        self.shard.find(widen(self.hash), |key| {
            if key.hash == self.hash {
                found = self.slots.session(key.slot);
            }
            found.as_ref().is_some_and(|session| session.core().client_id().as_str() == client_id)
        })?;
        found
    }

    /// Adds a session, whose slot is filled, in the place of `old`.
    pub(crate) fn replace(&mut self, old: Option<&Arc<dyn Session>>, session: &Arc<dyn Session>) {
        if let Some(old) = old {
            self.remove(old);
        }
        let key = SessionKey { slot: session.core().slot(), hash: self.hash };
        self.shard.insert_unique(widen(self.hash), key, |key| widen(key.hash));
    }

    /// Removes exactly this session, not a later one of the same client id.
    pub(crate) fn remove(&mut self, session: &Arc<dyn Session>) {
        let slot = session.core().slot();
        if let Ok(entry) = self.shard.find_entry(widen(self.hash), |key| key.slot == slot) {
            entry.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_finds_a_session_is_small() {
        assert_eq!(size_of::<SessionKey>(), 8);
        // Its place in the table of slots.
        assert_eq!(size_of::<Option<Arc<dyn crate::Target>>>(), 16);
    }
}
