//! Delays after failed logins: a client that has failed to log in waits before its next try is looked at, longer each time.

use std::{
    collections::{BTreeSet, HashMap},
    hash::Hash,
    time::Duration,
};

use gateway_core::Timestamp;

/// Rule for the wait of a peer after failures.
#[derive(Debug, Clone, Copy)]
pub struct BackoffRule {
    /// Failures that cost nothing, as people and devices make mistakes.
    pub free: u32,
    /// The wait after the first failure beyond those; it doubles with each further one.
    pub first: Duration,
    /// The longest wait. Failures are forgotten when there was none for so long.
    pub longest: Duration,
}

/// Failures by `K`. Their number is bounded: beyond it the entry that would be forgotten first is forgotten now.
#[derive(Debug)]
pub struct Backoff<K> {
    rule: BackoffRule,
    most: usize,
    failing: HashMap<K, Failing>,
    /// By when they are forgotten.
    order: BTreeSet<(Timestamp, K)>,
}

#[derive(Debug, Clone, Copy)]
struct Failing {
    failures: u32,
    until: Timestamp,
    forgotten: Timestamp,
}

impl<K: Copy + Eq + Hash + Ord> Backoff<K> {
    /// Remembers at most `most`.
    pub fn new(rule: BackoffRule, most: usize) -> Self {
        Self { rule, most, failing: HashMap::new(), order: BTreeSet::new() }
    }

    /// Returns how much longer `who` has to wait, if at all.
    pub fn wait(&self, who: K, now: Timestamp) -> Option<Duration> {
        let until = self.failing.get(&who)?.until;
        (until > now).then(|| Duration::from_millis(until.0 - now.0))
    }

    /// `who` has failed. Returns how long he waits now, if at all.
    pub fn failed(&mut self, who: K, now: Timestamp) -> Option<Duration> {
        self.forget(now);
        let before = self.failing.get(&who).copied();
        let failures = before.map_or(0, |before| before.failures).saturating_add(1);
        let over = failures.saturating_sub(self.rule.free);
        let wait = match over.checked_sub(1) {
            None => Duration::ZERO,
            Some(doubled) => {
                let factor = 2u32.saturating_pow(doubled);
                self.rule.first.saturating_mul(factor).min(self.rule.longest)
            }
        };
        let until = now.plus_millis(wait.as_millis() as u64);
        let forgotten = until.plus_millis(self.rule.longest.as_millis() as u64);
        if let Some(before) = before {
            self.order.remove(&(before.forgotten, who));
        }
        self.order.insert((forgotten, who));
        self.failing.insert(who, Failing { failures, until, forgotten });
        (!wait.is_zero()).then_some(wait)
    }

    /// Forgets the failures of `who`, who has logged in, and returns how many there were.
    pub fn succeeded(&mut self, who: K) -> u32 {
        let Some(before) = self.failing.remove(&who) else { return 0 };
        self.order.remove(&(before.forgotten, who));
        before.failures
    }

    /// Takes back so many failures of `who`, and its wait if those that are left cost nothing.
    pub fn forgive(&mut self, who: K, failures: u32) {
        let Some(failing) = self.failing.get_mut(&who) else { return };
        failing.failures = failing.failures.saturating_sub(failures);
        if failing.failures == 0 {
            self.succeeded(who);
        } else if failing.failures <= self.rule.free {
            failing.until = Timestamp::default();
        }
    }

    /// Returns the number of peers remembered.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Returns whether no peer is remembered.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    fn forget(&mut self, now: Timestamp) {
        while let Some(&(forgotten, who)) = self.order.first()
            && (forgotten <= now || self.order.len() >= self.most)
        {
            self.order.pop_first();
            self.failing.remove(&who);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const RULE: BackoffRule = BackoffRule { free: 3, first: SECOND, longest: Duration::from_secs(60) };

    fn at(seconds: u64) -> Timestamp {
        Timestamp(1_000_000 + seconds * 1000)
    }

    #[test]
    fn waits_double_up_to_the_longest_and_others_wait_for_nothing() {
        let mut backoff = Backoff::new(RULE, 100);
        for _ in 0..3 {
            assert_eq!(backoff.failed(1, at(0)), None);
        }
        assert_eq!(backoff.wait(1, at(0)), None);
        let waits: Vec<u64> =
            (0..8).map(|_| backoff.failed(1, at(0)).map_or(0, |wait| wait.as_secs())).collect();
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(backoff.wait(1, at(0)), Some(60 * SECOND));
        assert_eq!(backoff.wait(1, at(59)), Some(SECOND));
        assert_eq!(backoff.wait(1, at(60)), None);
        assert_eq!(backoff.wait(2, at(0)), None);
        for _ in 0..100 {
            backoff.failed(1, at(60));
        }
        assert_eq!(backoff.wait(1, at(60)), Some(60 * SECOND), "no overflow");
    }

    #[test]
    fn a_login_or_a_quiet_time_makes_good_for_failures() {
        let mut backoff = Backoff::new(RULE, 100);
        for _ in 0..4 {
            backoff.failed(1, at(0));
            backoff.failed(2, at(0));
        }
        backoff.succeeded(1);
        assert_eq!((backoff.wait(1, at(0)), backoff.failed(1, at(0))), (None, None));
        assert!(backoff.wait(2, at(0)).is_some());
        // The wait ended at 1, and 60 seconds of quiet at 61.
        assert_eq!(backoff.failed(2, at(61)), None);
        backoff.failed(3, at(1_000));
        assert_eq!(backoff.len(), 1);
    }

    #[test]
    fn failures_that_are_taken_back_cost_nothing_and_the_others_go_on() {
        let mut backoff = Backoff::new(RULE, 100);
        for _ in 0..6 {
            backoff.failed(1, at(0));
        }
        backoff.forgive(1, 2);
        assert_eq!(backoff.wait(1, at(0)), Some(4 * SECOND), "four are too many");
        backoff.forgive(1, 1);
        assert_eq!(backoff.wait(1, at(0)), None);
        assert_eq!(backoff.failed(1, at(0)), Some(SECOND), "three are remembered");
        backoff.forgive(1, 9);
        assert!(backoff.is_empty());
        backoff.forgive(2, 1);
    }

    #[test]
    fn what_is_remembered_is_bounded_and_the_worst_stay() {
        let mut backoff = Backoff::new(RULE, 50);
        for _ in 0..6 {
            backoff.failed(7, at(0));
        }
        for other in 1_000..2_000 {
            backoff.failed(other, at(0));
        }
        assert_eq!((backoff.len(), backoff.failing.len()), (50, 50));
        assert!(backoff.wait(7, at(0)).is_some());
    }
}
