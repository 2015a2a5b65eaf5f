//! Minimal MQTT 3.1.1 / 5.0 wire codec: only what a load generator needs.
//! Encoders append to a `Vec<u8>`; the decoder borrows from the read buffer.

pub const PUBLISH: u8 = 3;
pub const PUBACK: u8 = 4;
pub const PUBREC: u8 = 5;
pub const PUBREL: u8 = 6;
pub const PUBCOMP: u8 = 7;

/// Bytes of payload that mqload needs to see before it can count a message.
pub const STAMP_LEN: usize = 20;

#[derive(Debug, PartialEq, Eq)]
pub struct ProtoError(pub &'static str);

type Res<T> = Result<T, ProtoError>;

// ---------------------------------------------------------------- encoding

/// Appends an MQTT variable byte integer (remaining length, property length).
pub fn put_varint(out: &mut Vec<u8>, mut n: usize) {
    debug_assert!(n <= 268_435_455);
    loop {
        let b = (n & 0x7f) as u8;
        n >>= 7;
        if n == 0 {
            out.push(b);
            return;
        }
        out.push(b | 0x80);
    }
}

/// Appends a string or binary data with its length.
pub fn put_str(out: &mut Vec<u8>, s: &[u8]) {
    out.extend_from_slice(&(s.len() as u16).to_be_bytes());
    out.extend_from_slice(s);
}

/// Appends a whole packet whose body is built by `body`.
pub fn packet(out: &mut Vec<u8>, first: u8, body: &[u8]) {
    out.push(first);
    put_varint(out, body.len());
    out.extend_from_slice(body);
}

#[derive(Clone, Default, Debug)]
pub struct Connect<'a> {
    pub v5: bool,
    pub client_id: &'a str,
    pub clean: bool,
    pub keepalive: u16,
    pub username: Option<&'a str>,
    pub password: Option<&'a str>,
    /// v5 only: session expiry interval in seconds (0: not sent).
    pub session_expiry: u32,
    /// v5 only: receive maximum (0: not sent, which means 65535).
    pub receive_max: u16,
}

pub fn connect(out: &mut Vec<u8>, c: &Connect) {
    let mut b = Vec::with_capacity(64 + c.client_id.len());
    put_str(&mut b, b"MQTT");
    b.push(if c.v5 { 5 } else { 4 });
    let mut flags = (c.clean as u8) << 1;
    if c.username.is_some() {
        flags |= 0x80;
    }
    if c.password.is_some() {
        flags |= 0x40;
    }
    b.push(flags);
    b.extend_from_slice(&c.keepalive.to_be_bytes());
    if c.v5 {
        let mut p = Vec::new();
        if c.session_expiry > 0 {
            p.push(0x11);
            p.extend_from_slice(&c.session_expiry.to_be_bytes());
        }
        if c.receive_max > 0 {
            p.push(0x21);
            p.extend_from_slice(&c.receive_max.to_be_bytes());
        }
        put_varint(&mut b, p.len());
        b.extend_from_slice(&p);
    }
    put_str(&mut b, c.client_id.as_bytes());
    if let Some(u) = c.username {
        put_str(&mut b, u.as_bytes());
    }
    if let Some(p) = c.password {
        put_str(&mut b, p.as_bytes());
    }
    packet(out, 0x10, &b);
}

/// SUBSCRIBE to all `filters` with the same QoS.
pub fn subscribe(out: &mut Vec<u8>, v5: bool, pid: u16, filters: &[impl AsRef<str>], qos: u8) {
    let mut b = Vec::with_capacity(8 + 40 * filters.len());
    b.extend_from_slice(&pid.to_be_bytes());
    if v5 {
        b.push(0);
    }
    for filter in filters {
        put_str(&mut b, filter.as_ref().as_bytes());
        b.push(qos);
    }
    packet(out, 0x82, &b);
}

/// PUBACK / PUBREC / PUBREL / PUBCOMP with reason "success": the same four
/// bytes in both protocol versions.
#[inline]
pub fn ack(out: &mut Vec<u8>, kind: u8, pid: u16) {
    let first = (kind << 4) | if kind == PUBREL { 2 } else { 0 };
    let p = pid.to_be_bytes();
    out.extend_from_slice(&[first, 2, p[0], p[1]]);
}

pub const PINGREQ: [u8; 2] = [0xc0, 0];

/// A retained message with an empty payload: deletes the topic's retained one.
pub fn clear_retained(out: &mut Vec<u8>, v5: bool, topic: &str) {
    PublishTemplate::new(topic, 0, true, v5, 0).write(out, 0, &Stamp::default(), &[]);
}

/// DISCONNECT; in v5 `end_session` sets the session expiry interval to 0.
pub fn disconnect(out: &mut Vec<u8>, v5: bool, end_session: bool) {
    if v5 && end_session {
        out.extend_from_slice(&[0xe0, 7, 0, 5, 0x11, 0, 0, 0, 0]);
    } else {
        out.extend_from_slice(&[0xe0, 0]);
    }
}

/// Digits at the end of a topic that `PublishTemplate::set_topic_number` fills in.
pub const TOPIC_DIGITS: usize = 7;

/// The constant part of a publisher's PUBLISH packets. Only the packet id and
/// the payload stamp differ from message to message.
pub struct PublishTemplate {
    /// Fixed header and topic.
    head: Vec<u8>,
    qos: u8,
    v5: bool,
    payload_len: usize,
    /// End of the topic in `head`.
    topic_end: usize,
}

impl PublishTemplate {
    pub fn new(topic: &str, qos: u8, retain: bool, v5: bool, payload_len: usize) -> Self {
        let var = 2 + topic.len() + if qos > 0 { 2 } else { 0 } + v5 as usize;
        let mut head = Vec::with_capacity(7 + topic.len());
        head.push((PUBLISH << 4) | (qos << 1) | retain as u8);
        put_varint(&mut head, var + payload_len);
        put_str(&mut head, topic.as_bytes());
        let topic_end = head.len();
        PublishTemplate { head, qos, v5, payload_len, topic_end }
    }

    /// Makes the topic's last `TOPIC_DIGITS` bytes the number `k`.
    pub fn set_topic_number(&mut self, k: u64) {
        let mut left = k;
        for digit in self.head[..self.topic_end].iter_mut().rev().take(TOPIC_DIGITS) {
            *digit = b'0' + (left % 10) as u8;
            left /= 10;
        }
    }

    pub fn wire_len(&self) -> usize {
        self.head.len() + if self.qos > 0 { 2 } else { 0 } + self.v5 as usize + self.payload_len
    }

    /// Appends one message. `filler` must hold at least `payload_len` bytes.
    #[inline]
    pub fn write(&self, out: &mut Vec<u8>, pid: u16, stamp: &Stamp, filler: &[u8]) {
        out.extend_from_slice(&self.head);
        if self.qos > 0 {
            out.extend_from_slice(&pid.to_be_bytes());
        }
        if self.v5 {
            out.push(0);
        }
        if self.payload_len > 0 {
            out.extend_from_slice(&stamp.encode());
            out.extend_from_slice(&filler[..self.payload_len - STAMP_LEN]);
        }
    }
}

/// Stamp at the start of each payload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stamp {
    /// Scheduled (open loop) or sending (closed loop) time, monotonic ns.
    pub ts: u64,
    pub publisher: u32,
    pub seq: u64,
}

impl Stamp {
    #[inline]
    pub fn encode(&self) -> [u8; STAMP_LEN] {
        let mut b = [0; STAMP_LEN];
        b[..8].copy_from_slice(&self.ts.to_le_bytes());
        b[8..12].copy_from_slice(&self.publisher.to_le_bytes());
        b[12..].copy_from_slice(&self.seq.to_le_bytes());
        b
    }

    #[inline]
    pub fn decode(b: &[u8]) -> Option<Stamp> {
        let b = b.first_chunk::<STAMP_LEN>()?;
        Some(Stamp {
            ts: u64::from_le_bytes(b[..8].try_into().ok()?),
            publisher: u32::from_le_bytes(b[8..12].try_into().ok()?),
            seq: u64::from_le_bytes(b[12..].try_into().ok()?),
        })
    }
}

// ---------------------------------------------------------------- decoding

#[derive(Debug, PartialEq, Eq, Clone, Copy)]
pub struct Connack {
    pub session_present: bool,
    pub code: u8,
    /// v5 properties, with their protocol defaults.
    pub receive_max: u16,
    pub max_qos: u8,
    pub max_packet: u32,
    pub retain_available: bool,
}

#[derive(Debug, PartialEq, Eq, Clone, Copy)]
pub struct Publish<'a> {
    pub qos: u8,
    pub dup: bool,
    pub retain: bool,
    /// 0 when QoS 0.
    pub pid: u16,
    pub topic: &'a [u8],
    /// Whole payload, or its available beginning in `Parsed::Partial`.
    pub payload: &'a [u8],
}

#[derive(Debug, PartialEq, Eq)]
pub enum Packet<'a> {
    Connack(Connack),
    Suback { pid: u16, codes: &'a [u8] },
    Publish(Publish<'a>),
    Ack { kind: u8, pid: u16, reason: u8 },
    Pingresp,
    Disconnect { reason: u8 },
}

#[derive(Debug, PartialEq, Eq)]
pub enum Parsed<'a> {
    Incomplete,
    /// A PUBLISH of which the stamp is there, but not yet all of the payload.
    Partial {
        publish: Publish<'a>,
        total: usize,
    },
    Full {
        packet: Packet<'a>,
        total: usize,
    },
}

/// Decodes a variable byte integer: value and number of bytes it took.
#[inline]
pub fn get_varint(b: &[u8]) -> Res<Option<(usize, usize)>> {
    let mut v = 0;
    for i in 0..4 {
        let Some(&x) = b.get(i) else { return Ok(None) };
        v |= ((x & 0x7f) as usize) << (7 * i);
        if x & 0x80 == 0 {
            return Ok(Some((v, i + 1)));
        }
    }
    Err(ProtoError("malformed remaining length"))
}

fn be16(b: &[u8], at: usize) -> Res<u16> {
    match b.get(at..at + 2) {
        Some(x) => Ok(u16::from_be_bytes([x[0], x[1]])),
        None => Err(ProtoError("packet too short")),
    }
}

/// Parses the packet at the beginning of `buf`.
#[inline]
pub fn parse(buf: &[u8], v5: bool) -> Res<Parsed<'_>> {
    if buf.len() < 2 {
        return Ok(Parsed::Incomplete);
    }
    let first = buf[0];
    let Some((rem, len_bytes)) = get_varint(&buf[1..])? else {
        return Ok(Parsed::Incomplete);
    };
    let start = 1 + len_bytes;
    let total = start + rem;
    if first >> 4 == PUBLISH {
        return parse_publish(buf, first, start, total, v5);
    }
    if buf.len() < total {
        return Ok(Parsed::Incomplete);
    }
    let packet = parse_control(first, &buf[start..total], v5)?;
    Ok(Parsed::Full { packet, total })
}

#[inline]
fn parse_publish(buf: &[u8], first: u8, start: usize, total: usize, v5: bool) -> Res<Parsed<'_>> {
    let have = buf.len().min(total);
    let b = &buf[..have];
    let whole = have == total;
    // Short of bytes: wait when more are to come, else the packet is malformed.
    let short = || {
        if whole { Err(ProtoError("PUBLISH too short")) } else { Ok(Parsed::Incomplete) }
    };
    let qos = (first >> 1) & 3;
    if qos == 3 {
        return Err(ProtoError("PUBLISH with QoS 3"));
    }
    let mut at = start;
    let Ok(topic_len) = be16(b, at) else {
        return short();
    };
    at += 2;
    let Some(topic) = b.get(at..at + topic_len as usize) else {
        return short();
    };
    at += topic_len as usize;
    let mut pid = 0;
    if qos > 0 {
        let Ok(p) = be16(b, at) else { return short() };
        if p == 0 {
            return Err(ProtoError("PUBLISH with packet id 0"));
        }
        pid = p;
        at += 2;
    }
    if v5 {
        if at >= have {
            return short();
        }
        match get_varint(&b[at..])? {
            Some((n, k)) => at += n + k,
            None => return short(),
        }
    }
    if at > have {
        return short();
    }
    let payload = &b[at..];
    let publish = Publish { qos, dup: first & 8 != 0, retain: first & 1 != 0, pid, topic, payload };
    if whole {
        Ok(Parsed::Full { packet: Packet::Publish(publish), total })
    } else if payload.len() >= STAMP_LEN {
        Ok(Parsed::Partial { publish, total })
    } else {
        Ok(Parsed::Incomplete)
    }
}

#[inline]
fn parse_control(first: u8, body: &[u8], v5: bool) -> Res<Packet<'_>> {
    Ok(match first >> 4 {
        2 => Packet::Connack(parse_connack(body, v5)?),
        kind @ PUBACK..=PUBCOMP => Packet::Ack {
            kind,
            pid: be16(body, 0)?,
            reason: if v5 { body.get(2).copied().unwrap_or(0) } else { 0 },
        },
        9 => {
            let pid = be16(body, 0)?;
            let mut at = 2;
            if v5 {
                let (n, k) = get_varint(&body[at..])?.ok_or(ProtoError("short SUBACK"))?;
                at += n + k;
            }
            let codes = body.get(at..).ok_or(ProtoError("short SUBACK"))?;
            Packet::Suback { pid, codes }
        }
        13 => Packet::Pingresp,
        14 => Packet::Disconnect { reason: body.first().copied().unwrap_or(0) },
        _ => return Err(ProtoError("unexpected packet type from broker")),
    })
}

fn parse_connack(b: &[u8], v5: bool) -> Res<Connack> {
    if b.len() < 2 {
        return Err(ProtoError("short CONNACK"));
    }
    let mut c = Connack {
        session_present: b[0] & 1 != 0,
        code: b[1],
        receive_max: u16::MAX,
        max_qos: 2,
        max_packet: u32::MAX,
        retain_available: true,
    };
    if !v5 || b.len() == 2 {
        return Ok(c);
    }
    let bad = ProtoError("malformed CONNACK properties");
    let Some((n, k)) = get_varint(&b[2..])? else {
        return Err(bad);
    };
    let mut p = b.get(2 + k..2 + k + n).ok_or(bad)?;
    while let Some((&id, rest)) = p.split_first() {
        let bad = ProtoError("malformed CONNACK properties");
        // Length of the value of each property that a CONNACK may carry.
        let len = match id {
            0x11 | 0x27 => 4,
            0x13 | 0x21 | 0x22 => 2,
            0x24 | 0x25 | 0x28 | 0x29 | 0x2a => 1,
            0x12 | 0x15 | 0x16 | 0x1a | 0x1c | 0x1f => 2 + be16(rest, 0)? as usize,
            0x26 => {
                let key = 2 + be16(rest, 0)? as usize;
                key + 2 + be16(rest, key)? as usize
            }
            _ => return Err(bad),
        };
        let v = rest.get(..len).ok_or(bad)?;
        match id {
            0x21 => c.receive_max = be16(v, 0)?,
            0x24 => c.max_qos = v[0],
            0x25 => c.retain_available = v[0] != 0,
            0x27 => c.max_packet = u32::from_be_bytes([v[0], v[1], v[2], v[3]]),
            _ => {}
        }
        p = &rest[len..];
    }
    if c.receive_max == 0 {
        return Err(ProtoError("receive maximum 0"));
    }
    Ok(c)
}

/// Text for the commonest refusal codes.
pub fn reason_text(v5: bool, code: u8) -> &'static str {
    match (v5, code) {
        (false, 1) => "unacceptable protocol version",
        (false, 2) => "identifier rejected",
        (false, 3) => "server unavailable",
        (false, 4) => "bad user name or password",
        (false, 5) => "not authorized",
        (true, 0x80) => "unspecified error",
        (true, 0x81) => "malformed packet",
        (true, 0x82) => "protocol error",
        (true, 0x84) => "unsupported protocol version",
        (true, 0x85) => "client identifier not valid",
        (true, 0x86) => "bad user name or password",
        (true, 0x87) => "not authorized",
        (true, 0x88) => "server unavailable",
        (true, 0x89) => "server busy",
        (true, 0x8b) => "server shutting down",
        (true, 0x8d) => "keep alive timeout",
        (true, 0x8e) => "session taken over",
        (true, 0x93) => "receive maximum exceeded",
        (true, 0x95) => "packet too large",
        (true, 0x96) => "message rate too high",
        (true, 0x97) => "quota exceeded",
        (true, 0x9b) => "QoS not supported",
        (true, 0x9f) => "connection rate exceeded",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn varint_boundaries() {
        for (n, len) in [
            (0, 1),
            (127, 1),
            (128, 2),
            (16_383, 2),
            (16_384, 3),
            (2_097_151, 3),
            (2_097_152, 4),
            (268_435_455, 4),
        ] {
            let mut b = Vec::new();
            put_varint(&mut b, n);
            assert_eq!(b.len(), len, "{n}");
            assert_eq!(get_varint(&b), Ok(Some((n, len))));
            assert_eq!(get_varint(&b[..len - 1]), Ok(None));
        }
        assert!(get_varint(&[0xff, 0xff, 0xff, 0xff, 1]).is_err());
    }

    #[test]
    fn connect_bytes() {
        let mut b = Vec::new();
        connect(&mut b, &Connect { client_id: "ab", clean: true, keepalive: 60, ..Default::default() });
        assert_eq!(b, b"\x10\x0e\0\x04MQTT\x04\x02\0\x3c\0\x02ab");
        b.clear();
        connect(
            &mut b,
            &Connect {
                v5: true,
                client_id: "ab",
                username: Some("u"),
                password: Some("p"),
                session_expiry: 3600,
                receive_max: 10,
                ..Default::default()
            },
        );
        assert_eq!(b, b"\x10\x1d\0\x04MQTT\x05\xc0\0\0\x08\x11\0\0\x0e\x10\x21\0\x0a\0\x02ab\0\x01u\0\x01p");
    }

    #[test]
    fn subscribe_bytes() {
        let mut b = Vec::new();
        subscribe(&mut b, false, 1, &["a/#"], 1);
        assert_eq!(b, b"\x82\x08\0\x01\0\x03a/#\x01");
        b.clear();
        subscribe(&mut b, true, 1, &["a/#"], 2);
        assert_eq!(b, b"\x82\x09\0\x01\0\0\x03a/#\x02");
        b.clear();
        subscribe(&mut b, false, 2, &["a", "b/+"], 0);
        assert_eq!(b, b"\x82\x0c\0\x02\0\x01a\0\0\x03b/+\0");
    }

    /// Every split of a packet gives Incomplete or Partial, never a wrong packet.
    #[test]
    fn publish_round_trip_all_splits() {
        let filler = vec![b'x'; 70_000];
        for v5 in [false, true] {
            for qos in 0..3 {
                for size in [STAMP_LEN, 21, 100, 200, 16_500] {
                    let t = PublishTemplate::new("p/1", qos, false, v5, size);
                    let st = Stamp { ts: 123_456_789_012, publisher: 7, seq: 1 << 40 };
                    let mut b = Vec::new();
                    t.write(&mut b, 0x1234, &st, &filler);
                    assert_eq!(b.len(), t.wire_len());
                    b.extend_from_slice(&[0xd0, 0]); // a following PINGRESP
                    let total = b.len() - 2;
                    for cut in 0..total.min(300) {
                        match parse(&b[..cut], v5).unwrap() {
                            Parsed::Incomplete => {}
                            Parsed::Partial { publish, total: t } => {
                                assert_eq!(t, total);
                                assert_eq!(Stamp::decode(publish.payload), Some(st));
                            }
                            p => panic!("{p:?}"),
                        }
                    }
                    let Parsed::Full { packet: Packet::Publish(p), total: t } = parse(&b, v5).unwrap() else {
                        panic!()
                    };
                    assert_eq!(t, total);
                    assert_eq!(p.topic, b"p/1");
                    assert_eq!(p.payload.len(), size);
                    assert_eq!(p.qos, qos);
                    assert_eq!(p.pid, if qos > 0 { 0x1234 } else { 0 });
                    assert_eq!(Stamp::decode(p.payload), Some(st));
                    assert_eq!(
                        parse(&b[total..], v5),
                        Ok(Parsed::Full { packet: Packet::Pingresp, total: 2 })
                    );
                }
            }
        }
    }

    #[test]
    fn topic_numbers_change_the_topic_only() {
        let filler = [0; 64];
        let mut t = PublishTemplate::new("p/1/0000000", 1, false, false, STAMP_LEN);
        for (k, topic) in [(0, "p/1/0000000"), (99_123, "p/1/0099123"), (7, "p/1/0000007")] {
            t.set_topic_number(k);
            let mut b = Vec::new();
            t.write(&mut b, 9, &Stamp::default(), &filler);
            let Parsed::Full { packet: Packet::Publish(p), .. } = parse(&b, false).unwrap() else { panic!() };
            assert_eq!(p.topic, topic.as_bytes());
            assert_eq!(p.pid, 9);
        }
    }

    #[test]
    fn publish_with_properties() {
        // v5, topic "t", 3 property bytes, payload "hi"
        let b = b"\x30\x09\0\x01t\x03\x01\x01\x00hi";
        let Parsed::Full { packet: Packet::Publish(p), .. } = parse(b, true).unwrap() else { panic!() };
        assert_eq!(p.payload, b"hi");
    }

    #[test]
    fn malformed_publish() {
        assert!(parse(b"\x30\x01\0", false).is_err());
        assert!(parse(b"\x30\x03\0\x09t", false).is_err());
        assert!(parse(b"\x36\x05\0\x01t\0\x01", false).is_err());
        assert!(parse(b"\x32\x05\0\x01t\0\0", false).is_err());
        // property length reaches past the end of the packet
        assert!(parse(b"\x30\x04\0\x01t\x05", true).is_err());
    }

    #[test]
    fn acks() {
        let mut b = Vec::new();
        ack(&mut b, PUBREL, 0x0102);
        assert_eq!(b, [0x62, 2, 1, 2]);
        let full = |b, v5| match parse(b, v5).unwrap() {
            Parsed::Full { packet, .. } => packet,
            p => panic!("{p:?}"),
        };
        assert_eq!(full(&b, false), Packet::Ack { kind: PUBREL, pid: 0x0102, reason: 0 });
        assert_eq!(full(&[0x40, 4, 0, 1, 0x97, 0], true), Packet::Ack { kind: PUBACK, pid: 1, reason: 0x97 });
    }

    #[test]
    fn connack_properties() {
        let with = |props: &[u8]| {
            let mut b = vec![0, 0];
            put_varint(&mut b, props.len());
            b.extend_from_slice(props);
            parse_connack(&b, true)
        };
        let c = with(b"\x21\0\x14\x22\0\x0a\x27\0\0\x10\0\x24\x01\x25\0\x13\0\x05").unwrap();
        assert_eq!((c.receive_max, c.max_packet, c.max_qos, c.retain_available), (20, 4096, 1, false));
        // User property and assigned client id are skipped.
        let c = with(b"\x26\0\x01k\0\x02vv\x12\0\x02id\x21\0\x05\x2a\0").unwrap();
        assert_eq!(c.receive_max, 5);
        assert!(with(b"\x21\0").is_err());
        assert!(with(b"\x21\0\0").is_err());
        assert!(with(b"\x01\0").is_err());
        let c = parse_connack(b"\x01\x00", false).unwrap();
        assert!(c.session_present && c.receive_max == u16::MAX);
    }

    #[test]
    fn suback_codes() {
        let Parsed::Full { packet, .. } = parse(b"\x90\x04\0\x01\0\x87", true).unwrap() else { panic!() };
        assert_eq!(packet, Packet::Suback { pid: 1, codes: &[0x87] });
        assert!(parse(b"\x90\x03\0\x01\x09", true).is_err());
    }
}
