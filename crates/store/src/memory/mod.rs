//! Twins of backends: in memory, and away or slow when a test says so.

#[cfg(any(test, feature = "test-util"))]
mod history;
#[cfg(any(test, feature = "test-util"))]
mod latest;
#[cfg(any(test, feature = "test-util"))]
mod log;
mod no_records;
#[cfg(any(test, feature = "test-util"))]
mod records;
#[cfg(any(test, feature = "test-util"))]
mod state;

#[cfg(any(test, feature = "test-util"))]
pub use self::{
    history::MemoryHistory,
    latest::MemoryLatest,
    log::{MemoryLog, MemoryLogOptions},
    records::MemoryRecords,
    state::{MemoryState, StateContents, StateFaults},
};
pub use no_records::NoRecords;
