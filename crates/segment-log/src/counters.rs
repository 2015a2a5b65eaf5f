//! Counters of the log of consumer groups.

gateway_core::counters! {
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
    /// In a [cluster](guides/two-gateways.md), where a record has about 1 MiB: what is left goes into the next one.
    "gateway_log_full_records_total": "Writes to the log that took no more since the record for the ledger had enough" {
        log_full_records;
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
}
