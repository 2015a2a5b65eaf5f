//! Bytes of records in the data directory, which LMDB and the log of consumer groups have in common.

pub mod fields;
pub mod message;
