//! Counters of commands and their replies.

gateway_core::counters! {
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
}
