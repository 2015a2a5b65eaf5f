//! Hand-written protobuf encoding of what a member of a group gets by the million: a `ConsumedMessage` inside an item of
//! `ConsumeResponse`. Tests decode the result with the generated types.

use gateway_core::{Message, Partition, Timestamp};

use super::encode::{
    EncodedMessage, EncodedTime, delimited, number, number_len, text, text_len, varint, varint_len,
};

/// Field 1 of `ConsumeResponse`, the repeated items.
const ITEMS: u8 = delimited(1);
/// Field 2 of `ConsumeItem`, the message.
const MESSAGE: u8 = delimited(2);

/// Length of a message's id.
const ID_BYTES: usize = 16 + 1 + 2 + 1 + 16;

/// Names a message for ever: the log, the partition and the place in it, in hexadecimal digits.
#[derive(Debug, Clone, Copy)]
pub struct MessageId([u8; ID_BYTES]);

impl MessageId {
    pub fn new(log: u64, partition: Partition, offset: u64) -> Self {
        let mut text = [b'-'; ID_BYTES];
        hex(&mut text[..16], log);
        hex(&mut text[17..19], u64::from(partition.0));
        hex(&mut text[20..], offset);
        Self(text)
    }

    /// The log, the partition and the place that a text names; `None` if it is not the name of a message.
    pub fn parse(text: &str) -> Option<(u64, Partition, u64)> {
        let digits = |text: &str| {
            let is_own = text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
            is_own.then(|| u64::from_str_radix(text, 16).ok()).flatten()
        };
        let mut parts = (text.len() == ID_BYTES).then(|| text.split('-'))?;
        let (log, partition, offset) = (parts.next()?, parts.next()?, parts.next()?);
        if (log.len(), partition.len(), offset.len()) != (16, 2, 16) || parts.next().is_some() {
            return None;
        }
        let partition = Partition(u8::try_from(digits(partition)?).ok()?);
        Some((digits(log)?, partition, digits(offset)?))
    }

    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap_or_default()
    }
}

fn hex(out: &mut [u8], value: u64) {
    let digits = out.len();
    for (at, byte) in out.iter_mut().enumerate() {
        let digit = (value >> (4 * (digits - 1 - at)) & 15) as u8;
        *byte = if digit < 10 { b'0' + digit } else { b'a' + digit - 10 };
    }
}

/// Content of a delivery.
pub enum DeliveryContent<'a> {
    Message(&'a Message<'a>),
    /// An event, encoded.
    Event(&'a [u8]),
}

/// A delivery on a stream.
pub struct Consumed<'a> {
    pub delivery_id: u64,
    pub attempt: u32,
    pub deadline: Timestamp,
    pub id: MessageId,
    pub content: DeliveryContent<'a>,
}

impl Consumed<'_> {
    /// Appends `{ message }` of `ConsumeResponse`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let received = match self.content {
            DeliveryContent::Message(message) => Ok(EncodedMessage::new(message, true)),
            DeliveryContent::Event(event) => Err(event),
        };
        let deadline = EncodedTime::new(self.deadline);
        let len = number_len(self.delivery_id)
            + number_len(u64::from(self.attempt))
            + 2
            + deadline.len
            + text_len(ID_BYTES)
            + received.as_ref().map_or_else(
                |event| 1 + varint_len(event.len() as u64) + event.len(),
                EncodedMessage::field_len,
            );
        let item = 1 + varint_len(len as u64) + len;
        out.reserve(item + 12);
        out.push(ITEMS);
        varint(out, item as u64);
        out.push(MESSAGE);
        varint(out, len as u64);
        out.push(number(1));
        varint(out, self.delivery_id);
        out.push(number(3));
        varint(out, u64::from(self.attempt));
        deadline.put(out, 4);
        text(out, 5, &self.id.0);
        match received {
            Ok(received) => received.put(out, 6),
            // Also an empty one: it says which of the two this is.
            Err(event) => {
                out.push(delimited(7));
                varint(out, event.len() as u64);
                out.extend_from_slice(event);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use gateway_core::{ClientId, Origin, OriginKind, Properties, QoS, clock};
    use prost::Message as _;

    use super::*;
    use crate::answers;
    use gateway_api::gateway::v1;

    #[test]
    fn the_name_of_a_message_is_read_back_and_other_texts_are_none() {
        let id = MessageId::new(0xab, Partition(0x3f), u64::MAX);
        assert_eq!(MessageId::parse(id.as_str()), Some((0xab, Partition(0x3f), u64::MAX)));
        let shifted = "00000000000000a-b3f-00000000000000012";
        let long = format!("{}0", id.as_str());
        for text in ["", "é", &"-".repeat(ID_BYTES), &"+".repeat(ID_BYTES), shifted, &long] {
            assert_eq!(MessageId::parse(text), None, "{text}");
        }
    }

    #[test]
    fn hand_encoded_deliveries_decode_as_the_generated_types() {
        let device = ClientId::new("dev-1");
        let origin = Origin { kind: OriginKind::Device, client_id: Some(&device), slot: 3 };
        let properties =
            Arc::new(Properties { content_type: Some("text/plain".into()), ..Properties::default() });
        for (size, delivery_id) in [(0, 1), (100, 127), (256, 128), (20_000, u64::MAX)] {
            let payload = vec![7; size];
            let mut message = Message::new("t/1", &payload, Timestamp(10_050), origin);
            message.qos = QoS::AtLeastOnce;
            message.properties = (size > 0).then_some(&properties);
            let id = MessageId::new(0xab, Partition(0x3f), 0x1234);
            let deadline = Timestamp(40_000);
            let mut out = Vec::new();
            for attempt in [1, 300] {
                Consumed { delivery_id, attempt, deadline, id, content: DeliveryContent::Message(&message) }
                    .encode(&mut out);
            }
            let decoded = v1::ConsumeResponse::decode(&out[..]).unwrap();
            assert_eq!(decoded.encode_to_vec(), out, "the canonical encoding");
            let [_, v1::ConsumeItem { item: Some(v1::consume_item::Item::Message(got)) }] =
                &decoded.items[..]
            else {
                panic!("{decoded:?}")
            };
            assert_eq!((got.delivery_id, got.attempt, got.ack_id.as_str()), (delivery_id, 300, ""));
            assert_eq!(got.message_id, "00000000000000ab-3f-0000000000001234");
            assert_eq!(got.message_id, id.as_str());
            assert_eq!(got.ack_deadline_time, Some(answers::time(clock::to_wall(deadline))));
            let Some(v1::consumed_message::Content::Message(received)) = &got.content else {
                panic!("{got:?}")
            };
            assert_eq!((received.device_id.as_str(), received.payload.len()), ("dev-1", size));
        }
    }
}
