//! The server without services of its own: connections, TLS, health, shutdown.

use arc_swap::ArcSwap;
use tokio::{io::AsyncReadExt, net::TcpStream, task::JoinHandle};
use tonic::{
    Code,
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint},
};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus as Answer, health_client::HealthClient,
};

use super::{health::SERVICES, *};
use crate::store::Condition;

struct Running {
    port: u16,
    stop: watch::Sender<bool>,
    server: JoinHandle<Result<(), GrpcError>>,
}

async fn start(tls: Option<SharedTls>, config: GrpcConfig) -> Running {
    start_with(tls, config, None).await
}

async fn start_with(
    tls: Option<SharedTls>,
    config: GrpcConfig,
    latest: Option<watch::Receiver<Condition>>,
) -> Running {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (stop, shutdown) = watch::channel(false);
    let health = HealthReporter::new();
    let router =
        Server::builder().add_service(HealthServer::new(HealthService::from_health_reporter(health.clone())));
    let health = Health { reporter: health, latest };
    let streams = Arc::new(Streams::new(1));
    let server = tokio::spawn(run(listener, tls, config, router, health, streams, shutdown));
    Running { port, stop, server }
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
    // Longer than the test: nothing but service beside it lets the other in.
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
    let descriptors = prost_types::FileDescriptorSet::decode(proto::DESCRIPTORS).unwrap();
    let mut services = Vec::new();
    let mut items = 0;
    for file in &descriptors.file {
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
async fn the_service_of_latest_values_is_healthy_only_with_its_store_and_the_server_always() {
    let (condition, latest) = watch::channel(Condition::Unknown);
    let running = start_with(None, GrpcConfig::default(), Some(latest)).await;
    let endpoint = Endpoint::try_from(format!("http://127.0.0.1:{}", running.port)).unwrap();
    let channel = endpoint.connect().await.unwrap();
    let down = Condition::Down { reason: "away".into(), since: tokio::time::Instant::now() };
    for (now, answer) in [
        (Condition::Unknown, Answer::NotServing),
        (Condition::Up, Answer::Serving),
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
