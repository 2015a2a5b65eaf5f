//! What peers make the process hold: the account of it, and who gives some back while it is short.

mod account;
mod shed;

pub use account::{Account, Charge, MemoryKind};
