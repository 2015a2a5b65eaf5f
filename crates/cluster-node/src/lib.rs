//! A gateway of a cluster: it stands by with a warm copy of a home, takes the home over, and ships what the home writes.
//!
//! ```text
//! standby    until the home is this node's: beats, suspicion, the copy, the takeover
//! owned      a home that is this node's: its streams for the stores, its end
//! shipping   a store's writer thread waits for the ledger
//! copy       the data directory as the protocol knows it
//! about      what a node tells of itself; process: whether it has ended; members: the names of all nodes
//! order      an operator wants the home elsewhere; status: what one sees of a cluster
//! import     a directory that was used alone becomes the home of a new cluster
//! widen      a cluster of an earlier version gets the streams that this one has more
//! clock      the machine's clocks
//! ```
//!
//! The order of the calls is the crate `cluster`'s; the ledger is whichever engine the caller has opened. Everything here runs on a
//! runtime of its own: a store's writer may wait for it in any thread.

mod about;
mod clock;
mod copy;
mod import;
#[cfg(test)]
mod latest_tests;
mod members;
mod order;
mod owned;
mod process;
mod redo;
mod shipping;
mod standby;
mod status;
#[cfg(test)]
mod tests;
mod widen;

pub use clock::MachineClock;
pub use import::{ImportError, create};
pub use members::NodeNames;
pub use order::order_takeover;
pub use owned::{HomeEnd, HomeStreams, LedgerFigures, OwnedHome};
pub use redo::RedoMemory;
pub use standby::{NodeError, NodeSettings, NodeState, Phase, StandbyNode, leave_cluster};
pub use status::{ClusterStatus, NodeStatus, StreamStatus, accept_loss, status};

/// The one home of this version's clusters.
pub const HOME: u16 = 0;

/// Streams of a home.
pub const STREAMS: u8 = disk::ShippedStore::ALL.len() as u8;
