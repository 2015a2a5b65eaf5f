//! What waits for a receiver goes out as soon as it can: by itself, whole and in order.

#[path = "support/client.rs"]
mod client;
mod support;

use std::{io::Write as _, thread};

use client::{Client, Got};
use mqtt_server::{
    codec::{self, Packet, Publish},
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
