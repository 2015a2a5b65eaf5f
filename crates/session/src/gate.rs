//! Who decides, message by message, whether the session's client may have it, where somebody does.

use std::fmt::Debug;

/// What is granted beyond the rules is looked at for each new topic, so it is limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooManyGranted;

/// Asked under the session's lock, so it must be quick and must not block.
pub trait Gate: Debug + Send + Sync {
    /// Whether a message on this topic may be delivered now. Asked when a message comes, when one that has waited is
    /// sent, and when one is sent again.
    fn admits(&mut self, topic: &str) -> bool;

    /// A subscription is allowed of which it could not know: its messages are admitted, unless something speaks against one.
    /// Returns whether that is new.
    ///
    /// # Errors
    /// It can hold no more of these; nothing has changed.
    fn grant(&mut self, _filter: &str) -> Result<bool, TooManyGranted> {
        Ok(false)
    }

    /// What was granted to this filter ends.
    fn withdraw(&mut self, _filter: &str) {}

    /// Takes over what was granted, for all questions from now on.
    fn take_granted(&mut self) -> Vec<Box<str>> {
        Vec::new()
    }
}
