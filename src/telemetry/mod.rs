//! Logs, counters and the HTTP page that shows them. A leaf beside `config`.

mod counters;
mod http;
mod logs;
mod metrics;
#[cfg(feature = "otel")]
mod otel;
mod process;
mod rate_limit;

pub use counters::{Counter, Counters, Totals, count, totals};
pub use http::{HttpLimits, Pages, serve};
pub use logs::{CLIENT_TRACE, ExtraLayer, TraceClients, init, trace_clients};
pub use metrics::{Gauge, escape_label, render};
#[cfg(feature = "otel")]
pub use otel::Otel;
pub use process::ProcessStats;
pub use rate_limit::RateLimit;
