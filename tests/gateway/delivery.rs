//! Messages that wait for a receiver go out as soon as they can: by themselves, whole and in order.

use std::{collections::VecDeque, io::Write as _, net::TcpStream, thread};

use crate::client::{Client, Got};
use crate::support::{Server, local, until};
use codec::{Ack, Connect, Packet, Publish, Subscribe, SubscribeFilter, Unsubscribe};
use gateway_core::{Protocol, QoS};

/// Nothing is dropped for want of room, and no timeout moves what is stuck.
const ROOMY: &str =
    "[limits]\nmailbox_messages = 1000000\nmailbox_bytes = \"256 MiB\"\nwrite_timeout = \"10m\"\n";

#[test]
fn a_reader_that_paused_gets_all_that_waits_without_new_messages() {
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
fn a_returning_member_gets_all_its_group_kept_beyond_its_own_queue() {
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
    expect_numbered(&mut member, MESSAGES, overflow);
    assert_eq!(server.metric("mqtt_messages_dropped_total"), 0, "{overflow}");
}

/// Takes and acknowledges messages at QoS 1 that are numbered from 0.
fn expect_numbered(member: &mut Client, count: u32, case: &str) {
    for n in 0..count {
        let bytes = member.next_bytes().expect("a PUBLISH");
        let Packet::Publish(publish) = crate::client::decoded(&bytes, Protocol::V4) else {
            panic!("{bytes:?}")
        };
        assert_eq!(publish.payload, n.to_be_bytes(), "message {n} is missing, {case}");
        member.send(&Packet::PubAck(ack(publish.packet_id)));
    }
}

#[test]
fn who_joins_a_group_gets_what_waits_without_new_messages() {
    const MESSAGES: u32 = 200;
    const GROUP: &str = "$share/group/t";
    // Half a mailbox is handed out at once, the rest as there is room.
    let server = Server::start_with(&[], "[limits]\nmailbox_messages = 10\n");
    let hello = Connect { clean_start: false, ..Connect::new(Protocol::V4, "absent") };
    let mut absent = Client::connect_with(server.ports.tcp, hello);
    assert_eq!(absent.subscribe_with(GROUP, QoS::AtLeastOnce, None), 1);
    drop(absent);
    until(|| server.metric("mqtt_connections") == 0);
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V4, "publisher");
    for n in 0..MESSAGES {
        publisher.publish_acked("t", &n.to_be_bytes(), false);
    }
    let mut member = Client::connect(server.ports.tcp, Protocol::V4, "member");
    assert_eq!(member.subscribe_with(GROUP, QoS::AtLeastOnce, None), 1);
    expect_numbered(&mut member, MESSAGES, "");
    until(|| server.metric("mqtt_queued_bytes") == 0);
}

/// A CONNECT of which a part has been sent, and the rest.
fn half_connected(port: u16, protocol: Protocol) -> (Client, Vec<u8>) {
    let mut client = Client::open(port, protocol);
    let mut bytes = Vec::new();
    codec::encode(&Packet::Connect(Connect::new(protocol, "late").into()), protocol, &mut bytes);
    let rest = bytes.split_off(5);
    client.stream.write_all(&bytes).expect("send a part");
    (client, rest)
}

#[test]
fn a_connect_completed_during_shutdown_is_refused_at_once() {
    // The 101st is disconnected five minutes after the others: the server surely waits all through the test.
    let server = Server::start_with(&[], "[shutdown]\ndeadline = \"10m\"\ndisconnect_window = \"10m\"\n");
    let late = [(Protocol::V5, 0x88), (Protocol::V4, 3)]
        .map(|(protocol, code)| (half_connected(server.ports.tcp, protocol), code));
    let others: Vec<Client> =
        (0..101).map(|n| Client::connect(server.ports.tcp, Protocol::V5, &format!("other-{n}"))).collect();
    server.signal("TERM");
    until(|| server.metric("mqtt_connections") == 1);
    for ((mut client, rest), code) in late {
        client.stream.write_all(&rest).expect("send the rest");
        assert_eq!(client.next(), Got::ConnAck(code));
        assert_eq!(client.next(), Got::Closed);
    }
    assert_eq!(server.metric("mqtt_connections"), 1, "it was not while others were being disconnected");
    drop(others);
}

#[test]
fn half_a_connect_does_not_keep_the_server_from_stopping() {
    let mut server =
        Server::start_with(&[], "[limits]\nconnect_timeout = \"10m\"\n[shutdown]\ndeadline = \"10m\"\n");
    let (late, _rest) = half_connected(server.ports.tcp, Protocol::V5);
    let mut other = Client::connect(server.ports.tcp, Protocol::V5, "other");
    server.signal("TERM");
    assert_eq!(other.next(), Got::Disconnect(0x8B));
    assert!(server.wait());
    drop(late);
}

#[test]
fn a_stopping_server_accepts_no_device_without_telling_it() {
    let mut server = Server::start_with(&[], "[shutdown]\ndeadline = \"5m\"\n");
    let port = server.ports.tcp;
    let connecting: Vec<_> = (0..4)
        .map(|thread| {
            thread::spawn(move || {
                let mut accepted = VecDeque::new();
                let mut number = 0;
                // Until the server refuses, or is not there any more.
                while let Ok(stream) = TcpStream::connect(local(port)) {
                    let mut client = Client::over(stream, Protocol::V5);
                    let hello = Connect::new(Protocol::V5, format!("{thread}-{number}"));
                    let mut bytes = Vec::new();
                    codec::encode(&Packet::Connect(hello.into()), Protocol::V5, &mut bytes);
                    if client.stream.write_all(&bytes).is_err() || client.next() != Got::ConnAck(0) {
                        break;
                    }
                    accepted.push_back(client);
                    number += 1;
                    if accepted.len() > 50 {
                        accepted.pop_front();
                    }
                }
                accepted
            })
        })
        .collect();
    until(|| server.metric("mqtt_connections") >= 20);
    server.signal("TERM");
    for thread in connecting {
        for mut client in thread.join().expect("a thread that connects") {
            assert_eq!(client.next(), Got::Disconnect(0x8B));
        }
    }
    assert!(server.wait());
}

fn ack(packet_id: u16) -> Ack {
    Ack { packet_id, code: 0, reason_string: None, user: Vec::new() }
}

/// Acknowledges what comes until nothing more does: the topics.
fn take_all(client: &mut Client) -> Vec<String> {
    let (mut topics, mut idle) = (Vec::new(), 0);
    while idle < 3 {
        let before = topics.len();
        client.send(&Packet::PingReq);
        loop {
            let bytes = client.next_bytes().expect("a packet");
            match crate::client::decoded(&bytes, Protocol::V5) {
                Packet::Publish(publish) => {
                    topics.push(publish.topic.to_owned());
                    client.send(&Packet::PubAck(ack(publish.packet_id)));
                }
                Packet::PingResp => break,
                _ => {}
            }
        }
        idle = if topics.len() == before { idle + 1 } else { 0 };
    }
    topics
}

/// A reader that takes one message at a time, and three retained ones.
fn slow_reader(server: &Server) -> Client {
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "publisher");
    for topic in ["r/1", "r/2", "r/3"] {
        publisher.publish_acked(topic, b"x", true);
    }
    Client::connect_with(
        server.ports.tcp,
        Connect { receive_maximum: Some(1), ..Connect::new(Protocol::V5, "reader") },
    )
}

/// Each replay that waits costs memory: a client that acknowledges nothing could ask for as many as it likes.
#[test]
fn a_filter_subscribed_again_during_its_replay_is_replayed_once() {
    let server = Server::start();
    let mut reader = slow_reader(&server);
    let filter = SubscribeFilter {
        filter: "r/#".to_owned(),
        qos: QoS::AtLeastOnce,
        no_local: false,
        retain_as_published: false,
        retain_handling: 0,
    };
    for _ in 0..5 {
        let filters = vec![filter.clone()];
        reader.send(&Packet::Subscribe(Subscribe { packet_id: 1, id: None, user: Vec::new(), filters }));
    }
    let topics = take_all(&mut reader);
    assert_eq!(topics.iter().filter(|topic| *topic == "r/3").count(), 1, "{topics:?}");
    assert_eq!(topics[topics.len() - 3..], ["r/1", "r/2", "r/3"], "all come after the last SUBSCRIBE");
}

#[test]
fn retained_messages_that_wait_do_not_come_after_unsubscribing() {
    let server = Server::start();
    let mut reader = slow_reader(&server);
    assert_eq!(reader.subscribe_with("r/#", QoS::AtLeastOnce, None), 1);
    assert!(matches!(reader.next(), Got::Publish(topic, _) if topic == "r/1"));
    let filters = vec!["r/#".to_owned()];
    reader.send(&Packet::Unsubscribe(Unsubscribe { packet_id: 2, user: Vec::new(), filters }));
    reader.send(&Packet::PubAck(ack(1)));
    assert_eq!(take_all(&mut reader), Vec::<String>::new());
}
