//! Settings of [`ScyllaLatest`](super::ScyllaLatest).

use std::{fmt, sync::Arc, time::Duration};

use gateway_core::{
    Timestamp,
    database::{Compression, Consistency},
    matches,
};
use rustls::ClientConfig;
use scylla::{client::Compression as Algorithm, statement::Consistency as Level};

use super::row::{self, BoundRow};
use store::LatestValue;

/// Most seconds that Cassandra lets a row live: 20 years.
const MAX_TTL: u64 = 20 * 365 * 24 * 60 * 60;

/// Cassandra 4.1, and 5 as it is set at first, refuses rows that live past January 2038: 90 days less, as a write may
/// come long after its value. Beyond it only [`MAX_TTL`] counts.
const END: u64 = i32::MAX as u64 - 90 * 24 * 60 * 60;

/// Connection, writes and reads of [`ScyllaLatest`](super::ScyllaLatest).
#[derive(Clone)]
pub struct ScyllaOptions {
    /// Nodes to begin with, `host` or `host:port`; port 9042 if it is not said.
    pub contact_points: Vec<String>,
    /// Datacenter whose nodes are asked; empty is any.
    pub datacenter: String,
    /// User name; empty logs in without.
    pub username: String,
    /// Password.
    pub password: String,
    /// TLS to the nodes; without it connections are plain. Nodes are verified by their addresses, so their certificates
    /// must name them.
    pub tls: Option<Arc<ClientConfig>>,
    /// Keyspace of the tables: letters, digits and `_`.
    pub keyspace: String,
    /// CQL map of the keyspace's replication, used when it is made.
    pub replication: String,
    /// Make and upgrade keyspace and tables.
    pub migrate: bool,
    /// Replicas that must have a value before it counts as written.
    pub write_consistency: Consistency,
    /// Replicas that are asked for a value. The default is [`Consistency::LocalQuorum`]: with quorum writes a backend
    /// then never sees a value older than one that it, or a backend at another gateway, saw before; reads are few
    /// next to writes, which the gateway coalesces.
    pub read_consistency: Consistency,
    /// Time to connect to one node.
    pub connect_timeout: Duration,
    /// Time for one request.
    pub request_timeout: Duration,
    /// A request unanswered for this long is sent to another node as well; all of them are idempotent. `None` never
    /// does that.
    pub speculative_delay: Option<Duration>,
    /// Number of other nodes that it may be sent to, one after each delay.
    pub speculative_attempts: usize,
    /// Compression of requests and answers.
    pub compression: Compression,
    /// Most writes under way at once, and as many reads. The store goes below it while the cluster is overloaded.
    pub concurrency: usize,
    /// Topics kept per device. Gateways that share the tables may exceed it together.
    pub topics_per_device: usize,
    /// Lifetimes of values. The first rule whose filter matches the topic counts; without one they stay.
    pub ttl: Vec<ScyllaTtlRule>,
    /// Name of this gateway, written with each value.
    pub server_id: String,
}

/// Lifetime of the values of topics that match an MQTT filter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScyllaTtlRule {
    /// The filter, valid.
    pub filter: String,
    /// From the write on, in whole seconds; zero is for ever. Databases take at most 20 years, and some nothing past
    /// January 2038: it is cut to that.
    pub ttl: Duration,
}

/// The driver's word for a consistency.
pub(super) fn level(consistency: Consistency) -> Level {
    match consistency {
        Consistency::Any => Level::Any,
        Consistency::One => Level::One,
        Consistency::LocalOne => Level::LocalOne,
        Consistency::Two => Level::Two,
        Consistency::Three => Level::Three,
        Consistency::Quorum => Level::Quorum,
        Consistency::LocalQuorum => Level::LocalQuorum,
        Consistency::EachQuorum => Level::EachQuorum,
        Consistency::All => Level::All,
    }
}

/// The driver's algorithm of a compression, or `None` for none.
pub(super) fn algorithm(compression: Compression) -> Option<Algorithm> {
    match compression {
        Compression::None => None,
        Compression::Lz4 => Some(Algorithm::Lz4),
        Compression::Snappy => Some(Algorithm::Snappy),
    }
}

impl ScyllaOptions {
    /// Returns the row for `value`.
    pub(super) fn row<'a>(&'a self, value: &'a LatestValue) -> BoundRow<'a> {
        row::bind(value, &self.server_id, self.ttl(&value.topic, value.received))
    }

    /// Seconds that values of `topic` live; 0 is for ever.
    fn ttl(&self, topic: &str, now: Timestamp) -> i32 {
        let rule = self.ttl.iter().find(|rule| matches(&rule.filter, topic));
        life(rule.map_or(0, |rule| rule.ttl.as_secs()), now)
    }
}

/// The seconds for which a database keeps a row that should live for `secs`; 0 is for ever.
pub(super) fn life(secs: u64, now: Timestamp) -> i32 {
    let left = END.checked_sub(now.0 / 1000).filter(|left| *left > 0).unwrap_or(MAX_TTL);
    i32::try_from(secs.min(MAX_TTL).min(left)).unwrap_or_default()
}

impl Default for ScyllaOptions {
    fn default() -> Self {
        Self {
            contact_points: vec!["127.0.0.1:9042".to_owned()],
            datacenter: String::new(),
            username: String::new(),
            password: String::new(),
            tls: None,
            keyspace: "mqtt".to_owned(),
            replication: "{'class': 'NetworkTopologyStrategy', 'replication_factor': 1}".to_owned(),
            migrate: true,
            write_consistency: Consistency::LocalQuorum,
            read_consistency: Consistency::LocalQuorum,
            connect_timeout: Duration::from_secs(5),
            request_timeout: Duration::from_secs(5),
            speculative_delay: Some(Duration::from_millis(500)),
            speculative_attempts: 1,
            compression: Compression::None,
            concurrency: 128,
            topics_per_device: 10_000,
            ttl: Vec::new(),
            server_id: String::new(),
        }
    }
}

impl fmt::Debug for ScyllaOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScyllaOptions")
            .field("contact_points", &self.contact_points)
            .field("datacenter", &self.datacenter)
            .field("username", &self.username)
            .field("tls", &self.tls.is_some())
            .field("keyspace", &self.keyspace)
            .field("replication", &self.replication)
            .field("migrate", &self.migrate)
            .field("write_consistency", &self.write_consistency)
            .field("read_consistency", &self.read_consistency)
            .field("server_id", &self.server_id)
            .finish_non_exhaustive()
    }
}
