//! Start of a process's logs, once, and, with the cargo feature `otel`, of its OTLP export.

use std::{path::PathBuf, sync::Arc, time::Duration};

use config::{Log, Otel as OtelConfig};
use gateway_core::metrics::MetricRow;
use thiserror::Error;

use super::{audit::AuditFile, logs};

/// Reads all metrics; see [`super::rows`].
pub type ReadRows = Arc<dyn Fn() -> Vec<MetricRow> + Send + Sync>;

/// Error that stops logs or export from starting.
#[derive(Debug, Error)]
pub enum TelemetryError {
    /// The process has a subscriber for its logs already.
    #[error("start logs: {0}")]
    Logs(#[from] tracing_subscriber::util::TryInitError),
    /// The file of the audit log cannot be opened.
    #[error("log.audit: open {}: {error}; check the path and its permissions", .path.display())]
    Audit {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        error: std::io::Error,
    },
    /// The exporter does not take the endpoint.
    #[cfg(feature = "otel")]
    #[error("otel.endpoint: {0}; name a collector like http://127.0.0.1:4317")]
    Endpoint(#[from] opentelemetry_otlp::ExporterBuildError),
}

/// Logs and export of the process; [`Telemetry::stop`] sends what is left.
pub struct Telemetry {
    audit: Option<Arc<AuditFile>>,
    #[cfg(feature = "otel")]
    otel: Option<super::otel::OtelExporters>,
}

fn open_audit(log: &Log) -> Result<Option<Arc<AuditFile>>, TelemetryError> {
    let opened = log.audit.as_deref().map(|path| {
        AuditFile::open(path).map_err(|error| TelemetryError::Audit { path: path.to_owned(), error })
    });
    opened.transpose()
}

impl Telemetry {
    /// Starts logs on standard error and, with `otel.endpoint` set, export of spans. Call it inside the Tokio
    /// runtime that carries the export. Without the cargo feature the endpoint has no effect: validation has
    /// refused it before.
    ///
    /// # Errors
    /// See [`TelemetryError`].
    #[cfg(feature = "otel")]
    pub fn start(log: &Log, otel: &OtelConfig) -> Result<Self, TelemetryError> {
        let (otel, layer) = match &otel.endpoint {
            Some(endpoint) => {
                super::otel::OtelExporters::start(endpoint).map(|(otel, layer)| (Some(otel), Some(layer)))?
            }
            None => (None, None),
        };
        let audit = open_audit(log)?;
        logs::init(log, audit.clone(), layer)?;
        Ok(Self { audit, otel })
    }

    /// Starts logs on standard error.
    ///
    /// # Errors
    /// See [`TelemetryError`].
    #[cfg(not(feature = "otel"))]
    pub fn start(log: &Log, _: &OtelConfig) -> Result<Self, TelemetryError> {
        let audit = open_audit(log)?;
        logs::init(log, audit.clone(), None)?;
        Ok(Self { audit })
    }

    /// The file of the audit log, to be opened anew with everything else that is.
    pub fn audit(&self) -> Option<&Arc<AuditFile>> {
        self.audit.as_ref()
    }

    /// Exports these metrics from now on, if export is on. Only the first call has an effect.
    pub fn export(&self, read: ReadRows) {
        #[cfg(feature = "otel")]
        if let Some(otel) = &self.otel {
            otel.export(read);
        }
        #[cfg(not(feature = "otel"))]
        drop(read);
    }

    /// Sends what is left to the collector, for at most `limit`; then the rest is given up with a warning. Cancel
    /// safe: sending goes on without anybody waiting for it.
    pub async fn stop(self, limit: Duration) {
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
