//! What is counted: counters of every thread, durations in buckets, and the rows that `/metrics` shows.

mod counters;
mod histogram;
mod row;

pub use counters::{Counter, Counters, Totals, count, totals};
pub use histogram::Histogram;
pub use row::{Gauge, MetricKind, Row, escape_label};
