//! Bans: a banned client does not get in, by any door, and nobody else notices.

use std::{
    fs,
    io::{Read as _, Write as _},
    path::Path,
};

use codec::{Connect, Packet};
use gateway_core::Protocol;

use crate::client::{Client, Got, from_host, hello};
use crate::support::{Server, until};

/// A file of bans in a directory of its own, and the configuration that names it.
struct BanFile(tempfile::TempDir);

impl BanFile {
    fn new(text: &str) -> Self {
        let file = Self(tempfile::tempdir().expect("make a directory"));
        file.write(text);
        file
    }

    fn write(&self, text: &str) {
        fs::write(self.path(), text).expect("write the bans");
    }

    fn path(&self) -> std::path::PathBuf {
        self.0.path().join("bans.toml")
    }

    fn toml(&self, more: &str) -> String {
        format!("[bans]\nfile = {:?}\n{more}\n", self.path())
    }
}

fn ban(kind: &str, value: &str) -> String {
    format!("[[bans]]\n{kind} = {value:?}\nreason = \"test\"\n\n")
}

/// Returns the answer to a CONNECT.
fn answer(port: u16, connect: Connect) -> Got {
    let mut client = Client::open(port, connect.protocol);
    client.send(&Packet::Connect(Box::new(connect)));
    client.next()
}

fn named(protocol: Protocol, client_id: &str, username: &str) -> Connect {
    Connect { username: Some(username.to_owned()), ..hello(protocol, client_id) }
}

fn counted(server: &Server, row: &str) -> u64 {
    let page = server.http_get("/metrics").expect("read the metrics");
    let value = page.lines().find_map(|line| line.strip_prefix(row));
    value.and_then(|value| value.trim().parse::<f64>().ok()).expect("a counter") as u64
}

fn reload(server: &Server, said: &str) {
    let before = server.log().matches(said).count();
    server.signal("HUP");
    until(|| server.log().matches(said).count() > before);
}

#[test]
fn a_banned_client_or_user_is_told_so_in_the_words_of_its_version() {
    let file = BanFile::new(&(ban("client_id", "thief") + &ban("username", "mallory")));
    let server = Server::start_with(&[], &file.toml(""));
    let port = server.ports.tcp;
    assert_eq!(answer(port, hello(Protocol::V5, "thief")), Got::ConnAck(0x8A));
    assert_eq!(answer(port, hello(Protocol::V4, "thief")), Got::ConnAck(5));
    assert_eq!(answer(port, named(Protocol::V5, "a", "mallory")), Got::ConnAck(0x8A));
    assert_eq!(answer(port, named(Protocol::V4, "a", "mallory")), Got::ConnAck(5));
    assert_eq!(answer(port, named(Protocol::V5, "mallory", "thief")), Got::ConnAck(0));
    assert_eq!(server.metric("mqtt_banned_total"), 4);
    assert_eq!(counted(&server, "gateway_bans{source=\"file\"}"), 2);
    let log = server.log();
    assert!(log.contains("CONNECT refused") && log.contains("\"banned\""), "a line tells of it");
}

#[test]
fn a_banned_address_is_closed_at_every_door_before_it_is_heard() {
    let file = BanFile::new(&ban("address", "127.0.0.2"));
    let server = Server::start_with(&[], &file.toml(""));
    let ports = [server.ports.tcp, server.ports.tls, server.ports.ws, server.ports.wss];
    for port in ports {
        let mut stream = from_host(2, port);
        // Nothing has been sent: neither TLS nor HTTP is waited for.
        assert!(matches!(stream.read(&mut [0; 1]), Ok(0) | Err(_)), "closed");
    }
    let row = "mqtt_connections_refused_total{reason=\"address_banned\"}";
    until(|| counted(&server, row) == ports.len() as u64);
    let mut other = Client::over(from_host(3, server.ports.tcp), Protocol::V5);
    other.send(&Packet::Connect(hello(Protocol::V5, "other").into()));
    assert_eq!(other.next(), Got::ConnAck(0));
}

/// The proxy's own address says nothing.
#[test]
fn behind_a_proxy_the_address_that_it_names_is_banned() {
    let file = BanFile::new(&ban("address", "192.0.2.0/24"));
    let listener = "[[listeners]]\nname = \"proxied\"\nkind = \"tcp\"\naddress = \"127.0.0.1:0\"\nproxy_protocol = true\n";
    let server = Server::start_with(&[], &file.toml(listener));
    let through = |address: &str| {
        let mut client = Client::open(server.port("proxied"), Protocol::V5);
        let header = format!("PROXY TCP4 {address} 192.0.2.1 1000 1883\r\n");
        client.stream.write_all(header.as_bytes()).expect("send the header");
        let mut bytes = Vec::new();
        codec::encode(&Packet::Connect(hello(Protocol::V5, "c").into()), Protocol::V5, &mut bytes);
        let _ = client.stream.write_all(&bytes);
        client.next()
    };
    assert_eq!(through("192.0.2.77"), Got::Closed);
    assert_eq!(through("198.51.100.1"), Got::ConnAck(0));
    assert_eq!(counted(&server, "mqtt_connections_refused_total{reason=\"address_banned\"}"), 1);
}

#[test]
fn the_file_is_read_again_and_a_broken_one_keeps_what_was() {
    let file = BanFile::new(&ban("client_id", "a"));
    let server = Server::start_with(&[], &file.toml(""));
    let code = |id: &str| answer(server.ports.tcp, hello(Protocol::V5, id));
    assert_eq!((code("a"), code("b")), (Got::ConnAck(0x8A), Got::ConnAck(0)));
    file.write(&ban("client_id", "b"));
    reload(&server, "\"1 bans\"");
    assert_eq!((code("a"), code("b")), (Got::ConnAck(0), Got::ConnAck(0x8A)));
    file.write(&(ban("client_id", "a") + "[[bans]]\nclient = \"c\"\n"));
    reload(&server, "bans.toml: line 6");
    assert_eq!((code("a"), code("b")), (Got::ConnAck(0), Got::ConnAck(0x8A)));
}

#[test]
fn a_new_ban_ends_the_connections_that_it_hits_and_no_other() {
    let file = BanFile::new("");
    let server = Server::start_with(&[], &file.toml(""));
    let mut thief = Client::connect(server.ports.tcp, Protocol::V5, "thief");
    let mut old = Client::connect_with(server.ports.tcp, named(Protocol::V4, "old", "mallory"));
    let mut honest = Client::connect(server.ports.tcp, Protocol::V5, "honest");
    let stream = from_host(2, server.ports.tcp);
    let mut elsewhere = Client::over(stream, Protocol::V5);
    elsewhere.send(&Packet::Connect(hello(Protocol::V5, "elsewhere").into()));
    assert_eq!(elsewhere.next(), Got::ConnAck(0));
    file.write(&(ban("client_id", "thief") + &ban("username", "mallory") + &ban("address", "127.0.0.2/31")));
    server.signal("HUP");
    assert_eq!((thief.next(), thief.next()), (Got::Disconnect(0x87), Got::Closed));
    assert_eq!(old.next(), Got::Closed);
    assert_eq!((elsewhere.next(), elsewhere.next()), (Got::Disconnect(0x87), Got::Closed));
    assert_eq!(honest.ping(), []);
    // A device may see its end before it is counted.
    until(|| counted(&server, "mqtt_connections_evicted_total{reason=\"banned\"}") >= 3);
    assert_eq!(counted(&server, "mqtt_connections_evicted_total{reason=\"banned\"}"), 3);
}

#[test]
fn a_start_without_the_operators_file_is_refused() {
    let home = tempfile::tempdir().expect("make a directory");
    let output = crate::support::command(env!("CARGO_BIN_EXE_mqtt-server"))
        .current_dir(home.path())
        .args([
            "--non-tls",
            "--addr",
            "127.0.0.1:0",
            "--grpc-addr",
            "127.0.0.1:0",
            "--http-addr",
            "127.0.0.1:0",
        ])
        .env("MQTT_SERVER_BANS__FILE", "away.toml")
        .output()
        .expect("run mqtt-server");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("bans.file = away.toml"), "{said}");
    assert!(Path::new(home.path()).exists());
}

#[test]
fn a_client_that_connects_too_often_is_banned_for_a_time() {
    let toml = "[bans]\nflapping_connects = 3\nflapping_within = \"10m\"\nflapping_ban = \"10m\"\n";
    let server = Server::start_with(&[], toml);
    let code = |protocol, id: &str| answer(server.ports.tcp, hello(protocol, id));
    for _ in 0..3 {
        assert_eq!(code(Protocol::V5, "restless"), Got::ConnAck(0));
    }
    assert_eq!(code(Protocol::V5, "restless"), Got::ConnAck(0x8A));
    assert_eq!(code(Protocol::V4, "restless"), Got::ConnAck(5));
    assert_eq!(code(Protocol::V4, "calm"), Got::ConnAck(0));
    assert_eq!(server.metric("mqtt_flapping_bans_total"), 1);
    assert_eq!(counted(&server, "gateway_bans{source=\"flapping\"}"), 1);
}
