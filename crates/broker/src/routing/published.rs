//! Results of publishing.

use gateway_core::{DropReason, Outcome};

/// Result of [`crate::Broker::publish`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Published {
    /// Subscribers matched: sessions, and streams that want the message.
    pub matched: u32,
    /// Of those that took it now.
    pub sent: u32,
    /// Of those that queued it for an offline session.
    pub queued: u32,
    /// Of those that dropped it.
    pub dropped: u32,
    /// Why the last one dropped it.
    pub reason: Option<DropReason>,
    /// Refused as a whole before any target had it (0x97).
    pub refused: Option<Shortage>,
}

/// Why a message is refused as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shortage {
    /// The memory budget is used up.
    Memory,
    /// The store accepts nothing more, or nothing more of this publisher, and a persistent session or a consumer group would
    /// have to store it.
    Store,
}

/// Treatment of a message whose device, in [`crate::Broker::publish_to_device`], has no connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offline {
    /// Wait in its session.
    Queue,
    /// Report it.
    Fail,
    /// Drop quietly.
    Drop,
}

/// Result of [`crate::Broker::publish_to_device`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DirectOutcome {
    /// As [`Outcome`].
    Done(Outcome),
    /// No session of that client id.
    UnknownDevice,
    /// Refused before it was offered.
    Refused(Shortage),
    /// Offline, and the policy is `Fail`.
    DeviceOffline,
}

impl Published {
    pub(super) fn add(&mut self, outcome: Outcome) {
        self.matched += u32::from(outcome != Outcome::Ignored);
        match outcome {
            Outcome::Ignored => {}
            Outcome::Sent => self.sent += 1,
            Outcome::Queued => self.queued += 1,
            Outcome::Dropped(reason) => {
                self.dropped += 1;
                self.reason = Some(reason);
            }
        }
    }
}
