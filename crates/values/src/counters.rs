//! Counters of latest values and the history.

gateway_core::counters! {
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
    "gateway_latest_store_errors_total": "Failed writes to the latest-value store (they are retried)" {
        latest_store_errors;
    }
    "gateway_history_recorded_total": "Messages taken into the history" {
        history_recorded;
    }
    "gateway_history_written_total": "Messages of the history written to the database" {
        history_written;
    }
    "gateway_history_errors_total": "Failed calls to the database for the history (writes are retried)" {
        history_write_errors(op = "write");
        history_read_errors(op = "read");
    }
}
