//! Random input for both halves of a session, against models, in virtual time. Plain functions: stable tests run them on
//! seeded inputs, and the fuzz targets only call them.

mod budgets;
mod inbound;
mod outbound;

#[cfg(test)]
pub(crate) use budgets::{Purse, Unlimited};
pub use inbound::fuzz_inbound;
pub use outbound::fuzz_session;
