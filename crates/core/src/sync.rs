//! Synchronization primitives of the commit protocol. Its models bring a `sync` of their own, which tries every
//! interleaving.

pub(crate) use std::sync::atomic;

pub(crate) use parking_lot::Mutex;
