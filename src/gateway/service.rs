//! The services beside the connections: gRPC, HTTP pages, timers and `$SYS`.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use broker::{Broker, Counted, MemoryKind, Turn};
use config::Config;
use edge::tls::TlsHandle;
use gateway_core::{
    Message, Origin, Timestamp, clock,
    log_limits::peer_limits,
    metrics::{Row, figures, totals},
};
use store::ClockMark;
use telemetry::{ProcessStats, render, rows};
use tokio::sync::watch;
use tracing::{error, info, warn};
use values::LatestCache;

use super::{
    health::StoreWatch,
    sys::{SysInput, SysStats, is_answered_once},
};
use auth::{
    abuse::BanRegistry,
    backends::{BackendAuthenticator, MetricsDenied},
};
use gateway_http::{HttpLimits, MonitoringPages, PageDenied, Site};

pub(super) async fn run_grpc(socket: std::net::TcpListener, tls: Option<grpc::GrpcTls>, api: grpc::GrpcApi) {
    let Ok(socket) = tokio::net::TcpListener::from_std(socket) else { return };
    if let Err(error) = api.serve(socket, tls).await {
        error!(%error, "gRPC ended");
    }
}

#[expect(clippy::too_many_arguments, reason = "each is a part of the server")]
pub(super) async fn run_http(
    socket: std::net::TcpListener,
    tls: Option<TlsHandle>,
    broker: Broker,
    latest: Option<Arc<LatestCache>>,
    watch: Arc<StoreWatch>,
    config: Arc<Config>,
    backends: Arc<BackendAuthenticator>,
    json: Option<gateway_http::JsonApi>,
    page: Option<gateway_http::LocalChannel>,
    drain: watch::Receiver<bool>,
    mut stop: watch::Receiver<bool>,
) {
    let Ok(socket) = tokio::net::TcpListener::from_std(socket) else { return };
    let asks = backends.is_on();
    let account = Arc::clone(broker.account());
    let body_timeout = config.http.body_timeout.0;
    let page =
        page.map(|local| gateway_http::page::router(local, &account, asks, body_timeout, drain.clone()));
    let pages = MonitoringPages {
        authorize: Arc::new(move |authorization, peer| {
            backends.may_read_metrics(authorization, peer).map_err(|denied| match denied {
                MetricsDenied::Unknown => PageDenied::Unknown,
                MetricsDenied::Scope => PageDenied::Forbidden,
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
                // Services that need neither disk nor database are up all the same.
                _ => Ok(format!("ready\n{}", watch.problems())),
            }
        }),
    };
    let limits = HttpLimits {
        max_connections: config.http.max_connections,
        max_requests: config.http.max_requests,
        max_requests_per_caller: or_no_limit(config.http.max_requests_per_caller),
        max_streams: config.http.max_streams,
        max_streams_per_caller: or_no_limit(config.http.max_streams_per_caller),
        header_timeout: config.http.header_timeout.0,
        write_timeout: config.http.write_timeout.0,
    };
    let json = json.iter().map(gateway_http::JsonApi::router);
    let site = Site { pages, more: json.chain(page).collect() };
    gateway_http::serve(socket, tls, site, limits, account, async move {
        let _ = stop.wait_for(|stop| *stop).await;
    })
    .await;
}

/// A limit of which 0 is none.
fn or_no_limit(most: usize) -> usize {
    if most == 0 { usize::MAX } else { most }
}

/// Interval at which the clocks are saved.
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
pub(super) async fn run_ticks(broker: Broker, bans: Arc<BanRegistry>, mark: Option<Arc<ClockMark>>) {
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
        let left = broker.tick(clock::now(), &mut turn);
        turn.flush();
        if let Some(left) = left {
            left.settle().await;
        }
        for (said, peer, suppressed) in peer_limits().sweep() {
            let peer = peer.map_or_else(|| "others".to_owned(), |peer| peer.to_string());
            info!(?said, peer, suppressed, "more of the same was left out of the log");
        }
    }
}

/// Publishes `$SYS`, retained so that a subscriber is answered at once. The time and the version are only kept, so that
/// a subscriber is answered once; the time is that of the last interval.
pub(super) struct SysPublisher {
    broker: Broker,
    stats: SysStats,
}

impl SysPublisher {
    /// Publishes for the first time: before anybody can subscribe, as a value that is only kept is never sent later.
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
            // A value that answers a subscription once is only kept; without retained messages it can only be sent.
            if !(is_answered_once(topic) && self.broker.set_retained(&message).is_ok()) {
                self.broker.publish(&message, &mut turn);
            }
        }
        turn.flush();
    }
}

/// Returns the figures that `/metrics` and OTLP show.
pub(super) fn metrics(broker: &Broker, latest: Option<&LatestCache>, watch: &StoreWatch) -> Vec<Row> {
    let mut read = figures(broker, latest);
    read.extend(watch.figures());
    let mut rows = rows(&totals(), read, &ProcessStats::read());
    watch.bridges.rows(watch.groups.get().map(Arc::as_ref), &mut rows);
    if let Some(latest) = latest {
        rows.extend(latest.write_latency().rows(&figures::LATEST_WRITE));
    }
    rows
}

fn figures(broker: &Broker, latest: Option<&LatestCache>) -> Vec<Row> {
    let (now, queues) = (broker.gauges(), broker.queues());
    let account = broker.account();
    let mut all = vec![
        figures::CONNECTIONS.is(now.online as f64),
        figures::SESSIONS.is(now.sessions as f64),
        figures::SUBSCRIPTIONS.is(now.subscriptions as f64),
        figures::SHARED_GROUPS.is(now.shared_groups as f64),
        figures::RETAINED_MESSAGES.is(now.retained as f64),
        figures::RETAINED_BYTES.is(now.retained_bytes as f64),
        figures::QUEUED_BYTES.is(now.queued_bytes as f64),
        figures::QUEUED_MESSAGES.is(queues.pending as f64),
        figures::INFLIGHT_MESSAGES.is(queues.inflight as f64),
        figures::GRPC_STREAMS.is(now.streams as f64),
        figures::MEMORY_BUDGET.is(account.limit() as f64),
    ];
    all.extend(MemoryKind::ALL.map(|kind| figures::MEMORY.of([kind.as_str()], account.held(kind) as f64)));
    all.extend(broker.tenants().flat_map(|party| {
        let usage =
            |what: Counted| figures::TENANT_USAGE.of([party.name(), what.as_str()], party.used(what) as f64);
        Counted::ALL.map(usage)
    }));
    if let Some(latest) = latest {
        let store = latest.gauges();
        all.push(figures::LATEST_PENDING.is(store.pending_values as f64));
        all.push(figures::LATEST_PENDING_BYTES.is(store.pending_bytes as f64));
        all.push(figures::LATEST_HEALTHY.is(u8::from(store.healthy).into()));
        all.push(figures::LATEST_SPILLED.is(store.spilled as f64));
        let oldest = latest.oldest_pending(clock::to_wall(clock::now()));
        all.push(figures::LATEST_OLDEST.is(oldest.as_secs_f64()));
    }
    all
}

#[expect(clippy::disallowed_methods, reason = "$SYS shows the wall clock")]
fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
