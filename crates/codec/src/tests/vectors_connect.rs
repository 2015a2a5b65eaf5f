//! Byte vectors of CONNECT, each with the statement it is about.

use super::*;

/// Body, reason code (0: accepted), statement.
type ConnectVector = (&'static str, u8, &'static str);

const ROWS: &[ConnectVector] = &[
    ("0004'MQTT' 04 02 003c 0001'c'", 0, "3.1.1"),
    ("0006'MQIsdp' 03 02 003c 0001'c'", 0, "3.1"),
    ("0004'MQTT' 05 02 003c 00 0001'c'", 0, "5.0"),
    ("0004'MQTT' 04 02 003c 0000", 0, "MQTT-3.1.3-6"),
    ("0004'MQTT' 05 00 003c 00 0000", 0, "MQTT-3.1.3-6"),
    // Protocol name and level.
    ("0004'MQTX' 04 02 003c 0001'c'", 0x84, "MQTT-3.1.2-1"),
    ("0004'mqtt' 05 02 003c 00 0001'c'", 0x84, "MQTT-3.1.2-1"),
    ("0000 04 02 003c 0001'c'", 0x84, "MQTT-3.1.2-1"),
    ("0004'MQTT' 06 02 003c 00 0001'c'", 0x84, "MQTT-3.1.2-2"),
    ("0004'MQTT' 03 02 003c 0001'c'", 0x84, "MQTT-3.1.2-2"),
    ("0006'MQIsdp' 04 02 003c 0001'c'", 0x84, "MQTT-3.1.2-2"),
    ("0004'MQTT' 84 02 003c 0001'c'", 0, "3.1.1: bridge bit"),
    ("0006'MQIsdp' 83 02 003c 0001'c'", 0, "3.1: bridge bit"),
    ("0004'MQTT' 85 02 003c 00 0001'c'", 0x84, "MQTT-3.1.2-2: bridge bit of 5.0"),
    ("0004'MQTT' 83 02 003c 0001'c'", 0x84, "MQTT-3.1.2-2: bridge bit, level of 3.1"),
    ("0004'MQT'", 0x81, "name cut"),
    ("0004'MQTT'", 0x81, "no level"),
    ("ffff", 0x81, "length beyond the packet"),
    // Flags.
    ("0004'MQTT' 04 03 003c 0001'c'", 0x81, "MQTT-3.1.2-3"),
    ("0004'MQTT' 05 03 003c 00 0001'c'", 0x81, "MQTT-3.1.2-3"),
    ("0006'MQIsdp' 03 03 003c 0001'c'", 0, "3.1: the bit is unused"),
    ("0004'MQTT' 04 0a 003c 0001'c'", 0x81, "MQTT-3.1.2-13, v5: MQTT-3.1.2-11"),
    ("0004'MQTT' 05 12 003c 00 0001'c'", 0x81, "MQTT-3.1.2-11"),
    ("0004'MQTT' 04 22 003c 0001'c'", 0x81, "MQTT-3.1.2-15, v5: MQTT-3.1.2-13"),
    ("0004'MQTT' 05 22 003c 00 0001'c'", 0x81, "MQTT-3.1.2-13"),
    ("0004'MQTT' 04 1e 003c 0001'c' 0001't' 0000", 0x81, "MQTT-3.1.2-14"),
    ("0004'MQTT' 05 1e 003c 00 0001'c' 00 0001't' 0000", 0x81, "MQTT-3.1.2-12"),
    ("0004'MQTT' 04 42 003c 0001'c' 0001'p'", 0x81, "MQTT-3.1.2-22"),
    ("0006'MQIsdp' 03 42 003c 0001'c' 0001'p'", 0x81, "3.1: password without user name"),
    ("0004'MQTT' 05 42 003c 00 0001'c' 0001'p'", 0, "3.1.2.9: password without user name"),
    // Payload.
    ("0004'MQTT' 04 02 003c", 0x81, "MQTT-3.1.3-3"),
    ("0004'MQTT' 04 02 003c 0001 ff", 0x81, "MQTT-3.1.3-4"),
    ("0004'MQTT' 05 02 003c 00 0001 00", 0x81, "MQTT-3.1.3-4, MQTT-1.5.4-2"),
    ("0004'MQTT' 05 02 003c 00 0003 eda080", 0x81, "MQTT-3.1.3-4, MQTT-1.5.4-1"),
    ("0004'MQTT' 04 3e 003c 0001'c' 0001't' 0001'w'", 0x81, "will QoS 3"),
    ("0004'MQTT' 04 36 003c 0001'c' 0001't' 0001'w'", 0, "will QoS 2, retained"),
    ("0004'MQTT' 04 06 003c 0001'c'", 0x81, "MQTT-3.1.2-9"),
    ("0004'MQTT' 04 06 003c 0001'c' 0001't'", 0x81, "MQTT-3.1.2-9"),
    ("0004'MQTT' 04 06 003c 0001'c' 0001 ff 0000", 0x81, "MQTT-3.1.3-10"),
    ("0004'MQTT' 05 06 003c 00 0001'c' 00 0001 ff 0000", 0x81, "MQTT-3.1.3-11"),
    ("0004'MQTT' 04 06 003c 0001'c' 0001'#' 0000", 0x81, "MQTT-4.7.1-1"),
    ("0004'MQTT' 05 06 003c 00 0001'c' 00 0001'+' 0000", 0x81, "MQTT-4.7.0-1"),
    ("0004'MQTT' 04 06 003c 0001'c' 0000 0000", 0x81, "MQTT-4.7.3-1"),
    ("0004'MQTT' 04 82 003c 0001'c'", 0x81, "MQTT-3.1.2-19, v5: MQTT-3.1.2-17"),
    ("0004'MQTT' 05 82 003c 00 0001'c'", 0x81, "MQTT-3.1.2-17"),
    ("0006'MQIsdp' 03 c2 003c 0001'c'", 0, "3.1: user name flag without user name"),
    ("0006'MQIsdp' 03 c2 003c 0001'c' 0001'u'", 0, "3.1: password flag without password"),
    ("0004'MQTT' 04 02 003c 0001'c' 0001'u'", 0x81, "MQTT-3.1.2-18, v5: MQTT-3.1.2-16"),
    ("0004'MQTT' 04 82 003c 0001'c' 0001 ff", 0x81, "MQTT-3.1.3-11, v5: MQTT-3.1.3-12"),
    ("0004'MQTT' 04 c2 003c 0001'c' 0001'u'", 0x81, "MQTT-3.1.2-21, v5: MQTT-3.1.2-19"),
    ("0004'MQTT' 04 82 003c 0001'c' 0001'u' 0001'p'", 0x81, "MQTT-3.1.2-20, v5: MQTT-3.1.2-18"),
    ("0004'MQTT' 04 c2 003c 0001'c' 0001'u' 0002 00ff", 0, "password is binary data"),
    // Properties.
    ("0004'MQTT' 05 02 003c 0001'c'", 0x81, "MQTT-2.2.2-1"),
    ("0004'MQTT' 05 02 003c 05 11 ffffffff 0001'c'", 0, "session expiry"),
    ("0004'MQTT' 05 02 003c 0a 11 00000001 11 00000001 0001'c'", 0x82, "session expiry twice"),
    ("0004'MQTT' 05 02 003c 03 21 0000 0001'c'", 0x82, "3.1.2.11.3: receive maximum 0"),
    ("0004'MQTT' 05 02 003c 03 21 0001 0001'c'", 0, "receive maximum"),
    ("0004'MQTT' 05 02 003c 05 27 00000000 0001'c'", 0x82, "3.1.2.11.4: maximum packet size 0"),
    ("0004'MQTT' 05 02 003c 03 22 0000 0001'c'", 0, "topic alias maximum 0"),
    ("0004'MQTT' 05 02 003c 06 22 0000 22 0000 0001'c'", 0x82, "topic alias maximum twice"),
    ("0004'MQTT' 05 02 003c 02 1902 0001'c'", 0x82, "3.1.2.11.6: request response information 2"),
    ("0004'MQTT' 05 02 003c 02 1702 0001'c'", 0x82, "3.1.2.11.7: request problem information 2"),
    ("0004'MQTT' 05 02 003c 04 16 0001 ff 0001'c'", 0x82, "3.1.2.11.10: data without method"),
    ("0004'MQTT' 05 02 003c 08 15 0001'm' 16 0001 ff 0001'c'", 0, "authentication"),
    ("0004'MQTT' 05 02 003c 05 18 00000001 0001'c'", 0x81, "2.2.2.2: will delay outside the will"),
    ("0004'MQTT' 05 06 003c 00 0001'c' 05 18 00000001 0001't' 0000", 0, "will delay"),
    ("0004'MQTT' 05 06 003c 00 0001'c' 02 0102 0001't' 0000", 0x82, "3.1.3.2.3: payload format 2"),
    ("0004'MQTT' 05 06 003c 00 0001'c' 03 230001 0001't' 0000", 0x81, "2.2.2.2: alias in a will"),
];

fn connect_frame(body: &[u8]) -> Frame<'_> {
    Frame { first: 0x10, body, len: 1 + primitive::varint_len(body.len()) + body.len() }
}

fn result_of(first: u8, body: &str) -> Result<Packet<'static>, DecodeError> {
    // The level in force before CONNECT is none; whichever is passed must not matter.
    let bytes = framed(first, &hex(body));
    let results = [Protocol::V3, Protocol::V4, Protocol::V5].map(|protocol| {
        decode_one(&bytes, protocol).map(|packet| match packet {
            Packet::Connect(connect) => Packet::Connect(connect),
            other => panic!("not a CONNECT: {other:?}"),
        })
    });
    assert!(first != 0x10 || results.iter().all(|result| *result == results[0]), "{body}");
    results.into_iter().next().expect("three results")
}

#[test]
fn connects_are_accepted_or_refused_as_their_statements_say() {
    for &(body, expected, statement) in ROWS {
        let result = result_of(0x10, body);
        let code = result.as_ref().map_or_else(DecodeError::reason_code, |_| 0);
        assert_eq!(code, expected, "{statement}: {body}: {result:?}");
    }
    for first in [0x11, 0x12, 0x14, 0x18] {
        for body in ["0004'MQTT' 04 02 003c 0001'c'", "0004'MQTT' 05 02 003c 00 0001'c'"] {
            let result = result_of(first, body);
            assert!(
                matches!(result, Err(DecodeError::Malformed(_))),
                "{first:02x}: MQTT-2.1.3-1, MQTT-2.2.2-1"
            );
        }
        // 3.1 has no use for DUP, QoS and RETAIN of a CONNECT.
        let old = result_of(first, "0006'MQIsdp' 03 02 003c 0001'c'");
        assert!(matches!(old, Ok(Packet::Connect(_))), "{first:02x}: {old:?}");
    }
}

/// [MQTT-1.5.5-1]: as any packet of 5.0.
#[test]
fn a_connect_of_5_0_has_its_remaining_length_in_the_shortest_form() {
    for (body, valid) in
        [("0004'MQTT' 04 02 003c 0001'c'", true), ("0004'MQTT' 05 02 003c 00 0001'c'", false)]
    {
        let body = hex(body);
        let bytes = [&[0x10, 0x80 | body.len() as u8, 0][..], &body].concat();
        let found = frame(&bytes, usize::MAX).expect("a frame").expect("a whole frame");
        assert_eq!(decode_connect(&found).is_ok(), valid);
    }
}

#[test]
fn an_unsupported_level_is_told_apart_from_an_unknown_name() {
    let cases = [
        ("0004'MQTT' 06", DecodeError::UnsupportedProtocol { name_ok: true, level: 6 }),
        ("0004'MQTT' 85", DecodeError::UnsupportedProtocol { name_ok: true, level: 0x85 }),
        ("0003'foo' 04", DecodeError::UnsupportedProtocol { name_ok: false, level: 4 }),
    ];
    for (body, expected) in cases {
        assert_eq!(decode_connect(&connect_frame(&hex(body))), Err(expected), "{body}");
    }
}

/// A Mosquitto with a `connection` block could not connect; and a client without the bit must not count as a bridge.
#[test]
fn the_bridge_bit_of_mqtt_3_is_read_and_written() {
    for (body, bridge) in [
        ("0004'MQTT' 84 02 003c 0001'c'", true),
        ("0006'MQIsdp' 83 02 003c 0001'c'", true),
        ("0004'MQTT' 04 02 003c 0001'c'", false),
        ("0006'MQIsdp' 03 02 003c 0001'c'", false),
    ] {
        let bytes = hex(body);
        let connect = decode_connect(&connect_frame(&bytes)).expect("valid");
        assert_eq!(connect.bridge, bridge, "{body}");
        let protocol = connect.protocol;
        let mut written = Vec::new();
        encode(&Packet::Connect(Box::new(connect)), protocol, &mut written);
        assert_eq!(written[2..], bytes, "{body}");
    }
}

#[test]
fn a_connect_is_read_field_by_field() {
    let bytes = hex("0004'MQTT' 05 ee 0102 \
         21 11 00000005 21 0006 27 00000700 22 0008 19 01 17 00 15 0001'm' 16 0001'd' 26 0000 0000 \
         0002'id' 13 18 00000009 02 0000000a 01 01 26 0001'k' 0001'v' 0002'wt' 0002'wp' 0001'u' 0001'p'");
    let connect = decode_connect(&connect_frame(&bytes)).expect("valid");
    let empty = (String::new(), String::new());
    let will = connect.will.clone().expect("a will");
    assert_eq!((connect.protocol, connect.clean_start, connect.keep_alive), (Protocol::V5, true, 0x0102));
    assert_eq!((connect.session_expiry, connect.receive_maximum), (Some(5), Some(6)));
    assert_eq!((connect.maximum_packet_size, connect.topic_alias_maximum), (Some(0x700), 8));
    assert!(connect.request_response_information && !connect.request_problem_information);
    assert_eq!((connect.auth_method.as_deref(), connect.auth_data.as_deref()), (Some("m"), Some(&b"d"[..])));
    assert_eq!(connect.user, [empty]);
    assert_eq!((connect.client_id.as_str(), connect.username.as_deref()), ("id", Some("u")));
    assert_eq!(connect.password.as_deref(), Some(&b"p"[..]));
    assert_eq!((will.topic.as_str(), &will.payload[..]), ("wt", &b"wp"[..]));
    assert_eq!((will.qos, will.retain, will.delay, will.expiry), (QoS::AtLeastOnce, true, 9, Some(10)));
    let properties = will.properties.expect("will properties");
    assert_eq!(properties.payload_format, Some(1));
    assert_eq!(properties.user, [("k".to_owned(), "v".to_owned())]);
}
