//! Settings of one listener alone: connection cap, group strategy, client certificates, Unix socket, log fields.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    os::{
        fd::OwnedFd,
        unix::{fs::PermissionsExt, net::UnixStream},
    },
    path::Path,
    sync::Arc,
};

use crate::client::{Client, Got, hello};
use crate::support::{Server, local, until};
use codec::Packet;
use gateway_core::{Protocol, QoS};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};

fn listener(name: &str, kind: &str, more: &str) -> String {
    format!("[[listeners]]\nname = \"{name}\"\nkind = \"{kind}\"\naddress = \"127.0.0.1:0\"\n{more}\n")
}

#[test]
fn a_full_listener_refuses_and_leaves_the_others_open() {
    let server = Server::start_with(&[], &listener("small", "tcp", "max_connections = 2"));
    let port = server.port("small");
    let mut first = Client::connect(port, Protocol::V5, "one");
    let second = Client::connect(port, Protocol::V5, "two");
    assert_eq!(Client::open(port, Protocol::V5).next(), Got::Closed);
    assert_eq!(Client::connect(server.ports.tcp, Protocol::V5, "elsewhere").ping(), []);
    assert_eq!(first.ping(), []);
    let page = server.http_get("/metrics").expect("read the metrics");
    let counted = "mqtt_connections_refused_total{reason=\"listener_limit\"} 1";
    assert!(page.contains(counted), "the refusal is counted as the listener's");
    drop(second);
    until(|| {
        let mut third = Client::open(port, Protocol::V5);
        let mut bytes = Vec::new();
        codec::encode(&Packet::Connect(hello(Protocol::V5, "three").into()), Protocol::V5, &mut bytes);
        third.stream.write_all(&bytes).is_ok() && third.next() == Got::ConnAck(0)
    });
}

/// With a rate nobody is refused; how accepts are spaced is a test in virtual time of crates/net/src/accept/accept_loop.rs.
#[test]
fn the_accept_rate_refuses_nobody() {
    let server = Server::start_with(&[], "[limits]\naccept_rate = 50\n");
    let mut clients: Vec<Client> = (0..30).map(|_| Client::open(server.ports.tcp, Protocol::V4)).collect();
    for (number, client) in clients.iter_mut().enumerate() {
        client.send(&Packet::Connect(hello(Protocol::V4, &format!("c{number}")).into()));
    }
    for client in &mut clients {
        assert_eq!(client.next(), Got::ConnAck(0));
    }
}

#[test]
fn a_group_has_the_strategy_of_the_listener_of_its_first_member() {
    let toml = "[limits.shared_groups]\nnamed = \"round_robin\"\n".to_owned()
        + &listener("sticky", "tcp", "shared_strategy = \"sticky\"")
        + &listener("plain", "tcp", "");
    let server = Server::start_with(&[], &toml);
    let (sticky, plain) = (server.port("sticky"), server.port("plain"));
    let mut sender = Client::connect(server.ports.tcp, Protocol::V5, "sender");
    for (group, ports, expected) in [
        ("g1", [sticky, plain], [6, 0]),
        ("g2", [plain, sticky], [3, 3]),
        ("named", [sticky, sticky], [3, 3]),
    ] {
        let mut members = ["a", "b"].into_iter().zip(ports).map(|(name, port)| {
            let mut member = Client::connect(port, Protocol::V5, &format!("{group}-{name}"));
            assert_eq!(member.subscribe(&format!("$share/{group}/{group}/#")), 0);
            member
        });
        let mut members = [members.next().expect("a member"), members.next().expect("a member")];
        for _ in 0..6 {
            sender.publish(&format!("{group}/x"), b"x", QoS::AtMostOnce, false);
        }
        assert_eq!(sender.ping(), []);
        let mut got = members.each_mut().map(|member| member.ping().len());
        if expected[0] != expected[1] {
            got.sort_by(|a, b| b.cmp(a));
        }
        assert_eq!(got, expected, "{group}");
    }
}

fn over_unix(path: &Path) -> Client {
    let stream = UnixStream::connect(path).expect("connect to the Unix socket");
    Client::over(OwnedFd::from(stream).into(), Protocol::V5)
}

#[test]
fn a_unix_socket_carries_mqtt_and_its_file_goes_with_the_server() {
    let toml = "[log]\nlevel = \"debug\"\n[[listeners]]\nname = \"local\"\nkind = \"tcp\"\naddress = \"unix:m.sock\"\nmode = \"0600\"\n";
    let server = Server::start_with(&[], toml);
    let exchange = |server: &Server| {
        let path = server.dir().join("m.sock");
        let mode = fs::metadata(&path).expect("the socket's file").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let mut inside = over_unix(&path);
        inside.send(&Packet::Connect(hello(Protocol::V5, "inside").into()));
        assert_eq!(inside.next(), Got::ConnAck(0));
        assert_eq!(inside.subscribe("#"), 0);
        let mut outside = Client::connect(server.ports.tcp, Protocol::V5, "outside");
        assert_eq!(outside.subscribe("#"), 0);
        // More than a socket buffer, so that writes have to wait for the reader.
        let payload = vec![7; 700_000];
        for _ in 0..4 {
            outside.publish("in", &payload, QoS::AtMostOnce, false);
            assert_eq!(outside.next(), Got::Publish("in".to_owned(), payload.clone()));
        }
        for _ in 0..4 {
            assert_eq!(inside.next(), Got::Publish("in".to_owned(), payload.clone()));
        }
        inside.publish("out", b"x", QoS::AtMostOnce, false);
        assert_eq!(outside.next(), Got::Publish("out".to_owned(), b"x".to_vec()));
    };
    exchange(&server);
    assert!(server.log().contains("\"peer\":\"unix\""), "the peer is named");
    // Killed, it leaves its file behind, which is replaced.
    let mut server = server.kill_and_restart(&[], toml);
    exchange(&server);
    assert!(server.stop());
    assert!(!server.dir().join("m.sock").exists(), "the file outlived the server");
}

struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("generate a key");
        let pem = params.self_signed(&key).expect("sign the authority").pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    fn client(&self) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
        let key = KeyPair::generate().expect("generate a key");
        let params = CertificateParams::new(["device".to_owned()]).expect("name the device");
        let cert = params.signed_by(&key, &self.issuer).expect("sign the device");
        (vec![cert.der().clone()], PrivatePkcs8KeyDer::from(key.serialize_der()).into())
    }
}

/// The return code of CONNACK over TLS with this certificate; none when the connection ends first.
fn connack_over_tls(
    server: &Server,
    port: u16,
    certificate: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
) -> Option<u8> {
    let pem = fs::read(server.ca()).expect("read the authority");
    let mut roots = rustls::RootCertStore::empty();
    for root in rustls_pemfile::certs(&mut pem.as_slice()) {
        roots.add(root.expect("a certificate")).expect("an authority");
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots);
    let config = match certificate {
        Some((chain, key)) => builder.with_client_auth_cert(chain, key).expect("a pair"),
        None => builder.with_no_client_auth(),
    };
    let name = ServerName::try_from("localhost").expect("a name");
    let tls = rustls::ClientConnection::new(Arc::new(config), name).expect("a client");
    let socket = TcpStream::connect(local(port)).expect("connect");
    socket.set_read_timeout(Some(crate::client::WAIT)).expect("set a timeout");
    let mut stream = rustls::StreamOwned::new(tls, socket);
    let mut bytes = Vec::new();
    codec::encode(&Packet::Connect(hello(Protocol::V4, "device").into()), Protocol::V4, &mut bytes);
    stream.write_all(&bytes).ok()?;
    let mut connack = [0; 4];
    stream.read_exact(&mut connack).ok()?;
    assert_eq!(connack[0], 0x20);
    Some(connack[3])
}

#[test]
fn a_listener_takes_client_certificates_of_its_authority_only() {
    let (own, other) = (Authority::new(), Authority::new());
    let directory = tempfile::tempdir().expect("make a directory");
    let ca = directory.path().join("clients.crt");
    fs::write(&ca, &own.pem).expect("write the authority");
    let more = format!("client_ca = \"{}\"\nrequire_client_cert = true", ca.display());
    let server = Server::start_with(&[], &listener("mutual", "tls", &more));
    let port = server.port("mutual");
    assert_eq!(connack_over_tls(&server, port, Some(own.client())), Some(0));
    assert_eq!(connack_over_tls(&server, port, Some(other.client())), None, "another authority");
    assert_eq!(connack_over_tls(&server, port, None), None, "no certificate");
    assert_eq!(
        connack_over_tls(&server, server.ports.tls, None),
        Some(0),
        "the default listener asks for none"
    );
}

#[test]
fn events_of_a_connection_name_its_client_and_nothing_secret() {
    let toml = "[log]\nlevel = \"trace\"\ntrace_clients = [\"dev-1\"]\n".to_owned()
        + &listener("proxied", "tcp", "proxy_protocol = true");
    let server = Server::start_with(&["--log-format", "json"], &toml);
    let port = server.port("proxied");
    let proxied = |client_id: &str| {
        let mut client = Client::open(port, Protocol::V5);
        client.stream.write_all(b"PROXY TCP4 192.0.2.1 192.0.2.2 5000 1883\r\n").expect("send the header");
        let mut connect = hello(Protocol::V5, client_id);
        connect.username = Some("user".to_owned());
        connect.password = Some(b"hunter2-password".as_slice().into());
        connect.will = Some(crate::client::will("w", b"hunter2-will"));
        client.send(&Packet::Connect(connect.into()));
        client
    };
    let mut client = proxied("dev-1");
    assert_eq!(client.next(), Got::ConnAck(0));
    assert_eq!(client.subscribe("t"), 0);
    client.publish("t", b"hunter2-payload", QoS::AtMostOnce, false);
    client.ping();
    drop(client);
    assert_eq!(proxied(&"x".repeat(300)).next(), Got::ConnAck(0x85));
    let lines = |message: &str| -> Vec<String> {
        let quoted = format!("\"{message}\"");
        server.log().lines().filter(|line| line.contains(&quoted)).map(str::to_owned).collect()
    };
    for (message, with_client) in
        [("connected", true), ("packet received", true), ("disconnected", true), ("CONNECT refused", false)]
    {
        until(|| !lines(message).is_empty());
        for line in lines(message) {
            assert!(line.contains("192.0.2.1:5000"), "no peer: {line}");
            assert!(line.contains("proxied"), "no listener: {line}");
            assert!(!with_client || line.contains("dev-1"), "no client id: {line}");
        }
    }
    assert!(!server.log().contains("hunter2"), "the log has a payload or a secret");
}

/// A keep alive of 0 is nobody's silence: only the system's probes tell whether such a client is still there.
#[test]
fn a_vanished_peer_is_probed_whichever_tcp_listener_it_came_by() {
    let probing = Server::start();
    let silent = Server::start_with(&[], "[limits]\ntcp_keepalive = \"0s\"\n");
    for (server, timer) in [(&probing, "02"), (&silent, "00")] {
        let ports = &server.ports;
        for port in [ports.tcp, ports.tls, ports.ws, ports.wss, ports.grpc, ports.http] {
            let client = TcpStream::connect(("127.0.0.1", port)).expect("a connection");
            let from = client.local_addr().expect("an address").port();
            until(|| socket_timer(port, from).as_deref() == Some(timer));
        }
    }
}

/// Returns the timer that the system runs for a socket of this machine: none 00, keep alive 02; proc(5),
/// `/proc/net/tcp`.
fn socket_timer(local: u16, remote: u16) -> Option<String> {
    let table = fs::read_to_string("/proc/net/tcp").expect("the sockets of this machine");
    let ends = |address: &str, port: u16| address.ends_with(&format!(":{port:04X}"));
    table.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_this = ends(fields.get(1)?, local) && ends(fields.get(2)?, remote);
        is_this.then(|| fields.get(5).map(|timer| timer[..2].to_owned()))?
    })
}

/// The failure: `[::]` takes connections over IPv4 at gRPC and HTTP, and at no listener for devices.
#[test]
fn every_address_of_ipv6_means_the_same_for_every_listener() {
    use mqtt_server::{
        Gateway,
        config::{Config, Listener, ListenerKind},
    };
    // Of this machine, and nobody else's here: a port that is free for IPv4 may be another test's at 127.0.0.1.
    const IPV4: &str = "127.9.8.7";
    const NAMES: [&str; 6] = ["default", "tls", "ws", "quic", "grpc", "http"];
    if std::net::TcpListener::bind("[::1]:0").is_err() {
        eprintln!("no IPv6 here");
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    let directory = tempfile::tempdir().expect("make a directory");
    let pair = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    let (cert, key) = (directory.path().join("crt"), directory.path().join("key"));
    fs::write(&cert, pair.cert.pem()).expect("write the certificate");
    fs::write(&key, pair.signing_key.serialize_pem()).expect("write the key");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).expect("keep the key");
    let any = "[::]:0".parse().ok();
    for ipv6_only in [false, true] {
        let listener = |name: &str, kind| {
            let address = any.clone();
            Listener { name: name.to_owned(), kind, address, ipv6_only, ..Listener::default() }
        };
        let mut config = Config {
            addr: any.clone(),
            ipv6_only,
            non_tls: true,
            insecure_grpc: true,
            cert: cert.clone(),
            key: key.clone(),
            grpc_addr: "[::]:0".parse().expect("an address"),
            http_addr: "[::]:0".parse().expect("an address"),
            data_dir: directory.path().join("data"),
            listeners: vec![
                listener("tls", ListenerKind::Tls),
                listener("ws", ListenerKind::Ws),
                listener("quic", ListenerKind::Quic),
            ],
            ..Config::default()
        };
        config.auth.allow_anonymous = true;
        (config.grpc.ipv6_only, config.http.ipv6_only) = (ipv6_only, ipv6_only);
        let gateway = runtime.block_on(Gateway::builder(config).start()).expect("start");
        for name in NAMES {
            let port = gateway.address(name).expect("an address").port();
            let over_ipv4 = match name {
                // A port that is free for IPv4 has no listener there.
                "quic" => std::net::UdpSocket::bind((IPV4, port)).is_err(),
                _ => TcpStream::connect((IPV4, port)).is_ok(),
            };
            assert_eq!(over_ipv4, !ipv6_only, "{name}");
            assert!(name == "quic" || TcpStream::connect(("::1", port)).is_ok(), "{name}");
        }
        runtime.block_on(gateway.shutdown());
    }
}
