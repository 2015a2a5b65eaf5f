//! Which topics a device has in the tables: the bound on topics per device without counting rows at each write.

use std::collections::{HashMap, HashSet};

use parking_lot::Mutex;

/// Hashes of topics in all; beyond it what is known is forgotten and read again.
const MAX_KNOWN: usize = 4 << 20;

pub(super) struct KnownTopics {
    bound: usize,
    hashing: ahash::RandomState,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    devices: HashMap<String, HashSet<u64>>,
    known: usize,
}

impl KnownTopics {
    pub(super) fn new(bound: usize) -> Self {
        Self { bound, hashing: ahash::RandomState::new(), state: Mutex::default() }
    }

    pub(super) fn is_loaded(&self, device: &str) -> bool {
        self.state.lock().devices.contains_key(device)
    }

    /// Notes what the tables hold of `device`.
    pub(super) fn load(&self, device: &str, topics: &[String]) {
        let mut state = self.state.lock();
        if state.known + topics.len() >= MAX_KNOWN {
            *state = State::default();
        }
        state.known += topics.len() + 1;
        let hashes = topics.iter().map(|topic| self.hashing.hash_one(&**topic)).collect();
        state.devices.insert(device.to_owned(), hashes);
    }

    /// Whether the device has the topic or may have one more; notes it.
    pub(super) fn admit(&self, device: &str, topic: &str) -> bool {
        let mut state = self.state.lock();
        let hash = self.hashing.hash_one(topic);
        let bound = self.bound;
        // Forgotten by another call since it was loaded: let through, the next call reads it again.
        let Some(topics) = state.devices.get_mut(device) else { return true };
        if topics.contains(&hash) {
            return true;
        }
        let room = topics.len() < bound;
        if room {
            topics.insert(hash);
            state.known += 1;
        }
        room
    }
}
