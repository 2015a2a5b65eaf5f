//! Normative statements seen packet by packet, with a client that does only what its test says. Each test names the
//! statements whose breach fails it; docs/conformance.md has the same list the other way round.

#[path = "support/client.rs"]
mod client;
mod support;

use std::io::Write as _;

use client::{Client, Got, decoded, hello, will};
use mqtt_server::{
    codec::{self, Ack, Auth, Connect, Packet, Publish, Unsubscribe},
    types::{Properties, Protocol, QoS},
};
use support::Server;

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

/// [MQTT-3.10.4-3] of both versions, [MQTT-4.4.0-1]: QoS 1 and 2 deliveries that had begun are sent again after a
/// break, with their ids and DUP, and finished, although the subscriptions are gone; nothing new begins.
#[test]
fn unsubscribe_does_not_cut_off_what_had_begun() {
    let server = Server::start();
    for protocol in BOTH {
        let name = format!("sub-{protocol:?}");
        let mut client = Client::connect_with(server.ports.tcp, lasting(protocol, &name));
        let mut sender = Client::connect(server.ports.tcp, protocol, "sender");
        let filters = [("one", QoS::AtLeastOnce), ("two", QoS::ExactlyOnce)];
        for (filter, qos) in filters {
            assert_eq!(client.subscribe_with(filter, qos, None), qos as u8);
        }
        for (filter, _) in filters {
            sender.send(&Packet::Publish(publish(filter, 1, QoS::ExactlyOnce)));
            assert_eq!(sender.next(), Got::Other(0x50));
            sender.send(&Packet::PubRel(ack(1)));
            assert_eq!(sender.next(), Got::Other(0x70));
        }
        let first = [delivery(&mut client, protocol), delivery(&mut client, protocol)];
        assert_eq!((first[0].1, first[1].1), (QoS::AtLeastOnce, QoS::ExactlyOnce));
        assert_eq!(unsubscribe(&mut client, 7, &["one", "two"])[0], 0xb0);

        drop(client);
        let mut client = Client::connect_with(server.ports.tcp, lasting(protocol, &name));
        let again = [delivery(&mut client, protocol), delivery(&mut client, protocol)];
        assert_eq!(again.clone().map(|(id, qos, ..)| (id, qos)), first.map(|(id, qos, ..)| (id, qos)));
        assert!(again.iter().all(|(_, _, dup, _)| *dup), "{again:?}");
        client.send(&Packet::PubAck(ack(again[0].0)));
        client.send(&Packet::PubRec(ack(again[1].0)));
        assert_eq!(client.next_bytes().expect("PUBREL")[..4], [0x62, 2, 0, again[1].0 as u8]);
        client.send(&Packet::PubComp(ack(again[1].0)));
        sender.publish_acked("one", b"new", false);
        assert_eq!(client.ping(), [], "a new message after UNSUBSCRIBE");
    }
}

/// [MQTT-3.10.4-6] of both versions, [MQTT-3.10.4-4], [MQTT-3.10.4-5], [MQTT-3.11.3-1], 3.1.1: [MQTT-2.3.1-7].
#[test]
fn one_unsuback_answers_many_filters_in_their_order() {
    let server = Server::start();
    for protocol in BOTH {
        let mut client = Client::connect(server.ports.tcp, protocol, "c");
        for filter in ["a", "b/+", "$share/g/c", "kept"] {
            assert_eq!(client.subscribe(filter), 0);
        }
        let unsuback = unsubscribe(&mut client, 0x1234, &["a", "never", "b/+", "$share/g/c", "a"]);
        let expected: &[u8] = match protocol {
            Protocol::V5 => &[0xb0, 8, 0x12, 0x34, 0, 0, 0x11, 0, 0, 0x11],
            _ => &[0xb0, 2, 0x12, 0x34],
        };
        assert_eq!(unsuback, expected);
        for topic in ["a", "b/x", "c"] {
            client.publish(topic, b"gone", QoS::AtMostOnce, false);
        }
        client.publish("kept", b"x", QoS::AtMostOnce, false);
        assert_eq!(client.ping(), [Got::Publish("kept".to_owned(), b"x".to_vec())]);
    }
}

/// 3.1.1: [MQTT-4.8.0-2], [MQTT-3.3.5-2]: out of memory for messages, a QoS 1 PUBLISH is not acknowledged and its
/// connection ends; 5.0 has a reason code for it and goes on.
#[test]
fn a_transient_error_ends_the_connection_where_no_code_can_tell_it() {
    let limits = "[limits]\nmemory_budget = \"1 MiB\"\nmailbox_bytes = \"1 MiB\"\noffline_bytes = \"1 MiB\"\n\
                  max_packet_size = \"512 KiB\"\n[store]\nenabled = false\n";
    let server = Server::start_with(&[], limits);
    for number in 0..2 {
        let mut away =
            Client::connect_with(server.ports.tcp, lasting(Protocol::V5, &format!("away-{number}")));
        assert_eq!(away.subscribe_with(&format!("t/{number}"), QoS::AtLeastOnce, None), 1);
    }
    support::until(|| server.metric("mqtt_connections") == 0);
    let payload = vec![0; 400 << 10];
    let mut v5 = Client::connect(server.ports.tcp, Protocol::V5, "five");
    let codes: Vec<Got> = ["t/0", "t/0", "t/1", "t/1"]
        .into_iter()
        .map(|topic| {
            v5.publish(topic, &payload, QoS::AtLeastOnce, false);
            v5.next()
        })
        .collect();
    assert_eq!(codes, [Got::PubAck(0), Got::PubAck(0), Got::PubAck(0x97), Got::PubAck(0x97)]);
    let mut v4 = Client::connect(server.ports.tcp, Protocol::V4, "four");
    v4.publish("t/1", &payload, QoS::AtLeastOnce, false);
    assert_eq!(v4.next(), Got::Closed);
    assert_eq!(v5.ping(), []);
}

/// [MQTT-3.2.0-1] of both versions, [MQTT-3.2.0-2], [MQTT-3.1.0-2]: CONNACK is first although messages wait, and
/// neither they nor a second CONNECT bring another.
#[test]
fn a_connection_gets_one_connack_and_nothing_before_it() {
    let server = Server::start();
    for protocol in BOTH {
        let name = format!("c-{protocol:?}");
        let mut client = Client::connect_with(server.ports.tcp, lasting(protocol, &name));
        assert_eq!(client.subscribe_with("q", QoS::AtLeastOnce, None), 1);
        drop(client);
        support::until(|| server.metric("mqtt_connections") == 0);
        let mut sender = Client::connect(server.ports.tcp, protocol, "sender");
        for _ in 0..20 {
            sender.publish_acked("q", b"waits", false);
        }
        drop(sender);
        let mut client = Client::open(server.ports.tcp, protocol);
        client.send(&Packet::Connect(Box::new(lasting(protocol, &name))));
        let connack = client.next_bytes().expect("CONNACK");
        assert_eq!((connack[0], connack[2], connack[3]), (0x20, 1, 0), "session present, accepted");
        for _ in 0..20 {
            assert_eq!(client.next_bytes().expect("a message that waited")[0] >> 4, 3);
        }
        client.send(&Packet::Connect(Box::new(lasting(protocol, &name))));
        let types: Vec<u8> = rest(&mut client).iter().map(|packet| packet[0] >> 4).collect();
        let end: &[u8] = if protocol.is_v5() { &[14] } else { &[] };
        assert_eq!(types, end);
        support::until(|| server.metric("mqtt_connections") == 0);
    }
}

/// [MQTT-3.1.2-29]: only PUBLISH, CONNACK and DISCONNECT may have a reason string or user properties.
#[test]
fn no_packet_explains_itself_to_a_client_that_declined() {
    let server = Server::start();
    let connect = Connect { request_problem_information: false, ..hello(Protocol::V5, "c") };
    let mut client = Client::connect_with(server.ports.tcp, connect);
    let user = vec![("k".to_owned(), "v".to_owned())];
    let properties = Some(std::sync::Arc::new(Properties { user: user.clone(), ..Properties::default() }));
    assert_eq!(client.subscribe("u"), 0);
    client.send(&Packet::Publish(Publish { properties, ..publish("u", 0, QoS::AtMostOnce) }));
    match decoded(&client.next_bytes().expect("PUBLISH"), Protocol::V5) {
        Packet::Publish(publish) => assert_eq!(publish.properties.expect("properties").user, user),
        other => panic!("{other:?}"),
    }
    let filters = vec!["never".to_owned()];
    for (request, code) in [
        (subscribe(None, vec![filter("a/#/b")]), 0x8f),
        (Packet::Unsubscribe(Unsubscribe { packet_id: 9, user: Vec::new(), filters }), 0x11),
        (Packet::Publish(publish("nobody", 9, QoS::AtLeastOnce)), 0x10),
        (Packet::Publish(publish("$SYS/x", 9, QoS::AtLeastOnce)), 0x90),
        (Packet::Publish(publish("$SYS/x", 9, QoS::ExactlyOnce)), 0x90),
        (Packet::PubRel(ack(99)), 0x92),
        (Packet::PubRec(ack(99)), 0x92),
    ] {
        client.send(&request);
        let bytes = client.next_bytes().expect("an answer");
        let (text, user, got) = match decoded(&bytes, Protocol::V5) {
            Packet::SubAck(ack) | Packet::UnsubAck(ack) => (ack.reason_string, ack.user, ack.codes[0]),
            Packet::PubAck(ack) | Packet::PubRec(ack) | Packet::PubRel(ack) | Packet::PubComp(ack) => {
                (ack.reason_string, ack.user, ack.code)
            }
            other => panic!("{other:?}"),
        };
        assert_eq!((text, user, got), (None, Vec::new(), code), "{request:?}");
    }
}

/// [MQTT-3.14.2-2], [MQTT-3.14.4-1], [MQTT-3.14.4-2], [MQTT-4.13.2-1], [MQTT-3.1.4-3]: whatever ends the connection,
/// under traffic: the DISCONNECT has no session expiry, nothing follows it, and the server closes.
#[test]
fn the_servers_disconnect_is_the_last_it_says() {
    let server = Server::start_with(&[], "[limits]\nmax_packet_size = \"64 KiB\"\n");
    let port = server.ports.tcp;
    let mut sender = Client::connect(port, Protocol::V5, "sender");
    type Provoke = fn(&mut Client, u16);
    let cases: [(&str, u8, Provoke); 5] = [
        ("takeover", 0x8e, |_, port| drop(Client::connect_with(port, lasting(Protocol::V5, "victim")))),
        ("second CONNECT", 0x82, |client, _| client.send(&Packet::Connect(hello(Protocol::V5, "x").into()))),
        ("malformed", 0x81, |client, _| client.stream.write_all(&[0xc1, 0]).expect("send")),
        ("too large", 0x95, |client, _| client.publish("t", &[0; 70_000], QoS::AtMostOnce, false)),
        ("alias", 0x94, |client, _| {
            client.send(&Packet::Publish(Publish { alias: Some(999), ..publish("t", 0, QoS::AtMostOnce) }));
        }),
    ];
    for (case, code, provoke) in cases {
        let mut victim = Client::connect_with(port, lasting(Protocol::V5, "victim"));
        assert_eq!(victim.subscribe("flow"), 0);
        for _ in 0..200 {
            sender.publish("flow", b"x", QoS::AtMostOnce, false);
        }
        provoke(&mut victim, port);
        for _ in 0..200 {
            sender.publish("flow", b"x", QoS::AtMostOnce, false);
        }
        let said = rest(&mut victim);
        let end = said
            .iter()
            .position(|packet| packet[0] == 0xe0)
            .unwrap_or_else(|| panic!("{case}: no DISCONNECT among {} packets", said.len()));
        assert_eq!(end + 1, said.len(), "{case}: {} packets after DISCONNECT", said.len() - end - 1);
        match decoded(&said[end], Protocol::V5) {
            Packet::Disconnect(last) => assert_eq!((last.code, last.session_expiry), (code, None), "{case}"),
            other => panic!("{other:?}"),
        }
        assert!(sender.ping().is_empty());
    }
}

/// [MQTT-3.3.4-5], [MQTT-3.3.4-3]: a shared and a plain subscription of one client give two copies.
#[test]
fn each_of_several_copies_has_the_identifier_of_its_subscription() {
    let server = Server::start();
    let mut client = Client::connect(server.ports.tcp, Protocol::V5, "c");
    assert_eq!(client.subscribe_with("t/#", QoS::AtMostOnce, Some(7)), 0);
    assert_eq!(client.subscribe_with("$share/g/t/+", QoS::AtMostOnce, Some(9)), 0);
    assert_eq!(client.subscribe_with("$share/h/t/x", QoS::AtMostOnce, None), 0);
    client.publish("t/x", b"x", QoS::AtMostOnce, false);
    let mut ids: Vec<Vec<u32>> = (0..3)
        .map(|_| match decoded(&client.next_bytes().expect("a copy"), Protocol::V5) {
            Packet::Publish(publish) => publish.ids,
            other => panic!("{other:?}"),
        })
        .collect();
    ids.sort();
    assert_eq!(ids, [vec![], vec![7], vec![9]]);
    assert_eq!(client.ping(), []);
}

/// [MQTT-4.12.0-1], [MQTT-4.12.0-2], [MQTT-4.12.0-4], [MQTT-4.12.0-5], [MQTT-3.2.2-7], [MQTT-3.2.2-6]: no method is
/// configured, so there is no AUTH and no accepted method: one CONNACK, then the end.
#[test]
fn enhanced_authentication_is_refused_without_an_auth_packet() {
    let server = Server::start();
    for auth_data in [None, Some(b"secret".as_slice().into())] {
        let connect =
            Connect { auth_method: Some("SCRAM-SHA-1".to_owned()), auth_data, ..hello(Protocol::V5, "c") };
        let mut client = Client::open(server.ports.tcp, Protocol::V5);
        client.send(&Packet::Connect(Box::new(connect)));
        let said = rest(&mut client);
        assert_eq!(said, [vec![0x20, 3, 0, 0x8c, 0]], "a refusal without properties, and no AUTH");
    }
}

/// [MQTT-4.12.1-2], [MQTT-4.12.0-6]: re-authentication fails, since there was no method, and ends the connection.
#[test]
fn re_authentication_ends_the_connection() {
    let server = Server::start();
    let mut client = Client::connect(server.ports.tcp, Protocol::V5, "c");
    let method = Some("SCRAM-SHA-1".to_owned());
    client.send(&Packet::Auth(Auth { code: 0x19, method, ..Auth::default() }.into()));
    assert_eq!(client.next(), Got::Disconnect(0x82));
    assert_eq!(client.next(), Got::Closed);
}

/// 3.1.1: [MQTT-3.1.2-2], [MQTT-3.1.3-8], [MQTT-3.1.3-9], [MQTT-3.1.4-1], [MQTT-3.2.2-4] to [MQTT-3.2.2-6];
/// 5.0: [MQTT-3.1.2-2], [MQTT-3.1.3-8], [MQTT-3.2.2-6] to [MQTT-3.2.2-8], [MQTT-3.1.4-2].
#[test]
fn a_refused_connect_gets_exactly_its_code_and_the_connection_closed() {
    let server = Server::start();
    let long = |protocol| {
        let mut bytes = Vec::new();
        codec::encode(&Packet::Connect(hello(protocol, &"c".repeat(300)).into()), protocol, &mut bytes);
        bytes
    };
    let rows: [(&str, Vec<u8>, &[u8]); 8] = [
        (
            "level 3 under the name MQTT",
            b"\x10\x0d\x00\x04MQTT\x03\x02\x00\x3c\x00\x01c".into(),
            b"\x20\x02\x00\x01",
        ),
        ("level 6", b"\x10\x0e\x00\x04MQTT\x06\x02\x00\x3c\x00\x00\x01c".into(), b"\x20\x03\x00\x84\x00"),
        (
            "no client id, session kept",
            b"\x10\x0c\x00\x04MQTT\x04\x00\x00\x3c\x00\x00".into(),
            b"\x20\x02\x00\x02",
        ),
        ("client id too long, 3.1.1", long(Protocol::V4), b"\x20\x02\x00\x02"),
        ("client id too long, 5.0", long(Protocol::V5), b"\x20\x03\x00\x85\x00"),
        ("reserved flag", b"\x10\x0d\x00\x04MQTT\x04\x03\x00\x3c\x00\x01c".into(), b""),
        ("will QoS 3", b"\x10\x13\x00\x04MQTT\x04\x1e\x00\x3c\x00\x01c\x00\x01w\x00\x01m".into(), b""),
        (
            "will to $SYS, 3.1.1",
            b"\x10\x17\x00\x04MQTT\x04\x06\x00\x3c\x00\x01c\x00\x06$SYS/x\x00\x00".into(),
            b"\x20\x02\x00\x05",
        ),
    ];
    for (name, bytes, expected) in rows {
        let mut client = Client::open(server.ports.tcp, Protocol::V4);
        client.stream.write_all(&bytes).expect("send CONNECT");
        assert_eq!(rest(&mut client).concat(), expected, "{name}");
    }
}

/// 3.1.1: [MQTT-3.1.4-5]; 5.0: [MQTT-3.1.4-6].
#[test]
fn what_follows_a_refused_connect_is_not_processed() {
    let server = Server::start();
    let mut watch = Client::connect(server.ports.tcp, Protocol::V5, "watch");
    assert_eq!(watch.subscribe("#"), 0);
    for protocol in BOTH {
        let method = protocol.is_v5().then(|| "none".to_owned());
        let client_id = if protocol.is_v5() { "c" } else { "" };
        let refused = Connect { clean_start: false, auth_method: method, ..hello(protocol, client_id) };
        let mut bytes = Vec::new();
        codec::encode(&Packet::Connect(refused.into()), protocol, &mut bytes);
        codec::encode(&Packet::Publish(publish("t", 0, QoS::AtMostOnce)), protocol, &mut bytes);
        codec::encode(&Packet::Publish(publish("t", 1, QoS::AtLeastOnce)), protocol, &mut bytes);
        let mut client = Client::open(server.ports.tcp, protocol);
        client.stream.write_all(&bytes).expect("send all at once");
        let said = rest(&mut client);
        assert!(said.len() == 1 && said[0][0] == 0x20 && said[0][3] != 0, "{said:02x?}");
        assert_eq!(watch.ping(), []);
    }
}

/// [MQTT-3.3.1-3] of both versions.
#[test]
fn dup_of_what_came_in_is_not_passed_on() {
    let server = Server::start();
    for protocol in BOTH {
        let mut client = Client::connect(server.ports.tcp, protocol, "c");
        assert_eq!(client.subscribe_with("t", QoS::AtLeastOnce, None), 1);
        client.send(&Packet::Publish(Publish { dup: true, ..publish("t", 5, QoS::AtLeastOnce) }));
        let mut packets = [client.next_bytes().expect("a packet"), client.next_bytes().expect("a packet")];
        packets.sort();
        assert_eq!(packets.map(|packet| packet[0]), [0x32, 0x40], "PUBLISH without DUP, PUBACK");
    }
}

/// [MQTT-4.3.3-8] to [MQTT-4.3.3-12]; 3.1.1: [MQTT-4.3.3-2]: until PUBREL an id in use is the same message, whatever
/// DUP and payload say, also after a break; after PUBCOMP it is a new one.
#[test]
fn a_qos_2_id_in_use_is_delivered_once_with_and_without_dup() {
    let server = Server::start();
    for protocol in BOTH {
        let mut watch = Client::connect(server.ports.tcp, protocol, "watch");
        assert_eq!(watch.subscribe("t"), 0);
        let name = format!("c-{protocol:?}");
        let mut client = Client::connect_with(server.ports.tcp, lasting(protocol, &name));
        let send = |client: &mut Client, dup, payload: &[u8]| {
            client.send(&Packet::Publish(Publish { dup, payload, ..publish("t", 5, QoS::ExactlyOnce) }));
            assert_eq!(client.next_bytes().expect("PUBREC")[..4], [0x50, 2, 0, 5], "{payload:?}");
        };
        send(&mut client, false, b"first");
        send(&mut client, false, b"same id");
        send(&mut client, true, b"same id again");
        drop(client);
        let mut client = Client::connect_with(server.ports.tcp, lasting(protocol, &name));
        send(&mut client, false, b"after a break");
        client.send(&Packet::PubRel(ack(5)));
        assert_eq!(client.next_bytes().expect("PUBCOMP"), [0x70, 2, 0, 5]);
        send(&mut client, false, b"second");
        let expected =
            [b"first".as_slice(), b"second"].map(|payload| Got::Publish("t".into(), payload.into()));
        assert_eq!(watch.ping(), expected);
    }
}

/// [MQTT-3.2.2-9] to [MQTT-3.2.2-14], [MQTT-3.2.2-21], [MQTT-3.2.2-22], 3.1.1: [MQTT-3.8.3-2].
#[test]
fn what_is_switched_off_is_announced_and_refused() {
    let limits = "[limits]\nmax_qos = 1\nretain_available = false\nwildcard_available = false\n\
                  shared_available = false\nsubscription_id_available = false\nvalidate_payload_format = true\n\
                  receive_maximum = 5\ntopic_alias_maximum = 3\nmax_packet_size = 5000\nkeep_alive_max = 30\n\
                  session_expiry_max = 60\n";
    let server = Server::start_with(&[], limits);
    let port = server.ports.tcp;
    let mut client = Client::open(port, Protocol::V5);
    let connect = Connect { keep_alive: 31, session_expiry: Some(61), ..hello(Protocol::V5, "c") };
    client.send(&Packet::Connect(connect.into()));
    match decoded(&client.next_bytes().expect("CONNACK"), Protocol::V5) {
        Packet::ConnAck(connack) => {
            assert_eq!((connack.maximum_qos, connack.retain_available), (Some(1), Some(false)));
            assert_eq!((connack.wildcard_available, connack.shared_available), (Some(false), Some(false)));
            assert_eq!(connack.subscription_id_available, Some(false));
            assert_eq!((connack.receive_maximum, connack.topic_alias_maximum), (Some(5), Some(3)));
            assert_eq!(connack.maximum_packet_size, Some(5000));
            assert_eq!((connack.server_keep_alive, connack.session_expiry), (Some(30), Some(60)));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(client.subscribe_with("t", QoS::ExactlyOnce, None), 1, "granted what there is");
    assert_eq!(client.subscribe("t/+"), 0xa2);
    assert_eq!(client.subscribe("$share/g/t"), 0x9e);
    assert_eq!(client.subscribe_with("u", QoS::AtMostOnce, Some(1)), 0xa1);
    let mut old = Client::connect(port, Protocol::V4, "old");
    assert_eq!((old.subscribe("t/#"), old.subscribe("$share/g/t")), (0x80, 0x80));

    let text = Some(std::sync::Arc::new(Properties { payload_format: Some(1), ..Properties::default() }));
    for (payload, code) in [(b"\xff".as_slice(), 0x99), ("\u{e9}".as_bytes(), 0x10)] {
        let properties = text.clone();
        client.send(&Packet::Publish(Publish { payload, properties, ..publish("v", 1, QoS::AtLeastOnce) }));
        assert_eq!(client.next(), Got::PubAck(code));
    }
    client.send(&Packet::Publish(publish("t", 1, QoS::ExactlyOnce)));
    assert_eq!((client.next(), client.next()), (Got::Disconnect(0x9b), Got::Closed));
    let mut client = Client::connect(port, Protocol::V5, "c");
    client.publish("t", b"kept", QoS::AtMostOnce, true);
    assert_eq!((client.next(), client.next()), (Got::Disconnect(0x9a), Got::Closed));
    let last = will("t", b"gone");
    for (will, code) in [
        (codec::ConnectWill { qos: QoS::ExactlyOnce, ..last.clone() }, 0x9b),
        (codec::ConnectWill { retain: true, ..last }, 0x9a),
    ] {
        let mut client = Client::open(port, Protocol::V5);
        client.send(&Packet::Connect(Connect { will: Some(will), ..hello(Protocol::V5, "c") }.into()));
        assert_eq!((client.next(), client.next()), (Got::ConnAck(code), Got::Closed));
    }
}

/// [MQTT-3.1.2-24], [MQTT-3.1.2-25]: CONNACK, SUBACK and messages.
#[test]
fn no_packet_is_larger_than_the_client_takes() {
    let server = Server::start();
    let connect = |maximum| Connect {
        maximum_packet_size: Some(maximum),
        request_response_information: true,
        ..hello(Protocol::V5, &"c".repeat(200))
    };
    for (maximum, expected) in [(4, Vec::new()), (5, vec![vec![0x20, 3, 0, 0x95, 0]])] {
        let mut client = Client::open(server.ports.tcp, Protocol::V5);
        client.send(&Packet::Connect(connect(maximum).into()));
        assert_eq!(rest(&mut client), expected, "no room for a CONNACK that tells the limits");
    }
    let mut client = Client::open(server.ports.tcp, Protocol::V5);
    client.send(&Packet::Connect(connect(40).into()));
    let connack = client.next_bytes().expect("CONNACK");
    assert!(connack.len() <= 40 && connack[3] == 0, "accepted without what is optional: {connack:02x?}");
    assert_eq!(client.subscribe("t"), 0);
    client.send(&subscribe(None, (0..100).map(|number| filter(&format!("f/{number}"))).collect()));
    client.publish("t", &[0; 100], QoS::AtMostOnce, false);
    client.publish("f/99", b"small", QoS::AtMostOnce, false);
    assert_eq!(client.ping(), [Got::Publish("f/99".to_owned(), b"small".to_vec())]);
}

/// [MQTT-3.1.2-28], and what is named may be subscribed to.
#[test]
fn response_information_names_a_topic_that_the_client_may_subscribe_to() {
    let server = Server::start_with(&["--non-broker"], "");
    for (ask, expected) in [(true, Some("devices/c1")), (false, None)] {
        let mut client = Client::open(server.ports.tcp, Protocol::V5);
        let connect = Connect { request_response_information: ask, ..hello(Protocol::V5, "c1") };
        client.send(&Packet::Connect(connect.into()));
        match decoded(&client.next_bytes().expect("CONNACK"), Protocol::V5) {
            Packet::ConnAck(connack) => assert_eq!(connack.response_information.as_deref(), expected),
            other => panic!("{other:?}"),
        }
        if let Some(topic) = expected {
            assert_eq!(client.subscribe(&format!("{topic}/responses/#")), 0);
        }
    }
}

/// What MQTTX reads: `status` comes at every interval, `time` and `version` once per subscription.
#[test]
fn sys_answers_time_and_version_once_and_repeats_the_rest() {
    let server = Server::start_with(&[], "[sys]\ninterval = \"1s\"\n");
    let mut client = Client::connect(server.ports.tcp, Protocol::V5, "c");
    let topic = |name: &str| format!("$SYS/broker/{name}");
    let mut seen: Vec<String> = Vec::new();
    for name in ["time", "version", "activeConnectCount", "uptime", "clients/connected", "status"] {
        client.send(&subscribe(None, vec![filter(&topic(name))]));
    }
    let count = |seen: &[String], name: &str| seen.iter().filter(|seen| **seen == topic(name)).count();
    while count(&seen, "status") < 4 {
        if let Got::Publish(topic, _) = client.next() {
            seen.push(topic);
        }
    }
    assert_eq!((count(&seen, "time"), count(&seen, "version")), (1, 1), "{seen:?}");
    for name in ["activeConnectCount", "uptime", "clients/connected"] {
        assert!(count(&seen, name) >= 3, "{name} is not repeated: {seen:?}");
    }
}

/// [MQTT-3.1.3-10].
#[test]
fn user_properties_of_a_will_keep_their_order() {
    let server = Server::start();
    let mut watch = Client::connect(server.ports.tcp, Protocol::V5, "watch");
    assert_eq!(watch.subscribe("w"), 0);
    let user = ["b", "a", "c", "a", "b"].iter().enumerate();
    let user: Vec<_> = user.map(|(n, key)| ((*key).to_owned(), n.to_string())).collect();
    let properties = Some(std::sync::Arc::new(Properties { user: user.clone(), ..Properties::default() }));
    let last = codec::ConnectWill { properties, ..will("w", b"gone") };
    drop(Client::connect_with(server.ports.tcp, Connect { will: Some(last), ..hello(Protocol::V5, "c") }));
    match decoded(&watch.next_bytes().expect("the will"), Protocol::V5) {
        Packet::Publish(publish) => assert_eq!(publish.properties.expect("properties").user, user),
        other => panic!("{other:?}"),
    }
}

/// [MQTT-3.8.4-4], [MQTT-3.8.4-3]: while messages flow, subscribing again neither loses nor repeats one.
#[test]
fn replacing_a_subscription_loses_nothing() {
    const COUNT: u32 = 2_000;
    let server = Server::start();
    let port = server.ports.tcp;
    let mut client = Client::connect(port, Protocol::V5, "c");
    assert_eq!(client.subscribe("t/+"), 0);
    let sender = std::thread::spawn(move || {
        let mut sender = Client::connect(port, Protocol::V5, "sender");
        for n in 0..COUNT {
            sender.publish("t/x", &n.to_be_bytes(), QoS::AtMostOnce, false);
        }
        assert_eq!(sender.ping(), []);
    });
    let mut next = 0;
    let mut replaced = 0;
    while next < COUNT {
        if replaced * 10 <= next {
            replaced += 1;
            let filter = codec::SubscribeFilter { retain_handling: 2, ..filter("t/+") };
            client.send(&subscribe(Some(replaced), vec![filter]));
        }
        match client.next() {
            Got::Publish(_, payload) => {
                assert_eq!(payload, next.to_be_bytes());
                next += 1;
            }
            Got::SubAck(codes) => assert_eq!(codes, [0]),
            other => panic!("{other:?}"),
        }
    }
    sender.join().expect("the sender");
}

/// [MQTT-3.3.2-6]
#[test]
fn a_retained_message_is_sent_with_what_is_left_of_its_expiry_interval() {
    let server = Server::start();
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "publisher");
    let message = Publish { retain: true, expiry: Some(1000), ..publish("kept", 1, QoS::AtLeastOnce) };
    publisher.send(&Packet::Publish(message));
    assert_eq!(publisher.next(), Got::PubAck(0x10), "nobody is there yet");
    std::thread::sleep(std::time::Duration::from_millis(2_000));
    let mut reader = Client::connect(server.ports.tcp, Protocol::V5, "reader");
    reader.subscribe("kept");
    let bytes = reader.next_bytes().expect("the retained message");
    let Packet::Publish(kept) = decoded(&bytes, Protocol::V5) else { panic!("{bytes:02x?}") };
    assert!(kept.expiry.is_some_and(|left| left <= 999), "{:?}", kept.expiry);
}
