//! The gRPC service of the user (`gateway.hooks.v1.HookProvider`): what it is asked and told, and what becomes of
//! devices while it is away, slow, or talks nonsense.
//!
//! Long because the service itself, which each test tells how to behave, stands beside them.

use std::{
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use codec::Packet;
use gateway_core::{Protocol, QoS};
use mqtt_server::proto::{
    gateway,
    hooks::v1::{
        Action, AuthenticateRequest, AuthenticateResponse, AuthorizeRequest, AuthorizeResponse, ClaimValues,
        Decision, Method, OnEventsRequest, OnEventsResponse, Principal,
        hook_provider_server::{HookProvider, HookProviderServer},
    },
};
use parking_lot::Mutex;
use tokio::{net::TcpListener, runtime::Runtime};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{
    Code, Request, Response, Status,
    transport::{Certificate, Identity, Server as GrpcServer, ServerTlsConfig},
};

use crate::{
    client::{Client, Got},
    enhanced::{Said, auth, claims, connect, jwt, open, said},
    hooks::beside_odd_ones,
    login::{answer, login},
    support::{Server, until},
};

/// Behaviour of the service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Mood {
    /// Decides by the first letter of a user name or of a topic's last level: `a` is allowed, `d` denied, others ignored.
    #[default]
    Well,
    /// The same after 10 s.
    Slow,
    /// No decision, or one that nobody knows.
    Nonsense,
    /// Every call fails.
    Failing,
    /// Answers as soon as it is in another mood.
    Held,
}

#[derive(Default)]
struct Heard {
    mood: Mutex<Mood>,
    logins: Mutex<Vec<AuthenticateRequest>>,
    topics: Mutex<Vec<AuthorizeRequest>>,
    batches: Mutex<Vec<OnEventsRequest>>,
    /// Metadata `authorization` of the last call.
    bearer: Mutex<Option<String>>,
}

/// The service, in this process.
pub(crate) struct Provider {
    heard: Arc<Heard>,
    port: u16,
    tls: Option<ServerTlsConfig>,
    runtime: Option<Runtime>,
}

struct Service(Arc<Heard>);

impl Provider {
    pub(crate) fn start() -> Self {
        Self::start_with(None)
    }

    fn start_with(tls: Option<ServerTlsConfig>) -> Self {
        let mut provider = Self { heard: Arc::default(), port: 0, tls, runtime: None };
        provider.come_back();
        provider
    }

    /// Listens, at the port where it has listened before.
    fn come_back(&mut self) {
        let runtime = Runtime::new().expect("start a runtime");
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.port));
        let socket = runtime.block_on(TcpListener::bind(address)).expect("bind");
        self.port = socket.local_addr().expect("an address").port();
        let mut server = GrpcServer::builder();
        if let Some(tls) = &self.tls {
            server = server.tls_config(tls.clone()).expect("a TLS configuration");
        }
        let service = HookProviderServer::new(Service(Arc::clone(&self.heard)));
        runtime.spawn(server.add_service(service).serve_with_incoming(TcpListenerStream::new(socket)));
        self.runtime = Some(runtime);
    }

    /// Nobody listens any more, and every connection is closed.
    fn go_away(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(10));
        }
    }

    fn feel(&self, mood: Mood) {
        *self.heard.mood.lock() = mood;
    }

    /// `[auth.grpc]` for it.
    pub(crate) fn config(&self, more: &str, limits: &str) -> String {
        let port = self.port;
        format!("[auth.grpc]\nurl = \"http://127.0.0.1:{port}\"\n{more}\n[auth.grpc.limits]\n{limits}\n")
    }
}

impl Heard {
    async fn decide(&self, name: &str) -> Result<Decision, Status> {
        while *self.mood.lock() == Mood::Held {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        if let Some(code) = name.strip_prefix("odd-") {
            let code: i32 = code.parse().map_err(|_| Status::internal("no number"))?;
            return Err(Status::new(Code::from_i32(code), "odd"));
        }
        let mood = *self.mood.lock();
        match mood {
            Mood::Well | Mood::Held => {}
            Mood::Slow => tokio::time::sleep(Duration::from_secs(10)).await,
            Mood::Nonsense => return Ok(Decision::Unspecified),
            Mood::Failing => return Err(Status::internal("secret details")),
        }
        Ok(match name.chars().next() {
            Some('a') => Decision::Allow,
            Some('d') => Decision::Deny,
            _ => Decision::Ignore,
        })
    }

    fn note_bearer<T>(&self, request: &Request<T>) {
        let value = request.metadata().get("authorization").and_then(|value| value.to_str().ok());
        *self.bearer.lock() = value.map(str::to_owned);
    }

    /// Words for what it was told: kind and device.
    fn told(&self) -> Vec<String> {
        use gateway::v1::event::Detail;

        let batches = self.batches.lock();
        let events = batches.iter().flat_map(|batch| &batch.events);
        let word = |event: &gateway::v1::Event| {
            let kind = match event.detail.as_ref().expect("a kind") {
                Detail::Connected(_) => "connected",
                Detail::Disconnected(_) => "disconnected",
                Detail::Subscribed(_) => "subscribed",
                Detail::AuthFailed(_) => "auth_failed",
                _ => "other",
            };
            format!("{kind} {}", event.device_id)
        };
        events.map(word).collect()
    }
}

#[tonic::async_trait]
impl HookProvider for Service {
    async fn authenticate(
        &self,
        request: Request<AuthenticateRequest>,
    ) -> Result<Response<AuthenticateResponse>, Status> {
        self.0.note_bearer(&request);
        let request = request.into_inner();
        let name = request.username.clone().unwrap_or_default();
        self.0.logins.lock().push(request);
        let decision = self.0.decide(&name).await?.into();
        let principal = Principal {
            username: format!("{name}-proved"),
            groups: vec!["crew".to_owned()],
            claims: [("site".to_owned(), ClaimValues { values: vec!["north".to_owned()] })].into(),
            ..Principal::default()
        };
        Ok(Response::new(AuthenticateResponse { decision, principal: Some(principal) }))
    }

    async fn authorize(
        &self,
        request: Request<AuthorizeRequest>,
    ) -> Result<Response<AuthorizeResponse>, Status> {
        let request = request.into_inner();
        let name = request.topic.rsplit('/').next().unwrap_or_default().to_owned();
        self.0.topics.lock().push(request);
        let decision = self.0.decide(&name).await?.into();
        Ok(Response::new(AuthorizeResponse { decision }))
    }

    async fn on_events(
        &self,
        request: Request<OnEventsRequest>,
    ) -> Result<Response<OnEventsResponse>, Status> {
        let events = &request.get_ref().events;
        let odd = events.iter().find(|event| event.device_id.starts_with("odd-"));
        self.0.decide(odd.map_or("a", |event| event.device_id.as_str())).await?;
        self.0.batches.lock().push(request.into_inner());
        Ok(Response::new(OnEventsResponse {}))
    }
}

fn ask(server: &Server, client_id: &str, user: &str) -> Got {
    answer(server.ports.tcp, login(Protocol::V5, client_id, Some(user), Some("pw")))
}

#[test]
fn a_provider_is_asked_about_logins_and_says_who_it_is() {
    let provider = Provider::start();
    let dir = tempfile::tempdir().expect("make a directory");
    let rules = dir.path().join("rules.toml");
    let text = "[[rules]]\nallow = \"publish\"\ntopics = [\"%u/%{claim.site}/#\"]\ngroups = [\"crew\"]\n";
    std::fs::write(&rules, text).expect("write the rules");
    let limits = "cache_negative_ttl = \"0s\"\nstale_if_error = \"0s\"";
    let toml = format!("[authorization]\nrules = \"{}\"\n{}", rules.display(), provider.config("", limits));
    let server = Server::start_with(&[], &toml);
    assert_eq!(ask(&server, "c1", "ann"), Got::ConnAck(0));
    let asked = provider.heard.logins.lock()[0].clone();
    let plain = AuthenticateRequest {
        client_id: "c1".to_owned(),
        username: Some("ann".to_owned()),
        password: Some("pw".into()),
        certificate: None,
        peer: "127.0.0.1".to_owned(),
        listener: "test-tcp".to_owned(),
        method: Method::Password.into(),
    };
    assert_eq!(asked, plain);
    let mut ann = Client::connect_with(server.ports.tcp, login(Protocol::V5, "c1", Some("ann"), Some("pw")));
    assert_eq!(provider.heard.logins.lock().len(), 1, "the second time it was remembered");
    for (topic, code) in [("ann-proved/north/x", 0x10), ("ann/north/x", 0x87), ("ann-proved/south/x", 0x87)] {
        ann.publish(topic, b"m", QoS::AtLeastOnce, false);
        assert_eq!(ann.next(), Got::PubAck(code), "{topic}");
    }
    assert_eq!(ask(&server, "c1", "dan"), Got::ConnAck(0x87));
    assert_eq!(ask(&server, "c1", "eve"), Got::ConnAck(0x86), "ignored, and there is no other step");
    assert_eq!(answer(server.ports.tcp, login(Protocol::V5, "c2", None, None)), Got::ConnAck(0x87));
    let last = provider.heard.logins.lock().last().cloned().expect("a question");
    assert_eq!((last.username, last.password, last.method), (None, None, Method::None.into()));
    assert!(!server.log().contains("\"pw\""), "a password is in the log");
}

/// Over TLS both sides show a certificate, and the gateway a token; neither the token nor what the service writes is logged.
#[test]
fn a_provider_behind_tls_sees_certificate_and_token() {
    let dir = tempfile::tempdir().expect("make a directory");
    let path = |name: &str| dir.path().join(name);
    let (ca, issuer) = authority();
    for (name, text) in [("ca.crt", ca.clone()), ("token", "tell-nobody\n".to_owned())] {
        std::fs::write(path(name), text).expect("write a file");
    }
    let server_side = leaf(&issuer, "localhost");
    let own = leaf(&issuer, "gateway");
    std::fs::write(path("own.crt"), &own.0).expect("write a certificate");
    std::fs::write(path("own.key"), &own.1).expect("write a key");
    let tls = ServerTlsConfig::new()
        .identity(Identity::from_pem(server_side.0, server_side.1))
        .client_ca_root(Certificate::from_pem(ca));
    let provider = Provider::start_with(Some(tls));
    let config = |cert: bool| {
        let file = |key: &str, name: &str| format!("{key} = \"{}\"\n", path(name).display());
        let mut toml =
            format!("[auth.grpc]\nlimits.deadline = \"1s\"\nurl = \"https://localhost:{}\"\n", provider.port);
        toml += &(file("ca", "ca.crt") + &file("token_file", "token"));
        if cert {
            toml += &(file("cert", "own.crt") + &file("key", "own.key"));
        }
        toml
    };
    private(&path("token"), 0o644);
    private(&path("own.key"), 0o600);
    let (ok, said) = checked(dir.path(), &config(true));
    assert!(!ok && said.contains("auth.grpc.token_file") && said.contains("chmod 600"), "{said}");
    private(&path("token"), 0o600);
    let server = Server::start_with(&[], &config(true));
    assert_eq!(ask(&server, "c1", "ann"), Got::ConnAck(0));
    assert_eq!(provider.heard.bearer.lock().as_deref(), Some("Bearer tell-nobody"));
    // An unusable file leaves the former one in force.
    private(&path("own.key"), 0o644);
    server.signal("HUP");
    until(|| server.log().contains("auth.grpc.key"));
    assert_eq!(ask(&server, "c3", "ann"), Got::ConnAck(0));
    private(&path("own.key"), 0o600);
    std::fs::write(path("token"), "another\n").expect("write a token");
    server.signal("HUP");
    until(|| {
        let client_id = format!("c-{}", provider.heard.logins.lock().len());
        assert_eq!(ask(&server, &client_id, "ann"), Got::ConnAck(0));
        provider.heard.bearer.lock().as_deref() == Some("Bearer another")
    });
    provider.feel(Mood::Failing);
    assert_eq!(ask(&server, "c2", "ann"), Got::ConnAck(0x88));
    until(|| {
        ask(&server, "c2", "ann");
        server.log().contains("left alone")
    });
    let log = server.log();
    assert!(log.contains("Internal"), "{log}");
    assert!(
        !log.contains("tell-nobody") && !log.contains("another") && !log.contains("secret details"),
        "{log}"
    );
    provider.feel(Mood::Well);
    let without = Server::start_with(&[], &config(false));
    assert_eq!(ask(&without, "c1", "ann"), Got::ConnAck(0x88), "the provider wants a certificate");
}

fn private(path: &std::path::Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("change who may read");
}

/// Returns the verdict of `--check` on a configuration.
fn checked(dir: &std::path::Path, toml: &str) -> (bool, String) {
    let file = dir.join("checked.toml");
    std::fs::write(&file, toml).expect("write the configuration");
    let mut command = crate::support::command(env!("CARGO_BIN_EXE_mqtt-server"));
    command.args(["--non-tls", "--addr", "127.0.0.1:0", "--check", "--config"]).arg(&file);
    crate::support::run(&mut command, Duration::from_secs(60))
}

fn authority() -> (String, rcgen::Issuer<'static, rcgen::KeyPair>) {
    let mut params = rcgen::CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    params.key_usages = vec![rcgen::KeyUsagePurpose::KeyCertSign];
    params.distinguished_name.push(rcgen::DnType::CommonName, "hook CA");
    let key = rcgen::KeyPair::generate().expect("generate a key");
    let pem = params.self_signed(&key).expect("sign the authority").pem();
    (pem, rcgen::Issuer::new(params, key))
}

fn leaf(issuer: &rcgen::Issuer<'static, rcgen::KeyPair>, name: &str) -> (String, String) {
    let mut params = rcgen::CertificateParams::new(vec![name.to_owned()]).expect("name it");
    params.use_authority_key_identifier_extension = true;
    let key = rcgen::KeyPair::generate().expect("generate a key");
    (params.signed_by(&key, issuer).expect("sign it").pem(), key.serialize_pem())
}

/// Logins follow the policy in every mood of the service, connected clients notice nothing, and the service comes back
/// by itself.
#[test]
fn a_provider_that_fails_costs_its_own_logins_and_comes_back() {
    for mood in [None, Some(Mood::Slow), Some(Mood::Nonsense), Some(Mood::Failing)] {
        let mut provider = Provider::start();
        let limits = "cache_ttl = \"1ms\"\ncache_negative_ttl = \"1ms\"\ndeadline = \"200ms\"\nretry_after = \"100ms\"\nfailures = 3";
        let server = Server::start_with(&[], &provider.config("", limits));
        let mut connected =
            Client::connect_with(server.ports.tcp, login(Protocol::V5, "old", Some("ann"), Some("pw")));
        match mood {
            None => provider.go_away(),
            Some(mood) => provider.feel(mood),
        }
        let mut number = 0;
        let mut refused = || {
            number += 1;
            assert_eq!(ask(&server, &format!("new-{number}"), "ann"), Got::ConnAck(0x88), "{mood:?}");
        };
        // Answers that are none count only if there is nothing else for some time.
        until(|| {
            refused();
            server.log().contains("left alone")
        });
        let before = provider.heard.logins.lock().len();
        (0..100).for_each(|_| refused());
        let asked = provider.heard.logins.lock().len() - before;
        assert!(asked < 50, "{mood:?}: asked {asked} times, so that nobody would have left it alone");
        assert_eq!(connected.ping(), [], "{mood:?}");
        connected.publish_acked("t", b"m", false);
        drop(connected);
        // A known login gets in: better than nothing.
        assert_eq!(ask(&server, "old", "ann"), Got::ConnAck(0), "{mood:?}");
        match mood {
            None => provider.come_back(),
            Some(_) => provider.feel(Mood::Well),
        }
        until(|| ask(&server, "new", "ann") == Got::ConnAck(0));
        assert!(server.log().contains("answers again"), "{mood:?}");
    }
}

/// The failure: a stranger whose odd names the service answers with a status keeps every device out.
#[test]
fn odd_names_that_a_provider_answers_with_a_status_keep_nobody_else_out() {
    let provider = Provider::start();
    let server = Server::start_with(&[], &provider.config("", ""));
    let all = [
        (Code::InvalidArgument, 0x87, 100),
        (Code::OutOfRange, 0x87, 100),
        (Code::Internal, 0x88, 100),
        (Code::NotFound, 0x87, 10),
        (Code::FailedPrecondition, 0x87, 10),
        (Code::Unavailable, 0x88, 10),
        (Code::ResourceExhausted, 0x88, 10),
        (Code::Unimplemented, 0x88, 10),
        (Code::Unauthenticated, 0x88, 10),
        (Code::Unknown, 0x88, 10),
    ];
    let (mut denied, mut begin) = (0, 0);
    for (odd, code, rounds) in all {
        for round in begin..begin + rounds {
            let (strangers, good) = beside_odd_ones(&server, round, &format!("odd-{}", odd as i32), "ann");
            assert_eq!(good, Got::ConnAck(0), "good login {round} beside {odd:?}");
            assert_eq!(strangers, vec![Got::ConnAck(code); strangers.len()], "{odd:?}");
            denied += if code == 0x87 { strangers.len() } else { 0 };
        }
        begin += rounds;
    }
    assert_eq!(server.metric_of("gateway_auth_hook_total", "result=\"status\""), denied as u64);
    let log = server.log();
    assert!(
        log.contains("login denied, the service answers it with a status") && log.contains("InvalidArgument")
    );
    assert!(!log.contains("left alone"));
}

/// The failure: topics that a device makes up keep the service from being asked about those of all others.
#[test]
fn odd_topics_that_a_provider_answers_with_a_status_keep_no_other_out() {
    let (_provider, server, _dir) = topics("", "");
    let mut odd = Client::connect(server.ports.tcp, Protocol::V5, "odd");
    let mut good = Client::connect(server.ports.tcp, Protocol::V5, "good");
    for round in 0..20 {
        for code in [Code::InvalidArgument, Code::Internal] {
            for number in 0..6 {
                let topic = format!("{round}/{number}/odd-{}", code as i32);
                odd.publish(&topic, b"m", QoS::AtLeastOnce, false);
                assert_eq!(odd.next(), Got::PubAck(0x87), "{topic}");
            }
        }
        good.publish(&format!("{round}/a"), b"m", QoS::AtLeastOnce, false);
        assert_eq!(good.next(), Got::PubAck(0x10), "{round}");
    }
    assert!(server.log().contains("topic denied, the service answers it with a status"));
}

/// The failure: one event with a name that the service does not take holds up all others for ever.
#[test]
fn an_event_that_a_provider_answers_with_a_status_is_left_out_alone() {
    let provider = Provider::start();
    let more = "events = [\"connected\"]\nauthenticate = false";
    let server = Server::start_with(&[], &provider.config(more, ""));
    let mut expected = Vec::new();
    for number in 0..20 {
        for name in [format!("well-{number}"), format!("odd-{}", Code::InvalidArgument as i32)] {
            drop(Client::connect(server.ports.tcp, Protocol::V5, &name));
        }
        expected.push(format!("connected well-{number}"));
    }
    expected.push("connected last".to_owned());
    drop(Client::connect(server.ports.tcp, Protocol::V5, "last"));
    until(|| provider.heard.told().len() >= expected.len());
    assert_eq!(provider.heard.told(), expected);
    let batches = provider.heard.batches.lock();
    let sequence: Vec<u64> = batches.iter().map(|batch| batch.sequence).collect();
    assert!(sequence.is_sorted_by(|a, b| a + 1 == *b), "{sequence:?}");
    assert_eq!(batches.iter().map(|batch| batch.dropped).sum::<u64>(), 20);
    assert_eq!(server.metric_of("gateway_hook_events_total", "result=\"refused\""), 20);
}

/// The service comes and goes all the time.
#[test]
fn a_flapping_provider_never_ends_a_connection_or_the_gateway() {
    let mut provider = Provider::start();
    let limits =
        "cache_size = 1\ndeadline = \"300ms\"\nretry_after = \"10ms\"\nfailures = 1\nstale_if_error = \"0s\"";
    let events = "events = [\"connected\", \"disconnected\"]\nmax_events = 100";
    let server = Server::start_with(&[], &provider.config(events, limits));
    let mut connected =
        Client::connect_with(server.ports.tcp, login(Protocol::V5, "old", Some("ann"), Some("pw")));
    for round in 0..8 {
        provider.go_away();
        assert_eq!(ask(&server, &format!("away-{round}"), "ann"), Got::ConnAck(0x88));
        provider.come_back();
        until(|| ask(&server, &format!("back-{round}"), "ann") == Got::ConnAck(0));
        assert_eq!(connected.ping(), []);
    }
    until(|| provider.heard.told().contains(&"connected back-7".to_owned()));
}

/// Bytes that are no HTTP/2.
#[test]
fn a_provider_that_speaks_something_else_is_one_that_is_away() {
    let socket = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    let port = socket.local_addr().expect("an address").port();
    std::thread::spawn(move || {
        for stream in socket.incoming() {
            let Ok(mut stream) = stream else { return };
            let _ = stream.read(&mut [0; 64]);
            let _ = stream
                .write_all(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 2000000000\r\n\r\n\0\xff\xff\xff");
        }
    });
    for (on_error, code) in [("refuse", 0x88), ("allow", 0), ("next", 0x86)] {
        let toml = format!("[auth.grpc]\nurl = \"http://127.0.0.1:{port}\"\non_error = \"{on_error}\"\n");
        let server = Server::start_with(&[], &toml);
        assert_eq!(ask(&server, "c1", "ann"), Got::ConnAck(code), "{on_error}");
    }
}

#[test]
fn events_arrive_in_order_and_what_was_not_taken_comes_again() {
    let mut provider = Provider::start();
    let more = "events = [\"connected\", \"disconnected\", \"subscribed\", \"auth_failed\"]";
    // So long that no answer is given up for its time on a loaded machine: its batch would be told twice.
    let limits = "retry_after = \"50ms\"\ndeadline = \"10s\"";
    let mut server = Server::start_with(&[], &provider.config(more, limits));
    let told = |provider: &Provider, until_then: &str| {
        until(|| provider.heard.told().iter().any(|word| word == until_then));
        std::mem::take(&mut *provider.heard.batches.lock())
    };
    let words = |batches: &[OnEventsRequest]| {
        let heard = Heard::default();
        *heard.batches.lock() = batches.to_vec();
        heard.told()
    };
    let mut ann = Client::connect_with(server.ports.tcp, login(Protocol::V5, "c1", Some("ann"), Some("pw")));
    ann.subscribe("t");
    assert_eq!(ask(&server, "c2", "dan"), Got::ConnAck(0x87));
    drop(ann);
    let batches = told(&provider, "disconnected c1");
    assert_eq!(words(&batches), ["connected c1", "subscribed c1", "auth_failed c2", "disconnected c1"]);
    // While it fails nothing is lost, as long as there is room; and what it had taken is not told again.
    for away in [false, true] {
        let failures = server.metric("gateway_hook_event_failures_total");
        if away {
            provider.go_away();
        } else {
            provider.feel(Mood::Failing);
        }
        let mut ann =
            Client::connect_with(server.ports.tcp, login(Protocol::V5, "c1", Some("ann"), Some("pw")));
        until(|| server.metric("gateway_hook_event_failures_total") > failures);
        ann.subscribe("t");
        drop(ann);
        if away {
            provider.come_back();
        } else {
            provider.feel(Mood::Well);
        }
        let batches = told(&provider, "disconnected c1");
        assert_eq!(words(&batches), ["connected c1", "subscribed c1", "disconnected c1"], "away: {away}");
        assert!(batches.iter().all(|batch| batch.dropped == 0));
    }
    // The last are told at the end.
    let _ann = Client::connect_with(server.ports.tcp, login(Protocol::V5, "c9", Some("ann"), Some("pw")));
    assert!(server.stop());
    assert_eq!(words(&told(&provider, "disconnected c9")), ["connected c9", "disconnected c9"]);
}

/// Events that do not fit meanwhile are dropped, oldest first, and counted: here and for the service.
#[test]
fn events_beyond_the_queue_are_dropped_and_counted() {
    let provider = Provider::start();
    let more = "events = [\"connected\"]\nmax_events = 10";
    let limits = "retry_after = \"50ms\"\nfailures = 1000";
    let server = Server::start_with(&[], &provider.config(more, limits));
    provider.feel(Mood::Failing);
    // One in a batch that is sent again and again, the others behind it.
    assert_eq!(ask(&server, "c0", "ann"), Got::ConnAck(0x88));
    provider.feel(Mood::Well);
    assert_eq!(ask(&server, "c0", "ann"), Got::ConnAck(0));
    until(|| provider.heard.told() == ["connected c0"]);
    for number in 1..=30 {
        let mut connect = login(Protocol::V5, "c", Some("ann"), Some("pw"));
        connect.clean_start = true;
        if number == 1 {
            assert_eq!(answer(server.ports.tcp, connect), Got::ConnAck(0));
            provider.feel(Mood::Failing);
            until(|| server.metric("gateway_hook_event_failures_total") > 0);
        } else {
            assert_eq!(answer(server.ports.tcp, connect), Got::ConnAck(0), "remembered");
        }
    }
    until(|| server.metric("gateway_hook_events_total") >= 19);
    provider.feel(Mood::Well);
    until(|| provider.heard.told().len() >= 12);
    let batches = provider.heard.batches.lock();
    let sequence: Vec<u64> = batches.iter().map(|batch| batch.sequence).collect();
    assert!(sequence.is_sorted_by(|a, b| a + 1 == *b), "{sequence:?}");
    let dropped: u64 = batches.iter().map(|batch| batch.dropped).sum();
    let arrived: usize = batches.iter().map(|batch| batch.events.len()).sum();
    assert_eq!((arrived as u64 + dropped, dropped > 0), (31, true), "{dropped} dropped");
    let page = server.http_get("/metrics").expect("read the metrics");
    let row = format!("gateway_hook_events_total{{result=\"queue_full\"}} {dropped}");
    assert!(page.contains(&row), "{row} is not in {page}");
}

/// A provider that is asked about topics alone, and a server where the rules name `open/#` and `shut/#`.
fn topics(more: &str, limits: &str) -> (Provider, Server, tempfile::TempDir) {
    let provider = Provider::start();
    let dir = tempfile::tempdir().expect("make a directory");
    let rules = dir.path().join("rules.toml");
    let text = "[[rules]]\ndeny = \"all\"\ntopics = [\"shut/#\"]\n[[rules]]\ndeny = \"subscribe\"\ntopics = [\"+/shut/#\"]\n[[rules]]\nallow = \"all\"\ntopics = [\"open/#\"]\n";
    std::fs::write(&rules, text).expect("write the rules");
    let toml = format!(
        "[authorization]\nrules = \"{}\"\n{}",
        rules.display(),
        provider.config(&format!("authenticate = false\nauthorize = true\n{more}"), limits)
    );
    (provider, Server::start_with(&[], &toml), dir)
}

fn asked(provider: &Provider) -> Vec<(Action, String)> {
    let topics = std::mem::take(&mut *provider.heard.topics.lock());
    topics.into_iter().map(|request| (request.action(), request.topic)).collect()
}

#[test]
fn a_provider_decides_where_no_rule_does_and_is_remembered() {
    let (provider, server, _dir) = topics("", "");
    let mut client = Client::connect(server.ports.tcp, Protocol::V5, "c1");
    let publish = |client: &mut Client, topic: &str, retain: bool| {
        client.publish(topic, b"m", QoS::AtLeastOnce, retain);
        client.next()
    };
    for (topic, code) in [("open/x", 0x10), ("shut/a", 0x87)] {
        assert_eq!(publish(&mut client, topic, false), Got::PubAck(code), "{topic}");
    }
    assert_eq!((client.subscribe("open/x"), client.subscribe("shut/a")), (0, 0x87));
    assert_eq!(asked(&provider), [], "the rules have decided");
    for _ in 0..3 {
        for (topic, code) in [("t/a", 0x10), ("t/d", 0x87), ("t/ignored", 0x87)] {
            assert_eq!(publish(&mut client, topic, false), Got::PubAck(code), "{topic}");
        }
        assert_eq!(
            (client.subscribe("s/a"), client.subscribe("s/d"), client.subscribe("s/i")),
            (0, 0x87, 0x87)
        );
    }
    let both = |topic: &str, action| (action, topic.to_owned());
    let published = ["t/a", "t/d", "t/ignored"].map(|topic| both(topic, Action::Publish));
    let subscribed = ["s/a", "s/d", "s/i"].map(|topic| both(topic, Action::Subscribe));
    assert_eq!(asked(&provider), [published, subscribed].concat());
    // Another question about the same topic.
    assert_eq!(publish(&mut client, "t/a", true), Got::PubAck(0x10));
    assert_eq!(client.subscribe_with("$share/g/s/a", QoS::AtLeastOnce, None), 1);
    let last = provider.heard.topics.lock().clone();
    assert_eq!(last.len(), 2, "{last:?}");
    assert!(last[0].retain && last[0].subject.as_ref().is_some_and(|subject| subject.client_id == "c1"));
    assert_eq!((last[1].share_name.as_str(), last[1].topic.as_str()), ("g", "s/a"));
    // More topics than a connection remembers, and one that is too long to be remembered.
    for number in 0..20 {
        assert_eq!(publish(&mut client, &format!("{number}/a"), false), Got::PubAck(0x10));
    }
    let long = format!("{}/a", "x".repeat(1000));
    assert_eq!(publish(&mut client, &long, false), Got::PubAck(0x10));
    let before = server.metric("mqtt_messages_received_total");
    assert_eq!(publish(&mut client, "never/asked/a", false), Got::PubAck(0x10));
    assert_eq!(server.metric("mqtt_messages_received_total"), before + 1, "counted once");
}

/// The failure: what the provider has allowed is lost with who the client was, or is kept whoever it is now.
#[test]
fn who_logs_in_again_while_connected_is_asked_about_again() {
    let provider = Provider::start();
    let dir = tempfile::tempdir().expect("make a directory");
    let rules = dir.path().join("rules.toml");
    std::fs::write(&rules, "[[rules]]\nallow = \"all\"\ntopics = [\"open/#\"]\n").expect("write the rules");
    let more = format!(
        "[authorization]\nrules = \"{}\"\n{}",
        rules.display(),
        provider.config("authenticate = false\nauthorize = true", "")
    );
    let server = Server::start_with(&[], &jwt(&dir.path().join("secret"), &more));
    let mut client = open(&server, connect("d1", "JWT", claims(3600, &["a"]).as_bytes()));
    assert_eq!(said(&mut client, "JWT"), Said::Accepted(None));
    assert_eq!((client.subscribe("t/a"), client.subscribe("open/x"), client.subscribe("t/d")), (0, 0, 0x87));
    let publish = |client: &mut Client| {
        client.publish("t/a", b"m", QoS::AtLeastOnce, false);
        let mut came = [client.next(), client.next()];
        came.sort_by_key(|got| matches!(got, Got::PubAck(_)));
        assert_eq!(came, [Got::Publish("t/a".to_owned(), b"m".to_vec()), Got::PubAck(0)]);
    };
    publish(&mut client);
    let _ = asked(&provider);
    client.send(&auth(0x19, "JWT", claims(3600, &["b"]).as_bytes()));
    assert_eq!(said(&mut client, "JWT"), Said::Auth(0, Vec::new()));
    let groups = |request: &AuthorizeRequest| {
        let principal = request.subject.as_ref().and_then(|subject| subject.principal.clone());
        principal.expect("a principal").groups
    };
    assert!(provider.heard.topics.lock().iter().all(|request| groups(request) == ["b"]));
    assert_eq!(asked(&provider), [(Action::Subscribe, "t/a".to_owned())]);
    publish(&mut client);
    assert_eq!(asked(&provider), [(Action::Publish, "t/a".to_owned())], "and no longer what was remembered");
    // While it waits for an answer the client subscribes to more, and that is asked about, too.
    provider.feel(Mood::Held);
    client.send(&auth(0x19, "JWT", claims(3600, &["c"]).as_bytes()));
    until(|| provider.heard.topics.lock().len() == 1);
    client.send(&Packet::Unsubscribe(codec::Unsubscribe {
        packet_id: 5,
        user: Vec::new(),
        filters: vec!["open/x".to_owned()],
    }));
    assert_eq!(client.next(), Got::Other(0xb0));
    provider.feel(Mood::Well);
    assert_eq!(said(&mut client, "JWT"), Said::Auth(0, Vec::new()));
    publish(&mut client);
    // Nobody says what it may have: what it had stays.
    provider.feel(Mood::Failing);
    client.send(&auth(0x19, "JWT", claims(3600, &["d"]).as_bytes()));
    assert_eq!(said(&mut client, "JWT"), Said::Auth(0, Vec::new()));
    provider.feel(Mood::Well);
    publish(&mut client);
}

/// While an answer is outstanding its own connection waits, and nobody else; what it has sent is handled in order.
#[test]
fn only_the_connection_that_asks_waits_for_the_provider() {
    let (provider, server, _dir) = topics("", "deadline = \"60s\"");
    let mut other = Client::connect(server.ports.tcp, Protocol::V5, "other");
    let mut secure: Vec<Client> = (0..8)
        .map(|number| Client::connect(server.ports.tcp, Protocol::V5, &format!("waits-{number}")))
        .collect();
    provider.feel(Mood::Held);
    for client in &mut secure {
        client.publish("t/a", b"1", QoS::AtLeastOnce, false);
        client.publish("t/d", b"2", QoS::AtLeastOnce, false);
        client.send(&Packet::PingReq);
    }
    until(|| provider.heard.topics.lock().len() == 8);
    for _ in 0..20 {
        other.publish_acked("open/x", b"m", false);
        assert_eq!(other.ping(), []);
    }
    assert_eq!(provider.heard.topics.lock().len(), 8, "one question at a time for each connection");
    provider.feel(Mood::Well);
    for client in &mut secure {
        assert_eq!(
            [client.next(), client.next(), client.next()],
            [Got::PubAck(0x10), Got::PubAck(0x87), Got::PingResp]
        );
    }
    // One that goes meanwhile leaves nothing behind.
    provider.feel(Mood::Held);
    let mut gone = Client::connect(server.ports.tcp, Protocol::V5, "gone");
    gone.publish("u/a", b"1", QoS::AtLeastOnce, false);
    until(|| provider.heard.topics.lock().len() == 17);
    let mut successor = Client::connect(server.ports.tcp, Protocol::V5, "gone");
    assert_eq!(successor.ping(), []);
    assert_eq!(gone.next(), Got::Disconnect(0x8E));
    provider.feel(Mood::Well);
    successor.publish("u/a", b"1", QoS::AtLeastOnce, false);
    assert_eq!(successor.next(), Got::PubAck(0x10));
}

/// An allowed subscription gets its messages, kept ones too, unless a rule denies their topic; and nothing after its end.
#[test]
fn a_subscription_that_the_provider_allows_gets_what_no_rule_denies() {
    let (provider, server, _dir) = topics("", "");
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "p");
    publisher.publish("s/a", b"kept", QoS::AtLeastOnce, true);
    assert_eq!(publisher.next(), Got::PubAck(0x10));
    let mut client = Client::connect(server.ports.tcp, Protocol::V5, "c");
    assert_eq!(client.subscribe("s/a"), 0);
    assert_eq!(client.next(), Got::Publish("s/a".to_owned(), b"kept".to_vec()));
    // The last level of the filter decides here: of `any/#` it is `#`, which nobody allows.
    assert_eq!(client.subscribe("any/#"), 0x87);
    assert_eq!(client.subscribe("+/+/a"), 0);
    for topic in ["x/y/a", "x/shut/a", "z/y/a"] {
        publisher.publish_acked(topic, b"m", false);
    }
    assert_eq!(client.next(), Got::Publish("x/y/a".to_owned(), b"m".to_vec()));
    assert_eq!(client.next(), Got::Publish("z/y/a".to_owned(), b"m".to_vec()));
    assert_eq!(client.ping(), []);
    let subscribed = asked(&provider).into_iter().filter(|(action, _)| *action == Action::Subscribe);
    assert_eq!(subscribed.count(), 3, "not asked about each message");
}

/// The failure: each new topic is held against any number of filters, in the time of whoever publishes it.
#[test]
fn a_provider_allows_a_session_no_more_than_64_wildcards() {
    let (_provider, server, dir) = topics("", "");
    let persistent = || {
        let mut connect = login(Protocol::V5, "many", None, None);
        (connect.clean_start, connect.session_expiry) = (false, Some(3600));
        connect
    };
    let mut client = Client::connect_with(server.ports.tcp, persistent());
    for number in 0..64 {
        let filter = if number % 2 == 0 { format!("{number}/+/a") } else { format!("$share/g/{number}/a") };
        assert_eq!(client.subscribe(&filter), 0, "{filter}");
    }
    let refused = server.metric("mqtt_subscriptions_refused_total");
    assert_eq!([client.subscribe("+/64/a"), client.subscribe("$share/g/65/a")], [0x97; 2]);
    assert_eq!(server.metric("mqtt_subscriptions_refused_total"), refused + 2);
    assert_eq!(client.subscribe("0/+/a"), 0, "it has that one");
    assert_eq!([client.subscribe("66/a"), client.subscribe("open/x/+/a")], [0; 2], "these count for nothing");
    let mut old = Client::connect(server.ports.tcp, Protocol::V4, "old");
    for number in 0..64 {
        assert_eq!(old.subscribe(&format!("+/{number}/a")), 0);
    }
    assert_eq!(old.subscribe("+/64/a"), 0x80);
    // One that goes makes room, and a refused one has left nothing.
    let filters = vec!["$share/g/1/a".to_owned()];
    client.send(&Packet::Unsubscribe(codec::Unsubscribe { packet_id: 5, user: Vec::new(), filters }));
    assert_eq!(client.next(), Got::Other(0xb0));
    assert_eq!([client.subscribe("+/64/a"), client.subscribe("+/65/a")], [0, 0x97]);
    for number in 0..10 {
        assert_eq!(client.subscribe(&format!("open/x/{number}")), 0, "a rule names it");
    }
    // After the session is resumed, only the service can allow the filters that the rules had allowed.
    drop(client);
    std::fs::write(dir.path().join("rules.toml"), "").expect("write the rules");
    server.signal("HUP");
    until(|| old.subscribe("open/d") == 0x80);
    let refused = server.metric("mqtt_subscriptions_refused_total");
    let mut client = Client::connect_with(server.ports.tcp, persistent());
    assert_eq!(server.metric("mqtt_subscriptions_refused_total"), refused + 1, "open/x/+/a is one too many");
    assert!(server.log().contains("allows a session no more with wildcards"));
    assert_eq!(client.subscribe("+/65/a"), 0x97);
    old.publish_acked("66/a", b"m", false);
    assert_eq!(client.next(), Got::Publish("66/a".to_owned(), b"m".to_vec()));
}

/// Messages that wait for a session are not lost while nobody can say whether it still may have them.
#[test]
fn a_resumed_session_is_asked_about_before_it_is_answered() {
    let limits = "deadline = \"300ms\"\nretry_after = \"20ms\"";
    let (mut provider, server, _dir) = topics("", limits);
    let persistent = || {
        let mut connect = login(Protocol::V5, "sleeper", None, None);
        connect.clean_start = false;
        connect.session_expiry = Some(3600);
        connect
    };
    let mut client = Client::connect_with(server.ports.tcp, persistent());
    for filter in ["q/a", "open/q"] {
        assert_eq!(client.subscribe_with(filter, QoS::AtLeastOnce, None), 1);
    }
    drop(client);
    until(|| server.metric("mqtt_connections") == 0);
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "p");
    publisher.publish_acked("q/a", b"waits", false);
    drop(publisher);
    // Nothing is remembered after that.
    let toml = std::fs::read_to_string(server.dir().join("test.toml")).expect("read the configuration");
    let toml = toml.split("[[listeners]]").next().expect("a beginning").to_owned();
    let server = server.stop_and_restart(&[], &toml);
    provider.go_away();
    assert_eq!(answer(server.ports.tcp, persistent()), Got::ConnAck(0x88));
    provider.come_back();
    until(|| {
        let mut client = Client::open(server.ports.tcp, Protocol::V5);
        client.send(&Packet::Connect(Box::new(persistent())));
        client.next() == Got::ConnAck(0) && client.next() == Got::Publish("q/a".to_owned(), b"waits".to_vec())
    });
    let last = asked(&provider);
    assert!(last.contains(&(Action::Subscribe, "q/a".to_owned())), "{last:?}");
    assert!(!last.contains(&(Action::Subscribe, "open/q".to_owned())), "the rules name it");
}

#[test]
fn topics_that_nobody_can_be_asked_about_are_decided_by_the_policy() {
    for (policy, code, granted) in [("refuse", 0x87, 0x87), ("allow", 0x10, 0)] {
        let (mut provider, server, _dir) = topics(
            &format!("authorize_on_error = \"{policy}\""),
            "deadline = \"300ms\"\nretry_after = \"20ms\"",
        );
        let mut client = Client::connect(server.ports.tcp, Protocol::V5, "c");
        client.publish("before/a", b"m", QoS::AtLeastOnce, false);
        assert_eq!(client.next(), Got::PubAck(0x10));
        provider.go_away();
        client.publish("after/a", b"m", QoS::AtLeastOnce, false);
        assert_eq!((client.next(), client.subscribe("after/a")), (Got::PubAck(code), granted), "{policy}");
        client.publish("before/a", b"m", QoS::AtLeastOnce, false);
        assert_eq!(client.next(), Got::PubAck(0x10), "it is remembered");
        let mut connect = login(Protocol::V5, "w", None, None);
        connect.will = Some(crate::client::will("will/a", b"gone"));
        let refused = if policy == "refuse" { 0x87 } else { 0 };
        assert_eq!(answer(server.ports.tcp, connect.clone()), Got::ConnAck(refused), "{policy}");
        provider.come_back();
        until(|| answer(server.ports.tcp, connect.clone()) == Got::ConnAck(0));
        // Nobody is asked again when it is published.
        let mut heir = Client::connect(server.ports.tcp, Protocol::V5, "h");
        assert_eq!(heir.subscribe("will/a"), 0);
        let mut leaves = Client::connect_with(server.ports.tcp, connect.clone());
        provider.feel(Mood::Nonsense);
        leaves.send(&Packet::PingReq);
        drop(leaves);
        assert_eq!(heir.next(), Got::Publish("will/a".to_owned(), b"gone".to_vec()));
        provider.feel(Mood::Well);
        connect.will = Some(crate::client::will("will/d", b"gone"));
        assert_eq!(answer(server.ports.tcp, connect), Got::ConnAck(0x87), "{policy}");
    }
}

/// The failure: what the service has granted is forgotten with the token that was renewed, or what it has said about topics is
/// not asked anew.
#[test]
fn a_subscription_that_the_provider_allows_outlives_a_renewed_token() {
    let provider = Provider::start();
    let dir = tempfile::tempdir().expect("make a directory");
    let config = provider.config("authenticate = false\nauthorize = true", "");
    let server = Server::start_with(&[], &jwt(&dir.path().join("secret"), &config));
    let token = |groups: &[&str]| claims(3600, groups);
    let mut client = open(&server, connect("d1", "JWT", token(&["old"]).as_bytes()));
    assert_eq!(said(&mut client, "JWT"), Said::Accepted(None));
    assert_eq!(client.subscribe("s/a"), 0);
    let publish = |client: &mut Client| {
        client.publish("s/a", b"m", QoS::AtLeastOnce, false);
        let mut got = [client.next(), client.next()];
        got.sort_by_key(|got| matches!(got, Got::Publish(..)));
        assert_eq!(got, [Got::PubAck(0), Got::Publish("s/a".to_owned(), b"m".to_vec())]);
    };
    publish(&mut client);
    client.send(&auth(0x19, "JWT", token(&["new"]).as_bytes()));
    assert_eq!(said(&mut client, "JWT"), Said::Auth(0, Vec::new()));
    publish(&mut client);
    let topics = provider.heard.topics.lock();
    let groups = |request: &AuthorizeRequest| {
        let principal = request.subject.clone().and_then(|subject| subject.principal);
        (request.action(), principal.expect("a principal").groups.concat())
    };
    let asked: Vec<_> = topics.iter().map(groups).collect();
    let expected = [
        (Action::Subscribe, "old"),
        (Action::Publish, "old"),
        (Action::Subscribe, "new"),
        (Action::Publish, "new"),
    ];
    assert_eq!(asked, expected.map(|(action, group)| (action, group.to_owned())));
}

/// Operators who ask why are told what the service says; a subscription that it granted is none that rules withhold.
#[tokio::test]
async fn the_provider_is_part_of_the_explanation() {
    use gateway::v1::{
        AccessPublish, AccessSubject, ExplainAccessRequest, ListSubscriptionsRequest,
        devices_client::DevicesClient, explain_access_request::Action, security_client::SecurityClient,
    };

    let provider = tokio::task::spawn_blocking(|| topics("", "deadline = \"300ms\"")).await.expect("start");
    let (provider, server, _dir) = provider;
    let channel = crate::non_broker::channel(&server).await;
    let mut security = SecurityClient::new(channel.clone());
    let mut explain = async |action: Action| {
        let request = ExplainAccessRequest {
            device_id: "c1".to_owned(),
            subject: Some(AccessSubject::default()),
            action: Some(action),
        };
        let told = security.explain_access(request).await.expect("explain").into_inner();
        (told.allowed, told.reasons.last().cloned().unwrap_or_default())
    };
    let publish =
        |topic: &str| Action::Publish(AccessPublish { topic: topic.to_owned(), ..Default::default() });
    for (action, allowed, words) in [
        (publish("t/a"), true, "service of auth.grpc allows it"),
        (publish("t/d"), false, "does not allow it"),
        (publish("open/d"), true, "allowed"),
        (Action::Subscribe("s/a".to_owned()), true, "service of auth.grpc allows it"),
    ] {
        let (told, why) = explain(action).await;
        assert!(told == allowed && why.contains(words), "{told}: {why}");
    }
    provider.feel(Mood::Failing);
    let (told, why) = explain(publish("u/a")).await;
    assert!(!told && why.contains("does not answer"), "{told}: {why}");
    provider.feel(Mood::Well);
    let port = server.ports.tcp;
    let client = tokio::task::spawn_blocking(move || {
        let mut client = Client::connect(port, Protocol::V5, "c1");
        assert_eq!(client.subscribe("s/a"), 0);
        client
    });
    let _client = client.await.expect("subscribe");
    let request = ListSubscriptionsRequest { device_id: "c1".to_owned(), ..Default::default() };
    let listed = DevicesClient::new(channel).list_subscriptions(request).await.expect("list").into_inner();
    assert!(!listed.subscriptions[0].restricted);
    tokio::task::spawn_blocking(|| drop((provider, server))).await.expect("stop");
}
