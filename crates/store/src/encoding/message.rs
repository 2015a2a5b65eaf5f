//! Records of messages: what a queue, a will or a retained message is read back from.

use std::sync::Arc;

use bytes::Bytes;
use gateway_core::{ClientId, OriginKind, QoS, SharedMessage, Timestamp};

use super::fields::{self, Input};

const QOS: u8 = 3;
const RETAIN: u8 = 1 << 2;
const KIND: u8 = 3 << 3;
const EXPIRES: u8 = 1 << 5;
const CLIENT_ID: u8 = 1 << 6;
const PROPERTIES: u8 = 1 << 7;

/// Writes a record of `message` into `out`, which is cleared first.
pub fn encode(message: &SharedMessage, out: &mut Vec<u8>) {
    fields::begin(out);
    encode_fields(message, out);
    fields::seal(out);
}

/// Reads a message's record. Its slot is 0 and nobody waits for a receipt.
pub fn decode(record: &[u8]) -> Option<SharedMessage> {
    decode_fields(&mut fields::open(record)?)
}

/// Adds the message to a record that is begun; its payload takes the rest of the record.
pub fn encode_fields(message: &SharedMessage, out: &mut Vec<u8>) {
    let kind = match message.kind {
        OriginKind::Device => 0,
        OriginKind::Backend if message.direct => 3,
        OriginKind::Backend => 1,
        OriginKind::Server => 2,
    };
    let properties = message.properties.as_deref().filter(|properties| !properties.is_empty());
    out.push(
        message.qos as u8
            | if message.retain { RETAIN } else { 0 }
            | kind << 3
            | if message.expires.is_some() { EXPIRES } else { 0 }
            | if message.client_id.is_some() { CLIENT_ID } else { 0 }
            | if properties.is_some() { PROPERTIES } else { 0 },
    );
    put_time(out, message.received);
    if let Some(expires) = message.expires {
        put_time(out, expires);
    }
    fields::put_short_text(out, &message.topic);
    if let Some(client_id) = &message.client_id {
        fields::put_short_text(out, client_id.as_str());
    }
    if properties.is_some() {
        fields::encode_properties(properties, out);
    }
    out.extend_from_slice(&message.payload);
}

/// Reads what [`encode_fields`] wrote.
pub fn decode_fields(input: &mut Input<'_>) -> Option<SharedMessage> {
    let flags = input.u8()?;
    let qos = QoS::from_bits(flags & QOS)?;
    let (kind, direct) = match (flags & KIND) >> 3 {
        0 => (OriginKind::Device, false),
        1 => (OriginKind::Backend, false),
        2 => (OriginKind::Server, false),
        _ => (OriginKind::Backend, true),
    };
    let received = time(input)?;
    let expires = if flags & EXPIRES != 0 { Some(time(input)?) } else { None };
    let topic = Arc::from(input.short_text()?);
    let client_id = if flags & CLIENT_ID != 0 { Some(ClientId::new(input.short_text()?)) } else { None };
    let properties = if flags & PROPERTIES != 0 { fields::decode_properties(input)? } else { None };
    Some(SharedMessage {
        topic,
        payload: Bytes::copy_from_slice(input.0),
        qos,
        retain: flags & RETAIN != 0,
        properties: properties.map(Arc::new),
        expires,
        received,
        kind,
        client_id,
        slot: 0,
        receipt: None,
        direct,
    })
}

/// Decodes the time at which the message was received from bytes that [`encode_fields`] wrote.
pub fn decode_received(input: &mut Input<'_>) -> Option<Timestamp> {
    input.u8()?;
    time(input)
}

/// Six bytes: milliseconds until the year 10,000 and beyond.
const TIME: usize = 6;
const LATEST: u64 = (1 << 48) - 1;

fn put_time(out: &mut Vec<u8>, time: Timestamp) {
    out.extend_from_slice(&time.0.min(LATEST).to_be_bytes()[8 - TIME..]);
}

/// Reads a time; one beyond the last that fits was never to come.
fn time(input: &mut Input<'_>) -> Option<Timestamp> {
    let time = input.be(TIME)?;
    Some(Timestamp(if time == LATEST { u64::MAX } else { time }))
}

#[cfg(test)]
mod tests {
    use gateway_core::Properties;

    use super::*;

    fn message() -> SharedMessage {
        SharedMessage {
            topic: Arc::from("a/b"),
            payload: Bytes::from_static(b"payload"),
            qos: QoS::ExactlyOnce,
            retain: true,
            properties: Some(Arc::new(Properties {
                payload_format: Some(1),
                user: vec![("a".into(), "b".into())],
                ..Properties::default()
            })),
            expires: Some(Timestamp(1_700_000_000_001)),
            received: Timestamp(1_700_000_000_000),
            kind: OriginKind::Device,
            client_id: Some(ClientId::new("device")),
            slot: 0,
            receipt: None,
            direct: false,
        }
    }

    #[test]
    fn a_message_comes_back_as_it_went() {
        let mut record = Vec::new();
        let mut bare = SharedMessage { properties: None, expires: None, client_id: None, ..message() };
        bare.kind = OriginKind::Backend;
        let never = SharedMessage { expires: Some(Timestamp(u64::MAX)), ..message() };
        let direct = SharedMessage { kind: OriginKind::Backend, direct: true, ..message() };
        for message in [message(), bare, never, direct] {
            encode(&message, &mut record);
            assert_eq!(format!("{:?}", decode(&record).unwrap()), format!("{message:?}"));
        }
    }

    #[test]
    fn no_record_makes_the_decoder_panic_and_the_checksum_sees_every_byte() {
        let mut record = Vec::new();
        encode(&message(), &mut record);
        for at in 0..record.len() {
            for flip in [1, 0x80, 0xFF] {
                let mut bytes = record.clone();
                bytes[at] ^= flip;
                assert!(decode(&bytes).is_none(), "byte {at}");
                let _ = decode_fields(&mut Input(&bytes[5..]));
            }
            let _ = decode_fields(&mut Input(&record[5.min(at)..at]));
        }
    }
}
