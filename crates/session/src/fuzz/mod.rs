//! Random input for both halves of a session, against models, in virtual time. Plain functions: stable tests run them on
//! seeded inputs, and the fuzz targets only call them.

mod inbound;
mod outbound;

pub use inbound::fuzz_inbound;
pub use outbound::fuzz_session;
