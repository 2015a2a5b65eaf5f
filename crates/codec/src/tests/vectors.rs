//! Byte vectors of all packets but CONNECT, each with the statement it is about.

use super::*;

const V3: &[Protocol] = &[Protocol::V3];
const V34: &[Protocol] = &[Protocol::V3, Protocol::V4];
const V4: &[Protocol] = &[Protocol::V4];
const V45: &[Protocol] = &[Protocol::V4, Protocol::V5];
const V5: &[Protocol] = &[Protocol::V5];
const ALL: &[Protocol] = &[Protocol::V3, Protocol::V4, Protocol::V5];

/// Levels, first byte, body, reason code (0: accepted), statement.
type Vector = (&'static [Protocol], u8, &'static str, u8, &'static str);

const PUBLISH: &[Vector] = &[
    (V34, 0x30, "0003'a/b' 'x'", 0, "minimal"),
    (V34, 0x30, "0003'a/b'", 0, "empty payload is valid"),
    (V5, 0x30, "0003'a/b' 00 'x'", 0, "minimal"),
    (V5, 0x30, "0003'a/b'", 0x81, "MQTT-2.2.2-1"),
    (V34, 0x32, "0003'a/b' 0001 'x'", 0, "QoS 1"),
    (V34, 0x3d, "0003'a/b' 0001 'x'", 0, "QoS 2, DUP, RETAIN"),
    (ALL, 0x36, "0003'a/b' 0001 00 'x'", 0x81, "MQTT-3.3.1-4"),
    (ALL, 0x3e, "0003'a/b' 0001 00 'x'", 0x81, "MQTT-3.3.1-4"),
    (ALL, 0x38, "0003'a/b' 00 'x'", 0x81, "MQTT-3.3.1-2"),
    (ALL, 0x32, "0003'a/b' 0000 00 'x'", 0x82, "MQTT-2.2.1-3, 3.1.1: MQTT-2.3.1-1"),
    (ALL, 0x32, "0003'a/b' 00", 0x81, "packet id cut"),
    (ALL, 0x30, "", 0x81, "no topic"),
    (ALL, 0x30, "0003'a/'", 0x81, "topic cut"),
    (ALL, 0x30, "0003'a/+' 00", 0x81, "MQTT-3.3.2-2"),
    (ALL, 0x30, "0001'#' 00", 0x81, "MQTT-3.3.2-2, MQTT-4.7.0-1, 3.1.1: MQTT-4.7.1-1"),
    (ALL, 0x30, "0003'a' 00 'b' 00", 0x81, "MQTT-1.5.4-2, MQTT-4.7.3-2, 3.1.1: MQTT-1.5.3-2"),
    (ALL, 0x30, "0003 eda080 00", 0x81, "MQTT-1.5.4-1, 3.1.1: MQTT-1.5.3-1: surrogate D800"),
    (ALL, 0x30, "0003 edbfbf 00", 0x81, "MQTT-1.5.4-1: surrogate DFFF"),
    (ALL, 0x30, "0002 c080 00", 0x81, "MQTT-1.5.4-1: overlong"),
    (ALL, 0x30, "0001 ff 00", 0x81, "MQTT-3.3.2-1"),
    (ALL, 0x30, "0002 c3 28 00", 0x81, "MQTT-3.3.2-1"),
    (ALL, 0x30, "0004 f09f9880 00", 0, "MQTT-4.7.3-4"),
    (ALL, 0x30, "0003 efbbbf 00", 0, "MQTT-1.5.4-3, 3.1.1: MQTT-1.5.3-3"),
    (V34, 0x30, "0000 'x'", 0x81, "MQTT-4.7.3-1"),
    (V5, 0x30, "0000 00 'x'", 0x82, "3.3.2.1: neither topic nor alias"),
    (V5, 0x30, "0000 03 230001 'x'", 0, "3.3.2.3.4: alias in place of the topic"),
    (V5, 0x30, "0001'a' 03 230000", 0x94, "MQTT-3.3.2-8"),
    (V5, 0x30, "0001'a' 06 230001 230001", 0x82, "alias twice"),
    (V5, 0x30, "0001'a' 02 0101 'text'", 0, "payload format"),
    (V5, 0x30, "0001'a' 02 0102", 0x82, "payload format 2"),
    (V5, 0x30, "0001'a' 04 0100 0100", 0x82, "payload format twice"),
    (V5, 0x30, "0001'a' 05 02 00000000", 0, "expiry 0"),
    (V5, 0x30, "0001'a' 0a 02 00000001 02 00000001", 0x82, "expiry twice"),
    (V5, 0x30, "0001'a' 04 03 0001'j'", 0, "MQTT-3.3.2-19"),
    (V5, 0x30, "0001'a' 04 03 0001 ff", 0x81, "MQTT-3.3.2-19"),
    (V5, 0x30, "0001'a' 04 08 0001'r'", 0, "MQTT-3.3.2-13"),
    (V5, 0x30, "0001'a' 04 08 0001 80", 0x81, "MQTT-3.3.2-13"),
    (V5, 0x30, "0001'a' 04 08 0001'+'", 0x81, "MQTT-3.3.2-14"),
    (V5, 0x30, "0001'a' 03 08 0000", 0x81, "MQTT-4.7.3-1: empty response topic"),
    (V5, 0x30, "0001'a' 05 09 0002 00ff", 0, "MQTT-3.3.2-16"),
    (V5, 0x30, "0001'a' 05 09 0003 00ff", 0x81, "correlation data cut by Property Length"),
    (V5, 0x30, "0001'a' 04 0b01 0b02", 0, "MQTT-3.3.4-4"),
    (V5, 0x30, "0001'a' 02 0b00", 0x82, "3.3.2.3.8: subscription identifier 0"),
    (V5, 0x30, "0001'a' 03 0b8100", 0x81, "MQTT-1.5.5-1"),
    (V5, 0x30, "0001'a' 06 0bffffffff7f", 0x81, "five byte integer"),
    (V5, 0x30, "0001'a' 0e 26 0001'k' 0001'v' 26 0001'k' 0001'v'", 0, "MQTT-3.3.2-18"),
    (V5, 0x30, "0001'a' 07 26 0001 00 0001'v'", 0x81, "MQTT-1.5.7-1, MQTT-1.5.4-2"),
    (V5, 0x30, "0001'a' 07 26 0001'k' 0001 ff", 0x81, "MQTT-1.5.7-1"),
    (V5, 0x30, "0001'a' 05 11 00000001", 0x81, "2.2.2.2: not a property of PUBLISH"),
    (V5, 0x30, "0001'a' 02 7e00", 0x81, "2.2.2.2: unknown property"),
    (V5, 0x30, "0001'a' 02 0400", 0x81, "2.2.2.2: unknown property"),
    (V5, 0x30, "0001'a' 03 810000", 0x81, "2.2.2.2: unknown property"),
    (V5, 0x30, "0001'a' ff00", 0x81, "Property Length beyond the packet, MQTT-1.5.5-1"),
    (V5, 0x30, "0001'a' 8000", 0x81, "MQTT-1.5.5-1"),
    (V5, 0x30, "0001'a' 05 0101", 0x81, "Property Length beyond the packet"),
];

const ACKS: &[Vector] = &[
    (ALL, 0x40, "0001", 0, "PUBACK"),
    (ALL, 0x50, "0001", 0, "PUBREC"),
    (ALL, 0x62, "0001", 0, "MQTT-3.6.1-1"),
    (ALL, 0x70, "0001", 0, "PUBCOMP"),
    (V45, 0x6a, "0001", 0x81, "MQTT-3.6.1-1"),
    (V45, 0x63, "0001", 0x81, "MQTT-3.6.1-1"),
    (V3, 0x6b, "0001", 0, "3.1: DUP and RETAIN of PUBREL"),
    (ALL, 0x60, "0001", 0x81, "MQTT-3.6.1-1, 3.1: QoS of PUBREL"),
    (ALL, 0x64, "0001", 0x81, "MQTT-3.6.1-1, 3.1: QoS of PUBREL"),
    (V45, 0x41, "0001", 0x81, "MQTT-2.1.3-1, 3.1.1: MQTT-2.2.2-1, MQTT-2.2.2-2"),
    (V45, 0x52, "0001", 0x81, "MQTT-2.1.3-1"),
    (V45, 0x78, "0001", 0x81, "MQTT-2.1.3-1"),
    (V3, 0x4f, "0001", 0, "3.1: PUBACK has no use for the flags"),
    (V3, 0x52, "0001", 0, "3.1: PUBREC has no use for the flags"),
    (V3, 0x78, "0001", 0, "3.1: PUBCOMP has no use for the flags"),
    (ALL, 0x40, "0000", 0x82, "MQTT-2.2.1-5, 3.1.1: MQTT-2.3.1-1"),
    (ALL, 0x40, "00", 0x81, "packet id cut"),
    (ALL, 0x62, "", 0x81, "no packet id"),
    (V34, 0x40, "0001 00", 0x81, "no reason code in version 3"),
    (V5, 0x40, "0001 10", 0, "MQTT-3.4.2-1"),
    (V5, 0x40, "0001 01", 0x82, "MQTT-3.4.2-1"),
    (V5, 0x40, "0001 92", 0x82, "MQTT-3.4.2-1"),
    (V5, 0x50, "0001 97", 0, "MQTT-3.5.2-1"),
    (V5, 0x50, "0001 8e", 0x82, "MQTT-3.5.2-1"),
    (V5, 0x62, "0001 92", 0, "MQTT-3.6.2-1"),
    (V5, 0x62, "0001 80", 0x82, "MQTT-3.6.2-1"),
    (V5, 0x70, "0001 92", 0, "MQTT-3.7.2-1"),
    (V5, 0x70, "0001 10", 0x82, "MQTT-3.7.2-1"),
    (V5, 0x40, "0001 00 00", 0, "MQTT-2.2.2-1"),
    (V5, 0x40, "0001 00 04 1f 0001'r'", 0, "reason string"),
    (V5, 0x40, "0001 00 08 1f 0001'r' 1f 0001'r'", 0x82, "reason string twice"),
    (V5, 0x40, "0001 00 07 26 0001'k' 0001'v'", 0, "user property"),
    (V5, 0x40, "0001 00 02 0101", 0x81, "2.2.2.2: not a property of PUBACK"),
    (V5, 0x40, "0001 00 00 00", 0x81, "bytes after the properties"),
    (ALL, 0xc0, "", 0, "PINGREQ"),
    (ALL, 0xd0, "", 0, "PINGRESP"),
    (V45, 0xc1, "", 0x81, "MQTT-2.1.3-1"),
    (V3, 0xcf, "", 0, "3.1: PINGREQ has no use for the flags"),
    (ALL, 0xc0, "00", 0x81, "PINGREQ with a body"),
    (ALL, 0x00, "", 0x81, "2.1.2: type 0"),
    (V34, 0xf0, "", 0x81, "2.2.1: type 15 in version 3"),
];

const SUBSCRIBE: &[Vector] = &[
    (V34, 0x82, "0001 0003'a/b' 01", 0, "one filter"),
    (V34, 0x82, "0001 0003'a/b' 01 0001'#' 02", 0, "two filters"),
    (V5, 0x82, "0001 00 0003'a/b' 01", 0, "one filter"),
    (V5, 0x82, "0001 00 0001'#' 2e", 0, "QoS 2, No Local, Retain As Published, handling 2"),
    (V45, 0x80, "0001 00 0001'a' 00", 0x81, "MQTT-3.8.1-1"),
    (V45, 0x8a, "0001 00 0001'a' 00", 0x81, "MQTT-3.8.1-1"),
    (V3, 0x8b, "0001 0001'a' 00", 0, "3.1: DUP and RETAIN of SUBSCRIBE"),
    (V3, 0x84, "0001 0001'a' 00", 0x81, "3.1: QoS of SUBSCRIBE"),
    (V34, 0x82, "0001 0000 00", 0x81, "MQTT-4.7.3-1: empty filter"),
    (V34, 0x82, "0001 0001'a' 00 0000 00", 0x81, "MQTT-4.7.3-1: empty filter behind another"),
    (V5, 0x82, "0001 00 0001'a' 00 0000 00", 0x81, "MQTT-4.7.3-1: empty filter behind another"),
    (V34, 0x82, "0001 0005'a/#/b' 00", 0x81, "MQTT-4.7.1-2, 5.0: MQTT-4.7.1-1"),
    (V5, 0x82, "0001 00 0005'a/#/b' 00", 0x81, "MQTT-4.7.1-1, 3.1.1: MQTT-4.7.1-2"),
    (V5, 0x82, "0001 00 0002'a#' 00", 0x81, "MQTT-4.7.1-1"),
    (V34, 0x82, "0001 0002'a+' 00", 0x81, "MQTT-4.7.1-3, 5.0: MQTT-4.7.1-2"),
    (V5, 0x82, "0001 00 0004'+a/b' 00", 0x81, "MQTT-4.7.1-2, 3.1.1: MQTT-4.7.1-3"),
    (V5, 0x82, "0001 00 0007'$share/' 00", 0x81, "MQTT-4.8.2-1"),
    (V5, 0x82, "0001 00 0009'$share//a' 00", 0x81, "MQTT-4.8.2-1"),
    (V5, 0x82, "0001 00 0008'$share/g' 00", 0x81, "MQTT-4.8.2-2"),
    (V5, 0x82, "0001 00 0009'$share/g/' 00", 0x81, "MQTT-4.8.2-2"),
    (V5, 0x82, "0001 00 000b'$share/g+/a' 00", 0x81, "MQTT-4.8.2-2"),
    (V5, 0x82, "0001 00 000b'$share/g/a#' 00", 0x81, "MQTT-4.8.2-2, MQTT-4.7.1-1"),
    (V34, 0x82, "0001 0008'$share/g' 00", 0, "3.1.1 knows no shared subscriptions"),
    (V5, 0x82, "0000 00 0001'a' 00", 0x82, "MQTT-2.2.1-3"),
    (V34, 0x82, "0000 0001'a' 00", 0x82, "MQTT-2.3.1-1"),
    (V34, 0x82, "0001", 0x82, "MQTT-3.8.3-3"),
    (V5, 0x82, "0001 00", 0x82, "MQTT-3.8.3-2"),
    (V34, 0x82, "0001 0001'a'", 0x81, "filter without options"),
    (V34, 0x82, "0001 0001'a' 03", 0x81, "MQTT-3-8.3-4"),
    (V34, 0x82, "0001 0001'a' 04", 0x81, "MQTT-3-8.3-4"),
    (V34, 0x82, "0001 0001'a' 80", 0x81, "MQTT-3-8.3-4"),
    (V34, 0x82, "0001 0001 ff 00", 0x81, "MQTT-3.8.3-1"),
    (V5, 0x82, "0001 00 0001 ff 00", 0x81, "MQTT-3.8.3-1"),
    (V5, 0x82, "0001 00 0001 00 00", 0x81, "MQTT-1.5.4-2"),
    (V5, 0x82, "0001 00 0001'a' 03", 0x82, "3.8.3.1: QoS 3"),
    (V5, 0x82, "0001 00 0001'a' 30", 0x82, "3.8.3.1: retain handling 3"),
    (V5, 0x82, "0001 00 0001'a' 40", 0x81, "MQTT-3.8.3-5"),
    (V5, 0x82, "0001 00 0001'a' 80", 0x81, "MQTT-3.8.3-5"),
    (V5, 0x82, "0001 00 000a'$share/g/a' 04", 0x82, "MQTT-3.8.3-4"),
    (V5, 0x82, "0001 00 000a'$share/g/a' 01", 0, "shared subscription"),
    (V5, 0x82, "0001 02 0b05 0001'a' 00", 0, "subscription identifier"),
    (V5, 0x82, "0001 02 0b00 0001'a' 00", 0x82, "3.8.2.1.2: subscription identifier 0"),
    (V5, 0x82, "0001 04 0b01 0b02 0001'a' 00", 0x82, "3.8.2.1.2: two subscription identifiers"),
    (V5, 0x82, "0001 04 1f 0001'r' 0001'a' 00", 0x81, "2.2.2.2: not a property of SUBSCRIBE"),
    (V34, 0xa2, "0001 0003'a/b' 0001'#'", 0, "UNSUBSCRIBE"),
    (V5, 0xa2, "0001 00 0003'a/b' 0001'#'", 0, "UNSUBSCRIBE"),
    (V45, 0xa0, "0001 00 0001'a'", 0x81, "MQTT-3.10.1-1"),
    (V34, 0xa2, "0001", 0x82, "MQTT-3.10.3-2"),
    (V5, 0xa2, "0001 00", 0x82, "MQTT-3.10.3-2"),
    (V5, 0xa2, "0001 00 0001 ff", 0x81, "MQTT-3.10.3-1"),
    (V34, 0xa2, "0001 0001 ff", 0x81, "MQTT-3.10.3-1"),
    (V34, 0xa2, "0001 0001'a' 0000", 0x81, "MQTT-4.7.3-1: empty filter"),
    (V5, 0xa2, "0001 00 0001'a' 0000", 0x81, "MQTT-4.7.3-1: empty filter"),
    (V34, 0xa2, "0001 0003'#/a'", 0x81, "MQTT-4.7.1-2, 5.0: MQTT-4.7.1-1"),
    (V5, 0xa2, "0001 00 0003'#/a'", 0x81, "MQTT-4.7.1-1, 3.1.1: MQTT-4.7.1-2"),
    (V5, 0xa2, "0001 00 0009'$share//a'", 0x81, "MQTT-4.8.2-1"),
    (V34, 0xa2, "0001 0009'$share//a'", 0, "3.1.1 knows no shared subscriptions"),
    (V34, 0xa2, "0000 0001'a'", 0x82, "MQTT-2.3.1-1"),
    (V5, 0xa2, "0001 02 0b01 0001'a'", 0x81, "2.2.2.2: not a property of UNSUBSCRIBE"),
    (V34, 0x90, "0001 00 01 02 80", 0, "MQTT-3.9.3-2"),
    (V34, 0x90, "0001 03", 0x82, "MQTT-3.9.3-2"),
    (V34, 0x90, "0001 87", 0x82, "MQTT-3.9.3-2"),
    (V5, 0x90, "0001 00 00 01 02 80 83 87 8f 91 97 9e a1 a2", 0, "MQTT-3.9.3-2"),
    (V5, 0x90, "0001 00 03", 0x82, "MQTT-3.9.3-2"),
    (V5, 0x90, "0001 00", 0x82, "MQTT-3.8.4-6"),
    (V45, 0x92, "0001 00 00", 0x81, "MQTT-2.1.3-1"),
    (V34, 0xb0, "0001", 0, "UNSUBACK"),
    (V34, 0xb0, "0001 00", 0x81, "no codes in version 3"),
    (V5, 0xb0, "0001 00 00 11 80 83 87 8f 91", 0, "MQTT-3.11.3-2"),
    (V5, 0xb0, "0001 00 01", 0x82, "MQTT-3.11.3-2"),
];

const OTHERS: &[Vector] = &[
    (V4, 0x20, "01 00", 0, "MQTT-3.2.2-2"),
    (V4, 0x20, "02 00", 0x81, "MQTT-3.2.2-1"),
    (V4, 0x20, "01 05", 0x82, "MQTT-3.2.2-4"),
    (V34, 0x20, "00 06", 0x82, "MQTT-3.2.2-6: reserved return code"),
    (V3, 0x20, "ff 00", 0, "3.1: first byte is unused"),
    (V34, 0x20, "00 00 00", 0x81, "no properties in version 3"),
    (V5, 0x20, "00 00 00", 0, "minimal"),
    (V5, 0x20, "00 00", 0x81, "MQTT-2.2.2-1"),
    (V5, 0x20, "80 00 00", 0x81, "MQTT-3.2.2-1"),
    (V5, 0x20, "01 87 00", 0x82, "MQTT-3.2.2-6"),
    (V5, 0x20, "00 01 00", 0x82, "MQTT-3.2.2-8"),
    (V5, 0x20, "00 00 03 210000", 0x82, "3.2.2.3.3: receive maximum 0"),
    (V5, 0x20, "00 00 02 2402", 0x82, "3.2.2.3.4: maximum QoS 2"),
    (V5, 0x20, "00 00 02 2401", 0, "MQTT-3.2.2-9"),
    (V5, 0x20, "00 00 02 2502", 0x82, "3.2.2.3.5: retain available 2"),
    (V5, 0x20, "00 00 05 27 00000000", 0x82, "3.2.2.3.6: maximum packet size 0"),
    (V5, 0x20, "00 00 02 2a02", 0x82, "3.2.2.3.13"),
    (V5, 0x20, "00 00 02 1700", 0x81, "2.2.2.2: not a property of CONNACK"),
    (V34, 0xe0, "", 0, "DISCONNECT"),
    (V34, 0xe0, "00", 0x81, "DISCONNECT with a body in version 3"),
    (V45, 0xe1, "", 0x81, "MQTT-3.14.1-1"),
    (V3, 0xe1, "", 0, "3.1: DISCONNECT has no use for the flags"),
    (V5, 0xe0, "", 0, "3.14.2.1: reason code 0"),
    (V5, 0xe0, "04", 0, "3.14.2.2.1: no Property Length"),
    (V5, 0xe0, "00 00", 0, "MQTT-3.14.2-1"),
    (V5, 0xe0, "01", 0x82, "MQTT-3.14.2-1"),
    (V5, 0xe0, "84", 0x82, "MQTT-3.14.2-1"),
    (V5, 0xe0, "00 05 11 0000000a", 0, "session expiry"),
    (V5, 0xe0, "00 0a 11 0000000a 11 0000000a", 0x82, "session expiry twice"),
    (V5, 0xe0, "9c 04 1c 0001's'", 0, "server reference"),
    (V5, 0xe0, "00 02 0101", 0x81, "2.2.2.2: not a property of DISCONNECT"),
    (V5, 0xf0, "", 0, "3.15.2.1: success without properties"),
    (V5, 0xf0, "18 04 15 0001'm'", 0, "MQTT-3.15.2-1"),
    (V5, 0xf0, "19 09 15 0001'm' 16 0002 0001", 0, "MQTT-3.15.2-1"),
    (V5, 0xf0, "01 04 15 0001'm'", 0x82, "MQTT-3.15.2-1"),
    (V5, 0xf2, "", 0x81, "MQTT-3.15.1-1"),
    (V5, 0xf0, "18 00", 0x82, "3.15.2.2.2: no method"),
    (V5, 0xf0, "18", 0x81, "MQTT-2.2.2-1"),
    (V5, 0xf0, "18 08 15 0001'm' 15 0001'm'", 0x82, "3.15.2.2.2: two methods"),
    (V5, 0xf0, "18 09 15 0001'm' 11 00000001", 0x81, "2.2.2.2: not a property of AUTH"),
];

#[test]
fn packets_are_accepted_or_refused_as_their_statements_say() {
    for &(levels, first, body, expected, statement) in
        [PUBLISH, ACKS, SUBSCRIBE, OTHERS].iter().copied().flatten()
    {
        let bytes = framed(first, &hex(body));
        for &protocol in levels {
            let result = decode_one(&bytes, protocol);
            let code = result.as_ref().map_or_else(DecodeError::reason_code, |_| 0);
            assert_eq!(code, expected, "{statement}: {first:02x} {body} at {protocol:?}: {result:?}");
        }
    }
}

#[test]
fn a_publish_is_read_field_by_field() {
    let bytes = framed(
        0x3d,
        &hex(
            "0003'a/b' 0102 1e 0101 02 00000009 03 0001'j' 08 0001'r' 09 0001 ff 0b8001 230005 26 0000 0000 'xy'",
        ),
    );
    let packet = decode_one(&bytes, Protocol::V5);
    let properties = gateway_core::Properties {
        payload_format: Some(1),
        content_type: Some("j".into()),
        response_topic: Some("r".into()),
        correlation_data: Some(bytes::Bytes::from_static(&[0xff])),
        user: vec![(String::new(), String::new())],
    };
    let expected = Publish {
        dup: true,
        qos: QoS::ExactlyOnce,
        retain: true,
        topic: "a/b",
        packet_id: 0x0102,
        payload: b"xy",
        alias: Some(5),
        expiry: Some(9),
        ids: vec![128],
        properties: Some(properties.into()),
    };
    assert_eq!(packet, Ok(Packet::Publish(expected)));
}

#[test]
fn subscription_options_are_read_bit_by_bit() {
    let bytes = framed(0x82, &hex("000a 02 0b07 0001'a' 1d 0001'b' 22"));
    let filter = |filter: &str, qos, no_local, retain_as_published, retain_handling| SubscribeFilter {
        filter: filter.into(),
        qos,
        no_local,
        retain_as_published,
        retain_handling,
    };
    let filters =
        vec![filter("a", QoS::AtLeastOnce, true, true, 1), filter("b", QoS::ExactlyOnce, false, false, 2)];
    let expected = Subscribe { packet_id: 10, id: Some(7), user: Vec::new(), filters };
    assert_eq!(decode_one(&bytes, Protocol::V5), Ok(Packet::Subscribe(expected)));
}
