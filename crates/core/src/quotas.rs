//! Quotas that several connections share.

use serde::{Deserialize, Serialize};

use crate::units::ByteSize;

/// Quotas of all connections of one identity, or of one tenant: totals, and rates per second; 0 is no limit.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Quotas {
    /// Connections at once.
    pub connections: usize,
    /// Sessions, with and without a connection.
    pub sessions: usize,
    /// Subscriptions of all these sessions.
    pub subscriptions: usize,
    /// Retained messages that they have set.
    pub retained_messages: usize,
    /// Bytes of these retained messages.
    pub retained_bytes: ByteSize,
    /// Messages per second from all these connections; reading pauses.
    pub message_rate: u32,
    /// Bytes per second from them; reading pauses.
    pub byte_rate: ByteSize,
    /// Messages per second to them; sending pauses.
    pub message_rate_out: u32,
    /// Bytes per second to them; sending pauses.
    pub byte_rate_out: ByteSize,
}

impl Quotas {
    /// Returns whether nothing is limited.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}
