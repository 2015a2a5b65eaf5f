//! State of the gRPC Publisher that must not be forgotten: keys of answered messages, messages that wait for their time, and
//! commands that devices have.

use std::sync::Arc;

use bytes::Bytes;
use gateway_core::Commit;

use super::{StoreError, StoreHealth};

/// Keeps small records of the Publisher. What is in them is the Publisher's own; the store says whether they are whole.
pub trait PublisherStore: Send + Sync {
    /// Submits changes that are made together or not at all; without blocking. With a `commit` the store ends its part of it
    /// once they are durable, or refuses it: then no value of them is written, and what was to be removed goes some time all
    /// the same. A later change of a key replaces one not yet written, whose part then ends with the later one.
    fn submit(&self, changes: Vec<PublisherChange>, commit: Option<Arc<Commit>>);

    /// Reads a table in order of key; damaged records are counted, reported and left out. For the start: blocks on the disk.
    fn restore(&self, table: PublisherTable, into: &mut dyn FnMut(Bytes, Bytes)) -> Result<(), StoreError>;

    /// Returns whether a new operation should be submitted: commits succeed, or it is time to try again.
    fn accepts(&self) -> bool;

    /// Its health.
    fn health(&self) -> StoreHealth;
}

/// A kind of record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PublisherTable {
    /// Messages that came with a key, and what was answered.
    Answers,
    /// Messages to be published later.
    Scheduled,
    /// Commands to devices.
    Commands,
}

/// One record to be written, or to be removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublisherChange {
    /// Table of the record.
    pub table: PublisherTable,
    /// Key of the record; 1 to 400 bytes.
    pub key: Bytes,
    /// New value of the record; `None` removes it.
    pub value: Option<Bytes>,
}
