//! What runs beside the connections: gRPC, HTTP pages, timers and `$SYS`.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tokio::sync::watch;
use tracing::error;

use super::{
    health::StoreWatch,
    parts::set_trace,
    sys::{SysInput, SysStats, is_answered_once},
};
use crate::{
    broker::{Broker, Turn},
    config::Config,
    grpc, net,
    store::Latest,
    telemetry::{HttpLimits, Pages, ProcessStats, Row, render, rows, serve as serve_http, totals},
    tls::TlsHandle,
    types::{Message, Origin},
};

pub(super) async fn run_grpc(
    socket: std::net::TcpListener,
    tls: Option<TlsHandle>,
    broker: Broker,
    config: grpc::GrpcConfig,
    drain: watch::Receiver<bool>,
) {
    let Ok(socket) = tokio::net::TcpListener::from_std(socket) else { return };
    let latest = broker.latest().cloned().map(|latest| latest as Arc<dyn grpc::LatestReader>);
    let hooks = grpc::Hooks { set_trace: Arc::new(set_trace), latest };
    if let Err(error) = grpc::serve(socket, tls, broker, config, hooks, drain).await {
        error!(%error, "gRPC ended");
    }
}

pub(super) async fn run_http(
    socket: std::net::TcpListener,
    broker: Broker,
    latest: Option<Arc<Latest>>,
    watch: Arc<StoreWatch>,
    config: Arc<Config>,
    drain: watch::Receiver<bool>,
    mut stop: watch::Receiver<bool>,
) {
    let Ok(socket) = tokio::net::TcpListener::from_std(socket) else { return };
    let pages = Pages {
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
    };
    serve_http(socket, pages, limits, async move {
        let _ = stop.wait_for(|stop| *stop).await;
    })
    .await;
}

/// Timers of the broker, once a second.
pub(super) async fn run_ticks(broker: Broker) {
    let mut second = tokio::time::interval(Duration::from_secs(1));
    second.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
    loop {
        second.tick().await;
        let mut turn = Turn::default();
        broker.tick(net::now(), &mut turn);
        turn.flush();
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
            let mut message = Message::new(topic, payload.as_bytes(), net::now(), Origin::SERVER);
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

fn gauges(broker: &Broker, latest: Option<&Latest>) -> Vec<crate::telemetry::Gauge> {
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
            "Bytes that wait in queues, charged to limits.memory_budget",
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
            latest.oldest_pending(net::now()).as_secs_f64(),
        ));
    }
    all
}

#[expect(clippy::disallowed_methods, reason = "$SYS shows the wall clock")]
fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
