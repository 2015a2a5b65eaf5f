//! The closing handshake of a WebSocket (RFC 6455 section 7): one Close frame, and which status is in it.

use std::fmt;

use codec::reason;

/// Status of a Close frame (RFC 6455 section 7.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CloseStatus(u16);

impl CloseStatus {
    const NORMAL: Self = Self(1000);
    const GOING_AWAY: Self = Self(1001);
    /// A frame or an MQTT packet that the protocol forbids.
    pub(super) const PROTOCOL_ERROR: Self = Self(1002);
    /// A text frame [MQTT-6.0.0-1].
    pub(super) const UNSUPPORTED_DATA: Self = Self(1003);
    /// Payload that is not what it should be: a malformed MQTT packet, a reason of a Close that is no UTF-8.
    const INVALID_DATA: Self = Self(1007);
    /// An MQTT packet above a limit.
    const TOO_BIG: Self = Self(1009);

    /// Status for the MQTT 5 reason code with which the gateway ends a connection; `None` is for an end without one.
    pub(super) fn of(code: Option<u8>) -> Self {
        match code {
            Some(reason::MALFORMED_PACKET | reason::PAYLOAD_FORMAT_INVALID) => Self::INVALID_DATA,
            Some(
                reason::PROTOCOL_ERROR
                | reason::UNSUPPORTED_PROTOCOL_VERSION
                | reason::RECEIVE_MAXIMUM_EXCEEDED
                | reason::TOPIC_ALIAS_INVALID,
            ) => Self::PROTOCOL_ERROR,
            Some(reason::PACKET_TOO_LARGE) => Self::TOO_BIG,
            Some(reason::SERVER_SHUTTING_DOWN) => Self::GOING_AWAY,
            _ => Self::NORMAL,
        }
    }

    /// Status that answers a Close frame with this payload: its own, or why it has none that is valid. `None` answers
    /// an empty one.
    fn answering(payload: &[u8]) -> Option<Self> {
        let Some((status, text)) = payload.split_first_chunk() else {
            return (!payload.is_empty()).then_some(Self::PROTOCOL_ERROR);
        };
        let status = u16::from_be_bytes(*status);
        Some(match status {
            1000..=1003 | 1007..=1014 | 3000..=4999 if str::from_utf8(text).is_ok() => Self(status),
            1000..=1003 | 1007..=1014 | 3000..=4999 => Self::INVALID_DATA,
            _ => Self::PROTOCOL_ERROR,
        })
    }
}

impl fmt::Display for CloseStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::UNSUPPORTED_DATA => write!(f, "text instead of binary (close status {})", self.0),
            Self(status) => write!(f, "against RFC 6455 (close status {status})"),
        }
    }
}

/// Progress of the closing handshake of one connection.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) enum Closing {
    #[default]
    Open,
    /// The peer gave cause for the last frame: its own Close, or a frame that is refused.
    Due(Option<CloseStatus>),
    Sent,
}

impl Closing {
    /// Notes the peer's Close frame.
    pub(super) fn answer(&mut self, payload: &[u8]) {
        self.due(CloseStatus::answering(payload));
    }

    /// Notes a frame that is refused with this status.
    pub(super) fn refuse(&mut self, status: CloseStatus) {
        self.due(Some(status));
    }

    fn due(&mut self, status: Option<CloseStatus>) {
        if matches!(self, Self::Open) {
            *self = Self::Due(status);
        }
    }

    /// Last frame of the connection, with `status` unless the peer has given cause for another. `None` once it was taken.
    pub(super) fn last_frame(&mut self, status: CloseStatus) -> Option<Vec<u8>> {
        let status = match std::mem::replace(self, Self::Sent) {
            Self::Sent => return None,
            Self::Due(status) => status,
            Self::Open => Some(status),
        };
        let payload = status.map(|status| status.0.to_be_bytes());
        let payload = payload.as_ref().map_or(&[][..], |bytes| bytes);
        Some([&[0x88, payload.len() as u8], payload].concat())
    }
}
