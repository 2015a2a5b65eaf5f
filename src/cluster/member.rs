//! Stands by, then serves.

use std::{
    collections::BTreeMap,
    hash::{BuildHasher as _, RandomState},
    io,
    os::unix::process::CommandExt as _,
    pin::pin,
    process::Command,
    sync::{Arc, Weak},
    time::Duration,
};

use cluster::Clock as _;
use cluster_node::{
    ClusterNode, HomeDirectories, HomeEnd, MOVE_EVERY, MachineClock, NodeError, NodeSettings, NodeState,
    OwnedHome,
};
use config::Config;
use disk::ShippedStore;
use gateway_core::metrics::{MetricRow, figures};
use store::{DataDir, StoreError, Verify};
use thiserror::Error;
use tokio::{
    sync::{mpsc, watch},
    task::{JoinHandle, JoinSet},
    time::{Instant, sleep, timeout},
};
use tracing::{error, info, warn};

use super::{EngineError, LedgerEngine, links};
use crate::gateway::{ClusterGateway, ClusterPages, ClusterParts, HomeAddress, HomeLedger, StartError};

/// Time for the compare-and-set of a clean stop; whoever takes over without it waits a few seconds.
const HAND_OVER: Duration = Duration::from_secs(5);

/// Time between two questions for what the engine lacks, while it does not answer.
const FINDINGS: Duration = Duration::from_secs(2);

/// Time between two looks whether the directory of a home that has gone is free, and time after which the process begins anew.
const HELD_LOOK: Duration = Duration::from_millis(10);
const LONGEST_HELD: Duration = Duration::from_secs(3);

/// Why a gateway of a cluster does not start.
#[derive(Debug, Error)]
pub(crate) enum MemberError {
    /// The ledger cannot be opened.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The gateway itself cannot start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The data directory cannot be used.
    #[error(transparent)]
    Directory(#[from] StoreError),
    /// The cluster cannot be joined, or its ledger is damaged.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// The engine lacks what no promise can be kept without.
    #[error("cluster.ledger: {0}")]
    Lacks(String),
    /// Something of a lost home cannot be got rid of, and the process cannot begin anew.
    #[error("begin anew: {0}")]
    BeginAnew(io::Error),
    /// A task has panicked.
    #[error("the cluster's task has ended")]
    Ended,
}

impl MemberError {
    /// The exit of the process: 3 for a ledger that an operator has to look at.
    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Node(NodeError::Damaged(_)) => 3,
            Self::Engine(_) | Self::Start(StartError::Config(_) | StartError::Tls { .. }) => 2,
            _ => 1,
        }
    }
}

/// A gateway of a cluster.
pub(crate) struct ClusterMember {
    engine: LedgerEngine,
    pub(crate) gateway: ClusterGateway,
    places: watch::Sender<Vec<HomeAddress>>,
    /// Until it runs.
    node: Option<ClusterNode>,
    state: watch::Receiver<NodeState>,
}

impl ClusterMember {
    /// Opens the ledger and the doors. In a Tokio runtime.
    pub(crate) fn start(config: Config) -> Result<Self, MemberError> {
        let engine = LedgerEngine::open(&config)?;
        let verify = Verify { always: config.store.verify, limit: config.store.verify_limit.0 };
        let directories = HomeDirectories::open(&config.data_dir, verify)?;
        let settings = node_settings(&config);
        info!(cluster = settings.cluster, node = settings.name, "standing by");
        let (node, state) = ClusterNode::new(Arc::clone(&engine.ledger), settings, directories);
        let (places, known) = watch::channel(Vec::new());
        let (shown, read) = (state.clone(), state.clone());
        let parts = ClusterParts {
            node: node_name(&config),
            places: known,
            members: links::members(&engine),
            pages: ClusterPages {
                state: Arc::new(move || shown.borrow().line()),
                rows: Arc::new(move || standby_rows(&read.borrow())),
            },
        };
        let gateway = ClusterGateway::start(config, parts)?;
        Ok(Self { engine, gateway, places, node: Some(node), state })
    }

    /// Stands by and serves homes, as they come and go, until `ended`. Once; not cancel safe.
    pub(crate) async fn run(&mut self, ended: impl Future<Output = ()>) -> Result<(), MemberError> {
        let mut ended = pin!(ended);
        let lacks = self.engine.handle().spawn(look_for_lacks(Arc::clone(&self.engine.ledger)));
        let mut lacks = pin!(lacks_fatally(lacks));
        let (sender, mut homes) = mpsc::channel(1);
        let node = self.node.take().ok_or(MemberError::Ended)?;
        let mut running = EndWithOwner(self.engine.handle().spawn(node.run(sender)));
        let mut serving: BTreeMap<u16, Arc<OwnedHome>> = BTreeMap::new();
        let (mut ends, mut state) = (JoinSet::new(), self.state.clone());
        loop {
            tokio::select! {
                () = &mut ended => break,
                lacks = &mut lacks => return Err(MemberError::Lacks(lacks)),
                node = &mut running.0 => {
                    node.map_err(|_| MemberError::Ended)??;
                    return Err(MemberError::Ended);
                }
                Ok(()) = state.changed() => {
                    let state = state.borrow_and_update().clone();
                    info!(state = state.line(), "cluster");
                    self.tell(&state);
                }
                Some(home) = homes.recv() => {
                    self.tell(&state.borrow().clone());
                    self.gateway.open_home(home.number(), Some(home_ledger(&home))).await?;
                    let home = Arc::new(home);
                    serving.insert(home.number(), Arc::clone(&home));
                    ends.spawn(async move { (home.number(), home.ends().await) });
                }
                Some(Ok((number, end))) = ends.join_next() => {
                    if end == HomeEnd::Lost {
                        error!(
                            home = number,
                            "the home belongs to another gateway: connections end, and this one stands by"
                        );
                        // A process that stood still or was cut off has lost all its homes, or is about to. The CONNECTs that lie in its
                        // backlogs are of clients that have gone elsewhere: they end with its sockets.
                        return Err(MemberError::BeginAnew(begin_anew()));
                    }
                    let Some(home) = serving.remove(&number).and_then(Arc::into_inner) else { continue };
                    let directory = Arc::downgrade(home.directory());
                    self.hand_over(home).await;
                    if !is_free(&directory).await {
                        warn!(home = number, "something of the home is still here: the process begins anew");
                        return Err(MemberError::BeginAnew(begin_anew()));
                    }
                }
            }
        }
        // Takes nothing back.
        drop(running);
        if serving.is_empty() {
            info!("stopped while standing by");
            return Ok(());
        }
        self.gateway.begin_end();
        ends.shutdown().await;
        for home in serving.into_values().filter_map(Arc::into_inner) {
            self.hand_over(home).await;
        }
        Ok(())
    }

    /// Tells the doors where the homes are, as they were seen last.
    fn tell(&self, state: &NodeState) {
        let place = |home: &cluster_node::HomePlace| {
            let cluster_node::HomePlace { node, address, link, .. } = home.clone();
            HomeAddress { node, address, link }
        };
        if !state.homes.is_empty() {
            self.places.send_replace(state.homes.iter().map(place).collect());
        }
    }

    /// Lets the home go, and the next gateway take it at once.
    async fn hand_over(&mut self, home: OwnedHome) {
        let released = self.gateway.release_home(home.number()).await;
        match timeout(HAND_OVER, home.hand_over()).await {
            Ok(Ok(())) => info!("the home is handed over"),
            Ok(Err(error)) => {
                warn!(error, "the home is not handed over, the next gateway takes it as after a crash")
            }
            Err(_) => warn!("the ledger does not answer, the next gateway takes the home as after a crash"),
        }
        // Devices find the connection closed once the other gateway may serve, and no sooner.
        if let Some(released) = released {
            released.end().await;
        }
    }
}

/// Waits until nothing of a home is left in this process that holds its directory; false if something is, after a while.
async fn is_free(directory: &Weak<DataDir>) -> bool {
    let begun = Instant::now();
    while directory.strong_count() > 0 {
        if begun.elapsed() > LONGEST_HELD {
            return false;
        }
        sleep(HELD_LOOK).await;
    }
    true
}

/// Begins anew with the same arguments: whatever is here ends, unanswered, as after a kill. Returns only if that cannot be, and why.
fn begin_anew() -> io::Error {
    match std::env::current_exe() {
        Ok(program) => Command::new(program).args(std::env::args_os().skip(1)).exec(),
        Err(error) => error,
    }
}

/// Ends a task with its owner.
struct EndWithOwner<T>(JoinHandle<T>);

impl<T> Drop for EndWithOwner<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn node_settings(config: &Config) -> NodeSettings {
    let cluster = &config.cluster;
    NodeSettings {
        cluster: cluster.name.clone(),
        name: node_name(config),
        address: cluster.address.clone(),
        link: if cluster.links.is_on() { cluster.links.told_address() } else { String::new() },
        takes_over: cluster.standby,
        incarnation: RandomState::new().hash_one(std::process::id()),
        move_every: MOVE_EVERY,
    }
}

/// A home for the gateway to open.
fn home_ledger(home: &OwnedHome) -> HomeLedger {
    let streams = home.streams();
    HomeLedger {
        directory: Arc::clone(home.directory()),
        state: streams.of(ShippedStore::State),
        records: streams.of(ShippedStore::Records),
        log: streams.of(ShippedStore::Log),
        latest: streams.of(ShippedStore::Latest),
        lease: {
            let lease = Arc::clone(home.lease());
            Arc::new(move || lease.held(MachineClock.now()))
        },
        redo: Arc::clone(streams.redo()),
        silent_for: home.silent_for(),
        figures: Arc::new(home.figures()),
    }
}

/// Rows of `/metrics` while the gateway stands by.
fn standby_rows(state: &NodeState) -> Vec<MetricRow> {
    vec![figures::CLUSTER_ACTIVE.is(0.0), figures::CLUSTER_WARM.is(u8::from(state.warm).into())]
}

/// The name of this node.
fn node_name(config: &Config) -> String {
    if !config.cluster.node.is_empty() {
        return config.cluster.node.clone();
    }
    let name = rustix::system::uname();
    name.nodename().to_string_lossy().into_owned()
}

/// Warns of what the engine lacks, as soon as it answers; returns what it cannot be without.
async fn look_for_lacks(ledger: Arc<dyn ledger::Ledger>) -> Option<String> {
    loop {
        match ledger.findings().await {
            Ok(findings) => {
                for finding in findings.iter().filter(|finding| !finding.is_fatal) {
                    warn!("cluster.ledger: {}", finding.text);
                }
                return findings.into_iter().find(|finding| finding.is_fatal).map(|finding| finding.text);
            }
            Err(_) => sleep(FINDINGS).await,
        }
    }
}

/// Waits for something that the engine cannot be without; for ever if it lacks nothing of the kind.
async fn lacks_fatally(looking: JoinHandle<Option<String>>) -> String {
    match looking.await {
        Ok(Some(lacks)) => lacks,
        _ => std::future::pending().await,
    }
}
