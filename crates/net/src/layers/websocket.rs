//! The server side of WebSocket: upgrade answer, incoming frames, outgoing headers.
//!
//! [`super::closing`] has the closing handshake.
//!
//! MQTT packets may span frames and frames may hold several packets [MQTT-6.0.0-2], so payload bytes are
//! passed on as they arrive and no frame is ever buffered. Only binary frames are allowed [MQTT-6.0.0-1].

use edge::door::{Origins, is_this_machine};
use thiserror::Error;
use tungstenite::handshake::derive_accept_key;

use super::closing::{CloseStatus, Closing};
use crate::counters::count;

const LONGEST_REQUEST: usize = 16 << 10;

/// Error with which a WebSocket connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub(crate) enum WebSocketError {
    /// A frame against RFC 6455, or one that MQTT does not allow [MQTT-6.0.0-1], and the status that tells the peer so.
    #[error("websocket frame refused: {0}")]
    Refused(CloseStatus),
    /// The peer sent a close frame.
    #[error("websocket closed by the peer")]
    Closed,
}

/// Result of reading an upgrade request.
pub(crate) enum WebSocketUpgrade {
    /// More bytes are needed.
    Partial,
    /// Answer with these bytes; `Some(len)` bytes of request are then followed by frames, `None` closes.
    Answer(Vec<u8>, Option<usize>),
}

/// Reads the HTTP request at the start of `bytes`; the answer selects subprotocol `mqtt` [MQTT-6.0.0-3].
/// A page of an origin that is not allowed gets 403, and with `this_machine` so does a request for another host.
pub(crate) fn upgrade(bytes: &[u8], path: &str, origins: &Origins, this_machine: bool) -> WebSocketUpgrade {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut request = httparse::Request::new(&mut headers);
    let len = match request.parse(bytes) {
        Ok(httparse::Status::Complete(len)) => len,
        Ok(httparse::Status::Partial) if bytes.len() < LONGEST_REQUEST => return WebSocketUpgrade::Partial,
        _ => return refuse("400 Bad Request"),
    };
    if request.path.map(|target| target.split('?').next().unwrap_or(target)) != Some(path) {
        return refuse("404 Not Found");
    }
    let mut sent = request.headers.iter().filter(|header| header.name.eq_ignore_ascii_case("origin"));
    let origin = sent.next().map(|header| std::str::from_utf8(header.value).unwrap_or_default());
    if !origins.allow(origin, values(&request, "host").next()) || sent.next().is_some() {
        count(|c| c.refused_origin.add(1));
        return refuse("403 Forbidden");
    }
    // A request without a host is no browser's.
    let mut hosts = request.headers.iter().filter(|header| header.name.eq_ignore_ascii_case("host"));
    if this_machine && !hosts.all(|host| std::str::from_utf8(host.value).is_ok_and(is_this_machine)) {
        count(|c| c.refused_host.add(1));
        return refuse("403 Forbidden");
    }
    let has = |name: &str, word: &str| {
        values(&request, name)
            .any(|value| value.split(',').any(|item| item.trim().eq_ignore_ascii_case(word)))
    };
    let key = values(&request, "sec-websocket-key").next();
    let (true, true, Some(key)) =
        (request.method == Some("GET"), has("upgrade", "websocket") && has("connection", "upgrade"), key)
    else {
        return refuse("426 Upgrade Required");
    };
    // HTTP/1.0 knows no upgrade (RFC 9110 section 7.8).
    if request.version != Some(1) || !has("sec-websocket-version", "13") {
        return refuse("426 Upgrade Required");
    }
    let protocol = ["mqtt", "mqttv3.1"].into_iter().find(|name| has("sec-websocket-protocol", name));
    let Some(protocol) = protocol else { return refuse("400 Bad Request") };
    let accept = derive_accept_key(key.as_bytes());
    let answer = format!(
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
         Sec-WebSocket-Accept: {accept}\r\nSec-WebSocket-Protocol: {protocol}\r\n\r\n"
    );
    WebSocketUpgrade::Answer(answer.into_bytes(), Some(len))
}

fn values<'a>(request: &'a httparse::Request<'_, '_>, name: &'a str) -> impl Iterator<Item = &'a str> {
    let named = request.headers.iter().filter(move |header| header.name.eq_ignore_ascii_case(name));
    named.filter_map(|header| std::str::from_utf8(header.value).ok())
}

fn refuse(status: &str) -> WebSocketUpgrade {
    let answer = format!(
        "HTTP/1.1 {status}\r\nSec-WebSocket-Version: 13\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    );
    WebSocketUpgrade::Answer(answer.into_bytes(), None)
}

/// Incoming frames.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    header: [u8; 14],
    have: usize,
    /// Payload bytes still to come, when the header is complete.
    left: u64,
    mask: [u8; 4],
    at: usize,
    opcode: u8,
    in_payload: bool,
    /// A message is being continued.
    fragmented: bool,
    control: Vec<u8>,
    /// Frames that ended since [`Self::take_count`].
    count: usize,
    /// Progress of the closing handshake; ends the connection once.
    pub closing: Closing,
}

impl Frames {
    /// Returns the number of frames that have ended since the last call.
    pub(crate) fn take_count(&mut self) -> usize {
        std::mem::take(&mut self.count)
    }

    /// Appends the payload of `bytes` to `plain`, and answers to pings to `replies`. Nothing is read after an error, for which
    /// [`Self::closing`] then has the last frame to send.
    pub(crate) fn open(
        &mut self,
        bytes: &[u8],
        plain: &mut Vec<u8>,
        replies: &mut Vec<u8>,
    ) -> Result<(), WebSocketError> {
        let opened = self.open_frames(bytes, plain, replies);
        if let Err(WebSocketError::Refused(status)) = opened {
            self.closing.refuse(status);
        }
        opened
    }

    fn open_frames(
        &mut self,
        mut bytes: &[u8],
        plain: &mut Vec<u8>,
        replies: &mut Vec<u8>,
    ) -> Result<(), WebSocketError> {
        while !bytes.is_empty() || (self.in_payload && self.left == 0) {
            if !self.in_payload {
                bytes = self.read_header(bytes)?;
                continue;
            }
            let take = usize::try_from(self.left).unwrap_or(usize::MAX).min(bytes.len());
            let (chunk, rest) = bytes.split_at(take);
            let target = if self.opcode >= 8 { &mut self.control } else { &mut *plain };
            let start = target.len();
            target.extend_from_slice(chunk);
            unmask(&mut target[start..], self.mask, &mut self.at);
            self.left -= take as u64;
            bytes = rest;
            if self.left == 0 {
                self.in_payload = false;
                self.end_frame(replies)?;
            }
        }
        Ok(())
    }

    fn read_header<'a>(&mut self, bytes: &'a [u8]) -> Result<&'a [u8], WebSocketError> {
        let Some((first, rest)) = bytes.split_first() else { return Ok(bytes) };
        self.header[self.have] = *first;
        self.have += 1;
        if self.have < 2 {
            return Ok(rest);
        }
        let short = self.header[1] & 0x7F;
        let masked = self.header[1] & 0x80 != 0;
        let extended = match short {
            126 => 2,
            127 => 8,
            _ => 0,
        };
        if !masked {
            return Err(WebSocketError::Refused(CloseStatus::PROTOCOL_ERROR));
        }
        if self.have < 2 + extended + 4 {
            return Ok(rest);
        }
        self.have = 0;
        let length = &self.header[2..2 + extended];
        self.left = if extended == 0 {
            u64::from(short)
        } else {
            length.iter().fold(0, |n, b| n << 8 | u64::from(*b))
        };
        self.mask.copy_from_slice(&self.header[2 + extended..6 + extended]);
        self.at = 0;
        self.opcode = self.header[0] & 0x0F;
        self.in_payload = true;
        self.check_header()?;
        Ok(rest)
    }

    fn check_header(&mut self) -> Result<(), WebSocketError> {
        let fin = self.header[0] & 0x80 != 0;
        let reserved = self.header[0] & 0x70 != 0;
        let ok = match self.opcode {
            0 => self.fragmented,
            1 | 2 => !self.fragmented,
            8..=10 => fin && self.left <= 125,
            _ => false,
        };
        if reserved || !ok || !self.has_shortest_length() {
            return Err(WebSocketError::Refused(CloseStatus::PROTOCOL_ERROR));
        }
        if self.opcode == 1 {
            return Err(WebSocketError::Refused(CloseStatus::UNSUPPORTED_DATA));
        }
        if self.opcode < 8 {
            self.fragmented = !fin;
        }
        self.control.clear();
        Ok(())
    }

    /// Tells whether the length is in the shortest form that holds it, and below 2^63 (RFC 6455 section 5.2).
    fn has_shortest_length(&self) -> bool {
        match self.header[1] & 0x7F {
            126 => self.left > 125,
            127 => u16::try_from(self.left).is_err() && i64::try_from(self.left).is_ok(),
            _ => true,
        }
    }

    fn end_frame(&mut self, replies: &mut Vec<u8>) -> Result<(), WebSocketError> {
        self.count += 1;
        match self.opcode {
            8 => {
                self.closing.answer(&self.control);
                Err(WebSocketError::Closed)
            }
            9 => {
                replies.push(0x8A);
                replies.push(u8::try_from(self.control.len()).unwrap_or(125));
                replies.append(&mut self.control);
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// Header of one unmasked binary frame of `len` bytes: the bytes and how many count.
pub(crate) fn binary_header(len: usize) -> ([u8; 10], usize) {
    let mut header = [0; 10];
    header[0] = 0x82;
    if let Ok(short) = u8::try_from(len)
        && short < 126
    {
        header[1] = short;
        return (header, 2);
    }
    if let Ok(medium) = u16::try_from(len) {
        header[1] = 126;
        header[2..4].copy_from_slice(&medium.to_be_bytes());
        return (header, 4);
    }
    header[1] = 127;
    header[2..].copy_from_slice(&(len as u64).to_be_bytes());
    (header, 10)
}

fn unmask(bytes: &mut [u8], mask: [u8; 4], at: &mut usize) {
    let mut turned = [0; 8];
    for (place, byte) in turned.iter_mut().enumerate() {
        *byte = mask[(*at + place) % 4];
    }
    let wide = u64::from_ne_bytes(turned);
    let mut chunks = bytes.chunks_exact_mut(8);
    for chunk in &mut chunks {
        if let Ok(word) = <[u8; 8]>::try_from(&*chunk) {
            chunk.copy_from_slice(&(u64::from_ne_bytes(word) ^ wide).to_ne_bytes());
        }
    }
    for (byte, key) in chunks.into_remainder().iter_mut().zip(turned) {
        *byte ^= key;
    }
    *at = (*at + bytes.len()) % 4;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn masked(first: u8, payload: &[u8]) -> Vec<u8> {
        let mask = [1, 2, 3, 4];
        let mut frame = vec![first];
        match payload.len() {
            n @ 0..126 => frame.push(0x80 | n as u8),
            n => {
                frame.push(0x80 | 126);
                frame.extend_from_slice(&(n as u16).to_be_bytes());
            }
        }
        frame.extend_from_slice(&mask);
        frame.extend(payload.iter().enumerate().map(|(i, b)| b ^ mask[i % 4]));
        frame
    }

    #[test]
    fn frames_cut_anywhere_give_the_same_payload() {
        let long: Vec<u8> = (0..1000u32).map(|n| n as u8).collect();
        let mut wire = masked(0x02, b"hello ");
        wire.extend(masked(0x89, b"ping"));
        wire.extend(masked(0x80, b"world"));
        wire.extend(masked(0x82, &[]));
        wire.extend(masked(0x82, &long));
        let mut expected = b"hello world".to_vec();
        expected.extend_from_slice(&long);
        for step in [1, 2, 3, 7, 64, 5000] {
            let (mut frames, mut plain, mut replies) = (Frames::default(), Vec::new(), Vec::new());
            for chunk in wire.chunks(step) {
                frames.open(chunk, &mut plain, &mut replies).expect("valid frames");
            }
            assert_eq!(plain, expected, "step {step}");
            assert_eq!(replies, b"\x8a\x04ping", "step {step}");
        }
    }

    #[test]
    fn text_unmasked_reserved_and_long_control_frames_end_the_connection() {
        let long_ping = masked(0x89, &[0; 126]);
        for bad in [
            &masked(0x81, b"x")[..],
            &[0x82, 0x01, 0x00],
            &masked(0xC2, b"x"),
            &long_ping,
            &masked(0x80, b"x"),
        ] {
            let result = Frames::default().open(bad, &mut Vec::new(), &mut Vec::new());
            assert!(matches!(result, Err(WebSocketError::Refused(_))), "{bad:?}");
        }
        let close = Frames::default().open(&masked(0x88, &[3, 232]), &mut Vec::new(), &mut Vec::new());
        assert_eq!(close, Err(WebSocketError::Closed));
    }

    #[test]
    fn upgrade_needs_path_and_subprotocol() {
        let request = |path: &str, protocol: &str| {
            format!(
                "GET {path} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n\
                 Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\
                 Sec-WebSocket-Protocol: {protocol}\r\n\r\n"
            )
        };
        let origins = Origins::default();
        let answer = |text: &str| match upgrade(text.as_bytes(), "/mqtt", &origins, false) {
            WebSocketUpgrade::Answer(bytes, go) => (String::from_utf8(bytes).unwrap(), go),
            WebSocketUpgrade::Partial => panic!("complete request"),
        };
        let (text, go) = answer(&request("/mqtt", "mqtt"));
        assert!(text.contains("s3pPLMBiTxaQ9kYGzzhZRbK+xOo=") && go.is_some(), "{text}");
        assert!(answer(&request("/other", "mqtt")).0.starts_with("HTTP/1.1 404"));
        assert!(answer(&request("/mqtt", "chat")).0.starts_with("HTTP/1.1 400"));
        assert!(matches!(
            upgrade(b"GET /mqtt HTTP/1.1\r\n", "/mqtt", &origins, false),
            WebSocketUpgrade::Partial
        ));
        let from = |origin: &str| {
            request("/mqtt", "mqtt").replace("Host: x", &format!("Host: x\r\nOrigin: {origin}"))
        };
        assert!(answer(&from("http://x:3000")).1.is_some());
        for origin in ["http://evil", "null", "http://x\r\nOrigin: http://evil", "http://\u{e9}"] {
            let (text, go) = answer(&from(origin));
            assert!(text.starts_with("HTTP/1.1 403") && go.is_none(), "{origin}: {text}");
        }
    }

    /// The failure: a page of a host whose name was pointed to this machine opens a connection here, since Origin and Host agree.
    #[test]
    fn a_host_that_was_pointed_to_this_machine_opens_nothing() {
        let opens = |hosts: &[&[u8]], this_machine| {
            let mut text = b"GET /mqtt HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n".to_vec();
            text.extend(b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n");
            text.extend(b"Sec-WebSocket-Protocol: mqtt\r\n");
            for host in hosts {
                text.extend([b"HOST: ", *host, b"\r\n"].concat());
            }
            text.extend(b"\r\n");
            match upgrade(&text, "/mqtt", &Origins::default(), this_machine) {
                WebSocketUpgrade::Answer(_, go) => go.is_some(),
                WebSocketUpgrade::Partial => panic!("a complete request"),
            }
        };
        let ours: [&[&[u8]]; 5] =
            [&[], &[b"localhost:8083"], &[b"LOCALHOST"], &[b"127.0.0.1:8083"], &[b"[::1]:8083"]];
        for hosts in ours {
            assert!(opens(hosts, true) && opens(hosts, false), "{hosts:?}");
        }
        let others: [&[&[u8]]; 7] = [
            &[b"evil.example:8083"],
            &[b"localhost.evil.example"],
            &[b"192.0.2.1:8083"],
            &[b"[2001:db8::1]:8083"],
            &[b"localhost", b"evil.example"],
            &[b"\xff"],
            &[b""],
        ];
        for hosts in others {
            assert!(!opens(hosts, true) && opens(hosts, false), "{hosts:?}");
        }
    }
}
