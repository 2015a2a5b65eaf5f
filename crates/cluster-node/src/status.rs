//! A cluster as an operator sees it, read from the ledger.

use std::{sync::Arc, time::Duration};

use cluster::{
    Clock, EndedEpoch, HomeView, NodeHomes, Order, SEGMENT, Start, Suspicion, View, ViewError, change,
    read_view,
};
use disk::ShippedStore;
use ledger::{Beat, Ledger, Segment, Stream, Unknown};

use crate::{NodeError, about::About, clock::MachineClock};

/// Time for which the beats are looked at: whoever has not moved in it is silent.
const LOOK: Duration = Duration::from_millis(2500);

/// Time between two looks meanwhile.
const STEP: Duration = Duration::from_millis(250);

/// Most nodes that are told of.
const NODES: usize = 64;

/// A node of a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeStatus {
    /// Its name.
    pub name: String,
    /// Address under which backends reach it; empty if it has not said.
    pub address: String,
    /// Time since its last sign of life, about; `None` if there was none lately.
    pub beaten: Option<Duration>,
    /// The node has each home, or its copy is near the end of the ledger.
    pub is_warm: bool,
    /// Homes that it serves, as it says.
    pub serves: Vec<u16>,
}

/// A store of a home in the ledger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamStatus {
    /// The store.
    pub store: ShippedStore,
    /// Record with which it begins.
    pub start: Start,
    /// Segments from there on.
    pub segments: u64,
}

impl StreamStatus {
    /// Bytes that its segments have if all are full.
    pub fn most_bytes(&self) -> u64 {
        self.segments * SEGMENT as u64
    }
}

/// A cluster, and one of its homes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterStatus {
    /// Node that has the home; empty if none has.
    pub owner: String,
    /// Epoch of the home.
    pub epoch: u64,
    /// Epochs that have ended and are still needed.
    pub chain: Vec<EndedEpoch>,
    /// Content of the home's ledger, by store.
    pub streams: Vec<StreamStatus>,
    /// Nodes that have the homes of the cluster, by number; empty if none has.
    pub owners: Vec<String>,
    /// Nodes that were ever there, in the order of the ledger; 64 at most.
    pub nodes: Vec<NodeStatus>,
}

/// The nodes whose beats these are; whoever has been silent for `silent` has given no sign of life lately.
pub(crate) fn nodes(beats: &[Beat], suspicion: &Suspicion, silent: Duration) -> Vec<NodeStatus> {
    let nodes = beats.iter().filter(|beat| Order::is_node(beat)).take(NODES);
    let status = |beat: &Beat| {
        let About { address, warm, homes: NodeHomes { serves, .. }, .. } = About::of(beat);
        let beaten = suspicion.unchanged(&beat.node).filter(|age| *age < silent);
        let serves = serves.into_iter().map(|(home, _)| home).collect();
        NodeStatus { name: beat.node.to_string(), address, beaten, is_warm: warm, serves }
    };
    nodes.map(status).collect()
}

fn unanswered(unknown: Unknown) -> NodeError {
    NodeError::Unanswered(unknown.0)
}

/// Looks at the beats for some seconds, gives `seen` all of them each time, and returns the last.
pub(crate) async fn watch_beats(
    ledger: &Arc<dyn Ledger>,
    mut seen: impl FnMut(&[Beat]),
) -> Result<Vec<Beat>, NodeError> {
    let begun = MachineClock.now();
    loop {
        let beats = ledger.beats().await.map_err(unanswered)?;
        seen(&beats);
        if MachineClock.now() >= begun + LOOK {
            return Ok(beats);
        }
        MachineClock.sleep(STEP).await;
    }
}

/// Reads it. Takes some seconds.
///
/// # Errors
/// The view cannot be used, the cluster has no such home, or the ledger does not answer.
pub async fn status(ledger: &Arc<dyn Ledger>, home: u16) -> Result<ClusterStatus, NodeError> {
    let mut suspicion = Suspicion::default();
    let beats = watch_beats(ledger, |beats| suspicion.observe(beats, MachineClock.now())).await?;
    let (_, view) = read_view(&**ledger, &MachineClock).await?;
    let of = view.home(home)?;
    let mut streams = Vec::new();
    for store in ShippedStore::ALL {
        let start = of.starts.get(store as usize).copied().unwrap_or_default();
        let stream = Stream { home, number: store as u8 };
        let segments = segments(&**ledger, of, stream, start).await.map_err(unanswered)?;
        streams.push(StreamStatus { store, start, segments });
    }
    let owner = |of: &HomeView| of.owner.as_ref().map_or_else(String::new, |owner| owner.node.clone());
    Ok(ClusterStatus {
        owner: owner(of),
        owners: view.homes.iter().map(owner).collect(),
        epoch: of.epoch,
        chain: of.chain.clone(),
        nodes: nodes(&beats, &suspicion, LOOK),
        streams,
    })
}

/// Number of a stream's segments from its start on.
async fn segments(ledger: &dyn Ledger, of: &HomeView, stream: Stream, start: Start) -> Result<u64, Unknown> {
    let from = |epoch: u64| if epoch == start.epoch { start.segment } else { 0 };
    let mut count = 0;
    for ended in of.chain.iter().filter(|ended| ended.epoch >= start.epoch) {
        let first = from(ended.epoch);
        count += match &ended.sealed {
            Some(ends) => {
                let last = ends.get(usize::from(stream.number)).copied().flatten();
                last.map_or(0, |last| (last.segment + 1).saturating_sub(first))
            }
            None => count_from(ledger, stream, ended.epoch, first).await?,
        };
    }
    if of.owner.is_some() {
        count += count_from(ledger, stream, of.epoch, from(of.epoch)).await?;
    }
    Ok(count.into())
}

/// Number of segments that are there from `first` on: they are numbered without holes, so few are looked at.
async fn count_from(ledger: &dyn Ledger, stream: Stream, epoch: u64, first: u32) -> Result<u32, Unknown> {
    let is_there = async |number: u32| {
        let segment = Segment { stream, epoch, number };
        Ok::<_, Unknown>(!ledger.read(segment, (0, 0), 1).await?.rows.is_empty())
    };
    // `there` of them are there, and not `beyond` of them.
    let (mut there, mut beyond) = (0, 1);
    while is_there(first.saturating_add(beyond - 1)).await? {
        (there, beyond) = (beyond, beyond.saturating_mul(2));
    }
    while beyond - there > 1 {
        let middle = there.midpoint(beyond);
        match is_there(first.saturating_add(middle - 1)).await? {
            true => there = middle,
            false => beyond = middle,
        }
    }
    Ok(there)
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
