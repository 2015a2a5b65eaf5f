//! Starting the parts, in the order in which they need each other.

use std::{
    net::{SocketAddr, TcpListener},
    path::Path,
    sync::{Arc, OnceLock},
    time::{Duration, SystemTime},
};

use broker::{Broker, BrokerConfig, JudgeWill, Turn};
use commands::{
    self, CommandRegistry, CommandRegistryOptions, CommandService, CommandTopics, CommandsOptions,
    ReplyDispatcher,
};
use config::{Address, Config, DEV_CERTS_DIR, DeniedPublish, ListenerKind};
use edge::{
    reload::Reloads,
    secret_files,
    tls::{self, TlsHandle, TlsStore, ensure_dev_certs},
};
use gateway_core::clock;
use store::{ClockMark, DataDir, MemoryPublisher, PublisherStore, Recorder, Verify, server_id};
use telemetry::trace_clients;
use tokio::{sync::watch, task::JoinSet};
use tracing::{error, warn};
use values::LatestCache;

use super::{
    Builder, Gateway, StartError, banned, groups,
    health::{StoreWatch, retained_problem},
    latest,
    revoked::{self, RevokedCertificates},
    service::{self, SysPublisher},
    shadows, stores,
};
use auth::{
    Authenticator, Authority, Chain, EventSender,
    abuse::{AbuseGuard, BanRegistry},
    backends::{BackendAuthenticator, JwtKeys},
};
use bridges::PlannedBridges;
use net::{BoundListener, NetShared, probe_silent_peers};

/// Interval at which files that can be read again are looked at.
const RELOAD_LOOK: Duration = Duration::from_secs(1);

/// Interval at which the age of certificates is looked at.
const CERTIFICATE_AGE_LOOK: Duration = Duration::from_secs(60);

/// Connections to gRPC or HTTP that the system may have ready, as for devices.
const BACKLOG: i32 = 4096;

pub(super) async fn start(builder: Builder) -> Result<Gateway, StartError> {
    let Builder { config, auth, authorizer, mut sockets } = builder;
    config.validate()?;
    if auth.is_none() {
        config.check_devices()?;
    }
    if config.needs_dev_certs() {
        #[expect(clippy::disallowed_methods, reason = "certificates are dated by the wall clock")]
        ensure_dev_certs(Path::new(DEV_CERTS_DIR), SystemTime::now())?;
    }
    tls::check_files(&config)?;
    let open = secret_files::check(&config)?;
    let anonymous = config.anonymous_warning().filter(|_| auth.is_none());
    for warning in anonymous.into_iter().chain(config.warnings()).chain(open) {
        warn!("{warning}");
    }
    let config = Arc::new(config);
    let tls = Arc::new(TlsStore::new());
    let listeners = prepare_listeners(&config, &tls)?;
    let grpc_tls = match config.grpc_tls() {
        Some(files) => {
            let settings = add_tls(&tls, "grpc", files, &[b"h2"])?;
            Some(grpc::GrpcTls { settings, revocations: tls.revocations("grpc") })
        }
        None => None,
    };
    let http_tls = config.http_tls().map(|files| add_tls(&tls, "http", files, &[b"http/1.1"])).transpose()?;
    #[expect(clippy::disallowed_methods, reason = "certificates are dated by the wall clock")]
    tls.log_notices(SystemTime::now());
    let reloads = Reloads::new();
    reloads.add(Arc::clone(&tls) as _);
    let authority = match authorizer {
        Some(program) => {
            let closes = config.authorization.denied_publish == DeniedPublish::Close;
            Some(Authority::of_program(program, closes))
        }
        None => {
            let service = auth::RemoteAuthorizer::new(&config.auth.grpc)?;
            if let Some(service) = &service {
                reloads.add(service.reloads());
            }
            let authority = auth::open_rules(&config, service, config.reserved_topics())?;
            if let Some(authority) = authority.as_ref().filter(|_| config.authorization.rules.is_some()) {
                reloads.add(Arc::clone(authority) as _);
            }
            authority
        }
    };
    let backends = Arc::new(BackendAuthenticator::open(&config.backends)?);
    reloads.add(Arc::clone(&backends) as _);
    if config.backends.jwt.key_file.is_some() {
        reloads.add(Arc::new(JwtKeys(Arc::clone(&backends))));
    }
    let (auth, chain) = match auth {
        Some(auth) => (auth, None),
        None => {
            let chain = Chain::start(&config, &reloads)?;
            (Arc::clone(&chain) as Arc<dyn Authenticator>, Some(chain))
        }
    };
    let courier = EventSender::new(&config.auth.grpc)?;
    if let Some(courier) = &courier {
        reloads.add(courier.reloads());
    }

    let bridges = PlannedBridges::open(&config)?;

    // A bridge without a store has its mark there.
    let directory = match config.latest.enabled || config.store.enabled || !config.bridges.is_empty() {
        true => {
            let verify = Verify { always: config.store.verify, limit: config.store.verify_limit.0 };
            Some(DataDir::open_with(&config.data_dir, verify)?)
        }
        false => None,
    };
    let mark = directory.as_deref().map(server_id).transpose()?.unwrap_or_default();
    // Before anybody is let in.
    let bans = Arc::new(BanRegistry::open(&config.bans, directory.clone())?);
    reloads.add(Arc::clone(&bans) as _);
    // Before the first deadline is made or read.
    let clock_mark = directory.as_ref().map(|directory| Arc::new(ClockMark::resume(directory)));
    let opened = match &directory {
        Some(directory) if config.latest.enabled => Some(latest::open(&config, directory)?),
        _ => None,
    };
    let (latest, history, remote_shadows, on_disk) = opened.map_or((None, None, None, None), |opened| {
        (Some(opened.latest), opened.history, opened.shadows, opened.on_disk)
    });
    let aside = on_disk.as_ref().and_then(|latest| latest.set_aside().cloned());
    let remote = latest.as_ref().filter(|_| config.db_addr.is_some());
    let stores = match &directory {
        Some(directory) if config.store.enabled => Some(stores::open(&config, directory)?),
        _ => None,
    };
    let durable = stores.as_ref().map(stores::OpenedStores::watched);
    let records = durable.as_ref().map(|durable| Arc::clone(&durable.publisher) as Arc<dyn PublisherStore>);
    let engines = match &directory {
        Some(directory) if config.has_groups() => Some(groups::open(&config, directory)?),
        _ => None,
    };
    let shadows = match (&directory, config.has_shadows()) {
        (Some(directory), Ok(())) => Ok(shadows::open(&config, directory, remote_shadows)?),
        (None, Ok(())) => Err("store.enabled"),
        (_, Err(key)) => Err(key),
    };
    let watch = Arc::new(StoreWatch {
        set_aside: aside
            .into_iter()
            .chain(stores.iter().flat_map(stores::OpenedStores::set_aside))
            .chain(engines.iter().filter_map(groups::OpenedGroups::set_aside))
            .chain(shadows.iter().filter_map(shadows::OpenedShadows::set_aside))
            .collect(),
        durable,
        engines: engines.clone(),
        groups: OnceLock::new(),
        registry: OnceLock::new(),
        shadows: shadows.clone().ok(),
        history: history.clone(),
        latest: on_disk,
        database: remote.map(|latest| latest.condition()),
        tls: Arc::clone(&tls),
        bans: Arc::clone(&bans),
        bridges: bridges.status(),
    });
    let mut bound = Vec::new();
    for prepared in listeners {
        if let Some(listener) = prepared.bind(sockets.remove(&prepared.listener.name), &config)? {
            bound.push(listener);
        }
    }
    let (grpc_v6, http_v6) = (config.grpc.ipv6_only, config.http.ipv6_only);
    let grpc_socket = take_or_bind(sockets.remove("grpc"), "grpc_addr", config.grpc_addr, grpc_v6, &config)?;
    let http_socket = match config.http.enabled {
        true => Some(take_or_bind(sockets.remove("http"), "http_addr", config.http_addr, http_v6, &config)?),
        false => None,
    };

    let dispatcher = config.commands.enabled.then(|| ReplyDispatcher::new(command_options(&config)));
    let broker = Broker::new(BrokerConfig {
        limits: Arc::new(config.limits.clone()),
        non_broker: config.non_broker,
        namespace: config.namespace.clone(),
        listener_strategies: config.listener_strategies(),
        latest: latest.clone().map(|latest| latest as Arc<dyn Recorder>),
        history: history.clone().map(|history| history as Arc<dyn Recorder>),
        stores: stores.as_ref().map(|opened| opened.stores.clone()),
        log: engines.as_ref().map(groups::OpenedGroups::for_broker),
        reserved: dispatcher
            .iter()
            .map(commands::reserved)
            .chain(shadows.iter().map(shadows::OpenedShadows::reserved))
            .collect(),
        durability: stores::rules(&config),
        judge_will: authority.clone().map(judge_will),
        tenants: config.tenants.clone(),
    });
    // Before anything can happen.
    let courier = courier.map(|courier| (courier, broker.events()));
    let sys = config.sys.enabled.then(|| SysPublisher::start(broker.clone()));
    let guard = AbuseGuard::new(&config.bans, Arc::clone(&bans));
    if let Some(chain) = chain {
        chain.charge_to(broker.account());
    }
    let pattern = config.response_pattern();
    let shared = NetShared::new(broker.clone(), auth, authority.clone(), guard, pattern, mark.clone());
    if let Some(stores) = stores {
        stores.restore(&broker, &shared)?;
    }
    // Before anything is published: what they want is appended from now on.
    let consumers = match &engines {
        Some(engines) => {
            let all = engines.start(&config, &broker).await?;
            let _ = watch.groups.set(Arc::clone(&all));
            Ok(all)
        }
        None if config.store.enabled => Err("groups.enabled"),
        None => Err("store.enabled"),
    };
    broker.end_superseded(clock::now(), &mut Turn::default());
    let (shards, threads) = net::start_shards(config.effective_shards(), &shared)?;
    let revoked = RevokedCertificates::new(&tls, bound.iter().map(BoundListener::name));
    let (draining, drain) = watch::channel(false);
    let (stopping, stop) = watch::channel(false);
    let bridges = bridges.start(consumers.as_ref().ok(), &broker, mark, &drain).await;
    let mut tasks = JoinSet::new();
    let pulses = shards.iter().map(net::ShardHandle::pulse).collect();
    tasks.spawn(net::tick_shards(shards.clone()));
    let commands = match dispatcher {
        Some(dispatcher) => {
            let store = records.clone().unwrap_or_else(|| Arc::new(MemoryPublisher));
            let registry = CommandRegistry::open(book_options(&config), store, broker.account())?;
            let _ = watch.registry.set(Arc::clone(&registry));
            let commands = CommandService::new(broker.clone(), dispatcher, registry);
            tasks.spawn(Arc::clone(&commands).run(drain.clone()));
            Ok(commands)
        }
        None => Err("commands.enabled"),
    };
    let mut addresses = Vec::new();
    let mut listeners = JoinSet::new();
    for listener in bound {
        addresses.push((listener.name().to_owned(), listener.address().clone()));
        let accepting = net::accept_loop(listener, Arc::clone(&shared), shards.clone(), drain.clone());
        listeners.spawn(async move {
            if let Err(error) = accepting.await {
                error!(%error, "listener ended");
            }
        });
    }
    addresses.push(("grpc".to_owned(), Address::Ip(grpc_socket.local_addr()?)));
    let hooks = grpc::Hooks {
        traces: trace_clients(),
        latest: latest.clone().map(|latest| latest as Arc<dyn grpc::LatestValues>),
        history: history.clone(),
        backends: Arc::clone(&backends),
        reloads: Arc::clone(&reloads),
        authority: authority.clone(),
        bans: Arc::clone(&bans),
        store: records,
        groups: consumers.clone(),
        commands,
        shadows: shadows.map(|opened| opened.shadows),
        stores: stores_answer(&watch),
        operated: Arc::new(operated(&config, &tls, &broker, latest.as_ref(), &watch)),
    };
    let api = grpc::GrpcApi::open(broker.clone(), grpc_config(&config), hooks, drain.clone()).await?;
    let json = config.http.api.then(|| json(&config, &api, &broker));
    let page = config.http.page.then(|| local_channel(&api));
    let grpc_task = Some(tokio::spawn(service::run_grpc(grpc_socket, grpc_tls, api)));
    if let Some(socket) = http_socket {
        addresses.push(("http".to_owned(), Address::Ip(socket.local_addr()?)));
        tasks.spawn(service::run_http(
            socket,
            http_tls,
            broker.clone(),
            latest.clone(),
            Arc::clone(&watch),
            Arc::clone(&config),
            backends,
            json,
            page,
            drain,
            stop.clone(),
        ));
    }
    if consumers.is_ok() {
        let broker = broker.clone();
        tasks.spawn(async move { broker.append_events(grpc::encode_event).await });
    }
    tasks.spawn(service::run_ticks(broker.clone(), Arc::clone(&bans), clock_mark.clone()));
    if let Some(sys) = sys {
        tasks.spawn(sys.run(config.sys.interval.0));
    }
    if let Some(revoked) = revoked {
        shared.add_connection_check(Arc::new(revoked));
        tasks.spawn(revoked::watch(tls.revocations_changed(), Arc::clone(&shared)));
    }
    if let Some(authority) = authority.filter(|_| config.authorization.rules.is_some()) {
        shared.add_connection_check(Arc::clone(&authority) as _);
        tasks.spawn(super::unnamed::watch(authority, Arc::clone(&shared)));
    }
    shared.add_connection_check(Arc::clone(&bans) as _);
    tasks.spawn(banned::watch(bans, Arc::clone(&shared)));
    tasks.spawn(tls.watch_dates(CERTIFICATE_AGE_LOOK));
    tasks.spawn(Arc::clone(&reloads).watch(RELOAD_LOOK));
    let history_task = history.map(|history| tokio::spawn(history.run(stop.clone())));
    let events_task = courier
        .map(|(courier, events)| tokio::spawn(courier.run(events, grpc::event_to_proto, stop.clone())));
    let latest_task = latest.as_ref().map(|latest| tokio::spawn(Arc::clone(latest).run(stop)));
    Ok(Gateway {
        broker,
        shared,
        threads,
        pulses,
        config,
        addresses,
        reloads,
        latest,
        clock_mark,
        watch,
        draining,
        stopping,
        latest_task,
        history_task,
        events_task,
        grpc_task,
        bridges,
        listeners,
        tasks,
    })
}

/// Has each will looked at again when it is to be published.
fn judge_will(authority: Arc<Authority>) -> Arc<JudgeWill> {
    Arc::new(move |client_id, will| {
        let author = will.author.as_deref().map(String::as_str);
        authority.may_publish_will(client_id, author, &will.message)
    })
}

struct Prepared {
    /// Configuration key of the address.
    key: String,
    address: Address,
    listener: config::Listener,
    tls: Option<TlsHandle>,
    optional: bool,
}

impl Prepared {
    fn bind(
        &self,
        socket: Option<TcpListener>,
        config: &Config,
    ) -> Result<Option<BoundListener>, StartError> {
        let name = &self.listener.name;
        let failed =
            |error| StartError::Bind { key: self.key.clone(), address: self.address.to_string(), error };
        let ipv6_only = self.listener.ipv6_only;
        let bound = match (socket, &self.address) {
            #[cfg(feature = "quic")]
            (_, Address::Ip(address)) if self.listener.kind == ListenerKind::Quic => {
                BoundListener::bind_quic(name, *address, ipv6_only, config.quic)
            }
            (Some(socket), _) => BoundListener::from_std(name, socket),
            (None, Address::Ip(address)) => BoundListener::bind(name, *address, ipv6_only),
            (None, Address::Unix(path)) => BoundListener::bind_unix(name, path, self.listener.mode),
        };
        let mut bound = match bound {
            Ok(bound) => bound,
            Err(error) if self.optional => {
                warn!(listener = name, address = %self.address, %error, "development listener left out");
                return Ok(None);
            }
            Err(error) => return Err(failed(error)),
        };
        bound = bound.with_tcp_keepalive(config.limits.tcp_keepalive.0).map_err(failed)?;
        if let Some(tls) = &self.tls {
            bound = bound.with_tls(Arc::clone(tls));
        }
        if self.listener.kind.is_websocket() {
            bound = bound.with_websocket(&self.listener.path, self.listener.allowed_origins.clone());
        }
        if self.listener.proxy_protocol {
            bound = bound.with_proxy_protocol();
        }
        if let Some(durability) = self.listener.durability {
            bound = bound.with_durability(durability.into());
        }
        if self.listener.max_connections > 0 {
            bound = bound.with_max_connections(self.listener.max_connections);
        }
        Ok(Some(bound))
    }
}

fn prepare_listeners(config: &Config, tls: &TlsStore) -> Result<Vec<Prepared>, StartError> {
    let mut prepared = Vec::new();
    for (address, listener) in config.effective_listeners() {
        let tls = match listener.kind {
            ListenerKind::Tls | ListenerKind::Wss => {
                Some(add_tls(tls, &tls_use(&listener.name), config.listener_tls(&listener), &[])?)
            }
            #[cfg(feature = "quic")]
            ListenerKind::Quic => {
                let files = config.listener_tls(&listener);
                Some(add_tls(tls, &tls_use(&listener.name), files, &[net::ALPN])?)
            }
            // Without the feature the configuration is refused.
            #[cfg(not(feature = "quic"))]
            ListenerKind::Quic => None,
            ListenerKind::Tcp | ListenerKind::Ws => None,
        };
        let optional = config.dev && listener.name.starts_with("dev-");
        let listed = config.listeners.iter().position(|known| known.name == listener.name);
        let key = listed.map_or_else(|| "addr".to_owned(), |number| format!("listeners[{number}].address"));
        prepared.push(Prepared { key, address, listener, tls, optional });
    }
    Ok(prepared)
}

/// Returns the name of the TLS use of a device listener.
pub(super) fn tls_use(listener: &str) -> String {
    format!("listener {listener}")
}

fn add_tls(
    store: &TlsStore,
    name: &str,
    files: config::TlsFiles,
    alpn: &[&[u8]],
) -> Result<TlsHandle, StartError> {
    store.add(name, files, alpn).map_err(|error| StartError::Tls { name: name.to_owned(), error })
}

fn take_or_bind(
    socket: Option<TcpListener>,
    key: &str,
    address: SocketAddr,
    ipv6_only: bool,
    config: &Config,
) -> Result<TcpListener, StartError> {
    let failed = |error| StartError::Bind { key: key.to_owned(), address: address.to_string(), error };
    let socket = match socket {
        Some(socket) => socket,
        None => net::listen(address, ipv6_only).map_err(failed)?,
    };
    // The standard library's backlog is 128: in a flood of connections the system would have others try again a second
    // later.
    socket2::SockRef::from(&socket).listen(BACKLOG)?;
    probe_silent_peers(&socket, config.limits.tcp_keepalive.0)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// The API for clients of the HTTP listener.
fn local_channel(api: &grpc::GrpcApi) -> gateway_http::LocalChannel {
    let local = api.local();
    gateway_http::LocalChannel::new(local.clone(), move |request| local.check(request))
}

fn json(config: &Config, api: &grpc::GrpcApi, broker: &Broker) -> gateway_http::JsonApi {
    let options = gateway_http::JsonOptions {
        max_body: config.http.max_body.0,
        body_timeout: config.http.body_timeout.0,
        cors_origins: config.http.cors_origins.clone(),
    };
    gateway_http::JsonApi::new(local_channel(api), Arc::clone(broker.account()), options)
}

/// Returns the health of the stores on which services depend.
fn stores_answer(watch: &Arc<StoreWatch>) -> grpc::StoresAnswer {
    let (groups, shadows) = (Arc::clone(watch), Arc::clone(watch));
    grpc::StoresAnswer {
        groups: Arc::new(move || groups.groups_answer()),
        shadows: Arc::new(move || shadows.shadows_answer()),
    }
}

/// Returns the state of the gateway that the API shows to operators.
fn operated(
    config: &Arc<Config>,
    tls: &Arc<TlsStore>,
    broker: &Broker,
    latest: Option<&Arc<LatestCache>>,
    watch: &Arc<StoreWatch>,
) -> grpc::Operated {
    let (broker, latest, watched, watch) =
        (broker.clone(), latest.cloned(), Arc::clone(watch), Arc::clone(watch));
    let retaining = broker.clone();
    grpc::Operated {
        version: env!("CARGO_PKG_VERSION"),
        started: clock::to_wall(clock::now()),
        bridges: watched.bridges.clone(),
        metrics: Box::new(move || service::metrics(&broker, latest.as_deref(), &watched)),
        problems: Box::new(move || watch.problems() + &retained_problem(&retaining)),
        tls: Arc::clone(tls),
        config: Arc::clone(config),
    }
}

fn command_options(config: &Config) -> CommandsOptions {
    let commands = &config.commands;
    CommandsOptions {
        topics: CommandTopics::new(
            commands.prefix(),
            commands.request_levels().expect("the configuration was validated"),
            commands.reply_levels().expect("the configuration was validated"),
        ),
        max_outstanding: commands.max_outstanding,
        max_outstanding_per_device: commands.max_outstanding_per_device,
    }
}

fn book_options(config: &Config) -> CommandRegistryOptions {
    let commands = &config.commands;
    CommandRegistryOptions {
        max_outstanding: commands.max_outstanding,
        max_outstanding_per_device: commands.max_outstanding_per_device,
        max_active: commands.max_active,
        max_active_per_device: commands.max_active_per_device,
        max_bytes: commands.max_bytes.0,
        keep: commands.keep.0,
        max_kept: commands.max_kept,
    }
}

/// A limit of which 0 is none.
fn or_no_limit(most: u32) -> usize {
    if most == 0 { usize::MAX } else { most as usize }
}

fn grpc_config(config: &Config) -> grpc::GrpcConfig {
    grpc::GrpcConfig {
        wait_timeout: config.grpc.default_deadline.0,
        max_streams: config.grpc.max_streams as usize,
        max_streams_per_caller: or_no_limit(config.grpc.max_streams_per_caller),
        max_keys: config.grpc.idempotency_keys as usize,
        key_time: config.grpc.idempotency_time.0,
        max_scheduled: config.grpc.scheduled_messages as usize,
        scheduled_bytes: config.grpc.scheduled_bytes.0,
        max_connections: config.grpc.max_connections as usize,
        max_connections_per_address: or_no_limit(config.grpc.max_connections_per_address),
        max_handshakes: config.grpc.max_handshakes as usize,
        handshake_timeout: config.grpc.handshake_timeout.0,
        max_calls_per_connection: config.grpc.max_calls_per_connection,
        max_calls: config.grpc.max_calls,
        max_calls_per_caller: or_no_limit(config.grpc.max_calls_per_caller),
        keepalive_interval: config.grpc.keepalive_interval.0,
        keepalive_timeout: config.grpc.keepalive_timeout.0,
        groups: config.groups,
        ..grpc::GrpcConfig::default()
    }
}
