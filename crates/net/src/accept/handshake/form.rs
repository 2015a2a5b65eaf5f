//! Forms of a CONNACK: one that fits its client, and the answer to a CONNECT that cannot be decoded.

use codec::{ConnAck, DecodeError, Packet};
use session::LinkParams;

/// A form of CONNACK.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ConnackForm {
    /// The form of the levels before 5.
    Oldest,
    /// With a reason code.
    V5,
    /// None: the sender may not know MQTT, or has no code for its fault.
    Silence,
}

impl ConnackForm {
    /// For `bytes` that begin with the CONNECT, as far as it came.
    pub(super) fn of(bytes: &[u8], error: DecodeError) -> Self {
        match (error, level(bytes)) {
            // Levels above 5 come after version 5, and it has no bit for bridges.
            (_, Some(level)) if level & 0x7F >= 5 => Self::V5,
            (DecodeError::UnsupportedProtocol { name_ok: true, .. }, _) => Self::Oldest,
            _ => Self::Silence,
        }
    }
}

/// Returns whether the CONNACK fits into the client's maximum [MQTT-3.1.2-24]; leaves out dispensable properties to
/// make it fit.
pub(super) fn fit_connack(connack: &mut ConnAck, link: &LinkParams) -> bool {
    let max = usize::try_from(link.maximum_packet_size).unwrap_or(usize::MAX);
    let fits = |connack: &ConnAck| {
        let packet = Packet::ConnAck(Box::new(connack.clone()));
        codec::encode_within(&packet, link.protocol, max, &mut Vec::new())
    };
    if fits(connack) {
        return true;
    }
    connack.response_information.take().is_some() && fits(connack)
}

/// The protocol level of a CONNECT of MQTT, if it was read that far.
fn level(connect: &[u8]) -> Option<u8> {
    let length = connect.get(1..)?.iter().take(4).position(|byte| byte & 0x80 == 0)?;
    connect.get(length + 2..)?.strip_prefix(b"\0\x04MQTT")?.first().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_answered_before_the_level_was_read() {
        let malformed = DecodeError::Malformed("");
        for (bytes, form) in [
            (&b"\x10\x0e\x00\x04MQTT\x05"[..], ConnackForm::V5),
            (b"\x10\x8e\x80\x80\x00\x00\x04MQTT\x05", ConnackForm::V5),
            (b"\x10\x0e\x00\x04MQTT\x04", ConnackForm::Silence),
            (b"\x10\x0e\x00\x04MQTT", ConnackForm::Silence),
            (b"\x10\xff\xff\xff\xff\x00\x04MQTT\x05", ConnackForm::Silence),
            (b"\x10", ConnackForm::Silence),
            (b"", ConnackForm::Silence),
        ] {
            assert_eq!(ConnackForm::of(bytes, malformed), form, "{bytes:02x?}");
        }
    }

    #[test]
    fn a_level_that_is_not_spoken_is_answered_in_the_nearest_form() {
        for (level, form) in [
            (0, ConnackForm::Oldest),
            (3, ConnackForm::Oldest),
            (6, ConnackForm::V5),
            (0x85, ConnackForm::V5),
            (0xFF, ConnackForm::V5),
        ] {
            let error = DecodeError::UnsupportedProtocol { name_ok: true, level };
            let bytes = [&b"\x10\x0e\x00\x04MQTT"[..], &[level]].concat();
            assert_eq!(ConnackForm::of(&bytes, error), form, "{level:#04x}");
        }
        let foreign = DecodeError::UnsupportedProtocol { name_ok: false, level: 6 };
        assert_eq!(ConnackForm::of(b"\x10\x0e\x00\x04MQTX\x06", foreign), ConnackForm::Silence);
    }
}
