//! Time, given by the process.

use std::time::Duration;

use ledger::BoxFuture;

/// Clocks of this machine.
pub trait Clock: Send + Sync {
    /// Time since any moment, on a clock that never goes back and goes on while the machine is suspended.
    fn now(&self) -> Duration;

    /// Microseconds since 1970, for people and for the time of a home; no decision is made by it.
    fn wall(&self) -> u64;

    /// Ends after a time on the clock of [`Self::now`].
    fn sleep(&self, time: Duration) -> BoxFuture<'_, ()>;
}
