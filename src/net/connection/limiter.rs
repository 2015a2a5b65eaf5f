//! Rate limit of one client: two token buckets. It slows reading and drops nothing.

use std::time::Duration;

use gateway_core::Timestamp;

use crate::config::Limits;

/// Messages and bytes a client may still send now; may go below zero, then reading pauses.
#[derive(Debug)]
pub(in crate::net) struct Limiter {
    messages: Bucket,
    bytes: Bucket,
}

/// What may be done in a time, with a second's worth at once.
#[derive(Debug)]
pub(in crate::net) struct Bucket {
    /// Tokens per second, 0 is no limit.
    rate: f64,
    tokens: f64,
    filled: Timestamp,
}

impl Limiter {
    /// `None` when no rate is configured.
    pub(in crate::net) fn new(limits: &Limits, now: Timestamp) -> Option<Box<Self>> {
        if limits.client_message_rate == 0 && limits.client_byte_rate.0 == 0 {
            return None;
        }
        let bucket = |rate| Bucket::new(rate, now);
        Some(Box::new(Self {
            messages: bucket(f64::from(limits.client_message_rate)),
            bytes: bucket(limits.client_byte_rate.0 as f64),
        }))
    }

    /// Takes what was read; how long to pause reading, if at all.
    pub(in crate::net) fn take(&mut self, messages: u32, bytes: usize, now: Timestamp) -> Option<Duration> {
        let pause = self.messages.take(f64::from(messages), now).max(self.bytes.take(bytes as f64, now));
        (pause > 0.0).then(|| Duration::from_secs_f64(pause.min(60.0)))
    }
}

impl Bucket {
    /// A full one; `rate` per second, 0 is no limit.
    pub(in crate::net) fn new(rate: f64, now: Timestamp) -> Self {
        Self { rate, tokens: rate, filled: now }
    }

    /// Whether nothing worth remembering was taken lately.
    pub(in crate::net) fn is_nearly_full(&mut self, now: Timestamp) -> bool {
        self.take(0.0, now);
        self.tokens >= 0.9 * self.rate
    }

    /// Takes `amount`; seconds until nothing is owed.
    pub(in crate::net) fn take(&mut self, amount: f64, now: Timestamp) -> f64 {
        if self.rate == 0.0 {
            return 0.0;
        }
        let seconds = now.0.saturating_sub(self.filled.0) as f64 / 1000.0;
        self.filled = now;
        self.tokens = (self.tokens + seconds * self.rate).min(self.rate) - amount;
        if self.tokens < 0.0 { -self.tokens / self.rate } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_over_the_rate_pauses_for_as_long_as_it_takes() {
        let limits = Limits { client_message_rate: 10, ..Limits::default() };
        let mut limiter = Limiter::new(&limits, Timestamp(0)).expect("a rate is set");
        assert_eq!(limiter.take(10, 0, Timestamp(0)), None);
        assert_eq!(limiter.take(5, 0, Timestamp(0)), Some(Duration::from_millis(500)));
        assert_eq!(limiter.take(0, 0, Timestamp(600)), None);
        assert!(Limiter::new(&Limits::default(), Timestamp(0)).is_none());
    }
}
