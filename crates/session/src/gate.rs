//! The gate of a session, if it has one: decides about each message whether the client may have it.

use std::fmt::Debug;

/// The session has no room for more grants: each is looked at for each new topic, so their number is limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooManyGranted;

/// Asked under the session's lock, so it must be quick and must not block.
pub trait Gate: Debug + Send + Sync {
    /// Returns whether a message on this topic may be delivered now. Called when a message comes, when a waiting one is
    /// sent, and when one is sent again.
    fn admits(&mut self, topic: &str) -> bool;

    /// Grants a subscription of which the gate could not know: its messages are admitted, unless something speaks against
    /// one. Returns whether the grant is new.
    ///
    /// # Errors
    /// The gate has no room for more grants; nothing has changed.
    fn grant(&mut self, _filter: &str) -> Result<bool, TooManyGranted> {
        Ok(false)
    }

    /// Ends the grant of this filter.
    fn withdraw(&mut self, _filter: &str) {}

    /// Gives up all grants and returns their filters, for the gate that follows.
    fn take_granted(&mut self) -> Vec<Box<str>> {
        Vec::new()
    }
}
