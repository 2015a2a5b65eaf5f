//! A home that is this node's.

use std::{sync::Arc, time::Duration};

use cluster::{Lease, MemberNode, Tenure};
use disk::{ShippedFiles, ShippedStore};
use ledger::Shipping;
use parking_lot::Mutex;
use store::DataDir;
use tokio::{
    runtime::Handle,
    sync::{oneshot, watch},
};

use crate::{
    node::{AbortOnDrop, Looks},
    redo::RedoMemory,
    shipping::{StreamShipping, StreamTasks},
    status::NodeStatus,
    widen::widen,
};

/// The home's streams, for its stores.
#[derive(Clone)]
pub struct HomeStreams {
    streams: Vec<Arc<StreamShipping>>,
    redo: Arc<RedoMemory>,
}

impl HomeStreams {
    /// The stream of a store.
    pub fn of(&self, store: ShippedStore) -> Arc<dyn Shipping> {
        Arc::clone(&self.streams[store as usize]) as _
    }

    /// Memory of the records that are on their way.
    pub fn redo(&self) -> &Arc<RedoMemory> {
        &self.redo
    }
}

/// Figures of a home and its ledger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LedgerFigures {
    /// Name of this node, which has the home.
    pub node: Arc<str>,
    /// Epoch of the home.
    pub epoch: u64,
    /// All nodes, this one too, as of the last look at their beats; 64 at most.
    pub nodes: Vec<NodeStatus>,
    /// Appends under way.
    pub under_way: usize,
    /// Age of the oldest of them.
    pub oldest: Duration,
    /// Records appended.
    pub records: u64,
    /// Bytes of their changes.
    pub bytes: u64,
    /// Calls that were made again, those for all homes of the process among them.
    pub repeats: u64,
    /// Bytes in memory of records that are on their way.
    pub redo: usize,
    /// Bytes in the ledger, about, by store.
    pub stored: [(ShippedStore, u64); ShippedStore::ALL.len()],
}

/// Why a home is not this node's for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HomeEnd {
    /// The home belongs to another process.
    Lost,
    /// The home is to be handed over.
    Ordered,
}

/// The end of a home in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HomeEnded {
    /// The home was handed over, or could not be.
    HandedOver,
}

/// A home in its time with this process as the owner, until it is lost or handed over. One that is dropped is given up as if the process
/// had died. Afterwards the [`crate::ClusterNode`] follows the home again, once all stores of the directory are closed.
pub struct OwnedHome {
    directory: Arc<DataDir>,
    tenure: Tenure,
    streams: HomeStreams,
    tasks: Vec<StreamTasks>,
    /// End with it.
    _running: [Option<AbortOnDrop>; 2],
    _beating: Arc<AbortOnDrop>,
    stop: watch::Sender<bool>,
    runtime: Handle,
    looks: Looks,
    nodes: Arc<Mutex<Vec<NodeStatus>>>,
    silent_for: Option<Duration>,
    /// Until it is handed over.
    ended: Option<oneshot::Sender<HomeEnded>>,
}

impl Drop for OwnedHome {
    fn drop(&mut self) {
        if self.ended.is_some() {
            self.tenure.abandon();
        }
    }
}

impl OwnedHome {
    /// Starts what a tenure needs; the other value tells how the home ended, and nothing if it was dropped. Called in the cluster's
    /// runtime.
    pub(crate) fn start(
        directory: Arc<DataDir>,
        member: &Arc<MemberNode>,
        tenure: Tenure,
        silent_for: Option<Duration>,
        (looks, nodes): (Looks, Arc<Mutex<Vec<NodeStatus>>>),
        beating: Arc<AbortOnDrop>,
    ) -> (Self, oneshot::Receiver<HomeEnded>) {
        let (stop, stopped) = watch::channel(false);
        let redo = Arc::<RedoMemory>::default();
        let writers = tenure.writers().into_iter();
        let (streams, tasks): (Vec<_>, Vec<_>) =
            writers.map(|writer| StreamShipping::start(writer, &tenure, &redo, stopped.clone())).unzip();
        let run = tenure.clone();
        let running = AbortOnDrop(tokio::spawn(async move { run.run().await }).abort_handle());
        let widening = tenure.is_narrow().then(|| {
            let (ledger, tenure) = (Arc::clone(member.ledger()), tenure.clone());
            AbortOnDrop(tokio::spawn(async move { widen(&*ledger, &tenure).await }).abort_handle())
        });
        let files = Arc::clone(&streams[ShippedStore::Files as usize]);
        directory.ship_files(Arc::new(ShippedFiles::open(directory.path(), files as _)));
        let streams = HomeStreams { streams, redo };
        let (ended, told) = oneshot::channel();
        let home = Self {
            directory,
            tenure,
            streams,
            tasks,
            _running: [Some(running), widening],
            _beating: beating,
            stop,
            runtime: Handle::current(),
            looks,
            nodes,
            silent_for,
            ended: Some(ended),
        };
        (home, told)
    }

    /// Its number.
    pub fn number(&self) -> u16 {
        self.tenure.owner().home
    }

    /// The directory, as of the end of the epoch before.
    pub fn directory(&self) -> &Arc<DataDir> {
        &self.directory
    }

    /// Reads figures of it, now and for as long as the process lives.
    pub fn figures(&self) -> impl Fn() -> LedgerFigures + Send + Sync + use<> {
        let (tenure, streams, nodes) = (self.tenure.clone(), self.streams.clone(), Arc::clone(&self.nodes));
        move || {
            let cluster::Figures { under_way, oldest, records, bytes, repeats, .. } = tenure.figures();
            let stored =
                ShippedStore::ALL.map(|store| (store, streams.streams[store as usize].ledger_bytes()));
            let owner = tenure.owner();
            LedgerFigures {
                node: Arc::clone(&owner.node),
                epoch: owner.epoch,
                nodes: nodes.lock().clone(),
                under_way,
                oldest: oldest.unwrap_or_default(),
                records,
                bytes,
                repeats,
                redo: streams.redo.held(),
                stored,
            }
        }
    }

    /// Time from the last sign of life of the owner before that this process saw to the beginning of this tenure, on a clock that no other
    /// machine can be ahead of; `None` if it saw none.
    pub fn silent_for(&self) -> Option<Duration> {
        self.silent_for
    }

    /// Streams for the stores of the directory.
    pub fn streams(&self) -> &HomeStreams {
        &self.streams
    }

    /// Until when this process may acknowledge.
    pub fn lease(&self) -> &Arc<Lease> {
        self.tenure.lease()
    }

    /// The time of this owner.
    pub fn tenure(&self) -> &Tenure {
        &self.tenure
    }

    /// Waits until the home is to be another node's, by an operator's order or since that has fewer, or until it is lost. The first
    /// means that it is to be handed over. Cancel safe.
    pub async fn ends(&self) -> HomeEnd {
        tokio::select! {
            () = self.tenure.lost() => HomeEnd::Lost,
            () = self.ordered_away() => HomeEnd::Ordered,
        }
    }

    async fn ordered_away(&self) {
        let (owner, mut looks) = (self.tenure.owner(), self.looks.clone());
        loop {
            let order =
                looks.borrow_and_update().as_ref().and_then(|seen| seen.look.order(owner.home).cloned());
            if order.is_some_and(|order| order.epoch == owner.epoch && order.to != owner.node) {
                return;
            }
            if looks.changed().await.is_err() {
                // The node takes no part any more, and nobody is told of orders.
                return std::future::pending().await;
            }
        }
    }

    /// Hands the home over: its stores are closed, and write nothing any more. Whoever stands by takes it at once, this node only if
    /// there is no other for a while. Returns why not, if the next owner has to take it as after a crash.
    ///
    /// Cancel safety: if dropped, the home is handed over nevertheless, as soon as the ledger answers.
    pub async fn hand_over(mut self) -> Result<(), String> {
        let _ = self.stop.send(true);
        let (tenure, tasks, ended) =
            (self.tenure.clone(), std::mem::take(&mut self.tasks), self.ended.take());
        let beating = Arc::clone(&self._beating);
        let released = self.runtime.spawn(async move {
            let mut writers = Vec::new();
            for tasks in tasks {
                writers.extend(tasks.end().await);
            }
            let released = tenure.release(writers).await.map_err(|error| error.to_string());
            drop(beating);
            // The node may be gone.
            let _ = ended.map(|ended| ended.send(HomeEnded::HandedOver));
            released
        });
        released.await.unwrap_or_else(|error| Err(error.to_string()))
    }
}
