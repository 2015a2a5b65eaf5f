//! Hand-written protobuf encoding of the two messages sent by the million: `ReceivedMessage` (or
//! `LatestValue`, which shares its field numbers) inside a stream item, and the precedent's `PublishedPacket`.
//!
//! One pass for the length, one for the bytes, no intermediate struct. Tests decode the result with the
//! generated types.

use gateway_core::clock;
use gateway_core::{Message, OriginKind, Timestamp};
use prost::Message as _;

use super::answers;
use gateway_api::gateway::v1;

/// Tag of a length-delimited field below 16.
pub(crate) const fn delimited(field: u8) -> u8 {
    field << 3 | 2
}

/// Tag of a varint field below 16.
pub const fn number(field: u8) -> u8 {
    field << 3
}

/// Field 1 of `SubscribeResponse` and `WatchLatestResponse`: the repeated items.
const ITEMS: u8 = delimited(1);

/// Form of a message in a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamForm {
    /// `SubscribeItem { message }`.
    Item,
    /// `WatchLatestItem { value }`.
    Latest,
    /// `PublishedPacket`, preceded by its length as a little-endian u32 (each is a gRPC message of its own).
    Packet,
}

/// Appends `message` to `out`.
pub fn message(out: &mut Vec<u8>, form: StreamForm, message: &Message<'_>) {
    let device = message.origin.client_id.map_or("", |id| id.as_str());
    if form == StreamForm::Packet {
        let base = text_len(device.len()) + text_len(message.topic.len()) + text_len(message.payload.len());
        out.reserve(base + 4);
        out.extend_from_slice(&u32::try_from(base).unwrap_or(u32::MAX).to_le_bytes());
        text(out, 1, device.as_bytes());
        text(out, 2, message.topic.as_bytes());
        text(out, 3, message.payload);
        return;
    }
    let received = EncodedMessage::new(message, form == StreamForm::Item);
    let item = 1 + varint_len(received.len as u64) + received.len;
    out.reserve(item + 12);
    out.push(ITEMS);
    varint(out, item as u64);
    received.put(out, 1);
}

/// A `ReceivedMessage`, or a `LatestValue`, of which the length is known.
pub(crate) struct EncodedMessage<'a> {
    message: &'a Message<'a>,
    whole: bool,
    properties: Option<v1::Properties>,
    properties_len: usize,
    expires: Option<u32>,
    time: EncodedTime,
    len: usize,
}

impl<'a> EncodedMessage<'a> {
    /// `whole` with what a latest value has not.
    pub(crate) fn new(message: &'a Message<'a>, whole: bool) -> Self {
        let device = message.origin.client_id.map_or("", |id| id.as_str());
        let properties = message.properties.map(|p| answers::properties_to_proto(p));
        let properties_len = properties.as_ref().map_or(0, prost::Message::encoded_len);
        let expires = message.expires.filter(|_| whole).map(|at| message.received.secs_until(at));
        let time = EncodedTime::new(message.received);

        let mut len =
            text_len(device.len()) + text_len(message.topic.len()) + text_len(message.payload.len());
        len += 2; // qos: always set, below 128
        len += usize::from(message.retain) * 2;
        len += properties.as_ref().map_or(0, |_| 1 + varint_len(properties_len as u64) + properties_len);
        len += 2 + time.len; // always below 128
        len += expires.map_or(0, |seconds| 1 + varint_len(u64::from(seconds)));
        len += usize::from(whole) * 2; // origin
        Self { message, whole, properties, properties_len, expires, time, len }
    }

    /// Bytes that [`Self::put`] appends for a field below 16.
    pub(crate) fn field_len(&self) -> usize {
        1 + varint_len(self.len as u64) + self.len
    }

    /// Appends it as a field below 16.
    pub(crate) fn put(&self, out: &mut Vec<u8>, field: u8) {
        let Self { message, .. } = self;
        let device = message.origin.client_id.map_or("", |id| id.as_str());
        out.push(delimited(field));
        varint(out, self.len as u64);
        text(out, 1, device.as_bytes());
        text(out, 2, message.topic.as_bytes());
        text(out, 3, message.payload);
        out.extend_from_slice(&[number(4), message.qos as u8 + 1]);
        if message.retain {
            out.extend_from_slice(&[number(5), 1]);
        }
        if let Some(properties) = &self.properties {
            out.push(delimited(6));
            varint(out, self.properties_len as u64);
            properties.encode_raw(out);
        }
        self.time.put(out, 7);
        if let Some(seconds) = self.expires {
            out.push(number(8));
            varint(out, u64::from(seconds));
        }
        if self.whole {
            out.extend_from_slice(&[number(9), origin(message.origin.kind) as u8]);
        }
    }
}

/// A point in time as the wall clock shows it, of which the length is known: below 128.
pub(crate) struct EncodedTime {
    seconds: u64,
    nanos: u64,
    pub len: usize,
}

impl EncodedTime {
    pub(crate) fn new(at: Timestamp) -> Self {
        let at = clock::to_wall(at);
        let (seconds, nanos) = (at.0 / 1_000, at.0 % 1_000 * 1_000_000);
        Self { seconds, nanos, len: number_len(seconds) + number_len(nanos) }
    }

    /// Appends it as a field below 16.
    pub(crate) fn put(&self, out: &mut Vec<u8>, field: u8) {
        out.extend_from_slice(&[delimited(field), self.len as u8]);
        for (field, value) in [(1, self.seconds), (2, self.nanos)] {
            if value > 0 {
                out.push(number(field));
                varint(out, value);
            }
        }
    }
}

/// Most bytes that the gaps in front of a message take.
pub const GAPS_BOUND: usize = 80;

/// An upper bound of what [`message`] appends, gaps in front of it included.
pub fn size_bound(message: &Message<'_>) -> usize {
    let device = message.origin.client_id.map_or(0, |id| id.as_str().len());
    let properties = message.properties.map_or(0, |p| {
        let text = |text: &Option<String>| text.as_ref().map_or(0, String::len);
        let user: usize = p.user.iter().map(|(name, value)| name.len() + value.len() + 24).sum();
        let data = p.correlation_data.as_ref().map_or(0, bytes::Bytes::len);
        text(&p.content_type) + text(&p.response_topic) + data + user + 40
    });
    message.payload.len() + message.topic.len() + device + properties + 64 + GAPS_BOUND
}

/// Appends `{ gap }`. The same bytes serve `SubscribeResponse` and `WatchLatestResponse`.
pub fn gap(out: &mut Vec<u8>, count: u64, reason: v1::GapReason) {
    let gap = v1::Gap { count, reason: reason.into() };
    item(out, v1::subscribe_item::Item::Gap(gap));
}

/// Appends `{ heartbeat }`. The same bytes serve `SubscribeResponse` and `WatchLatestResponse`.
pub fn heartbeat(out: &mut Vec<u8>, at: Timestamp) {
    item(
        out,
        v1::subscribe_item::Item::Heartbeat(v1::Heartbeat { time: Some(answers::time(clock::to_wall(at))) }),
    );
}

/// Appends `WatchLatestItem { removed }`.
pub fn removed(out: &mut Vec<u8>, device: &str, topic: &str) {
    let removed = v1::RemovedValue { device_id: device.to_owned(), topic: topic.to_owned() };
    let item = v1::watch_latest_item::Item::Removed(removed);
    v1::WatchLatestResponse { items: vec![v1::WatchLatestItem { item: Some(item) }] }.encode_raw(out);
}

/// An upper bound of what [`removed`] appends.
pub fn removed_bound(device: &str, topic: &str) -> usize {
    device.len() + topic.len() + 32
}

fn item(out: &mut Vec<u8>, item: v1::subscribe_item::Item) {
    let response = v1::SubscribeResponse { items: vec![v1::SubscribeItem { item: Some(item) }] };
    response.encode_raw(out);
}

/// The proto form of an origin.
pub fn origin(kind: OriginKind) -> v1::Origin {
    match kind {
        OriginKind::Device => v1::Origin::Device,
        OriginKind::Backend => v1::Origin::Backend,
        OriginKind::Server => v1::Origin::Server,
    }
}

/// Length of a string or bytes field; proto3 leaves out what is empty.
pub(crate) fn text_len(len: usize) -> usize {
    if len == 0 { 0 } else { 1 + varint_len(len as u64) + len }
}

pub(crate) fn number_len(value: u64) -> usize {
    if value == 0 { 0 } else { 1 + varint_len(value) }
}

pub fn text(out: &mut Vec<u8>, field: u8, bytes: &[u8]) {
    if !bytes.is_empty() {
        out.push(delimited(field));
        varint(out, bytes.len() as u64);
        out.extend_from_slice(bytes);
    }
}

pub(crate) fn varint_len(value: u64) -> usize {
    prost::encoding::encoded_len_varint(value)
}

pub(crate) fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;
    use gateway_core::{ClientId, Origin, Properties, QoS};
    use prost::Message as _;

    use super::*;
    use crate::convert;

    #[test]
    fn hand_encoded_messages_decode_as_the_generated_types() {
        let device = ClientId::new("dev-1");
        let origin = Origin { kind: OriginKind::Device, client_id: Some(&device), slot: 3 };
        let properties = Arc::new(Properties {
            payload_format: Some(1),
            content_type: Some("text/plain".into()),
            response_topic: None,
            correlation_data: Some(Bytes::from_static(b"\0\x01")),
            user: vec![("a".into(), "1".into()), ("a".into(), String::new())],
        });
        for payload in [0usize, 1, 127, 128, 20_000] {
            let payload = vec![7; payload];
            for (retain, with_properties, expires) in [
                (false, false, None),
                (true, true, Some(Timestamp(11_000))),
                (true, false, Some(Timestamp(1))),
            ] {
                let mut sent = Message::new("t/1", &payload, Timestamp(10_050), origin);
                sent.qos = QoS::ExactlyOnce;
                sent.retain = retain;
                sent.properties = with_properties.then_some(&properties);
                sent.expires = expires;
                let mut out = Vec::new();
                message(&mut out, StreamForm::Item, &sent);
                assert!(out.len() + GAPS_BOUND <= size_bound(&sent));
                gap(&mut out, 5, v1::GapReason::BufferFull);
                heartbeat(&mut out, Timestamp(9));
                let decoded = v1::SubscribeResponse::decode(&out[..]).unwrap();
                assert_eq!(decoded.encode_to_vec(), out, "the canonical encoding");
                assert_eq!(decoded.items.len(), 3);
                let Some(v1::subscribe_item::Item::Message(got)) = &decoded.items[0].item else { panic!() };
                assert_eq!(got.device_id, "dev-1");
                assert_eq!((got.topic.as_str(), got.payload.len()), ("t/1", payload.len()));
                assert_eq!((got.qos(), got.origin()), (v1::Qos::ExactlyOnce, v1::Origin::Device));
                assert_eq!(
                    (got.retain, &got.receive_time),
                    (retain, &Some(answers::time(Timestamp(10_050))))
                );
                let left = expires.map(|at| u32::from(at.0 > 10_050));
                assert_eq!(got.expiry_seconds, left);
                let back = got.properties.clone().map(|p| convert::properties("properties", p).unwrap());
                assert_eq!(back.flatten().as_ref(), sent.properties);

                out.clear();
                message(&mut out, StreamForm::Latest, &sent);
                let decoded = v1::WatchLatestResponse::decode(&out[..]).unwrap();
                assert_eq!(decoded.encode_to_vec(), out);
                let Some(v1::watch_latest_item::Item::Value(got)) = &decoded.items[0].item else { panic!() };
                assert_eq!((got.topic.as_str(), got.payload.len()), ("t/1", payload.len()));
                assert_eq!(got.retain, retain);

                out.clear();
                message(&mut out, StreamForm::Packet, &sent);
                let (length, body) = out.split_at(4);
                assert_eq!(u32::from_le_bytes(length.try_into().unwrap()) as usize, body.len());
                let decoded = gateway_api::rpcserver::PublishedPacket::decode(body).unwrap();
                assert_eq!((decoded.device_id.as_str(), decoded.payload.len()), ("dev-1", payload.len()));
            }
        }
    }
}
