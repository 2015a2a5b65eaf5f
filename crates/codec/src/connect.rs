//! CONNECT, which says itself what level it is (section 3.1).

use std::sync::Arc;

use bytes::Bytes;
use gateway_core::{Properties, Protocol, QoS};

use super::{
    Connect, ConnectWill, DecodeError, Frame,
    decode::check_flags as check_header_flags,
    primitive::{Reader, put_binary, put_sized, put_str},
    property::{
        NOT_ALLOWED, Property, PropertyReader, id, put_byte, put_data, put_text, put_u16, put_u32, put_user,
    },
    publish::{put_message_properties, set_message_property},
};

/// Bit of the protocol level of MQTT 3: the client is a bridge.
const BRIDGE: u8 = 0x80;
const CLEAN_START: u8 = 0x02;
const WILL: u8 = 0x04;
const WILL_RETAIN: u8 = 0x20;
const PASSWORD: u8 = 0x40;
const USERNAME: u8 = 0x80;

/// Decodes a CONNECT of any level. The caller has seen that it is one.
pub fn decode_connect(frame: &Frame<'_>) -> Result<Connect, DecodeError> {
    let mut reader = Reader::new(frame.body);
    let (protocol, bridge) = read_protocol(&mut reader)?;
    check_header_flags(1, frame.first & 0x0f, protocol)?;
    frame.check_length(protocol)?;
    let flags = reader.u8()?;
    check_flags(flags, protocol)?;
    let mut connect = Connect::new(protocol, String::new());
    connect.bridge = bridge;
    connect.clean_start = flags & CLEAN_START != 0;
    connect.keep_alive = reader.u16()?;
    if protocol.is_v5() {
        read_properties(&mut reader, &mut connect)?;
    }
    // The order of the payload: [MQTT-3.1.3-1]. The client id comes first: [MQTT-3.1.3-3] [MQTT-3.1.3-4].
    connect.client_id = reader.string()?;
    if flags & WILL != 0 {
        // [MQTT-3.1.2-9]
        connect.will = Some(read_will(&mut reader, flags, protocol)?);
    }
    // MQTT 3.1: user name and password may be missing in spite of their flags.
    let ends_early = |reader: &Reader<'_>| protocol == Protocol::V3 && reader.is_empty();
    if flags & USERNAME != 0 && !ends_early(&reader) {
        // [MQTT-3.1.2-17] [MQTT-3.1.3-12]
        connect.username = Some(reader.string()?);
    }
    if flags & PASSWORD != 0 && !ends_early(&reader) {
        // [MQTT-3.1.2-19]
        connect.password = Some(Bytes::copy_from_slice(reader.binary()?));
    }
    // [MQTT-3.1.2-16] [MQTT-3.1.2-18] [MQTT-3.1.4-1]: nothing that no flag announces.
    reader.finish()?;
    Ok(connect)
}

/// Protocol name and level [MQTT-3.1.2-1] [MQTT-3.1.2-2], and whether the level has the bridge bit.
fn read_protocol(reader: &mut Reader<'_>) -> Result<(Protocol, bool), DecodeError> {
    let name = reader.binary()?;
    let level = reader.u8()?;
    let bridge = level & BRIDGE != 0;
    match (name, level & !BRIDGE) {
        (b"MQTT", 5) if !bridge => Ok((Protocol::V5, false)),
        (b"MQTT", 4) => Ok((Protocol::V4, bridge)),
        (b"MQIsdp", 3) => Ok((Protocol::V3, bridge)),
        _ => {
            let name_ok = name == b"MQTT" || name == b"MQIsdp";
            Err(DecodeError::UnsupportedProtocol { name_ok, level })
        }
    }
}

fn check_flags(flags: u8, protocol: Protocol) -> Result<(), DecodeError> {
    // In 3.1 the lowest bit is unused, not reserved.
    if flags & 0x01 != 0 && protocol != Protocol::V3 {
        return Err(DecodeError::Malformed("reserved CONNECT flag set [MQTT-3.1.2-3]"));
    }
    let will_qos = flags >> 3 & 3;
    if flags & WILL == 0 && (will_qos != 0 || flags & WILL_RETAIN != 0) {
        return Err(DecodeError::Malformed("will flags without a will [MQTT-3.1.2-11] [MQTT-3.1.2-13]"));
    }
    if will_qos == 3 {
        return Err(DecodeError::Malformed("will QoS 3 [MQTT-3.1.2-12] [MQTT-3.1.2-14]"));
    }
    if !protocol.is_v5() && flags & PASSWORD != 0 && flags & USERNAME == 0 {
        // Version 5 allows it.
        return Err(DecodeError::Malformed("password without user name [MQTT-3.1.2-22]"));
    }
    Ok(())
}

fn read_properties(reader: &mut Reader<'_>, connect: &mut Connect) -> Result<(), DecodeError> {
    let mut properties = PropertyReader::new(reader)?;
    while let Some(property) = properties.next()? {
        match property {
            Property::SessionExpiry(seconds) => connect.session_expiry = Some(seconds),
            Property::ReceiveMaximum(count) => connect.receive_maximum = Some(count),
            Property::MaximumPacketSize(size) => connect.maximum_packet_size = Some(size),
            Property::TopicAliasMaximum(count) => connect.topic_alias_maximum = count,
            Property::RequestResponseInformation(wanted) => connect.request_response_information = wanted,
            Property::RequestProblemInformation(wanted) => connect.request_problem_information = wanted,
            Property::User(name, value) => connect.user.push((name.to_owned(), value.to_owned())),
            Property::AuthMethod(method) => connect.auth_method = Some(method.to_owned()),
            Property::AuthData(data) => connect.auth_data = Some(Bytes::copy_from_slice(data)),
            _ => return Err(NOT_ALLOWED),
        }
    }
    if connect.auth_data.is_some() && connect.auth_method.is_none() {
        return Err(DecodeError::Protocol("authentication data without a method (section 3.1.2.11.10)"));
    }
    Ok(())
}

fn read_will(reader: &mut Reader<'_>, flags: u8, protocol: Protocol) -> Result<ConnectWill, DecodeError> {
    let mut delay = 0;
    let mut expiry = None;
    let mut travelling: Option<Properties> = None;
    if protocol.is_v5() {
        let mut properties = PropertyReader::new(reader)?;
        while let Some(property) = properties.next()? {
            match property {
                Property::WillDelay(seconds) => delay = seconds,
                Property::MessageExpiry(seconds) => expiry = Some(seconds),
                other => set_message_property(other, travelling.get_or_insert_default())?,
            }
        }
    }
    // [MQTT-3.1.3-11] [MQTT-4.7.0-1]
    let topic = reader.topic()?;
    if topic.is_empty() {
        return Err(DecodeError::Malformed("empty will topic [MQTT-4.7.3-1]"));
    }
    let payload = Bytes::copy_from_slice(reader.binary()?);
    Ok(ConnectWill {
        topic: topic.to_owned(),
        payload,
        qos: QoS::from_bits(flags >> 3 & 3).unwrap_or_default(),
        retain: flags & WILL_RETAIN != 0,
        delay,
        expiry,
        properties: travelling.map(Arc::new),
    })
}

/// Appends the body of a CONNECT.
pub(super) fn put_connect(connect: &Connect, out: &mut Vec<u8>) {
    let protocol = connect.protocol;
    put_str(if protocol == Protocol::V3 { "MQIsdp" } else { "MQTT" }, out);
    let bit = if connect.bridge && !protocol.is_v5() { BRIDGE } else { 0 };
    out.push(protocol as u8 | bit);
    // [MQTT-3.1.2-22]
    let password = connect.password.as_deref().filter(|_| protocol.is_v5() || connect.username.is_some());
    let mut flags = 0;
    flags |= if connect.clean_start { CLEAN_START } else { 0 };
    flags |= if connect.username.is_some() { USERNAME } else { 0 };
    flags |= if password.is_some() { PASSWORD } else { 0 };
    if let Some(will) = &connect.will {
        flags |= WILL | (will.qos as u8) << 3;
        flags |= if will.retain { WILL_RETAIN } else { 0 };
    }
    out.push(flags);
    out.extend_from_slice(&connect.keep_alive.to_be_bytes());
    if protocol.is_v5() {
        put_sized(out, |out| put_properties(connect, out));
    }
    put_str(&connect.client_id, out);
    if let Some(will) = &connect.will {
        put_will(will, protocol, out);
    }
    if let Some(username) = &connect.username {
        put_str(username, out);
    }
    if let Some(password) = password {
        put_binary(password, out);
    }
}

fn put_properties(connect: &Connect, out: &mut Vec<u8>) {
    let alias_maximum = Some(connect.topic_alias_maximum).filter(|&count| count != 0);
    let response_information = connect.request_response_information.then_some(1);
    let problem_information = (!connect.request_problem_information).then_some(0);
    put_u32(id::SESSION_EXPIRY, connect.session_expiry, out);
    put_u16(id::RECEIVE_MAXIMUM, connect.receive_maximum, out);
    put_u32(id::MAXIMUM_PACKET_SIZE, connect.maximum_packet_size, out);
    put_u16(id::TOPIC_ALIAS_MAXIMUM, alias_maximum, out);
    put_byte(id::REQUEST_RESPONSE_INFORMATION, response_information, out);
    put_byte(id::REQUEST_PROBLEM_INFORMATION, problem_information, out);
    put_text(id::AUTH_METHOD, connect.auth_method.as_deref(), out);
    put_data(id::AUTH_DATA, connect.auth_data.as_deref(), out);
    put_user(&connect.user, out);
}

fn put_will(will: &ConnectWill, protocol: Protocol, out: &mut Vec<u8>) {
    if protocol.is_v5() {
        put_sized(out, |out| {
            put_u32(id::WILL_DELAY, Some(will.delay).filter(|&seconds| seconds != 0), out);
            put_u32(id::MESSAGE_EXPIRY, will.expiry, out);
            if let Some(properties) = &will.properties {
                put_message_properties(properties, out);
            }
        });
    }
    put_str(&will.topic, out);
    put_binary(&will.payload, out);
}
