//! Memory that peers make the process hold: the account that bounds it, and shedding while memory is short.

mod account;
mod shed;

pub use account::{Account, Charge, MemoryKind};
