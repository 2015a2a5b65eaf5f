//! Counters of logins, of the services that decide about them, and of devices and backends that were denied.

gateway_core::counters! {
    "mqtt_login_waits_total": "Failed logins after which their address had to wait" {
        backoff_begun;
    }
    /// `bans.flapping_connects` is how often.
    "mqtt_flapping_bans_total": "Clients banned for a time because they connected too often" {
        flapping_bans;
    }
    /// See [rules](security/rules.md).
    "mqtt_subscriptions_denied_total": "Filters that the rules deny" {
        subscribe_denied;
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
    "gateway_audit_suppressed_total": "Lines left out of the audit log: one address was denied too often" {
        audit_suppressed;
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
}
