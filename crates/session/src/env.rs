//! Environment of a call of the outbound half.

use gateway_core::{Budget, Journal, QueueId, Timestamp, limits::Limits};

/// Bounds, clock, budget and disk.
pub struct Env<'a> {
    /// Bounds.
    pub limits: &'a Limits,
    /// Now.
    pub now: Timestamp,
    /// Budget.
    pub budget: &'a dyn Budget,
    /// Destination of the durable state of a persistent session; `None` for other sessions.
    pub disk: Option<Disk<'a>>,
}

/// Destination of the durable state of one session.
#[derive(Clone, Copy)]
pub struct Disk<'a> {
    /// Takes changes of the queue.
    pub journal: &'a dyn Journal,
    /// The session's queue.
    pub queue: QueueId,
}

impl Env<'_> {
    /// Until when a message may wait that has been on disk, or without a connection, since `since`; `None` if for ever.
    pub(crate) fn waits_until(&self, since: Timestamp) -> Option<Timestamp> {
        let age = self.limits.offline_age.millis();
        (age > 0).then(|| since.plus_millis(age))
    }
}
