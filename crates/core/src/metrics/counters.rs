//! Counters of the whole process: one set per thread, written without contention, added up when read. What is declared here is
//! all there is: `/metrics`, OTLP and docs/metrics.md are made of it. The comment of a family, and of a row, is what
//! operators read in docs/metrics.md about it.
//!
//! Long because the declaration of every counter is one table.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread_local,
};

use parking_lot::Mutex;

use super::row::{Family, MetricKind, Row};

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
    ($(
        $(#[doc = $about:literal])*
        $name:literal: $help:literal {
            $($(#[doc = $meaning:literal])* $field:ident
                $(($label:ident = $value:literal $(, $other:ident = $other_value:literal)*))?;)+
        }
    )*) => {
        /// Every counter of the process. `$SYS`, `/metrics` and tests read [`totals`].
        #[derive(Debug, Default)]
        pub struct Counters { $($(
            #[doc = $help]
            #[doc = ""]
            $(#[doc = $meaning])*
            pub $field: Counter,
        )+)* }

        /// The sums over all threads.
        #[derive(Debug, Default, Clone, Copy)]
        pub struct Totals { $($(#[doc = $help] pub $field: u64,)+)* }

        /// The family of every counter, with what its rows mean.
        pub(super) static FAMILIES: &[Family] = &[$(Family {
            name: $name,
            help: $help,
            kind: MetricKind::Counter,
            labels: &[],
            about: concat!($($about, "\n"),*),
            rows: &[$((
                concat!($(stringify!($label), "=\"", $value, "\""
                    $(, ",", stringify!($other), "=\"", $other_value, "\"")*)?),
                concat!($($meaning, "\n"),*),
            )),+],
        }),*];

        impl Totals {
            /// The rows of every counter.
            pub fn rows(&self) -> Vec<Row> {
                let values: [&[u64]; FAMILIES.len()] = [$(&[$(self.$field),+]),*];
                let families = FAMILIES.iter().zip(values);
                let rows = families.flat_map(|(family, values)| {
                    family.rows.iter().zip(values).map(|((labels, _), value)| {
                        Row::new(family, "", (*labels).into(), *value as f64)
                    })
                });
                rows.collect()
            }

            fn add(&mut self, counters: &Counters) {
                $($(self.$field = self.$field.wrapping_add(counters.$field.0.load(Relaxed));)+)*
            }
        }
    };
}

counters! {
    /// Before any check of who they are; those closed for others are among them.
    "mqtt_connections_accepted_total": "Sockets accepted" {
        connections_accepted;
    }
    "mqtt_connections_established_total": "CONNECT packets accepted" {
        connections_established;
    }
    "mqtt_connections_closed_total": "Connections that ended after CONNACK" {
        connections_closed;
    }
    /// `silent` and `waiting` grow when somebody opens connections and says nothing, or when a storm of devices is more than
    /// the machine can take.
    "mqtt_connections_refused_total": "Connections refused" {
        /// `limits.max_connections`
        refused_connections_limit(reason = "limit");
        /// `max_connections` of the listener
        refused_listener_limit(reason = "listener_limit");
        /// `limits.max_connections_per_address`
        refused_address_limit(reason = "address_limit");
        /// `limits.max_handshakes_per_address`, of an address that a proxy names
        refused_address_handshakes(reason = "address_handshakes");
        /// `limits.accept_rate_per_address`
        refused_address_rate(reason = "address_rate");
        /// a [ban](security/bans.md) of the address
        refused_address_banned(reason = "address_banned");
        /// the address has to wait after failed logins
        refused_failed_logins(reason = "failed_logins");
        /// too many wait for a handshake
        refused_waiting(reason = "waiting");
        /// a page that may not open a WebSocket, `allowed_origins`
        refused_origin(reason = "origin");
        /// a WebSocket on a loopback address, for another host than this machine
        refused_host(reason = "host");
        /// closed for a newcomer, see [doors](configuration.md#limits)
        refused_silent(reason = "silent");
        /// a CONNECT was refused
        refused_connect(reason = "connack");
        /// no CONNECT in time, `limits.connect_timeout`
        handshake_timeout(reason = "connect_timeout");
    }
    /// By [bans](security/bans.md) of clients, users and addresses.
    "mqtt_banned_total": "CONNECT packets refused for a ban" {
        banned_connects;
    }
    "mqtt_login_waits_total": "Failed logins after which their address had to wait" {
        backoff_begun;
    }
    /// `bans.flapping_connects` is how often.
    "mqtt_flapping_bans_total": "Clients banned for a time because they connected too often" {
        flapping_bans;
    }
    /// See [quotas](security/bans.md#caps-and-quotas).
    "mqtt_sending_pauses_total": "Times sending to a client was paused by a rate" {
        sending_paused;
    }
    /// CONNECT, SUBSCRIBE and retained messages beyond a [quota](security/bans.md#caps-and-quotas).
    "mqtt_quota_refused_total": "What was refused because its identity or tenant has no more of a quota" {
        identity_connections(of = "identity", quota = "connections");
        identity_sessions(of = "identity", quota = "sessions");
        identity_subscriptions(of = "identity", quota = "subscriptions");
        identity_retained_messages(of = "identity", quota = "retained_messages");
        identity_retained_bytes(of = "identity", quota = "retained_bytes");
        tenant_connections(of = "tenant", quota = "connections");
        tenant_sessions(of = "tenant", quota = "sessions");
        tenant_subscriptions(of = "tenant", quota = "subscriptions");
        tenant_retained_messages(of = "tenant", quota = "retained_messages");
        tenant_retained_bytes(of = "tenant", quota = "retained_bytes");
    }
    /// While half of the listener's places for handshakes are taken, an address has to prove first that it is its sender's.
    "mqtt_quic_retries_total": "QUIC connections that were asked to prove their address (Retry)" {
        quic_retries;
    }
    /// An address is sent at most three times what came from there until it has proved that it is its sender's.
    "mqtt_quic_unproved_total": "Packets of QUIC that were not sent, as their address has not proved itself and had too much" {
        quic_unproved;
    }
    "mqtt_tls_handshakes_total": "TLS handshakes" {
        handshake_tls_ok(result = "ok");
        handshake_tls_failed(result = "failed");
    }
    "mqtt_connections_evicted_total": "Connections ended because of a change of who may be connected" {
        /// the rules or passwords have changed
        evicted_not_authorized(reason = "not_authorized");
        /// a new ban
        evicted_banned(reason = "banned");
        /// the time of the client's login has ended
        evicted_expired(reason = "expired");
        /// anything else
        evicted_other(reason = "other");
    }
    "mqtt_protocol_errors_total": "Connections ended for malformed packets or protocol errors" {
        protocol_errors;
    }
    "mqtt_keep_alive_timeouts_total": "Connections ended because the client was silent" {
        keep_alive_timeouts;
    }
    /// `limits.packet_timeout` is how long it may take.
    "mqtt_packet_timeouts_total": "Connections ended because a packet that had begun did not go on" {
        packet_timeouts;
    }
    /// `gateway_memory_bytes` has the same kinds. `topic_aliases`, `replies`, `partial_packets` and `queued` are connections
    /// that were closed (0x97).
    "mqtt_memory_refused_total": "What was refused because memory is short or a quota is used up" {
        memory_partial(kind = "partial_packets");
        memory_aliases(kind = "topic_aliases");
        memory_queued(kind = "queued");
        memory_replies(kind = "replies");
        memory_wills(kind = "wills");
        memory_filters(kind = "filters");
        memory_sessions(kind = "sessions");
        memory_grpc(kind = "grpc_messages");
        memory_grpc_streams(kind = "grpc_streams");
        memory_grpc_unauthenticated(kind = "grpc_unauthenticated");
        memory_http(kind = "http");
        memory_publisher(kind = "publisher");
        memory_commands(kind = "commands");
        memory_unauthenticated(kind = "unauthenticated");
        memory_quic(kind = "quic");
    }
    "mqtt_write_timeouts_total": "Connections ended because a write made no progress" {
        write_timeouts;
    }
    "mqtt_takeovers_total": "Connections ended by another with the same client id" {
        takeovers;
    }
    "mqtt_messages_received_total": "PUBLISH packets received" {
        messages_in_0(qos = "0");
        messages_in_1(qos = "1");
        messages_in_2(qos = "2");
    }
    "mqtt_messages_sent_total": "PUBLISH packets sent" {
        messages_out_0(qos = "0");
        messages_out_1(qos = "1");
        messages_out_2(qos = "2");
    }
    "mqtt_bytes_received_total": "Bytes read from devices" {
        bytes_in;
    }
    "mqtt_bytes_sent_total": "Bytes written to devices" {
        bytes_out;
    }
    "mqtt_packets_received_total": "MQTT packets received" {
        packets_in;
    }
    "mqtt_packets_sent_total": "MQTT packets sent" {
        packets_out;
    }
    "mqtt_payload_bytes_received_total": "Bytes of payload in PUBLISH packets received" {
        payload_bytes_in_0(qos = "0");
        payload_bytes_in_1(qos = "1");
        payload_bytes_in_2(qos = "2");
    }
    "mqtt_payload_bytes_sent_total": "Bytes of payload in PUBLISH packets sent" {
        payload_bytes_out_0(qos = "0");
        payload_bytes_out_1(qos = "1");
        payload_bytes_out_2(qos = "2");
    }
    /// Any growth means that somebody did not get something. Which devices these are: `Devices.ListTopDevices` ranks them by
    /// what waits, by bytes, by what is not acknowledged, or by drops; `Devices.ListQueue` shows what waits for one.
    "mqtt_messages_dropped_total": "Deliveries dropped" {
        /// QoS 0 for a session without a connection
        dropped_offline(reason = "offline");
        /// slow or absent subscribers: the session's queue is full
        dropped_queue_full(reason = "queue_full");
        /// the process-wide budget, `limits.memory_budget`
        dropped_memory(reason = "memory");
        /// the Message Expiry Interval, or `limits.offline_age`
        dropped_expired(reason = "expired");
        /// above the client's Maximum Packet Size
        dropped_too_large(reason = "too_large");
        /// QoS 0 that a connection which ended had not sent
        dropped_connection_lost(reason = "connection_lost");
        /// what waited for a session that ended
        dropped_session_ended(reason = "session_ended");
        /// the rules have changed since it was queued
        dropped_not_authorized(reason = "not_authorized");
        /// `Devices.PurgeQueue`
        dropped_purged(reason = "purged");
    }
    /// Once, however many groups want a message.
    "gateway_groups_appended_total": "Messages appended to the log of consumer groups" {
        groups_appended;
    }
    "gateway_groups_dropped_total": "Messages that consumer groups do not get" {
        /// the log took nothing
        groups_dropped_log(reason = "log");
        /// QoS 0 for a group that refuses when it is full; all for one that drops, while the log is an eighth over its bound
        groups_dropped_full(reason = "group_full");
        /// dead letters that newer ones have pushed out
        groups_dropped_letters(reason = "dead_letters");
        /// events that came faster than they were appended
        groups_dropped_events(reason = "events");
    }
    "gateway_commands_sent_total": "Commands of calls of Send" {
        commands_sent;
    }
    "gateway_commands_replied_total": "Replies of devices that callers got" {
        commands_replied;
    }
    /// Calls of `Commands.Send`.
    "gateway_commands_failed_total": "Calls of Send that ended without a reply" {
        /// the device has no connection
        commands_failed_offline(reason = "offline");
        /// no answer in time
        commands_failed_timeout(reason = "timeout");
        /// by the device
        commands_failed_refused(reason = "refused");
        /// too many commands wait
        commands_failed_limit(reason = "limit");
        /// anything else
        commands_failed_other(reason = "other");
    }
    "gateway_commands_started_total": "Stored commands begun" {
        commands_started;
    }
    "gateway_commands_ended_total": "Stored commands that ended" {
        commands_ended_replied(state = "replied");
        commands_ended_timed_out(state = "timed_out");
        commands_ended_cancelled(state = "cancelled");
        commands_ended_refused(state = "refused");
    }
    "gateway_commands_replies_dropped_total": "Replies of devices that nobody gets" {
        /// to what was answered
        commands_replies_duplicate(reason = "duplicate");
        /// to what had ended
        commands_replies_late(reason = "late");
        /// to what was never asked
        commands_replies_unknown(reason = "unknown");
        /// with other correlation data
        commands_replies_correlation(reason = "correlation");
        /// on other topics below `commands.topic`
        commands_replies_malformed(reason = "malformed");
    }
    "mqtt_messages_unmatched_total": "Messages without a subscriber" {
        no_match;
    }
    /// Messages that nobody got and that were refused to their publisher. MQTT 3.1 has no way to tell its client: there the
    /// message is acknowledged as if it had been taken.
    "mqtt_messages_refused_total": "Messages refused as a whole" {
        /// `limits.memory_budget`
        refused_memory(reason = "memory");
        /// the disk takes no more and a persistent session, or a group that refuses, would have got them
        refused_store(reason = "store");
        /// much waits for the disk, and more of it is the publisher's own than its share
        refused_share(reason = "share");
        /// the device may not publish there in non-broker mode, or topic or payload are not acceptable
        refused_not_accepted(reason = "not_accepted");
        /// the rules
        refused_not_authorized(reason = "not_authorized");
        /// the gateway answers the topic, and not for this device
        reserved_foreign(reason = "reserved_topic");
    }
    /// A connection has an account of about half a millisecond of work each time it runs; it keeps its place, also within a
    /// packet, lets the others of its shard go first and goes on. A few a second are ordinary under load; thousands a second
    /// that come from few clients are a flood or very large packets (`limits.max_filters_per_packet`,
    /// `limits.client_message_rate`).
    "mqtt_yields_total": "Times a connection had more to do than it may at once and let others go first" {
        yields;
    }
    /// See [quotas](security/bans.md#caps-and-quotas).
    "mqtt_rate_limit_pauses_total": "Times reading of a client was paused by its rate limit" {
        rate_limited;
    }
    /// For a limit, for want of memory or because the disk did not take them; what the rules deny is counted in
    /// `mqtt_subscriptions_denied_total`.
    "mqtt_subscriptions_refused_total": "Filters refused" {
        subscribe_refused;
    }
    /// See [rules](security/rules.md).
    "mqtt_subscriptions_denied_total": "Filters that the rules deny" {
        /// as the client subscribed
        subscribe_denied(when = "asked");
        /// afterwards, as the rules changed
        subscribe_revoked(when = "changed");
    }
    "mqtt_deliveries_withheld_total": "Deliveries that the rules do not allow, of subscriptions that they filter" {
        deliveries_withheld;
    }
    "mqtt_wills_denied_total": "Wills that the rules deny" {
        /// as the client connected
        wills_denied(at = "connect");
        /// as it was to be published
        wills_withheld(at = "publication");
    }
    /// These messages were delivered.
    "mqtt_retained_refused_total": "Retained messages not stored because of a limit" {
        /// `limits.retained_messages`, `limits.retained_bytes`
        retained_refused(reason = "limit");
        /// the budget or the share of retained messages in it
        retained_memory(reason = "memory");
    }
    /// A new subscriber did not get them.
    "mqtt_retained_unread_total": "Retained messages left out of a replay because the disk could not be read" {
        retained_unread;
    }
    "mqtt_sessions_expired_total": "Sessions ended by expiry" {
        sessions_expired;
    }
    "mqtt_wills_published_total": "Wills published" {
        wills_published;
    }
    "mqtt_non_broker_blocked_total": "Deliveries between devices withheld in non-broker mode" {
        non_broker_blocked;
    }
    "gateway_latest_updates_total": "Latest values recorded" {
        latest_updates;
    }
    /// Ordinary: a topic that changes between two flushes is written once.
    "gateway_latest_coalesced_total": "Latest values replaced by newer ones before they were written" {
        latest_coalesced;
    }
    "gateway_latest_written_total": "Latest values written to the store" {
        latest_written;
    }
    /// Values that nobody will read.
    "gateway_latest_dropped_total": "Latest values not kept" {
        /// `latest.topics_per_device`
        latest_dropped_topics(reason = "device_topics");
        /// `latest.max_bytes`
        latest_dropped_bytes(reason = "bytes");
        /// much of `latest.max_bytes` is taken, and more of it is the device's own than its share
        latest_dropped_share(reason = "share");
        /// a database takes no value above 4 MiB
        latest_dropped_too_large(reason = "too_large");
        /// a client id or topic over 65,535 bytes
        latest_dropped_name(reason = "name");
        /// the database never takes it
        latest_dropped_rejected(reason = "rejected");
        /// the database has [a value from the future](storage.md#when-a-clock-is-wrong)
        latest_dropped_clock(reason = "clock");
        /// not written at the end
        latest_dropped_shutdown(reason = "shutdown");
    }
    /// Nothing is lost by it.
    "gateway_latest_retried_total": "Latest values that wait again as their write failed" {
        latest_retried;
    }
    "gateway_latest_spilled_total": "Latest values kept in the data directory as the database was away" {
        latest_spilled;
    }
    "gateway_latest_replayed_total": "Latest values written to the database from the data directory" {
        latest_replayed;
    }
    /// Tells of a store that hangs.
    "gateway_latest_store_timeouts_total": "Calls that the latest-value store did not answer in time" {
        /// not done after 30 s, tried again
        latest_store_timeouts(op = "write");
        /// not done after 10 s, failed
        latest_read_timeouts(op = "read");
    }
    /// The device's next value mends each.
    "gateway_latest_damaged_total": "Damaged records of latest values met and skipped" {
        latest_damaged;
    }
    "gateway_latest_store_errors_total": "Failed writes to the latest-value store (they are retried)" {
        latest_store_errors;
    }
    "gateway_history_recorded_total": "Messages taken into the history" {
        history_recorded;
    }
    "gateway_history_written_total": "Messages of the history written to the database" {
        history_written;
    }
    /// See [storage](storage.md).
    "gateway_history_dropped_total": "Messages that the history does not have" {
        /// 200,000 wait, which keeps out the newest
        history_dropped_messages(reason = "messages");
        /// A sixteenth of `limits.memory_budget`, at most 64 MiB, waits, which keeps out the newest
        history_dropped_bytes(reason = "bytes");
        /// much waits, and the message is QoS 0 or more of it is the device's own than its share
        history_dropped_share(reason = "share");
        /// above 4 MiB, or client id and topic of more than 60,000 bytes together
        history_dropped_too_large(reason = "too_large");
        /// the database never takes it
        history_dropped_rejected(reason = "rejected");
        /// not written at the end
        history_dropped_shutdown(reason = "shutdown");
    }
    "gateway_history_errors_total": "Failed calls to the database for the history (writes are retried)" {
        history_write_errors(op = "write");
        history_read_errors(op = "read");
    }
    /// By what the database answered.
    "gateway_database_errors_total": "Failed requests to the database" {
        /// nodes are absent, or too few
        database_errors_unavailable(kind = "unavailable");
        /// too slow; fewer requests are then under way
        database_errors_overloaded(kind = "overloaded");
        /// tables not as expected; they are looked at again
        database_errors_schema(kind = "schema");
        /// a value it does not take
        database_errors_rejected(kind = "rejected");
        /// login, permission, or a guardrail that no value would pass, as when [its disks are nearly
        /// full](storage.md#when-its-disk-is-full)
        database_errors_denied(kind = "denied");
        /// a value there has a time from the future
        database_errors_clock(kind = "clock");
    }
    "gateway_store_commits_total": "Commits of sessions, queues and retained messages" {
        store_commits;
    }
    /// The disk did not take what durable sessions wait for; the store keeps trying.
    "gateway_store_commit_errors_total": "Failed commits of sessions, queues and retained messages" {
        store_commit_errors;
    }
    /// Divided by `gateway_store_commits_total` it is what a commit takes.
    "gateway_store_commit_microseconds_total": "Time in commits of sessions, queues and retained messages" {
        store_commit_micros;
    }
    /// They are removed; the log names the session.
    "gateway_store_damaged_records_total": "Damaged records of sessions, queues and retained messages met and skipped" {
        store_damaged_records;
    }
    /// Who waited for such a change was refused.
    "gateway_store_refused_total": "Changes that a store did not take, as too many wait" {
        /// changes of sessions
        store_refused_sessions(store = "sessions");
        /// retained messages
        store_refused_retained(store = "retained");
        /// changes of consumer groups
        store_refused_groups(store = "groups");
        /// idempotency keys, scheduled messages, commands
        store_refused_publisher(store = "publisher");
        /// changes of device shadows
        store_refused_shadows(store = "shadows");
    }
    "gateway_store_entries_written_total": "Entries of durable queues written" {
        store_entries_written;
    }
    "gateway_store_entries_settled_total": "Entries of durable queues acknowledged before they were written, and never written" {
        store_entries_settled;
    }
    "gateway_store_entries_removed_total": "Entries of durable queues removed" {
        store_entries_removed;
    }
    "gateway_store_entries_refused_total": "Entries of durable queues refused because a commit failed" {
        store_entries_refused;
    }
    "gateway_store_entries_expired_total": "Entries of durable queues removed because their message expired" {
        store_entries_expired;
    }
    "gateway_log_appended_total": "Messages written to the log of consumer groups" {
        log_appended;
    }
    "gateway_log_commits_total": "Writes to the log of consumer groups, each with its sync" {
        log_commits;
    }
    /// Divided by `gateway_log_commits_total` it is what a write takes.
    "gateway_log_commit_microseconds_total": "Time in writes to the log of consumer groups" {
        log_commit_micros;
    }
    "gateway_log_errors_total": "Failures of the disk under the log of consumer groups" {
        /// a write
        log_errors_write(op = "write");
        /// a sync; what was not synced is written again, into another segment
        log_errors_sync(op = "sync");
        /// a read
        log_errors_read(op = "read");
    }
    "gateway_log_refused_total": "What the log of consumer groups did not take" {
        /// too much waits for the disk
        log_refused_waiting(reason = "waiting");
        /// much waits for the disk, and more of it is the sender's own than its share
        log_refused_share(reason = "share");
        /// QoS 0 while much waits for the disk: it goes first
        log_refused_qos0(reason = "qos0");
        /// it took nothing
        log_refused_disk(reason = "disk");
        /// more than 4,096 reads wait
        log_refused_reads(reason = "reads");
    }
    /// Groups are told of it as lost and read on.
    "gateway_log_damaged_total": "Damaged records, stretches and segments of the log of consumer groups met" {
        log_damaged;
    }
    "gateway_log_cut_bytes_total": "Bytes at the end of the log that were not written whole and were cut at a start" {
        log_cut_bytes;
    }
    "gateway_log_segments_removed_total": "Segments of the log removed because no group needs them" {
        log_segments_removed;
    }
    /// See [device shadows](api/shadows.md).
    "gateway_shadow_requests_total": "Requests for device shadows" {
        shadow_updates_device(op = "update", by = "device");
        shadow_gets_device(op = "get", by = "device");
        shadow_deletes_device(op = "delete", by = "device");
        shadow_updates_backend(op = "update", by = "backend");
        shadow_deletes_backend(op = "delete", by = "backend");
    }
    "gateway_shadow_rejected_total": "Requests of devices that were answered with a rejection" {
        shadow_rejected;
    }
    /// Requests of devices that were refused before they were carried out.
    "gateway_shadow_refused_total": "Requests for device shadows that were not carried out" {
        /// `shadow.max_requests`, answered with 429
        shadow_refused_requests(reason = "too_many");
        /// the account, an eighth of the budget
        shadow_refused_memory(reason = "memory");
        /// 10 s behind others, in front of a store that does not answer (503)
        shadow_refused_waited(reason = "waited");
        /// `shadow.max_total_bytes`, answered with 507
        shadow_refused_full(reason = "full");
        /// little of `shadow.max_total_bytes` is free, and the device holds more than its share (507)
        shadow_refused_share(reason = "share");
        /// below the device's shadow topics, and none of them
        shadow_requests_unknown(reason = "topic");
    }
    "gateway_shadow_deltas_total": "Updates of shadows after which something is desired that is not reported" {
        shadow_deltas;
    }
    /// Another gateway shares the database.
    "gateway_shadow_retried_total": "Changes of shadows made anew as somebody else had changed the shadow" {
        shadow_retried;
    }
    "gateway_shadow_store_errors_total": "Calls that the store of shadows did not answer, or not in time" {
        shadow_store_errors;
    }
    "gateway_shadow_watch_missed_total": "Changes that a watcher of shadows did not get, for want of memory" {
        shadow_watch_missed;
    }
    "gateway_grpc_connections_refused_total": "gRPC connections refused or closed for others" {
        /// `grpc.max_connections`
        grpc_refused_limit(reason = "limit");
        /// `grpc.max_connections_per_address`
        grpc_refused_address_limit(reason = "address_limit");
        /// too many wait for a handshake
        grpc_refused_waiting(reason = "waiting");
        /// closed for a newcomer
        grpc_refused_silent(reason = "silent");
        /// no handshake in time
        grpc_refused_timeout(reason = "handshake_timeout");
        /// `limits.memory_budget` is used up, or others needed what an unauthenticated connection held
        grpc_refused_memory(reason = "memory");
        /// too many calls at once before any credentials, or too many refused calls whose answers are not read
        grpc_refused_calls(reason = "calls");
    }
    "gateway_grpc_connections_evicted_total": "gRPC connections ended because of a change of who may be connected" {
        grpc_evicted_revoked(reason = "revoked");
    }
    "gateway_grpc_calls_refused_total": "gRPC calls beyond the limit of their connection, of their caller or of all" {
        /// `grpc.max_calls_per_connection`
        grpc_calls_refused(reason = "connection");
        /// `grpc.max_calls_per_caller`, or the share of a caller while places are short
        grpc_calls_refused_caller(reason = "caller");
        /// `grpc.max_calls`
        grpc_calls_refused_all(reason = "all");
    }
    "gateway_grpc_streams_refused_total": "Streams of backends beyond the limit of their caller or of all" {
        /// `grpc.max_streams_per_caller`, or the share of a caller while places are short
        grpc_streams_refused_caller(reason = "caller");
        /// `grpc.max_streams`
        grpc_streams_refused_all(reason = "all");
    }
    "gateway_http_connections_refused_total": "HTTP connections refused or closed for others" {
        /// too many wait
        http_refused_waiting(reason = "waiting");
        /// closed for a newcomer
        http_refused_silent(reason = "silent");
        /// all places of its kind are taken, answered 503
        http_refused_busy(reason = "busy");
        /// the caller has its share of places, answered 429
        http_refused_caller(reason = "caller");
    }
    "gateway_http_api_failures_total": "Requests to the HTTP API that failed" {
        /// answered 400 to 499
        http_api_refused(whose = "client");
        /// answered 500 or more
        http_api_failed(whose = "gateway");
    }
    "gateway_http_bodies_refused_total": "Bodies of HTTP requests that were not read to their end" {
        /// `http.max_body`
        http_bodies_large(reason = "large");
        /// `http.body_timeout`
        http_bodies_late(reason = "late");
    }
    /// `http.cors_origins` names those that may.
    "gateway_http_cross_origin_refused_total": "Requests of pages of other origins to the HTTP API" {
        http_cross_origin;
    }
    "gateway_page_logins_total": "Logins to the web page" {
        page_logins(result = "done");
        /// a token that is none, or has expired
        page_logins_failed(result = "refused");
        /// an address that has tried too many within a minute
        page_logins_limited(result = "too_many");
    }
    /// Stands still while nobody has the overview open.
    "gateway_page_samples_total": "Times that the metrics were read for the charts of the web page" {
        page_samples;
    }
    /// As many as were opened, while nobody looks.
    "gateway_page_live_total": "Live parts of the web page" {
        page_live_opened(state = "opened");
        /// the browser is gone, its tab is hidden, or there is no more
        page_live_ended(state = "ended");
    }
    /// There are 256 logins at most; one more ends the one that was used least recently.
    "gateway_page_logins_evicted_total": "Logins to the web page that ended for others" {
        page_logins_evicted;
    }
    /// Of another site, or of an earlier login.
    "gateway_page_forms_refused_total": "Forms for the web page that it had not made" {
        /// the browser names another origin
        page_refused_origin(reason = "origin");
        /// the form does not bring the login's own token
        page_refused_csrf(reason = "token");
    }
    "gateway_http_connections_failed_total": "HTTP connections that ended with an error, timeouts included" {
        http_failed;
    }
    "gateway_grpc_requests_late_total": "gRPC requests that had begun and did not go on" {
        grpc_requests_late;
    }
    "gateway_grpc_calls_total": "gRPC calls and streams begun" {
        grpc_calls;
    }
    /// The [audit log](security/backends.md#the-audit-log) has a line for each.
    "gateway_backend_denied_total": "Calls of gRPC and HTTP, or parts of them, that were denied" {
        /// none were sent
        backend_denied_nobody(reason = "no_credentials");
        /// nobody has these
        backend_denied_wrong(reason = "wrong_credentials");
        /// they have ended
        backend_denied_expired(reason = "expired");
        /// the method is for another role
        backend_denied_role(reason = "role");
        /// the topic or device is not the caller's
        backend_denied_scope(reason = "scope");
    }
    "gateway_backend_streams_ended_total": "Streams whose caller lost its rights" {
        /// `backends` has changed
        backend_streams_revoked(reason = "revoked");
        /// the token or certificate has ended
        backend_streams_expired(reason = "expired");
    }
    "gateway_audit_suppressed_total": "Lines left out of the audit log: one address was denied too often" {
        audit_suppressed;
    }
    "gateway_grpc_published_total": "Messages published by backends" {
        grpc_published;
    }
    /// Of `PublishToDevices`.
    "gateway_grpc_fanout_devices_total": "Devices that one message to many was given to" {
        grpc_fanout_devices;
    }
    /// Messages with `deliver_at`.
    "gateway_grpc_scheduled_total": "Messages with a time to be published at, by what became of them" {
        /// kept
        grpc_scheduled_accepted(result = "accepted");
        /// `grpc.scheduled_messages` or `grpc.scheduled_bytes`
        grpc_scheduled_refused(result = "refused");
        /// by a backend
        grpc_scheduled_cancelled(result = "cancelled");
        /// in time
        grpc_scheduled_published(result = "published");
        /// more than 5 s late
        grpc_scheduled_late(result = "late");
        /// no device took them, or the limits of the gateway no longer allow them
        grpc_scheduled_failed(result = "failed");
    }
    "gateway_grpc_keys_total": "Publishes whose idempotency key was known" {
        /// while the first publish waited
        grpc_keys_joined(result = "joined");
        /// afterwards
        grpc_keys_answered(result = "answered");
        /// with another message, refused
        grpc_keys_reused(result = "other_content");
    }
    "gateway_grpc_keys_dropped_total": "Idempotency keys forgotten before their time" {
        /// `grpc.idempotency_keys`
        grpc_keys_dropped_count(reason = "count");
        /// the budget
        grpc_keys_dropped_memory(reason = "memory");
    }
    "gateway_grpc_delivered_total": "Messages sent to backend streams" {
        grpc_delivered;
    }
    /// A stream that loses something is told how much.
    "gateway_grpc_stream_dropped_total": "Messages dropped for backend streams" {
        /// a backend that reads too slowly
        grpc_stream_dropped_full(reason = "buffer_full");
        /// the process-wide budget
        grpc_stream_dropped_memory(reason = "memory");
        /// a message above the stream's buffer
        grpc_stream_dropped_too_large(reason = "too_large");
        /// what came while a stream was ending
        grpc_stream_dropped_closed(reason = "closed");
    }
    "gateway_grpc_errors_total": "gRPC calls answered with an error" {
        grpc_requests_failed;
    }
    /// The trace shows how many, in their place.
    "gateway_grpc_trace_missed_total": "Packets of traced devices that did not fit into the buffer of who traces" {
        trace_missed;
    }
    "gateway_events_untold_total": "Dropped messages that no event tells of, as too many sessions dropped some in one second" {
        events_untold;
    }
    /// `[auth.http]` and `[auth.grpc]`.
    "gateway_auth_hook_total": "Questions to a remote source about logins and topics, by what became of them" {
        /// answered
        hook_answers(result = "answers");
        /// denied: the source answers this login or topic with a status
        hook_status(result = "status");
        /// known from an answer before
        hook_cached(result = "cached");
        /// known from an answer that is no longer fresh, as the source is away
        hook_stale(result = "stale");
        /// not answered, or not understood
        hook_failures(result = "failures");
        /// too many questions wait, or for too long
        hook_busy(result = "busy");
        /// not asked: the source failed too often, and one question in ten goes on
        hook_open(result = "open");
    }
    /// `[auth.http]`, `[auth.grpc]`, `[auth.jwt]` and bridges that post.
    "gateway_remote_too_much_total": "Connections to services that were ended, as more came than was asked for" {
        remote_too_much;
    }
    /// `[auth.grpc]`.
    "gateway_hook_events_total": "Events for a remote service, by what became of them" {
        /// taken
        hook_events_told(result = "told");
        /// left out, the queue is full
        hook_events_full(result = "queue_full");
        /// left out, the service does not take them
        hook_events_refused(result = "refused");
        /// left out, they came too fast
        hook_events_lagged(result = "lagged");
        /// left at the end
        hook_events_shutdown(result = "shutdown");
    }
    "gateway_hook_event_failures_total": "Batches of events that a remote service did not take" {
        hook_events_failures;
    }
    /// `auth.jwt` and `backends.jwt`.
    "gateway_jwks_fetches_total": "Key sets of tokens fetched, by what became of it" {
        jwks_fetched(result = "fetched");
        jwks_failed(result = "failed");
    }
    /// Of one kind and from one address they are told in the log, `CONNECT refused`.
    "mqtt_auth_failures_total": "CONNECT packets refused by authentication" {
        /// unknown user or wrong password, token or certificate
        auth_failed(reason = "credentials");
        /// known, and may not connect
        auth_not_authorized(reason = "not_authorized");
        /// may not use this client id
        auth_client_id(reason = "client_id");
        /// too many logins wait, or memory is short
        auth_busy(reason = "busy");
        /// who knows could not be asked
        auth_unavailable(reason = "unavailable");
    }
    /// Hashes of passwords and signatures of tokens, which are made on threads of their own.
    "mqtt_login_checks_total": "Hashes and signatures that logins asked for" {
        /// made, whether the credentials were right or wrong
        checks_done(result = "done");
        /// not needed: the same password was proved lately
        checks_remembered(result = "remembered");
        /// refused (0x89), since more would wait than are done in time
        checks_displaced(result = "displaced");
        /// the client left before its turn
        checks_abandoned(result = "abandoned");
    }
    "mqtt_reauthentications_total": "Authentications of live connections that have ended" {
        /// goes on
        reauthentication_ok(result = "ok");
        /// ended by the gateway
        reauthentication_refused(result = "refused");
        /// the client did not go on
        reauthentication_timeout(result = "timeout");
    }
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
