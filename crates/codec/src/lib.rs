//! Bytes to packets and back, for MQTT 3.1, 3.1.1 and 5.0.
//!
//! Knows nothing of sockets, sessions or time. Decoding never panics, allocates nothing by a length it
//! has not checked against the bytes present, and borrows what is long; a PUBLISH without version 5
//! message properties allocates nothing at all.
//!
//! `decode` and `connect` name each other: CONNECT is long enough for a file of its own.

#![warn(clippy::cast_possible_truncation, reason = "a length cut in silence is a wrong packet")]

mod connect;
mod decode;
mod encode;
mod error;
mod frame;
#[cfg(any(test, feature = "fuzz"))]
mod fuzz;
mod packet;
mod primitive;
mod property;
mod publish;
pub mod reason;
#[cfg(test)]
mod tests;

pub use connect::decode_connect;
pub use decode::{PLAIN_PUBACK, count_filters, decode, decode_from_client, plain_ack, plain_pubacks};
pub use encode::{AckKind, disconnect, encode, encode_ack, encode_pingresp, encode_within};
pub use error::DecodeError;
pub use frame::{Frame, count_publishes, count_unwritten_qos0, end_of_begun, frame, frame_len};
#[cfg(any(test, feature = "fuzz"))]
pub use fuzz::fuzz_decode;
pub use packet::*;
pub use publish::{PublishFrame, decode_publish};

/// Length of the longest frame that MQTT can express.
pub const MAX_FRAME_LEN: usize = 1 + 4 + primitive::MAX_VARINT;
