//! Counters of the database.

gateway_core::counters! {
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
}
