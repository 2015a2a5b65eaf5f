//! Suites that the backends of each trait must pass: each runs all of its suite in its own tests.
#![allow(clippy::unwrap_used, clippy::missing_panics_doc, reason = "tests of other crates")]

pub mod history;
pub mod latest;
pub mod log;
pub mod records;
pub mod shadows;
pub mod state;
