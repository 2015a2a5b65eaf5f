//! A home's directory, as the protocol knows it.

use ledger::Position;

/// A directory that holds a home as of a position in the ledger, stream by stream: a cache, never authority. Its calls block.
pub trait HomeCopy: Send {
    /// Number of streams that this version knows. A home whose view has fewer gets the others by [`crate::Tenure::widen`].
    fn streams(&self) -> u8;

    /// The last record that a stream has applied; `None` if none was.
    fn position(&self, stream: u8) -> Option<Position>;

    /// Applies the changes of the record that follows, and its position with them, all or nothing.
    ///
    /// # Errors
    /// Names the failure, for people; the takeover ends with it.
    fn apply(&mut self, stream: u8, position: Position, changes: &[u8]) -> Result<(), String>;

    /// Empties a stream, its position included.
    ///
    /// # Errors
    /// As for [`Self::apply`].
    fn clear(&mut self, stream: u8) -> Result<(), String>;
}
