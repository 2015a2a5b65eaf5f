//! Malformed and forbidden packets, byte by byte: each ends only its own connection.
//!
//! Only `TcpStream` and hand-written bytes, so that no client library stands between the table and the server.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::TcpStream,
    time::Duration,
};

use crate::support::{Server, local};

const WAIT: Duration = Duration::from_secs(60);

/// A row: what it breaks (with the statement ids), what is sent, and after which greeting.
struct Row(&'static str, Greeting, &'static [u8]);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Greeting {
    /// Nothing: the row's bytes are the first of the connection.
    None,
    /// A good CONNECT of MQTT 3.1.
    V31,
    /// A good CONNECT of MQTT 3.1.1.
    V311,
    /// A good CONNECT of MQTT 5.0.
    V5,
}

const CONNECT_V31: &[u8] = b"\x10\x10\x00\x06MQIsdp\x03\x02\x00\x3c\x00\x02bA";
const CONNECT_V311: &[u8] = b"\x10\x0e\x00\x04MQTT\x04\x02\x00\x3c\x00\x02bB";
const CONNECT_V5: &[u8] = b"\x10\x0f\x00\x04MQTT\x05\x02\x00\x3c\x00\x00\x02bC";

use Greeting::{None as First, V5, V31, V311};

#[rustfmt::skip]
const ROWS: &[Row] = &[
    // Framing and packet types.
    Row("packet type 0", First, b"\x00\x00"),
    Row("packet type 0 after CONNECT", V311, b"\x00\x00"),
    Row("first packet is PINGREQ [MQTT-3.1.0-1]", First, b"\xc0\x00"),
    Row("first packet is PUBLISH [MQTT-3.1.0-1]", First, b"\x30\x03\x00\x01t"),
    Row("HTTP instead of MQTT", First, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    Row("TLS hello on a plain port", First, b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03"),
    Row("remaining length of five bytes [MQTT-1.5.5-1]", First, b"\x10\xff\xff\xff\xff\x01"),
    Row("remaining length of five bytes after CONNECT", V311, b"\x30\xff\xff\xff\xff\x01"),
    Row("remaining length of five bytes after CONNECT, 5.0", V5, b"\x30\xff\xff\xff\xff\x01"),
    Row("CONNECT larger than any limit", First, b"\x10\xff\xff\xff\x7f\x00\x04MQTT"),
    Row("PUBLISH larger than the limit", V311, b"\x30\xff\xff\xff\x7f\x00\x01t"),
    Row("PUBLISH larger than the limit, 5.0", V5, b"\x30\xff\xff\xff\x7f\x00\x01t"),
    Row("packet type 15 in 3.1.1", V311, b"\xf0\x00"),
    Row("packet type 15 in 3.1", V31, b"\xf0\x00"),
    Row("CONNACK from a client", V311, b"\x20\x02\x00\x00"),
    Row("CONNACK from a client, 5.0", V5, b"\x20\x03\x00\x00\x00"),
    Row("SUBACK from a client", V311, b"\x90\x03\x00\x01\x00"),
    Row("SUBACK from a client, 5.0", V5, b"\x90\x04\x00\x01\x00\x00"),
    Row("UNSUBACK from a client", V311, b"\xb0\x02\x00\x01"),
    Row("PINGRESP from a client", V311, b"\xd0\x00"),
    Row("PINGRESP from a client, 5.0", V5, b"\xd0\x00"),

    // CONNECT.
    Row("CONNECT of 5.0 with its length in two bytes for one [MQTT-1.5.5-1]", First, b"\x10\x8f\x00\x00\x04MQTT\x05\x02\x00\x3c\x00\x00\x02bD"),
    Row("CONNECT of 5.0 with flags in the fixed header [MQTT-2.1.3-1]", First, b"\x18\x0f\x00\x04MQTT\x05\x02\x00\x3c\x00\x00\x02bD"),
    Row("CONNECT without content", First, b"\x10\x00"),
    Row("CONNECT with flags in the fixed header [MQTT-2.2.2-2]", First, b"\x11\x0e\x00\x04MQTT\x04\x02\x00\x3c\x00\x02bD"),
    Row("unknown protocol name [MQTT-3.1.2-1]", First, b"\x10\x0e\x00\x04MQTX\x04\x02\x00\x3c\x00\x02bD"),
    Row("name of 3.1 with level 4", First, b"\x10\x10\x00\x06MQIsdp\x04\x02\x00\x3c\x00\x02bD"),
    Row("protocol level 6 [MQTT-3.1.2-2]", First, b"\x10\x0e\x00\x04MQTT\x06\x02\x00\x3c\x00\x02bD"),
    Row("protocol level 0 [MQTT-3.1.2-2]", First, b"\x10\x0e\x00\x04MQTT\x00\x02\x00\x3c\x00\x02bD"),
    Row("reserved connect flag, 3.1.1 [MQTT-3.1.2-3]", First, b"\x10\x0e\x00\x04MQTT\x04\x03\x00\x3c\x00\x02bD"),
    Row("reserved connect flag, 5.0 [MQTT-3.1.2-3]", First, b"\x10\x0f\x00\x04MQTT\x05\x03\x00\x3c\x00\x00\x02bD"),
    Row("will QoS without will [MQTT-3.1.2-13]", First, b"\x10\x0e\x00\x04MQTT\x04\x0a\x00\x3c\x00\x02bD"),
    Row("will retain without will [MQTT-3.1.2-15]", First, b"\x10\x0e\x00\x04MQTT\x04\x22\x00\x3c\x00\x02bD"),
    Row("will QoS without will, 5.0 [MQTT-3.1.2-11]", First, b"\x10\x0f\x00\x04MQTT\x05\x0a\x00\x3c\x00\x00\x02bD"),
    Row("will retain without will, 5.0 [MQTT-3.1.2-13]", First, b"\x10\x0f\x00\x04MQTT\x05\x22\x00\x3c\x00\x00\x02bD"),
    Row("will QoS 3 [MQTT-3.1.2-14]", First, b"\x10\x14\x00\x04MQTT\x04\x1e\x00\x3c\x00\x02bD\x00\x01w\x00\x01m"),
    Row("will QoS 3, 5.0 [MQTT-3.1.2-12]", First, b"\x10\x16\x00\x04MQTT\x05\x1e\x00\x3c\x00\x00\x02bD\x00\x00\x01w\x00\x01m"),
    Row("will topic with a wildcard", First, b"\x10\x14\x00\x04MQTT\x04\x06\x00\x3c\x00\x02bD\x00\x01#\x00\x01m"),
    Row("will promised, not there [MQTT-3.1.2-9]", First, b"\x10\x0e\x00\x04MQTT\x04\x06\x00\x3c\x00\x02bD"),
    Row("password without user name [MQTT-3.1.2-22]", First, b"\x10\x11\x00\x04MQTT\x04\x42\x00\x3c\x00\x02bD\x00\x01p"),
    Row("user name promised, not there [MQTT-3.1.2-19]", First, b"\x10\x0e\x00\x04MQTT\x04\x82\x00\x3c\x00\x02bD"),
    Row("bytes after the payload of CONNECT", First, b"\x10\x0f\x00\x04MQTT\x04\x02\x00\x3c\x00\x02bDX"),
    Row("client id longer than the packet", First, b"\x10\x0e\x00\x04MQTT\x04\x02\x00\x3c\x00\x09bD"),
    Row("client id with U+0000 [MQTT-1.5.3-2]", First, b"\x10\x0e\x00\x04MQTT\x04\x02\x00\x3c\x00\x02b\x00"),
    Row("client id with a surrogate [MQTT-1.5.3-1]", First, b"\x10\x0f\x00\x04MQTT\x04\x02\x00\x3c\x00\x03\xed\xa0\x80"),
    Row("client id in overlong UTF-8 [MQTT-1.5.3-1]", First, b"\x10\x0e\x00\x04MQTT\x04\x02\x00\x3c\x00\x02\xc0\x80"),
    Row("empty client id without clean session [MQTT-3.1.3-8]", First, b"\x10\x0c\x00\x04MQTT\x04\x00\x00\x3c\x00\x00"),
    Row("empty client id in 3.1", First, b"\x10\x0e\x00\x06MQIsdp\x03\x02\x00\x3c\x00\x00"),
    Row("receive maximum 0, 5.0", First, b"\x10\x12\x00\x04MQTT\x05\x02\x00\x3c\x03\x21\x00\x00\x00\x02bD"),
    Row("maximum packet size 0, 5.0", First, b"\x10\x14\x00\x04MQTT\x05\x02\x00\x3c\x05\x27\x00\x00\x00\x00\x00\x02bD"),
    Row("property twice, 5.0", First, b"\x10\x15\x00\x04MQTT\x05\x02\x00\x3c\x06\x21\x00\x05\x21\x00\x05\x00\x02bD"),
    Row("property of another packet, 5.0", First, b"\x10\x12\x00\x04MQTT\x05\x02\x00\x3c\x03\x23\x00\x01\x00\x02bD"),
    Row("unknown property, 5.0", First, b"\x10\x11\x00\x04MQTT\x05\x02\x00\x3c\x02\x7f\x00\x00\x02bD"),
    Row("property length beyond the packet, 5.0", First, b"\x10\x0f\x00\x04MQTT\x05\x02\x00\x3c\x7f\x00\x02bD"),
    Row("request problem information 2, 5.0", First, b"\x10\x11\x00\x04MQTT\x05\x02\x00\x3c\x02\x17\x02\x00\x02bD"),
    Row("authentication data without method, 5.0", First, b"\x10\x13\x00\x04MQTT\x05\x02\x00\x3c\x04\x16\x00\x01a\x00\x02bD"),
    Row("second CONNECT, 3.1 [MQTT-3.1.0-2]", V31, CONNECT_V31),
    Row("second CONNECT, 3.1.1 [MQTT-3.1.0-2]", V311, CONNECT_V311),
    Row("second CONNECT, 5.0 [MQTT-3.1.0-2]", V5, CONNECT_V5),

    // PUBLISH.
    Row("QoS 3 [MQTT-3.3.1-4]", V311, b"\x36\x06\x00\x01t\x00\x01x"),
    Row("QoS 3, 3.1 [MQTT-3.3.1-4]", V31, b"\x36\x06\x00\x01t\x00\x01x"),
    Row("QoS 3, 5.0 [MQTT-3.3.1-4]", V5, b"\x36\x07\x00\x01t\x00\x01\x00x"),
    Row("DUP at QoS 0 [MQTT-3.3.1-2]", V311, b"\x38\x04\x00\x01tx"),
    Row("DUP at QoS 0, 5.0 [MQTT-3.3.1-2]", V5, b"\x38\x05\x00\x01t\x00x"),
    Row("topic with # [MQTT-3.3.2-2]", V311, b"\x30\x06\x00\x03a/#x"),
    Row("topic with + [MQTT-3.3.2-2]", V5, b"\x30\x07\x00\x03a/+\x00x"),
    Row("empty topic [MQTT-4.7.3-1]", V311, b"\x30\x03\x00\x00x"),
    Row("empty topic without alias, 5.0", V5, b"\x30\x04\x00\x00\x00x"),
    Row("topic with U+0000 [MQTT-4.7.3-2]", V311, b"\x30\x05\x00\x02a\x00x"),
    Row("topic not UTF-8 [MQTT-3.3.2-1]", V311, b"\x30\x05\x00\x02\xff\xfex"),
    Row("topic longer than the packet", V311, b"\x30\x04\x00\x09tx"),
    Row("no room for the topic's length", V311, b"\x30\x01\x00"),
    Row("packet id 0 [MQTT-2.3.1-1]", V311, b"\x32\x06\x00\x01t\x00\x00x"),
    Row("packet id 0, 5.0 [MQTT-2.2.1-3]", V5, b"\x32\x07\x00\x01t\x00\x00\x00x"),
    Row("no packet id at QoS 1", V311, b"\x32\x03\x00\x01t"),
    Row("topic alias 0, 5.0 [MQTT-3.3.2-8]", V5, b"\x30\x08\x00\x01t\x03\x23\x00\x00x"),
    Row("topic alias above the maximum, 5.0 [MQTT-3.3.2-9]", V5, b"\x30\x08\x00\x01t\x03\x23\xff\xffx"),
    Row("unknown topic alias, 5.0", V5, b"\x30\x07\x00\x00\x03\x23\x00\x01x"),
    Row("subscription id from a client, 5.0 [MQTT-3.3.4-6]", V5, b"\x30\x07\x00\x01t\x02\x0b\x01x"),
    Row("payload format 2, 5.0", V5, b"\x30\x07\x00\x01t\x02\x01\x02x"),
    Row("response topic with a wildcard, 5.0 [MQTT-3.3.2-14]", V5, b"\x30\x09\x00\x01t\x04\x08\x00\x01#x"),
    Row("message expiry twice, 5.0", V5, b"\x30\x0f\x00\x01t\x0a\x02\x00\x00\x00\x01\x02\x00\x00\x00\x01x"),
    Row("user property cut short, 5.0", V5, b"\x30\x09\x00\x01t\x05\x26\x00\x01a\x00"),
    Row("property length not minimal and too long, 5.0", V5, b"\x30\x09\x00\x01t\x80\x80\x80\x80\x01x"),

    // Acknowledgements.
    Row("PUBACK with flags", V311, b"\x42\x02\x00\x01"),
    Row("PUBACK without packet id", V311, b"\x40\x01\x00"),
    Row("PUBACK with packet id 0", V311, b"\x40\x02\x00\x00"),
    Row("PUBREL with wrong flags [MQTT-3.6.1-1]", V311, b"\x60\x02\x00\x01"),
    Row("PUBREL with wrong flags, 5.0 [MQTT-3.6.1-1]", V5, b"\x60\x02\x00\x01"),
    Row("PUBCOMP with flags", V5, b"\x72\x02\x00\x01"),
    Row("PUBREC with an unknown reason code, 5.0", V5, b"\x50\x03\x00\x01\x05"),

    // SUBSCRIBE and UNSUBSCRIBE.
    Row("SUBSCRIBE with wrong flags [MQTT-3.8.1-1]", V311, b"\x80\x06\x00\x01\x00\x01t\x00"),
    Row("SUBSCRIBE with wrong flags, 5.0 [MQTT-3.8.1-1]", V5, b"\x80\x07\x00\x01\x00\x00\x01t\x00"),
    Row("SUBSCRIBE without filter [MQTT-3.8.3-3]", V311, b"\x82\x02\x00\x01"),
    Row("SUBSCRIBE without filter, 5.0 [MQTT-3.8.3-2]", V5, b"\x82\x03\x00\x01\x00"),
    Row("SUBSCRIBE with packet id 0 [MQTT-2.3.1-1]", V311, b"\x82\x06\x00\x00\x00\x01t\x00"),
    Row("SUBSCRIBE asking QoS 3 [MQTT-3-8.3-4]", V311, b"\x82\x06\x00\x01\x00\x01t\x03"),
    Row("SUBSCRIBE with reserved bits [MQTT-3-8.3-4]", V311, b"\x82\x06\x00\x01\x00\x01t\x04"),
    Row("SUBSCRIBE with reserved bits, 5.0 [MQTT-3.8.3-5]", V5, b"\x82\x07\x00\x01\x00\x00\x01t\xc0"),
    Row("SUBSCRIBE with retain handling 3, 5.0", V5, b"\x82\x07\x00\x01\x00\x00\x01t\x30"),
    Row("SUBSCRIBE with subscription id 0, 5.0", V5, b"\x82\x09\x00\x01\x02\x0b\x00\x00\x01t\x00"),
    Row("SUBSCRIBE with two subscription ids, 5.0", V5, b"\x82\x0b\x00\x01\x04\x0b\x01\x0b\x02\x00\x01t\x00"),
    Row("no local on a shared subscription, 5.0 [MQTT-3.8.3-4]", V5, b"\x82\x0f\x00\x01\x00\x00\x09$share/gt\x04"),
    Row("SUBSCRIBE without options", V311, b"\x82\x05\x00\x01\x00\x01t"),
    Row("SUBSCRIBE filter not UTF-8 [MQTT-3.8.3-1]", V311, b"\x82\x06\x00\x01\x00\x01\xff\x00"),
    Row("UNSUBSCRIBE with wrong flags [MQTT-3.10.1-1]", V311, b"\xa0\x05\x00\x01\x00\x01t"),
    Row("UNSUBSCRIBE with wrong flags, 5.0 [MQTT-3.10.1-1]", V5, b"\xa0\x06\x00\x01\x00\x00\x01t"),
    Row("UNSUBSCRIBE without filter [MQTT-3.10.3-2]", V311, b"\xa2\x02\x00\x01"),
    Row("UNSUBSCRIBE without filter, 5.0 [MQTT-3.10.3-2]", V5, b"\xa2\x03\x00\x01\x00"),
    Row("UNSUBSCRIBE with packet id 0", V311, b"\xa2\x05\x00\x00\x00\x01t"),
    Row("SUBSCRIBE with an empty filter, 3.1", V31, b"\x82\x05\x00\x01\x00\x00\x00"),
    Row("SUBSCRIBE with an empty filter [MQTT-4.7.3-1]", V311, b"\x82\x05\x00\x01\x00\x00\x00"),
    Row("SUBSCRIBE with an empty filter, 5.0 [MQTT-4.7.3-1]", V5, b"\x82\x06\x00\x01\x00\x00\x00\x00"),
    Row("SUBSCRIBE with a bad filter behind a good one [MQTT-4.7.1-2]", V311, b"\x82\x0b\x00\x01\x00\x01t\x00\x00\x02a#\x00"),
    Row("SUBSCRIBE with a bad filter behind a good one, 5.0 [MQTT-4.7.1-1]", V5, b"\x82\x0c\x00\x01\x00\x00\x01t\x00\x00\x02a#\x00"),
    Row("SUBSCRIBE with + beside other characters [MQTT-4.7.1-3]", V311, b"\x82\x07\x00\x01\x00\x02a+\x00"),
    Row("shared subscription without a group, 5.0 [MQTT-4.8.2-1]", V5, b"\x82\x0f\x00\x01\x00\x00\x09$share//a\x00"),
    Row("shared subscription without a filter, 5.0 [MQTT-4.8.2-2]", V5, b"\x82\x0e\x00\x01\x00\x00\x08$share/g\x00"),
    Row("UNSUBSCRIBE with an empty filter [MQTT-4.7.3-1]", V311, b"\xa2\x04\x00\x01\x00\x00"),
    Row("UNSUBSCRIBE with an empty filter, 5.0 [MQTT-4.7.3-1]", V5, b"\xa2\x05\x00\x01\x00\x00\x00"),
    Row("UNSUBSCRIBE with # before the end [MQTT-4.7.1-2]", V311, b"\xa2\x07\x00\x01\x00\x03#/a"),
    Row("UNSUBSCRIBE with # before the end, 5.0 [MQTT-4.7.1-1]", V5, b"\xa2\x08\x00\x01\x00\x00\x03#/a"),

    // The rest.
    Row("PINGREQ with flags", V311, b"\xc1\x00"),
    Row("PINGREQ with content", V311, b"\xc0\x01\x00"),
    Row("DISCONNECT with flags, 3.1.1 [MQTT-3.14.1-1]", V311, b"\xe1\x00"),
    Row("DISCONNECT with flags, 5.0 [MQTT-3.14.1-1]", V5, b"\xe1\x00"),
    Row("DISCONNECT with an unknown reason code, 5.0", V5, b"\xe0\x01\x03"),
    Row("DISCONNECT raising the session expiry from 0, 5.0", V5, b"\xe0\x07\x00\x05\x11\x00\x00\x00\x01"),
    Row("AUTH without a method in CONNECT, 5.0 [MQTT-4.12.0-7]", V5, b"\xf0\x00"),
    Row("AUTH with flags, 5.0 [MQTT-3.15.1-1]", V5, b"\xf1\x00"),
];

/// Connects, says CONNECT and reads CONNACK.
fn greeted(server: &Server, greeting: Greeting, client_id: &[u8; 2]) -> TcpStream {
    let mut stream = TcpStream::connect(local(server.ports.tcp)).expect("connect");
    stream.set_read_timeout(Some(WAIT)).expect("set the read timeout");
    stream.set_nodelay(true).expect("set nodelay");
    let template = match greeting {
        First => return stream,
        V31 => CONNECT_V31,
        V311 => CONNECT_V311,
        V5 => CONNECT_V5,
    };
    let mut connect = template.to_vec();
    let end = connect.len();
    connect[end - 2..].copy_from_slice(client_id);
    stream.write_all(&connect).expect("send CONNECT");
    let packet = read_packet(&mut stream).expect("an answer to CONNECT");
    assert_eq!((packet[0], packet[2..4].to_vec()), (0x20, vec![0, 0]), "CONNACK of {greeting:?}");
    stream
}

/// The next packet, with its fixed header (lengths under 16,384); `None` at the end of the stream.
fn read_packet(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let mut packet = vec![0; 2];
    stream.read_exact(&mut packet).ok()?;
    let mut length = usize::from(packet[1] & 0x7f);
    if packet[1] & 0x80 != 0 {
        let mut more = [0];
        stream.read_exact(&mut more).ok()?;
        length |= usize::from(more[0]) << 7;
        packet.push(more[0]);
    }
    let start = packet.len();
    packet.resize(start + length, 0);
    stream.read_exact(&mut packet[start..]).ok()?;
    Some(packet)
}

/// Reads to the end; the packets that came before it. Panics when the server keeps the connection.
fn read_to_close(stream: &mut TcpStream, row: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => {}
        Err(error) if matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => {}
        Err(error) => panic!("{row}: the connection is still open: {error}; it said {bytes:02x?}"),
    }
    bytes
}

/// A connection that must survive everything: PINGREQ, and a QoS 1 publish to itself.
struct Witness(TcpStream, u16);

impl Witness {
    fn new(server: &Server, greeting: Greeting, client_id: &[u8; 2]) -> Self {
        let mut stream = greeted(server, greeting, client_id);
        let subscribe: &[u8] = match greeting {
            V5 => b"\x82\x09\x00\x01\x00\x00\x03w/5\x01",
            V311 => b"\x82\x08\x00\x01\x00\x03w/4\x01",
            _ => b"\x82\x08\x00\x01\x00\x03w/3\x01",
        };
        stream.write_all(subscribe).expect("send SUBSCRIBE");
        assert_eq!(read_packet(&mut stream).expect("SUBACK")[0], 0x90);
        Self(stream, 1)
    }

    fn is_well(&mut self, greeting: Greeting, row: &str) {
        self.1 += 1;
        let [high, low] = self.1.to_be_bytes();
        let publish: Vec<u8> = match greeting {
            V5 => [&b"\x32\x09\x00\x03w/5"[..], &[high, low, 0, b'x']].concat(),
            V311 => [&b"\x32\x08\x00\x03w/4"[..], &[high, low, b'x']].concat(),
            _ => [&b"\x32\x08\x00\x03w/3"[..], &[high, low, b'x']].concat(),
        };
        self.0.write_all(&publish).unwrap_or_else(|error| panic!("{row}: witness cannot publish: {error}"));
        let (mut acknowledged, mut delivered) = (false, false);
        while !(acknowledged && delivered) {
            let packet = read_packet(&mut self.0).unwrap_or_else(|| panic!("{row}: the witness was cut off"));
            match packet[0] {
                0x40 => acknowledged = true,
                0x32 => {
                    delivered = true;
                    let id = [packet[7], packet[8]];
                    self.0.write_all(&[0x40, 2, id[0], id[1]]).expect("acknowledge");
                }
                other => panic!("{row}: the witness got {other:02x}"),
            }
        }
    }
}

fn check(rows: impl Iterator<Item = &'static Row>) {
    let server = Server::start();
    let mut witnesses: Vec<(Greeting, Witness)> = [(V31, b"w3"), (V311, b"w4"), (V5, b"w5")]
        .map(|(greeting, id)| (greeting, Witness::new(&server, greeting, id)))
        .into();
    for Row(name, greeting, bytes) in rows {
        let mut stream = greeted(&server, *greeting, b"xx");
        // The server may close before it has read everything: not an error of the row.
        let _ = stream.write_all(bytes);
        let said = read_to_close(&mut stream, name);
        match greeting {
            // 3.1 and 3.1.1 have no packet for it: nothing may come before the close.
            V31 | V311 => assert!(said.is_empty(), "{name}: {said:02x?} before the close"),
            // 5.0: nothing, or a DISCONNECT with a reason code of 0x80 or more.
            V5 => assert!(
                said.is_empty() || (said[0] == 0xe0 && said[1] >= 1 && said[2] >= 0x80),
                "{name}: {said:02x?} before the close"
            ),
            // CONNECT: nothing, or a CONNACK that refuses, without session present.
            First => assert!(
                said.is_empty() || (said[0] == 0x20 && said[2] == 0 && said[3] != 0),
                "{name}: {said:02x?} before the close"
            ),
        }
        for (greeting, witness) in &mut witnesses {
            witness.is_well(*greeting, name);
        }
    }
    let log = server.log();
    assert!(!log.contains("panicked"), "a packet made the server panic");
}

#[test]
fn bad_first_packets_end_only_their_connection() {
    check(ROWS.iter().filter(|row| row.1 == First));
}

#[test]
fn bad_packets_of_3_1_and_3_1_1_end_only_their_connection() {
    check(ROWS.iter().filter(|row| matches!(row.1, V31 | V311)));
}

#[test]
fn bad_packets_of_5_0_end_only_their_connection() {
    check(ROWS.iter().filter(|row| row.1 == V5));
}

/// Every row, one byte at a time: what is refused whole is refused in pieces.
#[test]
fn rows_in_single_bytes_end_only_their_connection() {
    let server = Server::start();
    let mut witness = Witness::new(&server, V311, b"w4");
    for Row(name, greeting, bytes) in ROWS {
        let mut stream = greeted(&server, *greeting, b"xx");
        for byte in *bytes {
            if stream.write_all(&[*byte]).is_err() {
                break;
            }
        }
        read_to_close(&mut stream, name);
        witness.is_well(V311, name);
    }
}

/// Connections that stop in the middle of every row leave nothing behind that hurts others.
#[test]
fn truncated_rows_hurt_nobody() {
    let server = Server::start();
    let mut witness = Witness::new(&server, V5, b"w5");
    for Row(name, greeting, bytes) in ROWS {
        for end in 0..bytes.len() {
            let mut stream = greeted(&server, *greeting, b"xx");
            let _ = stream.write_all(&bytes[..end]);
        }
        witness.is_well(V5, name);
    }
}

/// A log line of its own at the default level for each: who, what and why, whatever is in the client id.
#[test]
fn each_fault_of_a_client_is_logged_once_on_an_unbroken_line() {
    let mut server = Server::start_with(&[], "[limits]\nmax_client_id_bytes = 40\nmax_subscriptions = 1\n");
    let connect = |id: &[u8]| {
        let mut bytes = vec![0x10, 12 + id.len() as u8];
        bytes.extend_from_slice(b"\x00\x04MQTT\x04\x02\x00\x3c\x00");
        bytes.push(id.len() as u8);
        bytes.extend_from_slice(id);
        bytes
    };
    let evil = "a\u{1b}[2J\r\n\u{202e}\",\"level\":\"ERROR";
    let send = |port: u16, bytes: &[u8]| {
        let mut stream = TcpStream::connect(local(port)).expect("connect");
        stream.set_read_timeout(Some(WAIT)).expect("set a timeout");
        stream.write_all(bytes).expect("send");
        stream
    };
    let ended = |mut stream: TcpStream| drop(stream.read_to_end(&mut Vec::new()));
    // No TLS on the port for TLS; a client id over the limit; no CONNECT at all.
    ended(send(server.ports.tls, b"GET / HTTP/1.1\r\n\r\n"));
    ended(send(server.ports.tcp, &connect(&[evil.as_bytes(), &[b'x'; 40]].concat())));
    ended(send(server.ports.tcp, b"\xc0\x00"));
    // The second takes over from the first, and ends itself with a packet above the limit.
    let mut first = send(server.ports.tcp, &connect(evil.as_bytes()));
    first.read_exact(&mut [0; 4]).expect("CONNACK");
    let mut second = send(server.ports.tcp, &connect(evil.as_bytes()));
    second.read_exact(&mut [0; 4]).expect("CONNACK");
    ended(first);
    // One filter more than it may have, and the connection goes on.
    second.write_all(b"\x82\x0a\x00\x01\x00\x01a\x00\x00\x01b\x00").expect("send");
    let mut suback = [0; 6];
    second.read_exact(&mut suback).expect("SUBACK");
    assert_eq!(suback, *b"\x90\x04\x00\x01\x00\x80");
    second.write_all(b"\x30\xff\xff\xff\x7f").expect("send");
    ended(second);
    assert!(server.stop(), "it stops in time");

    let lines: Vec<serde_json::Value> =
        server.log().lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    // As JSON has it: escaped once.
    let escaped = evil;
    for (message, id, reason) in [
        ("TLS handshake failed", None, "does not speak TLS"),
        ("CONNECT refused", Some(escaped), "client_identifier_not_valid"),
        ("handshake failed", None, "first packet is not CONNECT"),
        ("session taken over, its earlier connection ends", Some(escaped), ""),
        ("packet over a limit refused", Some(escaped), "quota_exceeded"),
        ("connection ended for what its client sent", Some(escaped), "packet_too_large"),
    ] {
        let told: Vec<_> = lines.iter().filter(|line| line["message"] == message).collect();
        assert_eq!(told.len(), 1, "{message}: {lines:?}");
        let field = |name: &str| told[0][name].as_str().unwrap_or_default();
        assert_eq!(field("level"), "INFO");
        assert!(field("peer").starts_with("127.0.0.1:"), "{told:?}");
        assert!(id.is_none_or(|id| field("client_id").starts_with(id)), "{told:?}");
        assert!(field("reason").contains(reason), "{told:?}");
    }
}

/// The failure: `malformed_packet` and `packet_too_large` alone say neither which packet nor what is wrong with it.
#[test]
fn the_log_says_which_packet_ended_a_connection_and_why() {
    let limits = "[limits]\nmax_packet_size = \"2KiB\"\nmax_connect_size = \"1KiB\"\n";
    let mut server = Server::start_with(&[], limits);
    let sent = |greeting, bytes: &[u8]| {
        let mut stream = greeted(&server, greeting, b"xx");
        stream.write_all(bytes).expect("send");
        drop(stream.read_to_end(&mut Vec::new()));
    };
    // 2,049 bytes of PUBLISH announced, a topic with a wildcard, a CONNECT of 1,025 bytes.
    sent(V5, b"\x30\xfe\x0f\x00\x01t");
    sent(V5, b"\x30\x05\x00\x01#\x00p");
    sent(First, b"\x10\xfe\x07\x00\x04MQTT\x05");
    assert!(server.stop(), "it stops in time");
    let lines: Vec<serde_json::Value> =
        server.log().lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    let of = |name: &str, value: &str| {
        let found = lines.iter().find(|line| line[name].as_str().is_some_and(|text| text.contains(value)));
        found.unwrap_or_else(|| panic!("{value}: {lines:?}"))
    };
    let large = of("reason", "packet_too_large");
    assert_eq!(
        (&large["packet"], &large["size"], &large["limit"]),
        (&"PUBLISH".into(), &2049.into(), &2048.into())
    );
    assert_eq!(large["key"], "limits.max_packet_size");
    let wildcard = of("detail", "MQTT-3.3.2-2");
    assert_eq!((&wildcard["packet"], &wildcard["size"]), (&"PUBLISH".into(), &7.into()));
    of("reason", "CONNECT of 1025 bytes is larger than limits.max_connect_size, which is 1024");
}
