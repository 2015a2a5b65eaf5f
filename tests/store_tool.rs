//! `mqtt-server store` on data directories that a real gateway has made.

#[path = "support/client.rs"]
mod client;
mod support;

use std::{fs, path::Path, process::Command, time::Duration};

use client::{Client, Got, decoded, hello};
use mqtt_server::{
    codec::{Ack, Connect, Packet},
    types::{Protocol, QoS},
};
use support::Server;

const MESSAGES: u32 = 200;

/// Runs `mqtt-server store ...`: whether it succeeded, and what it said.
fn store(args: &[&str], paths: &[&Path]) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mqtt-server"));
    command.arg("store").args(args).args(paths);
    support::run(&mut command, Duration::from_secs(120))
}

fn persistent(name: &str) -> Connect {
    let mut connect = hello(Protocol::V5, name);
    connect.clean_start = false;
    connect.session_expiry = Some(3600);
    connect
}

fn payload(n: u32) -> Vec<u8> {
    format!("message-{n:04}-end").into_bytes()
}

/// A gateway with two sessions that are away, each with all messages, and one that has a message it has not
/// acknowledged; with retained messages and latest values.
fn filled() -> Server {
    let server = Server::start();
    let port = server.ports.tcp;
    for (name, qos) in [("once", QoS::ExactlyOnce), ("least", QoS::AtLeastOnce)] {
        let mut client = Client::connect_with(port, persistent(name));
        client.subscribe_with("a/#", qos, Some(7));
        leave(client);
    }
    let mut publisher = Client::connect(port, Protocol::V5, "publisher");
    for n in 0..MESSAGES {
        publisher.publish_acked("a/topic", &payload(n), false);
    }
    for n in 0..3 {
        publisher.publish_acked(&format!("kept/{n}"), &payload(n), true);
    }
    // Taken over, its PUBREL never came.
    let mut half = Client::connect_with(port, persistent("half"));
    half.publish("a/topic", &payload(MESSAGES), QoS::ExactlyOnce, false);
    assert_eq!(half.next(), Got::Other(0x50));
    leave(half);
    server
}

fn leave(mut client: Client) {
    client.send(&Packet::Disconnect(Box::default()));
    assert_eq!(client.next(), Got::Closed);
}

/// What waits for `least`, as it comes and in order; acknowledged.
fn drain(server: &Server) -> Vec<Vec<u8>> {
    let mut client = Client::connect_with(server.ports.tcp, persistent("least"));
    let mut got = Vec::new();
    while got.len() <= MESSAGES as usize {
        let bytes = client.next_bytes().expect("a packet");
        let Packet::Publish(publish) = decoded(&bytes, Protocol::V5) else { panic!("{bytes:02x?}") };
        assert_eq!((publish.ids.as_slice(), publish.topic), ([7].as_slice(), "a/topic"));
        got.push(publish.payload.to_vec());
        let packet_id = publish.packet_id;
        client.send(&Packet::PubAck(Ack { packet_id, code: 0, reason_string: None, user: Vec::new() }));
    }
    leave(client);
    got
}

/// The retained messages, by topic.
fn retained(server: &Server) -> Vec<Got> {
    let mut client = Client::connect(server.ports.tcp, Protocol::V5, "reader");
    client.subscribe("kept/#");
    let mut got = client.ping();
    got.sort_by_key(|got| format!("{got:?}"));
    got
}

fn everything() -> Vec<Vec<u8>> {
    (0..=MESSAGES).map(payload).collect()
}

/// A gateway on `data`, in the place of `server`.
fn restart_on(mut server: Server, data: &Path) -> Server {
    assert!(server.stop());
    let own = server.dir().join("data");
    fs::rename(&own, server.dir().join("data.old")).expect("move the old directory");
    fs::rename(data, own).expect("move the new directory");
    server.kill_and_restart(&[], "")
}

#[test]
fn a_backup_beside_a_running_gateway_starts_with_everything_acknowledged_before() {
    let server = filled();
    let (data, copy) = (server.dir().join("data"), server.dir().join("copy"));
    let (success, said) = store(&["check"], &[&data]);
    assert!(!success && said.contains("in use"), "{said}");
    // Under load.
    let mut busy = Client::connect(server.ports.tcp, Protocol::V5, "busy");
    busy.send_all(
        &(0..1000).map(|_| client::message("b/x", b"x", QoS::AtMostOnce, false)).collect::<Vec<_>>(),
    );
    let (success, said) = store(&["backup"], &[&data, &copy]);
    assert!(success, "{said}");
    let (success, said) = store(&["check"], &[&copy]);
    assert!(success && said.contains("queues"), "{said}");
    let (success, said) = store(&["backup"], &[&data, &copy]);
    assert!(!success && said.contains("not empty"), "{said}");
    let server = restart_on(server, &copy);
    assert_eq!(drain(&server), everything());
    assert_eq!(retained(&server).len(), 3);
}

#[test]
fn check_finds_one_flipped_byte_and_compact_loses_nothing() {
    let mut server = filled();
    assert!(server.stop());
    let data = server.dir().join("data");
    let (success, said) = store(&["check"], &[&data]);
    assert!(success && !said.contains("problem"), "{said}");
    let (success, said) = store(&["compact"], &[&data]);
    assert!(success, "{said}");
    let (success, said) = store(&["check"], &[&data]);
    assert!(success, "{said}");

    let file = data.join("queues/data.mdb");
    let sound = fs::read(&file).expect("read the queues");
    let mut bytes = sound.clone();
    let body = payload(17);
    let at = bytes.windows(body.len()).position(|window| window == body).expect("the message's body");
    bytes[at] ^= 1;
    fs::write(&file, &bytes).expect("damage the queues");
    let (success, said) = store(&["check"], &[&data]);
    assert!(!success && said.contains(", 1 damaged"), "{said}");
    fs::write(&file, &sound).expect("mend the queues");

    let server = server.kill_and_restart(&[], "");
    assert_eq!(drain(&server), everything());
    assert_eq!(retained(&server).len(), 3);
}
