//! The backends' side: tonic services over the broker.
//!
//! ```text
//! services    gateway.v1 and the precedent
//! context     what the services share, and need of the rest of the process
//! publishing  what the Publisher does for a message
//! stream      receivers of messages behind Subscribe and WatchLatest
//! server      what stands around every call: connections, limits, deadlines, memory
//! bounds      of connections, calls and memory
//! error       why the server cannot run
//! ```
//!
//! Each module uses only those below it.
//!
//! Knows the broker, config and how to read latest values; must not know codec, session or net. Invariants: a call flushes its `Turn` before it awaits anything; every stream, request and page is bounded;
//! only `status` makes a gRPC status; a stream never slows a publisher.

mod bounds;
mod context;
pub mod counters;
mod error;
use crate::counters::count;
pub mod proto;
mod publishing;
mod server;
mod services;
mod stream;

use std::{pin::pin, sync::Arc, time::Duration};

use auth::backends::BackendAuthenticator;
use broker::{Account, Broker};
use tokio::{
    net::TcpListener,
    sync::{Semaphore, mpsc, watch},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, codec::CompressionEncoding::Gzip, service::Routes, transport::Server};
use tonic_health::{
    pb::health_server::HealthServer,
    server::{HealthReporter, HealthService},
};
use tower_layer::Layer as _;

use self::{
    bounds::{FRAME, windows},
    context::{Context, StoreProbe},
    proto::{
        precedent_server::published_packet_service_server::PublishedPacketServiceServer,
        server::{
            commands_server::CommandsServer, consumer_server::ConsumerServer, devices_server::DevicesServer,
            events_server::EventsServer, groups_server::GroupsServer, operations_server::OperationsServer,
            publisher_server::PublisherServer, security_server::SecurityServer,
            shadows_server::ShadowsServer, state_server::StateServer, subscriber_server::SubscriberServer,
        },
    },
    server::{
        access::Access, calls::CallLimit, connection_calls::SPARE, elsewhere::Elsewhere,
        request_body::RequestBounds, request_size::SizeLimit,
    },
    services::{
        commands::CommandsService,
        consumer::ConsumerService,
        devices::DevicesService,
        events::EventsService,
        groups::GroupsService,
        health::{Needs, ServiceHealth},
        operations::OperationsService,
        precedent::PrecedentService,
        publisher::PublisherService,
        security::SecurityService,
        shadows::ShadowsService,
        state::StateService,
        subscriber::SubscriberService,
    },
    stream::OpenStreams,
};

pub use bounds::GrpcConfig;
pub use context::{Hooks, LatestValues, Operated, StoresAnswer};
pub use error::GrpcError;
pub use publishing::{PublisherMemory, schedule::TopicSpread};
pub use server::{
    accept::GrpcTls,
    caller_memory::{CallerMemory, MemoryReservation},
    elsewhere::{AnswerElsewhere, CheckedCall},
    local::LocalService,
    methods,
    request_size::answer_in_kind,
};
pub use stream::RawMessage;

/// The answer to a call that is refused for `error`.
pub fn refused(error: grpc_messages::status::Error) -> tonic::codegen::http::Response<tonic::body::Body> {
    Status::from(error).into_http()
}

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
/// Largest header list of a request that HTTP/2 accepts.
const HEADER_LIST: u32 = 16 << 10;

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

    /// The API of a gateway that stands by: every call whose caller may make it is answered by `elsewhere`.
    pub fn standing_by(
        config: GrpcConfig,
        account: Arc<Account>,
        backends: Arc<BackendAuthenticator>,
        packet_timeout: Duration,
        elsewhere: AnswerElsewhere,
        shutdown: watch::Receiver<bool>,
    ) -> Self {
        let none: Arc<dyn Fn() -> bool + Send + Sync> = Arc::new(|| false);
        let needs =
            Needs { latest: None, groups: Some(Arc::clone(&none)), shadows: Some(none), commands: None };
        let bounds =
            RequestBounds { message: config.max_message_bytes, body: usize::MAX, timeout: packet_timeout };
        Self {
            limit: call_limit(&config, &account, bounds),
            access: Access::new(backends, config.calls()),
            routes: Routes::default().into_axum_router().fallback_service(Elsewhere(elsewhere)).into(),
            health: ServiceHealth::new(HealthReporter::new(), needs),
            streams: Arc::new(OpenStreams::new(config.streams(), Arc::clone(&account))),
            account,
            shutdown,
            config,
        }
    }

    /// The services for clients inside the process.
    pub fn local(&self) -> LocalService {
        LocalService::new(self.limit.layer(self.access.layer(self.routes.clone())))
    }

    /// The services for clients inside the process alone, such as those of a home. Health is told as on a listener, until `shutdown`.
    /// In a Tokio runtime.
    pub fn without_listener(self) -> LocalService {
        let local = self.local();
        let Self { mut health, streams, mut shutdown, .. } = self;
        tokio::spawn(async move {
            health.tell().await;
            tokio::select! {
                // A sender that is gone can never ask: it counts as asking.
                () = async { drop(shutdown.wait_for(|stop| *stop).await) } => {}
                () = health.follow() => {}
            }
            health.end().await;
            streams.close();
        });
        local
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
        .max_concurrent_streams(config.max_calls_per_connection.saturating_add(SPARE))
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
