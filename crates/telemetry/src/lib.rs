//! Logs, metrics as operators read them, and OTLP export. Knows the configuration and `edge`'s
//! reloads, and nothing that serves.

mod audit;
pub mod counters;
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

pub use audit::AUDIT;
pub use export::{ReadRows, Telemetry, TelemetryError};
pub use metrics::{render, rows};
pub use process::ProcessStats;
pub use trace::trace_clients;
pub use trace::{ClientTrace, PacketWatch, TraceClients, TracedPacket, TracedPublish, WATCH_BYTES};
pub use version::version;
