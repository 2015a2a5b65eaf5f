//! Who decides, message by message, whether the session's client may have it, where somebody does.

use std::fmt::Debug;

/// Asked under the session's lock, so it must be quick and must not block.
pub trait Gate: Debug + Send + Sync {
    /// Whether a message on this topic may be delivered now. Asked when a message comes, when one that has waited is
    /// sent, and when one is sent again.
    fn admits(&mut self, topic: &str) -> bool;
}
