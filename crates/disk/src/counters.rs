//! Counters of the data directory.

gateway_core::counters! {
    /// The device's next value mends each.
    "gateway_latest_damaged_total": "Damaged records of latest values met and skipped" {
        latest_damaged;
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
