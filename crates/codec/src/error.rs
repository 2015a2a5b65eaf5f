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
    /// A CONNECT for a protocol we do not speak. If `name_ok`, it is MQTT of another level: one above 5 is answered with
    /// reason code 0x84, another with return code 1 in the form that all levels before 5 know [MQTT-3.1.2-2]. If not, it
    /// is not MQTT, and is told nothing [MQTT-3.1.2-1].
    #[error("unsupported protocol level {level}")]
    UnsupportedProtocol {
        /// True if the protocol name is one that we know.
        name_ok: bool,
        /// The level asked for.
        level: u8,
    },
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
            Self::TopicAlias => reason::TOPIC_ALIAS_INVALID,
        }
    }
}
