//! Finds packet boundaries in a stream of bytes: fixed header and Remaining Length (section 2.1).

use gateway_core::Protocol;

use super::{
    DecodeError,
    primitive::{varint, varint_len},
};

/// One control packet as it lies in the read buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    /// First byte: packet type and flags.
    pub first: u8,
    /// Variable header and payload.
    pub body: &'a [u8],
    /// Bytes of the whole frame, fixed header included.
    pub len: usize,
}

impl Frame<'_> {
    /// Returns whether this is a PUBLISH.
    #[inline]
    pub fn is_publish(&self) -> bool {
        self.first >> 4 == 3
    }

    /// Fails if `protocol` demands the shortest form of Remaining Length and this is not it
    /// [MQTT-1.5.5-1]. MQTT 3 has no such rule, and devices with fixed-width lengths exist.
    #[inline]
    pub fn check_length(&self, protocol: Protocol) -> Result<(), DecodeError> {
        let shortest = 1 + varint_len(self.body.len()) + self.body.len();
        if protocol.is_v5() && self.len != shortest {
            return Err(DecodeError::Malformed("Remaining Length not in its shortest form [MQTT-1.5.5-1]"));
        }
        Ok(())
    }
}

/// Length of the frame that starts at `buf`; `Ok(None)` while its header is incomplete.
#[inline]
pub fn frame_len(buf: &[u8]) -> Result<Option<usize>, DecodeError> {
    Ok(header(buf)?.map(|(header, body)| header + body))
}

/// The frame at the start of `buf`; `Ok(None)` when more bytes are needed. A frame longer than `max`
/// is refused as soon as its length is known.
#[inline]
pub fn frame(buf: &[u8], max: usize) -> Result<Option<Frame<'_>>, DecodeError> {
    let Some((header, body_len)) = header(buf)? else {
        return Ok(None);
    };
    let len = header + body_len;
    if len > max {
        // [MQTT-3.2.2-15]
        return Err(DecodeError::TooLarge);
    }
    let (Some(&first), Some(body)) = (buf.first(), buf.get(header..len)) else {
        return Ok(None);
    };
    Ok(Some(Frame { first, body, len }))
}

/// PUBLISH packets in `bytes`, which are whole frames.
pub fn count_publishes(bytes: &[u8]) -> u32 {
    let (mut publishes, mut rest) = (0, bytes);
    while let Ok(Some(len)) = frame_len(rest) {
        publishes += u32::from(rest[0] >> 4 == 3);
        rest = rest.get(len..).unwrap_or_default();
    }
    publishes
}

/// PUBLISH packets of QoS 0 in `bytes` that are not completely below `written`.
pub fn count_unwritten_qos0(bytes: &[u8], written: usize) -> u64 {
    let (mut unwritten, mut at) = (0, 0);
    while let Ok(Some(len)) = frame_len(&bytes[at..]) {
        let is_qos0 = bytes[at] & 0xF6 == 0x30;
        unwritten += u64::from(is_qos0 && at + len > written);
        at += len;
        if at >= bytes.len() {
            break;
        }
    }
    unwritten
}

/// The end of the frame in which `written` lies, or `written` itself between two frames. `None` if `bytes` has only a part of
/// that frame.
pub fn end_of_begun(bytes: &[u8], written: usize) -> Option<usize> {
    let mut at = 0;
    while at < written {
        match frame_len(&bytes[at..]) {
            Ok(Some(len)) if at + len <= bytes.len() => at += len,
            _ => return None,
        }
    }
    Some(at)
}

/// Lengths of fixed header and body.
#[inline]
fn header(buf: &[u8]) -> Result<Option<(usize, usize)>, DecodeError> {
    let Some((_, rest)) = buf.split_first() else {
        return Ok(None);
    };
    let Some((value, width)) = varint(rest)? else {
        return Ok(None);
    };
    Ok(Some((1 + width, value as usize)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// PUBLISH of QoS 0 (6 bytes), PINGRESP (2), PUBLISH of QoS 1 (8).
    const FRAMES: &[u8] = b"\x30\x04\0\x01tp\xD0\0\x32\x06\0\x01t\0\x01p";

    #[test]
    fn packets_are_counted_in_whole_frames() {
        assert_eq!([count_publishes(FRAMES), count_publishes(&FRAMES[6..]), count_publishes(b"")], [2, 1, 0]);
        let unwritten = [0, 1, 5, 6, 16].map(|written| count_unwritten_qos0(FRAMES, written));
        assert_eq!(unwritten, [1, 1, 1, 0, 0]);
        assert_eq!(count_unwritten_qos0(b"", 0), 0);
    }

    #[test]
    fn a_begun_frame_ends_where_its_length_says() {
        let ends = [0, 1, 6, 7, 8, 16].map(|written| end_of_begun(FRAMES, written));
        assert_eq!(ends, [Some(0), Some(6), Some(6), Some(8), Some(8), Some(16)]);
        assert_eq!(end_of_begun(&FRAMES[..10], 9), None, "the rest of it is not there");
    }
}
