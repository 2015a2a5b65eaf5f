//! Counters of what the session and the broker both count, which know no other crate in common.

use crate::DropReason;

crate::counters! {
    /// Any growth means that somebody did not get something. Which devices these are: `Devices.ListTopDevices` ranks them by
    /// what waits, by bytes, by what is not acknowledged, or by drops; `Devices.ListQueue` shows what waits for one.
    "mqtt_messages_dropped_total": "Deliveries dropped" {
        /// QoS 0 for a session without a connection
        dropped_offline(reason = "offline");
        /// slow or absent subscribers: the session's queue is full
        dropped_queue_full(reason = "queue_full");
        /// the process-wide budget, `limits.memory_budget`
        dropped_memory(reason = "memory");
        /// the Message Expiry Interval, or `limits.offline_age`
        dropped_expired(reason = "expired");
        /// above the client's Maximum Packet Size
        dropped_too_large(reason = "too_large");
        /// QoS 0 that a connection which ended had not sent
        dropped_connection_lost(reason = "connection_lost");
        /// what waited for a session that ended
        dropped_session_ended(reason = "session_ended");
        /// the rules have changed since it was queued
        dropped_not_authorized(reason = "not_authorized");
        /// `Devices.PurgeQueue`
        dropped_purged(reason = "purged");
    }
    /// Messages that nobody got and that were refused to their publisher. MQTT 3.1 has no way to tell its client: there the
    /// message is acknowledged as if it had been taken.
    "mqtt_messages_refused_total": "Messages refused as a whole" {
        /// `limits.memory_budget`
        refused_memory(reason = "memory");
        /// the disk takes no more and a persistent session, or a group that refuses, would have got them
        refused_store(reason = "store");
        /// much waits for the disk, and more of it is the publisher's own than its share
        refused_share(reason = "share");
        /// the device may not publish there in non-broker mode, or topic or payload are not acceptable
        refused_not_accepted(reason = "not_accepted");
        /// the rules
        refused_not_authorized(reason = "not_authorized");
        /// the gateway answers the topic, and not for this device
        reserved_foreign(reason = "reserved_topic");
    }
}

impl DropReason {
    /// Counts messages that were dropped for this reason.
    #[inline]
    pub fn count(self, messages: u64) {
        count(|c| {
            match self {
                Self::Offline => &c.dropped_offline,
                Self::QueueFull => &c.dropped_queue_full,
                Self::Memory => &c.dropped_memory,
                Self::Expired => &c.dropped_expired,
                Self::TooLarge => &c.dropped_too_large,
                Self::ConnectionLost => &c.dropped_connection_lost,
                Self::SessionEnded => &c.dropped_session_ended,
                Self::NotAuthorized => &c.dropped_not_authorized,
                Self::Purged => &c.dropped_purged,
            }
            .add(messages);
        });
    }
}
