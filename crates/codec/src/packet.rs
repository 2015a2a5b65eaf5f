//! The packets of MQTT 3.1, 3.1.1 and 5.0 as values. One model for all levels: what a level does not
//! have is absent.

use std::sync::Arc;

use bytes::Bytes;
use gateway_core::{Properties, Protocol, QoS};

/// Any control packet, borrowing long fields from the bytes it was decoded from.
#[derive(Debug, Clone, PartialEq)]
pub enum Packet<'a> {
    /// CONNECT
    Connect(Box<Connect>),
    /// CONNACK
    ConnAck(Box<ConnAck>),
    /// PUBLISH
    Publish(Publish<'a>),
    /// PUBACK
    PubAck(Ack),
    /// PUBREC
    PubRec(Ack),
    /// PUBREL
    PubRel(Ack),
    /// PUBCOMP
    PubComp(Ack),
    /// SUBSCRIBE
    Subscribe(Subscribe),
    /// SUBACK
    SubAck(SubAck),
    /// UNSUBSCRIBE
    Unsubscribe(Unsubscribe),
    /// UNSUBACK
    UnsubAck(SubAck),
    /// PINGREQ
    PingReq,
    /// PINGRESP
    PingResp,
    /// DISCONNECT
    Disconnect(Box<Disconnect>),
    /// AUTH (v5)
    Auth(Box<AuthPacket>),
}

/// CONNECT.
#[derive(Debug, Clone, PartialEq)]
pub struct Connect {
    /// Protocol level.
    pub protocol: Protocol,
    /// v3: the client is the bridge of another broker. Mosquitto's bridges set the highest bit of the level for that; no
    /// specification has it.
    pub bridge: bool,
    /// Clean Start (v3: Clean Session).
    pub clean_start: bool,
    /// Keep alive in seconds, 0 is none.
    pub keep_alive: u16,
    /// Client identifier, possibly empty.
    pub client_id: String,
    /// Will, if any.
    pub will: Option<ConnectWill>,
    /// User name, if any.
    pub username: Option<String>,
    /// Password, if any.
    pub password: Option<Bytes>,
    /// v5: Session Expiry Interval.
    pub session_expiry: Option<u32>,
    /// v5: Receive Maximum.
    pub receive_maximum: Option<u16>,
    /// v5: Maximum Packet Size.
    pub maximum_packet_size: Option<u32>,
    /// v5: Topic Alias Maximum (absent: 0).
    pub topic_alias_maximum: u16,
    /// v5: Request Response Information.
    pub request_response_information: bool,
    /// v5: Request Problem Information (absent: true).
    pub request_problem_information: bool,
    /// v5: User Property.
    pub user: Vec<(String, String)>,
    /// v5: Authentication Method.
    pub auth_method: Option<String>,
    /// v5: Authentication Data.
    pub auth_data: Option<Bytes>,
}

impl Connect {
    /// A clean start without keep alive, will and user, and with the values that absent properties stand for.
    pub fn new(protocol: Protocol, client_id: impl Into<String>) -> Self {
        Self {
            protocol,
            bridge: false,
            clean_start: true,
            keep_alive: 0,
            client_id: client_id.into(),
            will: None,
            username: None,
            password: None,
            session_expiry: None,
            receive_maximum: None,
            maximum_packet_size: None,
            topic_alias_maximum: 0,
            request_response_information: false,
            request_problem_information: true,
            user: Vec::new(),
            auth_method: None,
            auth_data: None,
        }
    }
}

/// The will in a CONNECT.
#[derive(Debug, Clone, PartialEq)]
pub struct ConnectWill {
    /// Topic name.
    pub topic: String,
    /// Payload.
    pub payload: Bytes,
    /// QoS.
    pub qos: QoS,
    /// RETAIN.
    pub retain: bool,
    /// v5: Will Delay Interval (absent: 0).
    pub delay: u32,
    /// v5: Message Expiry Interval.
    pub expiry: Option<u32>,
    /// v5: other will properties, if any.
    pub properties: Option<Arc<Properties>>,
}

/// CONNACK. For v3 only `session_present` (3.1.1) and `code` are sent.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ConnAck {
    /// Session Present.
    pub session_present: bool,
    /// v5 reason code or v3 return code.
    pub code: u8,
    /// Session Expiry Interval, if the server changes it.
    pub session_expiry: Option<u32>,
    /// Receive Maximum.
    pub receive_maximum: Option<u16>,
    /// Maximum QoS, when below 2.
    pub maximum_qos: Option<u8>,
    /// Retain Available, when false.
    pub retain_available: Option<bool>,
    /// Maximum Packet Size.
    pub maximum_packet_size: Option<u32>,
    /// Assigned Client Identifier.
    pub assigned_client_id: Option<String>,
    /// Topic Alias Maximum.
    pub topic_alias_maximum: Option<u16>,
    /// Reason String.
    pub reason_string: Option<String>,
    /// User Property.
    pub user: Vec<(String, String)>,
    /// Wildcard Subscription Available, when false.
    pub wildcard_available: Option<bool>,
    /// Subscription Identifiers Available, when false.
    pub subscription_id_available: Option<bool>,
    /// Shared Subscription Available, when false.
    pub shared_available: Option<bool>,
    /// Server Keep Alive.
    pub server_keep_alive: Option<u16>,
    /// Response Information.
    pub response_information: Option<String>,
    /// Server Reference.
    pub server_reference: Option<String>,
    /// Authentication Method.
    pub auth_method: Option<String>,
    /// Authentication Data.
    pub auth_data: Option<Bytes>,
}

/// PUBLISH.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Publish<'a> {
    /// DUP.
    pub dup: bool,
    /// QoS.
    pub qos: QoS,
    /// RETAIN.
    pub retain: bool,
    /// Topic name; empty only with an alias.
    pub topic: &'a str,
    /// Packet id, 0 at QoS 0.
    pub packet_id: u16,
    /// Payload.
    pub payload: &'a [u8],
    /// v5: Topic Alias.
    pub alias: Option<u16>,
    /// v5: Message Expiry Interval, seconds.
    pub expiry: Option<u32>,
    /// v5: Subscription Identifiers (server to client only [MQTT-3.3.4-6]).
    pub ids: Vec<u32>,
    /// v5: the properties that travel with the message, if any.
    pub properties: Option<Arc<Properties>>,
}

/// PUBACK, PUBREC, PUBREL or PUBCOMP.
#[derive(Debug, Clone, PartialEq)]
pub struct Ack {
    /// Packet id.
    pub packet_id: u16,
    /// v5 reason code, else 0.
    pub code: u8,
    /// v5: Reason String.
    pub reason_string: Option<String>,
    /// v5: User Property.
    pub user: Vec<(String, String)>,
}

/// SUBSCRIBE.
#[derive(Debug, Clone, PartialEq)]
pub struct Subscribe {
    /// Packet id.
    pub packet_id: u16,
    /// v5: Subscription Identifier.
    pub id: Option<u32>,
    /// v5: User Property.
    pub user: Vec<(String, String)>,
    /// Filters, at least one, of the right form.
    pub filters: Vec<SubscribeFilter>,
}

/// One filter of a SUBSCRIBE.
#[derive(Debug, Clone, PartialEq)]
pub struct SubscribeFilter {
    /// Topic filter, with `$share/group/` if shared.
    pub filter: String,
    /// Highest QoS wanted.
    pub qos: QoS,
    /// v5: No Local.
    pub no_local: bool,
    /// v5: Retain As Published.
    pub retain_as_published: bool,
    /// v5: Retain Handling, 0 to 2.
    pub retain_handling: u8,
}

/// SUBACK or UNSUBACK.
#[derive(Debug, Clone, PartialEq)]
pub struct SubAck {
    /// Packet id.
    pub packet_id: u16,
    /// v5: Reason String.
    pub reason_string: Option<String>,
    /// v5: User Property.
    pub user: Vec<(String, String)>,
    /// One code per filter, in order; a v3 UNSUBACK has none on the wire.
    pub codes: Vec<u8>,
}

/// UNSUBSCRIBE.
#[derive(Debug, Clone, PartialEq)]
pub struct Unsubscribe {
    /// Packet id.
    pub packet_id: u16,
    /// v5: User Property.
    pub user: Vec<(String, String)>,
    /// Filters, at least one, of the right form.
    pub filters: Vec<String>,
}

/// DISCONNECT.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Disconnect {
    /// v5 reason code, else 0.
    pub code: u8,
    /// v5: Session Expiry Interval.
    pub session_expiry: Option<u32>,
    /// v5: Reason String.
    pub reason_string: Option<String>,
    /// v5: User Property.
    pub user: Vec<(String, String)>,
    /// v5: Server Reference.
    pub server_reference: Option<String>,
}

/// AUTH.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AuthPacket {
    /// Reason code: 0x00, 0x18 or 0x19.
    pub code: u8,
    /// Authentication Method.
    pub method: Option<String>,
    /// Authentication Data.
    pub data: Option<Bytes>,
    /// Reason String.
    pub reason_string: Option<String>,
    /// User Property.
    pub user: Vec<(String, String)>,
}
