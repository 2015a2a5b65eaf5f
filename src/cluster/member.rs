//! Stands by, then serves.

use std::{
    hash::{BuildHasher as _, RandomState},
    os::unix::process::CommandExt as _,
    process::{Command, ExitCode},
    sync::Arc,
    time::Duration,
};

use cluster::Clock as _;
use cluster_node::{HomeEnd, MachineClock, NodeError, NodeSettings, NodeState, OwnedHome, StandbyNode};
use config::Config;
use disk::ShippedStore;
use gateway_core::metrics::{MetricRow, figures};
use store::{DataDir, StoreError, Verify};
use telemetry::{ProcessStats, render, rows};
use thiserror::Error;
use tokio::{sync::watch, task::JoinHandle, time::timeout};
use tracing::{info, warn};

use super::{EngineError, LedgerEngine, links};
use crate::gateway::{Gateway, HomeLedger, Standby, StandbyPages, StartError};

/// Tells the next image of the process that it has just given the home up.
const GIVEN_UP: &str = "GATEWAY_HOME_GIVEN_UP";

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

/// A gateway that stands by.
pub(crate) struct ClusterMember {
    config: Arc<Config>,
    engine: LedgerEngine,
    state: watch::Receiver<NodeState>,
    running: JoinHandle<Result<OwnedHome, NodeError>>,
    lacks: JoinHandle<Option<String>>,
    standby: Standby,
}

/// A gateway that serves.
pub(crate) struct ServingMember {
    /// Over the home.
    pub(crate) gateway: Gateway,
    /// In which it serves.
    pub(crate) home: ServedHome,
}

/// The home of a gateway that serves.
pub(crate) struct ServedHome {
    home: OwnedHome,
    /// Until the end.
    _engine: LedgerEngine,
}

impl ClusterMember {
    /// Joins the cluster, and answers backends and operators. In a Tokio runtime.
    pub(crate) fn start(config: Arc<Config>) -> Result<Self, MemberError> {
        let engine = LedgerEngine::open(&config)?;
        let verify = Verify { always: config.store.verify, limit: config.store.verify_limit.0 };
        let directory = DataDir::open_with(&config.data_dir, verify)?;
        let settings = NodeSettings {
            cluster: config.cluster.name.clone(),
            name: node_name(&config),
            address: config.cluster.address.clone(),
            link: if config.cluster.links.is_on() {
                config.cluster.links.told_address()
            } else {
                String::new()
            },
            takes_over: config.cluster.standby,
            stands_back: std::env::var_os(GIVEN_UP).is_some(),
            incarnation: RandomState::new().hash_one(std::process::id()),
        };
        info!(cluster = settings.cluster, node = settings.name, "standing by");
        let (node, state) = StandbyNode::new(Arc::clone(&engine.ledger), settings, directory);
        let lacks = engine.handle().spawn(look_for_lacks(Arc::clone(&engine.ledger)));
        let (address, shown, read) = (state.clone(), state.clone(), state.clone());
        let link = links::link(&config, &engine, state.clone());
        let standby = Standby::start(
            &config,
            Arc::new(move || address.borrow().address.clone()),
            StandbyPages {
                state: Arc::new(move || shown.borrow().line()),
                metrics: Arc::new(move || render(&standby_rows(&read.borrow()))),
            },
            link,
        )?;
        let running = engine.handle().spawn(node.run());
        Ok(Self { config, engine, state, running, lacks, standby })
    }

    /// Stands by until the home is this gateway's, then starts it. Not cancel safe: to end, drop it.
    pub(crate) async fn serve(self) -> Result<ServingMember, MemberError> {
        let Self { config, engine, mut state, mut running, mut lacks, standby } = self;
        let mut has_looked = false;
        let home = loop {
            tokio::select! {
                home = &mut running => break home.map_err(|_| MemberError::Ended)??,
                lacks = &mut lacks, if !has_looked => {
                    has_looked = true;
                    if let Ok(Some(lacks)) = lacks {
                        return Err(MemberError::Lacks(lacks));
                    }
                }
                Ok(()) = state.changed() => info!(state = state.borrow_and_update().line(), "cluster"),
            }
        };
        let streams = home.streams();
        let ledger = HomeLedger {
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
        };
        let mut builder = Gateway::builder((*config).clone()).home(ledger).members(links::members(&engine));
        for (name, socket) in standby.end().await {
            builder = builder.socket(&name, socket);
        }
        let gateway = builder.start().await?;
        Ok(ServingMember { gateway, home: ServedHome { home, _engine: engine } })
    }
}

impl ServedHome {
    /// Waits until the home is to be, or is, another's. Cancel safe.
    pub(crate) async fn ends(&self) -> HomeEnd {
        self.home.ends().await
    }

    /// Hands the home over, once the gateway has ended.
    pub(crate) async fn hand_over(self) {
        let Self { home, _engine } = self;
        match timeout(HAND_OVER, home.hand_over()).await {
            Ok(Ok(())) => info!("the home is handed over"),
            Ok(Err(error)) => {
                warn!(error, "the home is not handed over, the next gateway takes it as after a crash")
            }
            Err(_) => warn!("the ledger does not answer, the next gateway takes the home as after a crash"),
        }
    }
}

/// Begins anew with the same arguments, as a process that stands by: its connections end, unanswered, and nothing of a home that was
/// lost is left. Returns only if that cannot be.
pub(crate) fn begin_anew(given_up: bool) -> ExitCode {
    let Ok(program) = std::env::current_exe() else { return ExitCode::FAILURE };
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1)).env_remove(GIVEN_UP);
    if given_up {
        command.env(GIVEN_UP, "1");
    }
    let error = command.exec();
    tracing::error!(%error, "cannot begin anew, the process ends");
    ExitCode::FAILURE
}

/// Rows of `/metrics` while the gateway stands by.
fn standby_rows(state: &NodeState) -> Vec<MetricRow> {
    let read = vec![figures::CLUSTER_ACTIVE.is(0.0), figures::CLUSTER_WARM.is(u8::from(state.warm).into())];
    rows(Vec::new(), read, &ProcessStats::read())
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
            Err(_) => tokio::time::sleep(FINDINGS).await,
        }
    }
}
