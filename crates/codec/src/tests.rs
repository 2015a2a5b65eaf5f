//! Tests of the codec: statement tables, round trips, truncation, fuzzing.

#![allow(clippy::cast_possible_truncation, reason = "lengths made here are small")]

mod fuzzing;
mod packets;
mod roundtrip;
mod vectors;
mod vectors_connect;

use gateway_core::{Protocol, QoS};

use super::*;

/// Bytes of a hex text; blanks and quoted text (`'MQTT'`) allowed.
fn hex(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (index, part) in text.split('\'').enumerate() {
        if index % 2 == 1 {
            bytes.extend_from_slice(part.as_bytes());
            continue;
        }
        let digits: String = part.split_whitespace().collect();
        assert!(digits.len().is_multiple_of(2), "odd hex in {text}");
        for at in (0..digits.len()).step_by(2) {
            bytes.push(u8::from_str_radix(&digits[at..at + 2], 16).expect("hex digits"));
        }
    }
    bytes
}

/// `first` and `body` as a frame with the right Remaining Length.
fn framed(first: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![first];
    primitive::put_sized(&mut bytes, |out| out.extend_from_slice(body));
    bytes
}

/// Decodes the one frame that `bytes` is.
fn decode_one(bytes: &[u8], protocol: Protocol) -> Result<Packet<'_>, DecodeError> {
    let found = frame(bytes, usize::MAX)?.expect("a whole frame");
    assert_eq!(found.len, bytes.len(), "bytes after the frame");
    decode(&found, protocol)
}

fn encoded(packet: &Packet<'_>, protocol: Protocol) -> Vec<u8> {
    let mut out = Vec::new();
    encode(packet, protocol, &mut out);
    out
}

#[test]
fn frames_need_header_and_body() {
    assert_eq!(frame(&[], 100), Ok(None));
    assert_eq!(frame(&[0x30], 100), Ok(None));
    assert_eq!(frame(&[0x30, 0x80], 100), Ok(None));
    assert_eq!(frame(&[0x30, 2, 0], 100), Ok(None));
    assert_eq!(frame(&[0x30, 2, 8, 9, 7], 100), Ok(Some(Frame { first: 0x30, body: &[8, 9], len: 4 })));
    assert_eq!(frame_len(&[0x30, 0x80]), Ok(None));
    assert_eq!(frame_len(&[0x30, 0x80, 0x01]), Ok(Some(131)));
    assert_eq!(frame_len(&[0x30, 0xff, 0xff, 0xff, 0x7f]), Ok(Some(MAX_FRAME_LEN)));
}

#[test]
fn long_frames_are_refused_before_their_body_is_there() {
    assert_eq!(frame(&[0x30, 99], 100), Err(DecodeError::TooLarge));
    assert_eq!(frame(&[0x30, 98], 100), Ok(None));
    assert_eq!(frame(&[0x30, 0xff, 0xff, 0xff, 0x7f], 100), Err(DecodeError::TooLarge));
    for varint in [&[0xff; 4][..], &[0x80; 4], &[0x80, 0x80, 0x80, 0x80, 0x01]] {
        let bytes = [&[0x30], varint].concat();
        assert!(matches!(frame(&bytes, 100), Err(DecodeError::Malformed(_))), "{bytes:x?}");
    }
}

#[test]
fn padded_remaining_length_is_malformed_in_version_5_only() {
    let bytes = hex("c0 80 00");
    assert_eq!(decode_one(&bytes, Protocol::V4), Ok(Packet::PingReq));
    assert_eq!(decode_one(&bytes, Protocol::V5).map_err(|error| error.reason_code()), Err(0x81));
}

#[test]
fn variable_byte_integers_switch_width_at_the_limits_of_table_1_1() {
    let cases = [
        (0, 1),
        (127, 1),
        (128, 2),
        (16_383, 2),
        (16_384, 3),
        (2_097_151, 3),
        (2_097_152, 4),
        (268_435_455, 4),
    ];
    for (value, width) in cases {
        let mut bytes = Vec::new();
        primitive::put_varint(value, &mut bytes);
        assert_eq!((bytes.len(), primitive::varint_len(value)), (width, width), "{value}");
        let mut reader = primitive::Reader::new(&bytes);
        assert_eq!(reader.varint().map(|read| read as usize), Ok(value));
    }
}

#[test]
fn acknowledgements_take_their_shortest_form() {
    let cases = [
        (AckKind::PubAck, 0x00, Protocol::V4, "40 02 0102"),
        (AckKind::PubRec, 0x00, Protocol::V5, "50 02 0102"),
        (AckKind::PubRel, 0x92, Protocol::V5, "62 03 0102 92"),
        (AckKind::PubComp, 0x92, Protocol::V3, "70 02 0102"),
        (AckKind::PubAck, 0x10, Protocol::V5, "40 03 0102 10"),
    ];
    for (kind, code, protocol, expected) in cases {
        let mut out = Vec::new();
        encode_ack(kind, 0x0102, code, protocol, &mut out);
        assert_eq!(out, hex(expected), "{kind:?} {code} {protocol:?}");
    }
}

#[test]
fn reason_and_user_properties_give_way_to_the_maximum_packet_size() {
    let ack = Ack {
        packet_id: 1,
        code: 0x87,
        reason_string: Some("no".into()),
        user: vec![("why".into(), "because".into())],
    };
    let packet = Packet::PubAck(ack);
    let whole = encoded(&packet, Protocol::V5).len();
    let mut out = vec![9];
    assert!(encode_within(&packet, Protocol::V5, whole, &mut out));
    assert_eq!(out.len(), 1 + whole);
    out.truncate(1);
    assert!(encode_within(&packet, Protocol::V5, whole - 1, &mut out));
    assert_eq!(out, hex("09 40 03 0001 87"), "[MQTT-3.4.2-2] [MQTT-3.4.2-3]");
    out.truncate(1);
    assert!(!encode_within(&packet, Protocol::V5, 4, &mut out));
    assert_eq!(out, [9], "nothing appended");
}

/// Every packet that explains itself gives way as PUBACK does.
#[test]
fn every_explanation_gives_way_to_the_maximum_packet_size() {
    let text = || Some("no".to_owned());
    let user = || vec![("why".to_owned(), "because".to_owned())];
    let ack = |code| Ack { packet_id: 1, code, reason_string: text(), user: user() };
    let suback = || SubAck { packet_id: 1, codes: vec![0x87], reason_string: text(), user: user() };
    let connack = ConnAck { code: 0x87, reason_string: text(), user: user(), ..ConnAck::default() };
    let disconnect = Disconnect { code: 0x87, reason_string: text(), user: user(), ..Disconnect::default() };
    let method = Some("m".to_owned());
    let auth =
        AuthPacket { code: 0x18, method, reason_string: text(), user: user(), ..AuthPacket::default() };
    for (packet, statements) in [
        (Packet::ConnAck(connack.into()), "MQTT-3.2.2-19, MQTT-3.2.2-20"),
        (Packet::PubRec(ack(0x87)), "MQTT-3.5.2-2, MQTT-3.5.2-3"),
        (Packet::PubRel(ack(0x92)), "MQTT-3.6.2-2, MQTT-3.6.2-3"),
        (Packet::PubComp(ack(0x92)), "MQTT-3.7.2-2, MQTT-3.7.2-3"),
        (Packet::SubAck(suback()), "MQTT-3.9.2-1, MQTT-3.9.2-2"),
        (Packet::UnsubAck(suback()), "MQTT-3.11.2-1, MQTT-3.11.2-2"),
        (Packet::Disconnect(disconnect.into()), "MQTT-3.14.2-3, MQTT-3.14.2-4"),
        (Packet::Auth(auth.into()), "MQTT-3.15.2-2, MQTT-3.15.2-3"),
    ] {
        let whole = encoded(&packet, Protocol::V5);
        let mut out = Vec::new();
        assert!(encode_within(&packet, Protocol::V5, whole.len(), &mut out), "{statements}");
        assert_eq!(out, whole, "{statements}");
        out.clear();
        assert!(encode_within(&packet, Protocol::V5, whole.len() - 1, &mut out), "{statements}");
        assert!(out.len() + 10 < whole.len(), "{statements}: {out:02x?}");
        assert!(!out.windows(2).any(|pair| pair == b"no"), "{statements}: {out:02x?}");
        assert!(decode_one(&out, Protocol::V5).is_ok(), "{statements}: {out:02x?}");
    }
}

#[test]
fn message_properties_are_never_left_out() {
    let user = vec![("k".to_owned(), "v".to_owned())];
    let properties = gateway_core::Properties { user, ..Default::default() };
    let frame = PublishFrame {
        protocol: Protocol::V5,
        topic: "a",
        payload: b"x",
        qos: QoS::AtLeastOnce,
        dup: false,
        retain: false,
        packet_id: 0x0a0b,
        alias: None,
        expiry: None,
        ids: &[200],
        properties: Some(&properties),
    };
    let mut out = Vec::new();
    frame.encode(&mut out);
    assert_eq!(out, hex("32 11 0001'a' 0a0b 0a 0bc801 26 0001'k' 0001'v' 'x'"), "[MQTT-3.3.2-17]");

    let packet = decode_one(&out, Protocol::V5).expect("valid");
    let mut limited = Vec::new();
    assert!(!encode_within(&packet, Protocol::V5, out.len() - 1, &mut limited));
    assert!(limited.is_empty());
}

/// [MQTT-2.2.1-2], 3.1.1: [MQTT-2.3.1-5].
#[test]
fn qos_0_has_no_packet_id() {
    for (protocol, expected) in [(Protocol::V3, "30 04 0001'a' 'x'"), (Protocol::V5, "30 05 0001'a' 00 'x'")]
    {
        let frame = PublishFrame {
            protocol,
            topic: "a",
            payload: b"x",
            qos: QoS::AtMostOnce,
            dup: false,
            retain: false,
            packet_id: 0,
            alias: None,
            expiry: None,
            ids: &[],
            properties: None,
        };
        let mut out = Vec::new();
        frame.encode(&mut out);
        assert_eq!(out, hex(expected), "{protocol:?}");
    }
}

#[test]
fn clients_may_not_send_what_only_servers_send() {
    let cases = ["20 03 00 00 00", "90 04 0001 00 00", "b0 04 0001 00 00", "d0 00", "30 06 0001'a' 02 0b01"];
    for case in cases {
        let bytes = hex(case);
        let found = frame(&bytes, 100).expect("a valid header").expect("a whole frame");
        assert!(decode(&found, Protocol::V5).is_ok(), "{case}");
        let refused = decode_from_client(&found, Protocol::V5).map_err(|error| error.reason_code());
        assert_eq!(refused, Err(reason::PROTOCOL_ERROR), "{case} [MQTT-3.3.4-6]");
    }
    let bytes = hex("0001'a' 02 0b01");
    let decoded = decode_publish(0x30, &bytes, Protocol::V5, &mut Publish::default());
    assert!(matches!(decoded, Err(DecodeError::Protocol(_))));
}

#[test]
fn over_long_strings_are_cut_at_a_character() {
    let text = "\u{e9}".repeat(40_000);
    let mut out = Vec::new();
    primitive::put_str(&text, &mut out);
    assert_eq!(out.len(), 2 + 65_534);
    assert_eq!(primitive::str_len(&text), out.len());
    assert!(primitive::Reader::new(&out).str().is_ok());
}

#[test]
fn reason_codes_map_to_return_codes() {
    let cases = [(0x00, 0), (0x84, 1), (0x85, 2), (0x88, 3), (0x86, 4), (0x87, 5), (0x8a, 5), (0x97, 3)];
    for (v5, v3) in cases {
        assert_eq!(reason::v3_return_code(v5), v3, "{v5:#x}");
    }
}

#[test]
fn forbidden_bytes_are_found_anywhere_in_a_topic() {
    for len in 1..40 {
        for at in 0..len {
            for byte in 0..=0x7f_u8 {
                let mut bytes = vec![0, len];
                bytes.extend((0..len).map(|index| if index == at { byte } else { b'*' }));
                let ok = primitive::Reader::new(&bytes).topic().is_ok();
                assert_eq!(ok, !matches!(byte, 0 | b'+' | b'#'), "{byte:#x} at {at} of {len}");
            }
        }
    }
}

/// 3.1.1: [MQTT-1.5.3-3]; 5.0: [MQTT-1.5.4-3].
#[test]
fn a_byte_order_mark_is_kept() {
    for (protocol, bytes) in
        [(Protocol::V4, "30 06 0004 efbbbf 'a'"), (Protocol::V5, "30 07 0004 efbbbf 'a' 00")]
    {
        let bytes = hex(bytes);
        match decode_one(&bytes, protocol) {
            Ok(Packet::Publish(publish)) => assert_eq!(publish.topic.as_bytes(), hex("efbbbf 'a'")),
            other => panic!("{other:?}"),
        }
    }
}
