//! A cluster as an operator sees it, read from the ledger.

use std::{sync::Arc, time::Duration};

use cluster::{EndedEpoch, View, ViewError, change, read_view};
use ledger::Ledger;

use crate::{HOME, NodeError, about::About, clock::MachineClock, order};

/// Time between two looks at the beats: whoever has not moved in it is silent.
const LOOK: Duration = Duration::from_millis(2500);

/// A node of a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeStatus {
    /// Its name.
    pub name: String,
    /// Address under which backends reach it; empty if it has not said.
    pub address: String,
    /// The node gave a sign of life lately.
    pub is_alive: bool,
    /// The node has the home, or its copy is near the end of the ledger.
    pub is_warm: bool,
}

/// A cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterStatus {
    /// Node that has the home; empty if none has.
    pub owner: String,
    /// Epoch of the home.
    pub epoch: u64,
    /// Epochs that have ended and are still needed.
    pub chain: Vec<EndedEpoch>,
    /// Nodes that were ever there.
    pub nodes: Vec<NodeStatus>,
}

/// Reads it. Takes some seconds.
///
/// # Errors
/// The view cannot be used, or the ledger does not answer.
pub async fn status(ledger: &Arc<dyn Ledger>) -> Result<ClusterStatus, NodeError> {
    let read = async || ledger.beats().await.map_err(|unknown| NodeError::Unanswered(unknown.0));
    let before = read().await?;
    tokio::time::sleep(LOOK).await;
    let after = read().await?;
    let (_, view) = read_view(&**ledger, &MachineClock).await?;
    let of = view.home(HOME)?;
    let nodes = after.iter().filter(|beat| order::is_node(beat)).map(|beat| {
        let About { address, warm, .. } = About::of(beat);
        let is_alive = !before.contains(beat);
        NodeStatus { name: beat.node.to_string(), address, is_alive, is_warm: warm }
    });
    Ok(ClusterStatus {
        owner: of.owner.as_ref().map_or_else(String::new, |owner| owner.node.to_string()),
        epoch: of.epoch,
        chain: of.chain.clone(),
        nodes: nodes.collect(),
    })
}

/// Gives up what comes in an ended epoch from a record on, all streams but that one as they are: the next takeover goes on before it.
///
/// # Errors
/// The epoch is not in the chain, or the ledger does not answer.
pub async fn accept_loss(
    ledger: &Arc<dyn Ledger>,
    home: u16,
    stream: u8,
    epoch: u64,
    n: u64,
) -> Result<(), NodeError> {
    change(&**ledger, &MachineClock, |view: &View| -> Result<Option<View>, ViewError> {
        let next = view.accept_loss(home, stream, epoch, n)?;
        Ok((next != *view).then_some(next))
    })
    .await?;
    Ok(())
}
