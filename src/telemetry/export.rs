//! What a process starts once for its logs and, with the cargo feature `otel`, for OTLP export.

use std::{sync::Arc, time::Duration};

use gateway_core::metrics::Row;
use thiserror::Error;

use super::logs;
use crate::config::{Log, Otel as OtelConfig};

/// Reads all metrics; see [`super::rows`].
pub(crate) type ReadRows = Arc<dyn Fn() -> Vec<Row> + Send + Sync>;

/// Why logs or export do not start.
#[derive(Debug, Error)]
pub(crate) enum TelemetryError {
    /// The process has a subscriber for its logs already.
    #[error("start logs: {0}")]
    Logs(#[from] tracing_subscriber::util::TryInitError),
    /// The exporter does not take the endpoint.
    #[cfg(feature = "otel")]
    #[error("otel.endpoint: {0}; name a collector like http://127.0.0.1:4317")]
    Endpoint(#[from] opentelemetry_otlp::ExporterBuildError),
}

/// Logs and export of the process; [`Telemetry::stop`] sends what is left.
pub(crate) struct Telemetry {
    #[cfg(feature = "otel")]
    otel: Option<super::otel::Otel>,
}

impl Telemetry {
    /// Starts logs on standard error and, with `otel.endpoint` set, export of spans. Call it inside the Tokio
    /// runtime that carries the export. Without the cargo feature the endpoint has no effect: validation has
    /// refused it before.
    ///
    /// # Errors
    /// See [`TelemetryError`].
    #[cfg(feature = "otel")]
    pub(crate) fn start(log: &Log, otel: &OtelConfig) -> Result<Self, TelemetryError> {
        let (otel, layer) = match &otel.endpoint {
            Some(endpoint) => {
                super::otel::Otel::start(endpoint).map(|(otel, layer)| (Some(otel), Some(layer)))?
            }
            None => (None, None),
        };
        logs::init(log, layer)?;
        Ok(Self { otel })
    }

    /// Starts logs on standard error.
    ///
    /// # Errors
    /// See [`TelemetryError`].
    #[cfg(not(feature = "otel"))]
    pub(crate) fn start(log: &Log, _: &OtelConfig) -> Result<Self, TelemetryError> {
        logs::init(log, None)?;
        Ok(Self {})
    }

    /// Exports these metrics from now on, if export is on. Only the first call has an effect.
    pub(crate) fn export(&self, read: ReadRows) {
        #[cfg(feature = "otel")]
        if let Some(otel) = &self.otel {
            otel.export(read);
        }
        #[cfg(not(feature = "otel"))]
        drop(read);
    }

    /// Sends what is left to the collector, for at most `limit`; then the rest is given up with a warning. Cancel
    /// safe: sending goes on without anybody waiting for it.
    pub(crate) async fn stop(self, limit: Duration) {
        #[cfg(feature = "otel")]
        if let Some(otel) = self.otel {
            let (done, sent) = tokio::sync::oneshot::channel();
            // Not a thread of the runtime: its end would wait for this one, however long a collector is silent.
            std::thread::spawn(move || {
                otel.stop();
                let _ = done.send(());
            });
            if tokio::time::timeout(limit, sent).await.is_err() {
                tracing::warn!(?limit, "otel export not finished before the shutdown deadline");
            }
        }
        #[cfg(not(feature = "otel"))]
        let _ = limit;
    }
}
