//! In which form a CONNECT that cannot be decoded is answered.

use codec::DecodeError;

/// A form of CONNACK.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// The form of the levels before 5.
    Oldest,
    /// With a reason code.
    V5,
    /// None: the sender may not know MQTT, or has no code for its fault.
    Silence,
}

impl Form {
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
            (&b"\x10\x0e\x00\x04MQTT\x05"[..], Form::V5),
            (b"\x10\x8e\x80\x80\x00\x00\x04MQTT\x05", Form::V5),
            (b"\x10\x0e\x00\x04MQTT\x04", Form::Silence),
            (b"\x10\x0e\x00\x04MQTT", Form::Silence),
            (b"\x10\xff\xff\xff\xff\x00\x04MQTT\x05", Form::Silence),
            (b"\x10", Form::Silence),
            (b"", Form::Silence),
        ] {
            assert_eq!(Form::of(bytes, malformed), form, "{bytes:02x?}");
        }
    }

    #[test]
    fn a_level_that_is_not_spoken_is_answered_in_the_nearest_form() {
        for (level, form) in
            [(0, Form::Oldest), (3, Form::Oldest), (6, Form::V5), (0x85, Form::V5), (0xFF, Form::V5)]
        {
            let error = DecodeError::UnsupportedProtocol { name_ok: true, level };
            let bytes = [&b"\x10\x0e\x00\x04MQTT"[..], &[level]].concat();
            assert_eq!(Form::of(&bytes, error), form, "{level:#04x}");
        }
        let foreign = DecodeError::UnsupportedProtocol { name_ok: false, level: 6 };
        assert_eq!(Form::of(b"\x10\x0e\x00\x04MQTX\x06", foreign), Form::Silence);
    }
}
