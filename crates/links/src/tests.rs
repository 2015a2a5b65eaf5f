//! Two gateways on loopback.

use std::{
    future::{Future, ready},
    net::{SocketAddr, TcpListener},
    path::Path,
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use access::{
    Method, Principal,
    backends::{Role, Scope, TokenGrant},
};
use bytes::Bytes;
use config::{DatabaseTls, TlsFiles, TlsVersion};
use edge::tls::TlsStore;
use gateway_core::Peer;
use http_body_util::{BodyExt as _, Full};
use parking_lot::Mutex;
use proptest::prelude::*;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    sync::watch,
    task::JoinSet,
    time::timeout,
};

use super::*;

/// An authority, which signs for nodes.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    /// Files of a node in `folder`.
    fn files(&self, folder: &Path, name: &str) -> DatabaseTls {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new([name.to_owned()]).unwrap();
        let cert = params.signed_by(&key, &self.issuer).unwrap().pem();
        let write = |kind: &str, text: &str| {
            let path = folder.join(format!("{name}.{kind}"));
            std::fs::write(&path, text).unwrap();
            Some(path)
        };
        DatabaseTls {
            ca: write("ca", &self.pem),
            cert: write("cert", &cert),
            key: write("key", &key.serialize_pem()),
        }
    }
}

struct Named(&'static [&'static str]);

impl Members for Named {
    fn has<'a>(&'a self, name: &'a str) -> Pin<Box<dyn Future<Output = bool> + Send + 'a>> {
        Box::pin(ready(self.0.contains(&name)))
    }
}

/// Sends a device's bytes back, and says of a call by whom it was made.
#[derive(Default)]
struct Echo {
    tasks: Mutex<JoinSet<()>>,
    seen: Mutex<Vec<RelayedDevice>>,
}

impl LinkHandler for Echo {
    fn relay(&self, device: RelayedDevice, stream: RelayStream) -> bool {
        let is_silent = device.client_id == "silent";
        let is_refused = device.client_id == "refused";
        self.seen.lock().push(device);
        self.tasks.lock().spawn(async move {
            let (mut read, mut write) = tokio::io::split(stream);
            if is_silent {
                return std::future::pending().await;
            }
            let _ = tokio::io::copy(&mut read, &mut write).await;
        });
        !is_refused
    }

    fn call(
        &self,
        home: u16,
        caller: PassedCaller,
        request: LinkRequest,
    ) -> Option<Pin<Box<dyn Future<Output = LinkAnswer> + Send>>> {
        let id = caller.grant()?.id;
        Some(Box::pin(async move {
            let hides = !request.headers().contains_key(hyper::header::AUTHORIZATION);
            let body = request.into_body().collect().await.unwrap().to_bytes();
            let text = format!("{id} {home} {hides} {}", String::from_utf8_lossy(&body));
            LinkAnswer::new(LinkBody::new(Full::new(Bytes::from(text)).map_err(|never| match never {})))
        }))
    }
}

struct World {
    folder: tempfile::TempDir,
    authority: Authority,
    address: SocketAddr,
    handler: Arc<Echo>,
    _running: JoinSet<()>,
}

/// Gateway `a`, which lets `a` and `b` in.
fn world() -> World {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new();
    let DatabaseTls { ca, cert, key } = authority.files(folder.path(), "a");
    let files = TlsFiles {
        cert: cert.unwrap(),
        key: key.unwrap(),
        certificates: Vec::new(),
        client_ca: ca,
        require_client_cert: true,
        crl: None,
        min_version: TlsVersion::V13,
        ciphersuites: Vec::new(),
        open_key_files: true,
    };
    let tls = TlsStore::new().add("links", files, &[b"h2"]).unwrap();
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    let handler = Arc::new(Echo::default());
    let members = Arc::new(Named(&["a", "b"]));
    let listener = LinkListener::new(socket, tls, members, Arc::clone(&handler) as _).unwrap();
    let mut running = JoinSet::new();
    running.spawn(listener.run());
    World { folder, authority, address, handler, _running: running }
}

fn target(address: SocketAddr, name: &str) -> LinkTarget {
    LinkTarget { name: name.to_owned(), address: address.to_string() }
}

impl World {
    /// A link of `from`, whose certificate is of `authority`, to the gateway that calls itself `to`.
    fn link(&self, authority: &Authority, from: &str, to: &str) -> GatewayLink {
        let (_told, known) = watch::channel(Some(target(self.address, to)));
        GatewayLink::new(known, authority.files(self.folder.path(), from), true)
    }
}

fn device(client_id: &str) -> RelayedDevice {
    let peer = Peer::from("192.0.2.1:1000".parse::<SocketAddr>().unwrap());
    RelayedDevice::new(client_id, "default", peer, &Principal::default())
}

fn caller() -> PassedCaller {
    let grant = TokenGrant {
        id: "meter".to_owned(),
        role: Role::Reader,
        scope: Scope::new(Some(vec!["a/#".to_owned()]), None).unwrap(),
        created: 0,
        expires: None,
        note: String::new(),
        hash: Default::default(),
    };
    PassedCaller::new("token", &grant, None)
}

fn request(text: &'static str) -> LinkRequest {
    let body = LinkBody::new(Full::new(Bytes::from(text)).map_err(|never| match never {}));
    hyper::Request::post("http://x/service/method").header("authorization", "Bearer x").body(body).unwrap()
}

#[tokio::test]
async fn bytes_and_calls_go_to_the_other_gateway_and_back() {
    let world = world();
    let link = world.link(&world.authority, "b", "a");
    let mut stream = link.relay(&device("one")).await.unwrap();
    let sent = vec![7; 300_000];
    let mut received = vec![0; sent.len()];
    let (mut read, mut write) = tokio::io::split(&mut stream);
    let (wrote, got) = tokio::join!(write.write_all(&sent), read.read_exact(&mut received));
    wrote.unwrap();
    got.unwrap();
    assert_eq!(received, sent);
    assert_eq!(*world.handler.seen.lock(), [device("one")]);
    // The end of one side is the end of the other.
    stream.shutdown().await.unwrap();
    assert_eq!(stream.read(&mut received).await.unwrap(), 0);

    let answer = link.call(&caller(), 3, request("hello")).await.unwrap();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(body, "meter 3 true hello", "the credentials stay where they were checked");
    assert!(matches!(link.relay(&device("refused")).await, Err(LinkError::Refused(..))));
}

/// The failure: a device that does not read holds up all others, or what comes for it grows without a bound.
#[tokio::test]
async fn a_relay_that_takes_nothing_holds_up_nobody_and_has_a_bound() {
    let world = world();
    let link = world.link(&world.authority, "b", "a");
    let mut silent = Vec::new();
    for _ in 0..40 {
        let mut stream = link.relay(&device("silent")).await.unwrap();
        let mut taken = 0;
        while let Ok(written) = timeout(Duration::from_millis(20), stream.write(&[1; 16_384])).await {
            taken += written.unwrap();
        }
        assert!(taken <= 4 * STREAM_WINDOW as usize, "{taken}");
        silent.push(stream);
    }
    let mut stream = link.relay(&device("one")).await.unwrap();
    stream.write_all(b"hello").await.unwrap();
    let mut back = [0; 5];
    stream.read_exact(&mut back).await.unwrap();
    assert_eq!(&back, b"hello");
}

/// The failure: a stranger gets in, or a client takes a stranger for the gateway that serves.
#[tokio::test]
async fn only_members_with_a_certificate_of_the_cluster_are_let_in() {
    let world = world();
    let other = Authority::new();
    for (authority, from, to) in [
        (&world.authority, "c", "a"),
        (&other, "b", "a"),
        // Its certificate is not of that name.
        (&world.authority, "b", "b"),
    ] {
        let refused = world.link(authority, from, to).relay(&device("one")).await;
        assert!(matches!(refused, Err(LinkError::Unreachable(..))), "{from} to {to}: {:?}", refused.err());
    }
    assert!(world.handler.seen.lock().is_empty());
    // Without a certificate, and without TLS.
    let mut socket = tokio::net::TcpStream::connect(world.address).await.unwrap();
    socket.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    let mut rest = Vec::new();
    let _ = timeout(Duration::from_secs(10), socket.read_to_end(&mut rest)).await.expect("it is closed");
    assert!(world.link(&world.authority, "b", "a").relay(&device("one")).await.is_ok());
}

/// The failure: a link that has ended is used for ever, or the wrong gateway is asked after a takeover.
#[tokio::test]
async fn a_link_follows_the_gateway_that_serves() {
    let (first, second) = (world(), world());
    let (told, known) = watch::channel(None);
    let files = first.authority.files(first.folder.path(), "b");
    let link = GatewayLink::new(known, files, true);
    assert!(matches!(link.relay(&device("one")).await, Err(LinkError::Nobody)));
    assert!(!link.is_reachable());
    told.send_replace(Some(target(first.address, "a")));
    assert!(link.relay(&device("one")).await.is_ok() && link.is_reachable());
    let mut lasting = link.relay(&device("one")).await.unwrap();
    // Of another authority.
    told.send_replace(Some(target(second.address, "a")));
    assert!(link.relay(&device("one")).await.is_err() && !link.is_reachable());
    drop(first);
    let mut byte = [0];
    let ended = timeout(Duration::from_secs(20), lasting.read(&mut byte)).await.expect("it ends");
    assert!(ended.is_err() || ended.is_ok_and(|read| read == 0));
}

#[test]
fn an_identity_is_the_same_at_the_other_gateway() {
    let principal = Principal {
        method: Method::Scram,
        username: Some("ann".into()),
        common_name: Some("meter".into()),
        groups: ["x".into(), "y".into()].into(),
        claims: [("site".into(), ["n".into(), "s".into()].into())].into(),
        tenant: Some("t".into()),
        expires: Some(gateway_core::Timestamp(5_000_000)),
    };
    let sent = RelayedDevice::new("one", "tls", Peer::UNIX, &principal);
    let device = RelayedDevice::from_header(sent.to_header().unwrap().as_bytes()).unwrap();
    assert_eq!(device.peer(), Some(Peer::UNIX));
    let found = device.principal().unwrap();
    assert_eq!(format!("{found:?}"), format!("{principal:?}"));
    assert_eq!(caller().grant().unwrap().scope, Scope::new(Some(vec!["a/#".to_owned()]), None).unwrap());
}

proptest! {
    #[test]
    fn no_header_is_too_strange(data in proptest::collection::vec(any::<u8>(), 0..200), cut in 0usize..400) {
        fuzz_links(&data);
        let mut header = device("one").to_header().unwrap().into_bytes();
        header.truncate(cut.min(header.len()));
        fuzz_links(&header);
    }
}
