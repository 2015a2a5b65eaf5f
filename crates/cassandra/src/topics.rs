//! Topics that a device has in the tables: the bound on topics per device without counting rows at each write.
//!
//! The known topics of a device were read from the tables, or are part of a write that succeeded or is under way. After a write
//! that may have failed the device is forgotten, and read again when it is next written.

use std::{
    collections::{HashMap, HashSet},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::Duration,
};

use ahash::RandomState;
use parking_lot::Mutex;
use tokio::time::Instant;

/// Hashes of topics in all; beyond it some devices are forgotten.
const MAX_KNOWN: usize = 4 << 20;

/// Time until a device without room is read again: its values may have expired, or been removed.
const STALE: Duration = Duration::from_secs(600);

pub(super) struct KnownTopics {
    bound: usize,
    most: usize,
    hashing: RandomState,
    state: Mutex<KnownDevices>,
    /// True once a value of the future was read.
    any_ahead: AtomicBool,
}

#[derive(Default)]
struct KnownDevices {
    devices: HashMap<String, KnownDevice, RandomState>,
    known: usize,
}

struct KnownDevice {
    topics: TopicHashes,
    ahead: FutureVersions,
    read: Instant,
}

/// The hashes of a device's topics in the tables.
pub(super) type TopicHashes = HashSet<u64, RandomState>;

/// Versions of the future by the hashes of their topics: nearly always none.
pub(super) type FutureVersions = HashMap<u64, u64, RandomState>;

/// Contents of the tables for a device.
#[derive(Default)]
pub(super) struct Stored {
    pub(super) topics: TopicHashes,
    /// Topics whose value is newer than this machine's clock: what is written now has no effect.
    pub(super) ahead: FutureVersions,
    /// The gateway that wrote the newest of these.
    pub(super) writer: Option<String>,
}

/// Answer of [`KnownTopics::admit`] for some topics of a device.
pub(super) struct TopicAdmission {
    /// For each topic whether it may be written.
    pub(super) may: Vec<bool>,
    /// True if one of the topics is new.
    pub(super) fresh: bool,
}

impl KnownTopics {
    pub(super) fn new(bound: usize) -> Self {
        Self {
            bound,
            most: MAX_KNOWN,
            hashing: RandomState::new(),
            state: Mutex::default(),
            any_ahead: AtomicBool::new(false),
        }
    }

    pub(super) fn hash(&self, topic: &str) -> u64 {
        self.hashing.hash_one(topic)
    }

    /// Decides whether the device has the topics or has room for them, and notes them. `None` if the tables must be asked first.
    pub(super) fn admit<'a>(
        &self,
        device: &str,
        topics: impl IntoIterator<Item = &'a str>,
    ) -> Option<TopicAdmission> {
        let hashes = self.hashes(topics);
        self.state.lock().admit(device, &hashes, self.bound)
    }

    /// Notes what the tables hold of `device`, then admits as [`Self::admit`].
    pub(super) fn load<'a>(
        &self,
        device: &str,
        stored: Stored,
        topics: impl IntoIterator<Item = &'a str>,
    ) -> TopicAdmission {
        let hashes = self.hashes(topics);
        let Stored { topics: stored, ahead, .. } = stored;
        if !ahead.is_empty() {
            self.any_ahead.store(true, Relaxed);
        }
        let mut state = self.state.lock();
        state.forget(device);
        if state.known + stored.len() >= self.most {
            state.shrink(self.most / 4 + stored.len());
        }
        state.known += stored.len() + 1;
        state.devices.insert(device.to_owned(), KnownDevice { topics: stored, ahead, read: Instant::now() });
        let none = || TopicAdmission { may: vec![false; hashes.len()], fresh: false };
        state.admit(device, &hashes, self.bound).unwrap_or_else(none)
    }

    /// Counts those of a device's values (topic and version) that have no effect, since the tables had newer ones, of the future,
    /// when they were read.
    pub(super) fn void<'a>(&self, device: &str, values: impl IntoIterator<Item = (&'a str, u64)>) -> usize {
        if !self.any_ahead.load(Relaxed) {
            return 0;
        }
        let state = self.state.lock();
        let Some(device) = state.devices.get(device).filter(|device| !device.ahead.is_empty()) else {
            return 0;
        };
        let is_void = |(topic, version): &(&str, u64)| {
            device.ahead.get(&self.hash(topic)).is_some_and(|stored| stored > version)
        };
        values.into_iter().filter(is_void).count()
    }

    fn hashes<'a>(&self, topics: impl IntoIterator<Item = &'a str>) -> Vec<u64> {
        topics.into_iter().map(|topic| self.hash(topic)).collect()
    }

    /// Forgets these devices.
    pub(super) fn forget<'a>(&self, devices: impl IntoIterator<Item = &'a String>) {
        let mut state = self.state.lock();
        devices.into_iter().for_each(|device| state.forget(device));
    }

    pub(super) fn clear(&self) {
        *self.state.lock() = KnownDevices::default();
    }
}

impl KnownDevices {
    fn admit(&mut self, device: &str, hashes: &[u64], bound: usize) -> Option<TopicAdmission> {
        let known = self.devices.get_mut(device)?;
        let before = known.topics.len();
        if known.read.elapsed() >= STALE {
            let fresh: HashSet<_> = hashes.iter().filter(|hash| !known.topics.contains(hash)).collect();
            if before + fresh.len() > bound {
                return None;
            }
        }
        let may = hashes.iter().map(|hash| {
            let room = known.topics.len() < bound;
            known.topics.contains(hash) || room && known.topics.insert(*hash)
        });
        let may = may.collect();
        let added = known.topics.len() - before;
        self.known += added;
        Some(TopicAdmission { may, fresh: added > 0 })
    }

    /// Forgets devices with `excess` topics in all, or all of them.
    fn shrink(&mut self, excess: usize) {
        let mut left = excess;
        let known = &mut self.known;
        self.devices.retain(|_, device| {
            let stays = left == 0;
            if !stays {
                left = left.saturating_sub(device.topics.len() + 1);
                *known -= device.topics.len() + 1;
            }
            stays
        });
    }

    fn forget(&mut self, device: &str) {
        if let Some(device) = self.devices.remove(device) {
            self.known -= device.topics.len() + 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn may(admitted: Option<TopicAdmission>) -> Option<Vec<bool>> {
        admitted.map(|admitted| admitted.may)
    }

    fn stored(topics: impl IntoIterator<Item = u64>) -> Stored {
        Stored { topics: topics.into_iter().collect(), ..Stored::default() }
    }

    /// The database silently keeps the value with the higher version, so a write that had no effect must not be
    /// counted.
    #[tokio::test(start_paused = true)]
    async fn values_older_than_one_of_the_future_are_known_to_be_void() {
        let known = KnownTopics::new(3);
        let ahead = FutureVersions::from_iter([(known.hash("a"), 100)]);
        let topics = TopicHashes::from_iter([known.hash("a"), known.hash("b")]);
        known.load("d", Stored { topics, ahead, writer: None }, []);
        assert_eq!(known.void("d", [("a", 99), ("a", 100), ("b", 1), ("c", 1)]), 1);
        assert_eq!(known.void("other", [("a", 1)]), 0);
        known.load("d", Stored::default(), []);
        assert_eq!(known.void("d", [("a", 99)]), 0, "read again, it is gone");
    }

    #[tokio::test(start_paused = true)]
    async fn a_device_never_gets_more_topics_than_the_bound() {
        let known = KnownTopics::new(3);
        assert_eq!(may(known.admit("d", ["a"])), None, "not read yet");
        let stored = stored([known.hash("a"), known.hash("b")]);
        assert_eq!(known.load("d", stored, ["a", "c", "d", "c"]).may, [true, true, false, true]);
        assert_eq!(may(known.admit("d", ["d", "b"])), Some(vec![false, true]));
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_write_that_may_have_failed_the_tables_are_asked_again() {
        let known = KnownTopics::new(3);
        assert!(known.load("d", Stored::default(), ["a"]).fresh);
        assert!(!known.admit("d", ["a"]).unwrap().fresh);
        known.forget([&"d".to_owned()]);
        assert_eq!(may(known.admit("d", ["a"])), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_device_is_read_again_now_and_then() {
        let known = KnownTopics::new(1);
        known.load("d", Stored::default(), ["a"]);
        assert_eq!(may(known.admit("d", ["b"])), Some(vec![false]));
        tokio::time::advance(STALE).await;
        assert_eq!(may(known.admit("d", ["a"])), Some(vec![true]), "what it has needs no look");
        assert_eq!(may(known.admit("d", ["b"])), None);
        assert_eq!(known.load("d", Stored::default(), ["b"]).may, [true]);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_known_is_bounded_and_the_device_at_hand_stays() {
        let known = KnownTopics { most: 100, ..KnownTopics::new(10) };
        for device in 0..1000 {
            let device = device.to_string();
            known.load(&device, stored(0..5), []);
            assert!(known.admit(&device, []).is_some());
            let state = known.state.lock();
            let sum: usize = state.devices.values().map(|device| device.topics.len() + 1).sum();
            assert!(state.known == sum && sum <= 106, "{sum}");
        }
    }
}
