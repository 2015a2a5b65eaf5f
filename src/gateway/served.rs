//! A home in service: its broker and its services, without a listener.

use std::{sync::Arc, time::Duration};

use ::values::{History, LatestCache};
use auth::{
    EventSender,
    abuse::{AbuseGuard, BanRegistry},
};
use bridges::PlannedBridges;
use broker::{Broker, BrokerConfig, Event, KindBudget, MemoryKind, Turn};
use config::Config;
use disk::EmbeddedLatest;
use edge::reload::Reload;
use gateway_core::clock;
use grpc::{GrpcApi, Hooks, TopicSpread};
use net::NetShared;
use store::{DataDir, Recorder, server_id};
use telemetry::{ReadRows, trace_clients};
use tokio::{
    sync::{broadcast, watch},
    task::JoinSet,
    time::{Instant, timeout},
};
use tracing::{error, warn};

use super::{
    StartError, api, commands,
    common::Common,
    endings::Endings,
    evictions,
    health::StoreWatch,
    home::{self, Home, HomeLedger},
    http::ReadReady,
    metrics::{home_rows, with_process},
    shadows::{self, OpenedShadows},
    stores,
    sys_publisher::SysPublisher,
    ticks::run_ticks,
    values::{self, OpenedValues},
};

/// Time between two looks whether a lease is back for which acknowledgements wait.
const LEASE_LOOK: Duration = Duration::from_millis(20);

/// Time between two looks whether the connections of a home that is given up are gone, and the longest time for that.
const CONNECTION_LOOK: Duration = Duration::from_millis(5);
const LAST_CONNECTION: Duration = Duration::from_secs(2);

/// A home whose stores are open and not yet read.
pub(super) struct OpenedHome {
    config: Arc<Config>,
    planned: PlannedBridges,
    directory: Option<Arc<DataDir>>,
    ledger: Option<HomeLedger>,
    /// The mark of this gateway, for bridges of other gateways.
    mark: String,
    bans: Arc<BanRegistry>,
    home: Arc<Home>,
    kept: KeptValues,
    events: Option<(EventSender, Arc<dyn Reload>)>,
}

/// See the module.
pub(super) struct ServedHome {
    pub(super) broker: Broker,
    pub(super) shared: Arc<NetShared>,
    pub(super) latest: Option<Arc<LatestCache>>,
    pub(super) watch: Arc<StoreWatch>,
    home: Arc<Home>,
    /// Parts that have something to finish.
    endings: Endings,
    tasks: JoinSet<()>,
    /// Read again while they are here.
    _reloads: Vec<Arc<dyn Reload>>,
}

impl OpenedHome {
    /// Opens the data directory of `config`, or the one that comes with a ledger. Blocks on the disk.
    pub(super) fn open(
        common: &Common,
        config: Arc<Config>,
        ledger: Option<HomeLedger>,
    ) -> Result<Self, StartError> {
        let planned = PlannedBridges::open(&config)?;
        let events = EventSender::new(&config.auth.grpc)?.map(|events| {
            let reloads = events.reloads();
            (events, reloads)
        });
        let directory = match &ledger {
            Some(ledger) => Some(Arc::clone(&ledger.directory)),
            None => home::directory(&config)?,
        };
        let mark = directory.as_deref().map(server_id).transpose()?.unwrap_or_default();
        // Before anybody is let in.
        let bans = Arc::new(BanRegistry::open(&config.bans, directory.clone())?);
        let home = Arc::new(Home::open(&config, directory.as_ref(), ledger.as_ref())?);
        let kept =
            KeptValues::open(common, &config, directory.as_ref(), ledger.as_ref(), &planned, &home, &bans)?;
        Ok(Self { config, planned, directory, ledger, mark, bans, home, kept, events })
    }

    /// Brings back what earlier processes left, and starts the services, which end their streams with `drain` and everything else with
    /// `stop`. With other homes, what it publishes later goes by `spread`.
    pub(super) async fn serve(
        self,
        common: &Common,
        spread: Option<TopicSpread>,
        drain: &watch::Receiver<bool>,
        stop: &watch::Receiver<bool>,
    ) -> Result<(ServedHome, GrpcApi), StartError> {
        let Self { config, planned, directory: _directory, ledger, mark, bans, home, kept, events } = self;
        let KeptValues { latest, history, shadows, watch } = kept;
        let admission = &common.admission;
        let dispatcher = commands::dispatcher(&config);
        let reserved = dispatcher.iter().map(::commands::reserved);
        let broker = Broker::new(BrokerConfig {
            limits: Arc::new(config.limits.clone()),
            non_broker: config.non_broker,
            namespace: config.namespace.clone(),
            listener_strategies: config.listener_strategies(),
            latest: latest.clone().map(|latest| latest as Arc<dyn Recorder>),
            history: history.clone().map(|history| history as Arc<dyn Recorder>),
            stores: home.broker_stores(),
            log: home.broker_log(),
            reserved: reserved.chain(shadows.iter().map(OpenedShadows::reserved)).collect(),
            durability: stores::rules(&config),
            authorize_will: admission.authorize_will(),
            tenants: config.tenants.clone(),
        });
        // Before anything can happen.
        let happened = events.as_ref().map(|_| broker.events());
        let sys = config.sys.enabled.then(|| SysPublisher::start(broker.clone()));
        let shared = NetShared::new(
            broker.clone(),
            Arc::clone(&admission.authenticator),
            admission.authority.clone(),
            AbuseGuard::new(&config.bans, Arc::clone(&bans)),
            config.response_pattern(),
            mark.clone(),
        );
        if let Some(ledger) = &ledger {
            let lease = Arc::clone(&ledger.lease);
            let on_account = || KindBudget::new(broker.account(), MemoryKind::Ledger);
            broker.lease().set(move || lease(), on_account());
            ledger.redo.charge_to(Arc::new(on_account()));
        }
        // Before anything is published.
        let consumers = home.restore(&config, &broker, &shared).await?;
        broker.end_superseded(clock::now(), &mut Turn::default());

        let bridges = planned.start(consumers.as_ref().ok(), &broker, mark, drain).await;
        let mut tasks = JoinSet::new();
        let (replaceable, watched_bans) = (admission.replaceable.clone(), Arc::clone(&bans));
        evictions::watch(&shared, &common.tls, &config, replaceable, watched_bans, &mut tasks);
        let limits = api::grpc_config(&config);
        let served = home.serve(&config, &limits, (&broker, spread), dispatcher, &mut tasks, drain).await?;
        let hooks = Hooks {
            traces: trace_clients(),
            latest: latest.clone().map(|latest| latest as Arc<dyn grpc::LatestValues>),
            history: history.clone(),
            backends: Arc::clone(&admission.backends),
            reloads: Arc::clone(&common.reloads),
            authority: admission.authority.clone(),
            bans: Arc::clone(&bans),
            publisher: served.publisher,
            groups: consumers.clone(),
            commands: served.commands,
            shadows: shadows.map(|opened| opened.shadows),
            stores: api::stores_answer(&watch),
            operated: Arc::new(api::operated(&config, &common.tls, &broker, latest.as_ref(), &watch)),
        };
        let api = GrpcApi::open(broker.clone(), limits, hooks, drain.clone())?;
        if consumers.is_ok() {
            let broker = broker.clone();
            tasks.spawn(async move { broker.append_events(grpc::encode_event).await });
        }
        if broker.lease().is_set() {
            tasks.spawn(look_at_lease(broker.clone()));
        }
        let bans_reload = Arc::clone(&bans) as Arc<dyn Reload>;
        tasks.spawn(run_ticks(broker.clone(), bans, home.clock().cloned()));
        if let Some(sys) = sys {
            tasks.spawn(sys.run(config.sys.interval.0));
        }
        let (sender, events_reload) = events.unzip();
        let reloads: Vec<_> = std::iter::once(bans_reload).chain(events_reload).collect();
        for part in &reloads {
            common.reloads.add_while_there(part);
        }
        let finishing = Finishing {
            latest: latest.clone(),
            on_disk: watch.latest.clone(),
            history,
            events: sender.zip(happened),
            bridges,
            shadows: watch.shadows.clone(),
        };
        let endings = finishing.run(&broker, stop);
        let served = ServedHome { broker, shared, latest, watch, home, endings, tasks, _reloads: reloads };
        Ok((served, api))
    }
}

impl ServedHome {
    /// Reads what `/metrics` shows of it; usable until and after the end.
    pub(super) fn metrics(&self) -> ReadRows {
        let rows = self.rows();
        Arc::new(move || with_process(rows()))
    }

    /// Reads its own rows, without those of the process.
    pub(super) fn rows(&self) -> ReadRows {
        let (broker, latest, watch) = (self.broker.clone(), self.latest.clone(), Arc::clone(&self.watch));
        Arc::new(move || home_rows(&broker, latest.as_deref(), &watch))
    }

    /// Tells whether it takes what devices and backends send, with its problems, or why it does not.
    pub(super) fn ready(&self) -> ReadReady {
        let (latest, watch) = (self.latest.clone(), Arc::clone(&self.watch));
        Arc::new(move || match &latest {
            Some(latest) if !latest.healthy() && watch.database.is_none() => {
                Err("latest-value store is failing".to_owned())
            }
            // Services that need neither disk nor database are up all the same.
            _ => Ok(watch.problems()),
        })
    }

    /// Finishes what waits, once `stop` was told. Nothing may be published any more.
    pub(super) async fn finish(&mut self, deadline: Instant) {
        std::mem::take(&mut self.endings).end(deadline).await;
    }

    /// Closes the stores of a home that goes to another gateway. A ledger that does not answer keeps nobody: the next gateway takes the
    /// home as after a crash.
    pub(super) async fn close_for_other(&self, longest: Duration) {
        if timeout(longest, self.home.close()).await.is_err() {
            warn!("the ledger does not take the last changes before the deadline");
        }
    }

    /// Closes the stores and lets go of all sessions.
    pub(super) async fn close(mut self) {
        self.tasks.shutdown().await;
        self.watch.note_closed();
        self.home.close().await;
        self.broker.release_sessions();
    }

    /// Ends the connections and everything that runs, of a home that is another gateway's, without a trace: as a kill would.
    pub(super) async fn give_up(mut self) {
        self.broker.give_up().await;
        self.tasks.shutdown().await;
        drop(self.endings);
        let shared = &self.shared;
        let alone = async {
            while Arc::strong_count(shared) > 1 {
                tokio::time::sleep(CONNECTION_LOOK).await;
            }
        };
        if timeout(LAST_CONNECTION, alone).await.is_err() {
            warn!("a connection of the home is still there, it ends later");
        }
        self.home.give_up().await;
        if let Some(latest) = &self.watch.latest {
            latest.give_up();
        }
        self.broker.release_sessions();
    }
}

/// Lets go of acknowledgements that wait for a lease, soon after it is back.
async fn look_at_lease(broker: Broker) {
    loop {
        tokio::time::sleep(LEASE_LOOK).await;
        broker.lease().look();
    }
}

/// Parts that run until `stop` and have something to finish then.
struct Finishing {
    latest: Option<Arc<LatestCache>>,
    on_disk: Option<Arc<EmbeddedLatest>>,
    history: Option<Arc<History>>,
    events: Option<(EventSender, broadcast::Receiver<Event>)>,
    bridges: JoinSet<()>,
    shadows: Option<OpenedShadows>,
}

impl Finishing {
    fn run(self, broker: &Broker, stop: &watch::Receiver<bool>) -> Endings {
        let mut endings = Endings::default();
        if let Some(latest) = self.latest {
            endings.run(Arc::clone(&latest).run(stop.clone()), move || {
                let lost = latest.abandon();
                error!(lost, "latest values are lost: they were not written before the deadline");
            });
        }
        // Once they are all in the store.
        if let Some(store) = self.on_disk {
            endings.then(async move { store.end_shipping().await }, || {
                warn!("latest values not completely in the ledger before the deadline");
            });
        }
        if let Some(history) = self.history {
            endings.run(history.run(stop.clone()), || {
                warn!("history not completely written before the deadline");
            });
        }
        if let Some((sender, happened)) = self.events {
            endings.run(sender.run(happened, grpc::event_to_proto, stop.clone()), || {
                warn!("events not completely told before the deadline");
            });
        }
        if let Some(stores) = broker.stores() {
            let stores = stores.clone();
            endings.then(async move { stores.flush().await }, || {
                warn!("sessions and queues not completely written before the deadline");
            });
        }
        endings.wait_for(self.bridges, || {
            warn!("bridges still wait for the other side, what it does not acknowledge is sent again");
        });
        if let Some(shadows) = self.shadows {
            endings.then(async move { shadows.shadows.settle().await }, || {
                warn!("requests for shadows not completely carried out before the deadline");
            });
        }
        endings
    }
}

/// Values and shadows, and the watch over all stores.
struct KeptValues {
    latest: Option<Arc<LatestCache>>,
    history: Option<Arc<History>>,
    /// Or the key of the configuration that switches them off.
    shadows: Result<OpenedShadows, &'static str>,
    watch: Arc<StoreWatch>,
}

impl KeptValues {
    fn open(
        common: &Common,
        config: &Config,
        directory: Option<&Arc<DataDir>>,
        ledger: Option<&HomeLedger>,
        bridges: &PlannedBridges,
        home: &Arc<Home>,
        bans: &Arc<BanRegistry>,
    ) -> Result<Self, StartError> {
        let OpenedValues { latest, history, shadows, on_disk } = match directory {
            Some(directory) if config.latest.enabled => values::open(config, directory, ledger)?,
            _ => OpenedValues::default(),
        };
        let shadows = config
            .has_shadows()
            .and_then(|()| shadows::open(config, home.records(), shadows).ok_or("store.enabled"));
        let aside = on_disk.as_ref().and_then(|latest| latest.set_aside().cloned());
        let remote = latest.as_ref().filter(|_| config.db_addr.is_some());
        let watch = Arc::new(StoreWatch {
            set_aside: aside.into_iter().chain(home.set_aside()).collect(),
            home: Arc::clone(home),
            shadows: shadows.clone().ok(),
            history: history.clone(),
            latest: on_disk,
            database: remote.map(|latest| latest.condition()),
            tls: Arc::clone(&common.tls),
            bans: Arc::clone(bans),
            bridges: bridges.status(),
        });
        Ok(Self { latest, history, shadows, watch })
    }
}
