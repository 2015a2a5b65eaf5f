//! `/metrics` of the real process after known traffic: what is there, and that it counts what happened.

use std::collections::{BTreeMap, BTreeSet};

use crate::client::{Client, Got};
use crate::support::{Server, until};
use gateway_core::{Protocol, QoS};

/// Name with labels -> value; every name must have HELP and TYPE.
fn scrape(server: &Server) -> BTreeMap<String, f64> {
    let answer = server.http_get("/metrics").expect("read the metrics");
    let (_, page) = answer.split_once("\r\n\r\n").expect("header and body");
    let (mut help, mut kind) = (BTreeSet::new(), BTreeMap::new());
    let mut values = BTreeMap::new();
    for line in page.lines() {
        let mut words = line.split_whitespace();
        match (words.next(), words.next()) {
            (Some("#"), Some("HELP")) => {
                let name = words.next().expect("a name");
                assert!(words.next().is_some(), "{name} is described");
                help.insert(name);
            }
            (Some("#"), Some("TYPE")) => {
                kind.insert(words.next().expect("a name"), words.next().expect("a type"));
            }
            _ => {
                let (row, value) = line.rsplit_once(' ').expect("name and value");
                let name = row.split('{').next().unwrap_or(row);
                let parts = ["_bucket", "_sum", "_count"];
                let family = parts.iter().find_map(|part| name.strip_suffix(part));
                let family = family.filter(|family| kind.get(family) == Some(&"histogram")).unwrap_or(name);
                assert!(help.contains(family) && kind.contains_key(family), "{name} has no HELP or TYPE");
                assert!(
                    values.insert(row.to_owned(), value.parse().expect("a number")).is_none(),
                    "{row} twice"
                );
            }
        }
    }
    values
}

#[test]
fn every_figure_that_operators_are_promised_is_there_from_the_start() {
    let server = Server::start();
    let values = scrape(&server);
    for name in [
        // connections and handshakes
        "mqtt_connections",
        "mqtt_connections_accepted_total",
        "mqtt_connections_established_total",
        "mqtt_connections_closed_total",
        "mqtt_connections_refused_total{reason=\"limit\"}",
        "mqtt_connections_refused_total{reason=\"silent\"}",
        "mqtt_tls_handshakes_total{result=\"ok\"}",
        "mqtt_tls_handshakes_total{result=\"failed\"}",
        // sessions and subscriptions
        "mqtt_sessions",
        "mqtt_sessions_expired_total",
        "mqtt_subscriptions",
        "mqtt_shared_groups",
        // drops
        "mqtt_messages_dropped_total{reason=\"offline\"}",
        "mqtt_messages_dropped_total{reason=\"queue_full\"}",
        "mqtt_messages_dropped_total{reason=\"memory\"}",
        "mqtt_messages_dropped_total{reason=\"expired\"}",
        "mqtt_messages_dropped_total{reason=\"too_large\"}",
        "mqtt_messages_dropped_total{reason=\"connection_lost\"}",
        "mqtt_messages_dropped_total{reason=\"session_ended\"}",
        // queue depths
        "mqtt_queued_messages",
        "mqtt_queued_bytes",
        "mqtt_inflight_messages",
        // retained
        "mqtt_retained_messages",
        "mqtt_retained_bytes",
        // store
        "gateway_latest_updates_total",
        "gateway_latest_written_total",
        "gateway_latest_store_errors_total",
        "gateway_latest_pending",
        "gateway_latest_pending_bytes",
        "gateway_latest_healthy",
        "gateway_latest_spilled",
        "gateway_latest_oldest_pending_seconds",
        "gateway_latest_coalesced_total",
        "gateway_latest_retried_total",
        "gateway_latest_spilled_total",
        "gateway_latest_replayed_total",
        "gateway_latest_dropped_total{reason=\"shutdown\"}",
        "gateway_latest_write_seconds_bucket{le=\"+Inf\"}",
        "gateway_latest_write_seconds_sum",
        "gateway_latest_write_seconds_count",
        // sessions, queues and retained messages on disk
        "gateway_store_healthy{store=\"state\"}",
        "gateway_store_healthy{store=\"records\"}",
        "gateway_store_set_aside",
        "gateway_store_waiting_bytes",
        "gateway_store_queued",
        "gateway_store_sessions",
        // gRPC
        "gateway_grpc_calls_total",
        "gateway_grpc_errors_total",
        "gateway_grpc_published_total",
        "gateway_grpc_delivered_total",
        "gateway_grpc_stream_dropped_total{reason=\"buffer_full\"}",
        "gateway_grpc_stream_dropped_total{reason=\"memory\"}",
        "gateway_grpc_streams",
        // process
        "process_resident_memory_bytes",
        "process_cpu_seconds_total",
        "process_open_fds",
        "process_max_fds",
        "process_threads",
        "process_start_time_seconds",
        "mqtt_bytes_received_total",
        "mqtt_bytes_sent_total",
    ] {
        assert!(values.contains_key(name), "{name} in {values:?}");
    }
    for family in ["messages_received", "messages_sent", "payload_bytes_received", "payload_bytes_sent"] {
        for qos in 0..=2 {
            let name = format!("mqtt_{family}_total{{qos=\"{qos}\"}}");
            assert!(values.contains_key(&name), "{name}");
        }
    }
}

#[test]
fn figures_are_those_of_the_traffic() {
    let server = Server::start_with(&[], "[sys]\nenabled = false\n");
    let before = scrape(&server);
    let mut subscriber = Client::connect(server.ports.tcp, Protocol::V5, "sub");
    assert_eq!(subscriber.subscribe("t/#"), 0);
    let mut publisher = Client::connect(server.ports.tcp, Protocol::V4, "pub");
    for _ in 0..5 {
        publisher.publish("t/0", b"12345", QoS::AtMostOnce, false);
    }
    for _ in 0..3 {
        publisher.publish_acked("t/1", b"1234567", false);
    }
    publisher.publish_acked("nobody/listens", b"1", true);
    for _ in 0..8 {
        assert!(matches!(subscriber.next(), Got::Publish(..)));
    }
    until(|| server.metric("gateway_latest_pending") == 0);
    let after = scrape(&server);
    let grown = |name: &str| after[name] - before[name];
    for (name, by) in [
        ("mqtt_connections_accepted_total", 2.0),
        ("mqtt_connections_established_total", 2.0),
        ("mqtt_connections", 2.0),
        ("mqtt_sessions", 2.0),
        ("mqtt_subscriptions", 1.0),
        ("mqtt_messages_received_total{qos=\"0\"}", 5.0),
        ("mqtt_messages_received_total{qos=\"1\"}", 4.0),
        ("mqtt_messages_received_total{qos=\"2\"}", 0.0),
        ("mqtt_payload_bytes_received_total{qos=\"0\"}", 25.0),
        ("mqtt_payload_bytes_received_total{qos=\"1\"}", 22.0),
        // The subscription is of QoS 0.
        ("mqtt_messages_sent_total{qos=\"0\"}", 8.0),
        ("mqtt_messages_sent_total{qos=\"1\"}", 0.0),
        ("mqtt_payload_bytes_sent_total{qos=\"0\"}", 46.0),
        ("mqtt_messages_unmatched_total", 1.0),
        ("mqtt_retained_messages", 1.0),
        ("mqtt_queued_messages", 0.0),
        ("mqtt_inflight_messages", 0.0),
        ("gateway_latest_updates_total", 9.0),
    ] {
        assert_eq!(grown(name), by, "{name}");
    }
    // CONNECT, SUBSCRIBE and nine PUBLISH with their topics are more than their payloads.
    assert!(grown("mqtt_bytes_received_total") > 47.0 + 9.0 * 5.0);
    assert!(grown("mqtt_bytes_sent_total") > 46.0 + 8.0 * 5.0);
    drop(subscriber);
    until(|| server.metric("mqtt_connections_closed_total") == 1);
}
