//! Normative statements seen packet by packet, with a client that does only what its test says. Each test names the
//! statements whose breach fails it; docs/conformance.md has the same list the other way round.

mod connect;
mod publish;
mod subscribe;

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    time::Duration,
};

use crate::client::{Client, Got, decoded, hello, will};
use crate::support::Server;
use codec::{Ack, AuthPacket, Connect, Packet, Publish, Unsubscribe, reason};
use gateway_core::{Properties, Protocol, QoS};

const BOTH: [Protocol; 2] = [Protocol::V4, Protocol::V5];

fn publish(topic: &str, packet_id: u16, qos: QoS) -> Publish<'_> {
    Publish {
        dup: false,
        qos,
        retain: false,
        topic,
        packet_id,
        payload: b"x",
        alias: None,
        expiry: None,
        ids: Vec::new(),
        properties: None,
    }
}

/// At QoS 0, nothing special.
fn filter(filter: &str) -> codec::SubscribeFilter {
    codec::SubscribeFilter {
        filter: filter.to_owned(),
        qos: QoS::AtMostOnce,
        no_local: false,
        retain_as_published: false,
        retain_handling: 0,
    }
}

fn subscribe(id: Option<u32>, filters: Vec<codec::SubscribeFilter>) -> Packet<'static> {
    Packet::Subscribe(codec::Subscribe { packet_id: 9, id, user: Vec::new(), filters })
}

fn ack(packet_id: u16) -> Ack {
    Ack { packet_id, code: 0, reason_string: None, user: Vec::new() }
}

/// A CONNECT whose session outlives its connections.
fn lasting(protocol: Protocol, client_id: &str) -> Connect {
    Connect {
        clean_start: false,
        session_expiry: protocol.is_v5().then_some(300),
        ..hello(protocol, client_id)
    }
}

fn unsubscribe(client: &mut Client, packet_id: u16, filters: &[&str]) -> Vec<u8> {
    let filters = filters.iter().map(|filter| (*filter).to_owned()).collect();
    client.send(&Packet::Unsubscribe(Unsubscribe { packet_id, user: Vec::new(), filters }));
    client.next_bytes().expect("UNSUBACK")
}

/// The next packet is a PUBLISH: id, QoS, DUP, payload.
fn delivery(client: &mut Client, protocol: Protocol) -> (u16, QoS, bool, Vec<u8>) {
    let bytes = client.next_bytes().expect("a PUBLISH");
    match decoded(&bytes, protocol) {
        Packet::Publish(publish) => (publish.packet_id, publish.qos, publish.dup, publish.payload.to_vec()),
        other => panic!("{other:?} instead of a PUBLISH"),
    }
}

/// Everything up to the end of the connection.
fn rest(client: &mut Client) -> Vec<Vec<u8>> {
    std::iter::from_fn(|| client.next_bytes()).collect()
}
