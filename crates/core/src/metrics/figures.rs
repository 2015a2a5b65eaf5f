//! Figures that are read when somebody asks for them, beside the counters: amounts at this moment. `/metrics` can show
//! only the families declared here and the [counters](crate::counters!) of the crates. The comment of a family is what
//! operators read in docs/metrics.md about it.

use super::row::{Family, Figure, MetricKind};

macro_rules! figures {
    ($(
        $(#[doc = $about:literal])*
        $kind:ident $figure:ident: $name:literal [$($label:literal),*] $help:literal;
    )*) => {
        $(
            #[doc = $help]
            #[doc = ""]
            $(#[doc = $about])*
            pub static $figure: Figure<{ <[&str]>::len(&[$($label),*]) }> = Figure {
                family: Family {
                    name: $name,
                    help: $help,
                    kind: MetricKind::$kind,
                    labels: &[$($label),*],
                    about: concat!($($about, "\n"),*),
                    rows: &[],
                },
            };
        )*

        /// Every family of this file.
        pub static FAMILIES: &[&Family] = &[$(&$figure.family),*];
    };
}

figures! {
    /// Against `limits.max_connections`.
    Gauge CONNECTIONS: "mqtt_connections" [] "Sessions with a connection";
    Gauge SESSIONS: "mqtt_sessions" [] "Sessions";
    Gauge SUBSCRIPTIONS: "mqtt_subscriptions" [] "Subscriptions";
    Gauge SHARED_GROUPS: "mqtt_shared_groups" [] "Shared groups";
    Gauge RETAINED_MESSAGES: "mqtt_retained_messages" [] "Retained messages";
    Gauge RETAINED_BYTES: "mqtt_retained_bytes" [] "Bytes of retained messages";
    Gauge QUEUED_BYTES: "mqtt_queued_bytes" [] "Bytes of messages that wait in memory, for sessions and gRPC streams";
    /// Added up over every session when the page is asked for.
    Gauge QUEUED_MESSAGES: "mqtt_queued_messages" [] "Messages waiting in session queues";
    /// Added up over every session when the page is asked for.
    Gauge INFLIGHT_MESSAGES: "mqtt_inflight_messages" [] "QoS 1 and 2 messages sent and not yet acknowledged";
    Gauge GRPC_STREAMS: "gateway_grpc_streams" [] "Open gRPC streams";
    /// [Memory](operations/memory.md#memory) says what happens when it is used up.
    Gauge MEMORY_BUDGET: "gateway_memory_budget_bytes" [] "What limits.memory_budget allows";
    /// All that peers make the gateway hold. `queued` are messages that wait or are not acknowledged, `partial_packets` packets
    /// that have not come completely, `replies` what sockets do not take, `unauthenticated` what came before authentication, with
    /// what deciding about it takes (a sixteenth of the budget; beyond that the oldest such connection of the address that holds
    /// most is closed), then `wills`, `filters`, `sessions`,
    /// `topic_aliases`, `retained` (messages in memory, and the topics of those on disk), `http` (requests and answers of the HTTP API and of the web page, with its logins, charts and live parts; an eighth), `grpc_messages` (requests and
    /// answers of gRPC calls, 16 KiB for each call, and what HTTP/2 may buffer of each connection), `grpc_unauthenticated` (gRPC
    /// connections that have not shown credentials, with their calls; an eighth, of which a small reserve is always set aside), `grpc_streams` (with 2.5
    /// MiB for each member of a consumer group that has a stream or a call), `log` (set aside for the log of consumer groups
    /// as long as there is a group), `shadows` (requests for device shadows that wait, and changes that wait for watchers; an
    /// eighth), `publisher` (idempotency keys, messages with `deliver_at`; an eighth) and `commands` (commands and answers that
    /// wait; an eighth), `quic` (what QUIC may hold of each connection; a half), `logins` (what is remembered of logins; a sixteenth), `ledger` (records on their way to the ledger of a cluster, and answers that
    /// wait for its lease; counted, never refused). The last quarter of the budget is for those who hold little.
    Gauge MEMORY: "gateway_memory_bytes" ["kind"] "Bytes charged to limits.memory_budget, by what they are held for";
    /// Of each tenant that is configured by name; the quotas are those of `mqtt_quota_refused_total`.
    Gauge TENANT_USAGE: "gateway_tenant_usage" ["tenant", "quota"] "What a configured tenant has of its quotas";
    /// `file`, `rpc` or `flapping`.
    Gauge BANS: "gateway_bans" ["source"] "Bans, by where they come from";
    /// A use is MQTT, gRPC and so on. Warnings in the log come at 30 days, 7 and one: [certificates](operations/certificates.md).
    Gauge CERTIFICATE_DAYS: "gateway_certificate_days_left" ["use", "file"] "Days until a certificate of a TLS use ends, below zero after that";
    Gauge LATEST_PENDING: "gateway_latest_pending" [] "Latest values not yet written";
    Gauge LATEST_PENDING_BYTES: "gateway_latest_pending_bytes" [] "Bytes of latest values not yet written";
    Gauge LATEST_HEALTHY: "gateway_latest_healthy" [] "1 while the latest-value store takes writes";
    Gauge LATEST_SPILLED: "gateway_latest_spilled" [] "Latest values in the data directory that wait for the database";
    Gauge LATEST_OLDEST: "gateway_latest_oldest_pending_seconds" [] "Age of the oldest latest value not yet written";
    Histogram LATEST_WRITE: "gateway_latest_write_seconds" [] "Time that the latest-value store took to write a batch";
    /// Only with `database.history`, as the other two of the history.
    Gauge HISTORY_PENDING: "gateway_history_pending" [] "Messages of the history not yet written";
    Gauge HISTORY_PENDING_BYTES: "gateway_history_pending_bytes" [] "Bytes of messages of the history not yet written";
    Gauge HISTORY_HEALTHY: "gateway_history_healthy" [] "1 while the database takes writes of the history";
    /// 0 while its commits fail or only removals have room. The stores are those of the [data
    /// directory](operations/data-directory.md).
    Gauge STORE_HEALTHY: "gateway_store_healthy" ["store"] "1 while the store takes writes";
    /// See [damage](operations/disk-trouble.md#damage). It stays until the next start.
    Gauge STORE_SET_ASIDE: "gateway_store_set_aside" [] "Damaged files that were set aside at the start";
    Gauge STORE_WAITING_BYTES: "gateway_store_waiting_bytes" [] "Bytes of messages not yet on disk";
    Gauge STORE_QUEUED: "gateway_store_queued" [] "Messages queued on disk";
    Gauge STORE_SESSIONS: "gateway_store_sessions" [] "Sessions on disk";
    /// Of a gateway that is in a [cluster](guides/two-gateways.md).
    Gauge CLUSTER_ACTIVE: "gateway_cluster_active" [] "1 while this gateway serves, 0 while it stands by";
    /// Of a gateway that stands by; it takes over faster with a warm copy.
    Gauge CLUSTER_WARM: "gateway_cluster_warm" [] "1 while the copy of the home is near the end of the ledger";
    /// One more with each gateway that has had the home, the same one again included.
    Gauge CLUSTER_EPOCH: "gateway_cluster_epoch" [] "Epoch in which this gateway serves";
    /// Of each gateway that has ever been in the cluster, as the one that serves sees it: `serves`, `warm` (stands by with a copy near
    /// the end of the ledger), `copying` (stands by, and its copy is being made), `silent` (no sign of life for five seconds).
    Gauge CLUSTER_NODES: "gateway_cluster_nodes" ["node", "part"] "1, with the part that a gateway has in the cluster";
    Gauge LEDGER_UNDER_WAY: "gateway_ledger_appends" [] "Records on their way to the ledger";
    /// Grows while the database does not answer: acknowledgements of QoS 1 and 2 wait as long.
    Gauge LEDGER_OLDEST: "gateway_ledger_oldest_append_seconds" [] "Age of the oldest record on its way to the ledger";
    Counter LEDGER_RECORDS: "gateway_ledger_records_total" [] "Records that the ledger has taken";
    Counter LEDGER_APPENDED: "gateway_ledger_appended_bytes_total" [] "Bytes of these";
    /// Calls without an answer after 200 ms; a few are ordinary.
    Counter LEDGER_REPEATS: "gateway_ledger_repeats_total" [] "Calls of the ledger that were made again";
    /// Changes of transactions, with the copies of them that the way takes. Part of the kind `ledger` of `gateway_memory_bytes`.
    Gauge LEDGER_REDO: "gateway_ledger_redo_bytes" [] "Bytes in memory of records on their way to the ledger";
    /// PUBACK, PUBREC, CONNACK and answers of backends, while the gateway does not know that it serves still. Part of the kind
    /// `ledger` of `gateway_memory_bytes`.
    Gauge LEDGER_ANSWERS: "gateway_ledger_waiting_answers" [] "Answers that wait for the lease";
    /// About three times as much as is stored at most; more right after a takeover, until keys have been repeated once.
    Gauge LEDGER_BYTES: "gateway_ledger_bytes" ["store"] "Bytes of the home in the ledger, by store, about";
    /// If the ledger keeps latest values, as one in PostgreSQL does.
    Gauge LEDGER_LATEST_WAITING: "gateway_ledger_latest_waiting" [] "Latest values that have changed since the ledger had them";
    /// A gateway that takes over has all values that are older. About `latest.ledger_interval` is ordinary; more while the database is slow,
    /// or `latest.ledger_bytes` does not suffice.
    Gauge LEDGER_LATEST_LAG: "gateway_ledger_latest_lag_seconds" [] "Age of the oldest change of a latest value that may not be in the ledger";
    /// Against `shadow.max_total_bytes`; not where they are in a database.
    Gauge SHADOW_STORED_BYTES: "gateway_shadow_stored_bytes" [] "Bytes of device shadows in the data directory";
    /// Against `groups.max_bytes`.
    Gauge LOG_BYTES: "gateway_log_bytes" [] "Bytes of the log of consumer groups on the disk";
    Gauge LOG_WAITING_BYTES: "gateway_log_waiting_bytes" [] "Bytes for that log not yet on disk";
    Gauge LOG_CACHED_BYTES: "gateway_log_cached_bytes" [] "Bytes of its last messages in memory";
    /// With members or not. Steady, it is work under way; growing, members are too slow, too few or away. An estimate after
    /// `SeekGroup`, until the group has read that far. Of all that is shown by group there are as many rows as groups.
    Gauge GROUP_LAG: "gateway_group_lag_messages" ["group"] "Messages that a consumer group has not acknowledged";
    /// How much of the disk the group keeps; it runs into its `retention_bytes`.
    Gauge GROUP_LAG_BYTES: "gateway_group_lag_bytes" ["group"] "Bytes of these";
    /// At `max_outstanding_messages` of each member the group takes nothing more before it acknowledges: then lag grows while
    /// members look idle.
    Gauge GROUP_OUTSTANDING: "gateway_group_outstanding" ["group"] "Messages delivered and not acknowledged";
    /// Members with a stream or within their lease; 0 is nobody.
    Gauge GROUP_MEMBERS: "gateway_group_members" ["group"] "Members, with those in their lease";
    /// They wait for somebody to look at them: [dead letters](operations/groups.md#dead-letters).
    Gauge GROUP_DEAD_LETTERS: "gateway_group_dead_letters" ["group"] "Messages that were given up and are kept";
    /// By retention or damage. Anything but 0 is a loss that the group's settings allowed.
    Gauge GROUP_LOST: "gateway_group_lost" ["group"] "Messages removed unacknowledged since the group was made";
    /// Grows when members give messages back, let `ack_deadline` pass or are lost; not with a reconnect within the lease.
    Gauge GROUP_REDELIVERED: "gateway_group_redelivered" ["group"] "Deliveries with an attempt above 1, since the start";
    /// For about how long it has waited: the best alarm, as it is the same at any rate. At the group's `retention_age`
    /// (`groups.retention`, 7 days) messages go.
    Gauge GROUP_OLDEST: "gateway_group_oldest_seconds" ["group"] "About the age of the oldest message not acknowledged";
    /// Each [bridge](bridges.md) by its name, what is on its other side, and which way it leads. 0 from the third failure in a row on.
    Gauge BRIDGE_UP: "gateway_bridge_up" ["bridge", "kind", "direction"] "1 while the other side of a bridge answers";
    Gauge BRIDGE_IN_FLIGHT: "gateway_bridge_in_flight" ["bridge", "kind", "direction"]
        "Messages in hand that are sent and not acknowledged";
    /// The lag of its group. It grows while the other side is away, and costs nothing but disk.
    Gauge BRIDGE_LAG: "gateway_bridge_lag_messages" ["bridge", "kind", "direction"]
        "Messages on the disk that a bridge has not delivered";
    /// They run into the `max_bytes` of the bridge.
    Gauge BRIDGE_LAG_BYTES: "gateway_bridge_lag_bytes" ["bridge", "kind", "direction"]
        "Bytes on the disk that a bridge has not delivered";
    /// Acknowledged by who got them.
    Counter BRIDGE_MESSAGES: "gateway_bridge_messages_total" ["bridge", "kind", "direction"]
        "Messages that a bridge has carried";
    Counter BRIDGE_BYTES: "gateway_bridge_bytes_total" ["bridge", "kind", "direction"]
        "Bytes of payloads that a bridge has carried";
    /// Out, they are dead letters of the group. `other_side`: it says so. `size`: the message is too long for it. `topic`: it has no such
    /// topic. `policy`, `record`, `timestamp`: Kafka refuses a record by a policy, by its form or by its time. `closed`: the other side
    /// ends each connection on which the message is sent. `deadline`, `failed`: it answers all but this message, again and again. In,
    /// they are left out. `topic`: it is none that the gateway takes. `field`: the record lacks what its topic is made of. `header`: a
    /// name in it is no text. `size`: it is longer than the gateway takes.
    Counter BRIDGE_REFUSED: "gateway_bridge_refused_total" ["bridge", "kind", "direction", "reason"]
        "Messages of a bridge that will never be taken";
    Counter BRIDGE_EXPIRED: "gateway_bridge_expired_total" ["bridge", "kind", "direction"]
        "Messages of a bridge that expired before their turn";
    /// They went out of this gateway and came back.
    Counter BRIDGE_LOOPED: "gateway_bridge_looped_total" ["bridge", "kind", "direction"]
        "Messages that a bridge has not passed on, as they were here before";
    /// `connect`: no connection can be made. `denied`: the bridge is not let in. `closed`: the connection ended. `deadline`: no
    /// answer in time. `busy`: the other side asks for time. `failed`: it fails, or cannot be understood. `store`: the gateway's
    /// own log or disk.
    Counter BRIDGE_FAILURES: "gateway_bridge_failures_total" ["bridge", "kind", "direction", "reason"]
        "Attempts of a bridge that failed";
    /// Against `commands.max_active`.
    Gauge COMMANDS_ACTIVE: "gateway_commands_active" [] "Stored commands that have not ended";
    Gauge PROCESS_RESIDENT: "process_resident_memory_bytes" [] "Resident memory";
    Gauge PROCESS_RESIDENT_PEAK: "process_resident_memory_peak_bytes" [] "Highest resident memory";
    Gauge PROCESS_VIRTUAL: "process_virtual_memory_bytes" [] "Virtual memory";
    Counter PROCESS_CPU: "process_cpu_seconds_total" [] "User and system CPU time";
    /// One for each connection: [file descriptors](operations/memory.md#file-descriptors).
    Gauge PROCESS_FDS: "process_open_fds" [] "Open file descriptors";
    Gauge PROCESS_FDS_LIMIT: "process_max_fds" [] "Most file descriptors allowed";
    Gauge PROCESS_THREADS: "process_threads" [] "Threads";
    Gauge PROCESS_START: "process_start_time_seconds" [] "Start, seconds since 1970";
    Gauge BUILD_INFO: "mqtt_server_build_info" ["version"] "Version of the server";
}
