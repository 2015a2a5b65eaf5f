//! Definition of a group, as it is asked for and kept.

use std::{collections::BTreeMap, time::Duration};

use gateway_core::QoS;
use groups::{GroupConfig, OrderKey};
use serde::{Deserialize, Serialize};

/// Filter of a group's messages. A message must pass every kind of filter that is set.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GroupMessageFilter {
    /// Client ids.
    pub devices: Vec<String>,
    /// Starts of client ids.
    pub device_prefixes: Vec<String>,
    /// MQTT topic filters; none is `#`.
    pub topics: Vec<String>,
    /// Topics not wanted.
    pub exclude_topics: Vec<String>,
    /// Devices not wanted.
    pub exclude_devices: Vec<String>,
    /// Also what backends publish.
    pub include_backends: bool,
    /// Bits of the lowest QoS that is wanted.
    pub min_qos: u8,
    /// Kinds of events, by name.
    pub events: Vec<String>,
}

impl GroupMessageFilter {
    /// The lowest QoS that is wanted.
    pub fn least_qos(&self) -> QoS {
        QoS::from_bits(self.min_qos).unwrap_or_default()
    }
}

/// Policy for a group that holds more than [`Definition::retention_bytes`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RetentionPolicy {
    /// The oldest messages go, and are counted as lost.
    #[default]
    DropOldest,
    /// Matching messages are refused.
    Refuse,
}

/// Messages that keep their order among each other, in the kept form.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum KeptOrder {
    /// Messages of a device.
    #[default]
    Device,
    /// Messages of a device on a topic.
    DeviceTopic,
    /// None.
    None,
}

/// A group as somebody asked for it. Spans are in milliseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Definition {
    /// Its name, which nobody else has.
    pub name: String,
    /// Filter of its messages.
    pub filter: GroupMessageFilter,
    /// Fixed at its creation.
    pub order: KeptOrder,
    /// Longest time for which a delivered message may stay unacknowledged.
    pub ack_deadline: u64,
    /// Deliveries before a message is given up; 0 is no limit.
    pub max_attempts: u32,
    /// The first pause before a redelivery.
    pub min_backoff: u64,
    /// The longest.
    pub max_backoff: u64,
    /// Longest time for which unacknowledged messages are kept; 0 is without limit.
    pub retention_age: u64,
    /// Bytes of them that are kept; 0 is without limit.
    pub retention_bytes: u64,
    /// Longest time for which acknowledged messages are kept.
    pub replay_age: u64,
    /// Policy once `retention_bytes` is reached.
    pub when_full: RetentionPolicy,
    /// Nothing is delivered.
    pub paused: bool,
    /// For what the user wants to remember.
    pub labels: BTreeMap<String, String>,
}

impl Definition {
    /// Returns the part of the definition that the delivery logic needs.
    pub fn config(&self) -> GroupConfig {
        GroupConfig {
            order_key: match self.order {
                KeptOrder::Device => OrderKey::Device,
                KeptOrder::DeviceTopic => OrderKey::DeviceTopic,
                KeptOrder::None => OrderKey::None,
            },
            ack_deadline: Duration::from_millis(self.ack_deadline),
            max_attempts: self.max_attempts,
            min_backoff: Duration::from_millis(self.min_backoff),
            max_backoff: Duration::from_millis(self.max_backoff),
            paused: self.paused,
        }
    }
}
