//! Packets to bytes.

use gateway_core::Protocol;

use super::{
    Ack, AuthPacket, ConnAck, Disconnect, MAX_FRAME_LEN, Packet, PublishFrame, SubAck, Subscribe,
    SubscribeFilter, Unsubscribe,
    connect::put_connect,
    primitive::{put_sized, put_str},
    property::{id, put_byte, put_data, put_subscription_id, put_text, put_u16, put_u32, put_user},
};

/// The four acknowledgements that carry a packet id and a code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum AckKind {
    /// PUBACK
    PubAck = 0x40,
    /// PUBREC
    PubRec = 0x50,
    /// PUBREL, whose flags are 0010 [MQTT-3.6.1-1]
    PubRel = 0x62,
    /// PUBCOMP
    PubComp = 0x70,
}

/// Appends an acknowledgement in its shortest form. Below v5 `code` is not sent.
#[inline]
pub fn encode_ack(kind: AckKind, packet_id: u16, code: u8, protocol: Protocol, out: &mut Vec<u8>) {
    let [high, low] = packet_id.to_be_bytes();
    if code == 0 || !protocol.is_v5() {
        out.extend_from_slice(&[kind as u8, 2, high, low]);
        return;
    }
    out.extend_from_slice(&[kind as u8, 3, high, low, code]);
}

/// Appends a PINGRESP.
#[inline]
pub fn encode_pingresp(out: &mut Vec<u8>) {
    out.extend_from_slice(&[0xd0, 0]);
}

/// A DISCONNECT of version 5 with nothing but its reason code, which costs no allocation.
pub fn disconnect(code: u8) -> &'static [u8] {
    static ALL: [[u8; 3]; 256] = {
        let mut all = [[0xE0, 0x01, 0]; 256];
        let mut code = 0_u8;
        while code < u8::MAX {
            code += 1;
            all[code as usize][2] = code;
        }
        all
    };
    &ALL[usize::from(code)]
}

/// Appends `packet` as `protocol` writes it; a CONNECT as its own level says. Appends nothing if the
/// frame would be longer than [`MAX_FRAME_LEN`], or if it is an AUTH below v5.
pub fn encode(packet: &Packet<'_>, protocol: Protocol, out: &mut Vec<u8>) {
    put_packet(packet, protocol, true, out);
}

/// As [`encode`], with a limit on the frame's length: reason string and user properties of anything but
/// a message are left out where they would exceed it [MQTT-3.2.2-19] [MQTT-3.2.2-20] [MQTT-3.4.2-2]
/// [MQTT-3.9.2-1] [MQTT-3.11.2-1] [MQTT-3.14.2-3] [MQTT-3.15.2-2]. False, and nothing appended, if the
/// rest is too long as well [MQTT-3.1.2-24].
pub fn encode_within(packet: &Packet<'_>, protocol: Protocol, max: usize, out: &mut Vec<u8>) -> bool {
    let start = out.len();
    if let Packet::Publish(publish) = packet {
        let frame = PublishFrame::of(publish, protocol);
        if frame.encoded_len() <= max {
            frame.encode(out);
        }
        return out.len() > start;
    }
    for with_reason in [true, false] {
        put_packet(packet, protocol, with_reason, out);
        let len = out.len() - start;
        if len != 0 && len <= max {
            return true;
        }
        out.truncate(start);
    }
    false
}

/// `with_reason`: whether reason string and user properties of server packets are written.
fn put_packet(packet: &Packet<'_>, protocol: Protocol, with_reason: bool, out: &mut Vec<u8>) {
    let start = out.len();
    match packet {
        Packet::Connect(connect) => {
            out.push(0x10);
            put_sized(out, |out| put_connect(connect, out));
        }
        Packet::ConnAck(connack) => {
            out.push(0x20);
            put_sized(out, |out| put_connack(connack, protocol, with_reason, out));
        }
        Packet::Publish(publish) => PublishFrame::of(publish, protocol).encode(out),
        Packet::PubAck(ack) => put_ack(AckKind::PubAck, ack, protocol, with_reason, out),
        Packet::PubRec(ack) => put_ack(AckKind::PubRec, ack, protocol, with_reason, out),
        Packet::PubRel(ack) => put_ack(AckKind::PubRel, ack, protocol, with_reason, out),
        Packet::PubComp(ack) => put_ack(AckKind::PubComp, ack, protocol, with_reason, out),
        Packet::Subscribe(subscribe) => {
            // [MQTT-3.8.1-1]
            out.push(0x82);
            put_sized(out, |out| put_subscribe(subscribe, protocol, out));
        }
        Packet::SubAck(suback) => {
            out.push(0x90);
            put_sized(out, |out| {
                put_suback_head(suback, protocol, with_reason, out);
                out.extend_from_slice(&suback.codes);
            });
        }
        Packet::Unsubscribe(unsubscribe) => {
            // [MQTT-3.10.1-1]
            out.push(0xa2);
            put_sized(out, |out| put_unsubscribe(unsubscribe, protocol, out));
        }
        Packet::UnsubAck(unsuback) => {
            out.push(0xb0);
            put_sized(out, |out| {
                put_suback_head(unsuback, protocol, with_reason, out);
                if protocol.is_v5() {
                    out.extend_from_slice(&unsuback.codes);
                }
            });
        }
        Packet::PingReq => out.extend_from_slice(&[0xc0, 0]),
        Packet::PingResp => encode_pingresp(out),
        Packet::Disconnect(disconnect) => {
            out.push(0xe0);
            put_sized(out, |out| put_disconnect(disconnect, protocol, with_reason, out));
        }
        Packet::Auth(auth) if protocol.is_v5() => {
            out.push(0xf0);
            put_sized(out, |out| put_auth(auth, with_reason, out));
        }
        Packet::Auth(_) => {}
    }
    if out.len() - start > MAX_FRAME_LEN {
        out.truncate(start);
    }
}

fn put_reason(reason_string: Option<&str>, user: &[(String, String)], out: &mut Vec<u8>) {
    put_text(id::REASON_STRING, reason_string, out);
    put_user(user, out);
}

fn put_ack(kind: AckKind, ack: &Ack, protocol: Protocol, with_reason: bool, out: &mut Vec<u8>) {
    let bare = ack.reason_string.is_none() && ack.user.is_empty();
    if bare || !with_reason || !protocol.is_v5() {
        encode_ack(kind, ack.packet_id, ack.code, protocol, out);
        return;
    }
    out.push(kind as u8);
    put_sized(out, |out| {
        out.extend_from_slice(&ack.packet_id.to_be_bytes());
        out.push(ack.code);
        put_sized(out, |out| put_reason(ack.reason_string.as_deref(), &ack.user, out));
    });
}

fn put_connack(connack: &ConnAck, protocol: Protocol, with_reason: bool, out: &mut Vec<u8>) {
    // [MQTT-3.2.2-1] [MQTT-3.2.2-6]; the byte is unused in 3.1.
    let session_present = connack.session_present && connack.code == 0 && protocol != Protocol::V3;
    out.extend_from_slice(&[u8::from(session_present), connack.code]);
    if !protocol.is_v5() {
        return;
    }
    let flag = |value: Option<bool>| value.map(u8::from);
    put_sized(out, |out| {
        put_u32(id::SESSION_EXPIRY, connack.session_expiry, out);
        put_u16(id::RECEIVE_MAXIMUM, connack.receive_maximum, out);
        put_byte(id::MAXIMUM_QOS, connack.maximum_qos, out);
        put_byte(id::RETAIN_AVAILABLE, flag(connack.retain_available), out);
        put_u32(id::MAXIMUM_PACKET_SIZE, connack.maximum_packet_size, out);
        put_text(id::ASSIGNED_CLIENT_ID, connack.assigned_client_id.as_deref(), out);
        put_u16(id::TOPIC_ALIAS_MAXIMUM, connack.topic_alias_maximum, out);
        put_byte(id::WILDCARD_AVAILABLE, flag(connack.wildcard_available), out);
        put_byte(id::SUBSCRIPTION_ID_AVAILABLE, flag(connack.subscription_id_available), out);
        put_byte(id::SHARED_AVAILABLE, flag(connack.shared_available), out);
        put_u16(id::SERVER_KEEP_ALIVE, connack.server_keep_alive, out);
        put_text(id::RESPONSE_INFORMATION, connack.response_information.as_deref(), out);
        put_text(id::SERVER_REFERENCE, connack.server_reference.as_deref(), out);
        put_text(id::AUTH_METHOD, connack.auth_method.as_deref(), out);
        put_data(id::AUTH_DATA, connack.auth_data.as_deref(), out);
        if with_reason {
            put_reason(connack.reason_string.as_deref(), &connack.user, out);
        }
    });
}

fn put_subscribe(subscribe: &Subscribe, protocol: Protocol, out: &mut Vec<u8>) {
    out.extend_from_slice(&subscribe.packet_id.to_be_bytes());
    if protocol.is_v5() {
        put_sized(out, |out| {
            if let Some(id) = subscribe.id {
                put_subscription_id(id, out);
            }
            put_user(&subscribe.user, out);
        });
    }
    for filter in &subscribe.filters {
        put_str(&filter.filter, out);
        out.push(options(filter, protocol));
    }
}

/// The options byte of a filter: below v5 only the QoS.
fn options(filter: &SubscribeFilter, protocol: Protocol) -> u8 {
    let qos = filter.qos as u8;
    if !protocol.is_v5() {
        return qos;
    }
    let flags = u8::from(filter.no_local) << 2 | u8::from(filter.retain_as_published) << 3;
    qos | flags | (filter.retain_handling & 3) << 4
}

fn put_suback_head(suback: &SubAck, protocol: Protocol, with_reason: bool, out: &mut Vec<u8>) {
    out.extend_from_slice(&suback.packet_id.to_be_bytes());
    if !protocol.is_v5() {
        return;
    }
    put_sized(out, |out| {
        if with_reason {
            put_reason(suback.reason_string.as_deref(), &suback.user, out);
        }
    });
}

fn put_unsubscribe(unsubscribe: &Unsubscribe, protocol: Protocol, out: &mut Vec<u8>) {
    out.extend_from_slice(&unsubscribe.packet_id.to_be_bytes());
    if protocol.is_v5() {
        put_sized(out, |out| put_user(&unsubscribe.user, out));
    }
    for filter in &unsubscribe.filters {
        put_str(filter, out);
    }
}

fn put_disconnect(disconnect: &Disconnect, protocol: Protocol, with_reason: bool, out: &mut Vec<u8>) {
    if !protocol.is_v5() {
        return;
    }
    let mut properties = Vec::new();
    put_u32(id::SESSION_EXPIRY, disconnect.session_expiry, &mut properties);
    put_text(id::SERVER_REFERENCE, disconnect.server_reference.as_deref(), &mut properties);
    if with_reason {
        put_reason(disconnect.reason_string.as_deref(), &disconnect.user, &mut properties);
    }
    if !properties.is_empty() {
        out.push(disconnect.code);
        put_sized(out, |out| out.extend_from_slice(&properties));
    } else if disconnect.code != 0 {
        out.push(disconnect.code);
    }
}

fn put_auth(auth: &AuthPacket, with_reason: bool, out: &mut Vec<u8>) {
    if *auth == AuthPacket::default() {
        return;
    }
    out.push(auth.code);
    put_sized(out, |out| {
        put_text(id::AUTH_METHOD, auth.method.as_deref(), out);
        put_data(id::AUTH_DATA, auth.data.as_deref(), out);
        if with_reason {
            put_reason(auth.reason_string.as_deref(), &auth.user, out);
        }
    });
}
