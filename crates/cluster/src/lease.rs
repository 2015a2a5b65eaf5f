//! Until when an owner may acknowledge.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

/// Time that a lease lasts, from the beginning of the last answered call that showed this process as the owner.
pub const LEASE: Duration = Duration::from_secs(3);

/// Time that a new owner waits before it serves: the old one's lease, and one second.
pub const LEASE_WAIT: Duration = Duration::from_secs(4);

/// Given by the engine alone: clients are admitted, and QoS 1 and 2 acknowledged, only while it is held.
#[derive(Debug)]
pub struct Lease {
    /// Microseconds on the clock; [`ENDED`] once and for all when the home is lost.
    until: AtomicU64,
}

const ENDED: u64 = 0;

impl Default for Lease {
    fn default() -> Self {
        Self { until: AtomicU64::new(ENDED + 1) }
    }
}

impl Lease {
    /// Tells whether it is held at a time of [`crate::Clock::now`]. One load.
    pub fn held(&self, now: Duration) -> bool {
        micros(now) + 1 < self.until.load(Relaxed)
    }

    /// A call that began then has shown this process as the owner.
    pub(crate) fn renew(&self, begun: Duration) {
        let until = micros(begun + LEASE);
        let later = |now: u64| (now != ENDED).then(|| now.max(until));
        // An ended lease stays so.
        let _ = self.until.fetch_update(Relaxed, Relaxed, later);
    }

    /// Ends it for ever.
    pub(crate) fn end(&self) {
        self.until.store(ENDED, Relaxed);
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_counts_from_the_beginning_of_a_call_and_ends_once() {
        let (lease, at) = (Lease::default(), |millis| Duration::from_millis(millis));
        assert!(!lease.held(at(0)) && !lease.held(at(1)));
        lease.renew(at(1_000));
        lease.renew(at(500));
        assert!(lease.held(at(3_998)) && !lease.held(at(4_000)), "an older call shortens nothing");
        lease.end();
        lease.renew(at(3_000));
        assert!(!lease.held(at(3_001)), "an answer that comes late gives no lease back");
    }
}
