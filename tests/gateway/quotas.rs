//! Caps of identities and quotas of tenants, as devices meet them.

use std::io::Write as _;

use codec::{Connect, Packet};
use gateway_core::{Protocol, QoS};

use crate::{
    client::{Client, Got, hello, message},
    login::{answer, login, seconds_from_now, token},
    support::{Server, until, write_secret},
};

/// A CONNECT of a session that outlives its connection.
fn lasting(client_id: &str) -> Connect {
    Connect { clean_start: false, session_expiry: Some(3_600), ..hello(Protocol::V5, client_id) }
}

fn counted(server: &Server, row: &str) -> u64 {
    let page = server.http_get("/metrics").expect("read the metrics");
    let value = page.lines().find_map(|line| line.strip_prefix(row));
    value.and_then(|value| value.trim().parse::<f64>().ok()).unwrap_or_else(|| panic!("no {row}")) as u64
}

fn refused(server: &Server, of: &str, quota: &str) -> u64 {
    counted(server, &format!("mqtt_quota_refused_total{{of=\"{of}\",quota=\"{quota}\"}}"))
}

#[test]
fn a_listener_that_is_full_says_so_and_another_lets_in() {
    let server = Server::start_with(&[], "[tenants.test-tcp]\nconnections = 2\n");
    let mut first = Client::connect(server.ports.tcp, Protocol::V5, "first");
    let _second = Client::connect(server.ports.tcp, Protocol::V4, "second");
    assert_eq!(answer(server.ports.tcp, hello(Protocol::V5, "third")), Got::ConnAck(0x97));
    assert_eq!(answer(server.ports.tcp, hello(Protocol::V4, "third")), Got::ConnAck(3));
    assert_eq!(refused(&server, "tenant", "connections"), 2);
    until(|| server.log().contains("tenant \\\"test-tcp\\\" has used up its connections"));
    // Its own place is enough for who comes again, and for nobody else.
    let mut again = Client::connect(server.ports.tcp, Protocol::V5, "first");
    assert_eq!((first.next(), again.ping()), (Got::Disconnect(0x8E), vec![]));
    drop(again);
    until(|| answer(server.ports.tcp, hello(Protocol::V5, "third")) == Got::ConnAck(0));
}

/// The failure: every socket that dies between CONNECT and CONNACK, or in a takeover, costs a place for ever.
#[test]
fn places_are_free_again_however_connections_end() {
    let server = Server::start_with(&[], "[tenants.test-tcp]\nconnections = 8\nsessions = 8\n");
    let mut bytes = Vec::new();
    codec::encode(&Packet::Connect(hello(Protocol::V5, "dies").into()), Protocol::V5, &mut bytes);
    for round in 0..200 {
        let mut client = Client::open(server.ports.tcp, Protocol::V5);
        let _ = client.stream.write_all(&bytes[..bytes.len() - round % 2]);
        let socket = socket2::SockRef::from(&client.stream);
        // Ends by a reset, while the gateway may be about to answer.
        socket.set_linger(Some(std::time::Duration::ZERO)).expect("set the linger time");
    }
    until(|| {
        let clients: Vec<Client> =
            (0..8).map(|number| opened(server.ports.tcp, &format!("n{number}"))).collect();
        clients.into_iter().all(|mut client| client.next() == Got::ConnAck(0))
    });
}

/// A connection on which CONNECT was sent.
fn opened(port: u16, client_id: &str) -> Client {
    let mut client = Client::open(port, Protocol::V5);
    client.send(&Packet::Connect(hello(Protocol::V5, client_id).into()));
    client
}

#[test]
fn an_identity_is_what_was_proved_and_not_what_was_claimed() {
    let server = Server::start_with(&[], "[limits.identity]\nconnections = 1\nsubscriptions = 1\n");
    // Nobody proves anything here, so that each client id is somebody.
    let claims = |id: &str| login(Protocol::V5, id, Some("bob"), None);
    let mut a = Client::connect_with(server.ports.tcp, claims("a"));
    let _b = Client::connect_with(server.ports.tcp, claims("b"));
    assert_eq!((a.subscribe("x"), a.subscribe("y"), a.subscribe("x")), (0, 0x97, 0));
    assert_eq!(refused(&server, "identity", "subscriptions"), 1);
    let mut old = Client::connect(server.ports.tcp, Protocol::V4, "old");
    assert_eq!((old.subscribe("x"), old.subscribe("y")), (0, 0x80));
}

#[test]
fn sessions_that_are_away_count_before_and_after_a_restart() {
    const QUOTA: &str = "[tenants.test-tcp]\nsessions = 1\nretained_messages = 1\n";
    let server = Server::start_with(&[], QUOTA);
    let mut client = Client::connect_with(server.ports.tcp, lasting("away"));
    client.publish_acked("kept", b"x", true);
    client.send(&Packet::Disconnect(Box::default()));
    assert_eq!(client.next(), Got::Closed);
    assert_eq!(answer(server.ports.tcp, lasting("other")), Got::ConnAck(0x97));
    let server = server.kill_and_restart(&[], QUOTA);
    assert_eq!(answer(server.ports.tcp, lasting("other")), Got::ConnAck(0x97));
    assert_eq!(refused(&server, "tenant", "sessions"), 1);
    let mut client = Client::connect_with(server.ports.tcp, lasting("away"));
    client.publish_acked("more", b"x", true);
    assert_eq!(refused(&server, "tenant", "retained_messages"), 1);
    client.publish_acked("kept", b"y", true);
    client.subscribe("#");
    assert_eq!(client.ping(), [Got::Publish("kept".to_owned(), b"y".to_vec())]);
}

/// The failure: what does not fit into the rate is lost, or answers wait behind it until the client gives up.
#[test]
fn a_rate_to_a_client_delays_messages_and_loses_none() {
    const MESSAGES: u32 = 100;
    let server = Server::start_with(&[], "[limits]\nclient_message_rate_out = 40\n");
    let mut slow = Client::connect(server.ports.tcp, Protocol::V5, "slow");
    slow.subscribe_with("t", QoS::AtLeastOnce, None);
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "publisher");
    for number in 0..MESSAGES {
        let qos = if number % 2 == 0 { QoS::AtMostOnce } else { QoS::AtLeastOnce };
        publisher.send(&message("t", &number.to_be_bytes(), qos, false));
    }
    slow.send(&Packet::PingReq);
    let (mut got, mut before_ping) = (Vec::new(), None);
    while got.len() < MESSAGES as usize {
        match slow.next() {
            Got::Publish(_, payload) => got.push(u32::from_be_bytes(payload.try_into().expect("a number"))),
            Got::PingResp => before_ping = Some(got.len()),
            other => panic!("{other:?}"),
        }
    }
    got.sort_unstable();
    assert_eq!(got, (0..MESSAGES).collect::<Vec<_>>());
    assert!(before_ping.is_some(), "an answer need not wait for all messages");
    assert!(server.metric("mqtt_sending_pauses_total") > 0);
}

/// The failure: what waits behind a rate grows without a bound, or is dropped although the queue has room.
#[test]
fn behind_a_rate_the_queue_keeps_to_its_own_limit() {
    const MESSAGES: u64 = 200;
    const KEPT: u64 = 10;
    let toml = format!("[limits]\nclient_message_rate_out = 20\nmailbox_messages = {KEPT}\n");
    let server = Server::start_with(&[], &toml);
    let mut slow = Client::connect(server.ports.tcp, Protocol::V5, "slow");
    slow.subscribe("t");
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "publisher");
    let all: Vec<_> = (0..MESSAGES).map(|_| message("t", b"x", QoS::AtMostOnce, false)).collect();
    publisher.send_all(&all);
    assert_eq!(publisher.ping(), []);
    let dropped = counted(&server, "mqtt_messages_dropped_total{reason=\"queue_full\"}");
    assert!((1..=MESSAGES - KEPT).contains(&dropped), "{dropped}");
    for _ in dropped..MESSAGES {
        assert_eq!(slow.next(), Got::Publish("t".to_owned(), b"x".to_vec()));
    }
    assert_eq!(slow.ping(), []);
}

/// The owner of a device is named by its token, and by the record of its session after a restart.
#[test]
fn a_token_says_whose_quotas_count_also_after_a_restart() {
    let dir = tempfile::tempdir().expect("make a directory");
    let secret = b"0123456789abcdef0123456789abcdef";
    write_secret(&dir.path().join("secret"), secret);
    let toml = format!(
        "[auth.jwt]\nsecret_file = \"{}\"\nusername = \"sub\"\ntenant = \"org\"\n\
         [limits.identity]\nsessions = 2\n[tenants.acme]\nsessions = 3\n[tenants.\"*\"]\nsessions = 1\n",
        dir.path().join("secret").display()
    );
    let ask = |server: &Server, user: &str, org: &str, id: &str| {
        let claims = serde_json::json!({"sub": user, "org": org, "exp": seconds_from_now(3600)});
        let connect = login(Protocol::V5, id, Some("any"), Some(&token(secret, &claims)));
        let connect = Connect { clean_start: false, session_expiry: Some(3_600), ..connect };
        answer(server.ports.tcp, connect)
    };
    let (yes, no) = (Got::ConnAck(0), Got::ConnAck(0x97));
    let server = Server::start_with(&[], &toml);
    for (user, org, id, expected) in [
        ("ann", "acme", "1", &yes),
        ("ann", "acme", "2", &yes),
        ("ann", "acme", "3", &no),
        ("bob", "acme", "3", &yes),
        ("eve", "acme", "4", &no),
        ("eve", "zeta", "4", &yes),
        ("bob", "zeta", "5", &no),
    ] {
        assert_eq!(ask(&server, user, org, id), *expected, "{user} of {org} as {id}");
    }
    assert_eq!((refused(&server, "identity", "sessions"), refused(&server, "tenant", "sessions")), (1, 2));
    let server = server.kill_and_restart(&[], &toml);
    for (user, org, id, expected) in [
        ("ann", "other", "6", &no),
        ("eve", "acme", "5", &no),
        ("eve", "zeta", "5", &no),
        ("ann", "acme", "1", &yes),
    ] {
        assert_eq!(ask(&server, user, org, id), *expected, "{user} of {org} as {id} after the restart");
    }
}

/// The failure: a tenant has as much as it has connections, or a rate loses what it delays.
#[test]
fn a_tenants_rate_slows_all_its_devices_and_loses_nothing() {
    const MESSAGES: usize = 30;
    let server = Server::start_with(&[], "[tenants.test-tcp]\nmessage_rate = 20\n");
    let publish = |client: &mut Client| {
        client.send_all(&vec![message("t", b"x", QoS::AtLeastOnce, false); MESSAGES]);
        assert!((0..MESSAGES).all(|_| matches!(client.next(), Got::PubAck(_))));
    };
    let mut clients = ["a", "b"].map(|id| Client::connect(server.ports.tcp, Protocol::V5, id));
    clients.iter_mut().for_each(publish);
    assert!(server.metric("mqtt_rate_limit_pauses_total") > 0);
    assert_eq!(server.metric("mqtt_messages_dropped_total"), 0);
}
