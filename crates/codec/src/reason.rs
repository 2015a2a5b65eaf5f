//! Reason codes of MQTT 5.0 (section 2.4) and the CONNACK return codes of MQTT 3.

/// Success (CONNACK, PUBACK, PUBREC, PUBREL, PUBCOMP, UNSUBACK, AUTH).
pub const SUCCESS: u8 = 0x00;
/// Normal disconnection (DISCONNECT).
pub const NORMAL_DISCONNECTION: u8 = 0x00;
/// Granted QoS 0 (SUBACK).
pub const GRANTED_QOS_0: u8 = 0x00;
/// Granted QoS 1 (SUBACK).
pub const GRANTED_QOS_1: u8 = 0x01;
/// Granted QoS 2 (SUBACK).
pub const GRANTED_QOS_2: u8 = 0x02;
/// Disconnect with Will Message (DISCONNECT).
pub const DISCONNECT_WITH_WILL_MESSAGE: u8 = 0x04;
/// No matching subscribers (PUBACK, PUBREC).
pub const NO_MATCHING_SUBSCRIBERS: u8 = 0x10;
/// No subscription existed (UNSUBACK).
pub const NO_SUBSCRIPTION_EXISTED: u8 = 0x11;
/// Continue authentication (AUTH).
pub const CONTINUE_AUTHENTICATION: u8 = 0x18;
/// Re-authenticate (AUTH).
pub const RE_AUTHENTICATE: u8 = 0x19;
/// Unspecified error (CONNACK, PUBACK, PUBREC, SUBACK, UNSUBACK, DISCONNECT).
pub const UNSPECIFIED_ERROR: u8 = 0x80;
/// Malformed Packet (CONNACK, DISCONNECT).
pub const MALFORMED_PACKET: u8 = 0x81;
/// Protocol Error (CONNACK, DISCONNECT).
pub const PROTOCOL_ERROR: u8 = 0x82;
/// Implementation specific error (CONNACK, PUBACK, PUBREC, SUBACK, UNSUBACK, DISCONNECT).
pub const IMPLEMENTATION_SPECIFIC_ERROR: u8 = 0x83;
/// Unsupported Protocol Version (CONNACK).
pub const UNSUPPORTED_PROTOCOL_VERSION: u8 = 0x84;
/// Client Identifier not valid (CONNACK).
pub const CLIENT_IDENTIFIER_NOT_VALID: u8 = 0x85;
/// Bad User Name or Password (CONNACK).
pub const BAD_USER_NAME_OR_PASSWORD: u8 = 0x86;
/// Not authorized (CONNACK, PUBACK, PUBREC, SUBACK, UNSUBACK, DISCONNECT).
pub const NOT_AUTHORIZED: u8 = 0x87;
/// Server unavailable (CONNACK).
pub const SERVER_UNAVAILABLE: u8 = 0x88;
/// Server busy (CONNACK, DISCONNECT).
pub const SERVER_BUSY: u8 = 0x89;
/// Banned (CONNACK).
pub const BANNED: u8 = 0x8A;
/// Server shutting down (DISCONNECT).
pub const SERVER_SHUTTING_DOWN: u8 = 0x8B;
/// Bad authentication method (CONNACK, DISCONNECT).
pub const BAD_AUTHENTICATION_METHOD: u8 = 0x8C;
/// Keep Alive timeout (DISCONNECT).
pub const KEEP_ALIVE_TIMEOUT: u8 = 0x8D;
/// Session taken over (DISCONNECT).
pub const SESSION_TAKEN_OVER: u8 = 0x8E;
/// Topic Filter invalid (SUBACK, UNSUBACK, DISCONNECT).
pub const TOPIC_FILTER_INVALID: u8 = 0x8F;
/// Topic Name invalid (CONNACK, PUBACK, PUBREC, DISCONNECT).
pub const TOPIC_NAME_INVALID: u8 = 0x90;
/// Packet Identifier in use (PUBACK, PUBREC, SUBACK, UNSUBACK).
pub const PACKET_IDENTIFIER_IN_USE: u8 = 0x91;
/// Packet Identifier not found (PUBREL, PUBCOMP).
pub const PACKET_IDENTIFIER_NOT_FOUND: u8 = 0x92;
/// Receive Maximum exceeded (DISCONNECT).
pub const RECEIVE_MAXIMUM_EXCEEDED: u8 = 0x93;
/// Topic Alias invalid (DISCONNECT).
pub const TOPIC_ALIAS_INVALID: u8 = 0x94;
/// Packet too large (CONNACK, DISCONNECT).
pub const PACKET_TOO_LARGE: u8 = 0x95;
/// Message rate too high (DISCONNECT).
pub const MESSAGE_RATE_TOO_HIGH: u8 = 0x96;
/// Quota exceeded (CONNACK, PUBACK, PUBREC, SUBACK, DISCONNECT).
pub const QUOTA_EXCEEDED: u8 = 0x97;
/// Administrative action (DISCONNECT).
pub const ADMINISTRATIVE_ACTION: u8 = 0x98;
/// Payload format invalid (CONNACK, PUBACK, PUBREC, DISCONNECT).
pub const PAYLOAD_FORMAT_INVALID: u8 = 0x99;
/// Retain not supported (CONNACK, DISCONNECT).
pub const RETAIN_NOT_SUPPORTED: u8 = 0x9A;
/// QoS not supported (CONNACK, DISCONNECT).
pub const QOS_NOT_SUPPORTED: u8 = 0x9B;
/// Use another server (CONNACK, DISCONNECT).
pub const USE_ANOTHER_SERVER: u8 = 0x9C;
/// Server moved (CONNACK, DISCONNECT).
pub const SERVER_MOVED: u8 = 0x9D;
/// Shared Subscriptions not supported (SUBACK, DISCONNECT).
pub const SHARED_SUBSCRIPTIONS_NOT_SUPPORTED: u8 = 0x9E;
/// Connection rate exceeded (CONNACK, DISCONNECT).
pub const CONNECTION_RATE_EXCEEDED: u8 = 0x9F;
/// Maximum connect time (DISCONNECT).
pub const MAXIMUM_CONNECT_TIME: u8 = 0xA0;
/// Subscription Identifiers not supported (SUBACK, DISCONNECT).
pub const SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED: u8 = 0xA1;
/// Wildcard Subscriptions not supported (SUBACK, DISCONNECT).
pub const WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED: u8 = 0xA2;

/// MQTT 3: connection accepted.
pub const V3_ACCEPTED: u8 = 0;
/// MQTT 3: unacceptable protocol level.
pub const V3_UNACCEPTABLE_PROTOCOL: u8 = 1;
/// MQTT 3: client identifier rejected.
pub const V3_IDENTIFIER_REJECTED: u8 = 2;
/// MQTT 3: server unavailable.
pub const V3_SERVER_UNAVAILABLE: u8 = 3;
/// MQTT 3: bad user name or password.
pub const V3_BAD_USER_NAME_OR_PASSWORD: u8 = 4;
/// MQTT 3: not authorized.
pub const V3_NOT_AUTHORIZED: u8 = 5;
/// MQTT 3.1.1: the code of a refused filter in a SUBACK.
pub const V3_SUBSCRIBE_FAILURE: u8 = 0x80;

/// The MQTT 3 CONNACK return code nearest to a version 5 reason code. What a retry may cure becomes
/// "server unavailable", what it cannot cure "not authorized".
pub fn v3_return_code(v5: u8) -> u8 {
    match v5 {
        SUCCESS => V3_ACCEPTED,
        UNSUPPORTED_PROTOCOL_VERSION => V3_UNACCEPTABLE_PROTOCOL,
        CLIENT_IDENTIFIER_NOT_VALID => V3_IDENTIFIER_REJECTED,
        BAD_USER_NAME_OR_PASSWORD => V3_BAD_USER_NAME_OR_PASSWORD,
        NOT_AUTHORIZED
        | BANNED
        | BAD_AUTHENTICATION_METHOD
        | TOPIC_NAME_INVALID
        | PACKET_TOO_LARGE
        | PAYLOAD_FORMAT_INVALID
        | RETAIN_NOT_SUPPORTED
        | QOS_NOT_SUPPORTED => V3_NOT_AUTHORIZED,
        _ => V3_SERVER_UNAVAILABLE,
    }
}

/// Returns whether a CONNACK may carry `code` [MQTT-3.2.2-8].
pub(super) fn in_connack(code: u8) -> bool {
    matches!(code, 0x00 | 0x80..=0x8A | 0x8C | 0x90 | 0x95 | 0x97 | 0x99..=0x9D | 0x9F)
}

/// Returns whether a PUBACK or PUBREC may carry `code` [MQTT-3.4.2-1] [MQTT-3.5.2-1].
pub(super) fn in_puback(code: u8) -> bool {
    matches!(code, 0x00 | 0x10 | 0x80 | 0x83 | 0x87 | 0x90..=0x91 | 0x97 | 0x99)
}

/// Returns whether a PUBREL or PUBCOMP may carry `code` [MQTT-3.6.2-1] [MQTT-3.7.2-1].
pub(super) fn in_pubrel(code: u8) -> bool {
    matches!(code, 0x00 | 0x92)
}

/// Returns whether a SUBACK may carry `code` [MQTT-3.9.3-2].
pub(super) fn in_suback(code: u8) -> bool {
    matches!(code, 0x00..=0x02 | 0x80 | 0x83 | 0x87 | 0x8F | 0x91 | 0x97 | 0x9E | 0xA1..=0xA2)
}

/// Returns whether an UNSUBACK may carry `code` [MQTT-3.11.3-2].
pub(super) fn in_unsuback(code: u8) -> bool {
    matches!(code, 0x00 | 0x11 | 0x80 | 0x83 | 0x87 | 0x8F | 0x91)
}

/// Returns whether a DISCONNECT may carry `code` [MQTT-3.14.2-1].
pub(super) fn in_disconnect(code: u8) -> bool {
    matches!(code, 0x00 | 0x04 | 0x80..=0x83 | 0x87 | 0x89 | 0x8B..=0x90 | 0x93..=0xA2)
}

/// Returns whether an AUTH may carry `code` [MQTT-3.15.2-1].
pub(super) fn in_auth(code: u8) -> bool {
    matches!(code, SUCCESS | CONTINUE_AUTHENTICATION | RE_AUTHENTICATE)
}

/// A reason code of a refusal in words, for logs.
pub fn words(code: u8) -> &'static str {
    match code {
        UNSPECIFIED_ERROR => "unspecified_error",
        MALFORMED_PACKET => "malformed_packet",
        PROTOCOL_ERROR => "protocol_error",
        IMPLEMENTATION_SPECIFIC_ERROR => "implementation_specific_error",
        UNSUPPORTED_PROTOCOL_VERSION => "unsupported_protocol_version",
        CLIENT_IDENTIFIER_NOT_VALID => "client_identifier_not_valid",
        BAD_USER_NAME_OR_PASSWORD => "bad_user_name_or_password",
        NOT_AUTHORIZED => "not_authorized",
        SERVER_UNAVAILABLE => "server_unavailable",
        SERVER_BUSY => "server_busy",
        BANNED => "banned",
        SERVER_SHUTTING_DOWN => "server_shutting_down",
        BAD_AUTHENTICATION_METHOD => "bad_authentication_method",
        KEEP_ALIVE_TIMEOUT => "keep_alive_timeout",
        SESSION_TAKEN_OVER => "session_taken_over",
        TOPIC_FILTER_INVALID => "topic_filter_invalid",
        TOPIC_NAME_INVALID => "topic_name_invalid",
        PACKET_IDENTIFIER_IN_USE => "packet_identifier_in_use",
        PACKET_IDENTIFIER_NOT_FOUND => "packet_identifier_not_found",
        RECEIVE_MAXIMUM_EXCEEDED => "receive_maximum_exceeded",
        TOPIC_ALIAS_INVALID => "topic_alias_invalid",
        PACKET_TOO_LARGE => "packet_too_large",
        MESSAGE_RATE_TOO_HIGH => "message_rate_too_high",
        QUOTA_EXCEEDED => "quota_exceeded",
        ADMINISTRATIVE_ACTION => "administrative_action",
        PAYLOAD_FORMAT_INVALID => "payload_format_invalid",
        RETAIN_NOT_SUPPORTED => "retain_not_supported",
        QOS_NOT_SUPPORTED => "qos_not_supported",
        USE_ANOTHER_SERVER => "use_another_server",
        SERVER_MOVED => "server_moved",
        SHARED_SUBSCRIPTIONS_NOT_SUPPORTED => "shared_subscriptions_not_supported",
        CONNECTION_RATE_EXCEEDED => "connection_rate_exceeded",
        MAXIMUM_CONNECT_TIME => "maximum_connect_time",
        SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED => "subscription_identifiers_not_supported",
        WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED => "wildcard_subscriptions_not_supported",
        _ => "unknown",
    }
}
