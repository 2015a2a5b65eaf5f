//! OTLP export of the real process to a collector in this one. Needs the cargo feature `otel`:
//! `cargo test --features otel --test otel`.

#[path = "support/client.rs"]
mod client;
mod support;

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, TcpListener as StdListener},
    sync::Arc,
};

use client::Client;
use gateway_core::Protocol;

use mqtt_server::config::{Config, Flags};
use opentelemetry_proto::tonic::{
    collector::{
        metrics::v1::{
            ExportMetricsServiceRequest, ExportMetricsServiceResponse,
            metrics_service_server::{MetricsService, MetricsServiceServer},
        },
        trace::v1::{
            ExportTraceServiceRequest, ExportTraceServiceResponse,
            trace_service_server::{TraceService, TraceServiceServer},
        },
    },
    metrics::v1::{NumberDataPoint, metric::Data, number_data_point::Value},
};
use parking_lot::Mutex;
use support::Server;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

/// Spans and metrics that were received.
#[derive(Clone, Default)]
struct Collector {
    spans: Arc<Mutex<Vec<String>>>,
    /// Metric name, attributes, last value.
    points: Arc<Mutex<Vec<(String, String, f64)>>>,
}

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let scopes =
            request.into_inner().resource_spans.into_iter().flat_map(|resource| resource.scope_spans);
        let spans = scopes.flat_map(|scope| scope.spans);
        self.spans.lock().extend(spans.map(|span| span.name));
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

#[tonic::async_trait]
impl MetricsService for Collector {
    async fn export(
        &self,
        request: Request<ExportMetricsServiceRequest>,
    ) -> Result<Response<ExportMetricsServiceResponse>, Status> {
        let scopes =
            request.into_inner().resource_metrics.into_iter().flat_map(|resource| resource.scope_metrics);
        let mut points = self.points.lock();
        points.clear();
        for metric in scopes.flat_map(|scope| scope.metrics) {
            let data = match metric.data {
                Some(Data::Gauge(gauge)) => gauge.data_points,
                Some(Data::Sum(sum)) => sum.data_points,
                other => panic!("{} has {other:?}", metric.name),
            };
            points.extend(data.iter().map(|point| (metric.name.clone(), attributes(point), value(point))));
        }
        Ok(Response::new(ExportMetricsServiceResponse::default()))
    }
}

fn attributes(point: &NumberDataPoint) -> String {
    let text = |kv: &opentelemetry_proto::tonic::common::v1::KeyValue| {
        let value = kv.value.as_ref().and_then(|value| value.value.as_ref());
        format!("{}={value:?}", kv.key)
    };
    point.attributes.iter().map(text).collect()
}

fn value(point: &NumberDataPoint) -> f64 {
    match point.value {
        Some(Value::AsDouble(value)) => value,
        Some(Value::AsInt(value)) => value as f64,
        None => f64::NAN,
    }
}

fn otel(port: u16, more: &str) -> String {
    format!("[otel]\nendpoint = \"http://127.0.0.1:{port}\"\n{more}")
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_and_spans_of_a_short_life_reach_the_collector_before_the_exit() {
    let collector = Collector::default();
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("bind the collector");
    let port = listener.local_addr().expect("address of the collector").port();
    let serving = tonic::transport::Server::builder()
        .add_service(TraceServiceServer::new(collector.clone()))
        .add_service(MetricsServiceServer::new(collector.clone()))
        .serve_with_incoming(TcpListenerStream::new(listener));
    tokio::spawn(serving);

    let mut server = Server::start_with(&[], &otel(port, ""));
    let mut device = Client::connect(server.ports.tcp, Protocol::V5, "dev");
    for _ in 0..3 {
        device.publish_acked("t", b"x", false);
    }
    assert!(server.stop(), "exit code 0");

    let points = collector.points.lock().clone();
    let of = |name: &str, with: &str| {
        let row = points.iter().find(|(known, attributes, _)| known == name && attributes.contains(with));
        row.unwrap_or_else(|| panic!("{name} {with} in {points:?}")).2
    };
    assert_eq!(of("mqtt_messages_received", "\"1\""), 3.0);
    assert_eq!(of("mqtt_connections_established", ""), 1.0);
    assert!(of("process_resident_memory_bytes", "") > 0.0);
    assert_eq!(of("mqtt_sessions", ""), 0.0);
    let spans = collector.spans.lock().clone();
    for name in ["start", "shutdown"] {
        assert!(spans.iter().any(|span| span == name), "{name} in {spans:?}");
    }
}

#[test]
fn an_endpoint_that_is_none_is_bad_configuration() {
    let load = |endpoint: &str| {
        let text = format!("[otel]\nendpoint = \"{endpoint}\"");
        Config::load(&Flags::default(), Some(&text), &BTreeMap::new())
    };
    for good in ["http://127.0.0.1:4317", "http://collector:4317/", "http://[::1]:4317", ""] {
        assert!(load(good).is_ok(), "{good}");
    }
    for bad in ["here", "https://a:4317", "http://", "http://a", "http://:4317", "http://a:b", "http://a:1/x"]
    {
        let error = load(bad).expect_err(bad);
        let problem = &error.0[0];
        assert_eq!((problem.key.as_str(), problem.value.as_str()), ("otel.endpoint", bad));
        assert!(problem.fix.contains("http://"), "{problem}");
    }
}

#[test]
fn a_collector_that_never_answers_does_not_hold_up_the_end() {
    let silent = StdListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
    let port = silent.local_addr().expect("address of a bound listener").port();
    let shutdown = "[shutdown]\ndeadline = \"2s\"\ndisconnect_window = \"1s\"\n";
    let mut server = Server::start_with(&[], &otel(port, shutdown));
    assert!(server.stop(), "exit code 0");
    assert!(server.log().contains("not finished before the shutdown deadline"), "{}", server.log());
}
