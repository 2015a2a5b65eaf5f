//! Settings of a node, and errors with which it cannot go on.

use std::time::Duration;

use cluster::ViewError;
use store::StoreError;
use thiserror::Error;

/// Time between two homes that a node moves to others by itself.
pub const MOVE_EVERY: Duration = Duration::from_secs(10);

/// Settings of a node.
#[derive(Debug, Clone)]
pub struct NodeSettings {
    /// Name of the cluster.
    pub cluster: String,
    /// Its name, which no other node has.
    pub name: String,
    /// Address under which backends reach it.
    pub address: String,
    /// Address under which other gateways reach it; empty without links.
    pub link: String,
    /// The node takes homes over by itself when their owner is gone.
    pub takes_over: bool,
    /// Drawn at the start of the process.
    pub incarnation: u64,
    /// Time between two homes that the node moves to one that has fewer, [`MOVE_EVERY`].
    pub move_every: Duration,
}

/// Why a node cannot go on.
#[derive(Debug, Error)]
pub enum NodeError {
    /// The view cannot be used.
    #[error(transparent)]
    View(#[from] ViewError),
    /// The ledger is damaged: nobody can take the home before the loss is accepted.
    #[error(
        "{0}; mend the ledger, or give up what comes from there on with `mqtt-server cluster accept-loss`"
    )]
    Damaged(String),
    /// A data directory cannot be used.
    #[error(transparent)]
    Directory(#[from] StoreError),
    /// The directory holds a home that was never in a cluster.
    #[error(
        "data directory {0} was used by a gateway alone: make the cluster of it (mqtt-server cluster create), or name another one"
    )]
    OwnContent(String),
    /// The ledger does not answer.
    #[error("the ledger does not answer: {0}")]
    Unanswered(String),
}
