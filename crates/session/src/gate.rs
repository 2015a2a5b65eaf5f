//! Who decides, message by message, whether the session's client may have it, where somebody does.

use std::fmt::Debug;

/// Asked under the session's lock, so it must be quick and must not block.
pub trait Gate: Debug + Send + Sync {
    /// Whether a message on this topic may be delivered now.
    fn admits(&mut self, topic: &str) -> bool;

    /// Whether a message on this topic may be delivered that has waited since [`Self::nothing_waits`] or longer.
    fn admits_waiting(&mut self, topic: &str) -> bool;

    /// Nothing waits in the session: all that will wait comes later than this.
    fn nothing_waits(&mut self);
}
