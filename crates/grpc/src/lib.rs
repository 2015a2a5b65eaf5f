//! The backends' side: tonic services over the broker.
//!
//! ```text
//! server     what stands around every call: connections, limits, deadlines, memory
//! services   gateway.v1 and the precedent
//! stream     receivers of messages behind Subscribe and WatchLatest
//! messages   between proto messages and the gateway's types
//! ```
//!
//! Knows the broker, config and how to read latest values; must not know codec, session or net. Only this module knows
//! tonic. Invariants: a call flushes its `Turn` before it awaits anything; every stream, request and page is bounded;
//! only `status` makes a gRPC status; a stream never slows a publisher.

pub mod counters;
pub mod proto;
mod server;
mod services;
mod stream;

use std::{pin::pin, sync::Arc, time::Duration};

use broker::{Account, Broker};
use commands::CommandService;
use consumer_groups::ConsumerGroups;
use device_shadows::ShadowService;
use edge::reload::Reloads;
use gateway_core::clock::now;
use store::{PublisherStore, StoreError};
use telemetry::TraceClients;
use thiserror::Error;
use tokio::{
    net::TcpListener,
    sync::{Semaphore, mpsc, watch},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{codec::CompressionEncoding::Gzip, service::Routes, transport::Server};
use tonic_health::{
    pb::health_server::HealthServer,
    server::{HealthReporter, HealthService},
};
use tower_layer::Layer as _;
use values::History;

use auth::{Authority, abuse::BanRegistry};

use self::{
    counters::count,
    proto::{
        precedent_server::published_packet_service_server::PublishedPacketServiceServer,
        server::{
            commands_server::CommandsServer, consumer_server::ConsumerServer, devices_server::DevicesServer,
            events_server::EventsServer, groups_server::GroupsServer, operations_server::OperationsServer,
            publisher_server::PublisherServer, security_server::SecurityServer,
            shadows_server::ShadowsServer, state_server::StateServer, subscriber_server::SubscriberServer,
        },
    },
    server::{access::Access, calls::CallLimit, request_body::RequestBounds, request_size::SizeLimit},
    services::{
        commands::CommandsService,
        consumer::ConsumerService,
        devices::DevicesService,
        events::EventsService,
        groups::GroupsService,
        health::{Needs, ServiceHealth, StoreProbe},
        operations::OperationsService,
        precedent::PrecedentService,
        publisher::{
            PublisherService,
            keys::{KeyOptions, RequestKeys},
            scheduled::{Schedule, ScheduleOptions},
        },
        security::SecurityService,
        shadows::ShadowsService,
        state::StateService,
        subscriber::SubscriberService,
    },
    stream::OpenStreams,
};

use auth::backends::{BackendAuthenticator, callers::CallerPlaces};

pub use self::{
    server::{accept::GrpcTls, local::LocalService},
    services::{operations::Operated, state::LatestValues},
};

/// An event as the API shows it.
pub fn event_to_proto(event: broker::Event) -> proto::gateway::v1::Event {
    grpc_messages::answers::event(event)
}

/// An event as it is appended for consumer groups.
pub fn encode_event(event: broker::Event) -> Vec<u8> {
    prost::Message::encode_to_vec(&grpc_messages::answers::event(event))
}

/// Connections that were accepted and wait for tonic.
const ACCEPT_QUEUE: usize = 128;
/// Interval at which expired keys are removed.
const SWEEP: Duration = Duration::from_secs(1);
const STREAM_WINDOW: u32 = 1 << 20;
/// Bounds of the bytes that HTTP/2 may buffer of a connection's requests: the memory budget's quarter, divided by the
/// greatest number of connections, and never outside these bounds. The memory account is charged for the window once the
/// connection has shown credentials. The lower bound is the protocol's.
const CONNECTION_WINDOW: (u32, u32) = (65_535, 4 << 20);
/// Largest header list of a request that HTTP/2 accepts, and largest frame.
const HEADER_LIST: u32 = 16 << 10;
const FRAME: u32 = 16 << 10;

/// Bounds of the gRPC server.
#[derive(Debug, Clone, Copy)]
pub struct GrpcConfig {
    /// Largest request message, unpacked if it is compressed.
    pub max_message_bytes: usize,
    /// Connections at once. For one more the oldest without credentials is closed, or it is refused.
    pub max_connections: usize,
    /// The same from one address.
    pub max_connections_per_address: usize,
    /// Connections at once that have not said what HTTP/2 begins with; more wait.
    pub max_handshakes: usize,
    /// Time for that, TLS included.
    pub handshake_timeout: Duration,
    /// Calls and streams at once on one connection; more are answered RESOURCE_EXHAUSTED.
    pub max_calls_per_connection: u32,
    /// The same in all.
    pub max_calls: u32,
    /// The same of one caller.
    pub max_calls_per_caller: usize,
    /// Streams (Subscribe, Watch..., PublishStream) at once in all. Each may buffer `limits.stream_buffer`.
    pub max_streams: usize,
    /// The same of one caller.
    pub max_streams_per_caller: usize,
    /// Longest wait of a publish for SENT or ACKED when the call has no deadline.
    pub wait_timeout: Duration,
    /// Idempotency keys that are remembered at once, and for how long.
    pub max_keys: usize,
    pub key_time: Duration,
    /// Messages that wait for their time, and their bytes.
    pub max_scheduled: usize,
    pub scheduled_bytes: usize,
    /// Interval of HTTP/2 pings.
    pub keepalive_interval: Duration,
    /// A connection that leaves a ping unanswered for this long is closed.
    pub keepalive_timeout: Duration,
    /// At shutdown, how long calls may finish before they are cut off.
    pub drain_timeout: Duration,
    /// Bounds and defaults of consumer groups.
    pub groups: config::Groups,
}

impl GrpcConfig {
    /// Calls at once.
    fn calls(&self) -> CallerPlaces {
        CallerPlaces { most: self.max_calls as usize, per_caller: self.max_calls_per_caller }
    }

    /// Streams at once.
    fn streams(&self) -> CallerPlaces {
        CallerPlaces { most: self.max_streams, per_caller: self.max_streams_per_caller }
    }
}

impl Default for GrpcConfig {
    fn default() -> Self {
        Self {
            max_message_bytes: 16 << 20,
            max_connections: 1_000,
            max_connections_per_address: 500,
            max_handshakes: 1_000,
            handshake_timeout: Duration::from_secs(10),
            max_calls_per_connection: 1_000,
            max_calls: 20_000,
            max_calls_per_caller: usize::MAX,
            max_streams: 1_000,
            max_streams_per_caller: usize::MAX,
            wait_timeout: Duration::from_secs(10),
            max_keys: 100_000,
            key_time: Duration::from_mins(10),
            max_scheduled: 100_000,
            scheduled_bytes: 64 << 20,
            keepalive_interval: Duration::from_secs(30),
            keepalive_timeout: Duration::from_secs(20),
            drain_timeout: Duration::from_secs(5),
            groups: config::Groups::default(),
        }
    }
}

/// Memory of the Publisher: the keys of requests and their answers, and messages that wait for their time.
#[derive(Clone)]
pub struct PublisherMemory {
    keys: Arc<RequestKeys>,
    schedule: Arc<Schedule>,
}

impl PublisherMemory {
    /// Reads what is in `store`, or begins with nothing if there is none. From then on, until `shutdown` holds true, messages are
    /// published when their time has come, and keys are forgotten whose time is over.
    ///
    /// # Errors
    /// [`GrpcError::Store`].
    pub async fn open(
        config: &GrpcConfig,
        store: Option<Arc<dyn PublisherStore>>,
        broker: &Broker,
        shutdown: &watch::Receiver<bool>,
    ) -> Result<Self, GrpcError> {
        let keys = open_keys(config, store.clone(), broker, shutdown).await?;
        let schedule = open_schedule(config, store, broker, shutdown).await?;
        Ok(Self { keys, schedule })
    }
}

/// Reads the keys that are remembered, and lets those go whose time is over, until `shutdown`.
async fn open_keys(
    config: &GrpcConfig,
    store: Option<Arc<dyn PublisherStore>>,
    broker: &Broker,
    shutdown: &watch::Receiver<bool>,
) -> Result<Arc<RequestKeys>, GrpcError> {
    let options = KeyOptions { most: config.max_keys, time: config.key_time };
    let (account, stop) = (Arc::clone(broker.account()), shutdown.clone());
    let opened = tokio::task::spawn_blocking(move || RequestKeys::open(options, store, &account, stop)).await;
    let keys = opened.map_err(|e| StoreError::Unavailable(format!("read of keys did not finish: {e}")))??;
    let (swept, mut stop) = (Arc::clone(&keys), shutdown.clone());
    tokio::spawn(async move {
        while tokio::time::timeout(SWEEP, stop.wait_for(|stop| *stop)).await.is_err() {
            swept.sweep();
        }
    });
    Ok(keys)
}

/// Reads the messages that wait for their time, and publishes each when it comes, until `shutdown`.
async fn open_schedule(
    config: &GrpcConfig,
    store: Option<Arc<dyn PublisherStore>>,
    broker: &Broker,
    shutdown: &watch::Receiver<bool>,
) -> Result<Arc<Schedule>, GrpcError> {
    let options = ScheduleOptions { most: config.max_scheduled, bytes: config.scheduled_bytes };
    let reader = broker.clone();
    let opened = tokio::task::spawn_blocking(move || Schedule::open(options, store, &reader)).await;
    let schedule = opened.map_err(|e| StoreError::Unavailable(format!("read did not finish: {e}")))??;
    tokio::spawn(Arc::clone(&schedule).run(broker.clone(), shutdown.clone()));
    Ok(schedule)
}

/// Parts of the process that the server needs beyond the broker.
#[derive(Clone)]
pub struct Hooks {
    /// The devices that are traced.
    pub traces: &'static TraceClients,
    /// Latest values; `None` if they are switched off.
    pub latest: Option<Arc<dyn LatestValues>>,
    /// History of the topics that have one; `None` if it is switched off.
    pub history: Option<Arc<History>>,
    /// Callers and their rights.
    pub backends: Arc<BackendAuthenticator>,
    /// Files that can be read again.
    pub reloads: Arc<Reloads>,
    /// Rules for devices; `None` if everything is allowed.
    pub authority: Option<Arc<Authority>>,
    /// Bans on devices and addresses.
    pub bans: Arc<BanRegistry>,
    /// Memory of the Publisher.
    pub publisher: PublisherMemory,
    /// Consumer groups, or the key of the configuration that switches them off.
    pub groups: Result<Arc<ConsumerGroups>, &'static str>,
    /// Commands, likewise.
    pub commands: Result<Arc<CommandService>, &'static str>,
    /// Device shadows, or the key of the configuration that switches them off.
    pub shadows: Result<Arc<ShadowService>, &'static str>,
    /// Probes of the stores of groups and shadows.
    pub stores: StoresAnswer,
    /// State of the process that operators may see.
    pub operated: Arc<Operated>,
}

/// Probes that tell whether a store answers, for the stores that can fall silent.
#[derive(Clone)]
pub struct StoresAnswer {
    /// Of consumer groups.
    pub groups: StoreProbe,
    /// Of device shadows.
    pub shadows: StoreProbe,
}

/// Why the gRPC server stopped.
#[derive(Debug, Error)]
pub enum GrpcError {
    /// The records of the Publisher cannot be read.
    #[error("read what the publisher remembers")]
    Store(#[from] StoreError),
    /// Serving failed.
    #[error("serve grpc")]
    Serve(#[from] tonic::transport::Error),
    /// The descriptors for reflection are not usable.
    #[error("set up grpc reflection")]
    Reflection(#[from] tonic_reflection::server::Error),
}

/// State that every service shares.
#[derive(Clone)]
struct Context {
    broker: Broker,
    config: GrpcConfig,
    hooks: Hooks,
    streams: Arc<OpenStreams>,
    keys: Arc<RequestKeys>,
    schedule: Arc<Schedule>,
    /// Permit to walk over all sessions: one task at a time has it.
    walk: Arc<Semaphore>,
    shutdown: watch::Receiver<bool>,
}

/// The services and what stands around every call, for connections and for clients inside the process.
pub struct GrpcApi {
    config: GrpcConfig,
    account: Arc<Account>,
    limit: CallLimit,
    access: Access,
    routes: Routes,
    health: ServiceHealth,
    streams: Arc<OpenStreams>,
    shutdown: watch::Receiver<bool>,
}

impl GrpcApi {
    /// Calls are served until `shutdown` holds true, or its sender is gone.
    ///
    /// # Errors
    /// [`GrpcError::Reflection`].
    pub fn open(
        broker: Broker,
        config: GrpcConfig,
        hooks: Hooks,
        shutdown: watch::Receiver<bool>,
    ) -> Result<Self, GrpcError> {
        let streams = Arc::new(OpenStreams::new(config.streams(), Arc::clone(broker.account())));
        let walk = Arc::new(Semaphore::new(1));
        let PublisherMemory { keys, schedule } = hooks.publisher.clone();
        let context =
            Context { broker, keys, schedule, walk, config, hooks, streams, shutdown: shutdown.clone() };
        let reporter = HealthReporter::new();
        let routes = routes(&context, &reporter)?;
        let Context { broker, hooks, streams, .. } = context;
        let account = Arc::clone(broker.account());
        let timeout = broker.limits().packet_timeout.0;
        let bounds = RequestBounds { message: config.max_message_bytes, body: usize::MAX, timeout };
        Ok(Self {
            limit: call_limit(&config, &account, bounds),
            account,
            access: Access::new(Arc::clone(&hooks.backends), config.calls()),
            routes,
            health: ServiceHealth::new(reporter, needs(&hooks)),
            streams,
            shutdown,
            config,
        })
    }

    /// The services for clients inside the process.
    pub fn local(&self) -> LocalService {
        LocalService::new(self.limit.layer(self.access.layer(self.routes.clone())))
    }

    /// Serves connections until `shutdown`: then health says NOT_SERVING, streams end with UNAVAILABLE, and calls under way
    /// may finish within the drain timeout. `tls` may be replaced at any time; new connections get what it holds then. `None`
    /// is plaintext.
    pub async fn serve(self, listener: TcpListener, tls: Option<GrpcTls>) -> Result<(), GrpcError> {
        let Self { config, account, limit, access, routes, mut health, streams, mut shutdown } = self;
        health.tell().await;
        let (ready, incoming) = mpsc::channel(ACCEPT_QUEUE);
        let door = server::accept::door(&config);
        // However this ends, no connection outlives it.
        let _closing = CloseOnDrop(Arc::clone(&door));
        let windows = windows(&config, &account);
        tokio::spawn(server::accept::accept(listener, tls, config, account, door, ready));
        let router = server(&config, windows).layer(limit).layer(access).add_routes(routes);

        let stop = {
            let mut shutdown = shutdown.clone();
            async move {
                tokio::select! {
                    // A sender that is gone can never ask: it counts as asking.
                    () = async { drop(shutdown.wait_for(|stop| *stop).await) } => {}
                    () = health.follow() => {}
                }
                health.end().await;
                streams.close();
            }
        };
        let mut serving = pin!(router.serve_with_incoming_shutdown(ReceiverStream::new(incoming), stop));
        let drained = async {
            let _ = shutdown.wait_for(|stop| *stop).await;
            tokio::time::sleep(config.drain_timeout).await;
        };
        tokio::select! {
            result = &mut serving => Ok(result?),
            () = drained => {
                tracing::warn!("grpc calls cut off at shutdown");
                Ok(())
            }
        }
    }
}

/// Returns the conditions under which services can answer.
fn needs(hooks: &Hooks) -> Needs {
    let if_on = |is_on: bool, answers: &StoreProbe| is_on.then(|| Arc::clone(answers));
    Needs {
        latest: hooks.latest.as_ref().map(|latest| latest.condition()),
        groups: if_on(hooks.groups.is_ok(), &hooks.stores.groups),
        shadows: if_on(hooks.shadows.is_ok(), &hooks.stores.shadows),
        commands: hooks.commands.is_ok().then_some(()),
    }
}

fn call_limit(config: &GrpcConfig, account: &Arc<Account>, bounds: RequestBounds) -> CallLimit {
    CallLimit::new(config.max_calls_per_connection, config.max_calls, Arc::clone(account), bounds)
}

/// Ends every connection on drop.
struct CloseOnDrop(Arc<edge::door::Door>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The windows of a connection and of a stream, in bytes.
fn windows(config: &GrpcConfig, account: &Account) -> (u32, u32) {
    let share = account.limit() / 4 / config.max_connections.max(1);
    let (least, most) = CONNECTION_WINDOW;
    let connection = u32::try_from(share).unwrap_or(u32::MAX).clamp(least, most);
    (connection, connection.min(STREAM_WINDOW))
}

/// The settings of HTTP/2.
fn server(config: &GrpcConfig, (connection_window, stream_window): (u32, u32)) -> Server {
    Server::builder()
        .trace_fn(on_call)
        .http2_keepalive_interval(Some(config.keepalive_interval))
        .http2_keepalive_timeout(Some(config.keepalive_timeout))
        .http2_adaptive_window(Some(false))
        .initial_stream_window_size(stream_window)
        .initial_connection_window_size(connection_window)
        .max_frame_size(FRAME)
        .http2_max_header_list_size(HEADER_LIST)
        .max_concurrent_streams(config.max_calls_per_connection.saturating_add(server::calls::SPARE))
}

fn routes(context: &Context, health: &HealthReporter) -> Result<Routes, GrpcError> {
    let config = &context.config;
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            // Generic clients show the details of errors with it.
            .register_encoded_file_descriptor_set(tonic_types::pb::FILE_DESCRIPTOR_SET)
    };
    macro_rules! service {
        ($server:ident, $service:ident) => {
            SizeLimit(
                $server::new($service { context: context.clone() })
                    .max_decoding_message_size(config.max_message_bytes)
                    .accept_compressed(Gzip)
                    .send_compressed(Gzip),
            )
        };
    }
    // Names are short, and a request is in its answer.
    const NAMES: usize = 4 << 10;
    Ok(Routes::new(HealthServer::new(HealthService::from_health_reporter(health.clone())))
        .add_service(reflection().build_v1()?.max_decoding_message_size(NAMES))
        .add_service(reflection().build_v1alpha()?.max_decoding_message_size(NAMES))
        .add_service(service!(PublisherServer, PublisherService))
        .add_service(service!(SubscriberServer, SubscriberService))
        .add_service(service!(StateServer, StateService))
        .add_service(service!(DevicesServer, DevicesService))
        .add_service(service!(EventsServer, EventsService))
        .add_service(service!(GroupsServer, GroupsService))
        .add_service(service!(ConsumerServer, ConsumerService))
        .add_service(service!(CommandsServer, CommandsService))
        .add_service(service!(SecurityServer, SecurityService))
        .add_service(service!(ShadowsServer, ShadowsService))
        .add_service(service!(OperationsServer, OperationsService))
        .add_service(service!(PublishedPacketServiceServer, PrecedentService)))
}

/// Counts a call and gives it a span, which only an exporter reads.
fn on_call<B>(request: &tonic::codegen::http::Request<B>) -> tracing::Span {
    count(|c| c.grpc_calls.add(1));
    if cfg!(feature = "otel") {
        tracing::info_span!("call", method = request.uri().path())
    } else {
        tracing::Span::none()
    }
}

#[cfg(test)]
mod tests;
