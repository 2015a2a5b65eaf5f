//! A message offered to one receiver, and what became of it.

use super::{DropReason, QoS, QueueId};

/// Terms on which a message is offered to one receiver: the matching subscriptions, merged.
#[derive(Debug, Clone, Copy)]
pub struct Offer<'a> {
    /// Highest QoS granted; the message goes with this or its own, whichever is lower.
    pub qos: QoS,
    /// The RETAIN flag that the receiver gets [MQTT-3.3.1-8] [MQTT-3.3.1-12] [MQTT-3.3.1-13].
    pub retain: bool,
    /// Subscription identifiers of all matching subscriptions [MQTT-3.3.4-4].
    pub ids: &'a [u32],
    /// The shared group that chose this receiver, 0 for none.
    pub group: u32,
    /// The durable queue of that group, or none.
    pub group_queue: QueueId,
    /// True if the message may wait while the receiver has no connection.
    pub queue_offline: bool,
}

/// Result of an offer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Encoded into the out-buffer, or waiting for a connected receiver.
    Sent,
    /// Waiting for a receiver that is not connected.
    Queued,
    /// Not taken.
    Dropped(DropReason),
    /// Not wanted: a stream's own rules leave this message out. Counts neither as matched nor as dropped.
    Ignored,
}
