//! Admission while other clients are silent, slow or many. Nothing here waits for a timeout of the server: each test
//! sets the timeouts that it does not mean so long that it would fail with them.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
};

use access::backends::Role;

use crate::client::{Client, Got, from_host, hello};
use crate::support::{Server, until};
use codec::Packet;
use gateway_core::Protocol;

fn limits(text: &str) -> String {
    format!("[limits]\n{text}\n[[listeners]]\nname = \"other\"\nkind = \"tcp\"\naddress = \"127.0.0.1:0\"\n")
}

fn silent(host: u8, port: u16, count: usize) -> Vec<TcpStream> {
    (0..count).map(|_| from_host(host, port)).collect()
}

fn connect_from(host: u8, port: u16, client_id: &str) -> Client {
    let mut client = Client::over(from_host(host, port), Protocol::V5);
    client.send(&Packet::Connect(hello(Protocol::V5, client_id).into()));
    assert_eq!(client.next(), Got::ConnAck(0));
    client
}

fn is_closed(stream: &mut TcpStream) -> bool {
    matches!(stream.read(&mut [0; 1]), Ok(0) | Err(_))
}

fn refused(server: &Server, reason: &str) -> u64 {
    let page = server.http_get("/metrics").expect("read the metrics");
    let row = format!("mqtt_connections_refused_total{{reason=\"{reason}\"}} ");
    let value = page.lines().find_map(|line| line.strip_prefix(&row));
    value.and_then(|value| value.parse::<f64>().ok()).expect("a counter") as u64
}

#[test]
fn silent_sockets_at_one_listener_leave_the_others_open() {
    let server = Server::start_with(&[], &limits("max_handshakes = 20\nconnect_timeout = \"10m\""));
    let _silent = silent(1, server.port("other"), 60);
    until(|| server.metric("mqtt_connections_accepted_total") >= 60);
    connect_from(1, server.ports.tcp, "elsewhere");
}

#[test]
fn only_the_oldest_silent_handshake_is_closed_for_a_newcomer() {
    let toml = limits("max_handshakes = 6\nmax_handshakes_per_address = 0\nconnect_timeout = \"15s\"");
    let server = Server::start_with(&[], &toml);
    let mut first = from_host(1, server.ports.tcp);
    let mut others = silent(1, server.ports.tcp, 5);
    // An unfinished CONNECT is no better than nothing.
    others[0].write_all(&[0x10, 20, 0, 4, b'M']).expect("send a part");
    until(|| server.metric("mqtt_connections_accepted_total") >= 6);
    connect_from(1, server.ports.tcp, "newcomer");
    assert!(is_closed(&mut first));
    assert_eq!((refused(&server, "silent"), refused(&server, "connect_timeout")), (1, 0));
    // The others still may say what they want.
    let mut last = Client::over(others.pop().expect("one more"), Protocol::V5);
    last.send(&Packet::Connect(hello(Protocol::V5, "late").into()));
    assert_eq!(last.next(), Got::ConnAck(0));
}

#[test]
fn half_tls_handshakes_leave_for_a_newcomer() {
    let toml = limits("max_handshakes = 5\nconnect_timeout = \"15s\"");
    let server = Server::start_with(&[], &toml);
    let mut half = silent(1, server.ports.tls, 5);
    for stream in &mut half {
        // The head of a ClientHello record.
        stream.write_all(&[0x16, 3, 1, 2, 0, 1, 0, 1]).expect("send a part");
    }
    until(|| server.metric("mqtt_connections_accepted_total") >= 5);
    let mut more = silent(1, server.ports.tls, 1);
    until(|| refused(&server, "silent") >= 1);
    more[0].write_all(b"not TLS").expect("send something");
    assert!(is_closed(&mut half[0]), "the oldest");
    assert_eq!(refused(&server, "connect_timeout"), 0);
}

#[test]
fn an_address_with_many_waiting_sockets_does_not_keep_another_waiting() {
    let toml = limits("max_handshakes = 8\nmax_handshakes_per_address = 4\nconnect_timeout = \"10m\"");
    let server = Server::start_with(&[], &toml);
    let _silent = silent(2, server.ports.tcp, 100);
    until(|| server.metric("mqtt_connections_accepted_total") >= 100);
    connect_from(1, server.ports.tcp, "bystander");
    assert_eq!(refused(&server, "silent"), 0, "nobody had to leave");
}

#[test]
fn an_address_that_comes_too_often_is_refused_and_others_are_not() {
    let server = Server::start_with(&[], &limits("accept_rate_per_address = 1"));
    let mut closed = 0;
    for mut stream in silent(2, server.ports.tcp, 100) {
        stream.write_all(&[0x10]).ok();
        stream.set_nonblocking(true).expect("do not wait");
        drop(stream);
        closed += 1;
    }
    until(|| server.metric("mqtt_connections_accepted_total") >= closed);
    assert!(refused(&server, "address_rate") >= 50, "30 at once, then one a second");
    connect_from(1, server.ports.tcp, "bystander");
}

#[test]
fn an_address_has_its_own_number_of_connections() {
    let server = Server::start_with(&[], &limits("max_connections_per_address = 2"));
    let _held = [connect_from(2, server.ports.tcp, "one"), connect_from(2, server.ports.tcp, "two")];
    assert!(is_closed(&mut from_host(2, server.ports.tcp)));
    assert_eq!(refused(&server, "address_limit"), 1);
    // And is told of, so that nobody searches for it in the client.
    let told = server.log();
    let told = told.lines().find(|line| line.contains("connection refused")).expect("a line");
    assert!(told.contains("too many connections of this address") && told.contains("127.0.0.2"), "{told}");
    connect_from(1, server.ports.tcp, "elsewhere");
    connect_from(2, server.port("other"), "other door");
}

#[test]
fn behind_a_proxy_limits_are_for_the_address_it_names() {
    let toml = "[limits]\nmax_connections_per_address = 2\nmax_handshakes_per_address = 2\n".to_owned()
        + "[[listeners]]\nname = \"proxied\"\nkind = \"tcp\"\naddress = \"127.0.0.1:0\"\nproxy_protocol = true\n";
    let server = Server::start_with(&[], &toml);
    let port = server.port("proxied");
    let proxied = |source: &str, client_id: &str| {
        let mut client = Client::over(from_host(1, port), Protocol::V5);
        let header = format!("PROXY TCP6 {source} 2001:db8::1 5000 1883\r\n");
        client.stream.write_all(header.as_bytes()).expect("send the header");
        client.send(&Packet::Connect(hello(Protocol::V5, client_id).into()));
        client
    };
    let mut held = Vec::new();
    for (source, client_id) in [
        ("2001:db8:1:1::1", "a"),
        ("2001:db8:1:1::2", "b"),
        ("2001:db8:1:2::1", "c"),
        ("2001:db8:1:3::1", "d"),
    ] {
        let mut client = proxied(source, client_id);
        assert_eq!(client.next(), Got::ConnAck(0), "{client_id}");
        held.push(client);
    }
    assert_eq!(proxied("2001:db8:1:1:9::9", "e").next(), Got::Closed, "a third of one network");
    drop(held);
    until(|| proxied("2001:db8:1:1::3", "f").next() == Got::ConnAck(0));
}

/// Returns the answer to the upgrade to a WebSocket.
fn upgrade(port: u16, origin: &str) -> String {
    upgrade_for(port, &format!("localhost:{port}"), origin)
}

fn upgrade_for(port: u16, host: &str, origin: &str) -> String {
    let mut stream = from_host(1, port);
    let origin = if origin.is_empty() { String::new() } else { format!("Origin: {origin}\r\n") };
    let request = format!(
        "GET /mqtt HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n{origin}\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\
         Sec-WebSocket-Protocol: mqtt\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).expect("ask for the upgrade");
    let mut status = [0; 12];
    stream.read_exact(&mut status).expect("read the answer");
    String::from_utf8_lossy(&status[9..]).into_owned()
}

#[test]
fn a_page_of_another_host_may_not_open_a_websocket_unless_it_is_listed() {
    let listener = |name: &str, origins: &str| {
        format!("[[listeners]]\nname = \"{name}\"\nkind = \"ws\"\naddress = \"127.0.0.1:0\"\n{origins}\n")
    };
    let toml = listener("listed", "allowed_origins = [\"https://app.example\"]")
        + &listener("open", "allowed_origins = [\"*\"]");
    let server = Server::start_with(&[], &toml);
    let answers = ["", "http://localhost:3000", "https://app.example", "https://evil.example", "null"];
    for (port, expected) in [
        (server.ports.ws, ["101", "101", "403", "403", "403"]),
        (server.port("listed"), ["101", "403", "101", "403", "403"]),
        (server.port("open"), ["101"; 5]),
    ] {
        assert_eq!(answers.map(|origin| upgrade(port, origin)), expected);
    }
    assert_eq!(refused(&server, "origin"), 6);
}

/// The failure: a page whose host was pointed to 127.0.0.1 (DNS rebinding) is one of this machine, since Origin and Host agree.
#[test]
fn a_websocket_on_loopback_is_for_this_machine_only() {
    let listener = |name: &str, more: &str| {
        format!("[[listeners]]\nname = \"{name}\"\nkind = \"ws\"\naddress = \"127.0.0.1:0\"\n{more}\n")
    };
    let server = Server::start_with(&[], &listener("listed", "allowed_origins = [\"https://app.example\"]"));
    let (plain, listed) = (server.ports.ws, server.port("listed"));
    for (port, host, origin, expected) in [
        (plain, "evil.example", "http://evil.example", "403"),
        (plain, "evil.example", "", "403"),
        (plain, "localhost.evil.example:8083", "http://localhost.evil.example:8083", "403"),
        (plain, "127.0.0.1", "http://127.0.0.1:3000", "101"),
        (plain, "[::1]:8083", "", "101"),
        (listed, "app.example", "https://app.example", "101"),
        (listed, "evil.example", "http://evil.example", "403"),
    ] {
        assert_eq!(upgrade_for(port, host, origin), expected, "{host} {origin}");
    }
    assert_eq!((refused(&server, "host"), refused(&server, "origin")), (3, 1));
}

#[test]
fn half_websocket_upgrades_leave_for_a_newcomer() {
    let server = Server::start_with(&[], &limits("max_handshakes = 5\nconnect_timeout = \"15s\""));
    let mut half = silent(1, server.ports.ws, 5);
    for stream in &mut half {
        stream.write_all(b"GET /mqtt HTTP/1.1\r\nHost: localhost\r\nUpgr").expect("send a part");
    }
    until(|| server.metric("mqtt_connections_accepted_total") >= 5);
    assert_eq!(upgrade(server.ports.ws, ""), "101");
    assert!(is_closed(&mut half[0]), "the oldest");
    assert_eq!((refused(&server, "silent"), refused(&server, "connect_timeout")), (1, 0));
}

/// No time-out of the server ends anybody within a test.
const PATIENT_HTTP: &str = "header_timeout = \"10m\"\nbody_timeout = \"10m\"\nwrite_timeout = \"10m\"\n";

/// The status of one request over HTTP from this host, and its answer.
fn ask(host: u8, port: u16, request: &str) -> (String, String) {
    let mut stream = from_host(host, port);
    stream.write_all(request.as_bytes()).expect("ask");
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    (answer.get(9..12).unwrap_or_default().to_owned(), answer)
}

/// The failure: 80 strangers who announce a form and send none hold every slot of the page, and nobody can log in.
#[test]
fn a_login_is_taken_beside_strangers_whose_forms_never_come() {
    let dir = tempfile::tempdir().expect("make a directory");
    let file = dir.path().join("tokens");
    let secret = crate::browser::token(&file, Role::Admin);
    let toml = format!("[backends]\ntokens = {:?}\n[http]\n{PATIENT_HTTP}", file.display().to_string());
    let server = Server::start_with(&[], &toml);
    let port = server.ports.http;
    let form = |body: &str| {
        format!(
            "POST /page/login HTTP/1.1\r\nHost: localhost:{port}\r\nOrigin: http://localhost:{port}\r\n\
             Content-Type: application/x-www-form-urlencoded\r\nContent-Length: {}\r\n\r\n",
            body.len()
        )
    };
    let login = format!("token={secret}");
    let mut strangers = Vec::new();
    for host in 2..=11 {
        for mut stream in silent(host, port, 20) {
            let _ = stream.write_all(form(&login).as_bytes());
            strangers.push(stream);
        }
    }
    let (status, answer) = ask(1, port, &(form(&login) + &login));
    assert!(status == "303" && answer.contains("set-cookie"), "{answer}");
    assert_eq!(ask(1, port, "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").0, "200");
    let (status, answer) = ask(
        1,
        port,
        &format!(
            "GET /v1/devices HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {secret}\r\nConnection: close\r\n\r\n"
        ),
    );
    assert_eq!(status, "200", "{answer}");
}

/// The failure: one token has all streams of the HTTP API.
#[test]
fn a_caller_over_http_has_a_share_of_the_streams() {
    let server = Server::start_with(&[], &format!("[http]\nmax_streams = 16\n{PATIENT_HTTP}"));
    let stream = "GET /v1/stream/messages HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let open = |host: u8| {
        let mut client = from_host(host, server.ports.http);
        client.write_all(stream.as_bytes()).expect("ask");
        let mut head = [0; 12];
        client.read_exact(&mut head).expect("read the answer");
        (String::from_utf8_lossy(&head[9..]).into_owned(), client)
    };
    let held: Vec<_> =
        std::iter::from_fn(|| Some(open(2)).filter(|(status, _)| status == "200")).take(16).collect();
    assert_eq!(held.len(), 12, "the last quarter is for others");
    assert_eq!(open(2).0, "429");
    let (status, _other) = open(3);
    assert_eq!(status, "200");
    assert!(server.metric_of("gateway_http_connections_refused_total", "reason=\"caller\"") >= 2);
}

#[test]
fn health_is_answered_while_clients_of_http_neither_send_nor_read() {
    let server = Server::start_with(
        &[],
        "[http]\nmax_connections = 8\nheader_timeout = \"10m\"\nwrite_timeout = \"10m\"\n",
    );
    let mut others = silent(1, server.ports.http, 40);
    for (number, other) in others.iter_mut().enumerate() {
        let requests = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(number % 3 * 50);
        // One that is closed already is no matter.
        let _ = other.write_all(requests.as_bytes());
    }
    for path in ["/healthz", "/readyz"] {
        let answer = server.http_get(path).expect("an answer");
        assert!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
    }
}

#[test]
fn sigterm_holds_its_deadline_whatever_clients_do_meanwhile() {
    let toml = "[shutdown]\ndeadline = \"4s\"\n".to_owned()
        + &limits("connect_timeout = \"10m\"\nwrite_timeout = \"10m\"");
    let mut server = Server::start_with(&[], &toml);
    let ports = &server.ports;
    // Silent ones, half of a CONNECT, of a TLS handshake, of an HTTP/2 preface and of a request.
    let mut held = Vec::new();
    for (port, bytes) in [
        (ports.tcp, &b""[..]),
        (ports.tcp, &[0x10, 20, 0, 4, b'M']),
        (ports.tls, &[0x16, 3, 1, 2, 0, 1]),
        (ports.ws, b"GET /mqtt HTTP/1.1\r\n"),
        (ports.grpc, b"PRI * HTTP/2.0\r\n"),
        (ports.http, b"GET /met"),
    ] {
        let mut stream = from_host(1, port);
        stream.write_all(bytes).expect("send a part");
        held.push(stream);
    }
    // One that subscribes to all and reads nothing, and some that flood it.
    let mut slow = Client::connect(ports.tcp, Protocol::V5, "slow");
    assert_eq!(slow.subscribe("#"), 0);
    let tcp = ports.tcp;
    let flooders: Vec<_> = (0..3)
        .map(|number| {
            let client = Client::connect(tcp, Protocol::V4, &format!("flooder-{number}"));
            std::thread::spawn(move || {
                let mut stream = client.stream;
                let packets = [0x30, 8, 0, 1, b't', 1, 2, 3, 4, 5].repeat(6_000);
                while stream.write_all(&packets).is_ok() {}
            })
        })
        .collect();
    until(|| server.metric("mqtt_messages_received_total") > 100_000);
    assert!(server.stop(), "it ended by itself, with code 0");
    assert!(server.log().contains("stopped"), "and orderly");
    for flooder in flooders {
        flooder.join().expect("a flooder");
    }
}

/// Inside one process: nothing of a gateway that was shut down holds its data directory.
#[test]
fn a_half_open_handshake_does_not_keep_the_data_directory_locked() {
    use mqtt_server::{Gateway, config::Config};
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    let directory = tempfile::tempdir().expect("make a directory");
    let data_dir = directory.path().join("data");
    let round = || {
        let mut config =
            Config { non_tls: true, insecure_grpc: true, data_dir: data_dir.clone(), ..Config::default() };
        config.grpc.tls = false;
        config.limits.connect_timeout = "10m".parse().expect("a duration");
        let socket = || std::net::TcpListener::bind(("127.0.0.1", 0)).expect("bind");
        let mut builder = Gateway::builder(config);
        for name in ["default", "grpc", "http"] {
            builder = builder.socket(name, socket());
        }
        let gateway = runtime.block_on(builder.start()).expect("start");
        let held = ["default", "grpc", "http"].map(|name| {
            let mut stream = TcpStream::connect(gateway.address(name).expect("an address")).expect("connect");
            stream.write_all(if name == "default" { &[0x10] } else { b"P" }).expect("send a part");
            stream
        });
        // All three are with the gateway before it ends.
        until(|| net::counters::totals().connections_accepted > 0);
        connect_from(1, gateway.address("default").expect("an address").port(), "last");
        runtime.block_on(gateway.shutdown());
        held
    };
    let _first = round();
    let _second = round();
    let mode = std::os::unix::fs::PermissionsExt::mode(
        &std::fs::metadata(&data_dir).expect("the data directory").permissions(),
    );
    assert_eq!(mode & 0o777, 0o700);
}
