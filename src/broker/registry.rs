//! Sessions by client id, in shards, so that connects on different threads rarely meet.
//!
//! [`Session::core`] is the one session method called under a shard's lock: it must be a plain accessor.

use std::sync::Arc;

use ahash::RandomState;
use hashbrown::HashTable;
use parking_lot::{Mutex, MutexGuard};

use super::Session;

const SHARDS: usize = 64;

/// All sessions.
pub(super) struct Registry {
    hasher: RandomState,
    shards: Box<[Mutex<Shard>]>,
}

/// Some of the sessions.
#[derive(Default)]
pub(super) struct Shard {
    sessions: HashTable<Arc<dyn Session>>,
}

/// A locked shard with the hash of the client id in question.
pub(super) struct Place<'a> {
    shard: MutexGuard<'a, Shard>,
    hash: u64,
    hasher: &'a RandomState,
}

impl Registry {
    pub(super) fn new(hasher: RandomState) -> Self {
        let shards = std::iter::repeat_with(Mutex::default).take(SHARDS).collect();
        Self { hasher, shards }
    }

    /// Locks the shard of a client id: opens and ends of one client happen one after the other.
    pub(super) fn lock(&self, client_id: &str) -> Place<'_> {
        let hash = self.hasher.hash_one(client_id);
        let shard = self.shards[(hash >> 48) as usize % SHARDS].lock();
        Place { shard, hash, hasher: &self.hasher }
    }

    /// The session of a client id.
    pub(super) fn get(&self, client_id: &str) -> Option<Arc<dyn Session>> {
        self.lock(client_id).find(client_id).cloned()
    }

    /// Calls `visit` for every session, under a shard's lock.
    pub(super) fn for_each(&self, mut visit: impl FnMut(&Arc<dyn Session>)) {
        for shard in &self.shards {
            for session in &shard.lock().sessions {
                visit(session);
            }
        }
    }
}

impl Place<'_> {
    /// The session of the client id that the shard was locked for.
    pub(super) fn find(&self, client_id: &str) -> Option<&Arc<dyn Session>> {
        self.shard.sessions.find(self.hash, |session| session.core().client_id().as_str() == client_id)
    }

    /// Adds a session in the place of `old`.
    pub(super) fn replace(&mut self, old: Option<&Arc<dyn Session>>, session: Arc<dyn Session>) {
        if let Some(old) = old {
            self.remove(old);
        }
        let hasher = self.hasher;
        let rehash = |session: &Arc<dyn Session>| hasher.hash_one(session.core().client_id().as_str());
        self.shard.sessions.insert_unique(self.hash, session, rehash);
    }

    /// Removes exactly this session, not a later one of the same client id.
    pub(super) fn remove(&mut self, session: &Arc<dyn Session>) {
        let slot = session.core().slot();
        if let Ok(entry) = self.shard.sessions.find_entry(self.hash, |other| other.core().slot() == slot) {
            entry.remove();
        }
    }
}
