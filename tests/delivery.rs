//! What waits for a receiver goes out as soon as it can: by itself, whole and in order.

#[path = "support/client.rs"]
mod client;
mod support;

use std::{io::Write as _, thread};

use client::{Client, Got};
use mqtt_server::{
    codec::{self, Ack, Connect, Packet, Publish},
    types::{Protocol, QoS},
};
use support::{Server, until};

/// Nothing is dropped for want of room, and no timeout moves what is stuck.
const ROOMY: &str =
    "[limits]\nmailbox_messages = 1000000\nmailbox_bytes = \"256 MiB\"\nwrite_timeout = \"10m\"\n";

#[test]
fn a_reader_that_stopped_for_a_while_is_sent_all_that_waits_although_nobody_sends_anything_more() {
    const MESSAGES: u32 = 20_000;
    let server = Server::start_with(&[], ROOMY);
    let mut reader = Client::connect(server.ports.tcp, Protocol::V5, "reader");
    assert_eq!(reader.subscribe("bulk"), 0);
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "publisher");
    let mut payload = vec![b'x'; 1400];
    for n in 0..MESSAGES {
        payload[..4].copy_from_slice(&n.to_be_bytes());
        publisher.publish("bulk", &payload, QoS::AtMostOnce, false);
    }
    assert_eq!(publisher.ping(), []);
    assert!(server.metric("mqtt_queued_bytes") > 4 << 20, "too little waits for this test to mean anything");
    for n in 0..MESSAGES {
        payload[..4].copy_from_slice(&n.to_be_bytes());
        assert!(reader.next() == Got::Publish("bulk".to_owned(), payload.clone()), "message {n} is missing");
    }
    until(|| server.metric("mqtt_queued_bytes") == 0);
}

#[test]
fn a_burst_of_small_messages_reaches_a_reader_that_keeps_up() {
    const MESSAGES: usize = 30_000;
    let server = Server::start();
    let mut reader = Client::connect(server.ports.tcp, Protocol::V5, "reader");
    let topic = "a/topic/that/is/a/good/deal/longer/than/its/alias/so/that/more/goes/out/than/comes/in";
    assert_eq!(reader.subscribe(topic), 0);
    let reading = thread::spawn(move || {
        let mut came = 0;
        while came < MESSAGES {
            match reader.next() {
                Got::Publish(..) => came += 1,
                other => panic!("{other:?} after {came} messages"),
            }
        }
    });
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "publisher");
    let mut bytes = Vec::new();
    for n in 0..MESSAGES {
        let packet = Packet::Publish(Publish {
            dup: false,
            qos: QoS::AtMostOnce,
            retain: false,
            topic: if n == 0 { topic } else { "" },
            packet_id: 0,
            payload: b"x",
            alias: Some(1),
            expiry: None,
            ids: Vec::new(),
            properties: None,
        });
        codec::encode(&packet, Protocol::V5, &mut bytes);
    }
    publisher.stream.write_all(&bytes).expect("send the burst");
    assert_eq!(publisher.ping(), []);
    assert_eq!(server.metric("mqtt_messages_dropped_total"), 0);
    reading.join().expect("every message came");
}

#[test]
fn a_member_that_returns_gets_all_its_group_kept_although_its_own_queue_holds_less() {
    ["drop_newest", "drop_oldest", "disconnect"].into_iter().for_each(returns_to_a_long_group_queue);
}

fn returns_to_a_long_group_queue(overflow: &str) {
    const MESSAGES: u32 = 200;
    let server = Server::start_with(
        &[],
        &format!("[limits]\nmailbox_messages = 10\nmax_inflight = 10\noverflow = \"{overflow}\"\n"),
    );
    let hello = || Connect { clean_start: false, ..Connect::new(Protocol::V4, "member") };
    let mut member = Client::connect_with(server.ports.tcp, hello());
    assert_eq!(member.subscribe_with("$share/group/t", QoS::AtLeastOnce, None), 1);
    drop(member);
    until(|| server.metric("mqtt_connections") == 0);
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V4, "publisher");
    for n in 0..MESSAGES {
        publisher.publish_acked("t", &n.to_be_bytes(), false);
    }
    let mut member = Client::connect_with(server.ports.tcp, hello());
    for n in 0..MESSAGES {
        let bytes = member.next_bytes().expect("a PUBLISH");
        let Packet::Publish(publish) = client::decoded(&bytes, Protocol::V4) else { panic!("{bytes:?}") };
        assert_eq!(publish.payload, n.to_be_bytes(), "message {n} is missing, {overflow}");
        let ack = Ack { packet_id: publish.packet_id, code: 0, reason_string: None, user: Vec::new() };
        member.send(&Packet::PubAck(ack));
    }
    assert_eq!(server.metric("mqtt_messages_dropped_total"), 0, "{overflow}");
}

#[test]
fn a_device_that_connects_while_the_server_stops_is_told_so() {
    let mut server = Server::start();
    let mut late = Client::open(server.ports.tcp, Protocol::V5);
    let mut bytes = Vec::new();
    codec::encode(&Packet::Connect(Connect::new(Protocol::V5, "late").into()), Protocol::V5, &mut bytes);
    // A part of the CONNECT is there before, the rest comes while others are being disconnected.
    late.stream.write_all(&bytes[..5]).expect("send a part");
    let mut other = Client::connect(server.ports.tcp, Protocol::V5, "other");
    server.signal("TERM");
    assert_eq!(other.next(), Got::Disconnect(0x8B));
    late.stream.write_all(&bytes[5..]).expect("send the rest");
    if late.next() == Got::ConnAck(0) {
        assert_eq!(late.next(), Got::Disconnect(0x8B));
    }
    assert!(server.wait());
}
