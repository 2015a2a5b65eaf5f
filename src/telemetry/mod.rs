//! Logs, metrics as operators read them, and OTLP export. A leaf beside `config`.

mod audit;
mod export;
mod libraries;
mod lines;
mod logs;
mod metrics;
#[cfg(feature = "otel")]
mod otel;
mod process;
mod trace;
mod version;

pub(crate) use audit::AUDIT;
pub(crate) use export::{ReadRows, Telemetry};
pub(crate) use metrics::{render, rows};
pub(crate) use process::ProcessStats;
pub use trace::trace_clients;
pub(crate) use trace::{ClientTrace, TraceClients, TracedPacket, TracedPublish, WATCH_BYTES, Watch};
pub(crate) use version::version;
