//! Latest values and history with write-behind: recorded in memory by the shards, written to the store in batches. Which store
//! that is only its opener knows.
//!
//! ```text
//! latest stripe   the newest value of every topic of every device, over the trait `LatestStore`
//! history         every message of some topics, over the trait `HistoryStore`
//! ```
//!
//! The cache of latest values is one type by subject, so its files name each other.

pub mod counters;
mod history;
mod latest;
#[cfg(test)]
mod spill_tests;
mod stripe;
#[cfg(any(test, feature = "test-util"))]
pub mod suite;
#[cfg(test)]
mod tests;

pub use history::{History, HistoryGauges, HistoryOptions, HistoryRule};
pub use latest::{LatestCache, LatestGauges, LatestOptions, ReadWatch, StoreCondition};
