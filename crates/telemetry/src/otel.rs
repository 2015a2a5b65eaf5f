//! OTLP export of metrics and spans over gRPC. Only with the cargo feature `otel`.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use gateway_core::metrics::{MetricKind, MetricRow};
use opentelemetry::{
    KeyValue,
    metrics::{AsyncInstrument, MeterProvider},
    trace::TracerProvider,
};
use opentelemetry_otlp::{ExporterBuildError, MetricExporter, SpanExporter, WithExportConfig};
use opentelemetry_sdk::{
    Resource,
    metrics::{PeriodicReader, SdkMeterProvider},
    trace::SdkTracerProvider,
};
use parking_lot::Mutex;
use tracing::warn;

use super::{ReadRows, logs::ExtraLayer};

const SERVICE: &str = "mqtt-server";
const METRICS_INTERVAL: Duration = Duration::from_secs(15);

/// Keeps the exporters running; [`OtelExporters::stop`] sends what is left.
pub(super) struct OtelExporters {
    tracer: SdkTracerProvider,
    meter: SdkMeterProvider,
    registered: OnceLock<()>,
}

impl OtelExporters {
    /// Starts exporting to `endpoint` and returns the layer for [`super::logs::init`]. Call it inside the Tokio
    /// runtime that carries the export. A collector that is away costs nothing but the figures.
    ///
    /// # Errors
    /// The endpoint is not one.
    pub(super) fn start(endpoint: &str) -> Result<(Self, ExtraLayer), ExporterBuildError> {
        let resource = Resource::builder()
            .with_service_name(SERVICE)
            .with_attribute(KeyValue::new("service.version", super::version()))
            .build();
        let spans = SpanExporter::builder().with_tonic().with_endpoint(endpoint).build()?;
        let tracer =
            SdkTracerProvider::builder().with_resource(resource.clone()).with_batch_exporter(spans).build();
        let metrics = MetricExporter::builder().with_tonic().with_endpoint(endpoint).build()?;
        let reader = PeriodicReader::builder(metrics).with_interval(METRICS_INTERVAL).build();
        let meter = SdkMeterProvider::builder().with_resource(resource).with_reader(reader).build();
        let layer = tracing_opentelemetry::layer().with_tracer(tracer.tracer(SERVICE));
        Ok((Self { tracer, meter, registered: OnceLock::new() }, Box::new(layer)))
    }

    /// Exports these rows from now on. Only the first call has an effect.
    pub(super) fn export(&self, read: ReadRows) {
        if self.registered.set(()).is_ok() {
            register(&self.meter, read);
        }
    }

    /// Sends what is left and ends. Blocks until the collector answered or the exporters gave up.
    pub(super) fn stop(self) {
        for result in [self.tracer.shutdown(), self.meter.shutdown()] {
            if let Err(error) = result {
                warn!(%error, "otel export did not end cleanly");
            }
        }
    }
}

/// One instrument per name. The first one reads all rows anew, and the others, which are asked after it, show
/// what it read.
fn register(provider: &SdkMeterProvider, read: ReadRows) {
    let meter = provider.meter(SERVICE);
    let rows = Arc::new(Mutex::new(read()));
    let all = rows.lock().clone();
    let mut known = Vec::new();
    for MetricRow { name, suffix, help, kind, .. } in all {
        if known.contains(&(name, suffix)) {
            continue;
        }
        let refresh = known.is_empty().then(|| Arc::clone(&read));
        known.push((name, suffix));
        let rows = Arc::clone(&rows);
        let observe = move |instrument: &dyn AsyncInstrument<f64>| {
            if let Some(read) = &refresh {
                *rows.lock() = read();
            }
            for row in rows.lock().iter().filter(|row| (row.name, row.suffix) == (name, suffix)) {
                instrument.observe(row.value, &attributes(&row.labels));
            }
        };
        if kind == MetricKind::Gauge {
            meter.f64_observable_gauge(name).with_description(help).with_callback(observe).build();
        } else {
            // A histogram's buckets, sum and count are counters. Under its Prometheus name a counter would get a second
            // `_total` from a collector that writes that format.
            let plain = format!("{}{suffix}", name.strip_suffix("_total").unwrap_or(name));
            meter.f64_observable_counter(plain).with_description(help).with_callback(observe).build();
        }
    }
}

/// `name="value",name="value"` as attributes; escapes stay as they are.
fn attributes(labels: &str) -> Vec<KeyValue> {
    let pairs = labels.split(',').filter_map(|label| label.split_once('='));
    pairs.map(|(name, value)| KeyValue::new(name.to_owned(), value.trim_matches('"').to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_become_attributes() {
        assert_eq!(attributes(""), []);
        let pairs = attributes("reason=\"limit\",qos=\"1\"");
        assert_eq!(pairs, [KeyValue::new("reason", "limit"), KeyValue::new("qos", "1")]);
    }
}
