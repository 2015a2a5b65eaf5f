//! PUBLISH in and out, wills, retained messages and `$SYS`.

use super::*;

/// 3.1.1: [MQTT-4.8.0-2], [MQTT-3.3.5-2]: out of memory for messages, a QoS 1 PUBLISH is not acknowledged and its
/// connection ends; 5.0 has a reason code for it and goes on.
#[test]
fn a_transient_error_ends_the_connection_where_no_code_can_tell_it() {
    let limits = "[limits]\nmemory_budget = \"1 MiB\"\nmailbox_bytes = \"1 MiB\"\noffline_bytes = \"1 MiB\"\n\
                  max_packet_size = \"512 KiB\"\n[store]\nenabled = false\n[latest]\nenabled = false\n";
    let server = Server::start_with(&[], limits);
    let topics: Vec<String> = (0..20).map(|number| format!("t/{number}")).collect();
    for topic in &topics {
        let mut away = Client::connect_with(server.ports.tcp, lasting(Protocol::V5, topic));
        assert_eq!(away.subscribe_with(topic, QoS::AtLeastOnce, None), 1);
    }
    crate::support::until(|| server.metric("mqtt_connections") == 0);
    // Nobody waits with more than anybody may have, and all together with more than there is.
    let payload = vec![0; 7 << 10];
    let mut v5 = Client::connect(server.ports.tcp, Protocol::V5, "five");
    let mut codes = Vec::new();
    for topic in topics.iter().cycle().take(160) {
        v5.publish(topic, &payload, QoS::AtLeastOnce, false);
        codes.push(v5.next());
    }
    let taken = codes.iter().take_while(|code| **code == Got::PubAck(0)).count();
    assert!((20..160).contains(&taken), "{codes:?}");
    assert!(codes[taken..].iter().all(|code| *code == Got::PubAck(0x97)), "{codes:?}");
    let mut v4 = Client::connect(server.ports.tcp, Protocol::V4, "four");
    v4.publish("t/1", &payload, QoS::AtLeastOnce, false);
    assert_eq!(v4.next(), Got::Closed);
    assert_eq!(v5.ping(), []);
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

/// [MQTT-4.3.2-3], [MQTT-4.3.3-3], [MQTT-4.3.3-5], 3.1.1: [MQTT-4.8.0-1]: an acknowledgement that is not the next step of
/// the message in flight ends the connection, also among others; one of an id that is not in flight does not.
#[test]
fn an_acknowledgement_out_of_step_ends_the_connection() {
    type Acks = fn(u16) -> Vec<Packet<'static>>;
    let server = Server::start();
    for protocol in BOTH {
        let cases: [(&str, QoS, Acks); 6] = [
            ("PUBACK of QoS 2", QoS::ExactlyOnce, |id| vec![Packet::PubAck(ack(id))]),
            ("PUBACK of QoS 2 among others", QoS::ExactlyOnce, |id| {
                vec![Packet::PubAck(ack(999)), Packet::PubAck(ack(id)), Packet::PubAck(ack(998))]
            }),
            ("PUBCOMP before PUBREC", QoS::ExactlyOnce, |id| vec![Packet::PubComp(ack(id))]),
            ("PUBACK after PUBREC", QoS::ExactlyOnce, |id| {
                vec![Packet::PubRec(ack(id)), Packet::PubAck(ack(id))]
            }),
            ("PUBREC of QoS 1", QoS::AtLeastOnce, |id| vec![Packet::PubRec(ack(id))]),
            ("PUBCOMP of QoS 1", QoS::AtLeastOnce, |id| vec![Packet::PubComp(ack(id))]),
        ];
        for (case, qos, acks) in cases {
            let mut client = Client::connect(server.ports.tcp, protocol, "c");
            assert_eq!(client.subscribe_with("t", qos, None), qos as u8);
            client.send_all(&[Packet::PubAck(ack(7)), Packet::PubComp(ack(8))]);
            assert_eq!(client.ping(), [], "{case}: nothing of an unknown id");
            let mut sender = Client::connect(server.ports.tcp, protocol, "sender");
            sender.send(&Packet::Publish(publish("t", 1, QoS::ExactlyOnce)));
            let (id, got, ..) = delivery(&mut client, protocol);
            assert_eq!(got, qos);
            client.send_all(&acks(id));
            let said = rest(&mut client);
            let last = said.last().map(Vec::as_slice);
            let disconnected = matches!(last, Some([0xe0, 1, 0x82] | [0xe0, 2, 0x82, 0]));
            assert_eq!(disconnected, protocol.is_v5(), "{case}: {said:02x?}");
        }
    }
}

/// [MQTT-3.3.2-6]
#[test]
fn a_retained_message_is_sent_with_what_is_left_of_its_expiry_interval() {
    let server = Server::start();
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "publisher");
    let message = Publish { retain: true, expiry: Some(1000), ..publish("kept", 1, QoS::AtLeastOnce) };
    publisher.send(&Packet::Publish(message));
    assert_eq!(publisher.next(), Got::PubAck(0x10), "nobody is there yet");
    let mut reader = Client::connect(server.ports.tcp, Protocol::V5, "reader");
    let mut last = 1000;
    // Every SUBSCRIBE is answered with it.
    crate::support::until(|| {
        reader.subscribe("kept");
        let bytes = reader.next_bytes().expect("the retained message");
        let Packet::Publish(kept) = decoded(&bytes, Protocol::V5) else { panic!("{bytes:02x?}") };
        let left = kept.expiry.expect("an expiry interval");
        assert!(left <= last, "{left} after {last}");
        last = left;
        last < 1000
    });
}

/// [MQTT-3.3.2-6]: in the queue of a shared group, and at a member that leaves, with a disk and without.
#[test]
fn a_shared_message_that_waited_is_not_sent_with_its_whole_expiry() {
    let stored = Server::start();
    let memory = Server::start_with(&[], "[store]\nenabled = false\n[latest]\nenabled = false\n");
    let servers = [&stored, &memory];
    let subscribe = |client: &mut Client, filter: &str| {
        assert_eq!(client.subscribe_with(filter, QoS::ExactlyOnce, None), 2);
    };
    let mut leaving = Vec::new();
    for server in servers {
        subscribe(
            &mut Client::connect_with(server.ports.tcp, lasting(Protocol::V5, "away")),
            "$share/g/queue/#",
        );
        crate::support::until(|| server.metric("mqtt_connections") == 0);
        let mut holds = Client::connect(server.ports.tcp, Protocol::V5, "holds");
        subscribe(&mut holds, "$share/g/held/#");
        let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "publisher");
        for (id, topic, qos) in [
            (1, "queue/1", QoS::AtLeastOnce),
            (2, "queue/2", QoS::ExactlyOnce),
            (3, "held/1", QoS::AtLeastOnce),
            (4, "held/2", QoS::AtLeastOnce),
        ] {
            publisher.send(&Packet::Publish(Publish { expiry: Some(1000), ..publish(topic, id, qos) }));
            publisher.next_bytes().expect("an acknowledgement");
        }
        assert_eq!(expiries(&mut holds, 2).len(), 2, "it acknowledges none of them");
        leaving.push(holds);
    }
    // The passing of time is the subject.
    std::thread::sleep(Duration::from_millis(1_100));
    for (server, holds) in servers.into_iter().zip(leaving) {
        let mut heir = Client::connect(server.ports.tcp, Protocol::V5, "heir");
        subscribe(&mut heir, "$share/g/held/#");
        drop(holds);
        let mut away = Client::connect_with(server.ports.tcp, lasting(Protocol::V5, "away"));
        for left in expiries(&mut heir, 2).into_iter().chain(expiries(&mut away, 2)) {
            assert!((1..1000).contains(&left), "{left}");
        }
    }
}

/// The expiry intervals of the next messages.
fn expiries(client: &mut Client, count: usize) -> Vec<u32> {
    let mut next = || match decoded(&client.next_bytes().expect("a message"), Protocol::V5) {
        Packet::Publish(publish) => publish.expiry.expect("an expiry interval"),
        other => panic!("{other:?}"),
    };
    (0..count).map(|_| next()).collect()
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

/// Topics that MQTTX reads: `status` comes at every interval, `time` and `version` once per subscription.
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

/// [MQTT-4.9.0-2]: a whole window acknowledged in one write is free again, also behind a PUBACK that is not as short as
/// the others.
#[test]
fn a_window_acknowledged_in_one_write_is_free_again() {
    const WINDOW: u16 = 50;
    let server = Server::start();
    let connect = Connect { receive_maximum: Some(WINDOW), ..hello(Protocol::V5, "reader") };
    let mut reader = Client::connect_with(server.ports.tcp, connect);
    assert_eq!(reader.subscribe_with("t", QoS::AtLeastOnce, None), 1);
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "publisher");
    for n in 0..3 * WINDOW {
        publisher.publish("t", &n.to_be_bytes(), QoS::AtLeastOnce, false);
        assert_eq!(publisher.next(), Got::PubAck(0));
    }
    for first in [0, WINDOW, 2 * WINDOW] {
        let window: Vec<_> = (0..WINDOW).map(|_| delivery(&mut reader, Protocol::V5)).collect();
        let payloads = window.iter().map(|(.., payload)| payload.clone());
        assert!(payloads.eq((first..first + WINDOW).map(|n| n.to_be_bytes().to_vec())), "{window:?}");
        assert_eq!(reader.ping(), [], "the window is full");
        let acks = window.iter().enumerate().map(|(n, (id, ..))| {
            let code = if n == 20 { reason::NO_MATCHING_SUBSCRIBERS } else { reason::SUCCESS };
            Packet::PubAck(Ack { code, ..ack(*id) })
        });
        reader.send_all(&acks.collect::<Vec<_>>());
    }
    assert_eq!(reader.ping(), []);
}
