//! CONNECT and its answers, what these allow for the rest of the connection, and how the server ends one.

use super::*;

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
        crate::support::until(|| server.metric("mqtt_connections") == 0);
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
        crate::support::until(|| server.metric("mqtt_connections") == 0);
    }
}

/// 3.1.1: [MQTT-3.1.2-1], [MQTT-3.1.2-2], [MQTT-3.1.3-8], [MQTT-3.1.3-9], [MQTT-3.1.4-1], [MQTT-3.2.2-4] to [MQTT-3.2.2-6];
/// 5.0: [MQTT-3.1.2-2], [MQTT-3.1.3-8], [MQTT-3.2.2-6] to [MQTT-3.2.2-8], [MQTT-3.1.4-2].
#[test]
fn a_refused_connect_gets_exactly_its_code_and_the_connection_closed() {
    let server = Server::start();
    let long = |protocol| {
        let mut bytes = Vec::new();
        codec::encode(&Packet::Connect(hello(protocol, &"c".repeat(300)).into()), protocol, &mut bytes);
        bytes
    };
    let deep_will = |protocol| {
        let connect = Connect { will: Some(will(&"/".repeat(128), b"")), ..hello(protocol, "c") };
        let mut bytes = Vec::new();
        codec::encode(&Packet::Connect(connect.into()), protocol, &mut bytes);
        bytes
    };
    let rows: [(&str, Vec<u8>, &[u8]); 20] = [
        (
            "level 3 under the name MQTT",
            b"\x10\x0d\x00\x04MQTT\x03\x02\x00\x3c\x00\x01c".into(),
            b"\x20\x02\x00\x01",
        ),
        ("level 6", b"\x10\x0e\x00\x04MQTT\x06\x02\x00\x3c\x00\x00\x01c".into(), b"\x20\x03\x00\x84\x00"),
        (
            "bridge of level 5",
            b"\x10\x0e\x00\x04MQTT\x85\x02\x00\x3c\x00\x00\x01c".into(),
            b"\x20\x03\x00\x84\x00",
        ),
        (
            "reserved flag, 5.0",
            b"\x10\x0e\x00\x04MQTT\x05\x03\x00\x3c\x00\x00\x01c".into(),
            b"\x20\x03\x00\x81\x00",
        ),
        (
            "header flags, 5.0",
            b"\x11\x0e\x00\x04MQTT\x05\x02\x00\x3c\x00\x00\x01c".into(),
            b"\x20\x03\x00\x81\x00",
        ),
        ("cut off, 5.0", b"\x10\x0b\x00\x04MQTT\x05\x02\x00\x3c\x00".into(), b"\x20\x03\x00\x81\x00"),
        (
            "topic alias in CONNECT",
            b"\x10\x11\x00\x04MQTT\x05\x02\x00\x0a\x03\x23\x00\x01\x00\x01p".into(),
            b"\x20\x03\x00\x81\x00",
        ),
        (
            "receive maximum of 0",
            b"\x10\x11\x00\x04MQTT\x05\x02\x00\x0a\x03\x21\x00\x00\x00\x01p".into(),
            b"\x20\x03\x00\x82\x00",
        ),
        ("level 5, cut off in the name", b"\x10\x05\x00\x04MQT".into(), b""),
        ("level 0", b"\x10\x0d\x00\x04MQTT\x00\x02\x00\x3c\x00\x01c".into(), b"\x20\x02\x00\x01"),
        ("name MQTX", b"\x10\x0d\x00\x04MQTX\x04\x02\x00\x3c\x00\x01c".into(), b""),
        ("name mqtt, level 5", b"\x10\x0e\x00\x04mqtt\x05\x02\x00\x3c\x00\x00\x01c".into(), b""),
        ("will with too many levels, 3.1.1", deep_will(Protocol::V4), b"\x20\x02\x00\x05"),
        ("will with too many levels, 5.0", deep_will(Protocol::V5), b"\x20\x03\x00\x90\x00"),
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

/// 3.1 has no use for DUP, QoS and RETAIN of most packets, and acknowledges what it will not take.
#[test]
fn the_oldest_clients_may_set_unused_flags_and_publish_to_sys() {
    let server = Server::start();
    let mut watch = Client::connect(server.ports.tcp, Protocol::V5, "watch");
    assert_eq!(watch.subscribe("$SYS/mine"), 0);
    let mut client = Client::open(server.ports.tcp, Protocol::V3);
    client.stream.write_all(b"\x1b\x0f\x00\x06MQIsdp\x03\x02\x00\x3c\x00\x01c").expect("send CONNECT");
    assert_eq!(client.next(), Got::ConnAck(0));
    client.stream.write_all(b"\xcf\x00").expect("send PINGREQ");
    assert_eq!(client.next(), Got::PingResp);
    client.send(&Packet::Publish(publish("$SYS/mine", 0, QoS::AtMostOnce)));
    client.send(&Packet::Publish(publish("$SYS/mine", 1, QoS::AtLeastOnce)));
    assert_eq!(client.next_bytes().expect("PUBACK"), b"\x40\x02\x00\x01");
    client.send(&Packet::Publish(publish("$SYS/mine", 2, QoS::ExactlyOnce)));
    assert_eq!(client.next_bytes().expect("PUBREC"), b"\x50\x02\x00\x02");
    client.send(&Packet::PubRel(ack(2)));
    assert_eq!(client.next_bytes().expect("PUBCOMP"), b"\x70\x02\x00\x02");
    assert_eq!((client.ping(), watch.ping()), (vec![], vec![]));
    assert_eq!(server.metric("mqtt_messages_refused_total"), 3);
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

/// [MQTT-4.12.0-1], [MQTT-3.2.2-7], [MQTT-3.2.2-6]: no method is configured, so there is no AUTH and no accepted method: one
/// CONNACK, then the end.
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
    client.send(&Packet::Auth(AuthPacket { code: 0x19, method, ..AuthPacket::default() }.into()));
    assert_eq!(client.next(), Got::Disconnect(0x82));
    assert_eq!(client.next(), Got::Closed);
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
        (subscribe(None, vec![filter(&"/".repeat(128))]), 0x8f),
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
    for (wanted, id, code) in [("t/+", None, 0xa2), ("$share/g/t", None, 0x9e), ("u", Some(1), 0xa1)] {
        let mut client = Client::connect(port, Protocol::V5, "asks");
        client.send(&subscribe(id, vec![filter("t"), filter(wanted)]));
        assert_eq!((client.next(), client.next()), (Got::Disconnect(code), Got::Closed), "{wanted}");
    }
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

/// Returns the bytes read by a client that goes on writing after `sent` and stops at its first failed write, as many
/// libraries do.
fn read_unless_a_write_fails(stream: &mut TcpStream, sent: &[u8]) -> Option<Vec<u8>> {
    stream.write_all(sent).ok()?;
    // The answer is there, but is not read.
    stream.peek(&mut [0]).ok()?;
    for _ in 0..10 {
        stream.write_all(&[0; 1024]).ok()?;
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut read = Vec::new();
    stream.read_to_end(&mut read).ok().map(|_| read)
}

#[test]
fn a_client_that_stops_at_a_failed_write_has_read_its_reason() {
    let server = Server::start();
    let port = server.ports.tcp;
    // A machine that is too busy may take longer than the server lingers.
    let tries = |scene: &dyn Fn() -> Option<Vec<u8>>| (0..5).find_map(|_| scene());
    let topic_alias = b"\x10\x11\x00\x04MQTT\x05\x02\x00\x0a\x03\x23\x00\x01\x00\x01p";
    let bad_connect = || read_unless_a_write_fails(&mut Client::open(port, Protocol::V5).stream, topic_alias);
    assert_eq!(tries(&bad_connect).as_deref(), Some(&b"\x20\x03\x00\x81\x00"[..]), "CONNECT");
    let no_id = b"\x10\x0c\x00\x04MQTT\x04\x00\x00\x3c\x00\x00";
    let refused = || read_unless_a_write_fails(&mut Client::open(port, Protocol::V4).stream, no_id);
    assert_eq!(tries(&refused).as_deref(), Some(&b"\x20\x02\x00\x02"[..]), "refused");
    let malformed = || {
        let mut client = Client::connect(port, Protocol::V5, "malformed");
        read_unless_a_write_fails(&mut client.stream, &[0xc1, 0])
    };
    assert_eq!(tries(&malformed).as_deref(), Some(&b"\xe0\x01\x81"[..]), "malformed packet");
    let taken_over = || {
        let mut client = Client::connect(port, Protocol::V5, "twice");
        let _other = Client::connect(port, Protocol::V5, "twice");
        read_unless_a_write_fails(&mut client.stream, &[])
    };
    assert_eq!(tries(&taken_over).as_deref(), Some(&b"\xe0\x01\x8e"[..]), "takeover");
}

#[test]
fn a_client_that_stays_after_its_reason_keeps_its_place_for_a_moment() {
    let small =
        "[[listeners]]\nname = \"small\"\nkind = \"tcp\"\naddress = \"127.0.0.1:0\"\nmax_connections = 1\n";
    let server = Server::start_with(&[], small);
    let port = server.port("small");
    let enter = || {
        let mut client = Client::open(port, Protocol::V5);
        let mut bytes = Vec::new();
        codec::encode(&Packet::Connect(hello(Protocol::V5, "c").into()), Protocol::V5, &mut bytes);
        client.stream.write_all(&bytes).ok()?;
        (client.next() == Got::ConnAck(0)).then_some(client)
    };
    // As above: a busy machine may be too late.
    let stays = (0..5).find_map(|_| {
        let mut client = None;
        crate::support::until(|| {
            client = enter();
            client.is_some()
        });
        let mut client = client?;
        client.stream.write_all(&[0xc1, 0]).expect("send");
        assert_eq!(client.next_bytes().as_deref(), Some(&b"\xe0\x01\x81"[..]));
        crate::support::until(|| server.metric("mqtt_connections") == 0);
        std::thread::sleep(Duration::from_millis(100));
        enter().is_none().then_some(client)
    });
    let stays = stays.expect("its place was given to others at once");
    // Also if it never closes.
    crate::support::until(|| enter().is_some());
    drop(stays);
}
