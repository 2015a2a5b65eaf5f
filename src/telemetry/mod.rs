//! Logs, counters and the HTTP page that shows them. A leaf.

mod counters;

pub use counters::{Counter, Counters, Totals, count, totals};
