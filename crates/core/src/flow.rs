//! Rates of messages and bytes: token buckets that go below zero, so that whoever has taken too much waits afterwards.

use crate::{Timestamp, units::ByteSize};

/// A token bucket: so many tokens a second, and at most a second's worth at once.
#[derive(Debug)]
pub struct Bucket {
    /// Tokens per second, 0 is no limit.
    rate: f64,
    tokens: f64,
    filled: Timestamp,
}

/// A rate of messages and one of bytes.
#[derive(Debug)]
pub struct Flow {
    messages: Bucket,
    bytes: Bucket,
}

impl Bucket {
    /// A full one; `rate` per second, 0 is no limit.
    pub fn new(rate: f64, now: Timestamp) -> Self {
        Self { rate, tokens: rate, filled: now }
    }

    /// Returns whether next to nothing was taken lately, so that the bucket need not be remembered.
    pub fn is_nearly_full(&mut self, now: Timestamp) -> bool {
        self.take(0.0, now);
        self.tokens >= 0.9 * self.rate
    }

    /// Takes `amount`; seconds until nothing is owed.
    pub fn take(&mut self, amount: f64, now: Timestamp) -> f64 {
        if self.rate == 0.0 {
            return 0.0;
        }
        let seconds = now.0.saturating_sub(self.filled.0) as f64 / 1000.0;
        // Threads that share it may have read the clock in another order.
        self.filled = self.filled.max(now);
        self.tokens = (self.tokens + seconds * self.rate).min(self.rate) - amount;
        if self.tokens < 0.0 { -self.tokens / self.rate } else { 0.0 }
    }
}

impl Flow {
    /// A flow of at most this many messages and bytes per second, where 0 is no limit; `None` if neither is limited.
    pub fn new(messages: u32, bytes: ByteSize, now: Timestamp) -> Option<Self> {
        let bucket = |rate| Bucket::new(rate, now);
        (messages > 0 || bytes.0 > 0)
            .then(|| Self { messages: bucket(f64::from(messages)), bytes: bucket(bytes.0 as f64) })
    }

    /// Takes what was done; seconds until nothing is owed.
    pub fn take(&mut self, messages: u32, bytes: usize, now: Timestamp) -> f64 {
        self.messages.take(f64::from(messages), now).max(self.bytes.take(bytes as f64, now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_takes_too_much_waits_until_it_is_paid() {
        let mut flow = Flow::new(10, ByteSize(1000), Timestamp(0)).unwrap();
        assert_eq!(flow.take(10, 1000, Timestamp(0)), 0.0);
        assert_eq!(flow.take(5, 0, Timestamp(0)), 0.5);
        assert_eq!(flow.take(0, 2000, Timestamp(500)), 1.5);
        assert_eq!(flow.take(0, 0, Timestamp(2000)), 0.0);
        assert!(Flow::new(0, ByteSize(0), Timestamp(0)).is_none());
    }

    /// The failure: a thread with an older time makes the same second count twice.
    #[test]
    fn time_that_goes_back_gives_nothing() {
        let mut bucket = Bucket::new(10.0, Timestamp(1000));
        assert_eq!(bucket.take(20.0, Timestamp(1000)), 1.0);
        assert_eq!(bucket.take(0.0, Timestamp(0)), 1.0);
        assert_eq!(bucket.take(0.0, Timestamp(1000)), 1.0);
    }
}
