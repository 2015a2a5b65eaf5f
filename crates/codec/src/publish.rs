//! PUBLISH, the hot path in both directions (section 3.3).

use std::sync::Arc;

use bytes::Bytes;
use gateway_core::{Properties, Protocol, QoS};

use super::{
    DecodeError, Publish,
    primitive::{MAX_VARINT, Reader, binary_len, put_str, put_varint, str_len, varint_len},
    property::{
        NOT_ALLOWED, Property, PropertyReader, id, put_byte, put_data, put_subscription_id, put_text,
        put_u16, put_u32, put_user,
    },
};

const DUP: u8 = 0x08;
const RETAIN: u8 = 0x01;

/// Decodes a PUBLISH that a client sent. `first` is the frame's first byte. It is written in place: to move a packet that has
/// just been written costs more than to decode it.
///
/// # Errors
/// It is malformed or breaks the protocol; what `publish` holds then means nothing.
#[inline]
pub fn decode_publish<'a>(
    first: u8,
    body: &'a [u8],
    protocol: Protocol,
    publish: &mut Publish<'a>,
) -> Result<(), DecodeError> {
    decode_any_publish(first, body, protocol, publish)?;
    if !publish.ids.is_empty() {
        return Err(DecodeError::Protocol("subscription identifier from a client [MQTT-3.3.4-6]"));
    }
    Ok(())
}

/// Decodes a PUBLISH of either direction.
#[inline]
pub(super) fn decode_any_publish<'a>(
    first: u8,
    body: &'a [u8],
    protocol: Protocol,
    publish: &mut Publish<'a>,
) -> Result<(), DecodeError> {
    let dup = first & DUP != 0;
    let Some(qos) = QoS::from_bits(first >> 1 & 3) else {
        return Err(DecodeError::Malformed("PUBLISH with QoS 3 [MQTT-3.3.1-4]"));
    };
    if dup && qos == QoS::AtMostOnce {
        return Err(DecodeError::Malformed("DUP with QoS 0 [MQTT-3.3.1-2]"));
    }
    let mut reader = Reader::new(body);
    // [MQTT-3.3.2-1] [MQTT-3.3.2-2]
    let topic = reader.topic()?;
    // [MQTT-2.2.1-2]: there is no packet id at QoS 0.
    let packet_id = if qos == QoS::AtMostOnce { 0 } else { packet_id(&mut reader)? };
    publish.dup = dup;
    publish.qos = qos;
    publish.retain = first & RETAIN != 0;
    publish.topic = topic;
    publish.packet_id = packet_id;
    publish.alias = None;
    publish.expiry = None;
    publish.ids.clear();
    publish.properties = None;
    if protocol.is_v5() {
        let properties = PropertyReader::of_publish(&mut reader)?;
        read_properties(properties, publish)?;
    }
    if topic.is_empty() && publish.alias.is_none() {
        return Err(no_topic(protocol));
    }
    publish.payload = reader.rest();
    Ok(())
}

/// A packet id, which is never 0 [MQTT-2.2.1-3] [MQTT-2.2.1-4] [MQTT-2.3.1-1].
#[inline]
pub(super) fn packet_id(reader: &mut Reader<'_>) -> Result<u16, DecodeError> {
    match reader.u16()? {
        0 => Err(DecodeError::Protocol("packet id 0 [MQTT-2.2.1-3] [MQTT-2.3.1-1]")),
        id => Ok(id),
    }
}

#[cold]
fn no_topic(protocol: Protocol) -> DecodeError {
    if protocol.is_v5() {
        return DecodeError::Protocol("neither topic nor topic alias (section 3.3.2.1)");
    }
    DecodeError::Malformed("empty topic name [MQTT-4.7.3-1]")
}

#[inline]
fn read_properties<'a>(
    mut properties: PropertyReader<'a>,
    publish: &mut Publish<'a>,
) -> Result<(), DecodeError> {
    let mut travelling: Option<Properties> = None;
    while let Some(property) = properties.next()? {
        match property {
            Property::TopicAlias(alias) => publish.alias = Some(alias),
            Property::MessageExpiry(seconds) => publish.expiry = Some(seconds),
            Property::SubscriptionId(id) => publish.ids.push(id),
            other => set_message_property(other, travelling.get_or_insert_default())?,
        }
    }
    publish.properties = travelling.map(Arc::new);
    Ok(())
}

/// Stores a property that travels with the message; any other is not allowed. For wills too.
pub(super) fn set_message_property(
    property: Property<'_>,
    properties: &mut Properties,
) -> Result<(), DecodeError> {
    match property {
        Property::PayloadFormat(format) => properties.payload_format = Some(format),
        Property::ContentType(text) => properties.content_type = Some(text.to_owned()),
        Property::ResponseTopic(topic) => properties.response_topic = Some(topic.to_owned()),
        Property::CorrelationData(data) => properties.correlation_data = Some(Bytes::copy_from_slice(data)),
        Property::User(name, value) => properties.user.push((name.to_owned(), value.to_owned())),
        _ => return Err(NOT_ALLOWED),
    }
    Ok(())
}

/// Appends the properties that travel with a message, in a fixed order; user properties in theirs
/// [MQTT-3.3.2-18].
pub(super) fn put_message_properties(properties: &Properties, out: &mut Vec<u8>) {
    put_byte(id::PAYLOAD_FORMAT, properties.payload_format, out);
    put_text(id::CONTENT_TYPE, properties.content_type.as_deref(), out);
    put_text(id::RESPONSE_TOPIC, properties.response_topic.as_deref(), out);
    put_data(id::CORRELATION_DATA, properties.correlation_data.as_deref(), out);
    put_user(&properties.user, out);
}

/// A PUBLISH to be written. What the protocol level does not have is left out.
#[derive(Debug, Clone, Copy)]
pub struct PublishFrame<'a> {
    /// Level of the receiver.
    pub protocol: Protocol,
    /// Topic name; empty only with a known alias.
    pub topic: &'a str,
    /// Payload.
    pub payload: &'a [u8],
    /// QoS.
    pub qos: QoS,
    /// DUP, ignored at QoS 0.
    pub dup: bool,
    /// RETAIN.
    pub retain: bool,
    /// Packet id, ignored at QoS 0.
    pub packet_id: u16,
    /// v5: Topic Alias.
    pub alias: Option<u16>,
    /// v5: Message Expiry Interval left, in seconds.
    pub expiry: Option<u32>,
    /// v5: Subscription Identifiers.
    pub ids: &'a [u32],
    /// v5: the properties that travel with the message.
    pub properties: Option<&'a Properties>,
}

impl<'a> PublishFrame<'a> {
    /// Length of the whole frame.
    #[inline]
    pub fn encoded_len(&self) -> usize {
        let body = self.body_len(self.property_len());
        1 + varint_len(body) + body
    }

    /// Appends the frame. Appends nothing if it would be longer than [`super::MAX_FRAME_LEN`].
    #[inline]
    pub fn encode(&self, out: &mut Vec<u8>) {
        let property_len = self.property_len();
        let body = self.body_len(property_len);
        if body > MAX_VARINT {
            return;
        }
        out.reserve(1 + varint_len(body) + body);
        // [MQTT-3.3.1-2]: DUP is 0 at QoS 0.
        let dup = self.dup && self.qos != QoS::AtMostOnce;
        out.push(0x30 | u8::from(dup) << 3 | (self.qos as u8) << 1 | u8::from(self.retain));
        put_varint(body, out);
        put_str(self.topic, out);
        if self.qos != QoS::AtMostOnce {
            out.extend_from_slice(&self.packet_id.to_be_bytes());
        }
        if self.protocol.is_v5() {
            put_varint(property_len, out);
            if property_len != 0 {
                self.put_properties(out);
            }
        }
        out.extend_from_slice(self.payload);
    }

    #[inline]
    fn body_len(&self, property_len: usize) -> usize {
        let id = if self.qos == QoS::AtMostOnce { 0 } else { 2 };
        let properties = if self.protocol.is_v5() { varint_len(property_len) + property_len } else { 0 };
        str_len(self.topic) + id + properties + self.payload.len()
    }

    /// Bytes of the properties without their length; 0 below v5.
    #[inline]
    fn property_len(&self) -> usize {
        if !self.protocol.is_v5() {
            return 0;
        }
        let mut len = if self.alias.is_some() { 3 } else { 0 };
        len += if self.expiry.is_some() { 5 } else { 0 };
        for &id in self.ids {
            len += 1 + varint_len(id as usize);
        }
        len + self.properties.map_or(0, message_properties_len)
    }

    fn put_properties(&self, out: &mut Vec<u8>) {
        put_u16(id::TOPIC_ALIAS, self.alias, out);
        put_u32(id::MESSAGE_EXPIRY, self.expiry, out);
        for &id in self.ids {
            put_subscription_id(id, out);
        }
        if let Some(properties) = self.properties {
            put_message_properties(properties, out);
        }
    }

    /// The frame of a decoded PUBLISH.
    pub fn of(publish: &'a Publish<'_>, protocol: Protocol) -> Self {
        Self {
            protocol,
            topic: publish.topic,
            payload: publish.payload,
            qos: publish.qos,
            dup: publish.dup,
            retain: publish.retain,
            packet_id: publish.packet_id,
            alias: publish.alias,
            expiry: publish.expiry,
            ids: &publish.ids,
            properties: publish.properties.as_deref(),
        }
    }
}

/// Bytes that [`put_message_properties`] appends.
fn message_properties_len(properties: &Properties) -> usize {
    let mut len = if properties.payload_format.is_some() { 2 } else { 0 };
    len += properties.content_type.as_ref().map_or(0, |text| 1 + str_len(text));
    len += properties.response_topic.as_ref().map_or(0, |text| 1 + str_len(text));
    len += properties.correlation_data.as_ref().map_or(0, |data| 1 + binary_len(data));
    for (name, value) in &properties.user {
        len += 1 + str_len(name) + str_len(value);
    }
    len
}
