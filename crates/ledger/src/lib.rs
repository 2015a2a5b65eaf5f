//! The ledger of a cluster: a database's copy of everything that a home writes to its directory.
//!
//! A **home** is what one data directory holds. It has a few **streams**, one for each store; what a transaction changes is a
//! **record** of its stream, numbered without holes within an **epoch**, which is the time of one owner. A record is cut into
//! **rows**, each written once and never changed. The **view** is one document, replaced by compare-and-set: owners, epochs, and
//! where each epoch was sealed.
//!
//! [`Ledger`] is that database: it knows homes, streams, epochs and bytes, and nothing of MQTT. The order of the calls is what
//! makes it safe; the crate `cluster` has that. Engines: `cassandra::ledger`, `postgres`, and `twin` in memory.

#[cfg(any(test, feature = "fuzz"))]
mod fuzz;
mod marks;
mod record;
mod shipping;
#[cfg(any(test, feature = "test-util"))]
pub mod suite;
#[cfg(any(test, feature = "test-util"))]
pub mod twin;

use std::{future::Future, pin::Pin, sync::Arc};

use bytes::Bytes;
use thiserror::Error;

#[cfg(any(test, feature = "fuzz"))]
pub use fuzz::fuzz_rows;
pub use marks::{Cleaned, Marks};
pub use record::{
    Assembly, FORMAT, MAX_PARTS, MAX_ROW, Misread, Position, RECORD_BYTES, RecordHead, assemble, cut,
    cut_small, decode, encode,
};
pub use shipping::{Shipped, Shipping};

/// A future that is given out.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A stream of a home.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Stream {
    /// Home, from 0.
    pub home: u16,
    /// Store of that home, from 0.
    pub number: u8,
}

/// Rows that are read and removed together: about 16 MiB of a stream in one epoch, numbered from 0 without holes. A record is in one
/// segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Segment {
    /// Its stream.
    pub stream: Stream,
    /// Epoch in which it is written.
    pub epoch: u64,
    /// Number in that epoch.
    pub number: u32,
}

/// A row: a part of a record. Written once: a repeat has the same bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// Segment of its record.
    pub segment: Segment,
    /// Number of its record in the epoch, from 0.
    pub n: u64,
    /// Number of the part of the record, from 0.
    pub part: u16,
    /// Number of parts of the record, from 1.
    pub parts: u16,
    /// At most [`MAX_ROW`] bytes.
    pub data: Bytes,
}

/// Process that runs a home in an epoch.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Owner {
    /// Home that it runs.
    pub home: u16,
    /// Name of the node.
    pub node: Arc<str>,
    /// Drawn at each start of the node, so that no process is taken for one before it.
    pub incarnation: u64,
    /// Epoch that began with it.
    pub epoch: u64,
}

/// The view as it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredView {
    /// Drawn when the cluster was made, part of the key of its rows: one that is made anew never meets the rows of the old one.
    pub cluster: u128,
    /// One more with each change.
    pub version: u64,
    /// Its bytes; the crate `cluster` reads them.
    pub document: Bytes,
    /// Owner of each home that has one: what [`Ledger::owners`] reads, changed together with the document.
    pub owners: Vec<Owner>,
}

/// Sign of life of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Beat {
    /// Name of the node, the key.
    pub node: Arc<str>,
    /// Its incarnation.
    pub incarnation: u64,
    /// One more with each beat.
    pub number: u64,
    /// More about it, small; the crate `cluster` reads it.
    pub about: Bytes,
}

/// Answer to [`Ledger::insert`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inserted {
    /// All rows are durable. Whether the writer was still the owner must be read with [`Ledger::owners`] afterwards.
    Stored,
    /// All rows are durable, and the writer was the owner when they became so or later, and after the call began.
    Owned,
    /// The writer is not the owner any more. Rows may be there or not; no owner that comes later counts them unless it has sealed
    /// them.
    Fenced,
}

/// Answer to [`Ledger::swap`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Swapped {
    /// The view is the new one.
    Applied,
    /// The view has another version.
    Conflict,
}

/// No answer, or one that tells nothing: the call may have been carried out, may still be, or never will be.
#[derive(Debug, Clone, Error)]
#[error("{0}")]
pub struct Unknown(pub String);

/// A property that the engine lacks, and the remedy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The gateway does not start with it; otherwise it only warns.
    pub is_fatal: bool,
    /// The promise that falls away, and the remedy.
    pub text: String,
}

/// A database that keeps the ledger of one cluster. Calls are repeated by the caller; none is cancelled halfway by being dropped: what
/// was sent may be carried out at any later time.
pub trait Ledger: Send + Sync {
    /// Stores rows of one record of `owner`'s home. The same rows may come again, any number of times.
    ///
    /// # Errors
    /// [`Unknown`]: some rows may be stored. The caller repeats the call with the same rows until it is answered.
    fn insert(&self, owner: &Owner, rows: Arc<[Row]>) -> BoxFuture<'_, Result<Inserted, Unknown>>;

    /// Reads who owns which home, in a read that begins after this call and meets every change that a quorum has. May show a change
    /// that is under way.
    fn owners(&self) -> BoxFuture<'_, Result<Vec<Owner>, Unknown>>;

    /// Reads rows of a segment in the order of their numbers and parts, from `from` (number and part) on, about `bytes` of them; less
    /// than that, and fewer rows than there are, only if [`Rows::more`] says so. Meets every row that a quorum has, and may show others.
    fn read(&self, segment: Segment, from: (u64, u16), bytes: usize) -> BoxFuture<'_, Result<Rows, Unknown>>;

    /// Removes all rows of a segment; a row that arrives late from an earlier insert may stay or come back.
    fn delete(&self, segment: Segment) -> BoxFuture<'_, Result<(), Unknown>>;

    /// Reads the view after every change that has been applied; `None` if the cluster was not created.
    fn view(&self) -> BoxFuture<'_, Result<Option<StoredView>, Unknown>>;

    /// Replaces the view if its version is `new.version - 1`; 0 means that there was none.
    ///
    /// # Errors
    /// [`Unknown`]: it may apply at any later time, until the version has moved.
    fn swap(&self, new: &StoredView) -> BoxFuture<'_, Result<Swapped, Unknown>>;

    /// Stores a node's sign of life over the one before, and then reads the owners as [`Self::owners`] does. An answer is worth a lease
    /// from the time of the call on: an engine that has been cut off from its copies gives none.
    fn beat(&self, beat: &Beat) -> BoxFuture<'_, Result<Vec<Owner>, Unknown>>;

    /// Reads the last sign of life of all nodes.
    fn beats(&self) -> BoxFuture<'_, Result<Vec<Beat>, Unknown>>;

    /// Makes the tables unless they are there. Not by two at once.
    fn create(&self) -> BoxFuture<'_, Result<(), Unknown>>;

    /// Looks at what the engine is and how it is set up.
    fn findings(&self) -> BoxFuture<'_, Result<Vec<Finding>, Unknown>>;
}

/// Rows that were read.
#[derive(Debug, Clone, Default)]
pub struct Rows {
    /// In order of number and part.
    pub rows: Vec<Row>,
    /// The segment may have more after them.
    pub more: bool,
}
