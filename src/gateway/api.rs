//! The gRPC listener.

use std::sync::Arc;

use ::values::LatestCache;
use broker::Broker;
use config::Config;
use edge::tls::TlsStore;
use gateway_core::clock;
use grpc::{GrpcApi, GrpcConfig, GrpcTls, Operated, StoresAnswer};
use tracing::error;

use super::{
    health::{StoreWatch, retained_problem},
    metrics::{home_rows, with_process},
};

pub(super) async fn run(socket: std::net::TcpListener, tls: Option<GrpcTls>, api: GrpcApi) {
    let Ok(socket) = tokio::net::TcpListener::from_std(socket) else { return };
    if let Err(error) = api.serve(socket, tls).await {
        error!(%error, "gRPC ended");
    }
}

/// Returns the health of the stores on which services depend.
pub(super) fn stores_answer(watch: &Arc<StoreWatch>) -> StoresAnswer {
    let (groups, shadows) = (Arc::clone(watch), Arc::clone(watch));
    StoresAnswer {
        groups: Arc::new(move || groups.home.groups_answer()),
        shadows: Arc::new(move || shadows.shadows_answer()),
    }
}

/// Returns the state of the gateway that the API shows to operators.
pub(super) fn operated(
    config: &Arc<Config>,
    tls: &Arc<TlsStore>,
    broker: &Broker,
    latest: Option<&Arc<LatestCache>>,
    watch: &Arc<StoreWatch>,
) -> Operated {
    let (broker, latest, watched, watch) =
        (broker.clone(), latest.cloned(), Arc::clone(watch), Arc::clone(watch));
    let retaining = broker.clone();
    Operated {
        version: env!("CARGO_PKG_VERSION"),
        started: clock::to_wall(clock::now()),
        bridges: watched.bridges.clone(),
        metrics: Box::new(move || with_process(home_rows(&broker, latest.as_deref(), &watched))),
        problems: Box::new(move || watch.problems() + &retained_problem(&retaining)),
        tls: Arc::clone(tls),
        config: Arc::clone(config),
    }
}

/// A limit of which 0 is none.
fn or_no_limit(most: u32) -> usize {
    if most == 0 { usize::MAX } else { most as usize }
}

pub(super) fn grpc_config(config: &Config) -> GrpcConfig {
    GrpcConfig {
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
        ..GrpcConfig::default()
    }
}
