//! Logs, counters, the HTTP page that shows them, and OTLP export. A leaf beside `config`.

mod counters;
mod export;
mod histogram;
mod http;
mod lines;
mod logs;
mod metrics;
#[cfg(feature = "otel")]
mod otel;
mod process;
mod rate_limit;
mod write_timeout;

pub use counters::{Counter, Counters, Totals, count, totals};
pub use export::{ReadRows, Telemetry, TelemetryError};
pub use histogram::Histogram;
pub use http::{HttpLimits, Pages, serve};
pub use logs::{CLIENT_TRACE, ExtraLayer, TraceClients, trace_clients};
pub use metrics::{Gauge, Kind, Row, escape_label, render, rows};
pub use process::ProcessStats;
pub use rate_limit::{PeerLimits, RateLimit, Said, peer_limits};
