//! Between the messages of the API and the gateway's types: pure functions, and the errors of calls with their statuses.

pub mod answers;
pub mod command_state;
pub mod commands;
pub mod consumed;
pub mod convert;
pub mod counters;
pub mod encode;
#[cfg(any(test, feature = "fuzz"))]
mod fuzz;
pub mod groups;
pub mod page;
pub mod status;
pub mod wait;

#[cfg(any(test, feature = "fuzz"))]
pub use fuzz::fuzz_convert;
