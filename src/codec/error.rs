//! Why bytes are not an acceptable packet, and the reason code that says so to the peer.

use thiserror::Error;

use super::reason;

/// A fault in what the peer sent. The text cites the violated statement where there is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// The bytes cannot be parsed as the specification says.
    #[error("malformed packet: {0}")]
    Malformed(&'static str),
    /// The bytes can be parsed, but say what the protocol forbids.
    #[error("protocol error: {0}")]
    Protocol(&'static str),
    /// The frame is longer than the receiver accepts.
    #[error("packet too large [MQTT-3.2.2-15]")]
    TooLarge,
    /// A CONNECT for a protocol we do not speak [MQTT-3.1.2-1] [MQTT-3.1.2-2]. Answer CONNACK 0x84 in
    /// the form of version 5 when `name_ok` and `level` is above 5, else return code 0x01.
    #[error("unsupported protocol level {level}")]
    UnsupportedProtocol {
        /// Whether the protocol name is one that we know.
        name_ok: bool,
        /// The level asked for.
        level: u8,
    },
    /// A topic name that can be no topic name.
    #[error("topic name invalid: {0}")]
    TopicName(&'static str),
    /// A topic alias of 0.
    #[error("topic alias is 0 [MQTT-3.3.2-8]")]
    TopicAlias,
}

impl DecodeError {
    /// The MQTT 5 reason code for CONNACK or DISCONNECT.
    pub fn reason_code(&self) -> u8 {
        match self {
            Self::Malformed(_) => reason::MALFORMED_PACKET,
            Self::Protocol(_) => reason::PROTOCOL_ERROR,
            Self::TooLarge => reason::PACKET_TOO_LARGE,
            Self::UnsupportedProtocol { .. } => reason::UNSUPPORTED_PROTOCOL_VERSION,
            Self::TopicName(_) => reason::TOPIC_NAME_INVALID,
            Self::TopicAlias => reason::TOPIC_ALIAS_INVALID,
        }
    }
}
