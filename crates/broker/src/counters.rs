//! Counters of routing, sessions, quotas and consumer groups, and of all that the memory account refuses.

gateway_core::counters! {
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
    "mqtt_takeovers_total": "Connections ended by another with the same client id" {
        takeovers;
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
    "mqtt_messages_unmatched_total": "Messages without a subscriber" {
        no_match;
    }
    /// For a limit, for want of memory or because the disk did not take them; what the rules deny is counted in
    /// `mqtt_subscriptions_denied_total`.
    "mqtt_subscriptions_refused_total": "Filters refused" {
        subscribe_refused;
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
    "gateway_events_untold_total": "Dropped messages that no event tells of, as too many sessions dropped some in one second" {
        events_untold;
    }
}
