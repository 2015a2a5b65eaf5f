//! Warnings that a peer can cause, limited so that it cannot fill the log.

use std::{
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

#[expect(clippy::disallowed_methods, reason = "warnings are limited in real time, wherever they come from")]
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Lets one event pass per interval and counts the others. For a `static`; see [`crate::warn_limited`].
#[derive(Debug)]
pub struct RateLimit {
    interval_ms: u64,
    /// Milliseconds since the first use in the process, plus one; 0 is never.
    last: AtomicU64,
    suppressed: AtomicU64,
}

impl RateLimit {
    /// One event per `interval`.
    pub const fn new(interval: Duration) -> Self {
        let millis = interval.as_millis();
        let interval_ms = if millis > u32::MAX as u128 { u32::MAX as u64 } else { millis as u64 };
        Self { interval_ms, last: AtomicU64::new(0), suppressed: AtomicU64::new(0) }
    }

    /// `Some(n)` lets this event pass, with `n` suppressed since the last one.
    pub fn pass(&self) -> Option<u64> {
        let millis = u64::try_from(START.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.pass_at(millis)
    }

    fn pass_at(&self, millis: u64) -> Option<u64> {
        let now = millis.saturating_add(1);
        let last = self.last.load(Relaxed);
        let due = last == 0 || now.saturating_sub(last) >= self.interval_ms;
        if due && self.last.compare_exchange(last, now, Relaxed, Relaxed).is_ok() {
            return Some(self.suppressed.swap(0, Relaxed));
        }
        self.suppressed.fetch_add(1, Relaxed);
        None
    }
}

/// `tracing::warn!`, at most once in ten seconds from this place in the code. When some were left out, the next
/// one tells how many in the field `suppressed`.
#[macro_export]
macro_rules! warn_limited {
    ($($arg:tt)+) => {{
        static LIMIT: $crate::telemetry::RateLimit =
            $crate::telemetry::RateLimit::new(::std::time::Duration::from_secs(10));
        if let Some(suppressed) = LIMIT.pass() {
            ::tracing::warn!(suppressed, $($arg)+);
        }
    }};
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_event_passes_per_interval_and_the_rest_is_counted() {
        let limit = RateLimit::new(Duration::from_secs(10));
        assert_eq!(limit.pass_at(0), Some(0));
        assert_eq!(limit.pass_at(1), None);
        assert_eq!(limit.pass_at(9_999), None);
        assert_eq!(limit.pass_at(10_000), Some(2));
        assert_eq!(limit.pass_at(10_001), None);
    }

    #[test]
    fn the_macro_takes_fields_and_a_message() {
        for peer in 0..3 {
            crate::warn_limited!(peer, reason = "test", "refused");
        }
    }
}
