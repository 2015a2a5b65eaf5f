//! MQTT 5 properties (section 2.2.2): one reader for all packets, and what writes them.
//!
//! The reader checks what holds in every packet: known identifiers, value ranges, no duplicates. Which
//! properties a packet may have is the `match` of that packet's decoder.

use super::{
    DecodeError,
    primitive::{MAX_VARINT, Reader, put_binary, put_str, put_varint},
};

/// Property identifiers.
pub(super) mod id {
    pub(crate) const PAYLOAD_FORMAT: u8 = 0x01;
    pub(crate) const MESSAGE_EXPIRY: u8 = 0x02;
    pub(crate) const CONTENT_TYPE: u8 = 0x03;
    pub(crate) const RESPONSE_TOPIC: u8 = 0x08;
    pub(crate) const CORRELATION_DATA: u8 = 0x09;
    pub(crate) const SUBSCRIPTION_ID: u8 = 0x0B;
    pub(crate) const SESSION_EXPIRY: u8 = 0x11;
    pub(crate) const ASSIGNED_CLIENT_ID: u8 = 0x12;
    pub(crate) const SERVER_KEEP_ALIVE: u8 = 0x13;
    pub(crate) const AUTH_METHOD: u8 = 0x15;
    pub(crate) const AUTH_DATA: u8 = 0x16;
    pub(crate) const REQUEST_PROBLEM_INFORMATION: u8 = 0x17;
    pub(crate) const WILL_DELAY: u8 = 0x18;
    pub(crate) const REQUEST_RESPONSE_INFORMATION: u8 = 0x19;
    pub(crate) const RESPONSE_INFORMATION: u8 = 0x1A;
    pub(crate) const SERVER_REFERENCE: u8 = 0x1C;
    pub(crate) const REASON_STRING: u8 = 0x1F;
    pub(crate) const RECEIVE_MAXIMUM: u8 = 0x21;
    pub(crate) const TOPIC_ALIAS_MAXIMUM: u8 = 0x22;
    pub(crate) const TOPIC_ALIAS: u8 = 0x23;
    pub(crate) const MAXIMUM_QOS: u8 = 0x24;
    pub(crate) const RETAIN_AVAILABLE: u8 = 0x25;
    pub(crate) const USER: u8 = 0x26;
    pub(crate) const MAXIMUM_PACKET_SIZE: u8 = 0x27;
    pub(crate) const WILDCARD_AVAILABLE: u8 = 0x28;
    pub(crate) const SUBSCRIPTION_ID_AVAILABLE: u8 = 0x29;
    pub(crate) const SHARED_AVAILABLE: u8 = 0x2A;
}

/// One property as received, its value checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Property<'a> {
    PayloadFormat(u8),
    MessageExpiry(u32),
    ContentType(&'a str),
    ResponseTopic(&'a str),
    CorrelationData(&'a [u8]),
    SubscriptionId(u32),
    SessionExpiry(u32),
    AssignedClientId(&'a str),
    ServerKeepAlive(u16),
    AuthMethod(&'a str),
    AuthData(&'a [u8]),
    RequestProblemInformation(bool),
    WillDelay(u32),
    RequestResponseInformation(bool),
    ResponseInformation(&'a str),
    ServerReference(&'a str),
    ReasonString(&'a str),
    ReceiveMaximum(u16),
    TopicAliasMaximum(u16),
    TopicAlias(u16),
    MaximumQos(u8),
    RetainAvailable(bool),
    User(&'a str, &'a str),
    MaximumPacketSize(u32),
    WildcardAvailable(bool),
    SubscriptionIdAvailable(bool),
    SharedAvailable(bool),
}

/// A property where its packet has none such (section 2.2.2.2).
pub(super) const NOT_ALLOWED: DecodeError = DecodeError::Malformed("property not allowed in this packet");

/// The properties of one packet, in order.
#[derive(Debug)]
pub(super) struct PropertyReader<'a> {
    reader: Reader<'a>,
    /// Bit n: property n has been seen.
    seen: u64,
    /// Bit n: property n may be there more than once.
    repeatable: u64,
}

impl<'a> PropertyReader<'a> {
    /// Takes Property Length and the properties off `reader`.
    #[inline]
    pub(super) fn new(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        let len = reader.varint()?;
        let bytes = reader.take(len as usize)?;
        Ok(Self { reader: Reader::new(bytes), seen: 0, repeatable: 1 << id::USER })
    }

    /// The same for PUBLISH, which may have several subscription identifiers.
    #[inline]
    pub(super) fn of_publish(reader: &mut Reader<'a>) -> Result<Self, DecodeError> {
        let mut properties = Self::new(reader)?;
        properties.repeatable |= 1 << id::SUBSCRIPTION_ID;
        Ok(properties)
    }

    /// The next property; `Ok(None)` at the end.
    #[inline]
    pub(super) fn next(&mut self) -> Result<Option<Property<'a>>, DecodeError> {
        if self.reader.is_empty() {
            return Ok(None);
        }
        self.read().map(Some)
    }

    fn read(&mut self) -> Result<Property<'a>, DecodeError> {
        // The identifier is a variable byte integer, but all that exist take one byte.
        let id = self.reader.u8()?;
        let property = read_value(id, &mut self.reader)?;
        let bit = 1 << id;
        if self.seen & bit & !self.repeatable != 0 {
            return Err(DecodeError::Protocol("property included more than once"));
        }
        self.seen |= bit;
        Ok(property)
    }
}

fn read_value<'a>(id: u8, reader: &mut Reader<'a>) -> Result<Property<'a>, DecodeError> {
    Ok(match id {
        id::PAYLOAD_FORMAT => Property::PayloadFormat(flag(reader)?.into()),
        id::MESSAGE_EXPIRY => Property::MessageExpiry(reader.u32()?),
        // [MQTT-3.3.2-19]
        id::CONTENT_TYPE => Property::ContentType(reader.str()?),
        id::RESPONSE_TOPIC => Property::ResponseTopic(response_topic(reader)?),
        id::CORRELATION_DATA => Property::CorrelationData(reader.binary()?),
        id::SUBSCRIPTION_ID => match reader.varint()? {
            0 => return Err(DecodeError::Protocol("subscription identifier 0")),
            value => Property::SubscriptionId(value),
        },
        id::SESSION_EXPIRY => Property::SessionExpiry(reader.u32()?),
        id::ASSIGNED_CLIENT_ID => Property::AssignedClientId(reader.str()?),
        id::SERVER_KEEP_ALIVE => Property::ServerKeepAlive(reader.u16()?),
        id::AUTH_METHOD => Property::AuthMethod(reader.str()?),
        id::AUTH_DATA => Property::AuthData(reader.binary()?),
        id::REQUEST_PROBLEM_INFORMATION => Property::RequestProblemInformation(flag(reader)?),
        id::WILL_DELAY => Property::WillDelay(reader.u32()?),
        id::REQUEST_RESPONSE_INFORMATION => Property::RequestResponseInformation(flag(reader)?),
        id::RESPONSE_INFORMATION => Property::ResponseInformation(reader.str()?),
        id::SERVER_REFERENCE => Property::ServerReference(reader.str()?),
        id::REASON_STRING => Property::ReasonString(reader.str()?),
        id::RECEIVE_MAXIMUM => match reader.u16()? {
            0 => return Err(DecodeError::Protocol("receive maximum 0")),
            value => Property::ReceiveMaximum(value),
        },
        id::TOPIC_ALIAS_MAXIMUM => Property::TopicAliasMaximum(reader.u16()?),
        id::TOPIC_ALIAS => match reader.u16()? {
            0 => return Err(DecodeError::TopicAlias),
            value => Property::TopicAlias(value),
        },
        id::MAXIMUM_QOS => Property::MaximumQos(flag(reader)?.into()),
        id::RETAIN_AVAILABLE => Property::RetainAvailable(flag(reader)?),
        // [MQTT-1.5.7-1]
        id::USER => Property::User(reader.str()?, reader.str()?),
        id::MAXIMUM_PACKET_SIZE => match reader.u32()? {
            0 => return Err(DecodeError::Protocol("maximum packet size 0")),
            value => Property::MaximumPacketSize(value),
        },
        id::WILDCARD_AVAILABLE => Property::WildcardAvailable(flag(reader)?),
        id::SUBSCRIPTION_ID_AVAILABLE => Property::SubscriptionIdAvailable(flag(reader)?),
        id::SHARED_AVAILABLE => Property::SharedAvailable(flag(reader)?),
        _ => return Err(DecodeError::Malformed("unknown property")),
    })
}

/// A byte that may be 0 or 1 only.
fn flag(reader: &mut Reader<'_>) -> Result<bool, DecodeError> {
    match reader.u8()? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(DecodeError::Protocol("property value neither 0 nor 1")),
    }
}

fn response_topic<'a>(reader: &mut Reader<'a>) -> Result<&'a str, DecodeError> {
    // [MQTT-3.3.2-13]
    let topic = reader.topic()?;
    if topic.is_empty() {
        return Err(DecodeError::Malformed("empty response topic [MQTT-4.7.3-1]"));
    }
    Ok(topic)
}

pub(super) fn put_byte(id: u8, value: Option<u8>, out: &mut Vec<u8>) {
    if let Some(value) = value {
        out.extend_from_slice(&[id, value]);
    }
}

pub(super) fn put_u16(id: u8, value: Option<u16>, out: &mut Vec<u8>) {
    if let Some(value) = value {
        out.push(id);
        out.extend_from_slice(&value.to_be_bytes());
    }
}

pub(super) fn put_u32(id: u8, value: Option<u32>, out: &mut Vec<u8>) {
    if let Some(value) = value {
        out.push(id);
        out.extend_from_slice(&value.to_be_bytes());
    }
}

pub(super) fn put_text(id: u8, value: Option<&str>, out: &mut Vec<u8>) {
    if let Some(value) = value {
        out.push(id);
        put_str(value, out);
    }
}

pub(super) fn put_data(id: u8, value: Option<&[u8]>, out: &mut Vec<u8>) {
    if let Some(value) = value {
        out.push(id);
        put_binary(value, out);
    }
}

pub(super) fn put_user(user: &[(String, String)], out: &mut Vec<u8>) {
    for (name, value) in user {
        out.push(id::USER);
        put_str(name, out);
        put_str(value, out);
    }
}

pub(super) fn put_subscription_id(value: u32, out: &mut Vec<u8>) {
    out.push(id::SUBSCRIPTION_ID);
    put_varint(usize::try_from(value).unwrap_or(MAX_VARINT), out);
}
