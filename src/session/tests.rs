use std::sync::Arc;

use super::*;
use crate::{
    codec::{self, Connect, Packet, Publish, reason},
    config::{ByteSize, Limits, OverflowPolicy},
    types::{DropReason, Message, Origin, Properties, Protocol, QoS, Timestamp},
};

struct Unlimited;

impl Budget for Unlimited {
    fn charge(&self, _bytes: usize) -> bool {
        true
    }
    fn release(&self, _bytes: usize) {}
}

fn env(limits: &Limits, now: u64) -> Env<'_> {
    Env { limits, now: Timestamp(now), budget: &Unlimited }
}

fn link(protocol: Protocol) -> LinkParams {
    LinkParams { protocol, receive_maximum: u16::MAX, maximum_packet_size: u32::MAX, topic_alias_maximum: 0 }
}

fn offer(qos: QoS) -> Offer<'static> {
    Offer { qos, retain: false, ids: &[], group: 0, queue_offline: true }
}

fn message(payload: &[u8], qos: QoS) -> Message<'_> {
    let mut message = Message::new("t", payload, Timestamp(0), Origin::BACKEND);
    message.qos = qos;
    message
}

fn packets(outbound: &mut Outbound, protocol: Protocol) -> Vec<String> {
    let bytes = outbound.take_out();
    let mut rest = &bytes[..];
    let mut seen = Vec::new();
    while let Ok(Some(frame)) = codec::frame(rest, usize::MAX) {
        rest = &rest[frame.len..];
        seen.push(match codec::decode(&frame, protocol).unwrap() {
            Packet::Publish(p) => format!(
                "publish {} id={} qos={} dup={} topic={} alias={:?} expiry={:?}",
                String::from_utf8_lossy(p.payload),
                p.packet_id,
                p.qos as u8,
                p.dup,
                p.topic,
                p.alias,
                p.expiry
            ),
            Packet::PubRel(a) => format!("pubrel {} {:#x}", a.packet_id, a.code),
            Packet::PubComp(a) => format!("pubcomp {} {:#x}", a.packet_id, a.code),
            other => format!("{other:?}"),
        });
    }
    seen
}

#[test]
fn random_operations_keep_every_promise() {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    for _ in 0..3_000 {
        let mut data = Vec::new();
        for _ in 0..200 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            data.push((state >> 32) as u8);
        }
        fuzz_session(&data);
    }
}

/// [MQTT-4.4.0-1]: on reconnect, and only then, what is un-acknowledged is sent again with its id and DUP.
#[test]
fn reconnect_resends_publish_and_pubrel_in_order() {
    let limits = Limits::default();
    let mut outbound = Outbound::new();
    outbound.attach(link(Protocol::V4), &[], &env(&limits, 0));
    for payload in [b"a", b"b", b"c"] {
        outbound.offer(&message(payload, QoS::ExactlyOnce), offer(QoS::ExactlyOnce), &env(&limits, 0));
    }
    outbound.handle_pubrec(1, 0, &env(&limits, 0));
    outbound.take_out();
    outbound.detach();
    outbound.attach(link(Protocol::V4), &[], &env(&limits, 0));
    assert_eq!(
        packets(&mut outbound, Protocol::V4),
        [
            "pubrel 1 0x0",
            "publish b id=2 qos=2 dup=true topic=t alias=None expiry=None",
            "publish c id=3 qos=2 dup=true topic=t alias=None expiry=None",
        ]
    );
    assert!(outbound.handle_pubcomp(1, &env(&limits, 0)));
    assert!(!outbound.handle_puback(2, 0, &env(&limits, 0)), "PUBACK does not end QoS 2");
}

/// [MQTT-4.9.0-2]: with the window full QoS 1 waits, QoS 0 does not.
#[test]
fn receive_maximum_holds_back_qos1_only() {
    let limits = Limits::default();
    let mut outbound = Outbound::new();
    outbound.attach(LinkParams { receive_maximum: 1, ..link(Protocol::V5) }, &[], &env(&limits, 0));
    for payload in [b"a", b"b"] {
        outbound.offer(&message(payload, QoS::AtLeastOnce), offer(QoS::AtLeastOnce), &env(&limits, 0));
    }
    outbound.offer(&message(b"z", QoS::AtMostOnce), offer(QoS::AtMostOnce), &env(&limits, 0));
    let seen = packets(&mut outbound, Protocol::V5);
    assert_eq!(seen.len(), 2, "{seen:?}");
    assert!(outbound.handle_puback(1, 0, &env(&limits, 0)));
    assert_eq!(
        packets(&mut outbound, Protocol::V5),
        ["publish b id=2 qos=1 dup=false topic=t alias=None expiry=None"]
    );
}

/// [MQTT-3.3.2-5] [MQTT-3.3.2-6]: a waiting message expires, and what is left of the interval is sent.
#[test]
fn expiry_counts_down_while_waiting() {
    let limits = Limits::default();
    let mut outbound = Outbound::new();
    for (payload, expires) in [(b"a", 5_000), (b"b", 60_000)] {
        let mut message = message(payload, QoS::AtLeastOnce);
        message.expires = Some(Timestamp(expires));
        assert_eq!(outbound.offer(&message, offer(QoS::AtLeastOnce), &env(&limits, 0)), Take::Queued);
    }
    outbound.attach(link(Protocol::V5), &[], &env(&limits, 20_000));
    assert_eq!(
        packets(&mut outbound, Protocol::V5),
        ["publish b id=1 qos=1 dup=false topic=t alias=None expiry=Some(40)"]
    );
}

#[test]
fn aliases_are_set_once_and_then_used_alone() {
    let limits = Limits::default();
    let mut outbound = Outbound::new();
    outbound.attach(LinkParams { topic_alias_maximum: 1, ..link(Protocol::V5) }, &[], &env(&limits, 0));
    for _ in 0..2 {
        outbound.offer(&message(b"a", QoS::AtMostOnce), offer(QoS::AtMostOnce), &env(&limits, 0));
    }
    let other = Message::new("u", b"b", Timestamp(0), Origin::BACKEND);
    outbound.offer(&other, offer(QoS::AtMostOnce), &env(&limits, 0));
    assert_eq!(
        packets(&mut outbound, Protocol::V5),
        [
            "publish a id=0 qos=0 dup=false topic=t alias=Some(1) expiry=None",
            "publish a id=0 qos=0 dup=false topic= alias=Some(1) expiry=None",
            "publish b id=0 qos=0 dup=false topic=u alias=None expiry=None",
        ]
    );
}

/// [MQTT-3.1.2-24] [MQTT-3.1.2-25].
#[test]
fn packets_above_the_clients_maximum_are_dropped() {
    let limits = Limits::default();
    let mut outbound = Outbound::new();
    outbound.attach(LinkParams { maximum_packet_size: 20, ..link(Protocol::V5) }, &[], &env(&limits, 0));
    let big = [b'x'; 64];
    let taken = outbound.offer(&message(&big, QoS::AtLeastOnce), offer(QoS::AtLeastOnce), &env(&limits, 0));
    assert_eq!(taken, Take::Dropped(DropReason::TooLarge));
    assert_eq!(outbound.sizes().0, 0, "nothing stays in flight");
}

#[test]
fn full_queues_follow_the_policy() {
    for (policy, third) in [
        (OverflowPolicy::DropNewest, Take::Dropped(DropReason::QueueFull)),
        (OverflowPolicy::DropOldest, Take::Queued),
        (OverflowPolicy::Disconnect, Take::Queued),
    ] {
        let limits = Limits { offline_messages: 2, overflow: policy, ..Limits::default() };
        let mut outbound = Outbound::new();
        for payload in [b"a", b"b"] {
            outbound.offer(&message(payload, QoS::AtLeastOnce), offer(QoS::AtLeastOnce), &env(&limits, 0));
        }
        let taken =
            outbound.offer(&message(b"c", QoS::AtLeastOnce), offer(QoS::AtLeastOnce), &env(&limits, 0));
        assert_eq!(taken, third, "{policy:?}");
        assert_eq!(outbound.sizes().1, 2, "{policy:?}");
    }
    let limits =
        Limits { mailbox_bytes: ByteSize(1), overflow: OverflowPolicy::Disconnect, ..Limits::default() };
    let mut outbound = Outbound::new();
    outbound.attach(LinkParams { receive_maximum: 1, ..link(Protocol::V5) }, &[], &env(&limits, 0));
    outbound.offer(&message(b"a", QoS::AtLeastOnce), offer(QoS::AtLeastOnce), &env(&limits, 0));
    let taken = outbound.offer(&message(b"b", QoS::AtLeastOnce), offer(QoS::AtLeastOnce), &env(&limits, 0));
    assert_eq!(taken, Take::Overflow);
}

fn connect() -> Connect {
    Connect {
        protocol: Protocol::V5,
        clean_start: true,
        keep_alive: 60,
        client_id: "c".to_owned(),
        will: None,
        username: None,
        password: None,
        session_expiry: None,
        receive_maximum: None,
        maximum_packet_size: None,
        topic_alias_maximum: 0,
        request_response_information: false,
        request_problem_information: true,
        user: Vec::new(),
        auth_method: None,
        auth_data: None,
    }
}

#[test]
fn connect_is_granted_within_the_limits_or_refused() {
    let limits = Limits { keep_alive_max: 30, session_expiry_max: 100, ..Limits::default() };
    let policy = ConnectPolicy { limits: &limits, non_broker: true, assigned_id: &|| "made".to_owned() };
    let refused = |connect: Connect| evaluate_connect(&connect, &policy).err();

    let accepted =
        evaluate_connect(&Connect { session_expiry: Some(u32::MAX), ..connect() }, &policy).unwrap();
    assert_eq!((accepted.expiry, accepted.keep_alive), (100, 30));
    assert_eq!((accepted.connack.session_expiry, accepted.connack.server_keep_alive), (Some(100), Some(30)));

    let assigned = evaluate_connect(&Connect { client_id: String::new(), ..connect() }, &policy).unwrap();
    assert_eq!(assigned.connack.assigned_client_id.as_deref(), Some("made"));

    let invalid = Some(Refused(Some(reason::CLIENT_IDENTIFIER_NOT_VALID)));
    let empty = Connect { client_id: String::new(), clean_start: false, protocol: Protocol::V4, ..connect() };
    assert_eq!(refused(empty), invalid);
    assert_eq!(refused(Connect { client_id: "a/b".to_owned(), ..connect() }), invalid);
    assert_eq!(refused(Connect { client_id: "x".repeat(300), ..connect() }), invalid);
    let method = Connect { auth_method: Some("SCRAM".to_owned()), ..connect() };
    assert_eq!(refused(method), Some(Refused(Some(reason::BAD_AUTHENTICATION_METHOD))));
}

fn publish(topic: &str) -> Publish<'_> {
    Publish {
        dup: false,
        qos: QoS::AtLeastOnce,
        retain: false,
        topic,
        packet_id: 1,
        payload: b"\xFF",
        alias: None,
        expiry: None,
        ids: Vec::new(),
        properties: None,
    }
}

#[test]
fn inbound_publish_is_checked_and_its_alias_resolved() {
    let limits =
        Limits { max_qos: 1, retain_available: false, validate_payload_format: true, ..Limits::default() };
    let mut inbound = Inbound::new(Protocol::V5);
    let mut check = |publish: Publish<'_>| inbound.check_publish(&publish, &limits);
    assert_eq!(check(publish("t")), Ok(None));
    assert_eq!(
        check(Publish { alias: Some(3), ..publish("") }),
        Err(PublishError::Fatal(reason::PROTOCOL_ERROR))
    );
    assert_eq!(check(Publish { alias: Some(3), ..publish("t") }), Ok(None));
    assert_eq!(check(Publish { alias: Some(3), ..publish("") }).unwrap().as_deref(), Some("t"));
    let alias_high = Publish { alias: Some(65), ..publish("t") };
    assert_eq!(check(alias_high), Err(PublishError::Fatal(reason::TOPIC_ALIAS_INVALID)));
    let qos2 = Publish { qos: QoS::ExactlyOnce, ..publish("t") };
    assert_eq!(check(qos2), Err(PublishError::Fatal(reason::QOS_NOT_SUPPORTED)));
    let retained = Publish { retain: true, ..publish("t") };
    assert_eq!(check(retained), Err(PublishError::Fatal(reason::RETAIN_NOT_SUPPORTED)));
    let text = Some(Arc::new(Properties { payload_format: Some(1), ..Properties::default() }));
    let broken = Publish { properties: text, ..publish("t") };
    assert_eq!(check(broken), Err(PublishError::Refused(reason::PAYLOAD_FORMAT_INVALID)));
    assert_eq!(check(publish("$SYS/x")), Err(PublishError::Refused(reason::TOPIC_NAME_INVALID)));
}
