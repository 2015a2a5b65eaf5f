mod durable;
mod judging;
mod model;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use codec::{Packet, Publish, reason};
use gateway_core::{
    DropReason, Message, Offer, Origin, Outcome, Properties, Protocol, QoS, QueueId, Timestamp,
    limits::{Limits, OverflowPolicy},
    units::{ByteSize, Span},
};

use super::*;
use crate::fuzz::{TestBudget, Unlimited, append_reply};

fn env(limits: &Limits, now: u64) -> Env<'_> {
    Env { limits, now: Timestamp(now), budget: &Unlimited, disk: None }
}

fn link(protocol: Protocol) -> LinkParams {
    LinkParams { protocol, receive_maximum: u16::MAX, maximum_packet_size: u32::MAX, topic_alias_maximum: 0 }
}

fn offer(qos: QoS) -> Offer<'static> {
    Offer { qos, retain: false, ids: &[], group: 0, group_queue: QueueId::NONE, queue_offline: true }
}

/// PUBREC comes, and its PUBREL goes.
fn release(outbound: &mut Outbound, id: u16, env: &Env<'_>) {
    let reply = outbound.handle_pubrec(id, 0, env).expect("the next step").expect("success is answered");
    append_reply(outbound, &reply);
}

fn message(payload: &[u8], qos: QoS) -> Message<'_> {
    let mut message = Message::new("t", payload, Timestamp(0), Origin::BACKEND);
    message.qos = qos;
    message
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
    assert!(outbound.handle_pubrec(1, 0, &env(&limits, 0)).is_ok());
    outbound.take_out();
    outbound.detach(&env(&limits, 0));
    outbound.attach(link(Protocol::V4), &[], &env(&limits, 0));
    assert_eq!(
        packets(&mut outbound, Protocol::V4),
        [
            "pubrel 1 0x0",
            "publish b id=2 qos=2 dup=true topic=t alias=None expiry=None",
            "publish c id=3 qos=2 dup=true topic=t alias=None expiry=None",
        ]
    );
    assert_eq!(outbound.handle_pubcomp(1, &env(&limits, 0)), Ok(true));
}

/// [MQTT-4.3.2-3] [MQTT-4.3.2-5] [MQTT-4.3.3-3] [MQTT-4.3.3-12] [MQTT-2.2.1-4]: an id is in flight until its last
/// acknowledgement and then free; no other packet ends it.
#[test]
fn packet_ids_are_busy_until_the_last_acknowledgement() {
    let limits = Limits::default();
    let env = env(&limits, 0);
    let mut outbound = Outbound::new();
    outbound.attach(link(Protocol::V5), &[], &env);
    outbound.offer(&message(b"a", QoS::AtLeastOnce), offer(QoS::AtLeastOnce), &env);
    outbound.offer(&message(b"b", QoS::ExactlyOnce), offer(QoS::ExactlyOnce), &env);
    assert_eq!(outbound.sizes().0, 2);
    assert_eq!(outbound.handle_puback(1, 0, &env), Ok(true));
    assert_eq!(outbound.handle_puback(1, 0, &env), Ok(false), "acknowledged once");
    assert!(outbound.handle_pubrec(2, 0, &env).is_ok());
    assert_eq!(outbound.sizes().0, 1, "PUBREC leaves the id in use until PUBCOMP");
    assert_eq!(outbound.handle_pubcomp(2, &env), Ok(true));
    assert_eq!(outbound.sizes().0, 0);
}

/// [MQTT-4.3.2-3] [MQTT-4.3.3-3] [MQTT-4.3.3-5]: an acknowledgement of another QoS, or of another phase of QoS 2, is an
/// error and ends nothing; one for an id that is not in flight is none.
#[test]
fn an_acknowledgement_out_of_step_is_told_from_one_of_an_unknown_id() {
    let limits = Limits::default();
    let env = env(&limits, 0);
    let mut outbound = Outbound::new();
    outbound.attach(link(Protocol::V5), &[], &env);
    outbound.offer(&message(b"a", QoS::AtLeastOnce), offer(QoS::AtLeastOnce), &env);
    outbound.offer(&message(b"b", QoS::ExactlyOnce), offer(QoS::ExactlyOnce), &env);
    outbound.take_out();
    assert_eq!(outbound.handle_pubrec(1, 0, &env).err(), Some(WrongStep), "PUBREC of QoS 1");
    assert_eq!(outbound.handle_pubrec(1, 0x80, &env).err(), Some(WrongStep), "refusing PUBREC of QoS 1");
    assert_eq!(outbound.handle_pubcomp(1, &env), Err(WrongStep), "PUBCOMP of QoS 1");
    assert_eq!(outbound.handle_puback(2, 0, &env), Err(WrongStep), "PUBACK of QoS 2");
    assert_eq!(outbound.handle_pubcomp(2, &env), Err(WrongStep), "PUBCOMP before PUBREC");
    release(&mut outbound, 2, &env);
    assert_eq!(outbound.handle_puback(2, 0, &env), Err(WrongStep), "PUBACK after PUBREL");
    release(&mut outbound, 2, &env);
    assert_eq!(outbound.sizes().0, 2);
    assert_eq!(
        (outbound.handle_puback(3, 0, &env), outbound.handle_pubcomp(3, &env)),
        (Ok(false), Ok(false))
    );
    release(&mut outbound, 3, &env);
    assert_eq!(packets(&mut outbound, Protocol::V5), ["pubrel 2 0x0", "pubrel 2 0x0", "pubrel 3 0x92"]);
}

/// Closed while the switch is on.
#[derive(Debug)]
struct Switch(Arc<AtomicBool>);

impl Gate for Switch {
    fn admits(&mut self, _topic: &str) -> bool {
        !self.0.load(Relaxed)
    }
}

/// The failure: what was in flight when the rules changed goes out to a client that may no longer have it. The identifier of
/// QoS 2 is released all the same, since the client may hold it.
#[test]
fn what_is_in_flight_is_looked_at_again_before_it_is_resent() {
    let limits = Limits::default();
    let env = env(&limits, 0);
    let closed = Arc::new(AtomicBool::new(false));
    let mut outbound = Outbound::new();
    outbound.set_gate(Some(Box::new(Switch(Arc::clone(&closed)))));
    outbound.attach(link(Protocol::V5), &[], &env);
    for (payload, qos) in [(b"a", QoS::AtLeastOnce), (b"b", QoS::ExactlyOnce)] {
        outbound.offer(&message(payload, qos), offer(qos), &env);
    }
    let mut direct = message(b"c", QoS::AtLeastOnce);
    direct.direct = true;
    outbound.offer(&direct, offer(QoS::AtLeastOnce), &env);
    outbound.take_out();
    outbound.detach(&env);
    for payload in [b"d", b"e"] {
        outbound.offer(&message(payload, QoS::AtLeastOnce), offer(QoS::AtLeastOnce), &env);
    }
    let mut waiting = message(b"f", QoS::AtLeastOnce);
    waiting.direct = true;
    outbound.offer(&waiting, offer(QoS::AtLeastOnce), &env);
    closed.store(true, Relaxed);
    assert_eq!(
        outbound.offer(&message(b"g", QoS::AtLeastOnce), offer(QoS::AtLeastOnce), &env),
        Outcome::Ignored
    );
    outbound.attach(link(Protocol::V5), &[], &env);
    assert_eq!(
        packets(&mut outbound, Protocol::V5),
        [
            "pubrel 2 0x0",
            "publish c id=3 qos=1 dup=true topic=t alias=None expiry=None",
            "publish f id=4 qos=1 dup=false topic=t alias=None expiry=None",
        ]
    );
    assert_eq!((outbound.handle_puback(1, 0, &env), outbound.handle_pubcomp(2, &env)), (Ok(false), Ok(true)));
    let (inflight, waiting, _, dropped) = outbound.sizes();
    assert_eq!((inflight, waiting, dropped), (2, 0, 4));
}

/// [MQTT-4.3.3-5] [MQTT-4.3.3-6] [MQTT-4.3.3-7] [MQTT-4.3.3-13]: what was sent is finished whatever its expiry:
/// PUBREL is sent again until PUBCOMP, and never the PUBLISH after it.
#[test]
fn a_started_qos2_handshake_goes_on_after_expiry() {
    let limits = Limits::default();
    let mut outbound = Outbound::new();
    outbound.attach(link(Protocol::V5), &[], &env(&limits, 0));
    let mut expiring = message(b"a", QoS::ExactlyOnce);
    expiring.expires = Some(Timestamp(1_000));
    outbound.offer(&expiring, offer(QoS::ExactlyOnce), &env(&limits, 0));
    outbound.take_out();
    release(&mut outbound, 1, &env(&limits, 5_000));
    assert_eq!(packets(&mut outbound, Protocol::V5), ["pubrel 1 0x0"]);
    for now in [6_000, 7_000] {
        outbound.detach(&env(&limits, 0));
        outbound.attach(link(Protocol::V5), &[], &env(&limits, now));
        assert_eq!(packets(&mut outbound, Protocol::V5), ["pubrel 1 0x0"]);
    }
    assert_eq!(outbound.handle_pubcomp(1, &env(&limits, 8_000)), Ok(true));
    outbound.detach(&env(&limits, 0));
    outbound.attach(link(Protocol::V5), &[], &env(&limits, 9_000));
    assert!(packets(&mut outbound, Protocol::V5).is_empty());
}

/// [MQTT-4.4.0-2] [MQTT-4.8.2-6]: PUBACK or PUBREC of 0x80 or more ends the message: not sent again, no PUBREL,
/// and nothing is left for another member of a shared group.
#[test]
fn a_failing_acknowledgement_ends_the_message() {
    let limits = Limits::default();
    let mut outbound = Outbound::new();
    outbound.attach(link(Protocol::V5), &[], &env(&limits, 0));
    let shared = |qos| Offer { group: 7, ..offer(qos) };
    outbound.offer(&message(b"a", QoS::AtLeastOnce), shared(QoS::AtLeastOnce), &env(&limits, 0));
    outbound.offer(&message(b"b", QoS::ExactlyOnce), shared(QoS::ExactlyOnce), &env(&limits, 0));
    outbound.take_out();
    assert_eq!(outbound.handle_puback(1, reason::NOT_AUTHORIZED, &env(&limits, 0)), Ok(true));
    assert!(outbound.handle_pubrec(2, reason::NOT_AUTHORIZED, &env(&limits, 0)).is_ok());
    assert_eq!((outbound.sizes().0, outbound.buffered()), (0, 0));
    outbound.detach(&env(&limits, 0));
    outbound.attach(link(Protocol::V5), &[], &env(&limits, 0));
    assert!(packets(&mut outbound, Protocol::V5).is_empty());
    assert!(outbound.end(&env(&limits, 0)).is_empty());
}

/// [MQTT-4.8.2-4] [MQTT-4.8.2-5]: a member that ends returns its QoS 1 in flight, never QoS 2 in flight; one that only
/// lost its connection gets its QoS 2 again.
#[test]
fn qos2_in_flight_stays_with_its_member() {
    let limits = Limits::default();
    let mut outbound = Outbound::new();
    outbound.attach(link(Protocol::V5), &[], &env(&limits, 0));
    for (payload, qos) in [(b"a", QoS::AtLeastOnce), (b"b", QoS::ExactlyOnce)] {
        outbound.offer(&message(payload, qos), Offer { group: 7, ..offer(qos) }, &env(&limits, 0));
    }
    outbound.detach(&env(&limits, 0));
    assert!(outbound.yield_shared(&env(&limits, 0)).is_empty());
    outbound.attach(link(Protocol::V5), &[], &env(&limits, 0));
    let again = packets(&mut outbound, Protocol::V5);
    assert!(again[1].starts_with("publish b id=2 qos=2 dup=true"), "{again:?}");
    let left: Vec<_> = outbound.end(&env(&limits, 0)).into_iter().map(|yielded| yielded.group).collect();
    assert_eq!(left, [7], "only QoS 1");
}

/// [MQTT-4.3.3-10] [MQTT-4.3.3-9] [MQTT-4.3.3-12]: an inbound QoS 2 id is a duplicate until PUBREL or a refusal.
#[test]
fn a_repeated_qos2_publish_is_known_until_pubrel() {
    let limits = Limits::default();
    let mut outbound = Outbound::new();
    outbound.attach(link(Protocol::V5), &[], &env(&limits, 0));
    assert!(matches!(outbound.begin_received(5, 1), Qos2Begin::New));
    outbound.detach(&env(&limits, 0));
    outbound.attach(link(Protocol::V5), &[], &env(&limits, 0));
    assert!(matches!(outbound.begin_received(5, 1), Qos2Begin::Duplicate(None)), "also after a break");
    assert!(matches!(outbound.begin_received(6, 1), Qos2Begin::Exceeded));
    for _ in 0..2 {
        let reply = outbound.handle_pubrel(5, &env(&limits, 0));
        append_reply(&mut outbound, &reply);
    }
    assert_eq!(packets(&mut outbound, Protocol::V5), ["pubcomp 5 0x0", "pubcomp 5 0x92"]);
    assert!(matches!(outbound.begin_received(5, 1), Qos2Begin::New));
    outbound.abort_received(5);
    assert!(matches!(outbound.begin_received(5, 1), Qos2Begin::New));
}

/// [MQTT-3.3.2-7] [MQTT-3.1.2-27]: aliases end with the connection, and there is none for a client that takes none.
#[test]
fn aliases_end_with_the_connection() {
    let limits = Limits::default();
    let with_alias = LinkParams { topic_alias_maximum: 1, ..link(Protocol::V5) };
    let mut outbound = Outbound::new();
    for (link, alias) in [(with_alias, "Some(1)"), (with_alias, "Some(1)"), (link(Protocol::V5), "None")] {
        outbound.attach(link, &[], &env(&limits, 0));
        outbound.offer(&message(b"a", QoS::AtMostOnce), offer(QoS::AtMostOnce), &env(&limits, 0));
        let expected = format!("publish a id=0 qos=0 dup=false topic=t alias={alias} expiry=None");
        assert_eq!(packets(&mut outbound, Protocol::V5), [expected]);
        outbound.detach(&env(&limits, 0));
    }
    let unknown = Publish { alias: Some(1), ..publish("") };
    let mut first = Inbound::new(Protocol::V5, 0);
    assert!(first.check_publish(&Publish { alias: Some(1), ..publish("t") }, &limits).is_ok());
    assert!(first.check_publish(&unknown, &limits).is_ok());
    assert!(Inbound::new(Protocol::V5, 0).check_publish(&unknown, &limits).is_err());
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
    assert_eq!(outbound.handle_puback(1, 0, &env(&limits, 0)), Ok(true));
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
        assert_eq!(outbound.offer(&message, offer(QoS::AtLeastOnce), &env(&limits, 0)), Outcome::Queued);
    }
    outbound.attach(link(Protocol::V5), &[], &env(&limits, 20_000));
    assert_eq!(
        packets(&mut outbound, Protocol::V5),
        ["publish b id=1 qos=1 dup=false topic=t alias=None expiry=Some(40)"]
    );
}

/// The receiver is told the publisher's expiry interval only [MQTT-3.3.2-5] [MQTT-3.3.2-6].
#[test]
fn what_waited_offline_for_longer_than_the_age_limit_is_not_sent() {
    let limits = Limits { offline_age: Span(Duration::from_secs(10)), ..Limits::default() };
    let mut outbound = Outbound::new();
    for (at, payload, expires) in [(0, b"a", None), (5_001, b"b", None), (5_001, b"c", Some(60_000))] {
        let mut message = message(payload, QoS::AtLeastOnce);
        (message.received, message.expires) = (Timestamp(at), expires.map(Timestamp));
        assert_eq!(outbound.offer(&message, offer(QoS::AtLeastOnce), &env(&limits, at)), Outcome::Queued);
    }
    let window = LinkParams { receive_maximum: 2, ..link(Protocol::V5) };
    outbound.attach(window, &[], &env(&limits, 15_000));
    outbound.offer(&message(b"d", QoS::AtLeastOnce), offer(QoS::AtLeastOnce), &env(&limits, 15_000));
    assert_eq!(outbound.handle_puback(1, 0, &env(&limits, 60_000)), Ok(true));
    assert_eq!(
        packets(&mut outbound, Protocol::V5),
        [
            "publish b id=1 qos=1 dup=false topic=t alias=None expiry=None",
            "publish c id=2 qos=1 dup=false topic=t alias=None expiry=Some(45)",
            "publish d id=3 qos=1 dup=false topic=t alias=None expiry=None"
        ],
        "d came while there was a connection"
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
    assert_eq!(taken, Outcome::Dropped(DropReason::TooLarge));
    assert_eq!(outbound.sizes().0, 0, "nothing stays in flight");
}

#[test]
fn full_queues_follow_the_policy() {
    for (policy, third) in [
        (OverflowPolicy::DropNewest, Outcome::Dropped(DropReason::QueueFull)),
        (OverflowPolicy::DropOldest, Outcome::Queued),
        (OverflowPolicy::Disconnect, Outcome::Queued),
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
    assert_eq!(taken, Outcome::Dropped(DropReason::QueueFull));
    assert!(outbound.take_overflow() && !outbound.take_overflow());
}

/// The failure: whoever sends QoS 0 fast enough gets others' QoS 1 dropped at a receiver that is slow.
#[test]
fn qos_0_leaves_the_last_quarter_of_a_queue() {
    for online in [true, false] {
        let limits =
            Limits { mailbox_messages: 8, offline_messages: 8, offline_qos0: true, ..Limits::default() };
        let mut outbound = Outbound::new();
        if online {
            outbound.attach(LinkParams { receive_maximum: 1, ..link(Protocol::V5) }, &[], &env(&limits, 0));
            outbound.offer(&message(b"sent", QoS::AtLeastOnce), offer(QoS::AtLeastOnce), &env(&limits, 0));
            while outbound.sizes().1 == 0 {
                let fills = message(&[b'x'; 20_000], QoS::AtMostOnce);
                outbound.offer(&fills, offer(QoS::AtMostOnce), &env(&limits, 0));
            }
        }
        let mut taken = |qos| {
            let offered = (0..20).map(|_| outbound.offer(&message(b"x", qos), offer(qos), &env(&limits, 0)));
            offered.filter(|outcome| !matches!(outcome, Outcome::Dropped(_))).count()
        };
        assert_eq!(taken(QoS::AtMostOnce), if online { 5 } else { 6 }, "online: {online}");
        assert_eq!(taken(QoS::AtLeastOnce), 2, "online: {online}");
    }
}

/// The failure: a client that does not acknowledge holds a window full of large messages that are not charged.
#[test]
fn messages_in_flight_are_on_the_budget_until_they_are_acknowledged() {
    let limits = Limits::default();
    let budget = TestBudget::new(200_000);
    let env = Env { limits: &limits, now: Timestamp(0), budget: &budget, disk: None };
    let mut outbound = Outbound::new();
    outbound.attach(link(Protocol::V5), &[], &env);
    let mut taken = 0;
    for qos in [QoS::AtLeastOnce, QoS::ExactlyOnce].into_iter().cycle().take(10) {
        let take = outbound.offer(&message(&[b'x'; 30_000], qos), offer(qos), &env);
        taken += u16::from(take == Outcome::Sent);
        outbound.take_out();
    }
    assert_eq!(taken, 6, "what does not fit is dropped");
    assert!((6 * 30_000..=200_000).contains(&budget.held.get()), "{} bytes", budget.held.get());
    for id in 1..=taken {
        if id % 2 == 1 {
            assert_eq!(outbound.handle_puback(id, 0, &env), Ok(true));
        } else {
            assert!(outbound.handle_pubrec(id, 0, &env).is_ok(), "the PUBREL needs no message");
        }
    }
    assert_eq!((outbound.sizes().0, budget.held.get()), (3, 0));
    // Messages not acknowledged at the end of the session are released with it.
    outbound.offer(&message(&[b'x'; 30_000], QoS::AtLeastOnce), offer(QoS::AtLeastOnce), &env);
    assert!(budget.held.get() > 30_000);
    outbound.detach(&env);
    assert!(budget.held.get() > 30_000, "it is sent again on the next connection");
    outbound.end(&env);
    assert_eq!(budget.held.get(), 0);
}

/// The failure: a table of 1,024 long topics for each subscriber that announces aliases.
#[test]
fn our_own_topic_aliases_keep_to_64_kib_and_are_on_the_budget() {
    let limits = Limits::default();
    let budget = TestBudget::new(usize::MAX);
    let env = Env { limits: &limits, now: Timestamp(0), budget: &budget, disk: None };
    let mut outbound = Outbound::new();
    outbound.attach(LinkParams { topic_alias_maximum: 1000, ..link(Protocol::V5) }, &[], &env);
    for n in 0..100 {
        let topic = format!("{n}/{}", "t".repeat(4000));
        let message = Message::new(&topic, b"", Timestamp(0), Origin::BACKEND);
        outbound.offer(&message, offer(QoS::AtMostOnce), &env);
        outbound.take_out();
    }
    let held = budget.held.get();
    assert!((32 << 10..=64 << 10).contains(&held), "{held} bytes");
    outbound.detach(&env);
    assert_eq!(budget.held.get(), 0);
}

/// The failure: a client with a rate gets a whole buffer at once, and its answers wait behind that.
#[test]
fn with_little_room_messages_wait_in_order_and_answers_do_not() {
    let limits = Limits::default();
    let mut outbound = Outbound::new();
    outbound.set_room(std::num::NonZeroU32::new(1));
    outbound.attach(link(Protocol::V4), &[], &env(&limits, 0));
    for (payload, qos) in [(b"1", QoS::AtMostOnce), (b"2", QoS::AtLeastOnce), (b"3", QoS::AtMostOnce)] {
        assert_eq!(outbound.offer(&message(payload, qos), offer(qos), &env(&limits, 0)), Outcome::Sent);
    }
    outbound.append(&[0xD0, 0x00]);
    let payloads = |outbound: &mut Outbound| -> Vec<String> {
        let texts = packets(outbound, Protocol::V4).into_iter();
        texts.map(|text| text.split(' ').take(2).collect::<Vec<_>>().join(" ")).collect()
    };
    assert_eq!(payloads(&mut outbound), ["publish 1", "PingResp"]);
    for expected in ["publish 2", "publish 3"] {
        assert!(outbound.pump(&env(&limits, 0)));
        assert_eq!(payloads(&mut outbound), [expected]);
    }
    assert!(!outbound.pump(&env(&limits, 0)) && outbound.has_room());
    outbound.set_room(None);
    for _ in 0..2 {
        outbound.offer(&message(b"4", QoS::AtMostOnce), offer(QoS::AtMostOnce), &env(&limits, 0));
    }
    assert_eq!(packets(&mut outbound, Protocol::V4).len(), 2, "the next connection has no rate");
}
