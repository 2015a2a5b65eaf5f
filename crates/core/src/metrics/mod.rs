//! Metrics: the counters of crates, durations in buckets, and the rows that `/metrics` shows.

mod counters;
pub mod figures;
mod histogram;
mod row;

pub use counters::{Counter, CounterSets, CounterTable, counter_rows};
pub use histogram::Histogram;
pub use row::{Family, Figure, MetricKind, MetricRow};
