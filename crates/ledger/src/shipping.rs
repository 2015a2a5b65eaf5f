//! A ledger in which every transaction is stored before it is committed here, and before anybody is told.

use super::{Cleaned, Position};

/// The end of an append.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shipped {
    /// The ledger has the record, at this position, and nobody else owned the home when it did.
    Done(Position),
    /// The changes are too large for a record. Nothing was stored.
    Refused,
    /// The home belongs to another process. Nothing more may be written, and nobody is told anything.
    Lost,
}

/// The ledger's side of one store. Called by one thread at a time.
pub trait Shipping: Send + Sync {
    /// Stores what a transaction changed. Blocks for as long as the ledger has no answer, as a disk that hangs.
    fn ship(&self, changes: &[u8], cleaned: Cleaned) -> Shipped;

    /// Returns how many bytes of the oldest keys are to be repeated for each that changes, while about so many bytes are alive: none
    /// while the ledger has little more.
    fn wanted_repeats(&self, alive: u64) -> usize;

    /// Notes that nothing before the record at this epoch and number is needed any more. Must not block.
    fn begin_at(&self, epoch: u64, n: u64);
}
