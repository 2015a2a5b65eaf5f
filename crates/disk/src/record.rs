//! Records of latest values; see `fields` for what all records have in common.

use std::sync::Arc;

use bytes::Bytes;
use gateway_core::{ClientId, QoS, Timestamp};

use store::LatestValue;
use store::encoding::fields::{self, Input, decode_properties, encode_properties, open, put_bytes, seal};

/// Set beside the QoS in its byte; older records never have it.
const RETAIN: u8 = 0x80;

/// The fixed beginning of a value's record, and its names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ValueHead<'a> {
    pub(super) version: u64,
    pub(super) device: &'a str,
    pub(super) topic: &'a str,
}

/// Writes the record of `value` into `out`, which is cleared first.
pub(super) fn encode_value(value: &LatestValue, out: &mut Vec<u8>) {
    begin_value(out, value.version, value.device.as_str(), &value.topic);
    out.push(value.qos as u8 | if value.retain { RETAIN } else { 0 });
    out.extend_from_slice(&value.received.0.to_le_bytes());
    encode_properties(value.properties.as_deref(), out);
    out.extend_from_slice(&value.payload);
    seal(out);
}

/// Reads a value's record.
pub(super) fn decode_value(record: &[u8]) -> Option<LatestValue> {
    let mut input = open(record)?;
    let head = read_head(&mut input)?;
    let bits = input.u8()?;
    let qos = QoS::from_bits(bits & !RETAIN)?;
    let received = Timestamp(input.u64()?);
    let properties = decode_properties(&mut input)?;
    Some(LatestValue {
        device: ClientId::new(head.device),
        topic: Arc::from(head.topic),
        payload: Bytes::copy_from_slice(input.0),
        qos,
        retain: bits & RETAIN != 0,
        properties: properties.map(Arc::new),
        received,
        version: head.version,
        server: None,
    })
}

/// Writes into `out` that `device` has the newest value of `topic`.
pub(super) fn encode_newest(version: u64, device: &str, topic: &str, out: &mut Vec<u8>) {
    begin_value(out, version, device, topic);
    seal(out);
}

/// Version and names of a record of either kind.
pub(super) fn decode_head(record: &[u8]) -> Option<ValueHead<'_>> {
    read_head(&mut open(record)?)
}

fn begin_value(out: &mut Vec<u8>, version: u64, device: &str, topic: &str) {
    fields::begin(out);
    out.extend_from_slice(&version.to_le_bytes());
    put_bytes(out, device.as_bytes());
    put_bytes(out, topic.as_bytes());
}

fn read_head<'a>(input: &mut Input<'a>) -> Option<ValueHead<'a>> {
    Some(ValueHead { version: input.u64()?, device: input.text()?, topic: input.text()? })
}
