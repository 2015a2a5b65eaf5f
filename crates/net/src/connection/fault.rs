//! The packet for which a connection ends, for the log: an operator who reads `malformed_packet` there looks for a
//! fault in a device.

use codec::{DecodeError, Frame};
use gateway_core::Protocol;

/// The key of the limit of packets.
const MAX_PACKET_SIZE: &str = "limits.max_packet_size";

/// The largest packet that is decoded again for its fault: a larger one would keep the others of its shard waiting.
const MOST_DECODED_AGAIN: usize = 4 << 10;

/// A packet that was refused, as far as it is known.
#[derive(Debug, Default)]
pub(crate) struct PacketFault {
    /// Its type.
    pub packet: &'static str,
    /// Bytes of all of it.
    pub size: Option<usize>,
    /// The limit that it exceeds, and the key that sets that.
    pub limit: Option<usize>,
    pub key: Option<&'static str>,
    /// Description of the fault.
    pub detail: Option<String>,
}

impl PacketFault {
    /// A packet whose length alone is reason enough: `bytes` begin with it, and packets may be `max` bytes long.
    pub(crate) fn of_head(bytes: &[u8], error: &DecodeError, max: usize) -> Self {
        let packet = bytes.first().map_or("none", |first| packet_type(*first));
        let size = codec::frame_len(bytes).ok().flatten();
        match error {
            DecodeError::TooLarge => {
                Self { packet, size, limit: Some(max), key: Some(MAX_PACKET_SIZE), detail: None }
            }
            error => Self { packet, size, detail: Some(error.to_string()), ..Self::default() },
        }
    }

    /// A packet that was read. A small one is decoded again, which happens once in a connection.
    pub(crate) fn of_frame(frame: &Frame<'_>, protocol: Protocol) -> Self {
        let decoded = (frame.len <= MOST_DECODED_AGAIN).then(|| codec::decode_from_client(frame, protocol));
        let detail = decoded.and_then(Result::err).map(|error| error.to_string());
        Self { packet: packet_type(frame.first), size: Some(frame.len), detail, ..Self::default() }
    }
}

/// The name of the packet type in the first byte of a packet.
pub(crate) fn packet_type(first: u8) -> &'static str {
    const NAMES: [&str; 16] = [
        "reserved",
        "CONNECT",
        "CONNACK",
        "PUBLISH",
        "PUBACK",
        "PUBREC",
        "PUBREL",
        "PUBCOMP",
        "SUBSCRIBE",
        "SUBACK",
        "UNSUBSCRIBE",
        "UNSUBACK",
        "PINGREQ",
        "PINGRESP",
        "DISCONNECT",
        "AUTH",
    ];
    NAMES[usize::from(first >> 4)]
}
