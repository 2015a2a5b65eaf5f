//! Memory for messages that wait, as those who hold them see it.

/// The process-wide memory budget for waiting messages.
pub trait Budget {
    /// Takes `bytes` for a session that has `held`; false if that is more than it may have now.
    fn charge(&self, held: usize, bytes: usize) -> bool;
    /// Takes `bytes`, beyond the budget if need be: for what is bounded otherwise and must go on.
    fn force(&self, bytes: usize);
    /// Gives `bytes` back.
    fn release(&self, bytes: usize);
}
