//! Strategies for valid packets of each level.

use std::sync::Arc;

use bytes::Bytes;
use gateway_core::Properties;
use proptest::{collection::vec, option, prelude::*, sample::select};

use super::*;

pub(super) type User = Vec<(String, String)>;

/// A packet that owns what a [`Publish`] borrows.
#[derive(Debug, Clone)]
pub(super) enum Sample {
    Publish { head: Publish<'static>, topic: String, payload: Vec<u8> },
    Other(Packet<'static>),
}

impl Sample {
    pub(super) fn packet(&self) -> Packet<'_> {
        match self {
            Self::Publish { head, topic, payload } => {
                Packet::Publish(Publish { topic, payload, ..head.clone() })
            }
            Self::Other(packet) => packet.clone(),
        }
    }
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof!["[a-z]{0,8}", "[^\u{0}]{0,12}", "[a-z]{120,140}"]
}

fn topic() -> impl Strategy<Value = String> {
    prop_oneof!["[a-z/]{1,12}", "[^\u{0}+#]{1,8}"]
}

/// Of the right form at every level.
fn filter() -> impl Strategy<Value = String> {
    prop_oneof![topic(), "([a-z]{0,4}/|[+]/){0,3}(#|[+]|[a-z]{1,4})", "[$]share/[a-z]{1,4}/([+]/){0,2}[a-z#]"]
}

fn data() -> impl Strategy<Value = Bytes> {
    vec(any::<u8>(), 0..40).prop_map(Bytes::from)
}

fn user() -> impl Strategy<Value = User> {
    vec((text(), text()), 0..3)
}

fn qos() -> impl Strategy<Value = QoS> {
    select(vec![QoS::AtMostOnce, QoS::AtLeastOnce, QoS::ExactlyOnce])
}

fn properties() -> impl Strategy<Value = Option<Arc<Properties>>> {
    let fields = (option::of(0..2_u8), option::of(text()), option::of(topic()), option::of(data()), user());
    fields.prop_map(|(payload_format, content_type, response_topic, correlation_data, user)| {
        let all = Properties { payload_format, content_type, response_topic, correlation_data, user };
        (!all.is_empty()).then(|| Arc::new(all))
    })
}

fn publish(protocol: Protocol) -> impl Strategy<Value = Sample> {
    let v5 = (option::of(1_u16..), option::of(any::<u32>()), vec(1..=268_435_455_u32, 0..3), properties());
    let flags = (any::<bool>(), qos(), any::<bool>(), 1_u16.., any::<bool>());
    (flags, topic(), vec(any::<u8>(), 0..300), v5).prop_map(move |(flags, topic, payload, v5)| {
        let (dup, qos, retain, packet_id, by_alias) = flags;
        let (alias, expiry, ids, properties) = v5;
        let acknowledged = qos != QoS::AtMostOnce;
        let mut head = Publish {
            dup: dup && acknowledged,
            qos,
            retain,
            topic: "",
            packet_id: if acknowledged { packet_id } else { 0 },
            payload: &[],
            alias: None,
            expiry: None,
            ids: Vec::new(),
            properties: None,
        };
        let mut topic = topic;
        if protocol.is_v5() {
            head = Publish { alias, expiry, ids, properties, ..head };
            if by_alias && alias.is_some() {
                topic.clear();
            }
        }
        Sample::Publish { head, topic, payload }
    })
}

fn will() -> impl Strategy<Value = ConnectWill> {
    (topic(), data(), qos(), any::<bool>(), any::<u32>(), option::of(any::<u32>()), properties()).prop_map(
        |(topic, payload, qos, retain, delay, expiry, properties)| ConnectWill {
            topic,
            payload,
            qos,
            retain,
            delay,
            expiry,
            properties,
        },
    )
}

fn connect(protocol: Protocol) -> impl Strategy<Value = Packet<'static>> {
    let head =
        (any::<bool>(), any::<u16>(), text(), option::of(will()), option::of(text()), option::of(data()));
    let limits = (option::of(any::<u32>()), option::of(1_u16..), option::of(1_u32..), any::<u16>());
    let rest = (any::<bool>(), any::<bool>(), user(), option::of(text()), option::of(data()));
    (head, limits, rest).prop_map(move |(head, limits, rest)| {
        let (clean_start, keep_alive, client_id, will, username, password) = head;
        let mut connect = Connect {
            clean_start,
            keep_alive,
            will,
            username,
            password,
            ..Connect::new(protocol, client_id)
        };
        if protocol.is_v5() {
            (connect.session_expiry, connect.receive_maximum) = (limits.0, limits.1);
            (connect.maximum_packet_size, connect.topic_alias_maximum) = (limits.2, limits.3);
            (connect.request_response_information, connect.request_problem_information) = (rest.0, rest.1);
            connect.auth_data = rest.4.filter(|_| rest.3.is_some());
            (connect.user, connect.auth_method) = (rest.2, rest.3);
        } else {
            connect.password = connect.password.filter(|_| connect.username.is_some());
            connect.will =
                connect.will.map(|will| ConnectWill { delay: 0, expiry: None, properties: None, ..will });
        }
        Packet::Connect(Box::new(connect))
    })
}

fn connack(protocol: Protocol) -> BoxedStrategy<Packet<'static>> {
    let flag = || option::of(any::<bool>());
    let text = || option::of(text());
    if !protocol.is_v5() {
        return (any::<bool>(), 0..=5_u8)
            .prop_map(move |(present, code)| {
                let session_present = present && code == 0 && protocol == Protocol::V4;
                Packet::ConnAck(Box::new(ConnAck { session_present, code, ..ConnAck::default() }))
            })
            .boxed();
    }
    let codes = select(vec![0_u8, 0, 0x80, 0x85, 0x9f]);
    let limits = (option::of(any::<u32>()), option::of(1_u16..), option::of(0..2_u8), option::of(1_u32..));
    let numbers = (option::of(any::<u16>()), option::of(any::<u16>()));
    let texts = (text(), text(), text(), text(), text(), option::of(data()), user());
    (any::<bool>(), codes, limits, numbers, (flag(), flag(), flag(), flag()), texts)
        .prop_map(|(present, code, limits, numbers, flags, texts)| {
            Packet::ConnAck(Box::new(ConnAck {
                session_present: present && code == 0,
                code,
                session_expiry: limits.0,
                receive_maximum: limits.1,
                maximum_qos: limits.2,
                maximum_packet_size: limits.3,
                topic_alias_maximum: numbers.0,
                server_keep_alive: numbers.1,
                retain_available: flags.0,
                wildcard_available: flags.1,
                subscription_id_available: flags.2,
                shared_available: flags.3,
                assigned_client_id: texts.0,
                reason_string: texts.1,
                response_information: texts.2,
                server_reference: texts.3,
                auth_method: texts.4,
                auth_data: texts.5,
                user: texts.6,
            }))
        })
        .boxed()
}

/// Reason string and user properties, absent below v5.
fn reason(protocol: Protocol) -> impl Strategy<Value = (Option<String>, User)> {
    (option::of(text()), user())
        .prop_map(move |reason| if protocol.is_v5() { reason } else { (None, Vec::new()) })
}

fn ack(protocol: Protocol, codes: &[u8]) -> impl Strategy<Value = Ack> + use<> {
    (1_u16.., select(codes.to_vec()), reason(protocol)).prop_map(move |(packet_id, code, reason)| {
        let code = if protocol.is_v5() { code } else { 0 };
        Ack { packet_id, code, reason_string: reason.0, user: reason.1 }
    })
}

fn suback(protocol: Protocol, codes: &[u8]) -> impl Strategy<Value = SubAck> + use<> {
    (1_u16.., vec(select(codes.to_vec()), 1..4), reason(protocol)).prop_map(|(packet_id, codes, reason)| {
        SubAck { packet_id, reason_string: reason.0, user: reason.1, codes }
    })
}

fn subscribe(protocol: Protocol) -> impl Strategy<Value = Packet<'static>> {
    let v5 = protocol.is_v5();
    let filter =
        (filter(), qos(), any::<bool>(), any::<bool>(), 0..3_u8).prop_map(move |filter| SubscribeFilter {
            no_local: v5 && filter.2 && !filter.0.starts_with("$share/"),
            filter: filter.0,
            qos: filter.1,
            retain_as_published: v5 && filter.3,
            retain_handling: if v5 { filter.4 } else { 0 },
        });
    (1_u16.., option::of(1..=268_435_455_u32), reason(protocol), vec(filter, 1..4)).prop_map(
        move |(packet_id, id, reason, filters)| {
            Packet::Subscribe(Subscribe { packet_id, id: id.filter(|_| v5), user: reason.1, filters })
        },
    )
}

fn unsubscribe(protocol: Protocol) -> impl Strategy<Value = Packet<'static>> {
    (1_u16.., reason(protocol), vec(filter(), 1..4)).prop_map(|(packet_id, reason, filters)| {
        Packet::Unsubscribe(Unsubscribe { packet_id, user: reason.1, filters })
    })
}

fn disconnect(protocol: Protocol) -> impl Strategy<Value = Packet<'static>> {
    let codes = select(vec![0_u8, 0x04, 0x8e, 0xa2]);
    (codes, option::of(any::<u32>()), reason(protocol), option::of(text())).prop_map(
        move |(code, session_expiry, reason, server_reference)| {
            if !protocol.is_v5() {
                return Packet::Disconnect(Box::default());
            }
            let (reason_string, user) = reason;
            Packet::Disconnect(Box::new(Disconnect {
                code,
                session_expiry,
                reason_string,
                user,
                server_reference,
            }))
        },
    )
}

fn auth() -> impl Strategy<Value = Packet<'static>> {
    let full = (select(vec![0_u8, 0x18, 0x19]), text(), option::of(data()), reason(Protocol::V5)).prop_map(
        |(code, method, data, (reason_string, user))| AuthPacket {
            code,
            method: Some(method),
            data,
            reason_string,
            user,
        },
    );
    prop_oneof![9 => full, 1 => Just(AuthPacket::default())].prop_map(|auth| Packet::Auth(Box::new(auth)))
}

/// Any valid packet of `protocol`.
pub(super) fn sample(protocol: Protocol) -> BoxedStrategy<Sample> {
    let suback_codes: &[u8] = if protocol.is_v5() { &[0, 1, 2, 0x80, 0x97, 0xa2] } else { &[0, 1, 2, 0x80] };
    let unsuback = suback(protocol, &[0, 0x11, 0x91]).prop_map(move |mut ack| {
        if !protocol.is_v5() {
            ack.codes.clear();
        }
        Packet::UnsubAck(ack)
    });
    let other = prop_oneof![
        3 => connect(protocol),
        2 => connack(protocol),
        1 => ack(protocol, &[0, 0x10, 0x99]).prop_map(Packet::PubAck),
        1 => ack(protocol, &[0, 0x10, 0x91]).prop_map(Packet::PubRec),
        1 => ack(protocol, &[0, 0x92]).prop_map(Packet::PubRel),
        1 => ack(protocol, &[0, 0x92]).prop_map(Packet::PubComp),
        2 => subscribe(protocol),
        1 => suback(protocol, suback_codes).prop_map(Packet::SubAck),
        1 => unsubscribe(protocol),
        1 => unsuback,
        1 => select(vec![Packet::PingReq, Packet::PingResp]),
        1 => disconnect(protocol),
    ];
    let other = if protocol.is_v5() { prop_oneof![14 => other, 1 => auth()].boxed() } else { other.boxed() };
    prop_oneof![1 => publish(protocol), 3 => other.prop_map(Sample::Other)].boxed()
}

/// The short way must take what the long way takes for the same, and no more.
#[test]
fn plain_acks_are_those_that_decode_as_success_without_properties() {
    let bodies: [&[u8]; 5] = [&[0, 7], &[0, 0], &[0, 7, 0x10], &[0, 7, 0, 0], &[7]];
    for first in 0..=0xFF {
        for body in bodies {
            let long_form = [&[first, 0x80 | body.len() as u8, 0], body].concat();
            for bytes in [framed(first, body), long_form] {
                for protocol in [Protocol::V3, Protocol::V4, Protocol::V5] {
                    let frame = frame(&bytes, 100).expect("a frame").expect("a whole one");
                    let Some((kind, packet_id)) = plain_ack(&frame) else { continue };
                    let mut again = Vec::new();
                    encode_ack(kind, packet_id, 0, protocol, &mut again);
                    assert_eq!(again, bytes);
                    let long = match decode_from_client(&frame, protocol) {
                        Ok(Packet::PubAck(ack)) if first == 0x40 => ack,
                        Ok(Packet::PubRec(ack)) if first == 0x50 => ack,
                        Ok(Packet::PubRel(ack)) if first == 0x62 => ack,
                        Ok(Packet::PubComp(ack)) if first == 0x70 => ack,
                        other => panic!("{bytes:02x?} is {other:?}"),
                    };
                    let plain = Ack { packet_id, code: 0, reason_string: None, user: Vec::new() };
                    assert_eq!(long, plain);
                }
            }
        }
    }
    for first in [0x40, 0x50, 0x62, 0x70] {
        let bytes = framed(first, &[0, 7]);
        assert!(plain_ack(&frame(&bytes, 100).unwrap().unwrap()).is_some(), "{first:x}");
    }
}

/// The short way must take what the long way takes, and no more.
#[test]
fn plain_pubacks_are_those_that_decode_as_success_without_properties() {
    let ack = |body: &[u8]| framed(0x40, body);
    let first = [ack(&[0, 1]), ack(&[0xFF, 0xFF])].concat();
    let others = [
        ack(&[0, 0]),              // no identifier
        ack(&[0, 3, 0x10]),        // a reason
        ack(&[0, 3, 0, 0]),        // properties, none
        ack(&[0]),                 // too short
        framed(0x41, &[0, 3]),     // flags
        framed(0x50, &[0, 3]),     // PUBREC
        vec![0x40, 0x82, 0x00, 3], // a longer form of the length
        Vec::new(),
    ];
    for other in others {
        let bytes = [&first[..], &other, &ack(&[0, 9])].concat();
        let expected = if other.is_empty() { vec![1, 0xFFFF, 9] } else { vec![1, 0xFFFF] };
        assert_eq!(plain_pubacks(&bytes).collect::<Vec<_>>(), expected, "{other:02x?}");
    }
    for protocol in [Protocol::V4, Protocol::V5] {
        let Ok(Packet::PubAck(long)) = decode_one(&first[..PLAIN_PUBACK], protocol) else {
            panic!("a PUBACK")
        };
        assert_eq!((long.packet_id, long.code), (1, 0));
        assert!(long.reason_string.is_none() && long.user.is_empty());
    }
}
