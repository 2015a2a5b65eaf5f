//! Pauses before a call is repeated.

use std::{
    hash::{BuildHasher as _, Hasher as _, RandomState},
    time::Duration,
};

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(10);

/// Grows twofold from 100 ms to 10 s, each pause between half of that and all of it, so that clients that lost the same
/// gateway do not come back together.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    failures: u32,
}

impl Backoff {
    /// The call succeeded.
    pub(crate) fn reset(&mut self) {
        self.failures = 0;
    }

    /// The pause after one more failure, at least what the gateway asked for.
    pub(crate) fn after(&mut self, asked: Option<Duration>) -> Duration {
        let whole = FIRST.saturating_mul(1 << self.failures.min(16)).min(LONGEST);
        self.failures = self.failures.saturating_add(1);
        let share = f64::from(u32::try_from(random() >> 32).unwrap_or(0)) / f64::from(u32::MAX);
        whole.mul_f64(0.5 + share / 2.0).max(asked.unwrap_or_default())
    }
}

/// A number that nobody else has: the standard library seeds its hash maps from the system.
pub(crate) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_their_bound_and_are_not_all_the_same() {
        let mut backoff = Backoff::default();
        let pauses: Vec<Duration> = (0..40).map(|_| backoff.after(None)).collect();
        assert!(pauses[0] >= FIRST / 2 && pauses[0] <= FIRST);
        assert!(pauses[20..].iter().all(|pause| *pause >= LONGEST / 2 && *pause <= LONGEST));
        assert!(pauses[20..].iter().any(|pause| *pause != pauses[39]));
        backoff.reset();
        assert!(backoff.after(None) <= FIRST);
        assert_eq!(backoff.after(Some(Duration::from_secs(60))), Duration::from_secs(60));
    }
}
