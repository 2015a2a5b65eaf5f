//! Stands by, then serves.

use std::{
    hash::{BuildHasher as _, RandomState},
    pin::pin,
    sync::Arc,
    time::Duration,
};

use cluster::Clock as _;
use cluster_node::{
    HOME, HomeEnd, MachineClock, NodeError, NodeSettings, NodeState, OwnedHome, Phase, StandbyNode,
};
use config::Config;
use disk::ShippedStore;
use gateway_core::metrics::{MetricRow, figures};
use store::{DataDir, StoreError, Verify};
use thiserror::Error;
use tokio::{
    sync::watch,
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tracing::{error, info, warn};

use super::{EngineError, LedgerEngine, links};
use crate::gateway::{ClusterGateway, ClusterPages, ClusterParts, HomeLedger, HomePlace, StartError};

/// Time between two attempts to open a directory that is still held here, and time after which that is an error.
const LOCK_LOOK: Duration = Duration::from_millis(20);
const LONGEST_LOCK: Duration = Duration::from_secs(30);

/// Time for the compare-and-set of a clean stop; whoever takes over without it waits a few seconds.
const HAND_OVER: Duration = Duration::from_secs(5);

/// Time between two questions for what the engine lacks, while it does not answer.
const FINDINGS: Duration = Duration::from_secs(2);

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
    config: Arc<Config>,
    engine: LedgerEngine,
    pub(crate) gateway: ClusterGateway,
    places: watch::Sender<Vec<HomePlace>>,
    state: Arc<watch::Sender<NodeState>>,
    /// The home was just given up: others go first.
    stands_back: bool,
}

impl ClusterMember {
    /// Opens the ledger and the doors. In a Tokio runtime.
    pub(crate) fn start(config: Config) -> Result<Self, MemberError> {
        let engine = LedgerEngine::open(&config)?;
        let (places, known) = watch::channel(Vec::new());
        let state = Arc::new(watch::Sender::new(NodeState::default()));
        let (shown, read) = (Arc::clone(&state), Arc::clone(&state));
        let parts = ClusterParts {
            node: node_name(&config),
            places: known,
            members: links::members(&engine),
            pages: ClusterPages {
                state: Arc::new(move || shown.borrow().line()),
                rows: Arc::new(move || standby_rows(&read.borrow())),
            },
        };
        let gateway = ClusterGateway::start(config.clone(), parts)?;
        Ok(Self { config: Arc::new(config), engine, gateway, places, state, stands_back: false })
    }

    /// Stands by and serves, in turns, until `ended`. Not cancel safe.
    pub(crate) async fn run(&mut self, ended: impl Future<Output = ()>) -> Result<(), MemberError> {
        let mut ended = pin!(ended);
        let lacks = self.engine.handle().spawn(look_for_lacks(Arc::clone(&self.engine.ledger)));
        let mut lacks = pin!(lacks_fatally(lacks));
        loop {
            let home = tokio::select! {
                () = &mut ended => {
                    info!("stopped while standing by");
                    return Ok(());
                }
                lacks = &mut lacks => return Err(MemberError::Lacks(lacks)),
                home = self.stand_by() => home?,
            };
            let ledger = home_ledger(&home);
            self.gateway.open_home(HOME, Some(ledger)).await?;
            let end = tokio::select! {
                () = &mut ended => None,
                end = home.ends() => Some(end),
            };
            match end {
                Some(HomeEnd::Lost) => {
                    error!(
                        "the home belongs to another gateway: its connections end, and this one stands by"
                    );
                    drop(home);
                    self.gateway.give_up_home(HOME).await;
                }
                None => {
                    self.gateway.begin_end();
                    self.hand_over(home).await;
                    return Ok(());
                }
                Some(HomeEnd::Ordered) => self.hand_over(home).await,
            }
            self.stands_back = end == Some(HomeEnd::Ordered);
        }
    }

    /// Stands by until the home is this gateway's. Cancel safe.
    async fn stand_by(&self) -> Result<OwnedHome, MemberError> {
        let directory = reopen(&self.config).await?;
        let cluster = &self.config.cluster;
        let settings = NodeSettings {
            cluster: cluster.name.clone(),
            name: node_name(&self.config),
            address: cluster.address.clone(),
            link: if cluster.links.is_on() { cluster.links.told_address() } else { String::new() },
            takes_over: cluster.standby,
            stands_back: self.stands_back,
            // Of each time as a standby: no home that was lost is taken for one that is not.
            incarnation: RandomState::new().hash_one(std::process::id()),
        };
        info!(cluster = settings.cluster, node = settings.name, "standing by");
        let (node, mut state) = StandbyNode::new(Arc::clone(&self.engine.ledger), settings, directory);
        let mut running = AbortOnDrop(self.engine.handle().spawn(node.run()));
        loop {
            tokio::select! {
                home = &mut running.0 => {
                    self.tell(&state.borrow());
                    return Ok(home.map_err(|_| MemberError::Ended)??);
                }
                Ok(()) = state.changed() => {
                    let state = state.borrow_and_update().clone();
                    info!(state = state.line(), "cluster");
                    self.tell(&state);
                }
            }
        }
    }

    /// Tells the doors where the home is.
    fn tell(&self, state: &NodeState) {
        let NodeState { active, address, link, .. } = state.clone();
        // While the ledger does not answer, the gateway that served last goes on.
        if state.phase != Phase::Unreachable || self.places.borrow().is_empty() {
            self.places.send_replace(vec![HomePlace { node: active, address, link }]);
        }
        self.state.send_replace(state.clone());
    }

    /// Lets the home go, and the next gateway take it at once.
    async fn hand_over(&mut self, home: OwnedHome) {
        let released = self.gateway.release_home(HOME).await;
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

/// Ends a task with its owner.
struct AbortOnDrop<T>(JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Opens the data directory, which what is left of a home that was here may hold for a moment longer.
async fn reopen(config: &Config) -> Result<Arc<DataDir>, StoreError> {
    let verify = Verify { always: config.store.verify, limit: config.store.verify_limit.0 };
    let begun = Instant::now();
    loop {
        match DataDir::open_with(&config.data_dir, verify) {
            Err(StoreError::Unavailable(_)) if begun.elapsed() < LONGEST_LOCK => sleep(LOCK_LOOK).await,
            opened => return opened,
        }
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
