//! Limits and fallbacks between the gateway and a remote source of decisions.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Span, validate::Check};

/// Treatment of a login while the source does not answer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OnError {
    /// The login is refused; the device tries again.
    #[default]
    Refuse,
    /// The device comes in as nobody in particular.
    Allow,
    /// The next step is asked.
    Next,
}

/// The bounds of one remote source.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct RemoteLimits {
    /// Time for one answer; and as long may a question wait for its turn.
    pub deadline: Span,
    /// Questions at once.
    pub max_concurrent: usize,
    /// Logins at once that wait for an answer; one more is refused as busy.
    pub max_waiting: usize,
    /// Failures in a row after which only one question in ten goes on, if nobody was answered meanwhile.
    pub failures: u32,
    /// Time until one more question tries the source; twice as long after each try that fails, up to 30 s.
    pub retry_after: Span,
    /// Answers that are remembered.
    pub cache_size: usize,
    /// How long an allowed login is.
    pub cache_ttl: Span,
    /// How long another is.
    pub cache_negative_ttl: Span,
    /// Extra time for both while the source does not answer.
    pub stale_if_error: Span,
}

impl Default for RemoteLimits {
    fn default() -> Self {
        let seconds = |seconds| Span(Duration::from_secs(seconds));
        Self {
            deadline: seconds(2),
            max_concurrent: 200,
            max_waiting: 2_000,
            failures: 5,
            retry_after: seconds(1),
            cache_size: 10_000,
            cache_ttl: seconds(60),
            cache_negative_ttl: seconds(5),
            stale_if_error: seconds(600),
        }
    }
}

impl RemoteLimits {
    pub(super) fn check(&self, section: &str, check: &mut Check) {
        for (name, number) in [
            ("max_concurrent", self.max_concurrent),
            ("max_waiting", self.max_waiting),
            ("failures", self.failures as usize),
        ] {
            check.positive(&format!("{section}.{name}"), number, number == 0);
        }
        for (name, time) in [("deadline", self.deadline), ("retry_after", self.retry_after)] {
            check.positive(&format!("{section}.{name}"), time, time.0.is_zero());
        }
    }
}
