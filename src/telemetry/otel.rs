//! OTLP export of metrics and spans over gRPC. Only with the cargo feature `otel`.

use std::{sync::Arc, time::Duration};

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
use tracing::warn;

use super::{ExtraLayer, Gauge, totals};

const SERVICE: &str = "mqtt-server";
const METRICS_INTERVAL: Duration = Duration::from_secs(15);

/// Keeps the exporters running; [`Otel::stop`] sends what is left.
pub struct Otel {
    tracer: SdkTracerProvider,
    meter: SdkMeterProvider,
}

impl Otel {
    /// Starts exporting to `endpoint` and returns the layer for [`super::init`]. Call it inside the Tokio runtime
    /// that may carry the export. A collector that is away costs nothing but the figures.
    ///
    /// # Errors
    /// The endpoint is not one.
    pub fn start(
        endpoint: &str,
        gauges: Arc<dyn Fn() -> Vec<Gauge> + Send + Sync>,
    ) -> Result<(Self, ExtraLayer), ExporterBuildError> {
        let resource = Resource::builder()
            .with_service_name(SERVICE)
            .with_attribute(KeyValue::new("service.version", crate::config::version()))
            .build();
        let spans = SpanExporter::builder().with_tonic().with_endpoint(endpoint).build()?;
        let tracer =
            SdkTracerProvider::builder().with_resource(resource.clone()).with_batch_exporter(spans).build();
        let metrics = MetricExporter::builder().with_tonic().with_endpoint(endpoint).build()?;
        let reader = PeriodicReader::builder(metrics).with_interval(METRICS_INTERVAL).build();
        let meter = SdkMeterProvider::builder().with_resource(resource).with_reader(reader).build();
        register(&meter, gauges);
        let layer = tracing_opentelemetry::layer().with_tracer(tracer.tracer(SERVICE));
        Ok((Self { tracer, meter }, Box::new(layer)))
    }

    /// Sends what is left and ends. Blocks until the collector answered or the exporters gave up.
    pub fn stop(self) {
        for result in [self.tracer.shutdown(), self.meter.shutdown()] {
            if let Err(error) = result {
                warn!(%error, "otel export did not end cleanly");
            }
        }
    }
}

/// One instrument per name; each reads all its rows when it is asked.
fn register(provider: &SdkMeterProvider, gauges: Arc<dyn Fn() -> Vec<Gauge> + Send + Sync>) {
    let meter = provider.meter(SERVICE);
    let mut known = Vec::new();
    for (name, help, ..) in totals().rows() {
        if known.contains(&name) {
            continue;
        }
        known.push(name);
        let observe = move |instrument: &dyn AsyncInstrument<u64>| {
            for (_, _, labels, value) in totals().rows().into_iter().filter(|row| row.0 == name) {
                instrument.observe(value, &attributes(labels));
            }
        };
        // The exporter's side adds `_total` again.
        let plain = name.strip_suffix("_total").unwrap_or(name);
        meter.u64_observable_counter(plain).with_description(help).with_callback(observe).build();
    }
    for (name, help, ..) in gauges() {
        if known.contains(&name) {
            continue;
        }
        known.push(name);
        let gauges = Arc::clone(&gauges);
        let observe = move |instrument: &dyn AsyncInstrument<f64>| {
            for (_, _, labels, value) in gauges().iter().filter(|gauge| gauge.0 == name) {
                instrument.observe(*value, &attributes(labels));
            }
        };
        meter.f64_observable_gauge(name).with_description(help).with_callback(observe).build();
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

    #[tokio::test(flavor = "multi_thread")]
    async fn it_starts_without_a_collector() {
        let gauges = Arc::new(|| vec![("mqtt_sessions", "Sessions", String::new(), 1.0)]);
        let (otel, _layer) = Otel::start("http://127.0.0.1:9", gauges).unwrap();
        tokio::task::spawn_blocking(move || otel.stop()).await.unwrap();
    }
}
