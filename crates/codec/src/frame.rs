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
