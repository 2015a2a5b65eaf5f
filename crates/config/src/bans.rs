//! `[bans]`: who may not connect, and who has to wait.

use std::{path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};

use super::{Config, Span, address::optional, validate::Check};

/// `[bans]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Bans {
    /// The operator's file of bans; empty is none.
    #[serde(with = "optional")]
    pub file: Option<PathBuf>,
    /// Bans in that file at most, as many made by RPC, and as many of clients that flap.
    pub max: usize,
    /// Failed logins of an address that cost it nothing; after more it waits. 0 never lets it wait.
    pub failed_logins: u32,
    /// The first wait; each further failure doubles it.
    pub first_wait: Span,
    /// The longest wait; also how long an address must not fail for its failures to be forgotten.
    pub longest_wait: Span,
    /// Connects of one client id within `flapping_within` that are not too many; one more bans it. 0 is no limit.
    pub flapping_connects: u32,
    /// In which time they are counted.
    pub flapping_within: Span,
    /// How long such a ban lasts.
    pub flapping_ban: Span,
}

impl Default for Bans {
    fn default() -> Self {
        Self {
            file: None,
            max: 10_000,
            failed_logins: 10,
            first_wait: Span(Duration::from_secs(1)),
            longest_wait: Span(Duration::from_secs(60)),
            flapping_connects: 0,
            flapping_within: Span(Duration::from_secs(60)),
            flapping_ban: Span(Duration::from_secs(300)),
        }
    }
}

impl Config {
    pub(super) fn check_bans(&self, check: &mut Check) {
        const MOST: usize = 1_000_000;
        let bans = &self.bans;
        if bans.max > MOST {
            check.fail("bans.max", bans.max, "more than fit into memory well", format!("use at most {MOST}"));
        }
        for (key, span) in [
            ("bans.first_wait", bans.first_wait),
            ("bans.flapping_within", bans.flapping_within),
            ("bans.flapping_ban", bans.flapping_ban),
        ] {
            check.positive(key, span, span.0.is_zero());
        }
        if bans.longest_wait < bans.first_wait {
            check.fail(
                "bans.longest_wait",
                bans.longest_wait,
                format!("less than bans.first_wait ({})", bans.first_wait),
                "make it larger, or first_wait smaller",
            );
        }
    }
}
