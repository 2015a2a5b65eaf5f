//! A bounded cache of the answers of a remote service, which also helps out while the service is away. Time is an argument.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use gateway_core::Timestamp;

/// Result of [`Cache::get`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CachedAnswer<T> {
    /// Good.
    Fresh(T),
    /// Better than nothing.
    Stale(T),
    /// Nothing.
    Nothing,
}

/// Answers by the digest of their question. Beyond its capacity the oldest leaves.
#[derive(Debug)]
pub struct Cache<T> {
    entries: HashMap<[u8; 32], CacheEntry<T>>,
    /// Keys in the order in which they came; one that was replaced is there once.
    order: VecDeque<[u8; 32]>,
    capacity: usize,
}

#[derive(Debug)]
struct CacheEntry<T> {
    value: T,
    fresh: Timestamp,
    stale: Timestamp,
}

impl<T: Clone> Cache<T> {
    /// An empty cache for at most `capacity` answers.
    pub fn new(capacity: usize) -> Self {
        Self { entries: HashMap::new(), order: VecDeque::new(), capacity }
    }

    /// The answer for `key`, and whether it still holds at `now`.
    pub fn get(&self, key: &[u8; 32], now: Timestamp) -> CachedAnswer<T> {
        match self.entries.get(key) {
            Some(entry) if now < entry.fresh => CachedAnswer::Fresh(entry.value.clone()),
            Some(entry) if now < entry.stale => CachedAnswer::Stale(entry.value.clone()),
            _ => CachedAnswer::Nothing,
        }
    }

    /// Keeps an answer for `fresh`, less up to a quarter by `jitter`, so that what came together does not end together;
    /// and for `stale` after that.
    pub fn put(
        &mut self,
        key: [u8; 32],
        value: T,
        now: Timestamp,
        fresh: Duration,
        stale: Duration,
        jitter: u8,
    ) {
        if self.capacity == 0 || (fresh + stale).is_zero() {
            return;
        }
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let fresh = millis(fresh);
        let fresh = fresh - fresh.saturating_mul(u64::from(jitter)) / 1024;
        let fresh = now.plus_millis(fresh);
        let entry = CacheEntry { value, fresh, stale: fresh.plus_millis(millis(stale)) };
        if self.entries.insert(key, entry).is_none() {
            self.order.push_back(key);
            while self.entries.len() > self.capacity {
                let Some(oldest) = self.order.pop_front() else { return };
                self.entries.remove(&oldest);
            }
        }
    }

    /// The answer for `key` no longer holds, and must not be given even while nobody answers.
    pub fn forget(&mut self, key: &[u8; 32]) {
        // The key keeps its place, since the order has it; another answer takes the place, or the key leaves in its turn.
        if let Some(entry) = self.entries.get_mut(key) {
            (entry.fresh, entry.stale) = (Timestamp(0), Timestamp(0));
        }
    }

    /// Returns the number of answers kept.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether no answer is kept.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_cache_is_bounded_and_its_answers_age() {
        let mut cache = Cache::new(2);
        let key = |n: u8| [n; 32];
        let at = Timestamp;
        cache.put(key(1), 1, at(0), 8 * SECOND, 2 * SECOND, 0);
        assert_eq!(cache.get(&key(1), at(7_999)), CachedAnswer::Fresh(1));
        assert_eq!(cache.get(&key(1), at(9_999)), CachedAnswer::Stale(1));
        assert_eq!(cache.get(&key(1), at(10_000)), CachedAnswer::Nothing);
        cache.put(key(2), 2, at(0), 8 * SECOND, Duration::ZERO, 255);
        assert_eq!(cache.get(&key(2), at(6_010)), CachedAnswer::Nothing, "a quarter earlier");
        assert_eq!(cache.get(&key(2), at(6_000)), CachedAnswer::Fresh(2));
        cache.put(key(1), 3, at(0), SECOND, SECOND, 0);
        cache.put(key(3), 3, at(0), SECOND, SECOND, 0);
        assert_eq!((cache.len(), cache.get(&key(1), at(0))), (2, CachedAnswer::Nothing), "the oldest leaves");
        cache.put(key(4), 4, at(0), Duration::ZERO, Duration::ZERO, 0);
        assert_eq!(cache.get(&key(4), at(0)), CachedAnswer::Nothing);
        assert_eq!(cache.order.len(), 2);
        cache.forget(&key(3));
        assert_eq!((cache.get(&key(3), at(0)), cache.len()), (CachedAnswer::Nothing, 2));
        cache.put(key(3), 5, at(0), SECOND, SECOND, 0);
        assert_eq!((cache.get(&key(3), at(0)), cache.order.len()), (CachedAnswer::Fresh(5), 2));
    }
}
