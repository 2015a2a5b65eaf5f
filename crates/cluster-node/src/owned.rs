//! A home that is this node's.

use std::{sync::Arc, time::Duration};

use cluster::{Clock as _, Lease, SUSPECTED_AFTER, Suspicion, Tenure};
use disk::{ShippedFiles, ShippedStore};
use ledger::{Beat, Ledger, Shipping};
use parking_lot::Mutex;
use store::DataDir;
use tokio::{
    runtime::Handle,
    sync::watch,
    task::{AbortHandle, JoinHandle},
};

use crate::{
    clock::MachineClock,
    order::ordered_away,
    redo::RedoMemory,
    shipping::{StreamShipping, StreamTasks},
    status::{NodeStatus, nodes},
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
    /// All nodes, this one too, as of the last look at their beats; 64 at most. None before [`OwnedHome::ends`] has waited for a second.
    pub nodes: Vec<NodeStatus>,
    /// Appends under way.
    pub under_way: usize,
    /// Age of the oldest of them.
    pub oldest: Duration,
    /// Records appended.
    pub records: u64,
    /// Bytes of their changes.
    pub bytes: u64,
    /// Calls that were made again.
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

struct AbortOnDrop(AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A home in its time with this process as the owner, until it is lost or handed over.
pub struct OwnedHome {
    directory: Arc<DataDir>,
    ledger: Arc<dyn Ledger>,
    tenure: Tenure,
    streams: HomeStreams,
    tasks: Vec<StreamTasks>,
    running: JoinHandle<()>,
    /// Ends with it.
    _widening: Option<AbortOnDrop>,
    stop: watch::Sender<bool>,
    runtime: Handle,
    /// As they were seen last.
    nodes: Arc<Mutex<Vec<NodeStatus>>>,
    silent_for: Option<Duration>,
}

impl OwnedHome {
    /// Starts what a tenure needs. Called in the cluster's runtime.
    pub(crate) fn start(
        directory: Arc<DataDir>,
        ledger: Arc<dyn Ledger>,
        tenure: Tenure,
        silent_for: Option<Duration>,
    ) -> Self {
        let (stop, stopped) = watch::channel(false);
        let redo = Arc::<RedoMemory>::default();
        let writers = tenure.writers().into_iter();
        let (streams, tasks): (Vec<_>, Vec<_>) =
            writers.map(|writer| StreamShipping::start(writer, &tenure, &redo, stopped.clone())).unzip();
        let run = tenure.clone();
        let running = tokio::spawn(async move { run.run().await });
        let widening = tenure.is_narrow().then(|| {
            let (ledger, tenure) = (Arc::clone(&ledger), tenure.clone());
            AbortOnDrop(tokio::spawn(async move { widen(&*ledger, &tenure).await }).abort_handle())
        });
        let files = Arc::clone(&streams[ShippedStore::Files as usize]);
        directory.ship_files(Arc::new(ShippedFiles::open(directory.path(), files as _)));
        let streams = HomeStreams { streams, redo };
        let (runtime, nodes) = (Handle::current(), Arc::default());
        Self {
            directory,
            ledger,
            tenure,
            streams,
            tasks,
            running,
            _widening: widening,
            stop,
            runtime,
            nodes,
            silent_for,
        }
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

    /// Waits until an operator wants the home to be another node's, or it is lost: the first means that it is to be handed over. Cancel
    /// safe.
    pub async fn ends(&self) -> HomeEnd {
        let (ledger, node) = (Arc::clone(&self.ledger), Arc::clone(&self.tenure.owner().node));
        let epoch = self.tenure.owner().epoch;
        let (shown, mut suspicion) = (Arc::clone(&self.nodes), Suspicion::default());
        let seen = move |beats: &[Beat]| {
            suspicion.observe(beats, MachineClock.now());
            *shown.lock() = nodes(beats, &suspicion, SUSPECTED_AFTER);
        };
        let ordered = self
            .runtime
            .spawn(async move { ordered_away(&*ledger, &MachineClock, &node, epoch, seen).await });
        let _ending = AbortOnDrop(ordered.abort_handle());
        tokio::select! {
            () = self.tenure.lost() => HomeEnd::Lost,
            _ = ordered => HomeEnd::Ordered,
        }
    }

    /// Hands the home over: its stores are closed, and write nothing any more. Whoever stands by takes it at once. Returns why not, if
    /// the next owner has to take it as after a crash.
    pub async fn hand_over(self) -> Result<(), String> {
        let Self { tenure, tasks, running, stop, runtime, .. } = self;
        let _ = stop.send(true);
        let released = runtime.spawn(async move {
            let mut writers = Vec::new();
            for tasks in tasks {
                writers.extend(tasks.end().await);
            }
            tenure.release(writers).await.map_err(|error| error.to_string())
        });
        let released = released.await.unwrap_or_else(|error| Err(error.to_string()));
        running.abort();
        released
    }
}
