//! The memory that peers make the gateway hold is on an account: each attack here would take more memory than there is,
//! and neither gets it nor keeps others from theirs.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::TcpStream,
    time::Duration,
};

use crate::client::{Client, Got};
use crate::support::Server;
use codec::{Connect, ConnectWill, Packet, Publish};
use gateway_core::{Protocol, QoS};

const MIB: usize = 1 << 20;
/// 8 MiB for everything.
pub(crate) const LIMITS: &str =
    "[limits]\nmemory_budget = \"8 MiB\"\nmailbox_bytes = \"2 MiB\"\nstream_buffer = \"2 MiB\"\n";

/// Bytes on the account for what is so named.
pub(crate) fn held(server: &Server, kind: &str) -> usize {
    let page = server.http_get("/metrics").expect("read the metrics");
    let name = format!("gateway_memory_bytes{{kind=\"{kind}\"}} ");
    let row = page.lines().find_map(|line| line.strip_prefix(&name));
    row.unwrap_or_else(|| panic!("no {name} in {page}")).parse().expect("a number")
}

/// Somebody who has nothing to do with it can connect, publish and subscribe.
fn others_go_on(server: &Server, name: &str) {
    let mut other = Client::connect(server.ports.tcp, Protocol::V5, name);
    assert_eq!(other.subscribe("others"), 0);
    other.publish("others", &[b'x'; 10_000], QoS::AtLeastOnce, false);
    let mut got = [other.next(), other.next()];
    got.sort_by_key(|got| matches!(got, Got::PubAck(_)));
    assert!(matches!(&got[0], Got::Publish(topic, _) if topic == "others"), "{got:?}");
    assert_eq!(got[1], Got::PubAck(0));
}

/// A QoS 0 PUBLISH of nothing.
fn publish_of(topic: &str) -> Publish<'_> {
    let Packet::Publish(publish) = crate::client::message(topic, b"", QoS::AtMostOnce, false) else {
        panic!("another packet")
    };
    publish
}

/// Writes what the server takes; it may close meanwhile.
fn send(stream: &mut TcpStream, bytes: &[u8]) {
    let _ = stream.write_all(bytes);
}

/// A QoS 0 PUBLISH that announces a MiB and has the first 900 KiB of it.
fn beginning() -> Vec<u8> {
    let mut bytes = vec![0x30, 0xFC, 0xFF, 0x3F, 0, 1, b't', 0];
    bytes.resize(900 << 10, b'x');
    bytes
}

#[test]
fn packets_that_are_never_completed_keep_to_the_budget_and_to_their_time() {
    let server = Server::start_with(&[], &format!("{LIMITS}packet_timeout = \"2s\"\n"));
    let idle = Client::connect(server.ports.tcp, Protocol::V5, "idle");
    let mut attackers: Vec<Client> =
        (0..30).map(|n| Client::connect(server.ports.tcp, Protocol::V5, &format!("attacker-{n}"))).collect();
    let mut most = 0;
    for (n, attacker) in attackers.iter_mut().enumerate() {
        send(&mut attacker.stream, &beginning());
        most = most.max(held(&server, "partial_packets"));
        if n % 10 == 9 {
            others_go_on(&server, "other");
        }
    }
    assert!((MIB..8 * MIB).contains(&most), "{most} bytes");
    assert!(server.metric("mqtt_memory_refused_total") > 0);
    // Connections that got memory lose it, and only they.
    crate::support::until(|| held(&server, "partial_packets") == 0);
    assert!(server.metric("mqtt_packet_timeouts_total") > 0);
    let mut idle = idle;
    assert_eq!(idle.ping(), []);
}

#[test]
fn unfinished_connects_get_a_sixteenth_of_the_budget_and_no_more() {
    let server = Server::start_with(&[], LIMITS);
    let mut connect = vec![0x10, 0x80, 0x80, 0x0F, 0, 4, b'M', b'Q', b'T', b'T', 5, 0, 0, 60, 0];
    connect.resize(200 << 10, b'x');
    let open = || TcpStream::connect(crate::support::local(server.ports.tcp)).expect("connect");
    let mut attackers = Vec::new();
    for _ in 0..30 {
        let mut attacker = open();
        send(&mut attacker, &connect);
        attackers.push(attacker);
        assert!(held(&server, "unauthenticated") <= 512 << 10);
    }
    crate::support::until(|| server.metric("mqtt_memory_refused_total") > 0);
    others_go_on(&server, "other");
    // One that is too large is not even begun, and told why.
    let mut large = Client::over(open(), Protocol::V5);
    connect[3] = 0x20;
    send(&mut large.stream, &connect[..100]);
    assert_eq!(large.next(), Got::ConnAck(0x95));
    drop(attackers);
    crate::support::until(|| held(&server, "unauthenticated") == 0);
}

/// A frame of HTTP/2.
fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let [_, len @ ..] = u32::try_from(payload.len()).expect("a small frame").to_be_bytes();
    [&len[..], &[kind, flags, 0, 0, 0, stream], payload].concat()
}

/// The opening of an HTTP/2 connection, and a gRPC call that announces a message of a MiB and sends 60 KB of it.
fn unfinished_call() -> Vec<u8> {
    let text = |text: &str| [&[u8::try_from(text.len()).expect("short")], text.as_bytes()].concat();
    let headers = [
        vec![0x83, 0x86, 0x04],
        text("/gateway.v1.Publisher/PublishBatch"),
        vec![0x01],
        text("localhost"),
        vec![0x0F, 0x10],
        text("application/grpc"),
    ];
    let mut message = vec![0, 0, 0x10, 0, 0];
    message.resize(60_000, 0);
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    bytes.extend(frame(4, 0, 0, &[]));
    bytes.extend(frame(1, 4, 1, &headers.concat()));
    bytes.extend(message.chunks(15_000).flat_map(|piece| frame(0, 0, 1, piece)));
    bytes
}

/// Rules out that backends' requests under way are on no account: ten connections took 4 GB.
#[test]
fn unfinished_grpc_requests_keep_to_the_budget_and_to_their_time() {
    let toml = format!("{LIMITS}packet_timeout = \"2s\"\n[grpc]\ntls = false\n");
    let server = Server::start_with(&["--insecure-grpc"], &toml);
    let mut attackers = Vec::new();
    let mut most = 0;
    for n in 0..150 {
        let mut attacker = TcpStream::connect(crate::support::local(server.ports.grpc)).expect("connect");
        send(&mut attacker, &unfinished_call());
        attackers.push(attacker);
        if n % 10 == 9 {
            most = most.max(held(&server, "grpc_messages"));
        }
    }
    crate::support::until(|| server.metric("mqtt_memory_refused_total") > 0);
    assert!((MIB..=4 * MIB).contains(&most), "{most} bytes");
    others_go_on(&server, "other");
    crate::support::until(|| server.metric("gateway_grpc_requests_late_total") > 0);
    drop(attackers);
    crate::support::until(|| held(&server, "grpc_messages") == 0);
}

#[test]
fn a_websocket_client_that_pings_and_does_not_read_is_not_read_from() {
    let server = Server::start_with(&[], "[limits]\nwrite_timeout = \"10m\"\n");
    let mut stream = TcpStream::connect(crate::support::local(server.ports.ws)).expect("connect");
    let request = "GET /mqtt HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
                   Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\
                   Sec-WebSocket-Protocol: mqtt\r\n\r\n";
    stream.write_all(request.as_bytes()).expect("ask");
    let mut answer = [0; 4096];
    assert!(stream.read(&mut answer).expect("an answer") > 12 && answer.starts_with(b"HTTP/1.1 101"));
    // An MQTT CONNECT, then pings with 125 bytes each; the mask is 0.
    let connect = [0x82, 0x8F, 0, 0, 0, 0, 0x10, 13, 0, 4, b'M', b'Q', b'T', b'T', 4, 2, 0, 0, 0, 1, b'w'];
    stream.write_all(&connect).expect("send");
    assert!(stream.read(&mut answer).expect("CONNACK") > 0);
    let mut ping = vec![0x89, 0xFD, 0, 0, 0, 0];
    ping.resize(6 + 125, b'p');
    let many = ping.repeat(1000);
    stream.set_write_timeout(Some(Duration::from_secs(5))).expect("set");
    let (mut sent, mut at) = (0, 0);
    // The buffers of both sockets hold less than this.
    while sent < 64 * MIB {
        match stream.write(&many[at..]) {
            Ok(n) => (sent, at) = (sent + n, (at + n) % many.len()),
            // A child of another test has ended.
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => {
                assert!(matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut), "{error}");
                break;
            }
        }
    }
    assert!(sent < 64 * MIB, "the server went on reading");
    let replies = held(&server, "replies");
    assert!((1..MIB).contains(&replies), "{replies} bytes");
    others_go_on(&server, "other");
    // A client that reads again is read from again.
    stream.set_write_timeout(None).expect("set");
    let mut reader = stream.try_clone().expect("clone");
    let writer = std::thread::spawn(move || {
        send(&mut stream, &many[at..]);
        send(&mut stream, &[0x88, 0x80, 0, 0, 0, 0]);
    });
    let mut sink = vec![0; 1 << 16];
    while reader.read(&mut sink).is_ok_and(|read| read > 0) {}
    writer.join().expect("the writer");
    crate::support::until(|| held(&server, "replies") == 0);
}

/// Each holds what outlives its packet; the quotas of a session come first, then the shares of all.
#[test]
fn wills_filters_and_sessions_keep_to_their_shares() {
    let limits = format!("{LIMITS}will_bytes = \"50 KiB\"\nsubscription_bytes = \"64 KiB\"\n");
    let server = Server::start_with(&[], &limits);
    let will = |id: &str, bytes: usize| {
        let will = ConnectWill { payload: vec![0; bytes].into(), ..crate::client::will("w", b"") };
        let mut client = Client::open(server.ports.tcp, Protocol::V5);
        client.send(&Packet::Connect(Box::new(Connect {
            will: Some(will),
            ..crate::client::hello(Protocol::V5, id)
        })));
        (client.next(), client)
    };
    assert_eq!(will("large", 60 << 10).0, Got::ConnAck(0x97));
    let large = ConnectWill { payload: vec![0; 60 << 10].into(), ..crate::client::will("w", b"") };
    let mut old = Client::open(server.ports.tcp, Protocol::V4);
    let hello = Connect { will: Some(large), ..crate::client::hello(Protocol::V4, "old") };
    old.send(&Packet::Connect(Box::new(hello)));
    assert_eq!(old.next(), Got::ConnAck(3), "server unavailable");
    let (answers, wills): (Vec<Got>, Vec<Client>) =
        (0..40).map(|n| will(&format!("will-{n}"), 40 << 10)).unzip();
    let taken = answers.iter().filter(|answer| **answer == Got::ConnAck(0)).count();
    assert!((10..40).contains(&taken), "{answers:?}");
    assert!(answers.contains(&Got::ConnAck(0x97)) && held(&server, "wills") <= MIB);
    others_go_on(&server, "other");
    for client in wills {
        drop(client);
    }
    crate::support::until(|| held(&server, "wills") == 0);

    // A session's quota, then that of all.
    let mut clients = Vec::new();
    let mut refused = 0;
    for n in 0..60 {
        let mut client = Client::connect(server.ports.tcp, Protocol::V5, &format!("filters-{n}"));
        let codes: Vec<u8> =
            (0..40).map(|k| client.subscribe(&format!("{n}/{k}/{}", "x".repeat(3000)))).collect();
        let granted = codes.iter().filter(|code| **code == 0).count();
        assert!(granted <= 22 && codes.iter().all(|code| matches!(code, 0 | 0x97)), "{codes:?}");
        refused += usize::from(granted < 10);
        clients.push(client);
    }
    assert!(refused > 0 && held(&server, "filters") <= 2 * MIB);
    others_go_on(&server, "other");
    drop(clients);
    crate::support::until(|| held(&server, "filters") == 0);
    crate::support::until(|| held(&server, "sessions") == 0);
}

/// A packet begun by a connection goes with it when another takes its session: neither its bytes nor its packet remain.
#[test]
fn a_takeover_in_the_middle_of_a_packet_leaves_nothing_of_it() {
    let server = Server::start_with(&[], LIMITS);
    let lasting = || Connect {
        clean_start: false,
        session_expiry: Some(60),
        ..crate::client::hello(Protocol::V5, "taken")
    };
    let mut old = Client::connect_with(server.ports.tcp, lasting());
    assert_eq!(old.subscribe_with("own", QoS::AtLeastOnce, None), 1);
    send(&mut old.stream, &beginning());
    crate::support::until(|| held(&server, "partial_packets") >= 900 << 10);

    let mut new = Client::connect_with(server.ports.tcp, lasting());
    assert_eq!(old.next(), Got::Disconnect(0x8E));
    assert_eq!(old.next(), Got::Closed);
    crate::support::until(|| held(&server, "partial_packets") == 0);
    // The rest of the packet does no harm to the session, which is whole.
    send(&mut old.stream, &[b'x'; 200 << 10]);
    new.publish("own", b"after", QoS::AtLeastOnce, false);
    let mut got = [new.next(), new.next()];
    got.sort_by_key(|got| matches!(got, Got::PubAck(_)));
    assert_eq!(got, [Got::Publish("own".to_owned(), b"after".to_vec()), Got::PubAck(0)]);
    assert_eq!(new.ping(), []);
}

/// A table of aliases lasts as long as its connection; nobody counted it.
#[test]
fn topic_aliases_keep_to_their_share_and_end_who_wants_more() {
    let server = Server::start_with(&[], LIMITS);
    let mut clients = Vec::new();
    for n in 0..20 {
        let mut client = Client::connect(server.ports.tcp, Protocol::V5, &format!("aliases-{n}"));
        let topic = "a".repeat(4000);
        let set = |alias| Packet::Publish(Publish { alias: Some(alias), ..publish_of(&topic) });
        let mut bytes = Vec::new();
        for packet in (1..=64).map(set).chain([Packet::PingReq]) {
            codec::encode(&packet, Protocol::V5, &mut bytes);
        }
        send(&mut client.stream, &bytes);
        // A client that is closed while it sends may not get to read the reason.
        let got = client.next();
        assert!(matches!(got, Got::PingResp | Got::Disconnect(0x97) | Got::Closed), "{got:?}");
        assert!(held(&server, "topic_aliases") <= 2 * MIB);
        clients.push(client);
    }
    assert!(server.metric("mqtt_memory_refused_total") > 0);
    others_go_on(&server, "other");
    drop(clients);
    crate::support::until(|| held(&server, "topic_aliases") == 0);
}

/// Sent messages are held until they are acknowledged; nobody counted them, nor the bytes that a full socket does not
/// take.
#[test]
fn unacknowledged_and_unread_messages_are_on_the_account() {
    let server = Server::start_with(&[], LIMITS);
    let mut subscriber = Client::connect(server.ports.tcp, Protocol::V5, "subscriber");
    assert_eq!(subscriber.subscribe_with("in/flight", QoS::AtLeastOnce, None), 1);
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "publisher");
    for _ in 0..10 {
        publisher.publish("in/flight", &[b'x'; 50_000], QoS::AtLeastOnce, false);
        assert!(matches!(publisher.next(), Got::PubAck(0)));
        assert!(matches!(subscriber.next(), Got::Publish(..)));
    }
    let waiting = held(&server, "queued");
    assert!((500_000..600_000).contains(&waiting), "{waiting} bytes");
    drop(subscriber);
    crate::support::until(|| held(&server, "queued") == 0);

    // Nobody reads, and all that is sent at QoS 0 comes to a bound.
    let mut deaf: Vec<Client> =
        (0..6).map(|n| Client::connect(server.ports.tcp, Protocol::V5, &format!("deaf-{n}"))).collect();
    for client in &mut deaf {
        assert_eq!(client.subscribe("deaf"), 0);
    }
    // So small that the publisher keeps its connection, whatever the others hold while it sends.
    let payload = vec![b'x'; 10_000];
    for _ in 0..2_000 {
        publisher.publish("deaf", &payload, QoS::AtMostOnce, false);
    }
    assert_eq!(publisher.ping(), []);
    let (replies, queued) = (held(&server, "replies"), held(&server, "queued"));
    assert!(replies > 100_000 && replies + queued <= 8 * MIB, "{replies} and {queued} bytes");
    others_go_on(&server, "other");
    drop(deaf);
    crate::support::until(|| held(&server, "replies") + held(&server, "queued") == 0);
}

/// Retained payloads stay in memory for a while; a burst of them was only bounded by `retained_bytes`.
#[test]
fn retained_messages_keep_to_their_share() {
    let server = Server::start_with(&[], LIMITS);
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "publisher");
    let payload = vec![b'x'; 300_000];
    for n in 0..20 {
        publisher.publish(&format!("retained/{n}"), &payload, QoS::AtMostOnce, true);
        assert_eq!(publisher.ping(), []);
        assert!(held(&server, "retained") <= 2 * MIB);
    }
    assert!(server.metric("mqtt_retained_refused_total") > 0);
    // Small ones fit, and what was there leaves memory once it is on disk.
    publisher.publish("retained/small", b"x", QoS::AtMostOnce, true);
    crate::support::until(|| held(&server, "retained") < MIB);
    others_go_on(&server, "other");
}
