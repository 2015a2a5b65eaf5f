//! The server without services of its own: connections, TLS, health, shutdown.

use std::time::Duration;

use arc_swap::ArcSwap;
use auth::backends::{BackendAuthenticator, callers::CallerPlaces};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinHandle,
};
use tonic::{
    Code, Status,
    codegen::BoxFuture,
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint},
};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus as Answer, health_client::HealthClient,
};
use tonic_types::StatusExt as _;
use values::StoreCondition;

use super::{services::health::SERVICES, *};

mod unauthenticated;

struct Running {
    port: u16,
    account: Arc<Account>,
    stop: watch::Sender<bool>,
    server: JoinHandle<Result<(), GrpcError>>,
}

/// All that services need is there.
fn met(latest: Option<watch::Receiver<StoreCondition>>) -> Needs {
    let there: StoreProbe = Arc::new(|| true);
    Needs { latest: Some(latest), groups: Some(Arc::clone(&there)), shadows: Some(there), commands: Some(()) }
}

/// One stream at once.
fn streams(account: &Arc<Account>) -> Arc<OpenStreams> {
    Arc::new(OpenStreams::new(CallerPlaces { most: 1, per_caller: 1 }, Arc::clone(account)))
}

async fn start(tls: Option<server::accept::SharedTls>, config: GrpcConfig) -> Running {
    start_with(tls, config, None).await
}

async fn start_with(
    tls: Option<server::accept::SharedTls>,
    config: GrpcConfig,
    latest: Option<watch::Receiver<StoreCondition>>,
) -> Running {
    start_for(&Default::default(), tls, config, latest).await
}

async fn start_for(
    backends: &config::Backends,
    tls: Option<server::accept::SharedTls>,
    config: GrpcConfig,
    latest: Option<watch::Receiver<StoreCondition>>,
) -> Running {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (stop, shutdown) = watch::channel(false);
    let health = HealthReporter::new();
    let routes = Routes::new(HealthServer::new(HealthService::from_health_reporter(health.clone())));
    let health = ServiceHealth::new(health, met(latest));
    let account = Arc::new(Account::new(64 << 20));
    let streams = streams(&account);
    let bounds = RequestBounds {
        message: config.max_message_bytes,
        body: usize::MAX,
        timeout: Duration::from_secs(30),
    };
    let limit = call_limit(&config, &account, bounds);
    let tls = tls.map(|settings| GrpcTls { settings, revocations: None });
    let access = Access::new(Arc::new(BackendAuthenticator::open(backends).unwrap()), config.calls());
    let known = Arc::clone(&account);
    let api = GrpcApi { config, account, limit, access, routes, health, streams, shutdown };
    let server = tokio::spawn(api.serve(listener, tls));
    Running { port, account: known, stop, server }
}

/// A new server certificate, and its PEM for clients.
fn certificate() -> (rustls::ServerConfig, String) {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let key = rustls::pki_types::PrivateKeyDer::Pkcs8(made.signing_key.serialize_der().into());
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .unwrap();
    (config, made.cert.pem())
}

async fn connect_tls(port: u16, ca: &str) -> Result<Channel, tonic::transport::Error> {
    let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca)).domain_name("localhost");
    Endpoint::try_from(format!("https://127.0.0.1:{port}")).unwrap().tls_config(tls)?.connect().await
}

async fn check(channel: Channel, service: &str) -> Result<Answer, Code> {
    let request = HealthCheckRequest { service: service.to_owned() };
    let answer = HealthClient::new(channel).check(request).await.map_err(|status| status.code())?;
    Ok(answer.into_inner().status())
}

#[tokio::test]
async fn health_names_every_service_and_shutdown_ends_the_server() {
    let running = start(None, GrpcConfig::default()).await;
    let endpoint = Endpoint::try_from(format!("http://127.0.0.1:{}", running.port)).unwrap();
    let channel = endpoint.connect().await.unwrap();
    for service in SERVICES {
        assert_eq!(check(channel.clone(), service).await, Ok(Answer::Serving), "{service}");
    }
    assert_eq!(check(channel.clone(), "nobody").await, Err(Code::NotFound));

    let mut watch =
        HealthClient::new(channel).watch(HealthCheckRequest::default()).await.unwrap().into_inner();
    assert_eq!(watch.message().await.unwrap().unwrap().status(), Answer::Serving);
    running.stop.send(true).unwrap();
    assert_eq!(watch.message().await.unwrap().unwrap().status(), Answer::NotServing);
    drop(watch);
    running.server.await.unwrap().unwrap();
}

/// The failure: UNIMPLEMENTED, as from a gateway of a version that lacks the method.
#[tokio::test]
async fn every_call_to_a_gateway_that_stands_by_is_refused() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let (_stop, shutdown) = watch::channel(false);
    let refusal = |_: CheckedCall| {
        let error = grpc_messages::status::Error::NotActive { address: "b:10000".to_owned() };
        Box::pin(std::future::ready(Ok(Status::from(error).into_http()))) as BoxFuture<_, _>
    };
    let api = GrpcApi::standing_by(
        GrpcConfig::default(),
        Arc::new(Account::new(64 << 20)),
        Arc::new(BackendAuthenticator::open(&Default::default()).unwrap()),
        Duration::from_secs(30),
        Arc::new(refusal),
        shutdown,
    );
    let server = tokio::spawn(api.serve(listener, None));
    let mut client = HealthClient::new(Endpoint::try_from(endpoint).unwrap().connect().await.unwrap());
    let refused = client.check(HealthCheckRequest::default()).await.unwrap_err();
    assert_eq!(refused.get_details_error_info().unwrap().reason, "NOT_ACTIVE");
    server.abort();
}

#[tokio::test]
async fn a_call_that_does_not_end_is_cut_off_after_the_drain_timeout() {
    let config = GrpcConfig { drain_timeout: Duration::from_millis(20), ..GrpcConfig::default() };
    let running = start(None, config).await;
    let endpoint = Endpoint::try_from(format!("http://127.0.0.1:{}", running.port)).unwrap();
    let mut client = HealthClient::new(endpoint.connect().await.unwrap());
    let _watch = client.watch(HealthCheckRequest::default()).await.unwrap();
    running.stop.send(true).unwrap();
    running.server.await.unwrap().unwrap();
}

#[tokio::test]
async fn certificates_are_replaced_for_new_connections_without_a_restart() {
    let (config, first) = certificate();
    let shared = Arc::new(ArcSwap::from_pointee(config));
    let running = start(Some(Arc::clone(&shared)), GrpcConfig::default()).await;
    let old = connect_tls(running.port, &first).await.unwrap();
    assert_eq!(check(old.clone(), "").await, Ok(Answer::Serving));

    let (config, second) = certificate();
    shared.store(Arc::new(config));
    let new = connect_tls(running.port, &second).await.unwrap();
    assert_eq!(check(new, "").await, Ok(Answer::Serving));
    assert!(connect_tls(running.port, &first).await.is_err());
    assert_eq!(check(old, "").await, Ok(Answer::Serving), "what is connected stays");
}

#[tokio::test]
async fn a_peer_that_never_finishes_its_handshake_blocks_nobody() {
    let (tls, ca) = certificate();
    // Longer than the test: the other gets in only if both are served at the same time.
    let config = GrpcConfig { handshake_timeout: Duration::from_secs(3_600), ..GrpcConfig::default() };
    let running = start(Some(Arc::new(ArcSwap::from_pointee(tls))), config).await;
    let _silent = TcpStream::connect(("127.0.0.1", running.port)).await.unwrap();
    let channel = connect_tls(running.port, &ca).await.unwrap();
    assert_eq!(check(channel, "").await, Ok(Answer::Serving));
}

#[tokio::test]
async fn a_peer_that_never_finishes_its_handshake_is_cut_off() {
    let (tls, _) = certificate();
    let config = GrpcConfig { handshake_timeout: Duration::from_millis(50), ..GrpcConfig::default() };
    let running = start(Some(Arc::new(ArcSwap::from_pointee(tls))), config).await;
    let mut silent = TcpStream::connect(("127.0.0.1", running.port)).await.unwrap();
    assert_eq!(silent.read(&mut [0; 1]).await.unwrap(), 0);
}

async fn connect(port: u16) -> Channel {
    Endpoint::try_from(format!("http://127.0.0.1:{port}")).unwrap().connect().await.unwrap()
}

async fn sockets(port: u16, count: usize, bytes: &[u8]) -> Vec<TcpStream> {
    let mut sockets = Vec::new();
    for _ in 0..count {
        let mut socket = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        socket.write_all(bytes).await.unwrap();
        sockets.push(socket);
    }
    sockets
}

/// The deadline is ten times as long as the patience of those who wait.
fn few(connections: usize, handshakes: usize) -> GrpcConfig {
    GrpcConfig {
        max_connections: connections,
        max_handshakes: handshakes,
        handshake_timeout: Duration::from_secs(20),
        ..GrpcConfig::default()
    }
}

#[tokio::test]
async fn unfinished_prefaces_leave_for_a_new_client_and_the_oldest_first() {
    for (connections, handshakes) in [(4, 100), (100, 4)] {
        let running = start(None, few(connections, handshakes)).await;
        let mut silent = sockets(running.port, 4, b"PRI * HTTP/2.0\r\n").await;
        assert_eq!(check(connect(running.port).await, "").await, Ok(Answer::Serving));
        // After what the server says first.
        let _ = silent[0].read_to_end(&mut Vec::new()).await;
    }
}

#[tokio::test]
async fn half_tls_handshakes_leave_for_a_new_client() {
    let (tls, ca) = certificate();
    let running = start(Some(Arc::new(ArcSwap::from_pointee(tls))), few(100, 4)).await;
    let mut half = sockets(running.port, 4, &[0x16, 3, 1, 2, 0, 1, 0, 1]).await;
    let channel = connect_tls(running.port, &ca).await.unwrap();
    assert_eq!(check(channel, "").await, Ok(Answer::Serving));
    let _ = half[0].read_to_end(&mut Vec::new()).await;
}

#[tokio::test]
async fn a_preface_has_a_deadline_and_a_client_without_calls_has_none() {
    let config = GrpcConfig { handshake_timeout: Duration::from_millis(200), ..GrpcConfig::default() };
    let running = start(None, config).await;
    let idle = connect(running.port).await;
    for bytes in [
        &b""[..],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\x06\x04\0\0\0\0\0",
    ] {
        let mut silent = sockets(running.port, 1, bytes).await;
        let mut rest = Vec::new();
        let _ = silent[0].read_to_end(&mut rest).await;
    }
    assert_eq!(check(idle, "").await, Ok(Answer::Serving), "it was there before them");
}

#[tokio::test]
async fn an_address_has_its_own_number_of_connections() {
    let config = GrpcConfig { max_connections_per_address: 1, ..GrpcConfig::default() };
    let running = start(None, config).await;
    let channel = connect(running.port).await;
    assert_eq!(check(channel.clone(), "").await, Ok(Answer::Serving));
    let mut refused = sockets(running.port, 1, b"").await;
    assert_eq!(refused[0].read(&mut [0; 1]).await.unwrap_or_default(), 0);
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
    let mut other = socket.connect(([127, 0, 0, 1], running.port).into()).await.unwrap();
    other.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    assert_ne!(other.read(&mut [0; 1]).await.unwrap(), 0, "the server's SETTINGS");
}

async fn watch(channel: &Channel) -> Result<tonic::Streaming<tonic_health::pb::HealthCheckResponse>, Status> {
    let answer = HealthClient::new(channel.clone()).watch(HealthCheckRequest::default()).await;
    answer.map(tonic::Response::into_inner)
}

#[tokio::test]
async fn a_call_beyond_its_connections_limit_is_refused_with_a_retry_time() {
    let config = GrpcConfig { max_calls_per_connection: 2, ..GrpcConfig::default() };
    let running = start(None, config).await;
    let channel = connect(running.port).await;
    let held = [watch(&channel).await.unwrap(), watch(&channel).await.unwrap()];
    // More than HTTP/2 lets through at once: none of them waits for those that are held.
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..2 * SPARE {
        let channel = channel.clone();
        calls.spawn(async move { watch(&channel).await.map(drop) });
    }
    while let Some(answer) = calls.join_next().await {
        let status = answer.unwrap().unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert_eq!(status.get_details_error_info().unwrap().reason, "TOO_MANY_CALLS");
        assert!(status.get_details_retry_info().is_some());
    }
    assert_eq!(check(connect(running.port).await, "").await, Ok(Answer::Serving), "another connection");
    drop(held);
    while watch(&channel).await.is_err() {}
}

#[tokio::test]
async fn calls_in_all_are_limited_and_health_is_answered_all_the_same() {
    let running = start(None, GrpcConfig { max_calls: 2, ..GrpcConfig::default() }).await;
    let (one, two) = (connect(running.port).await, connect(running.port).await);
    let held = [watch(&one).await.unwrap(), watch(&two).await.unwrap()];
    assert_eq!(watch(&one).await.unwrap_err().code(), Code::ResourceExhausted);
    assert_eq!(check(one.clone(), "").await, Ok(Answer::Serving));
    drop(held);
    while watch(&one).await.is_err() {}
}

#[tokio::test]
async fn no_connection_outlives_the_server() {
    let config = GrpcConfig { drain_timeout: Duration::from_millis(20), ..few(100, 100) };
    let running = start(None, config).await;
    let mut half = sockets(running.port, 1, b"PRI * HTTP/2.0\r\n").await;
    let channel = connect(running.port).await;
    let mut held = watch(&channel).await.unwrap();
    running.stop.send(true).unwrap();
    running.server.await.unwrap().unwrap();
    let mut rest = Vec::new();
    let _ = half[0].read_to_end(&mut rest).await;
    while let Ok(Some(_)) = held.message().await {}
}

#[tokio::test]
async fn connections_beyond_the_limit_are_closed() {
    let running = start(None, GrpcConfig { max_connections: 1, ..GrpcConfig::default() }).await;
    let endpoint = Endpoint::try_from(format!("http://127.0.0.1:{}", running.port)).unwrap();
    let channel = endpoint.connect().await.unwrap();
    assert_eq!(check(channel.clone(), "").await, Ok(Answer::Serving));
    let mut refused = TcpStream::connect(("127.0.0.1", running.port)).await.unwrap();
    assert_eq!(refused.read(&mut [0; 1]).await.unwrap(), 0);
    assert_eq!(check(channel, "").await, Ok(Answer::Serving));
}

#[test]
fn reflection_knows_every_service_and_every_item_has_a_comment() {
    use prost::Message as _;

    let descriptors = prost_types::FileDescriptorSet::decode(proto::DESCRIPTORS).unwrap();
    let mut services = Vec::new();
    let mut items = 0;
    for file in descriptors.file.iter().filter(|file| !file.package().starts_with("google.")) {
        for service in &file.service {
            services.push(format!("{}.{}", file.package(), service.name()));
        }
        let source = file.source_code_info.as_ref().unwrap();
        for location in &source.location {
            // Paths of even length name an item: message, field, enum, value, service, method, oneof.
            let item = matches!(
                location.path[..],
                [4, _] | [4, _, 2 | 8, _] | [5, _] | [5, _, 2, _] | [6, _] | [6, _, 2, _]
            );
            assert!(!item || location.leading_comments.is_some(), "{}: {:?}", file.name(), location.path);
            items += usize::from(item);
        }
    }
    assert!(items > 200, "{items}");
    services.sort();
    let mut expected: Vec<_> = SERVICES.iter().filter(|name| !name.is_empty()).collect();
    expected.sort();
    assert_eq!(services.iter().collect::<Vec<_>>(), expected.iter().map(|s| **s).collect::<Vec<_>>());
}

#[tokio::test]
async fn state_is_healthy_only_with_its_store_and_the_server_always() {
    let (condition, latest) = watch::channel(StoreCondition::Unknown);
    let running = start_with(None, GrpcConfig::default(), Some(latest)).await;
    let endpoint = Endpoint::try_from(format!("http://127.0.0.1:{}", running.port)).unwrap();
    let channel = endpoint.connect().await.unwrap();
    let down = StoreCondition::Down { reason: "away".into(), since: tokio::time::Instant::now() };
    for (now, answer) in [
        (StoreCondition::Unknown, Answer::NotServing),
        (StoreCondition::Up, Answer::Serving),
        (down, Answer::NotServing),
    ] {
        condition.send_replace(now);
        while check(channel.clone(), "gateway.v1.State").await != Ok(answer) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(check(channel.clone(), "").await, Ok(Answer::Serving));
    }
    running.stop.send(true).unwrap();
    drop(channel);
    running.server.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_call_inside_the_process_is_let_in_by_the_same_layers() {
    let token = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(token.path(), "").unwrap();
    let config = config::Backends { tokens: Some(token.path().to_owned()), ..Default::default() };
    let health = HealthReporter::new();
    let routes = Routes::new(HealthServer::new(HealthService::from_health_reporter(health.clone())));
    let account = Arc::new(Account::new(64 << 20));
    let bounds = RequestBounds { message: 1 << 20, body: usize::MAX, timeout: Duration::from_secs(30) };
    let api = GrpcApi {
        config: GrpcConfig::default(),
        limit: CallLimit::new(1, 1, Arc::clone(&account), bounds),
        streams: streams(&account),
        account,
        access: Access::new(
            Arc::new(BackendAuthenticator::open(&config).unwrap()),
            GrpcConfig::default().calls(),
        ),
        routes,
        health: ServiceHealth::new(health, met(None)),
        shutdown: watch::channel(false).1,
    };
    let local = api.local();
    let mut health = HealthClient::new(local.clone());
    assert!(health.check(HealthCheckRequest::default()).await.is_ok(), "anybody may ask for health");
    let mut state = proto::gateway::v1::state_client::StateClient::new(local);
    let denied = state.get_latest(proto::gateway::v1::GetLatestRequest::default()).await.unwrap_err();
    assert_eq!(denied.code(), Code::Unauthenticated);
}
