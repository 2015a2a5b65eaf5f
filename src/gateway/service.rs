//! What runs beside the connections: gRPC, HTTP pages, timers and `$SYS`.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use broker::{Broker, Counted, MemoryKind, Turn};
use gateway_core::{
    Message, Origin, Timestamp, clock,
    log_limits::peer_limits,
    metrics::{Row, escape_label, totals},
};
use store::{ClockMark, Latest, PublisherStore};
use tokio::sync::watch;
use tracing::{error, info, warn};

use super::{
    health::StoreWatch,
    history,
    parts::set_trace,
    sys::{SysInput, SysStats, is_answered_once},
};
use crate::{
    abuse::Bans,
    auth::Authority,
    backends::{Backends, MetricsDenied},
    commands::Commands,
    config::Config,
    groups::Groups,
    grpc,
    reload::Reloads,
    shadow::Shadows,
    telemetry::{Denied, HttpLimits, Pages, ProcessStats, render, rows, serve as serve_http},
};

#[expect(clippy::too_many_arguments, reason = "one call site, all different types")]
pub(super) async fn run_grpc(
    socket: std::net::TcpListener,
    tls: Option<grpc::GrpcTls>,
    broker: Broker,
    bans: Arc<Bans>,
    config: grpc::GrpcConfig,
    backends: Arc<Backends>,
    reloads: Arc<Reloads>,
    authority: Option<Arc<Authority>>,
    store: Option<Arc<dyn PublisherStore>>,
    groups: Result<Arc<Groups>, &'static str>,
    commands: Result<Arc<Commands>, &'static str>,
    shadows: Result<Arc<Shadows>, &'static str>,
    drain: watch::Receiver<bool>,
) {
    let Ok(socket) = tokio::net::TcpListener::from_std(socket) else { return };
    let latest = broker.latest().cloned().map(|latest| latest as Arc<dyn grpc::LatestValues>);
    let set_trace = Arc::new(set_trace);
    let hooks = grpc::Hooks {
        set_trace,
        latest,
        backends,
        reloads,
        authority,
        bans,
        store,
        groups,
        commands,
        shadows,
    };
    if let Err(error) = grpc::serve(socket, tls, broker, config, hooks, drain).await {
        error!(%error, "gRPC ended");
    }
}

#[expect(clippy::too_many_arguments, reason = "each is a part of the server")]
pub(super) async fn run_http(
    socket: std::net::TcpListener,
    broker: Broker,
    latest: Option<Arc<Latest>>,
    watch: Arc<StoreWatch>,
    config: Arc<Config>,
    backends: Arc<Backends>,
    drain: watch::Receiver<bool>,
    mut stop: watch::Receiver<bool>,
) {
    let Ok(socket) = tokio::net::TcpListener::from_std(socket) else { return };
    let pages = Pages {
        authorize: Arc::new(move |authorization, peer| {
            backends.may_read_metrics(authorization, peer).map_err(|denied| match denied {
                MetricsDenied::Unknown => Denied::Unknown,
                MetricsDenied::Scope => Denied::Forbidden,
            })
        }),
        render: {
            let (latest, watch) = (latest.clone(), Arc::clone(&watch));
            Arc::new(move || render(&metrics(&broker, latest.as_deref(), &watch)))
        },
        ready: Arc::new(move || {
            if *drain.borrow() {
                return Err("shutting down".to_owned());
            }
            match &latest {
                Some(latest) if !latest.healthy() && watch.database.is_none() => {
                    Err("latest-value store is failing".to_owned())
                }
                // What needs neither disk nor database is served all the same.
                _ => Ok(format!("ready\n{}", watch.problems())),
            }
        }),
    };
    let limits = HttpLimits {
        max_connections: config.http.max_connections,
        header_timeout: config.http.header_timeout.0,
        write_timeout: config.http.write_timeout.0,
    };
    serve_http(socket, pages, limits, async move {
        let _ = stop.wait_for(|stop| *stop).await;
    })
    .await;
}

/// How often the clocks are saved.
const KEEP_CLOCK: Duration = Duration::from_secs(30);

/// Seconds between two looks for bans that have expired.
const SWEEP_BANS: u32 = 60;

/// Writes down where time continues after the next start.
pub(super) async fn keep_clock(mark: &Arc<ClockMark>) {
    let mark = Arc::clone(mark);
    let kept = tokio::task::spawn_blocking(move || mark.keep()).await;
    if let Ok(Err(error)) = kept {
        warn!(%error, "cannot keep the clock");
    }
}

/// Timers of the broker, once a second, and a look at the wall clock.
pub(super) async fn run_ticks(broker: Broker, bans: Arc<Bans>, mark: Option<Arc<ClockMark>>) {
    let mut kept = None;
    let mut ticks = 0u32;
    let mut second = tokio::time::interval(Duration::from_secs(1));
    second.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
    loop {
        second.tick().await;
        ticks = ticks.wrapping_add(1);
        if ticks.is_multiple_of(SWEEP_BANS) {
            bans.sweep();
        }
        let jump = clock::observe();
        if let Some(millis) = jump.filter(|millis| millis.unsigned_abs() >= 10_000) {
            warn!(seconds = millis / 1000, "wall clock has jumped, sessions and messages age as before");
        }
        let now = clock::now();
        let is_due = kept.is_none_or(|at: Timestamp| now >= at.plus_millis(KEEP_CLOCK.as_millis() as u64));
        if let Some(mark) = mark.as_ref().filter(|_| jump.is_some() || is_due) {
            kept = Some(now);
            keep_clock(mark).await;
        }
        let mut turn = Turn::default();
        broker.tick(clock::now(), &mut turn);
        turn.flush();
        for (said, peer, suppressed) in peer_limits().sweep() {
            let peer = peer.map_or_else(|| "others".to_owned(), |peer| peer.to_string());
            info!(?said, peer, suppressed, "more of the same was left out of the log");
        }
    }
}

/// Publishes `$SYS`, retained so that a subscriber is answered at once. The time and the version are only kept, so that
/// a subscriber is answered once; the time is that of the last interval.
pub(super) struct Sys {
    broker: Broker,
    stats: SysStats,
}

impl Sys {
    /// Publishes for the first time: before anybody can subscribe, for what is only kept is never sent later.
    pub(super) fn start(broker: Broker) -> Self {
        let mut sys = Self { broker, stats: SysStats::new(since_epoch()) };
        sys.publish();
        sys
    }

    /// Publishes again at every interval.
    pub(super) async fn run(mut self, interval: Duration) {
        let mut ticks = tokio::time::interval(interval.max(Duration::from_secs(1)));
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        // The first is now.
        ticks.tick().await;
        loop {
            ticks.tick().await;
            self.publish();
        }
    }

    fn publish(&mut self) {
        let process = ProcessStats::read();
        let input =
            SysInput { now: since_epoch(), heap: process.rss_bytes, heap_maximum: process.rss_peak_bytes };
        let values = self.stats.tick(input, &totals(), &self.broker.gauges());
        let mut turn = Turn::default();
        for (topic, payload) in &values {
            let mut message = Message::new(topic, payload.as_bytes(), clock::now(), Origin::SERVER);
            message.retain = true;
            // What answers a subscription once is only kept; without retained messages it can only be sent.
            if !(is_answered_once(topic) && self.broker.set_retained(&message).is_ok()) {
                self.broker.publish(&message, &mut turn);
            }
        }
        turn.flush();
    }
}

/// What `/metrics` and OTLP show.
pub(super) fn metrics(broker: &Broker, latest: Option<&Latest>, watch: &StoreWatch) -> Vec<Row> {
    let mut gauges = gauges(broker, latest);
    gauges.extend(watch.gauges());
    let mut rows = rows(&totals(), gauges, &ProcessStats::read());
    if let Some(latest) = latest {
        let help = "Time that the latest-value store took to write a batch";
        rows.extend(latest.write_latency().rows("gateway_latest_write_seconds", help));
    }
    rows
}

const MEMORY_HELP: &str = "Bytes charged to limits.memory_budget, by what they are held for";

fn gauges(broker: &Broker, latest: Option<&Latest>) -> Vec<gateway_core::metrics::Gauge> {
    let (now, queues) = (broker.gauges(), broker.queues());
    let gauge = |name, help, value: usize| (name, help, String::new(), value as f64);
    let mut all = vec![
        gauge("mqtt_connections", "Sessions with a connection", now.online),
        gauge("mqtt_sessions", "Sessions", now.sessions),
        gauge("mqtt_subscriptions", "Subscriptions", now.subscriptions),
        gauge("mqtt_shared_groups", "Shared groups", now.shared_groups),
        gauge("mqtt_retained_messages", "Retained messages", now.retained),
        gauge("mqtt_retained_bytes", "Bytes of retained messages", now.retained_bytes),
        gauge(
            "mqtt_queued_bytes",
            "Bytes of messages that wait in memory, for sessions and gRPC streams",
            now.queued_bytes,
        ),
        gauge("mqtt_queued_messages", "Messages waiting in session queues", queues.pending),
        gauge(
            "mqtt_inflight_messages",
            "QoS 1 and 2 messages sent and not yet acknowledged",
            queues.inflight,
        ),
        gauge("gateway_grpc_streams", "Open gRPC streams", now.streams),
    ];
    let account = broker.account();
    all.push(gauge("gateway_memory_budget_bytes", "What limits.memory_budget allows", account.limit()));
    all.extend(MemoryKind::ALL.map(|kind| {
        let label = format!("kind=\"{}\"", kind.as_str());
        ("gateway_memory_bytes", MEMORY_HELP, label, account.held(kind) as f64)
    }));
    all.extend(broker.tenants().flat_map(|party| {
        let help = "What a configured tenant has of its quotas";
        let name = escape_label(party.name());
        Counted::ALL.map(|what| {
            let label = format!("tenant=\"{name}\",quota=\"{}\"", what.as_str());
            ("gateway_tenant_usage", help, label, party.used(what) as f64)
        })
    }));
    all.extend(broker.history().into_iter().flat_map(|history| history::gauges(history)));
    if let Some(latest) = latest {
        let store = latest.gauges();
        all.push(gauge("gateway_latest_pending", "Latest values not yet written", store.pending_values));
        all.push(gauge(
            "gateway_latest_pending_bytes",
            "Bytes of latest values not yet written",
            store.pending_bytes,
        ));
        all.push(gauge(
            "gateway_latest_healthy",
            "1 while the latest-value store takes writes",
            usize::from(store.healthy),
        ));
        all.push(gauge(
            "gateway_latest_spilled",
            "Latest values in the data directory that wait for the database",
            store.spilled,
        ));
        all.push((
            "gateway_latest_oldest_pending_seconds",
            "Age of the oldest latest value not yet written",
            String::new(),
            latest.oldest_pending(clock::to_wall(clock::now())).as_secs_f64(),
        ));
    }
    all
}

#[expect(clippy::disallowed_methods, reason = "$SYS shows the wall clock")]
fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
