//! Twins of backends: in memory, and away or slow when a test says so.

#[cfg(any(test, feature = "test-util"))]
mod group_state;
#[cfg(any(test, feature = "test-util"))]
mod history;
#[cfg(any(test, feature = "test-util"))]
mod latest;
#[cfg(any(test, feature = "test-util"))]
mod log;
mod publisher;
#[cfg(any(test, feature = "test-util"))]
mod shadows;
#[cfg(any(test, feature = "test-util"))]
mod state;

#[cfg(any(test, feature = "test-util"))]
pub use self::{
    group_state::MemoryGroupState,
    history::MemoryHistory,
    latest::MemoryLatest,
    log::{MemoryLog, MemoryLogOptions},
    shadows::MemoryShadows,
    state::{MemoryState, StateContents, StateFaults},
};
pub use publisher::MemoryPublisher;
