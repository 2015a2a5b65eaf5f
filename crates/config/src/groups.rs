//! `[groups]`: consumer groups, and the log on disk that they read.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{ByteSize, Config, Span, validate::Check};

/// `[groups]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Groups {
    /// Offer them; needs `store.enabled`.
    pub enabled: bool,
    /// Bytes of the log on the disk; what happens beyond it each group says (`when_full`).
    pub max_bytes: ByteSize,
    /// Bytes of the last messages that are kept in memory, so that who keeps up reads no disk.
    pub cache_bytes: ByteSize,
    /// Bytes of messages that may wait for the disk; beyond it messages that groups want are refused.
    pub max_waiting_bytes: ByteSize,
    /// Groups at once.
    pub max_groups: usize,
    /// Time for which a delivered message may stay unacknowledged, in groups that do not say.
    pub ack_deadline: Span,
    /// How long unacknowledged messages are kept, in groups that do not say; 0 is without limit.
    pub retention: Span,
    /// Messages that a member may have unacknowledged at most.
    pub max_outstanding_messages: usize,
    /// Bytes of these.
    pub max_outstanding_bytes: ByteSize,
    /// Dead letters that a group keeps; for one more the oldest goes.
    pub max_dead_letters: usize,
    /// Bytes of these.
    pub max_dead_letter_bytes: ByteSize,
}

impl Default for Groups {
    fn default() -> Self {
        Self {
            enabled: true,
            max_bytes: ByteSize(20 << 30),
            cache_bytes: ByteSize(32 << 20),
            max_waiting_bytes: ByteSize(64 << 20),
            max_groups: 100,
            ack_deadline: Span(Duration::from_secs(30)),
            retention: Span(Duration::from_hours(7 * 24)),
            max_outstanding_messages: 10_000,
            max_outstanding_bytes: ByteSize(64 << 20),
            max_dead_letters: 10_000,
            max_dead_letter_bytes: ByteSize(64 << 20),
        }
    }
}

/// A log is removed a segment at a time: with less than a few of them nothing would be left.
const LEAST_BYTES: u64 = 256 << 20;
/// Each is asked about every message that its topics match.
const MOST_GROUPS: usize = 1_000;
/// The most outstanding messages that the logic of groups takes.
const MOST_OUTSTANDING: usize = 100_000;

impl Config {
    /// Returns whether groups are offered.
    pub fn has_groups(&self) -> bool {
        self.groups.enabled && self.store.enabled
    }

    /// Bytes of memory that are set aside for the log, as its settings and the budget allow: what waits for the disk, and the
    /// last messages.
    pub fn log_memory(&self) -> (ByteSize, ByteSize) {
        let budget = self.limits.budget().0;
        let waiting = self.groups.max_waiting_bytes.0.min(budget / 16);
        let cache = self.groups.cache_bytes.0.min(budget / 16);
        (ByteSize(waiting), ByteSize(cache))
    }

    pub(super) fn check_groups(&self, check: &mut Check) {
        let groups = &self.groups;
        if (groups.max_bytes.0 as u64) < LEAST_BYTES {
            check.fail(
                "groups.max_bytes",
                groups.max_bytes,
                "less than a few segments of the log",
                format!("use at least {}", ByteSize(LEAST_BYTES as usize)),
            );
        }
        for (key, bytes) in [
            ("groups.max_waiting_bytes", groups.max_waiting_bytes),
            ("groups.max_outstanding_bytes", groups.max_outstanding_bytes),
            ("groups.max_dead_letter_bytes", groups.max_dead_letter_bytes),
        ] {
            check.positive(key, bytes, bytes.0 == 0);
        }
        for (key, value, most) in [
            ("groups.max_groups", groups.max_groups, MOST_GROUPS),
            ("groups.max_outstanding_messages", groups.max_outstanding_messages, MOST_OUTSTANDING),
        ] {
            check.positive(key, value, value == 0);
            if value > most {
                check.fail(key, value, "more than works well", format!("use at most {most}"));
            }
        }
        check.positive("groups.max_dead_letters", groups.max_dead_letters, groups.max_dead_letters == 0);
        if !(Duration::from_secs(1)..=Duration::from_hours(1)).contains(&groups.ack_deadline.0) {
            check.fail(
                "groups.ack_deadline",
                groups.ack_deadline,
                "not between 1s and 1h",
                "use 30s unless work takes longer",
            );
        }
    }
}
