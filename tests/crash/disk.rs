//! A disk that stands still, and one that is full.

use std::{fs, io::ErrorKind, path::Path};

use codec::{Ack, Connect, Packet};
use gateway_core::{Protocol, QoS};

use super::{
    blocking::{Client, Got, decoded, hello, will},
    broker::{Broker, MemoryKind},
    recorder,
    support::until,
};

/// Latest values have a store of their own, which is not what is tested.
const CONFIG: &str = "[latest]\nenabled = false\n[shutdown]\ndeadline = \"10m\"\n[store]\nrules = [\n\
                      { filter = \"away/soon/#\", durability = \"interval\" },\n\
                      { filter = \"+/never/#\", durability = \"none\" },\n]\n\
                      [[listeners]]\nname = \"soon\"\nkind = \"tcp\"\naddress = \"127.0.0.1:0\"\ndurability = \"interval\"\n\
                      [[listeners]]\nname = \"never\"\nkind = \"tcp\"\naddress = \"127.0.0.1:0\"\ndurability = \"none\"\n";

/// A server whose disk obeys the files `stall` and `full` of the control directory.
fn start(library: &Path, control: &Path) -> Broker {
    let broker = Broker::new(MemoryKind::Own);
    let data = fs::canonicalize(broker.data()).expect("the data directory");
    let mut environment = recorder::environment(library, &data, control);
    environment.retain(|(name, _)| name != "RECORDER_LOG");
    let mut broker = broker.with(environment, CONFIG);
    broker.start();
    broker.ready();
    broker
}

fn persistent(protocol: Protocol, name: &str) -> Connect {
    let mut connect = hello(protocol, name);
    connect.clean_start = false;
    connect.session_expiry = protocol.is_v5().then_some(3600);
    connect
}

/// Makes a persistent session with a subscription and leaves it.
fn absent(port: u16, protocol: Protocol, name: &str, filter: &str) {
    let mut client = Client::connect_with(port, persistent(protocol, name));
    assert_eq!(client.subscribe_with(filter, QoS::ExactlyOnce, None), 2);
    client.send(&Packet::Disconnect(Box::default()));
    assert_eq!(client.next(), Got::Closed);
}

/// Sessions with a connection, also those whose CONNECT is being answered.
fn connections(broker: &Broker) -> u64 {
    let metrics = broker.http_get("/metrics").unwrap_or_default();
    let value = metrics.lines().find_map(|line| line.strip_prefix("mqtt_connections "));
    value.map_or(0, |value| value.trim().parse().expect("a number"))
}

/// Nothing has come from the server so far.
fn is_silent(client: &Client) -> bool {
    client.stream.set_nonblocking(true).expect("set non-blocking");
    let peeked = client.stream.peek(&mut [0]);
    client.stream.set_nonblocking(false).expect("set blocking");
    matches!(peeked, Err(error) if error.kind() == ErrorKind::WouldBlock)
}

/// The payloads of a session that was away, none acknowledged, until `last`.
fn returned(port: u16, protocol: Protocol, name: &str, last: &str) -> Vec<String> {
    let mut client = Client::connect_with(port, persistent(protocol, name));
    let mut got = Vec::new();
    while got.last().is_none_or(|payload| payload != last) {
        match client.next() {
            Got::Publish(_, payload) => got.push(String::from_utf8(payload).expect("text")),
            other => panic!("{other:?} after {got:?}"),
        }
    }
    got
}

#[test]
fn a_disk_that_stands_still_stalls_nobody_who_does_not_need_it() {
    let Some(library) = recorder::library() else { return };
    let control = tempfile::tempdir().expect("make a directory");
    let broker = start(library, control.path());
    let port = broker.port;
    absent(port, Protocol::V5, "away", "away/#");
    let mut online = Client::connect_with(port, persistent(Protocol::V5, "online"));
    assert_eq!(online.subscribe_with("online/#", QoS::AtLeastOnce, None), 1);
    let mut clean = Client::connect(port, Protocol::V5, "clean");
    assert_eq!(clean.subscribe_with("clean/#", QoS::AtLeastOnce, None), 1);
    let mut held = Client::connect(port, Protocol::V5, "held");
    let mut other = Client::connect(port, Protocol::V4, "other");

    let stall = control.path().join("stall");
    fs::write(&stall, "").expect("stop the disk");
    held.publish("away/1", b"held", QoS::AtLeastOnce, false);
    until(|| control.path().join("stall.waiting").exists());
    for n in 0..200 {
        let payload = n.to_string().into_bytes();
        if n % 2 == 0 {
            other.publish("clean/1", &payload, QoS::AtMostOnce, false);
        } else {
            other.publish_acked("clean/1", &payload, false);
        }
        assert_eq!(clean.next(), Got::Publish("clean/1".to_owned(), payload));
    }
    // The receiver has it before the store has taken it up: nobody needs the disk.
    other.publish("online/1", b"quick", QoS::AtLeastOnce, false);
    let bytes = online.next_bytes().expect("a message");
    let Packet::Publish(publish) = decoded(&bytes, Protocol::V5) else { panic!("{bytes:02x?}") };
    let packet_id = publish.packet_id;
    online.send(&Packet::PubAck(Ack { packet_id, code: 0, reason_string: None, user: Vec::new() }));
    assert_eq!(other.next(), Got::PubAck(0));
    assert!(is_silent(&held), "acknowledged what is not on the disk");
    // Topics whose mode promises less do not wait for it.
    other.publish_acked("away/soon/1", b"soon", false);
    other.publish_acked("away/never/1", b"last", false);
    assert!(is_silent(&held), "acknowledged what is not on the disk");

    fs::remove_file(&stall).expect("let the disk go on");
    assert_eq!(held.next(), Got::PubAck(0));
    assert_eq!(returned(port, Protocol::V5, "away", "last"), ["held", "soon", "last"]);
}

#[test]
fn a_listener_that_promises_less_does_not_wait_for_a_stalled_disk() {
    let Some(library) = recorder::library() else { return };
    let control = tempfile::tempdir().expect("make a directory");
    let broker = start(library, control.path());
    let port = broker.port;
    absent(port, Protocol::V5, "away", "away/#");
    let mut held = Client::connect(port, Protocol::V5, "held");
    let [mut soon, mut never] =
        ["soon", "never"].map(|name| Client::connect(broker.listener(name), Protocol::V4, name));

    let stall = control.path().join("stall");
    fs::write(&stall, "").expect("stop the disk");
    held.publish("away/1", b"held", QoS::AtLeastOnce, false);
    until(|| control.path().join("stall.waiting").exists());
    soon.publish_acked("away/1", b"soon", false);
    never.publish_acked("away/1", b"never", false);
    for client in [&mut soon, &mut never] {
        client.publish("away/1", b"twice", QoS::ExactlyOnce, false);
        assert_eq!(client.next(), Got::Other(0x50), "PUBREC");
    }
    assert!(is_silent(&held), "the default listener promises the disk");
    // The topic's rule goes before the listener's.
    held.publish("away/never/1", b"last", QoS::AtLeastOnce, false);

    fs::remove_file(&stall).expect("let the disk go on");
    assert_eq!([held.next(), held.next()], [Got::PubAck(0), Got::PubAck(0)]);
    let mut got = returned(port, Protocol::V5, "away", "last");
    got.retain(|payload| payload != "twice");
    assert_eq!(got, ["held", "soon", "never", "last"]);
}

#[test]
fn a_connect_waiting_for_a_stalled_disk_does_not_delay_disconnects() {
    let Some(library) = recorder::library() else { return };
    let control = tempfile::tempdir().expect("make a directory");
    let mut broker = start(library, control.path());
    let port = broker.port;
    let mut other = Client::connect(port, Protocol::V5, "other");
    let resumed = Connect { will: Some(will("gone", b"gone")), ..persistent(Protocol::V5, "resumed") };
    drop(Client::connect_with(port, resumed.clone()));
    until(|| connections(&broker) == 1);
    let stall = control.path().join("stall");
    fs::write(&stall, "").expect("stop the disk");
    let waiting = [
        (Protocol::V5, resumed, 0x88),
        (Protocol::V5, persistent(Protocol::V5, "new-5"), 0x88),
        (Protocol::V4, persistent(Protocol::V4, "new-3"), 3),
    ]
    .map(|(protocol, connect, code)| {
        let mut client = Client::open(port, protocol);
        client.send(&Packet::Connect(Box::new(connect)));
        (client, code)
    });
    until(|| connections(&broker) == 4 && control.path().join("stall.waiting").exists());
    assert!(waiting.iter().all(|(client, _)| is_silent(client)), "accepted without the disk");

    broker.terminate();
    for (mut client, code) in waiting {
        assert_eq!(client.next(), Got::ConnAck(code));
        assert_eq!(client.next(), Got::Closed);
    }
    assert_eq!(other.next(), Got::Disconnect(0x8B));
    assert_eq!(other.next(), Got::Closed);
    fs::remove_file(&stall).expect("let the disk go on");
    broker.stop();
}

#[test]
fn a_full_disk_refuses_new_messages_loses_no_old_one_and_recovers() {
    let Some(library) = recorder::library() else { return };
    let control = tempfile::tempdir().expect("make a directory");
    let mut broker = start(library, control.path());
    let port = broker.port;
    absent(port, Protocol::V5, "away-5", "away/#");
    absent(port, Protocol::V4, "away-3", "away/#");
    let mut clean = Client::connect(port, Protocol::V5, "clean");
    assert_eq!(clean.subscribe_with("clean/#", QoS::AtLeastOnce, None), 1);
    let mut publisher = Client::connect(port, Protocol::V5, "publisher");
    let mut expected: Vec<String> = (0..20).map(|n| format!("before {n}")).collect();
    for payload in &expected {
        publisher.publish("away/1", payload.as_bytes(), QoS::AtLeastOnce, false);
        assert_eq!(publisher.next(), Got::PubAck(0));
    }

    let full = control.path().join("full");
    fs::write(&full, "").expect("fill the disk");
    for _ in 0..3 {
        publisher.publish("away/1", b"refused", QoS::AtLeastOnce, false);
        assert_eq!(publisher.next(), Got::PubAck(0x97));
    }
    publisher.publish("away/1", b"refused", QoS::ExactlyOnce, false);
    let bytes = publisher.next_bytes().expect("an answer");
    assert!(
        matches!(decoded(&bytes, Protocol::V5), Packet::PubRec(ack) if ack.code == 0x97),
        "PUBREC with 0x97, not {bytes:02x?}"
    );
    let mut old = Client::connect(port, Protocol::V4, "old");
    old.publish("away/1", b"refused", QoS::AtLeastOnce, false);
    assert_eq!(old.next(), Got::Closed);
    until(|| broker.readiness().contains("store: failing: state"));
    // A client that needs no disk is served.
    publisher.publish_acked("clean/1", b"x", false);
    assert_eq!(clean.next(), Got::Publish("clean/1".to_owned(), b"x".to_vec()));

    fs::remove_file(&full).expect("make room");
    let mut tries = 0;
    until(|| {
        tries += 1;
        let payload = format!("after {tries}");
        publisher.publish("away/1", payload.as_bytes(), QoS::AtLeastOnce, false);
        match publisher.next() {
            Got::PubAck(0) => expected.push(payload),
            Got::PubAck(0x97) => return false,
            other => panic!("{other:?}"),
        }
        true
    });
    until(|| !broker.readiness().contains("failing: state"));

    broker.kill();
    broker.start();
    broker.ready();
    let last = expected.last().expect("a message").clone();
    assert_eq!(returned(port, Protocol::V5, "away-5", &last), expected);
    assert_eq!(returned(port, Protocol::V4, "away-3", &last), expected);
}
