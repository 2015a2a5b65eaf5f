//! Packets that only an attacker sends, and a look at what comes back.

use crate::codec::{packet, put_str, put_varint};

pub const CONNACK: u8 = 2;
pub const SUBACK: u8 = 9;
pub const PINGRESP: u8 = 13;
const DISCONNECT: u8 = 14;

/// A CONNECT with everything that a broker may have to hold for it.
#[derive(Clone, Default)]
pub struct Hello {
    pub id: String,
    pub v5: bool,
    /// Keep the session: clean session 0; v5: expiry 3600 s.
    pub keep: bool,
    /// Topic and payload of the will.
    pub will: Option<(String, Vec<u8>)>,
    /// v5: bytes of user properties, the will's if there is one.
    pub pad: usize,
    /// User name and password.
    pub login: Option<(String, String)>,
}

impl Hello {
    pub fn new(id: String) -> Hello {
        Hello { id, ..Hello::default() }
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut b = Vec::with_capacity(64 + self.pad);
        put_str(&mut b, b"MQTT");
        b.push(if self.v5 { 5 } else { 4 });
        let clean = !self.keep || self.v5;
        let login = if self.login.is_some() { 0xc0 } else { 0 };
        b.push(u8::from(clean) << 1 | u8::from(self.will.is_some()) << 2 | login);
        b.extend_from_slice(&0u16.to_be_bytes());
        if self.v5 {
            let mut properties = if self.will.is_none() { user_properties(self.pad) } else { Vec::new() };
            if self.keep {
                properties.push(0x11);
                properties.extend_from_slice(&3600u32.to_be_bytes());
            }
            put_varint(&mut b, properties.len());
            b.extend_from_slice(&properties);
        }
        put_str(&mut b, self.id.as_bytes());
        if let Some((topic, payload)) = &self.will {
            if self.v5 {
                let properties = user_properties(self.pad);
                put_varint(&mut b, properties.len());
                b.extend_from_slice(&properties);
            }
            put_str(&mut b, topic.as_bytes());
            put_str(&mut b, payload);
        }
        if let Some((user, password)) = &self.login {
            put_str(&mut b, user.as_bytes());
            put_str(&mut b, password.as_bytes());
        }
        let mut out = Vec::with_capacity(b.len() + 5);
        packet(&mut out, 0x10, &b);
        out
    }
}

/// User properties of `bytes` in all, or a few bytes less.
fn user_properties(bytes: usize) -> Vec<u8> {
    const OVERHEAD: usize = 6;
    let mut out = Vec::with_capacity(bytes);
    while bytes.saturating_sub(out.len()) > OVERHEAD {
        let value = vec![b'v'; (bytes - out.len() - OVERHEAD).min(60_000)];
        out.push(0x26);
        put_str(&mut out, b"k");
        put_str(&mut out, &value);
    }
    out
}

/// SUBSCRIBE of 3.1.1, the same QoS for all filters.
pub fn subscribe(out: &mut Vec<u8>, pid: u16, filters: impl IntoIterator<Item = String>, qos: u8) {
    let mut body = pid.to_be_bytes().to_vec();
    for filter in filters {
        put_str(&mut body, filter.as_bytes());
        body.push(qos);
    }
    packet(out, 0x82, &body);
}

/// UNSUBSCRIBE of 3.1.1.
pub fn unsubscribe(out: &mut Vec<u8>, pid: u16, filters: impl IntoIterator<Item = String>) {
    let mut body = pid.to_be_bytes().to_vec();
    for filter in filters {
        put_str(&mut body, filter.as_bytes());
    }
    packet(out, 0xa2, &body);
}

/// PUBLISH of 3.1.1; `pid` counts at QoS 1 and 2.
pub fn publish(out: &mut Vec<u8>, topic: &str, qos: u8, retain: bool, pid: u16, payload: &[u8]) {
    out.push(0x30 | qos << 1 | u8::from(retain));
    put_varint(out, 2 + topic.len() + if qos > 0 { 2 } else { 0 } + payload.len());
    put_str(out, topic.as_bytes());
    if qos > 0 {
        out.extend_from_slice(&pid.to_be_bytes());
    }
    out.extend_from_slice(payload);
}

/// PUBLISH of MQTT 5 at QoS 0 that sets a topic alias.
pub fn publish_alias(out: &mut Vec<u8>, topic: &str, alias: u16) {
    let mut body = Vec::with_capacity(topic.len() + 8);
    put_str(&mut body, topic.as_bytes());
    body.extend_from_slice(&[3, 0x23]);
    body.extend_from_slice(&alias.to_be_bytes());
    packet(out, 0x30, &body);
}

/// The beginning of a PUBLISH at QoS 0 whose rest of `remaining` bytes follows, or does not.
pub fn publish_head(out: &mut Vec<u8>, topic: &str, remaining: usize) {
    out.push(0x30);
    put_varint(out, remaining);
    put_str(out, topic.as_bytes());
}

/// A WebSocket ping frame, masked with zeros.
pub fn ws_ping(out: &mut Vec<u8>, data: &[u8]) {
    out.extend_from_slice(&[0x89, 0x80 | data.len() as u8, 0, 0, 0, 0]);
    out.extend_from_slice(data);
}

/// Counts the packets of a stream by kind without keeping them.
#[derive(Default)]
pub struct Counter {
    state: State,
    first: u8,
    /// First two bytes of the current packet's body.
    begin: [u8; 2],
    begun: usize,
    pub seen: [u64; 16],
    /// Return code of the last CONNACK, reason of the last DISCONNECT.
    pub connack: Option<u8>,
    pub disconnect: Option<u8>,
}

#[derive(Default)]
enum State {
    #[default]
    First,
    Length {
        value: usize,
        shift: u32,
    },
    Body {
        left: usize,
    },
}

impl Counter {
    pub fn feed(&mut self, mut b: &[u8]) {
        while let Some((&byte, rest)) = b.split_first() {
            match &mut self.state {
                State::First => {
                    self.first = byte;
                    self.begun = 0;
                    self.begin = [0; 2];
                    self.state = State::Length { value: 0, shift: 0 };
                    b = rest;
                }
                State::Length { value, shift } => {
                    *value |= usize::from(byte & 0x7f) << *shift;
                    *shift += 7;
                    if byte & 0x80 == 0 || *shift > 21 {
                        let left = *value;
                        self.state = State::Body { left };
                    }
                    b = rest;
                    self.finish();
                }
                State::Body { left } => {
                    let n = b.len().min(*left);
                    for &byte in b.iter().take(n.min(2 - self.begun)) {
                        self.begin[self.begun] = byte;
                        self.begun += 1;
                    }
                    *left -= n;
                    b = &b[n..];
                    self.finish();
                }
            }
        }
    }

    /// Tells whether the bytes so far end with a packet.
    #[cfg(test)]
    pub fn at_boundary(&self) -> bool {
        matches!(self.state, State::First)
    }

    /// Counts the packet if it is whole.
    fn finish(&mut self) {
        if !matches!(self.state, State::Body { left: 0 }) {
            return;
        }
        let kind = self.first >> 4;
        self.seen[usize::from(kind)] += 1;
        match kind {
            CONNACK => self.connack = Some(self.begin[1]),
            DISCONNECT => self.disconnect = Some(self.begin[0]),
            _ => {}
        }
        self.state = State::First;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_counted_whatever_the_pieces() {
        let stream = [&[0x20, 2, 0, 5][..], &[0xd0, 0], &[0x90, 3, 0, 1, 0x80], &[0xe0, 2, 0x97, 0]].concat();
        for size in 1..stream.len() {
            let mut counter = Counter::default();
            stream.chunks(size).for_each(|piece| counter.feed(piece));
            assert_eq!((counter.seen[2], counter.seen[13], counter.seen[9], counter.seen[14]), (1, 1, 1, 1));
            assert_eq!((counter.connack, counter.disconnect), (Some(5), Some(0x97)));
        }
    }

    #[test]
    fn a_will_with_padding_has_the_size_that_was_asked_for() {
        let hello = Hello {
            v5: true,
            will: Some(("w".into(), vec![0; 1000])),
            pad: 200_000,
            ..Hello::new("c".into())
        };
        let bytes = hello.encode();
        assert!((200_900..201_200).contains(&bytes.len()), "{}", bytes.len());
        let (length, at) = crate::codec::get_varint(&bytes[1..]).unwrap().unwrap();
        assert_eq!(bytes.len(), 1 + at + length);
    }
}
