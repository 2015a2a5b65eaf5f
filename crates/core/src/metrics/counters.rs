//! Counters of the whole process: one set per thread, written without contention, added up when read.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread_local,
};

use parking_lot::Mutex;

/// One counter of one thread. Only its own thread adds; any thread reads.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`. A load and a store: no other thread writes it.
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(n), Relaxed);
    }

    /// Takes back what was added too early.
    pub fn take_back(&self, n: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_sub(n), Relaxed);
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $field:ident: $name:literal, $help:literal, $label:literal;)*) => {
        /// Every counter of the process. `$SYS`, `/metrics` and tests read [`totals`].
        #[derive(Debug, Default)]
        pub struct Counters { $($(#[$doc])* #[doc = $help] pub $field: Counter,)* }

        /// The sums over all threads.
        #[derive(Debug, Default, Clone, Copy)]
        pub struct Totals { $(#[doc = $help] pub $field: u64,)* }

        impl Totals {
            /// (metric name, help, labels, value) of every counter.
            pub fn rows(&self) -> Vec<(&'static str, &'static str, &'static str, u64)> {
                vec![$(($name, $help, $label, self.$field),)*]
            }

            fn add(&mut self, counters: &Counters) {
                $(self.$field = self.$field.wrapping_add(counters.$field.0.load(Relaxed));)*
            }
        }
    };
}

counters! {
    connections_accepted: "mqtt_connections_accepted_total", "Sockets accepted", "";
    connections_established: "mqtt_connections_established_total", "CONNECT packets accepted", "";
    connections_closed: "mqtt_connections_closed_total", "Connections that ended after CONNACK", "";
    refused_connections_limit: "mqtt_connections_refused_total", "Connections refused", "reason=\"limit\"";
    refused_listener_limit: "mqtt_connections_refused_total", "Connections refused", "reason=\"listener_limit\"";
    refused_address_limit: "mqtt_connections_refused_total", "Connections refused", "reason=\"address_limit\"";
    refused_address_handshakes: "mqtt_connections_refused_total", "Connections refused", "reason=\"address_handshakes\"";
    refused_address_rate: "mqtt_connections_refused_total", "Connections refused", "reason=\"address_rate\"";
    refused_address_banned: "mqtt_connections_refused_total", "Connections refused", "reason=\"address_banned\"";
    refused_failed_logins: "mqtt_connections_refused_total", "Connections refused", "reason=\"failed_logins\"";
    refused_waiting: "mqtt_connections_refused_total", "Connections refused", "reason=\"waiting\"";
    refused_origin: "mqtt_connections_refused_total", "Connections refused", "reason=\"origin\"";
    refused_silent: "mqtt_connections_refused_total", "Connections refused", "reason=\"silent\"";
    refused_connect: "mqtt_connections_refused_total", "Connections refused", "reason=\"connack\"";
    banned_connects: "mqtt_banned_total", "CONNECT packets refused for a ban", "";
    backoff_begun: "mqtt_login_waits_total", "Failed logins after which their address had to wait", "";
    flapping_bans: "mqtt_flapping_bans_total", "Clients banned for a time because they connected too often", "";
    sending_paused: "mqtt_sending_pauses_total", "Times sending to a client was paused by a rate", "";
    identity_connections: "mqtt_quota_refused_total", "What was refused because its identity or tenant has no more of a quota", "of=\"identity\",quota=\"connections\"";
    identity_sessions: "mqtt_quota_refused_total", "What was refused because its identity or tenant has no more of a quota", "of=\"identity\",quota=\"sessions\"";
    identity_subscriptions: "mqtt_quota_refused_total", "What was refused because its identity or tenant has no more of a quota", "of=\"identity\",quota=\"subscriptions\"";
    identity_retained_messages: "mqtt_quota_refused_total", "What was refused because its identity or tenant has no more of a quota", "of=\"identity\",quota=\"retained_messages\"";
    identity_retained_bytes: "mqtt_quota_refused_total", "What was refused because its identity or tenant has no more of a quota", "of=\"identity\",quota=\"retained_bytes\"";
    tenant_connections: "mqtt_quota_refused_total", "What was refused because its identity or tenant has no more of a quota", "of=\"tenant\",quota=\"connections\"";
    tenant_sessions: "mqtt_quota_refused_total", "What was refused because its identity or tenant has no more of a quota", "of=\"tenant\",quota=\"sessions\"";
    tenant_subscriptions: "mqtt_quota_refused_total", "What was refused because its identity or tenant has no more of a quota", "of=\"tenant\",quota=\"subscriptions\"";
    tenant_retained_messages: "mqtt_quota_refused_total", "What was refused because its identity or tenant has no more of a quota", "of=\"tenant\",quota=\"retained_messages\"";
    tenant_retained_bytes: "mqtt_quota_refused_total", "What was refused because its identity or tenant has no more of a quota", "of=\"tenant\",quota=\"retained_bytes\"";
    handshake_tls_ok: "mqtt_tls_handshakes_total", "TLS handshakes", "result=\"ok\"";
    handshake_tls_failed: "mqtt_tls_handshakes_total", "TLS handshakes", "result=\"failed\"";
    handshake_timeout: "mqtt_connections_refused_total", "Connections refused", "reason=\"connect_timeout\"";
    evicted_not_authorized: "mqtt_connections_evicted_total", "Connections ended because of a change of who may be connected", "reason=\"not_authorized\"";
    evicted_banned: "mqtt_connections_evicted_total", "Connections ended because of a change of who may be connected", "reason=\"banned\"";
    evicted_expired: "mqtt_connections_evicted_total", "Connections ended because of a change of who may be connected", "reason=\"expired\"";
    evicted_other: "mqtt_connections_evicted_total", "Connections ended because of a change of who may be connected", "reason=\"other\"";
    protocol_errors: "mqtt_protocol_errors_total", "Connections ended for malformed packets or protocol errors", "";
    keep_alive_timeouts: "mqtt_keep_alive_timeouts_total", "Connections ended because the client was silent", "";
    packet_timeouts: "mqtt_packet_timeouts_total", "Connections ended because a packet that had begun did not go on", "";
    memory_partial: "mqtt_memory_refused_total", "What was refused because memory is short or a quota is used up", "kind=\"partial_packets\"";
    memory_aliases: "mqtt_memory_refused_total", "What was refused because memory is short or a quota is used up", "kind=\"topic_aliases\"";
    memory_queued: "mqtt_memory_refused_total", "What was refused because memory is short or a quota is used up", "kind=\"queued\"";
    memory_replies: "mqtt_memory_refused_total", "What was refused because memory is short or a quota is used up", "kind=\"replies\"";
    memory_wills: "mqtt_memory_refused_total", "What was refused because memory is short or a quota is used up", "kind=\"wills\"";
    memory_filters: "mqtt_memory_refused_total", "What was refused because memory is short or a quota is used up", "kind=\"filters\"";
    memory_sessions: "mqtt_memory_refused_total", "What was refused because memory is short or a quota is used up", "kind=\"sessions\"";
    memory_grpc: "mqtt_memory_refused_total", "What was refused because memory is short or a quota is used up", "kind=\"grpc_messages\"";
    memory_publisher: "mqtt_memory_refused_total", "What was refused because memory is short or a quota is used up", "kind=\"publisher\"";
    memory_commands: "mqtt_memory_refused_total", "What was refused because memory is short or a quota is used up", "kind=\"commands\"";
    memory_unauthenticated: "mqtt_memory_refused_total", "What was refused because memory is short or a quota is used up", "kind=\"unauthenticated\"";
    write_timeouts: "mqtt_write_timeouts_total", "Connections ended because a write made no progress", "";
    takeovers: "mqtt_takeovers_total", "Connections ended by another with the same client id", "";
    messages_in_0: "mqtt_messages_received_total", "PUBLISH packets received", "qos=\"0\"";
    messages_in_1: "mqtt_messages_received_total", "PUBLISH packets received", "qos=\"1\"";
    messages_in_2: "mqtt_messages_received_total", "PUBLISH packets received", "qos=\"2\"";
    messages_out_0: "mqtt_messages_sent_total", "PUBLISH packets sent", "qos=\"0\"";
    messages_out_1: "mqtt_messages_sent_total", "PUBLISH packets sent", "qos=\"1\"";
    messages_out_2: "mqtt_messages_sent_total", "PUBLISH packets sent", "qos=\"2\"";
    bytes_in: "mqtt_bytes_received_total", "Bytes read from devices", "";
    bytes_out: "mqtt_bytes_sent_total", "Bytes written to devices", "";
    packets_in: "mqtt_packets_received_total", "MQTT packets received", "";
    packets_out: "mqtt_packets_sent_total", "MQTT packets sent", "";
    payload_bytes_in_0: "mqtt_payload_bytes_received_total", "Bytes of payload in PUBLISH packets received", "qos=\"0\"";
    payload_bytes_in_1: "mqtt_payload_bytes_received_total", "Bytes of payload in PUBLISH packets received", "qos=\"1\"";
    payload_bytes_in_2: "mqtt_payload_bytes_received_total", "Bytes of payload in PUBLISH packets received", "qos=\"2\"";
    payload_bytes_out_0: "mqtt_payload_bytes_sent_total", "Bytes of payload in PUBLISH packets sent", "qos=\"0\"";
    payload_bytes_out_1: "mqtt_payload_bytes_sent_total", "Bytes of payload in PUBLISH packets sent", "qos=\"1\"";
    payload_bytes_out_2: "mqtt_payload_bytes_sent_total", "Bytes of payload in PUBLISH packets sent", "qos=\"2\"";
    dropped_offline: "mqtt_messages_dropped_total", "Deliveries dropped", "reason=\"offline\"";
    dropped_queue_full: "mqtt_messages_dropped_total", "Deliveries dropped", "reason=\"queue_full\"";
    dropped_memory: "mqtt_messages_dropped_total", "Deliveries dropped", "reason=\"memory\"";
    dropped_expired: "mqtt_messages_dropped_total", "Deliveries dropped", "reason=\"expired\"";
    dropped_too_large: "mqtt_messages_dropped_total", "Deliveries dropped", "reason=\"too_large\"";
    dropped_connection_lost: "mqtt_messages_dropped_total", "Deliveries dropped", "reason=\"connection_lost\"";
    dropped_session_ended: "mqtt_messages_dropped_total", "Deliveries dropped", "reason=\"session_ended\"";
    dropped_not_authorized: "mqtt_messages_dropped_total", "Deliveries dropped", "reason=\"not_authorized\"";
    dropped_purged: "mqtt_messages_dropped_total", "Deliveries dropped", "reason=\"purged\"";
    groups_appended: "gateway_groups_appended_total", "Messages appended to the log of consumer groups", "";
    groups_dropped_log: "gateway_groups_dropped_total", "Messages that consumer groups do not get", "reason=\"log\"";
    groups_dropped_full: "gateway_groups_dropped_total", "Messages that consumer groups do not get", "reason=\"group_full\"";
    groups_dropped_letters: "gateway_groups_dropped_total", "Messages that consumer groups do not get", "reason=\"dead_letters\"";
    groups_dropped_events: "gateway_groups_dropped_total", "Messages that consumer groups do not get", "reason=\"events\"";
    commands_sent: "gateway_commands_sent_total", "Commands of calls of Send", "";
    commands_replied: "gateway_commands_replied_total", "Replies of devices that callers got", "";
    commands_failed_offline: "gateway_commands_failed_total", "Calls of Send that ended without a reply", "reason=\"offline\"";
    commands_failed_timeout: "gateway_commands_failed_total", "Calls of Send that ended without a reply", "reason=\"timeout\"";
    commands_failed_refused: "gateway_commands_failed_total", "Calls of Send that ended without a reply", "reason=\"refused\"";
    commands_failed_limit: "gateway_commands_failed_total", "Calls of Send that ended without a reply", "reason=\"limit\"";
    commands_failed_other: "gateway_commands_failed_total", "Calls of Send that ended without a reply", "reason=\"other\"";
    commands_started: "gateway_commands_started_total", "Stored commands begun", "";
    commands_ended_replied: "gateway_commands_ended_total", "Stored commands that ended", "state=\"replied\"";
    commands_ended_timed_out: "gateway_commands_ended_total", "Stored commands that ended", "state=\"timed_out\"";
    commands_ended_cancelled: "gateway_commands_ended_total", "Stored commands that ended", "state=\"cancelled\"";
    commands_ended_refused: "gateway_commands_ended_total", "Stored commands that ended", "state=\"refused\"";
    commands_replies_duplicate: "gateway_commands_replies_dropped_total", "Replies of devices that nobody gets", "reason=\"duplicate\"";
    commands_replies_late: "gateway_commands_replies_dropped_total", "Replies of devices that nobody gets", "reason=\"late\"";
    commands_replies_unknown: "gateway_commands_replies_dropped_total", "Replies of devices that nobody gets", "reason=\"unknown\"";
    commands_replies_correlation: "gateway_commands_replies_dropped_total", "Replies of devices that nobody gets", "reason=\"correlation\"";
    commands_replies_malformed: "gateway_commands_replies_dropped_total", "Replies of devices that nobody gets", "reason=\"malformed\"";
    no_match: "mqtt_messages_unmatched_total", "Messages without a subscriber", "";
    refused_memory: "mqtt_messages_refused_total", "Messages refused as a whole", "reason=\"memory\"";
    refused_store: "mqtt_messages_refused_total", "Messages refused as a whole", "reason=\"store\"";
    refused_not_accepted: "mqtt_messages_refused_total", "Messages refused as a whole", "reason=\"not_accepted\"";
    refused_not_authorized: "mqtt_messages_refused_total", "Messages refused as a whole", "reason=\"not_authorized\"";
    reserved_foreign: "mqtt_messages_refused_total", "Messages refused as a whole", "reason=\"reserved_topic\"";
    yields: "mqtt_yields_total", "Times a connection had more to do than it may at once and let others go first", "";
    rate_limited: "mqtt_rate_limit_pauses_total", "Times reading of a client was paused by its rate limit", "";
    subscribe_refused: "mqtt_subscriptions_refused_total", "Filters refused", "";
    subscribe_denied: "mqtt_subscriptions_denied_total", "Filters that the rules deny", "when=\"asked\"";
    subscribe_revoked: "mqtt_subscriptions_denied_total", "Filters that the rules deny", "when=\"changed\"";
    deliveries_withheld: "mqtt_deliveries_withheld_total", "Deliveries that the rules do not allow, of subscriptions that they filter", "";
    wills_denied: "mqtt_wills_denied_total", "Wills that the rules deny", "at=\"connect\"";
    wills_withheld: "mqtt_wills_denied_total", "Wills that the rules deny", "at=\"publication\"";
    retained_refused: "mqtt_retained_refused_total", "Retained messages not stored because of a limit", "reason=\"limit\"";
    retained_memory: "mqtt_retained_refused_total", "Retained messages not stored because of a limit", "reason=\"memory\"";
    retained_unread: "mqtt_retained_unread_total", "Retained messages left out of a replay because the disk could not be read", "";
    sessions_expired: "mqtt_sessions_expired_total", "Sessions ended by expiry", "";
    wills_published: "mqtt_wills_published_total", "Wills published", "";
    non_broker_blocked: "mqtt_non_broker_blocked_total", "Deliveries between devices withheld in non-broker mode", "";
    latest_updates: "gateway_latest_updates_total", "Latest values recorded", "";
    latest_coalesced: "gateway_latest_coalesced_total", "Latest values replaced by newer ones before they were written", "";
    latest_written: "gateway_latest_written_total", "Latest values written to the store", "";
    latest_dropped_topics: "gateway_latest_dropped_total", "Latest values not kept", "reason=\"device_topics\"";
    latest_dropped_bytes: "gateway_latest_dropped_total", "Latest values not kept", "reason=\"bytes\"";
    latest_dropped_too_large: "gateway_latest_dropped_total", "Latest values not kept", "reason=\"too_large\"";
    latest_dropped_name: "gateway_latest_dropped_total", "Latest values not kept", "reason=\"name\"";
    latest_dropped_rejected: "gateway_latest_dropped_total", "Latest values not kept", "reason=\"rejected\"";
    latest_dropped_clock: "gateway_latest_dropped_total", "Latest values not kept", "reason=\"clock\"";
    latest_dropped_shutdown: "gateway_latest_dropped_total", "Latest values not kept", "reason=\"shutdown\"";
    latest_retried: "gateway_latest_retried_total", "Latest values that wait again as their write failed", "";
    latest_spilled: "gateway_latest_spilled_total", "Latest values kept in the data directory as the database was away", "";
    latest_replayed: "gateway_latest_replayed_total", "Latest values written to the database from the data directory", "";
    latest_store_timeouts: "gateway_latest_store_timeouts_total", "Calls that the latest-value store did not answer in time", "op=\"write\"";
    latest_read_timeouts: "gateway_latest_store_timeouts_total", "Calls that the latest-value store did not answer in time", "op=\"read\"";
    latest_damaged: "gateway_latest_damaged_total", "Damaged records of latest values met and skipped", "";
    latest_store_errors: "gateway_latest_store_errors_total", "Failed writes to the latest-value store (they are retried)", "";
    history_recorded: "gateway_history_recorded_total", "Messages taken into the history", "";
    history_written: "gateway_history_written_total", "Messages of the history written to the database", "";
    history_dropped_messages: "gateway_history_dropped_total", "Messages that the history does not have", "reason=\"messages\"";
    history_dropped_bytes: "gateway_history_dropped_total", "Messages that the history does not have", "reason=\"bytes\"";
    history_dropped_too_large: "gateway_history_dropped_total", "Messages that the history does not have", "reason=\"too_large\"";
    history_dropped_rejected: "gateway_history_dropped_total", "Messages that the history does not have", "reason=\"rejected\"";
    history_dropped_shutdown: "gateway_history_dropped_total", "Messages that the history does not have", "reason=\"shutdown\"";
    history_write_errors: "gateway_history_errors_total", "Failed calls to the database for the history (writes are retried)", "op=\"write\"";
    history_read_errors: "gateway_history_errors_total", "Failed calls to the database for the history (writes are retried)", "op=\"read\"";
    database_errors_unavailable: "gateway_database_errors_total", "Failed requests to the database", "kind=\"unavailable\"";
    database_errors_overloaded: "gateway_database_errors_total", "Failed requests to the database", "kind=\"overloaded\"";
    database_errors_schema: "gateway_database_errors_total", "Failed requests to the database", "kind=\"schema\"";
    database_errors_rejected: "gateway_database_errors_total", "Failed requests to the database", "kind=\"rejected\"";
    database_errors_denied: "gateway_database_errors_total", "Failed requests to the database", "kind=\"denied\"";
    database_errors_clock: "gateway_database_errors_total", "Failed requests to the database", "kind=\"clock\"";
    store_commits: "gateway_store_commits_total", "Commits of sessions, queues and retained messages", "";
    store_commit_errors: "gateway_store_commit_errors_total", "Failed commits of sessions, queues and retained messages", "";
    store_commit_micros: "gateway_store_commit_microseconds_total", "Time in commits of sessions, queues and retained messages", "";
    store_damaged_records: "gateway_store_damaged_records_total", "Damaged records of sessions, queues and retained messages met and skipped", "";
    store_refused_sessions: "gateway_store_refused_total", "Changes that a store did not take, as too many wait", "store=\"sessions\"";
    store_refused_retained: "gateway_store_refused_total", "Changes that a store did not take, as too many wait", "store=\"retained\"";
    store_refused_groups: "gateway_store_refused_total", "Changes that a store did not take, as too many wait", "store=\"groups\"";
    store_refused_publisher: "gateway_store_refused_total", "Changes that a store did not take, as too many wait", "store=\"publisher\"";
    store_refused_shadows: "gateway_store_refused_total", "Changes that a store did not take, as too many wait", "store=\"shadows\"";
    store_entries_written: "gateway_store_entries_written_total", "Entries of durable queues written", "";
    store_entries_settled: "gateway_store_entries_settled_total", "Entries of durable queues acknowledged before they were written, and never written", "";
    store_entries_removed: "gateway_store_entries_removed_total", "Entries of durable queues removed", "";
    store_entries_refused: "gateway_store_entries_refused_total", "Entries of durable queues refused because a commit failed", "";
    store_entries_expired: "gateway_store_entries_expired_total", "Entries of durable queues removed because their message expired", "";
    log_appended: "gateway_log_appended_total", "Messages written to the log of consumer groups", "";
    log_commits: "gateway_log_commits_total", "Writes to the log of consumer groups, each with its sync", "";
    log_commit_micros: "gateway_log_commit_microseconds_total", "Time in writes to the log of consumer groups", "";
    log_errors_write: "gateway_log_errors_total", "Failures of the disk under the log of consumer groups", "op=\"write\"";
    log_errors_sync: "gateway_log_errors_total", "Failures of the disk under the log of consumer groups", "op=\"sync\"";
    log_errors_read: "gateway_log_errors_total", "Failures of the disk under the log of consumer groups", "op=\"read\"";
    log_refused_waiting: "gateway_log_refused_total", "What the log of consumer groups did not take", "reason=\"waiting\"";
    log_refused_disk: "gateway_log_refused_total", "What the log of consumer groups did not take", "reason=\"disk\"";
    log_refused_reads: "gateway_log_refused_total", "What the log of consumer groups did not take", "reason=\"reads\"";
    log_damaged: "gateway_log_damaged_total", "Damaged records, stretches and segments of the log of consumer groups met", "";
    log_cut_bytes: "gateway_log_cut_bytes_total", "Bytes at the end of the log that were not written whole and were cut at a start", "";
    log_segments_removed: "gateway_log_segments_removed_total", "Segments of the log removed because no group needs them", "";
    shadow_updates_device: "gateway_shadow_requests_total", "Requests for device shadows", "op=\"update\",by=\"device\"";
    shadow_gets_device: "gateway_shadow_requests_total", "Requests for device shadows", "op=\"get\",by=\"device\"";
    shadow_deletes_device: "gateway_shadow_requests_total", "Requests for device shadows", "op=\"delete\",by=\"device\"";
    shadow_updates_backend: "gateway_shadow_requests_total", "Requests for device shadows", "op=\"update\",by=\"backend\"";
    shadow_deletes_backend: "gateway_shadow_requests_total", "Requests for device shadows", "op=\"delete\",by=\"backend\"";
    shadow_rejected: "gateway_shadow_rejected_total", "Requests of devices that were answered with a rejection", "";
    shadow_refused_requests: "gateway_shadow_refused_total", "Requests for device shadows that were not carried out", "reason=\"too_many\"";
    shadow_refused_memory: "gateway_shadow_refused_total", "Requests for device shadows that were not carried out", "reason=\"memory\"";
    shadow_refused_waited: "gateway_shadow_refused_total", "Requests for device shadows that were not carried out", "reason=\"waited\"";
    shadow_requests_unknown: "gateway_shadow_refused_total", "Requests for device shadows that were not carried out", "reason=\"topic\"";
    shadow_deltas: "gateway_shadow_deltas_total", "Updates of shadows after which something is desired that is not reported", "";
    shadow_retried: "gateway_shadow_retried_total", "Changes of shadows made anew as somebody else had changed the shadow", "";
    shadow_store_errors: "gateway_shadow_store_errors_total", "Calls that the store of shadows did not answer, or not in time", "";
    shadow_watch_missed: "gateway_shadow_watch_missed_total", "Changes that a watcher of shadows did not get, for want of memory", "";
    grpc_refused_limit: "gateway_grpc_connections_refused_total", "gRPC connections refused or closed for others", "reason=\"limit\"";
    grpc_refused_address_limit: "gateway_grpc_connections_refused_total", "gRPC connections refused or closed for others", "reason=\"address_limit\"";
    grpc_refused_waiting: "gateway_grpc_connections_refused_total", "gRPC connections refused or closed for others", "reason=\"waiting\"";
    grpc_refused_silent: "gateway_grpc_connections_refused_total", "gRPC connections refused or closed for others", "reason=\"silent\"";
    grpc_evicted_revoked: "gateway_grpc_connections_evicted_total", "gRPC connections ended because of a change of who may be connected", "reason=\"revoked\"";
    grpc_refused_timeout: "gateway_grpc_connections_refused_total", "gRPC connections refused or closed for others", "reason=\"handshake_timeout\"";
    grpc_refused_memory: "gateway_grpc_connections_refused_total", "gRPC connections refused or closed for others", "reason=\"memory\"";
    grpc_calls_refused: "gateway_grpc_calls_refused_total", "gRPC calls beyond the limit of their connection or of all", "";
    http_refused_waiting: "gateway_http_connections_refused_total", "HTTP connections refused or closed for others", "reason=\"waiting\"";
    http_refused_silent: "gateway_http_connections_refused_total", "HTTP connections refused or closed for others", "reason=\"silent\"";
    http_refused_busy: "gateway_http_connections_refused_total", "HTTP connections refused or closed for others", "reason=\"busy\"";
    http_failed: "gateway_http_connections_failed_total", "HTTP connections that ended with an error, timeouts included", "";
    grpc_requests_late: "gateway_grpc_requests_late_total", "gRPC requests that had begun and did not go on", "";
    grpc_calls: "gateway_grpc_calls_total", "gRPC calls and streams begun", "";
    backend_denied_nobody: "gateway_backend_denied_total", "Calls of gRPC and HTTP, or parts of them, that were denied", "reason=\"no_credentials\"";
    backend_denied_wrong: "gateway_backend_denied_total", "Calls of gRPC and HTTP, or parts of them, that were denied", "reason=\"wrong_credentials\"";
    backend_denied_expired: "gateway_backend_denied_total", "Calls of gRPC and HTTP, or parts of them, that were denied", "reason=\"expired\"";
    backend_denied_role: "gateway_backend_denied_total", "Calls of gRPC and HTTP, or parts of them, that were denied", "reason=\"role\"";
    backend_denied_scope: "gateway_backend_denied_total", "Calls of gRPC and HTTP, or parts of them, that were denied", "reason=\"scope\"";
    backend_streams_revoked: "gateway_backend_streams_ended_total", "Streams whose caller lost its rights", "reason=\"revoked\"";
    backend_streams_expired: "gateway_backend_streams_ended_total", "Streams whose caller lost its rights", "reason=\"expired\"";
    audit_suppressed: "gateway_audit_suppressed_total", "Lines left out of the audit log: one address was denied too often", "";
    grpc_published: "gateway_grpc_published_total", "Messages published by backends", "";
    grpc_fanout_devices: "gateway_grpc_fanout_devices_total", "Devices that one message to many was given to", "";
    grpc_scheduled_accepted: "gateway_grpc_scheduled_total", "Messages with a time to be published at, by what became of them", "result=\"accepted\"";
    grpc_scheduled_refused: "gateway_grpc_scheduled_total", "Messages with a time to be published at, by what became of them", "result=\"refused\"";
    grpc_scheduled_cancelled: "gateway_grpc_scheduled_total", "Messages with a time to be published at, by what became of them", "result=\"cancelled\"";
    grpc_scheduled_published: "gateway_grpc_scheduled_total", "Messages with a time to be published at, by what became of them", "result=\"published\"";
    grpc_scheduled_late: "gateway_grpc_scheduled_total", "Messages with a time to be published at, by what became of them", "result=\"late\"";
    grpc_scheduled_failed: "gateway_grpc_scheduled_total", "Messages with a time to be published at, by what became of them", "result=\"failed\"";
    grpc_keys_joined: "gateway_grpc_keys_total", "Publishes whose idempotency key was known", "result=\"joined\"";
    grpc_keys_answered: "gateway_grpc_keys_total", "Publishes whose idempotency key was known", "result=\"answered\"";
    grpc_keys_reused: "gateway_grpc_keys_total", "Publishes whose idempotency key was known", "result=\"other_content\"";
    grpc_keys_dropped_count: "gateway_grpc_keys_dropped_total", "Idempotency keys forgotten before their time", "reason=\"count\"";
    grpc_keys_dropped_memory: "gateway_grpc_keys_dropped_total", "Idempotency keys forgotten before their time", "reason=\"memory\"";
    grpc_delivered: "gateway_grpc_delivered_total", "Messages sent to backend streams", "";
    grpc_stream_dropped_full: "gateway_grpc_stream_dropped_total", "Messages dropped for backend streams", "reason=\"buffer_full\"";
    grpc_stream_dropped_memory: "gateway_grpc_stream_dropped_total", "Messages dropped for backend streams", "reason=\"memory\"";
    grpc_stream_dropped_too_large: "gateway_grpc_stream_dropped_total", "Messages dropped for backend streams", "reason=\"too_large\"";
    grpc_stream_dropped_closed: "gateway_grpc_stream_dropped_total", "Messages dropped for backend streams", "reason=\"closed\"";
    grpc_requests_failed: "gateway_grpc_errors_total", "gRPC calls answered with an error", "";
    events_untold: "gateway_events_untold_total", "Dropped messages that no event tells of, as too many sessions dropped some in one second", "";
    hook_answers: "gateway_auth_hook_total", "Questions to a remote source about logins and topics, by what became of them", "result=\"answers\"";
    hook_cached: "gateway_auth_hook_total", "Questions to a remote source about logins and topics, by what became of them", "result=\"cached\"";
    hook_stale: "gateway_auth_hook_total", "Questions to a remote source about logins and topics, by what became of them", "result=\"stale\"";
    hook_failures: "gateway_auth_hook_total", "Questions to a remote source about logins and topics, by what became of them", "result=\"failures\"";
    hook_busy: "gateway_auth_hook_total", "Questions to a remote source about logins and topics, by what became of them", "result=\"busy\"";
    hook_open: "gateway_auth_hook_total", "Questions to a remote source about logins and topics, by what became of them", "result=\"open\"";
    hook_events_told: "gateway_hook_events_total", "Events for a remote service, by what became of them", "result=\"told\"";
    hook_events_full: "gateway_hook_events_total", "Events for a remote service, by what became of them", "result=\"queue_full\"";
    hook_events_lagged: "gateway_hook_events_total", "Events for a remote service, by what became of them", "result=\"lagged\"";
    hook_events_shutdown: "gateway_hook_events_total", "Events for a remote service, by what became of them", "result=\"shutdown\"";
    hook_events_failures: "gateway_hook_event_failures_total", "Batches of events that a remote service did not take", "";
    jwks_fetched: "gateway_jwks_fetches_total", "Key sets of tokens fetched, by what became of it", "result=\"fetched\"";
    jwks_failed: "gateway_jwks_fetches_total", "Key sets of tokens fetched, by what became of it", "result=\"failed\"";
    auth_failed: "mqtt_auth_failures_total", "CONNECT packets refused by authentication", "reason=\"credentials\"";
    auth_not_authorized: "mqtt_auth_failures_total", "CONNECT packets refused by authentication", "reason=\"not_authorized\"";
    auth_client_id: "mqtt_auth_failures_total", "CONNECT packets refused by authentication", "reason=\"client_id\"";
    auth_busy: "mqtt_auth_failures_total", "CONNECT packets refused by authentication", "reason=\"busy\"";
    auth_unavailable: "mqtt_auth_failures_total", "CONNECT packets refused by authentication", "reason=\"unavailable\"";
    reauthentication_ok: "mqtt_reauthentications_total", "Authentications of live connections that have ended", "result=\"ok\"";
    reauthentication_refused: "mqtt_reauthentications_total", "Authentications of live connections that have ended", "result=\"refused\"";
    reauthentication_timeout: "mqtt_reauthentications_total", "Authentications of live connections that have ended", "result=\"timeout\"";
}

static ALL: Mutex<Vec<Arc<Counters>>> = Mutex::new(Vec::new());

thread_local! {
    static LOCAL: Arc<Counters> = {
        let counters = Arc::new(Counters::default());
        ALL.lock().push(Arc::clone(&counters));
        counters
    };
}

/// Changes this thread's counters.
pub fn count(change: impl FnOnce(&Counters)) {
    LOCAL.with(|counters| change(counters));
}

/// Sums of all threads that ever counted.
pub fn totals() -> Totals {
    let mut totals = Totals::default();
    for counters in ALL.lock().iter() {
        totals.add(counters);
    }
    totals
}
