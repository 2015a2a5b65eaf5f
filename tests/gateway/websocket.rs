//! The end of a WebSocket, byte by byte: the Close frames of RFC 6455, whatever a client library would make of them.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::TcpStream,
};

use crate::{client::from_host, support::Server};

const CONNECT: &[u8] = b"\x10\x0f\x00\x04MQTT\x05\x02\x00\x3c\x00\x00\x02bW";
const PINGREQ: &[u8] = b"\xc0\x00";
const MASK: [u8; 4] = [0x37, 0xFA, 0x21, 0x3D];

fn request(version: &str) -> String {
    format!(
        "GET /mqtt HTTP/{version}\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\
         Sec-WebSocket-Protocol: mqtt\r\n\r\n"
    )
}

/// A frame with these bytes before the mask, which are flags and length in whatever form.
fn framed(head: &[u8], payload: &[u8]) -> Vec<u8> {
    let masked = payload.iter().zip(MASK.iter().cycle()).map(|(byte, mask)| byte ^ mask);
    head.iter().chain(&MASK).copied().chain(masked).collect()
}

/// A frame with this first byte and the shortest length.
fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
    framed(&[first, 0x80 | payload.len() as u8], payload)
}

fn opened(server: &Server) -> TcpStream {
    let mut stream = from_host(1, server.ports.ws);
    stream.write_all(request("1.1").as_bytes()).expect("ask for the upgrade");
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).expect("read the answer");
        answer.push(byte[0]);
    }
    assert!(answer.starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(&answer));
    stream
}

fn connected(server: &Server) -> TcpStream {
    let mut stream = opened(server);
    stream.write_all(&frame(0x82, CONNECT)).expect("send CONNECT");
    let mut head = [0; 2];
    stream.read_exact(&mut head).expect("read the head of a frame");
    assert_eq!(head[0], 0x82);
    let mut connack = vec![0; usize::from(head[1])];
    stream.read_exact(&mut connack).expect("read CONNACK");
    assert_eq!((connack[0], connack[3]), (0x20, 0));
    stream
}

/// All that comes until the gateway closes.
fn rest(mut stream: TcpStream, sent: &[u8]) -> Vec<u8> {
    stream.write_all(sent).expect("send");
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Err(error) if error.kind() != ErrorKind::ConnectionReset => panic!("no end: {error}"),
        _ => rest,
    }
}

/// The failure: a client's Close is answered by two Close frames, the second with another status.
#[test]
fn a_close_frame_is_answered_by_one_close_frame() {
    let server = Server::start_with(&[], "");
    for (payload, answer) in [
        (&b"\x03\xe9"[..], &b"\x88\x02\x03\xe9"[..]),
        (b"\x03\xe8bye", b"\x88\x02\x03\xe8"),
        (b"\x0f\xa0", b"\x88\x02\x0f\xa0"),
        (b"", b"\x88\x00"),
        // Statuses that no frame may have, half of one, and a reason that is no UTF-8.
        (b"\x03\xed", b"\x88\x02\x03\xea"),
        (b"\x00\x00", b"\x88\x02\x03\xea"),
        (b"\x03", b"\x88\x02\x03\xea"),
        (b"\x03\xe8\xff", b"\x88\x02\x03\xef"),
    ] {
        let close = frame(0x88, payload);
        assert_eq!(rest(opened(&server), &close), answer, "before CONNECT: {payload:x?}");
        assert_eq!(rest(connected(&server), &close), answer, "{payload:x?}");
    }
    // The answer to what came before is sent before, nothing after, and a second one is not heard.
    let all =
        [frame(0x82, PINGREQ), frame(0x88, b"\x03\xe9"), frame(0x88, b"\x03\xe8"), frame(0x82, PINGREQ)];
    assert_eq!(rest(connected(&server), &all.concat()), b"\x82\x02\xd0\x00\x88\x02\x03\xe9");
}

/// The failure: every end has status 1000, which says that nothing was wrong.
#[test]
fn a_close_frame_says_why_the_gateway_ends_a_websocket() {
    let server = Server::start_with(&[], "[limits]\nmax_packet_size = \"1KiB\"\n");
    let long = [0x82, 0xFF, 0, 0, 0, 0, 0, 0, 0, PINGREQ.len() as u8];
    for (sent, status) in [
        // Not masked, reserved bits, an opcode that is none, a continuation of nothing, a long ping, a ping in pieces.
        (b"\x82\x02\xc0\x00".to_vec(), 1002_u16),
        (frame(0xC2, PINGREQ), 1002),
        (frame(0x83, PINGREQ), 1002),
        (frame(0x80, PINGREQ), 1002),
        (framed(&[0x89, 0xFE, 0, 126], &[]), 1002),
        (frame(0x09, b""), 1002),
        // Lengths in a longer form than they need, and one of 2^63.
        (framed(&[0x82, 0xFE, 0, PINGREQ.len() as u8], PINGREQ), 1002),
        (framed(&long, PINGREQ), 1002),
        (framed(&[0x82, 0xFF, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF], &[]), 1002),
        (framed(&[0x82, 0xFF, 0x80, 0, 0, 0, 0, 0, 0, 0], &[]), 1002),
        // Text.
        (frame(0x81, PINGREQ), 1003),
    ] {
        let [high, low] = status.to_be_bytes();
        let expected = [0x88, 2, high, low];
        assert_eq!(rest(opened(&server), &sent), expected, "before CONNECT: {sent:x?}");
        assert_eq!(rest(connected(&server), &sent), expected, "{sent:x?}");
    }
    for (packet, disconnect, status) in [
        (&b"\xf1\x00"[..], &b"\x82\x03\xe0\x01\x81"[..], 1007_u16),
        (CONNECT, b"\x82\x03\xe0\x01\x82", 1002),
        (b"\x30\xff\x7f\x00\x01t", b"\x82\x03\xe0\x01\x95", 1009),
        (b"\xe0\x00", b"", 1000),
    ] {
        let close = [&[0x88, 2], &status.to_be_bytes()[..]].concat();
        let got = rest(connected(&server), &frame(0x82, packet));
        assert_eq!(got, [disconnect, &close].concat(), "{packet:x?}");
    }
    // In place of a CONNECT.
    for (packet, status) in [(PINGREQ, 1002_u16), (b"\x10\xff\x7f\x00\x04MQTT\x05", 1009)] {
        let close = [&[0x88, 2], &status.to_be_bytes()[..]].concat();
        let got = rest(opened(&server), &frame(0x82, packet));
        assert!(got.ends_with(&close), "{packet:x?}: {got:x?}");
    }
}

/// The failure: a request of HTTP/1.0, for which there is no upgrade, is answered 101 of HTTP/1.1.
#[test]
fn a_request_of_http_1_0_is_not_upgraded() {
    let server = Server::start_with(&[], "");
    let answer = rest(from_host(1, server.ports.ws), request("1.0").as_bytes());
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.starts_with("HTTP/1.1 426 "), "{answer}");
}
