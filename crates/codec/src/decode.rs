//! Frames to packets: dispatch by type, and all packets but CONNECT and PUBLISH.

use bytes::Bytes;
use gateway_core::{Protocol, QoS, TopicFilter, parse_shared};

use super::{
    Ack, AckKind, AuthPacket, ConnAck, DecodeError, Disconnect, Frame, Packet, Publish, SubAck, Subscribe,
    SubscribeFilter, Unsubscribe,
    connect::decode_connect,
    primitive::Reader,
    property::{NOT_ALLOWED, Property, PropertyReader},
    publish::{decode_any_publish, packet_id},
    reason,
};

/// Decodes a packet of either direction. A CONNECT says its level itself; for it `protocol` is ignored.
#[inline]
pub fn decode<'a>(frame: &Frame<'a>, protocol: Protocol) -> Result<Packet<'a>, DecodeError> {
    if frame.is_publish() {
        frame.check_length(protocol)?;
        let mut publish = Publish::default();
        decode_any_publish(frame.first, frame.body, protocol, &mut publish)?;
        return Ok(Packet::Publish(publish));
    }
    decode_other(frame, protocol)
}

/// Decodes a packet as a server must: in addition refuses what only a server may send.
#[inline]
pub fn decode_from_client<'a>(frame: &Frame<'a>, protocol: Protocol) -> Result<Packet<'a>, DecodeError> {
    let packet = decode(frame, protocol)?;
    match &packet {
        Packet::Publish(publish) if !publish.ids.is_empty() => {
            Err(DecodeError::Protocol("subscription identifier from a client [MQTT-3.3.4-6]"))
        }
        Packet::ConnAck(_) | Packet::SubAck(_) | Packet::UnsubAck(_) | Packet::PingResp => {
            Err(DecodeError::Protocol("packet that only a server sends"))
        }
        _ => Ok(packet),
    }
}

fn decode_other<'a>(frame: &Frame<'a>, protocol: Protocol) -> Result<Packet<'a>, DecodeError> {
    let kind = frame.first >> 4;
    if kind == 1 {
        return decode_connect(frame).map(|connect| Packet::Connect(Box::new(connect)));
    }
    check_flags(kind, frame.first & 0x0f, protocol)?;
    frame.check_length(protocol)?;
    let mut reader = Reader::new(frame.body);
    let packet = match kind {
        2 => Packet::ConnAck(Box::new(connack(&mut reader, protocol)?)),
        4 => Packet::PubAck(ack(&mut reader, protocol, reason::in_puback)?),
        5 => Packet::PubRec(ack(&mut reader, protocol, reason::in_puback)?),
        6 => Packet::PubRel(ack(&mut reader, protocol, reason::in_pubrel)?),
        7 => Packet::PubComp(ack(&mut reader, protocol, reason::in_pubrel)?),
        8 => Packet::Subscribe(subscribe(&mut reader, protocol)?),
        9 => Packet::SubAck(suback(&mut reader, protocol)?),
        10 => Packet::Unsubscribe(unsubscribe(&mut reader, protocol)?),
        11 => Packet::UnsubAck(unsuback(&mut reader, protocol)?),
        12 => Packet::PingReq,
        13 => Packet::PingResp,
        14 => Packet::Disconnect(Box::new(disconnect(&mut reader, protocol)?)),
        15 if protocol.is_v5() => Packet::Auth(Box::new(auth(&mut reader)?)),
        _ => return Err(DecodeError::Malformed("forbidden packet type (section 2.1.2)")),
    };
    reader.finish()?;
    Ok(packet)
}

/// The reserved flags of the first byte [MQTT-2.1.3-1] [MQTT-2.2.2-1] [MQTT-2.2.2-2]. In 3.1 they are DUP, QoS and RETAIN of
/// every packet; where it has no use for them they may be anything.
pub(super) fn check_flags(kind: u8, flags: u8, protocol: Protocol) -> Result<(), DecodeError> {
    let used = match (protocol, kind) {
        (Protocol::V3, 6 | 8 | 10) => 0x06,
        (Protocol::V3, _) => 0,
        _ => 0x0f,
    };
    match kind {
        6 | 8 | 10 if flags & used != 0x02 => {
            Err(DecodeError::Malformed("flags are not 0010 [MQTT-3.6.1-1] [MQTT-3.8.1-1] [MQTT-3.10.1-1]"))
        }
        6 | 8 | 10 => Ok(()),
        // DISCONNECT: [MQTT-3.14.1-1], AUTH: [MQTT-3.15.1-1].
        _ if flags & used != 0 => {
            Err(DecodeError::Malformed("reserved flags set [MQTT-2.1.3-1] [MQTT-2.2.2-1]"))
        }
        _ => Ok(()),
    }
}

/// `code`, if `allowed` knows it.
fn check_code(code: u8, allowed: fn(u8) -> bool) -> Result<u8, DecodeError> {
    if !allowed(code) {
        return Err(DecodeError::Protocol("reason code not allowed in this packet (section 2.4)"));
    }
    Ok(code)
}

type User = Vec<(String, String)>;

/// Properties of a packet that has only reason string and user properties.
fn reason_properties(reader: &mut Reader<'_>) -> Result<(Option<String>, User), DecodeError> {
    let mut reason_string = None;
    let mut user = Vec::new();
    let mut properties = PropertyReader::new(reader)?;
    while let Some(property) = properties.next()? {
        match property {
            Property::ReasonString(text) => reason_string = Some(text.to_owned()),
            Property::User(name, value) => user.push((name.to_owned(), value.to_owned())),
            _ => return Err(NOT_ALLOWED),
        }
    }
    Ok((reason_string, user))
}

/// Packet identifiers of the PUBACKs that `bytes` begin with, as far as they are as short as nearly all: success, without
/// properties [MQTT-2.2.1-5]. Each takes [`PLAIN_PUBACK`] bytes.
#[inline]
pub fn plain_pubacks(bytes: &[u8]) -> impl Iterator<Item = u16> {
    let (frames, _) = bytes.as_chunks::<PLAIN_PUBACK>();
    frames.iter().map_while(|frame| match *frame {
        [0x40, 2, high, low] if (high, low) != (0, 0) => Some(u16::from_be_bytes([high, low])),
        _ => None,
    })
}

/// Bytes of a PUBACK without reason code and properties.
pub const PLAIN_PUBACK: usize = 4;

/// The acknowledgement in `frame`, if it is as short as nearly all: success, without properties. What [`decode`] would make
/// of it, without its detours.
#[inline]
pub fn plain_ack(frame: &Frame<'_>) -> Option<(AckKind, u16)> {
    let &[high, low] = frame.body else { return None };
    if frame.len != PLAIN_PUBACK {
        return None; // A longer form of the length.
    }
    let kind = match frame.first {
        0x40 => AckKind::PubAck,
        0x50 => AckKind::PubRec,
        0x62 => AckKind::PubRel,
        0x70 => AckKind::PubComp,
        _ => return None,
    };
    let packet_id = u16::from_be_bytes([high, low]);
    (packet_id != 0).then_some((kind, packet_id))
}

/// Section 3.4 to 3.7.
fn ack(reader: &mut Reader<'_>, protocol: Protocol, allowed: fn(u8) -> bool) -> Result<Ack, DecodeError> {
    // [MQTT-2.2.1-5]
    let mut ack = Ack { packet_id: packet_id(reader)?, code: 0, reason_string: None, user: Vec::new() };
    if !protocol.is_v5() || reader.is_empty() {
        return Ok(ack);
    }
    ack.code = check_code(reader.u8()?, allowed)?;
    // Below a Remaining Length of 4 there is no Property Length.
    if !reader.is_empty() {
        (ack.reason_string, ack.user) = reason_properties(reader)?;
    }
    Ok(ack)
}

/// Section 3.2.
fn connack(reader: &mut Reader<'_>, protocol: Protocol) -> Result<ConnAck, DecodeError> {
    let flags = reader.u8()?;
    let code = reader.u8()?;
    let mut connack = ConnAck { code, ..ConnAck::default() };
    if protocol == Protocol::V3 {
        // The first byte is unused in 3.1.
        check_code(code, |code| code <= reason::V3_NOT_AUTHORIZED)?;
        return Ok(connack);
    }
    if flags > 1 {
        return Err(DecodeError::Malformed("reserved CONNACK flags set [MQTT-3.2.2-1]"));
    }
    if flags == 1 && code != 0 {
        return Err(DecodeError::Protocol("session present in a refusal [MQTT-3.2.2-6] [MQTT-3.2.2-4]"));
    }
    connack.session_present = flags == 1;
    if protocol == Protocol::V4 {
        check_code(code, |code| code <= reason::V3_NOT_AUTHORIZED)?;
        return Ok(connack);
    }
    check_code(code, reason::in_connack)?;
    let mut properties = PropertyReader::new(reader)?;
    while let Some(property) = properties.next()? {
        connack_property(property, &mut connack)?;
    }
    Ok(connack)
}

fn connack_property(property: Property<'_>, connack: &mut ConnAck) -> Result<(), DecodeError> {
    match property {
        Property::SessionExpiry(seconds) => connack.session_expiry = Some(seconds),
        Property::ReceiveMaximum(count) => connack.receive_maximum = Some(count),
        Property::MaximumQos(qos) => connack.maximum_qos = Some(qos),
        Property::RetainAvailable(available) => connack.retain_available = Some(available),
        Property::MaximumPacketSize(size) => connack.maximum_packet_size = Some(size),
        Property::AssignedClientId(id) => connack.assigned_client_id = Some(id.to_owned()),
        Property::TopicAliasMaximum(count) => connack.topic_alias_maximum = Some(count),
        Property::ReasonString(text) => connack.reason_string = Some(text.to_owned()),
        Property::User(name, value) => connack.user.push((name.to_owned(), value.to_owned())),
        Property::WildcardAvailable(available) => connack.wildcard_available = Some(available),
        Property::SubscriptionIdAvailable(available) => connack.subscription_id_available = Some(available),
        Property::SharedAvailable(available) => connack.shared_available = Some(available),
        Property::ServerKeepAlive(seconds) => connack.server_keep_alive = Some(seconds),
        Property::ResponseInformation(text) => connack.response_information = Some(text.to_owned()),
        Property::ServerReference(text) => connack.server_reference = Some(text.to_owned()),
        Property::AuthMethod(method) => connack.auth_method = Some(method.to_owned()),
        Property::AuthData(data) => connack.auth_data = Some(Bytes::copy_from_slice(data)),
        _ => return Err(NOT_ALLOWED),
    }
    Ok(())
}

/// Section 3.8.
fn subscribe(reader: &mut Reader<'_>, protocol: Protocol) -> Result<Subscribe, DecodeError> {
    let mut subscribe =
        Subscribe { packet_id: packet_id(reader)?, id: None, user: Vec::new(), filters: Vec::new() };
    if protocol.is_v5() {
        let mut properties = PropertyReader::new(reader)?;
        while let Some(property) = properties.next()? {
            match property {
                Property::SubscriptionId(id) => subscribe.id = Some(id),
                Property::User(name, value) => subscribe.user.push((name.to_owned(), value.to_owned())),
                _ => return Err(NOT_ALLOWED),
            }
        }
    }
    if reader.is_empty() {
        return Err(DecodeError::Protocol("SUBSCRIBE without a filter [MQTT-3.8.3-2] [MQTT-3.8.3-3]"));
    }
    while !reader.is_empty() {
        // [MQTT-3.8.3-1]
        let filter = reader.str()?;
        let options = reader.u8()?;
        subscribe.filters.push(subscribe_filter(filter, options, protocol)?);
    }
    Ok(subscribe)
}

/// A filter of the wrong form makes its packet malformed, and the other filters in it are not looked at. A filter that is
/// well formed but not accepted is the server's to refuse, with 0x8F.
fn check_filter(filter: &str, protocol: Protocol) -> Result<(), DecodeError> {
    TopicFilter::check(filter).map_err(|_| {
        DecodeError::Malformed("no topic filter [MQTT-4.7.1-1] [MQTT-4.7.1-2] [MQTT-4.7.1-3] [MQTT-4.7.3-1]")
    })?;
    // MQTT 3 knows no shared subscriptions: there it is a filter like any other.
    if protocol.is_v5() && filter.starts_with("$share/") && parse_shared(filter).is_err() {
        return Err(DecodeError::Malformed("no shared subscription [MQTT-4.8.2-1] [MQTT-4.8.2-2]"));
    }
    Ok(())
}

fn subscribe_filter(filter: &str, options: u8, protocol: Protocol) -> Result<SubscribeFilter, DecodeError> {
    check_filter(filter, protocol)?;
    let reserved = if protocol.is_v5() { 0xc0 } else { 0xfc };
    if options & reserved != 0 {
        return Err(DecodeError::Malformed(
            "reserved subscription options set [MQTT-3.8.3-5] [MQTT-3-8.3-4]",
        ));
    }
    let Some(qos) = QoS::from_bits(options & 3) else {
        return Err(match protocol {
            // Section 3.8.3.1 of version 5 calls it a Protocol Error.
            Protocol::V5 => DecodeError::Protocol("subscription with QoS 3"),
            _ => DecodeError::Malformed("subscription with QoS 3 [MQTT-3-8.3-4]"),
        });
    };
    let no_local = options & 0x04 != 0;
    if no_local && filter.starts_with("$share/") {
        return Err(DecodeError::Protocol("No Local on a shared subscription [MQTT-3.8.3-4]"));
    }
    let retain_handling = options >> 4 & 3;
    if retain_handling == 3 {
        return Err(DecodeError::Protocol("retain handling 3 (section 3.8.3.1)"));
    }
    Ok(SubscribeFilter {
        filter: filter.to_owned(),
        qos,
        no_local,
        retain_as_published: options & 0x08 != 0,
        retain_handling,
    })
}

/// Filters of a SUBSCRIBE or UNSUBSCRIBE, counted without decoding them; of a malformed one those before the fault. 0 for
/// any other packet.
pub fn count_filters(frame: &Frame<'_>, protocol: Protocol) -> usize {
    let options = match frame.first >> 4 {
        8 => 1,
        10 => 0,
        _ => return 0,
    };
    let mut reader = Reader::new(frame.body);
    let head = packet_id(&mut reader).and_then(|_| match protocol.is_v5() {
        true => reader.varint().and_then(|properties| reader.take(properties as usize).map(drop)),
        false => Ok(()),
    });
    let mut filters = 0;
    while head.is_ok() && !reader.is_empty() {
        let filter = reader.u16().and_then(|len| reader.take(usize::from(len) + options));
        if filter.is_err() {
            break;
        }
        filters += 1;
    }
    filters
}

/// Section 3.9.
fn suback(reader: &mut Reader<'_>, protocol: Protocol) -> Result<SubAck, DecodeError> {
    let mut suback = suback_head(reader, protocol)?;
    let allowed = if protocol.is_v5() { reason::in_suback } else { |code| matches!(code, 0..=2 | 0x80) };
    read_codes(reader, allowed, &mut suback)?;
    Ok(suback)
}

/// Section 3.11.
fn unsuback(reader: &mut Reader<'_>, protocol: Protocol) -> Result<SubAck, DecodeError> {
    let mut unsuback = suback_head(reader, protocol)?;
    if protocol.is_v5() {
        read_codes(reader, reason::in_unsuback, &mut unsuback)?;
    }
    Ok(unsuback)
}

fn suback_head(reader: &mut Reader<'_>, protocol: Protocol) -> Result<SubAck, DecodeError> {
    // [MQTT-2.2.1-6]
    let packet_id = packet_id(reader)?;
    let (reason_string, user) =
        if protocol.is_v5() { reason_properties(reader)? } else { (None, Vec::new()) };
    Ok(SubAck { packet_id, reason_string, user, codes: Vec::new() })
}

/// One code per filter up to the packet's end [MQTT-3.8.4-6].
fn read_codes(reader: &mut Reader<'_>, allowed: fn(u8) -> bool, ack: &mut SubAck) -> Result<(), DecodeError> {
    if reader.is_empty() {
        return Err(DecodeError::Protocol("acknowledgement without a reason code [MQTT-3.8.4-6]"));
    }
    while !reader.is_empty() {
        ack.codes.push(check_code(reader.u8()?, allowed)?);
    }
    Ok(())
}

/// Section 3.10.
fn unsubscribe(reader: &mut Reader<'_>, protocol: Protocol) -> Result<Unsubscribe, DecodeError> {
    let mut unsubscribe =
        Unsubscribe { packet_id: packet_id(reader)?, user: Vec::new(), filters: Vec::new() };
    if protocol.is_v5() {
        let mut properties = PropertyReader::new(reader)?;
        while let Some(property) = properties.next()? {
            let Property::User(name, value) = property else {
                return Err(NOT_ALLOWED);
            };
            unsubscribe.user.push((name.to_owned(), value.to_owned()));
        }
    }
    if reader.is_empty() {
        return Err(DecodeError::Protocol("UNSUBSCRIBE without a filter [MQTT-3.10.3-2]"));
    }
    while !reader.is_empty() {
        // [MQTT-3.10.3-1]
        let filter = reader.str()?;
        check_filter(filter, protocol)?;
        unsubscribe.filters.push(filter.to_owned());
    }
    Ok(unsubscribe)
}

/// Section 3.14.
fn disconnect(reader: &mut Reader<'_>, protocol: Protocol) -> Result<Disconnect, DecodeError> {
    let mut disconnect = Disconnect::default();
    if !protocol.is_v5() || reader.is_empty() {
        return Ok(disconnect);
    }
    disconnect.code = check_code(reader.u8()?, reason::in_disconnect)?;
    if reader.is_empty() {
        return Ok(disconnect);
    }
    let mut properties = PropertyReader::new(reader)?;
    while let Some(property) = properties.next()? {
        match property {
            Property::SessionExpiry(seconds) => disconnect.session_expiry = Some(seconds),
            Property::ReasonString(text) => disconnect.reason_string = Some(text.to_owned()),
            Property::User(name, value) => disconnect.user.push((name.to_owned(), value.to_owned())),
            Property::ServerReference(text) => disconnect.server_reference = Some(text.to_owned()),
            _ => return Err(NOT_ALLOWED),
        }
    }
    Ok(disconnect)
}

/// Section 3.15.
fn auth(reader: &mut Reader<'_>) -> Result<AuthPacket, DecodeError> {
    let mut auth = AuthPacket::default();
    if reader.is_empty() {
        return Ok(auth);
    }
    auth.code = check_code(reader.u8()?, reason::in_auth)?;
    let mut properties = PropertyReader::new(reader)?;
    while let Some(property) = properties.next()? {
        match property {
            Property::AuthMethod(method) => auth.method = Some(method.to_owned()),
            Property::AuthData(data) => auth.data = Some(Bytes::copy_from_slice(data)),
            Property::ReasonString(text) => auth.reason_string = Some(text.to_owned()),
            Property::User(name, value) => auth.user.push((name.to_owned(), value.to_owned())),
            _ => return Err(NOT_ALLOWED),
        }
    }
    if auth.method.is_none() {
        return Err(DecodeError::Protocol("AUTH without a method (section 3.15.2.2.2)"));
    }
    Ok(auth)
}
