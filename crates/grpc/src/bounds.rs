//! Bounds of the gRPC server.

use std::time::Duration;

use auth::backends::callers::CallerPlaces;
use broker::Account;

const STREAM_WINDOW: u32 = 1 << 20;
/// Bounds of the bytes that HTTP/2 may buffer of a connection's requests: the memory budget's quarter, divided by the
/// greatest number of connections, and never outside these bounds. The memory account is charged for the window once the
/// connection has shown credentials. The lower bound is the protocol's.
const CONNECTION_WINDOW: (u32, u32) = (65_535, 4 << 20);
/// Largest frame.
pub(crate) const FRAME: u32 = 16 << 10;

/// Bounds of the gRPC server.
#[derive(Debug, Clone, Copy)]
pub struct GrpcConfig {
    /// Largest request message, unpacked if it is compressed.
    pub max_message_bytes: usize,
    /// Connections at once. For one more the oldest without credentials is closed, or it is refused.
    pub max_connections: usize,
    /// The same from one address.
    pub max_connections_per_address: usize,
    /// Connections at once that have not said what HTTP/2 begins with; more wait.
    pub max_handshakes: usize,
    /// Time for that, TLS included.
    pub handshake_timeout: Duration,
    /// Calls and streams at once on one connection; more are answered RESOURCE_EXHAUSTED.
    pub max_calls_per_connection: u32,
    /// The same in all.
    pub max_calls: u32,
    /// The same of one caller.
    pub max_calls_per_caller: usize,
    /// Streams (Subscribe, Watch..., PublishStream) at once in all. Each may buffer `limits.stream_buffer`.
    pub max_streams: usize,
    /// The same of one caller.
    pub max_streams_per_caller: usize,
    /// Longest wait of a publish for SENT or ACKED when the call has no deadline.
    pub wait_timeout: Duration,
    /// Idempotency keys that are remembered at once, and for how long.
    pub max_keys: usize,
    pub key_time: Duration,
    /// Messages that wait for their time, and their bytes.
    pub max_scheduled: usize,
    pub scheduled_bytes: usize,
    /// Interval of HTTP/2 pings.
    pub keepalive_interval: Duration,
    /// A connection that leaves a ping unanswered for this long is closed.
    pub keepalive_timeout: Duration,
    /// At shutdown, how long calls may finish before they are cut off.
    pub drain_timeout: Duration,
    /// Bounds and defaults of consumer groups.
    pub groups: config::Groups,
}

impl GrpcConfig {
    /// Calls at once.
    pub(crate) fn calls(&self) -> CallerPlaces {
        CallerPlaces { most: self.max_calls as usize, per_caller: self.max_calls_per_caller }
    }

    /// Streams at once.
    pub(crate) fn streams(&self) -> CallerPlaces {
        CallerPlaces { most: self.max_streams, per_caller: self.max_streams_per_caller }
    }
}

impl Default for GrpcConfig {
    fn default() -> Self {
        Self {
            max_message_bytes: 16 << 20,
            max_connections: 1_000,
            max_connections_per_address: 500,
            max_handshakes: 1_000,
            handshake_timeout: Duration::from_secs(10),
            max_calls_per_connection: 1_000,
            max_calls: 20_000,
            max_calls_per_caller: usize::MAX,
            max_streams: 1_000,
            max_streams_per_caller: usize::MAX,
            wait_timeout: Duration::from_secs(10),
            max_keys: 100_000,
            key_time: Duration::from_mins(10),
            max_scheduled: 100_000,
            scheduled_bytes: 64 << 20,
            keepalive_interval: Duration::from_secs(30),
            keepalive_timeout: Duration::from_secs(20),
            drain_timeout: Duration::from_secs(5),
            groups: config::Groups::default(),
        }
    }
}

/// The windows of a connection and of a stream, in bytes.
pub(crate) fn windows(config: &GrpcConfig, account: &Account) -> (u32, u32) {
    let share = account.limit() / 4 / config.max_connections.max(1);
    let (least, most) = CONNECTION_WINDOW;
    let connection = u32::try_from(share).unwrap_or(u32::MAX).clamp(least, most);
    (connection, connection.min(STREAM_WINDOW))
}
