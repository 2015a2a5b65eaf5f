//! Answers to a packet of the client: an acknowledgement, or the end of its connection.

use std::sync::Arc;

use codec::{AckKind, DecodeError};
use gateway_core::Commit;

/// An acknowledgement, to be sent after those before it, and not before what it waits for is on disk.
#[derive(Debug)]
pub struct Reply {
    /// Kind of packet.
    pub kind: AckKind,
    /// Packet identifier.
    pub packet_id: u16,
    /// Reason code of version 5.
    pub code: u8,
    /// Commit that must be done first.
    pub after: Option<Arc<Commit>>,
}

/// The client broke the protocol, or was refused where nothing else can say so: the connection ends with this reason code
/// of version 5.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Violation(pub u8);

impl From<DecodeError> for Violation {
    fn from(error: DecodeError) -> Self {
        Self(error.reason_code())
    }
}
