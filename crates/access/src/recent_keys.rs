//! Keys that were seen lately, as many as there is room for.

use std::{
    collections::{BTreeSet, HashMap},
    hash::Hash,
    time::Duration,
};

use gateway_core::Timestamp;

/// Keys that were seen within a time. Beyond a number of them the one that was seen longest ago is forgotten.
#[derive(Debug)]
pub struct RecentKeys<K> {
    within: Duration,
    most: usize,
    seen: HashMap<K, Timestamp>,
    /// By when they were seen last.
    order: BTreeSet<(Timestamp, K)>,
}

impl<K: Copy + Eq + Hash + Ord> RecentKeys<K> {
    /// Remembers at most `most` keys, each for `within`.
    pub fn new(within: Duration, most: usize) -> Self {
        Self { within, most, seen: HashMap::new(), order: BTreeSet::new() }
    }

    /// Tells whether `key` was seen lately.
    pub fn has(&self, key: K, now: Timestamp) -> bool {
        self.seen.get(&key).is_some_and(|at| self.is_recent(*at, now))
    }

    /// `key` is seen now.
    pub fn see(&mut self, key: K, now: Timestamp) {
        if let Some(before) = self.seen.insert(key, now) {
            self.order.remove(&(before, key));
        }
        self.order.insert((now, key));
        while let Some(&(at, oldest)) = self.order.first()
            && (self.order.len() > self.most || !self.is_recent(at, now))
        {
            self.order.pop_first();
            self.seen.remove(&oldest);
        }
    }

    fn is_recent(&self, at: Timestamp, now: Timestamp) -> bool {
        now.0.saturating_sub(at.0) < self.within.as_millis() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_seen_is_forgotten_after_a_time_and_beyond_a_number() {
        let at = |seconds: u64| Timestamp(1_000_000 + seconds * 1000);
        let mut recently = RecentKeys::new(Duration::from_secs(10), 3);
        assert!(!recently.has(1, at(0)));
        recently.see(1, at(0));
        assert!(recently.has(1, at(9)) && !recently.has(1, at(10)));
        for key in 2..=4 {
            recently.see(key, at(1));
        }
        assert_eq!([1, 2, 3, 4].map(|key| recently.has(key, at(1))), [false, true, true, true]);
        recently.see(2, at(2));
        recently.see(5, at(2));
        assert_eq!([2, 3, 4, 5].map(|key| recently.has(key, at(2))), [true, false, true, true]);
        recently.see(6, at(50));
        assert_eq!((recently.seen.len(), recently.order.len()), (1, 1));
    }
}
