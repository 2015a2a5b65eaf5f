//! Metrics: counters of every thread, durations in buckets, and the rows that `/metrics` shows.

mod counters;
pub mod figures;
mod histogram;
#[cfg(test)]
mod reference;
mod row;

pub use counters::{Counter, Counters, Totals, count, totals};
pub use histogram::Histogram;
pub use row::{Family, Figure, MetricKind, Row};

/// Every family that a gateway can show, counters first.
pub fn families() -> impl Iterator<Item = &'static Family> {
    counters::FAMILIES.iter().chain(figures::FAMILIES.iter().copied())
}
