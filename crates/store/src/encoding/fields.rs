//! Parts of records on disk: a checksum over all, a format version, then fields; numbers little-endian.
//!
//! Decoding returns a value or `None` for any bytes.

use bytes::Bytes;
use gateway_core::Properties;

/// The format version of all records.
pub const FORMAT: u8 = 1;

/// Bytes before the fields.
pub const HEAD: usize = 5;

const PAYLOAD_FORMAT: u8 = 1;
const CONTENT_TYPE: u8 = 2;
const RESPONSE_TOPIC: u8 = 4;
const CORRELATION_DATA: u8 = 8;
const PRESENT: u8 = 16;

/// Begins a record in `out`, which is cleared.
pub fn begin(out: &mut Vec<u8>) {
    out.clear();
    out.extend_from_slice(&[0; 4]);
    out.push(FORMAT);
}

/// Ends a record: puts its checksum in front.
pub fn seal(out: &mut [u8]) {
    let crc = crc32fast::hash(&out[4..]);
    out[..4].copy_from_slice(&crc.to_le_bytes());
}

/// The fields of a sound record.
pub fn open(record: &[u8]) -> Option<Input<'_>> {
    let mut input = Input(record);
    let crc = input.u32()?;
    let sound = crc == crc32fast::hash(input.0) && input.u8()? == FORMAT;
    sound.then_some(input)
}

/// Adds bytes after their length.
pub fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    // Names and properties come from MQTT packets, whose lengths fit in 32 bits.
    out.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    out.extend_from_slice(bytes);
}

/// Adds a number as [`Input::varint`] reads it.
pub fn put_varint(out: &mut Vec<u8>, mut value: u32) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Adds text as [`Input::short_text`] reads it.
pub fn put_short_text(out: &mut Vec<u8>, text: &str) {
    // Names come from MQTT packets, whose lengths fit in 32 bits.
    put_varint(out, text.len() as u32);
    out.extend_from_slice(text.as_bytes());
}

/// Adds properties.
pub fn encode_properties(properties: Option<&Properties>, out: &mut Vec<u8>) {
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
pub fn decode_properties(input: &mut Input<'_>) -> Option<Option<Properties>> {
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

/// Rest of a record.
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    pub fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(taken)
    }

    pub fn u8(&mut self) -> Option<u8> {
        self.take(1).map(|b| b[0])
    }

    /// A length of at most 32 bits, 7 bits a byte, lowest first.
    pub fn varint(&mut self) -> Option<u32> {
        let mut value = 0u64;
        for shift in [0, 7, 14, 21, 28] {
            let byte = self.u8()?;
            value |= u64::from(byte & 0x7F) << shift;
            if byte & 0x80 == 0 {
                return u32::try_from(value).ok();
            }
        }
        None
    }

    /// A big-endian number of `n` bytes, at most 8.
    pub fn be(&mut self, n: usize) -> Option<u64> {
        Some(self.take(n)?.iter().fold(0, |value, &byte| value << 8 | u64::from(byte)))
    }

    /// Text after its length as [`Self::varint`].
    pub fn short_text(&mut self) -> Option<&'a str> {
        let length = self.varint()?;
        std::str::from_utf8(self.take(length as usize)?).ok()
    }

    pub fn u32(&mut self) -> Option<u32> {
        self.take(4).and_then(|b| b.try_into().ok()).map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Option<u64> {
        self.take(8).and_then(|b| b.try_into().ok()).map(u64::from_le_bytes)
    }

    pub fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = self.u32()? as usize;
        self.take(length)
    }

    pub fn text(&mut self) -> Option<&'a str> {
        std::str::from_utf8(self.bytes()?).ok()
    }
}
