//! The start: each part is opened once those that it needs are there. Faults of the configuration show before a port opens,
//! and what earlier processes left is back before anybody connects.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, SystemTime},
};

use ::values::{History, LatestCache};
use auth::{
    Authenticator, EventSender,
    abuse::{AbuseGuard, BanRegistry},
};
use bridges::PlannedBridges;
use broker::{Broker, BrokerConfig, Event, KindBudget, MemoryKind, Turn};
use config::{Config, DEV_CERTS_DIR};
use disk::EmbeddedLatest;
use edge::{
    reload::Reloads,
    secret_files,
    tls::{self, TlsStore},
};
use gateway_core::clock;
use grpc::{GrpcApi, Hooks};
use net::{BoundListener, NetShared};
use store::{DataDir, Recorder, server_id};
use telemetry::trace_clients;
use tokio::{
    sync::{broadcast, watch},
    task::JoinSet,
};
use tracing::{error, warn};

use super::{
    Builder, Gateway, StartError,
    admission::Admission,
    api, commands,
    endings::Endings,
    evictions,
    health::StoreWatch,
    home::{self, Home, HomeLedger},
    http::{HttpListener, local_channel},
    links,
    listeners::{CERTIFICATE_AGE_LOOK, PreparedListeners},
    shadows::{self, OpenedShadows},
    stores,
    sys_publisher::SysPublisher,
    ticks::run_ticks,
    values::{self, OpenedValues},
};

/// Interval at which files that can be read again are looked at.
const RELOAD_LOOK: Duration = Duration::from_secs(1);

/// Time between two looks whether a lease is back for which acknowledgements wait.
const LEASE_LOOK: Duration = Duration::from_millis(20);

pub(super) async fn start(builder: Builder) -> Result<Gateway, StartError> {
    let Builder { config, auth, authorizer, sockets, ledger, members } = builder;
    check(&config, auth.as_ref())?;
    let config = Arc::new(config);
    let reloads = Reloads::new();
    let prepared = PreparedListeners::open(&config, &reloads)?;
    let tls = Arc::clone(&prepared.tls);
    let admission = Admission::open(&config, auth, authorizer, &reloads)?;
    let planned = PlannedBridges::open(&config)?;

    let directory = match &ledger {
        Some(ledger) => Some(Arc::clone(&ledger.directory)),
        None => home::directory(&config)?,
    };
    let mark = directory.as_deref().map(server_id).transpose()?.unwrap_or_default();
    // Before anybody is let in.
    let bans = Arc::new(BanRegistry::open(&config.bans, directory.clone())?);
    reloads.add(Arc::clone(&bans) as _);
    let home = Arc::new(Home::open(&config, directory.as_ref(), ledger.as_ref())?);
    let Kept { latest, history, shadows, watch } =
        open_values(&config, directory.as_ref(), ledger.as_ref(), &planned, &home, &tls, &bans)?;
    let bound = prepared.bind(&config, sockets)?;
    let addresses = bound.addresses()?;

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
    let happened = admission.events.as_ref().map(|_| broker.events());
    let sys = config.sys.enabled.then(|| SysPublisher::start(broker.clone()));
    admission.charge_to(broker.account());
    let guard = AbuseGuard::new(&config.bans, Arc::clone(&bans));
    let Admission { authenticator, authority, replaceable, backends, events, .. } = admission;
    let pattern = config.response_pattern();
    let shared =
        NetShared::new(broker.clone(), authenticator, authority.clone(), guard, pattern, mark.clone());
    if let Some(ledger) = &ledger {
        let lease = Arc::clone(&ledger.lease);
        let on_account = || KindBudget::new(broker.account(), MemoryKind::Ledger);
        broker.lease().set(move || lease(), on_account());
        ledger.redo.charge_to(Arc::new(on_account()));
    }
    // Before anything is published.
    let consumers = home.restore(&config, &broker, &shared).await?;
    broker.end_superseded(clock::now(), &mut Turn::default());

    let (shards, threads) = net::start_shards(config.effective_shards(), &shared)?;
    let (draining, drain) = watch::channel(false);
    let (stopping, stop) = watch::channel(false);
    let bridges = planned.start(consumers.as_ref().ok(), &broker, mark, &drain).await;
    let mut tasks = JoinSet::new();
    tasks.spawn(net::tick_shards(shards.clone()));
    let names = bound.devices.iter().map(BoundListener::name);
    evictions::watch(&shared, &tls, names, replaceable, Arc::clone(&bans), &mut tasks);
    let limits = api::grpc_config(&config);
    let served = home.serve(&config, &limits, &broker, dispatcher, &mut tasks, &drain).await?;

    let mut listeners = JoinSet::new();
    for listener in bound.devices {
        let accepting = net::accept_loop(listener, Arc::clone(&shared), shards.clone(), drain.clone());
        listeners.spawn(async move {
            if let Err(error) = accepting.await {
                error!(%error, "listener ended");
            }
        });
    }
    let hooks = Hooks {
        traces: trace_clients(),
        latest: latest.clone().map(|latest| latest as Arc<dyn grpc::LatestValues>),
        history: history.clone(),
        backends: Arc::clone(&backends),
        reloads: Arc::clone(&reloads),
        authority,
        bans: Arc::clone(&bans),
        publisher: served.publisher,
        groups: consumers.clone(),
        commands: served.commands,
        shadows: shadows.map(|opened| opened.shadows),
        stores: api::stores_answer(&watch),
        operated: Arc::new(api::operated(&config, &tls, &broker, latest.as_ref(), &watch)),
    };
    let api = GrpcApi::open(broker.clone(), limits, hooks, drain.clone())?;
    if let (Some(bound), Some(members)) = (bound.links, members) {
        tasks.spawn(links::serve(bound, &config, members, (&shared, &shards), api.local(), drain.clone())?);
    }
    if let Some(socket) = bound.http {
        let listener = HttpListener {
            socket,
            tls: bound.http_tls,
            config: Arc::clone(&config),
            broker: broker.clone(),
            latest: latest.clone(),
            watch: Arc::clone(&watch),
            backends,
            api: local_channel(&api),
        };
        tasks.spawn(listener.run(drain, stop.clone()));
    }
    let grpc_task = tokio::spawn(api::run(bound.grpc, bound.grpc_tls, api));
    if consumers.is_ok() {
        let broker = broker.clone();
        tasks.spawn(async move { broker.append_events(grpc::encode_event).await });
    }
    if broker.lease().is_set() {
        tasks.spawn(look_at_lease(broker.clone()));
    }
    tasks.spawn(run_ticks(broker.clone(), bans, home.clock().cloned()));
    if let Some(sys) = sys {
        tasks.spawn(sys.run(config.sys.interval.0));
    }
    tasks.spawn(tls.watch_dates(CERTIFICATE_AGE_LOOK));
    tasks.spawn(Arc::clone(&reloads).watch(RELOAD_LOOK));
    let endings = Parts {
        latest: latest.clone(),
        on_disk: watch.latest.clone(),
        history,
        events: events.zip(happened),
        bridges,
        shadows: watch.shadows.clone(),
    };
    Ok(Gateway {
        endings: endings.run(&broker, &stop),
        pulses: shards.iter().map(net::ShardHandle::pulse).collect(),
        broker,
        shared,
        threads,
        config,
        addresses,
        reloads,
        latest,
        home,
        watch,
        draining,
        stopping,
        grpc_task: Some(grpc_task),
        listeners,
        tasks,
    })
}

/// Lets go of acknowledgements that wait for a lease, soon after it is back.
async fn look_at_lease(broker: Broker) {
    loop {
        tokio::time::sleep(LEASE_LOOK).await;
        broker.lease().look();
    }
}

/// Refuses a configuration that cannot work, and warns of one that is open.
fn check(config: &Config, authenticator: Option<&Arc<dyn Authenticator>>) -> Result<(), StartError> {
    config.validate()?;
    if authenticator.is_none() {
        config.check_devices()?;
    }
    if config.needs_dev_certs() {
        #[expect(clippy::disallowed_methods, reason = "certificates are dated by the wall clock")]
        tls::ensure_dev_certs(Path::new(DEV_CERTS_DIR), SystemTime::now())?;
    }
    tls::check_files(config)?;
    let open = secret_files::check(config)?;
    let anonymous = config.anonymous_warning().filter(|_| authenticator.is_none());
    for warning in anonymous.into_iter().chain(config.warnings()).chain(open) {
        warn!("{warning}");
    }
    Ok(())
}

/// Parts that run until `stop` and have something to finish then.
struct Parts {
    latest: Option<Arc<LatestCache>>,
    on_disk: Option<Arc<EmbeddedLatest>>,
    history: Option<Arc<History>>,
    events: Option<(EventSender, broadcast::Receiver<Event>)>,
    bridges: JoinSet<()>,
    shadows: Option<OpenedShadows>,
}

impl Parts {
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
struct Kept {
    latest: Option<Arc<LatestCache>>,
    history: Option<Arc<History>>,
    /// Or the key of the configuration that switches them off.
    shadows: Result<OpenedShadows, &'static str>,
    watch: Arc<StoreWatch>,
}

fn open_values(
    config: &Config,
    directory: Option<&Arc<DataDir>>,
    ledger: Option<&HomeLedger>,
    bridges: &PlannedBridges,
    home: &Arc<Home>,
    tls: &Arc<TlsStore>,
    bans: &Arc<BanRegistry>,
) -> Result<Kept, StartError> {
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
        tls: Arc::clone(tls),
        bans: Arc::clone(bans),
        bridges: bridges.status(),
    });
    Ok(Kept { latest, history, shadows, watch })
}
