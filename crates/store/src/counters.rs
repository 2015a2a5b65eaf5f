//! Counters that several stores, or a store and those above it, have in common.

gateway_core::counters! {
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
}
