//! The counters of all crates, in the order in which `/metrics`, OTLP and docs/metrics.md show them.

use gateway_core::metrics::{CounterTable, Family, MetricRow, figures};

/// The crates that count.
static TABLES: [&CounterTable; 19] = [
    &auth::counters::TABLE,
    &broker::counters::TABLE,
    &cassandra::counters::TABLE,
    &commands::counters::TABLE,
    &device::counters::TABLE,
    &device_shadows::counters::TABLE,
    &disk::counters::TABLE,
    &edge::counters::TABLE,
    &gateway_core::counters::TABLE,
    &gateway_http::counters::TABLE,
    &grpc::counters::TABLE,
    &grpc_messages::counters::TABLE,
    &links::counters::TABLE,
    &net::counters::TABLE,
    &segment_log::counters::TABLE,
    &session::counters::TABLE,
    &store::counters::TABLE,
    &telemetry::counters::TABLE,
    &values::counters::TABLE,
];

/// The families of all crates. A new one stands where operators look for it.
const ORDER: &[&str] = &[
    "mqtt_connections_accepted_total",
    "mqtt_connections_established_total",
    "mqtt_connections_closed_total",
    "mqtt_connections_refused_total",
    "mqtt_banned_total",
    "mqtt_login_waits_total",
    "mqtt_flapping_bans_total",
    "mqtt_sending_pauses_total",
    "mqtt_quota_refused_total",
    "mqtt_quic_retries_total",
    "mqtt_quic_unproved_total",
    "mqtt_tls_handshakes_total",
    "mqtt_connections_evicted_total",
    "mqtt_protocol_errors_total",
    "mqtt_keep_alive_timeouts_total",
    "mqtt_packet_timeouts_total",
    "mqtt_memory_refused_total",
    "mqtt_write_timeouts_total",
    "mqtt_takeovers_total",
    "mqtt_messages_received_total",
    "mqtt_messages_sent_total",
    "mqtt_bytes_received_total",
    "mqtt_bytes_sent_total",
    "mqtt_packets_received_total",
    "mqtt_packets_sent_total",
    "mqtt_payload_bytes_received_total",
    "mqtt_payload_bytes_sent_total",
    "mqtt_messages_dropped_total",
    "gateway_groups_appended_total",
    "gateway_groups_dropped_total",
    "gateway_commands_sent_total",
    "gateway_commands_replied_total",
    "gateway_commands_failed_total",
    "gateway_commands_started_total",
    "gateway_commands_ended_total",
    "gateway_commands_replies_dropped_total",
    "mqtt_messages_unmatched_total",
    "mqtt_messages_refused_total",
    "mqtt_yields_total",
    "mqtt_rate_limit_pauses_total",
    "mqtt_subscriptions_refused_total",
    "mqtt_subscriptions_denied_total",
    "mqtt_deliveries_withheld_total",
    "mqtt_wills_denied_total",
    "mqtt_retained_refused_total",
    "mqtt_retained_unread_total",
    "mqtt_sessions_expired_total",
    "mqtt_wills_published_total",
    "mqtt_non_broker_blocked_total",
    "gateway_latest_updates_total",
    "gateway_latest_coalesced_total",
    "gateway_latest_written_total",
    "gateway_latest_dropped_total",
    "gateway_latest_retried_total",
    "gateway_latest_spilled_total",
    "gateway_latest_replayed_total",
    "gateway_latest_store_timeouts_total",
    "gateway_latest_damaged_total",
    "gateway_latest_store_errors_total",
    "gateway_ledger_latest_shipped_total",
    "gateway_ledger_latest_bytes_total",
    "gateway_ledger_latest_put_off_total",
    "gateway_ledger_latest_dropped_total",
    "gateway_links_accepted_total",
    "gateway_relays_total",
    "gateway_relays_refused_total",
    "gateway_calls_passed_total",
    "gateway_relays_ended_total",
    "gateway_history_recorded_total",
    "gateway_history_written_total",
    "gateway_history_dropped_total",
    "gateway_history_errors_total",
    "gateway_database_errors_total",
    "gateway_store_commits_total",
    "gateway_store_commit_errors_total",
    "gateway_store_commit_microseconds_total",
    "gateway_store_damaged_records_total",
    "gateway_store_refused_total",
    "gateway_store_full_records_total",
    "gateway_store_entries_written_total",
    "gateway_store_entries_settled_total",
    "gateway_store_entries_removed_total",
    "gateway_store_entries_refused_total",
    "gateway_store_entries_expired_total",
    "gateway_log_appended_total",
    "gateway_log_commits_total",
    "gateway_log_commit_microseconds_total",
    "gateway_log_full_records_total",
    "gateway_log_errors_total",
    "gateway_log_refused_total",
    "gateway_log_damaged_total",
    "gateway_log_cut_bytes_total",
    "gateway_log_segments_removed_total",
    "gateway_shadow_requests_total",
    "gateway_shadow_rejected_total",
    "gateway_shadow_refused_total",
    "gateway_shadow_deltas_total",
    "gateway_shadow_retried_total",
    "gateway_shadow_store_errors_total",
    "gateway_shadow_watch_missed_total",
    "gateway_grpc_connections_refused_total",
    "gateway_grpc_connections_evicted_total",
    "gateway_grpc_calls_refused_total",
    "gateway_grpc_streams_refused_total",
    "gateway_http_connections_refused_total",
    "gateway_http_api_failures_total",
    "gateway_http_bodies_refused_total",
    "gateway_http_cross_origin_refused_total",
    "gateway_page_logins_total",
    "gateway_page_samples_total",
    "gateway_page_live_total",
    "gateway_page_logins_evicted_total",
    "gateway_page_forms_refused_total",
    "gateway_http_connections_failed_total",
    "gateway_grpc_requests_late_total",
    "gateway_grpc_calls_total",
    "gateway_backend_denied_total",
    "gateway_backend_streams_ended_total",
    "gateway_audit_suppressed_total",
    "gateway_grpc_published_total",
    "gateway_grpc_fanout_devices_total",
    "gateway_grpc_scheduled_total",
    "gateway_grpc_keys_total",
    "gateway_grpc_keys_dropped_total",
    "gateway_grpc_delivered_total",
    "gateway_grpc_stream_dropped_total",
    "gateway_grpc_errors_total",
    "gateway_grpc_trace_missed_total",
    "gateway_events_untold_total",
    "gateway_auth_hook_total",
    "gateway_remote_too_much_total",
    "gateway_hook_events_total",
    "gateway_hook_event_failures_total",
    "gateway_jwks_fetches_total",
    "mqtt_auth_failures_total",
    "mqtt_login_checks_total",
    "mqtt_reauthentications_total",
];

/// Returns the rows of all counters.
pub(super) fn rows() -> Vec<MetricRow> {
    let mut rows: Vec<MetricRow> = TABLES.iter().flat_map(|table| (table.rows)()).collect();
    rows.sort_by_cached_key(|row| place(row.name));
    rows
}

/// Every family that a gateway can show, counters first.
pub fn families() -> impl Iterator<Item = &'static Family> {
    let mut counters: Vec<&Family> = TABLES.iter().flat_map(|table| table.families).collect();
    counters.sort_by_cached_key(|family| place(family.name));
    counters.into_iter().chain(figures::FAMILIES.iter().copied())
}

fn place(name: &str) -> Option<usize> {
    ORDER.iter().position(|family| *family == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_has_its_place() {
        let mut names: Vec<_> = rows().iter().map(|row| row.name).collect();
        names.dedup();
        assert_eq!(names, ORDER);
    }
}
