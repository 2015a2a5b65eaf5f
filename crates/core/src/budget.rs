//! Memory for messages that wait, as their holders see it.

/// The process-wide memory budget for waiting messages.
pub trait Budget {
    /// Charges `bytes` to a session that has `held` already; false, and nothing is charged, if that is more than it may
    /// have now.
    fn charge(&self, held: usize, bytes: usize) -> bool;
    /// Charges `bytes` even beyond the budget: for what is bounded in another way and must not fail.
    fn force(&self, bytes: usize);
    /// Gives `bytes` back.
    fn release(&self, bytes: usize);
}
