//! State that a session keeps beside messages across the end of the process: wills, expiry, subscriptions, QoS 2 steps.
//! Messages are tests/crash's.

use std::{collections::BTreeSet, ops::Range};

use crate::client::{Client, Got, hello, message, will};
use crate::support::{Server, until};
use codec::{Ack, Connect, ConnectWill, Packet, Unsubscribe};
use gateway_core::{Protocol, QoS};

pub(crate) fn lasting(name: &str, seconds: u32) -> Connect {
    Connect { clean_start: false, session_expiry: Some(seconds), ..hello(Protocol::V5, name) }
}

/// Connects; whether the session was there.
pub(crate) fn resume(port: u16, connect: Connect) -> (Client, bool) {
    let protocol = connect.protocol;
    let mut client = Client::open(port, protocol);
    client.send(&Packet::Connect(Box::new(connect)));
    let connack = client.next_bytes().expect("CONNACK");
    assert_eq!((connack[0], connack[3]), (0x20, 0), "accepted");
    (client, connack[2] & 1 == 1)
}

fn ack(packet_id: u16) -> Ack {
    Ack { packet_id, code: 0, reason_string: None, user: Vec::new() }
}

pub(crate) fn leave(client: &mut Client) {
    client.send(&Packet::Disconnect(Box::default()));
    assert_eq!(client.next(), Got::Closed);
}

/// The next delivery: packet id, DUP, payload.
fn delivered(client: &mut Client) -> (u16, bool, Vec<u8>) {
    let bytes = client.next_bytes().expect("a PUBLISH");
    match crate::client::decoded(&bytes, Protocol::V5) {
        Packet::Publish(publish) => (publish.packet_id, publish.dup, publish.payload.to_vec()),
        other => panic!("{other:?} instead of a PUBLISH"),
    }
}

/// [MQTT-3.3.1-1] [MQTT-4.3.2-2] [MQTT-4.3.3-2]: after a graceful restart what was sent and not acknowledged has DUP, with
/// its packet identifier, and what only waited has not; after a crash too, unless the client was there.
#[test]
fn dup_tells_after_a_restart_what_was_sent_before() {
    let mut server = Server::start();
    for (crash, qos) in [false, true].into_iter().flat_map(|crash| [1, 2].map(|qos| (crash, qos))) {
        let case = format!("crash: {crash}, QoS {qos}");
        let name = |who: &str| format!("{who}/{crash}/{qos}");
        let qos = QoS::from_bits(qos).expect("a QoS");
        let connect = |who: &str| Connect { receive_maximum: Some(2), ..lasting(&name(who), 600) };
        let mut clients = ["away", "left", "there"].map(|who| {
            let mut client = resume(server.ports.tcp, connect(who)).0;
            assert_eq!(client.subscribe_with(&name(who), qos, None), qos as u8);
            client
        });
        leave(&mut clients[0]);
        let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "publisher");
        for payload in [b"0", b"1", b"2", b"3"] {
            for who in ["away", "left", "there"] {
                publisher.publish(&name(who), payload, QoS::ExactlyOnce, false);
                assert_eq!(publisher.next(), Got::Other(0x50));
                publisher.send(&Packet::PubRel(ack(1)));
                assert_eq!(publisher.next(), Got::Other(0x70));
            }
        }
        let before: Vec<_> =
            clients[1..].iter_mut().map(|client| [(); 2].map(|()| delivered(client))).collect();
        assert!(before.iter().flatten().all(|(_, dup, _)| !dup), "{case}: {before:?}");
        leave(&mut clients[1]);
        // The queue, and the record of a client that left, are written with nobody waiting for them. Later writes are
        // waited for.
        until(|| server.metric("mqtt_connections") == 2);
        publisher.publish_acked(&name("away"), b"4", false);
        resume(server.ports.tcp, lasting("mark", 600)).0.subscribe("mark");
        server = if crash { server.kill_and_restart(&[], "") } else { server.stop_and_restart(&[], "") };

        let mut away = resume(server.ports.tcp, connect("away")).0;
        let first = [(); 2].map(|()| delivered(&mut away));
        assert!(first.iter().all(|(_, dup, _)| !dup), "{case}: never sent: {first:?}");
        for (who, before) in ["left", "there"].into_iter().zip(before) {
            let mut client = resume(server.ports.tcp, connect(who)).0;
            let again = [(); 2].map(|()| delivered(&mut client));
            assert_eq!(again.clone(), before.map(|(id, _, payload)| (id, true, payload)), "{case}: {who}");
            if qos == QoS::AtLeastOnce {
                client.send_all(&again.clone().map(|(id, ..)| Packet::PubAck(ack(id))));
            } else {
                client.send_all(&again.clone().map(|(id, ..)| Packet::PubRec(ack(id))));
                assert_eq!([(); 2].map(|()| client.next()), [Got::Other(0x62), Got::Other(0x62)]);
                client.send_all(&again.map(|(id, ..)| Packet::PubComp(ack(id))));
            }
            let rest = [(); 2].map(|()| delivered(&mut client));
            // After a crash nobody knows what was sent to a client that was there.
            let expected = crash && who == "there";
            assert!(rest.iter().all(|(_, dup, _)| *dup == expected), "{case}: {who} only waited: {rest:?}");
        }
    }
}

/// [MQTT-3.1.2-8]: the gateway's own end is a network failure for the client. The delay counts from the restart.
#[test]
fn the_will_of_a_lasting_session_is_published_after_a_crash() {
    let server = Server::start();
    let mut watcher = resume(server.ports.tcp, lasting("watcher", 600)).0;
    watcher.subscribe_with("wills/#", QoS::AtLeastOnce, None);
    leave(&mut watcher);
    let mut delayed = lasting("delayed", 600);
    delayed.will = Some(ConnectWill { delay: 1, ..will("wills/delayed", b"gone") });
    let _delayed = resume(server.ports.tcp, delayed);
    let mut saved = lasting("saved", 600);
    saved.will = Some(ConnectWill { delay: 3600, ..will("wills/saved", b"gone") });
    let _saved = resume(server.ports.tcp, saved.clone());
    // Both are written without anybody waiting for it; a subscription of the last one's is waited for.
    let mut mark = resume(server.ports.tcp, lasting("mark", 600)).0;
    mark.subscribe("mark");
    let server = server.kill_and_restart(&[], "");
    // Back within its delay: not published [MQTT-3.1.3-9].
    let (mut saved, present) = resume(server.ports.tcp, Connect { will: None, ..saved });
    assert!(present);
    leave(&mut saved);
    let (mut watcher, present) = resume(server.ports.tcp, lasting("watcher", 600));
    assert!(present);
    assert_eq!(watcher.next(), Got::Publish("wills/delayed".to_owned(), b"gone".to_vec()));
    assert_eq!(watcher.ping(), [], "and no other");
    assert_eq!(server.metric("mqtt_wills_published_total"), 1);
}

/// [MQTT-3.1.2-23]: the time without the gateway counts, too.
#[test]
fn a_session_expires_although_the_gateway_was_away() {
    let server = Server::start();
    let mut short = resume(server.ports.tcp, lasting("short", 1)).0;
    short.subscribe("a");
    leave(&mut short);
    let mut long = resume(server.ports.tcp, lasting("long", 600)).0;
    long.subscribe("a");
    leave(&mut long);
    let connected = resume(server.ports.tcp, lasting("connected", 600));
    until(|| server.metric("mqtt_sessions") == 2);
    let server = server.kill_and_restart(&[], "");
    assert_eq!(server.metric("mqtt_subscriptions"), 1);
    drop(connected);
    for (name, expected) in [("short", false), ("long", true), ("connected", true)] {
        assert_eq!(resume(server.ports.tcp, lasting(name, 600)).1, expected, "{name}");
    }
}

/// A session that was discarded must not come back, nor one that ends with its connection outlive the process.
#[test]
fn what_has_ended_stays_ended_after_a_crash() {
    let server = Server::start();
    let mut first = resume(server.ports.tcp, lasting("clean", 600)).0;
    first.subscribe("old");
    leave(&mut first);
    let (_clean, present) = resume(server.ports.tcp, Connect { clean_start: true, ..lasting("clean", 600) });
    assert!(!present);
    let mut brief = resume(server.ports.tcp, hello(Protocol::V5, "brief")).0;
    brief.subscribe("brief");
    let mut changed = resume(server.ports.tcp, lasting("changed", 600)).0;
    changed.subscribe("kept");
    changed.subscribe("left");
    changed.send(&Packet::Unsubscribe(Unsubscribe {
        packet_id: 1,
        user: Vec::new(),
        filters: vec!["left".to_owned()],
    }));
    assert_eq!(changed.next(), Got::Other(0xB0));
    let server = server.kill_and_restart(&[], "");
    assert_eq!((server.metric("mqtt_sessions"), server.metric("mqtt_subscriptions")), (2, 1));
    assert!(resume(server.ports.tcp, lasting("clean", 600)).1, "the new one");
    assert!(!resume(server.ports.tcp, lasting("brief", 600)).1);
}

/// [MQTT-4.3.3]: both halves of QoS 2 go on where they were: no PUBREL is sent for nothing, no identifier forgotten.
#[test]
fn a_qos_2_handshake_goes_on_after_a_crash() {
    let server = Server::start();
    let mut receiver = resume(server.ports.tcp, lasting("receiver", 600)).0;
    receiver.subscribe_with("t", QoS::ExactlyOnce, None);
    let mut sender = resume(server.ports.tcp, lasting("sender", 600)).0;
    sender.send(&message("t", b"once", QoS::ExactlyOnce, false));
    assert_eq!(sender.next(), Got::Other(0x50), "PUBREC");
    assert_eq!(receiver.next(), Got::Publish("t".to_owned(), b"once".to_vec()));
    receiver.send(&Packet::PubRec(ack(1)));
    assert_eq!(receiver.next(), Got::Other(0x62), "PUBREL, so the gateway has noted PUBREC");
    let server = server.kill_and_restart(&[], "");
    let (mut receiver, present) = resume(server.ports.tcp, lasting("receiver", 600));
    assert!(present);
    assert_eq!(receiver.next(), Got::Other(0x62), "PUBREL again, not PUBLISH");
    receiver.send(&Packet::PubComp(ack(1)));
    let (mut sender, present) = resume(server.ports.tcp, lasting("sender", 600));
    assert!(present);
    let Packet::Publish(mut again) = message("t", b"once", QoS::ExactlyOnce, false) else { unreachable!() };
    again.dup = true;
    sender.send(&Packet::Publish(again));
    assert_eq!(sender.next(), Got::Other(0x50), "PUBREC of a duplicate");
    sender.send(&Packet::PubRel(ack(1)));
    assert_eq!(sender.next(), Got::Other(0x70), "PUBCOMP");
    sender.send(&message("t", b"another", QoS::ExactlyOnce, false));
    assert_eq!(sender.next(), Got::Other(0x50));
    assert_eq!(receiver.next(), Got::Publish("t".to_owned(), b"another".to_vec()), "the first came once");
}

/// Sessions and retained messages of broker mode do not open a way from device to device in non-broker mode.
#[test]
fn a_start_in_non_broker_mode_keeps_only_the_namespace() {
    let server = Server::start();
    let mut device = resume(server.ports.tcp, lasting("dev", 600)).0;
    for filter in ["devices/dev/#", "others/#", "$share/group/others/#"] {
        device.subscribe_with(filter, QoS::AtLeastOnce, None);
    }
    device.publish_acked("kept", b"x", true);
    leave(&mut device);
    let server = server.kill_and_restart(&["--non-broker"], "");
    assert_eq!((server.metric("mqtt_sessions"), server.metric("mqtt_subscriptions")), (1, 1));
    let log = server.log();
    assert!(log.contains("\"refused_subscriptions\":2") && log.contains("\"refused_retained\":1"), "{log}");
}

/// Both leave the disk by themselves.
#[test]
fn a_client_that_comes_back_gets_nothing_older_than_the_age_limit() {
    let server = Server::start_with(&[], "[limits]\noffline_age = \"1s\"\n");
    let mut device = resume(server.ports.tcp, lasting("dev", 600)).0;
    device.subscribe_with("t", QoS::ExactlyOnce, None);
    leave(&mut device);
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "publisher");
    publisher.send(&message("t", b"old, QoS 2", QoS::ExactlyOnce, false));
    assert_eq!(publisher.next(), Got::Other(0x50), "PUBREC");
    publisher.send(&Packet::PubRel(ack(1)));
    assert_eq!(publisher.next(), Got::Other(0x70), "PUBCOMP");
    publisher.publish_acked("t", b"old, QoS 1", false);
    until(|| server.metric("gateway_store_entries_expired_total") == 2);
    let (mut device, present) = resume(server.ports.tcp, lasting("dev", 600));
    assert!(present);
    publisher.publish_acked("t", b"new", false);
    assert_eq!(device.next(), Got::Publish("t".to_owned(), b"new".to_vec()));
    assert_eq!(server.metric("mqtt_messages_dropped_total"), 0, "they are counted where they left the disk");
}

/// Messages that were in flight then are sent again.
#[test]
fn what_waited_at_a_lost_connection_is_not_sent_past_the_age_limit() {
    let server = Server::start_with(&[], "[limits]\noffline_age = \"1s\"\n");
    let one = || Connect { receive_maximum: Some(1), ..lasting("dev", 600) };
    let mut device = resume(server.ports.tcp, one()).0;
    device.subscribe_with("t", QoS::ExactlyOnce, None);
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "publisher");
    for payload in ["in flight", "waits"] {
        publisher.publish_acked("t", payload.as_bytes(), false);
    }
    publisher.send(&message("t", b"waits, QoS 2", QoS::ExactlyOnce, false));
    assert_eq!(publisher.next(), Got::Other(0x50), "PUBREC");
    publisher.send(&Packet::PubRel(ack(1)));
    assert_eq!(publisher.next(), Got::Other(0x70), "PUBCOMP");
    let in_flight = Got::Publish("t".to_owned(), b"in flight".to_vec());
    assert_eq!(device.next(), in_flight);
    drop(device);
    until(|| server.metric("mqtt_connections") == 1);
    until(|| server.metric("gateway_store_entries_expired_total") == 2);
    let (mut device, present) = resume(server.ports.tcp, one());
    assert!(present);
    assert_eq!(device.next(), in_flight);
    device.send(&Packet::PubAck(ack(1)));
    publisher.publish_acked("t", b"new", false);
    assert_eq!(device.next(), Got::Publish("t".to_owned(), b"new".to_vec()));
}

/// Devices that find no room for a whole page read less at a time: none waits for the others to leave.
#[test]
fn devices_that_come_back_all_at_once_keep_to_the_budget_and_are_served() {
    let config = "[limits]\nmemory_budget = \"1900 KiB\"\nmailbox_bytes = \"1 MiB\"\nstream_buffer = \"64 KiB\"\n\
                  max_packet_size = \"32 KiB\"\n[latest]\nenabled = false\n";
    let server = Server::start_with(&[], config);
    let slow = |name| Connect { receive_maximum: Some(1), ..lasting(name, 600) };
    let names = ["first", "second", "third"];
    for name in names {
        let mut device = resume(server.ports.tcp, slow(name)).0;
        device.subscribe_with("t", QoS::AtLeastOnce, None);
        leave(&mut device);
    }
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "publisher");
    for n in 0..100_u32 {
        publisher.publish_acked("t", &[&n.to_be_bytes()[..], &[0; 9_000]].concat(), false);
    }
    let mut devices: Vec<Client> = Vec::new();
    for name in &names {
        let mut device = resume(server.ports.tcp, slow(name)).0;
        assert!(matches!(device.next(), Got::Publish(..)), "{name} has read what is on disk");
        let queued = server.metric("mqtt_queued_bytes");
        assert!(queued <= 1900 << 10, "{queued} bytes are more than the budget");
        devices.push(device);
    }
    // The last one gets on while the others hold what they have.
    let third = devices.last_mut().expect("three");
    for n in 0..20_u16 {
        third.send(&Packet::PubAck(ack(n + 1)));
        assert!(matches!(third.next(), Got::Publish(..)), "message {n}");
    }
}

/// A member that acknowledges all it gets, over its connections: the numbers of its messages as they came first.
#[derive(Default)]
struct Member {
    numbers: Vec<u32>,
    /// QoS 2 packet identifiers between PUBREC and PUBREL.
    open: BTreeSet<u16>,
    doubled_once: Vec<u32>,
}

impl Member {
    fn take_one(&mut self, client: &mut Client) {
        let bytes = client.next_bytes().expect("a packet");
        match crate::client::decoded(&bytes, Protocol::V5) {
            Packet::Publish(publish) => {
                let exactly = publish.qos == QoS::ExactlyOnce;
                if !exactly || self.open.insert(publish.packet_id) {
                    let number = u32::from_be_bytes(publish.payload[..4].try_into().expect("a number"));
                    match self.numbers.contains(&number) {
                        false => self.numbers.push(number),
                        true if exactly => self.doubled_once.push(number),
                        true => {}
                    }
                }
                let ack = ack(publish.packet_id);
                client.send(&if exactly { Packet::PubRec(ack) } else { Packet::PubAck(ack) });
            }
            Packet::PubRel(rel) => {
                self.open.remove(&rel.packet_id);
                client.send(&Packet::PubComp(ack(rel.packet_id)));
            }
            other => panic!("{other:?}"),
        }
    }
}

/// QoS 1 in one go, QoS 2 each with its handshake; every tenth.
fn publish_numbered(port: u16, numbers: Range<u32>) {
    let mut publisher = resume(port, lasting("publisher", 600)).0;
    let payload = |number: u32| [&number.to_be_bytes()[..], &[b'x'; 1000]].concat();
    for first in numbers.step_by(10) {
        let payloads: Vec<Vec<u8>> = (first..first + 9).map(payload).collect();
        let packets: Vec<_> = payloads.iter().map(|p| message("t", p, QoS::AtLeastOnce, false)).collect();
        publisher.send_all(&packets);
        for _ in &packets {
            assert_eq!(publisher.next(), Got::PubAck(0));
        }
        publisher.send(&message("t", &payload(first + 9), QoS::ExactlyOnce, false));
        assert_eq!(publisher.next(), Got::Other(0x50), "PUBREC");
        publisher.send(&Packet::PubRel(ack(1)));
        assert_eq!(publisher.next(), Got::Other(0x70), "PUBCOMP");
    }
}

/// Messages that wait for a group are on disk; a start reads none of them, and a member gets them page by page.
#[test]
fn a_long_group_queue_survives_crashes_whole_and_in_order() {
    const MESSAGES: u32 = 3000;
    /// A page of a group's queue, a window of a session's, and what is on its way between them.
    const MEMORY: u64 = 3 << 20;
    let server = Server::start();
    let mut client = resume(server.ports.tcp, lasting("member", 600)).0;
    client.subscribe_with("$share/group/t", QoS::ExactlyOnce, None);
    leave(&mut client);
    until(|| server.metric("mqtt_connections") == 0);
    publish_numbered(server.ports.tcp, 0..MESSAGES);
    assert_eq!(server.metric("mqtt_queued_bytes"), 0, "before the crash");
    let mut server = server.kill_and_restart(&[], "");
    assert_eq!(server.metric("mqtt_queued_bytes"), 0, "after the start");
    assert!(server.log().contains("\"messages\":3000"), "{}", server.log());
    let mut member = Member::default();
    for most in [MESSAGES as usize / 3, MESSAGES as usize] {
        let (mut client, present) = resume(server.ports.tcp, lasting("member", 600));
        assert!(present);
        while member.numbers.len() < most {
            member.take_one(&mut client);
            if member.numbers.len() % 500 == 0 {
                assert!(server.metric("mqtt_queued_bytes") < MEMORY);
            }
        }
        if most < MESSAGES as usize {
            assert_eq!(member.numbers, (0..MESSAGES / 3).collect::<Vec<_>>());
        }
        // In the middle, after which un-acknowledged QoS 1 is behind the rest, and when everything is there.
        server = server.kill_and_restart(&[], "");
    }
    let mut client = resume(server.ports.tcp, lasting("member", 600)).0;
    publish_numbered(server.ports.tcp, MESSAGES..MESSAGES + 10);
    while member.numbers.len() < MESSAGES as usize + 10 {
        member.take_one(&mut client);
    }
    assert!(member.doubled_once.is_empty(), "QoS 2: {:?}", member.doubled_once);
    member.numbers.sort_unstable();
    assert_eq!(member.numbers, (0..MESSAGES + 10).collect::<Vec<_>>());
}

/// Large messages are not in memory after a start.
#[test]
fn large_retained_messages_survive_a_crash_and_can_be_replaced() {
    const TOPICS: usize = 300;
    let server = Server::start();
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "publisher");
    let payload = |number: usize, times: usize| format!("{number} ").repeat(times).into_bytes();
    let times = |number: usize| if number.is_multiple_of(3) { 1 } else { 500 };
    // A short one and a long one, which the store keeps in other ways.
    let topic = |number: usize| format!("kept/{number:03}{}", "/long".repeat(number % 2 * 110));
    for number in 0..TOPICS {
        publisher.publish_acked(&topic(number), &payload(number, times(number)), true);
    }
    let server = server.kill_and_restart(&[], "");
    assert!(server.log().contains("\"retained\":300,"), "{}", server.log());
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "publisher");
    publisher.publish_acked(&topic(1), b"", true);
    publisher.publish_acked(&topic(2), b"new", true);
    let mut subscriber = Client::connect(server.ports.tcp, Protocol::V5, "subscriber");
    assert_eq!(subscriber.subscribe("kept/#"), 0);
    for number in (0..TOPICS).filter(|number| *number != 1) {
        let expected = if number == 2 { b"new".to_vec() } else { payload(number, times(number)) };
        assert_eq!(subscriber.next(), Got::Publish(topic(number), expected));
    }
    assert_eq!(subscriber.subscribe(&topic(5)), 0);
    assert_eq!(subscriber.next(), Got::Publish(topic(5), payload(5, times(5))));
}

/// Without the store everything is as it was before there was one.
#[test]
fn without_the_store_sessions_end_with_the_process() {
    let config = "[store]\nenabled = false\n";
    let server = Server::start_with(&[], config);
    let mut device = resume(server.ports.tcp, lasting("dev", 600)).0;
    device.subscribe_with("t", QoS::AtLeastOnce, None);
    leave(&mut device);
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "publisher");
    publisher.publish_acked("t", b"waits", false);
    let (mut device, present) = resume(server.ports.tcp, lasting("dev", 600));
    assert!(present);
    assert_eq!(device.next(), Got::Publish("t".to_owned(), b"waits".to_vec()));
    let server = server.kill_and_restart(&[], config);
    assert!(!resume(server.ports.tcp, lasting("dev", 600)).1);
    assert!(!server.dir().join("data/queues").exists());
}

/// A refusal needs no disk, but goes out behind the acknowledgement of what came before it [MQTT-4.6.0-2].
#[test]
fn a_refusal_is_not_sent_before_an_earlier_answer_that_waits() {
    let server = Server::start();
    let mut away = resume(server.ports.tcp, lasting("away", 600)).0;
    away.subscribe_with("kept", QoS::AtLeastOnce, None);
    leave(&mut away);
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V5, "publisher");
    for _ in 0..20 {
        publisher.send_all(&[
            message("kept", b"x", QoS::AtLeastOnce, false),
            message("$SYS/refused", b"x", QoS::AtLeastOnce, false),
        ]);
        assert_eq!(publisher.next(), Got::PubAck(0));
        assert_eq!(publisher.next(), Got::PubAck(0x90));
    }
}
