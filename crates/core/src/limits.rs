//! Every bound that a peer can run into. Sizes in bytes, rates per second.

use std::{fmt, str::FromStr, time::Duration};

use serde::{
    Deserialize, Serialize,
    de::{IntoDeserializer, value},
};

use crate::{
    Quotas, machine,
    units::{ByteSize, Span},
};

/// Treatment of a QoS 1 or 2 message for a full queue. QoS 0 is always dropped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OverflowPolicy {
    /// Drop the oldest waiting message.
    DropOldest,
    /// Drop the new message.
    #[default]
    DropNewest,
    /// Close the subscriber's connection.
    Disconnect,
}

/// Choice of a member in a shared group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SharedStrategy {
    /// In turn.
    #[default]
    RoundRobin,
    /// At random.
    Random,
    /// By the publisher's client id.
    HashClient,
    /// By topic.
    HashTopic,
    /// One member until it leaves.
    Sticky,
    /// The member with the fewest messages waiting or un-acknowledged.
    LeastInflight,
}

impl fmt::Display for SharedStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

impl FromStr for SharedStrategy {
    type Err = value::Error;

    fn from_str(text: &str) -> Result<Self, value::Error> {
        Self::deserialize(text.into_deserializer())
    }
}

/// `[limits]` of the configuration.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Largest MQTT packet accepted (announced in v5 CONNACK).
    pub max_packet_size: ByteSize,
    /// Largest CONNECT accepted.
    pub max_connect_size: ByteSize,
    /// Largest will accepted: topic, payload and properties.
    pub will_bytes: ByteSize,
    /// Longest topic name or filter.
    pub max_topic_bytes: usize,
    /// Most levels in a topic name or filter.
    pub max_topic_levels: usize,
    /// Longest client id.
    pub max_client_id_bytes: usize,
    /// Subscriptions per session.
    pub max_subscriptions: usize,
    /// Different sets of wildcard levels in the filters of one session (`a/+/b` and `c/+/d` are the same): the cost of
    /// a match grows with their number.
    pub max_filter_shapes: usize,
    /// Filters in one SUBSCRIBE or UNSUBSCRIBE; a packet with more closes the connection (0x97).
    pub max_filters_per_packet: usize,
    /// Bytes of filters per session.
    pub subscription_bytes: ByteSize,
    /// Un-acknowledged QoS 1 and 2 messages towards a client.
    pub max_inflight: u16,
    /// Un-acknowledged QoS 2 messages from a client (v5 Receive Maximum).
    pub receive_maximum: u16,
    /// Inbound topic aliases (v5 Topic Alias Maximum).
    pub topic_alias_maximum: u16,
    /// Messages waiting for a connected session.
    pub mailbox_messages: usize,
    /// Bytes waiting for a connected session.
    pub mailbox_bytes: ByteSize,
    /// Messages waiting for a session without a connection.
    pub offline_messages: usize,
    /// Bytes waiting for a session without a connection.
    pub offline_bytes: ByteSize,
    /// How long a message waits in the queue of a session on disk, or of its shared group; then it has expired. With the
    /// store off: how long it waits without a connection. 0 is no limit.
    pub offline_age: Span,
    /// Whether QoS 0 messages wait for a session without a connection.
    pub offline_qos0: bool,
    /// Full queues: what happens to QoS 1 and 2.
    pub overflow: OverflowPolicy,
    /// Bytes that peers may make the whole process hold; 0 is a quarter of what the process may use, at least 64 MiB.
    pub memory_budget: ByteSize,
    /// Retained messages in all.
    pub retained_messages: usize,
    /// Bytes of retained messages in all.
    pub retained_bytes: ByteSize,
    /// Most retained messages replayed for one subscription; 0 is no limit.
    pub retained_per_subscribe: usize,
    /// Topics with a retained message that are visited per second for the new subscriptions of one client, 0 is no
    /// limit; beyond it the client's retained messages come more slowly.
    pub retained_scan_rate: u32,
    /// Connections in all.
    pub max_connections: usize,
    /// Connections at once from one address through one listener, 0 is no limit.
    pub max_connections_per_address: usize,
    /// TLS, WebSocket and CONNECT handshakes under way at once on one listener; more wait.
    pub max_handshakes: usize,
    /// The same from one address, 0 is no limit of its own.
    pub max_handshakes_per_address: usize,
    /// New connections per second and listener, 0 is no limit; more wait.
    pub accept_rate: u32,
    /// New connections per second and listener from one address, 0 is no limit; what 30 seconds allow may come at once,
    /// more are closed.
    pub accept_rate_per_address: u32,
    /// Messages per second from one client, 0 is no limit; reading pauses.
    pub client_message_rate: u32,
    /// Bytes per second from one client, 0 is no limit; reading pauses.
    pub client_byte_rate: ByteSize,
    /// Messages per second to one client, 0 is no limit; sending pauses.
    pub client_message_rate_out: u32,
    /// Bytes per second to one client, 0 is no limit; sending pauses.
    pub client_byte_rate_out: ByteSize,
    /// From accept to a complete CONNECT.
    pub connect_timeout: Span,
    /// A packet that has begun must continue: the connection closes unless the rest, or another 64 KiB, arrives within
    /// this.
    pub packet_timeout: Span,
    /// A write that makes no progress for this long closes the connection.
    pub write_timeout: Span,
    /// A TCP connection on which nothing has come for this long is probed by the system, and closed if the peer is gone;
    /// 0 turns that off.
    pub tcp_keepalive: Span,
    /// Smallest keep alive granted to v5 clients, seconds; v3 clients cannot be told, so theirs stays.
    pub keep_alive_min: u16,
    /// Largest keep alive granted to v5 clients, seconds, 0 is no limit; also for clients of any version that ask for none.
    pub keep_alive_max: u16,
    /// Longest session expiry granted, seconds; v3 persistent sessions get it too.
    pub session_expiry_max: u32,
    /// Sessions without a connection, in all.
    pub max_offline_sessions: usize,
    /// Highest QoS granted and accepted.
    pub max_qos: u8,
    /// Retained messages allowed.
    pub retain_available: bool,
    /// Wildcard filters allowed.
    pub wildcard_available: bool,
    /// Shared subscriptions allowed.
    pub shared_available: bool,
    /// Subscription identifiers allowed (v5).
    pub subscription_id_available: bool,
    /// Check payloads that claim to be UTF-8 (v5 payload format indicator).
    pub validate_payload_format: bool,
    /// Strategy of shared groups without their own.
    pub shared_strategy: SharedStrategy,
    /// Strategy by group name.
    pub shared_groups: std::collections::BTreeMap<String, SharedStrategy>,
    /// Messages waiting for a shared group while all its members are away.
    pub group_queue_messages: usize,
    /// Bytes waiting for a shared group while all its members are away.
    pub group_queue_bytes: ByteSize,
    /// Bytes buffered for one gRPC stream.
    pub stream_buffer: ByteSize,
    /// All connections of one identity: those with one user name that was proved, else those with one client id.
    pub identity: Quotas,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_packet_size: ByteSize(1 << 20),
            max_connect_size: ByteSize(256 << 10),
            will_bytes: ByteSize(128 << 10),
            max_topic_bytes: 4096,
            max_topic_levels: 128,
            max_client_id_bytes: 256,
            max_subscriptions: 10_000,
            max_filter_shapes: 64,
            max_filters_per_packet: 10_000,
            subscription_bytes: ByteSize(4 << 20),
            max_inflight: 1024,
            receive_maximum: 1024,
            topic_alias_maximum: 64,
            mailbox_messages: 10_000,
            mailbox_bytes: ByteSize(16 << 20),
            offline_messages: 10_000,
            offline_bytes: ByteSize(16 << 20),
            offline_age: Span(Duration::ZERO),
            offline_qos0: false,
            overflow: OverflowPolicy::DropNewest,
            memory_budget: ByteSize(0),
            retained_messages: 1_000_000,
            retained_bytes: ByteSize(512 << 20),
            retained_per_subscribe: 0,
            retained_scan_rate: 250_000,
            max_connections: 1_000_000,
            max_connections_per_address: 60_000,
            max_handshakes: 1_000,
            max_handshakes_per_address: 500,
            accept_rate: 0,
            accept_rate_per_address: 2_000,
            client_message_rate: 0,
            client_byte_rate: ByteSize(0),
            client_message_rate_out: 0,
            client_byte_rate_out: ByteSize(0),
            connect_timeout: Span(Duration::from_secs(10)),
            packet_timeout: Span(Duration::from_secs(30)),
            write_timeout: Span(Duration::from_secs(20)),
            tcp_keepalive: Span(Duration::from_hours(1)),
            keep_alive_min: 0,
            keep_alive_max: 0,
            session_expiry_max: 7 * 24 * 3600,
            max_offline_sessions: 1_000_000,
            max_qos: 2,
            retain_available: true,
            wildcard_available: true,
            shared_available: true,
            subscription_id_available: true,
            validate_payload_format: false,
            shared_strategy: SharedStrategy::RoundRobin,
            shared_groups: std::collections::BTreeMap::new(),
            group_queue_messages: 10_000,
            group_queue_bytes: ByteSize(16 << 20),
            stream_buffer: ByteSize(4 << 20),
            identity: Quotas::default(),
        }
    }
}

impl Limits {
    /// The part of the budget for what waits for the disk, where there is a store: seven twelfths of it are for queues, a
    /// sixth each for sessions and retained messages, a twelfth for what the Publisher remembers.
    pub fn waiting_for_disk(&self) -> ByteSize {
        const MOST: usize = 384 << 20;
        ByteSize((self.budget().0 / 4).min(MOST))
    }

    /// The part of the budget for latest values that wait in memory to be written, however large `latest.max_bytes` is.
    pub fn waiting_values(&self) -> ByteSize {
        ByteSize(self.budget().0 / 8)
    }

    /// The part of the budget for history that waits in memory to be written, where a topic has one.
    pub fn waiting_history(&self) -> ByteSize {
        const MOST: usize = 64 << 20;
        ByteSize((self.budget().0 / 16).min(MOST))
    }

    /// `memory_budget` in bytes on this machine.
    pub fn budget(&self) -> ByteSize {
        const LEAST: usize = 64 << 20;
        match self.memory_budget {
            ByteSize(0) => ByteSize((*machine::MEMORY / 4).max(LEAST)),
            budget => budget,
        }
    }
}
