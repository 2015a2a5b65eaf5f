//! Configuration: defaults in code, a TOML file over them, the environment over that, flags over all.
//!
//! A leaf: knows no other module. Immutable after start.

mod limits;
mod units;

pub use limits::{Limits, OverflowPolicy, SharedStrategy};
pub use units::{ByteSize, Span};
