//! Logs, the HTTP pages for operators, and OTLP export. A leaf beside `config`.

mod audit;
mod export;
mod http;
mod lines;
mod logs;
mod metrics;
#[cfg(feature = "otel")]
mod otel;
mod pages;
mod process;
mod write_timeout;

pub(crate) use audit::AUDIT;
pub(crate) use export::{ReadRows, Telemetry};
pub(crate) use http::{HttpLimits, serve};
pub use logs::trace_clients;
pub(crate) use metrics::{render, rows};
pub(crate) use pages::{Denied, Pages};
pub(crate) use process::ProcessStats;
