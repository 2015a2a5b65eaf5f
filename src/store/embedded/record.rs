//! Records on disk: a CRC-32 of the rest, a format version, then the fields; numbers little-endian.
//!
//! Whatever the bytes are, decoding returns a value or `None`.

use std::sync::Arc;

use bytes::Bytes;

use crate::{
    store::LatestValue,
    types::{ClientId, Properties, QoS, Timestamp},
};

const FORMAT: u8 = 1;

const PAYLOAD_FORMAT: u8 = 1;
const CONTENT_TYPE: u8 = 2;
const RESPONSE_TOPIC: u8 = 4;
const CORRELATION_DATA: u8 = 8;
const PRESENT: u8 = 16;

/// The fixed beginning of a value's record, and its names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head<'a> {
    pub(super) version: u64,
    pub(super) device: &'a str,
    pub(super) topic: &'a str,
}

/// Writes the record of `value` into `out`, which is cleared first.
pub(super) fn encode_value(value: &LatestValue, out: &mut Vec<u8>) {
    begin(out, value.version, value.device.as_str(), &value.topic);
    out.push(value.qos as u8);
    out.extend_from_slice(&value.received.0.to_le_bytes());
    encode_properties(value.properties.as_deref(), out);
    out.extend_from_slice(&value.payload);
    seal(out);
}

/// Reads a value's record.
pub(super) fn decode_value(record: &[u8]) -> Option<LatestValue> {
    let mut input = open(record)?;
    let head = input.head()?;
    let qos = QoS::from_bits(input.u8()?)?;
    let received = Timestamp(input.u64()?);
    let properties = decode_properties(&mut input)?;
    Some(LatestValue {
        device: ClientId::new(head.device),
        topic: Arc::from(head.topic),
        payload: Bytes::copy_from_slice(input.0),
        qos,
        properties: properties.map(Arc::new),
        received,
        version: head.version,
    })
}

/// Writes into `out` that `device` has the newest value of `topic`.
pub(super) fn encode_newest(version: u64, device: &str, topic: &str, out: &mut Vec<u8>) {
    begin(out, version, device, topic);
    seal(out);
}

/// Version and names of a record of either kind.
pub(super) fn decode_head(record: &[u8]) -> Option<Head<'_>> {
    open(record)?.head()
}

fn begin(out: &mut Vec<u8>, version: u64, device: &str, topic: &str) {
    out.clear();
    out.extend_from_slice(&[0; 4]);
    out.push(FORMAT);
    out.extend_from_slice(&version.to_le_bytes());
    put_bytes(out, device.as_bytes());
    put_bytes(out, topic.as_bytes());
}

fn seal(out: &mut [u8]) {
    let crc = crc32fast::hash(&out[4..]);
    out[..4].copy_from_slice(&crc.to_le_bytes());
}

fn open(record: &[u8]) -> Option<Input<'_>> {
    let mut input = Input(record);
    let crc = input.u32()?;
    let sound = crc == crc32fast::hash(input.0) && input.u8()? == FORMAT;
    sound.then_some(input)
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    // Names and properties come from MQTT packets, whose lengths fit in 32 bits.
    out.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    out.extend_from_slice(bytes);
}

fn encode_properties(properties: Option<&Properties>, out: &mut Vec<u8>) {
    let Some(properties) = properties else { return out.push(0) };
    let mask = out.len();
    out.push(PRESENT);
    if let Some(format) = properties.payload_format {
        out[mask] |= PAYLOAD_FORMAT;
        out.push(format);
    }
    let optional = [
        (CONTENT_TYPE, properties.content_type.as_deref().map(str::as_bytes)),
        (RESPONSE_TOPIC, properties.response_topic.as_deref().map(str::as_bytes)),
        (CORRELATION_DATA, properties.correlation_data.as_deref()),
    ];
    for (bit, bytes) in optional {
        if let Some(bytes) = bytes {
            out[mask] |= bit;
            put_bytes(out, bytes);
        }
    }
    out.extend_from_slice(&(properties.user.len() as u32).to_le_bytes());
    for (name, value) in &properties.user {
        put_bytes(out, name.as_bytes());
        put_bytes(out, value.as_bytes());
    }
}

/// `None` if damaged, `Some(None)` if the value has no properties.
fn decode_properties(input: &mut Input<'_>) -> Option<Option<Properties>> {
    let mask = input.u8()?;
    if mask == 0 {
        return Some(None);
    }
    let mut properties = Properties::default();
    if mask & PAYLOAD_FORMAT != 0 {
        properties.payload_format = Some(input.u8()?);
    }
    if mask & CONTENT_TYPE != 0 {
        properties.content_type = Some(input.text()?.to_owned());
    }
    if mask & RESPONSE_TOPIC != 0 {
        properties.response_topic = Some(input.text()?.to_owned());
    }
    if mask & CORRELATION_DATA != 0 {
        properties.correlation_data = Some(Bytes::copy_from_slice(input.bytes()?));
    }
    for _ in 0..input.u32()? {
        let name = input.text()?.to_owned();
        properties.user.push((name, input.text()?.to_owned()));
    }
    Some(Some(properties))
}

struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(taken)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take(1).map(|b| b[0])
    }

    fn u32(&mut self) -> Option<u32> {
        self.take(4).and_then(|b| b.try_into().ok()).map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take(8).and_then(|b| b.try_into().ok()).map(u64::from_le_bytes)
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = self.u32()? as usize;
        self.take(length)
    }

    fn text(&mut self) -> Option<&'a str> {
        std::str::from_utf8(self.bytes()?).ok()
    }

    fn head(&mut self) -> Option<Head<'a>> {
        Some(Head { version: self.u64()?, device: self.text()?, topic: self.text()? })
    }
}
