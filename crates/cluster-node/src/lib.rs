//! A gateway of a cluster: it keeps warm copies of homes, takes those that fall to it, and ships what they write.
//!
//! ```text
//! node         one beat and one look for all homes; moves
//! home         a home at this node: its copy, the takeover, and again from the beginning when it is gone
//! owned        a home that is this node's: its streams for the stores, its end
//! shipping     a store's writer thread waits for the ledger
//! board        the state of the node, as it is shown and told
//! directories  where the homes are; copy: a directory as the protocol knows it
//! about        what a node tells of itself; process: whether it has ended; members: the names of all nodes
//! order        an operator wants homes elsewhere; status: what one sees of a cluster
//! import       a new cluster, and a directory that was used alone as its home
//! widen        a cluster of an earlier version gets the streams that this one has more
//! clock        the machine's clocks
//! ```
//!
//! The order of the calls is the crate `cluster`'s; the ledger is whichever engine the caller has opened. Everything here runs on a
//! runtime of its own: a store's writer may wait for it in any thread.

mod about;
mod board;
mod clock;
mod copy;
mod directories;
mod home;
#[cfg(test)]
mod homes_tests;
mod import;
#[cfg(test)]
mod latest_tests;
mod members;
mod node;
mod order;
mod owned;
mod process;
mod redo;
mod settings;
mod shipping;
mod status;
#[cfg(test)]
mod tests;
mod widen;

pub use board::{HomePlace, NodeState, Phase};
pub use clock::MachineClock;
pub use cluster::Move;
pub use directories::{HomeDirectories, leave_cluster};
pub use import::{ImportError, create};
pub use members::NodeNames;
pub use node::ClusterNode;
pub use order::{order_takeover, rebalance};
pub use owned::{HomeEnd, HomeStreams, LedgerFigures, OwnedHome};
pub use redo::RedoMemory;
pub use settings::{MOVE_EVERY, NodeError, NodeSettings};
pub use status::{ClusterStatus, NodeStatus, StreamStatus, accept_loss, status};

/// Streams of a home.
pub const STREAMS: u8 = disk::ShippedStore::ALL.len() as u8;
