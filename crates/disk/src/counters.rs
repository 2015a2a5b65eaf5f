//! Counters of the data directory.

gateway_core::counters! {
    /// The device's next value mends each.
    "gateway_latest_damaged_total": "Damaged records of latest values met and skipped" {
        latest_damaged;
    }
    /// In the ledger of a [cluster](guides/two-gateways.md) in PostgreSQL, once per key and `latest.ledger_interval`.
    "gateway_ledger_latest_shipped_total": "Latest values, and removals of them, that the ledger has taken" {
        ledger_latest_shipped;
    }
    /// With repeats of values that did not change, which keep the ledger small.
    "gateway_ledger_latest_bytes_total": "Bytes of these" {
        ledger_latest_bytes;
    }
    /// Until then a gateway that takes over has an older value.
    "gateway_ledger_latest_put_off_total": "Latest values that went to the ledger later than `latest.ledger_interval`" {
        /// `latest.ledger_bytes` is used up
        ledger_latest_put_off_bytes(reason = "bytes");
        /// the database was slow
        ledger_latest_put_off_ledger(reason = "ledger");
    }
    /// Of a removal a gateway that takes over has the value again; of a value it has the one before.
    "gateway_ledger_latest_dropped_total": "Changes of latest values that never go to the ledger" {
        /// a removal while 100,000 others wait
        ledger_latest_dropped_removals(reason = "removals");
        /// larger than a record
        ledger_latest_dropped_size(reason = "size");
    }
    "gateway_store_commits_total": "Commits to the environments of the data directory" {
        store_commits;
    }
    /// The disk did not take what durable sessions wait for; the store keeps trying.
    "gateway_store_commit_errors_total": "Failed commits to these" {
        store_commit_errors;
    }
    /// Divided by `gateway_store_commits_total` it is what a commit takes.
    "gateway_store_commit_microseconds_total": "Time in commits to these" {
        store_commit_micros;
    }
    /// Damaged records are removed; the log names the session.
    "gateway_store_damaged_records_total": "Damaged records of sessions, queues and retained messages met and skipped" {
        store_damaged_records;
    }
    /// A caller that waited for such a change was refused.
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
    /// In a [cluster](guides/two-gateways.md), where a record has about 1 MiB: what is left goes into the next one.
    "gateway_store_full_records_total": "Transactions that took no more since the record for the ledger had enough" {
        /// sessions, queues and retained messages
        store_full_state(store = "state");
        /// consumer groups, commands, shadows and the memory of the Publisher
        store_full_records(store = "records");
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
}
