//! Logins a second of a whole gateway, clients included, by a password file and by services that take 20 ms: the figures of
//! docs/security/devices.md and docs/security/services.md. `cargo bench --bench logins`
#![expect(clippy::print_stdout, clippy::unwrap_used, reason = "a measurement")]

#[path = "../tests/support/client.rs"]
mod client;
#[path = "../tests/support/mod.rs"]
mod support;

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use access::passwords::{PasswordDigest, SALT_LEN, Scratch, with_user};
use bytes::Bytes;
use codec::Packet;
use gateway_core::Protocol;
use http_body_util::{BodyExt as _, Full};
use hyper::{Request, Response, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use mqtt_server::proto::hooks::v1::{
    AuthenticateRequest, AuthenticateResponse, AuthorizeRequest, AuthorizeResponse, Decision,
    OnEventsRequest, OnEventsResponse,
    hook_provider_server::{HookProvider, HookProviderServer},
};
use tokio::{net::TcpListener, runtime::Runtime, time::sleep};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Status, transport::Server as GrpcServer};

use client::{Client, Got, hello};
use support::{Server, write_secret};

/// Time that a service takes for an answer.
const SERVICE: Duration = Duration::from_millis(20);
const PASSWORD: &str = "correct-horse-7";
/// Clients at once, and logins of each, where a service decides.
const MANY: (usize, usize) = (100, 200);
/// The same where passwords are hashed.
const FEW: (usize, usize) = (8, 50);

/// Logs in as many clients at once as often as `(clients, logins)` says. Returns the logins of one second.
fn logins_a_second(server: &Server, (clients, logins): (usize, usize)) -> f64 {
    #[expect(clippy::disallowed_methods, reason = "it is what is measured")]
    let start = Instant::now();
    thread::scope(|scope| {
        for client in 0..clients {
            scope.spawn(move || {
                for _ in 0..logins {
                    let mut connect = hello(Protocol::V5, &format!("c{client}"));
                    connect.username = Some("ann".to_owned());
                    connect.password = Some(Bytes::from_static(PASSWORD.as_bytes()));
                    let mut client = Client::open(server.ports.tcp, Protocol::V5);
                    client.send(&Packet::Connect(Box::new(connect)));
                    assert_eq!(client.next(), Got::ConnAck(0));
                }
            });
        }
    });
    (clients * logins) as f64 / start.elapsed().as_secs_f64()
}

fn by_password() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("passwords");
    let digest = PasswordDigest::argon2id(PASSWORD.as_bytes(), &[7; SALT_LEN], &mut Scratch::default());
    write_secret(&file, with_user("", "ann", &digest));
    for threads in [1, 2] {
        // Each login is hashed, as the first of each device is.
        let toml = format!(
            "[auth]\npassword_file = \"{}\"\nhash_threads = {threads}\npassword_cache_ttl = \"0s\"\n",
            file.display()
        );
        let server = Server::start_with(&[], &toml);
        let before = server.metric("process_resident_memory_bytes");
        let rate = logins_a_second(&server, FEW);
        let grown = server.metric("process_resident_memory_bytes").saturating_sub(before) >> 20;
        println!("password, {threads} threads: {rate:.0} logins a second, {grown} MiB more");
    }
}

/// The section of a service, which is asked about each login.
fn section(name: &str, url: &str) -> String {
    format!(
        "[auth.{name}]\nurl = \"{url}\"\n[auth.{name}.limits]\ncache_ttl = \"0s\"\nstale_if_error = \"0s\"\n"
    )
}

fn listen(runtime: &Runtime) -> (TcpListener, String) {
    let socket = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let url = format!("http://{}", socket.local_addr().unwrap());
    (socket, url)
}

fn by_http() {
    let (runtime, asked) = (Runtime::new().unwrap(), Arc::new(AtomicUsize::new(0)));
    let (socket, url) = listen(&runtime);
    let counts = Arc::clone(&asked);
    runtime.spawn(async move {
        while let Ok((stream, _)) = socket.accept().await {
            let counts = Arc::clone(&counts);
            let service = service_fn(move |request: Request<Incoming>| {
                counts.fetch_add(1, Relaxed);
                async move {
                    let _ = request.into_body().collect().await;
                    sleep(SERVICE).await;
                    Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("{\"result\": \"allow\"}")))
                }
            });
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        }
    });
    let server = Server::start_with(&[], &section("http", &url));
    println!("service over HTTP: {:.0} logins a second", logins_a_second(&server, MANY));
    assert_eq!(asked.load(Relaxed), MANY.0 * MANY.1);
}

struct Provider(Arc<AtomicUsize>);

#[tonic::async_trait]
impl HookProvider for Provider {
    async fn authenticate(
        &self,
        _: tonic::Request<AuthenticateRequest>,
    ) -> Result<tonic::Response<AuthenticateResponse>, Status> {
        self.0.fetch_add(1, Relaxed);
        sleep(SERVICE).await;
        let decision = Decision::Allow.into();
        Ok(tonic::Response::new(AuthenticateResponse { decision, principal: None }))
    }

    async fn authorize(
        &self,
        _: tonic::Request<AuthorizeRequest>,
    ) -> Result<tonic::Response<AuthorizeResponse>, Status> {
        Err(Status::unimplemented("logins alone"))
    }

    async fn on_events(
        &self,
        _: tonic::Request<OnEventsRequest>,
    ) -> Result<tonic::Response<OnEventsResponse>, Status> {
        Err(Status::unimplemented("logins alone"))
    }
}

fn by_grpc() {
    let (runtime, asked) = (Runtime::new().unwrap(), Arc::new(AtomicUsize::new(0)));
    let (socket, url) = listen(&runtime);
    let service = HookProviderServer::new(Provider(Arc::clone(&asked)));
    runtime.spawn(
        GrpcServer::builder().add_service(service).serve_with_incoming(TcpListenerStream::new(socket)),
    );
    let server = Server::start_with(&[], &section("grpc", &url));
    println!("service over gRPC: {:.0} logins a second", logins_a_second(&server, MANY));
    assert_eq!(asked.load(Relaxed), MANY.0 * MANY.1);
}

fn main() {
    by_password();
    by_http();
    by_grpc();
}
