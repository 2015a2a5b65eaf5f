//! Bounds of the HTTP listener.

use std::time::Duration;

/// Bounds of the server.
#[derive(Debug, Clone, Copy)]
pub struct HttpLimits {
    /// Connections that read pages at once, and as many that ask for health.
    pub max_connections: usize,
    /// Connections at once with a request to the API.
    pub max_requests: usize,
    /// The same of one caller.
    pub max_requests_per_caller: usize,
    /// Connections at once whose answer is a stream.
    pub max_streams: usize,
    /// The same of one caller.
    pub max_streams_per_caller: usize,
    /// Time for a request's header, also between requests.
    pub header_timeout: Duration,
    /// Time that a client may leave an answer unread before its connection ends.
    pub write_timeout: Duration,
}

impl Default for HttpLimits {
    fn default() -> Self {
        let seconds = Duration::from_secs(10);
        Self {
            max_connections: 64,
            max_requests: 256,
            max_requests_per_caller: 128,
            max_streams: 256,
            max_streams_per_caller: 128,
            header_timeout: seconds,
            write_timeout: seconds,
        }
    }
}
