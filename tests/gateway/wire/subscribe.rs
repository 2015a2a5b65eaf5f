//! SUBSCRIBE and UNSUBSCRIBE while messages flow.

use super::*;

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

/// [MQTT-4.7.3-1], [MQTT-4.7.1-1] and its like, 5.0: [MQTT-4.8.2-1], [MQTT-4.8.2-2], [MQTT-4.13.1-1], 3.1.1:
/// [MQTT-4.8.0-1]: a filter of the wrong form makes the packet malformed, so that none in it has an effect. One of the
/// right form that the server does not take is answered.
#[test]
fn a_filter_of_the_wrong_form_ends_the_connection() {
    let server = Server::start();
    for protocol in BOTH {
        let end = if protocol.is_v5() { vec![Got::Disconnect(0x81), Got::Closed] } else { vec![Got::Closed] };
        let name = format!("c-{protocol:?}");
        for wrong in ["", "a#", "a/#/b", "+a", "$share//a", "$share/g", "$share/g/a#"] {
            if !protocol.is_v5() && matches!(wrong, "$share//a" | "$share/g") {
                continue;
            }
            let mut client = Client::connect_with(server.ports.tcp, lasting(protocol, &name));
            client.send(&subscribe(None, vec![filter("t"), filter(wrong)]));
            assert!(end.iter().all(|expected| client.next() == *expected), "SUBSCRIBE of {wrong:?}");
            let mut client = Client::connect_with(server.ports.tcp, lasting(protocol, &name));
            client.publish("t", b"x", QoS::AtMostOnce, false);
            assert_eq!(client.ping(), [], "subscribed by a malformed packet with {wrong:?}");
            let filters = vec!["t".to_owned(), wrong.to_owned()];
            client.send(&Packet::Unsubscribe(Unsubscribe { packet_id: 1, user: Vec::new(), filters }));
            assert!(end.iter().all(|expected| client.next() == *expected), "UNSUBSCRIBE of {wrong:?}");
        }
        let mut client = Client::connect(server.ports.tcp, protocol, "refused");
        let not_taken = if protocol.is_v5() { 0x8f } else { 0x80 };
        assert_eq!(client.subscribe(&"/".repeat(128)), not_taken, "too many levels");
        if !protocol.is_v5() {
            assert_eq!(client.subscribe("$share/g"), not_taken, "3.1.1 has no such rule");
        }
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
