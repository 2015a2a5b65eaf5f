//! Counters of the gRPC listener, its calls and streams.

gateway_core::counters! {
    "gateway_grpc_connections_refused_total": "gRPC connections refused or closed for others" {
        /// `grpc.max_connections`
        grpc_refused_limit(reason = "limit");
        /// `grpc.max_connections_per_address`
        grpc_refused_address_limit(reason = "address_limit");
        /// too many wait for a handshake
        grpc_refused_waiting(reason = "waiting");
        /// closed for a newcomer
        grpc_refused_silent(reason = "silent");
        /// no handshake in time
        grpc_refused_timeout(reason = "handshake_timeout");
        /// `limits.memory_budget` is used up, or others needed what an unauthenticated connection held
        grpc_refused_memory(reason = "memory");
        /// too many calls at once before any credentials, or too many refused calls whose answers are not read
        grpc_refused_calls(reason = "calls");
    }
    "gateway_grpc_connections_evicted_total": "gRPC connections ended because of a change of who may be connected" {
        grpc_evicted_revoked(reason = "revoked");
    }
    "gateway_grpc_calls_refused_total": "gRPC calls beyond the limit of their connection, of their caller or of all" {
        /// `grpc.max_calls_per_connection`
        grpc_calls_refused(reason = "connection");
        /// `grpc.max_calls_per_caller`, or the share of a caller while places are short
        grpc_calls_refused_caller(reason = "caller");
        /// `grpc.max_calls`
        grpc_calls_refused_all(reason = "all");
    }
    "gateway_grpc_streams_refused_total": "Streams of backends beyond the limit of their caller or of all" {
        /// `grpc.max_streams_per_caller`, or the share of a caller while places are short
        grpc_streams_refused_caller(reason = "caller");
        /// `grpc.max_streams`
        grpc_streams_refused_all(reason = "all");
    }
    "gateway_grpc_requests_late_total": "gRPC requests that had begun and did not go on" {
        grpc_requests_late;
    }
    "gateway_grpc_calls_total": "gRPC calls and streams begun" {
        grpc_calls;
    }
    "gateway_backend_streams_ended_total": "Streams whose caller lost its rights" {
        /// `backends` has changed
        backend_streams_revoked(reason = "revoked");
        /// the token or certificate has ended
        backend_streams_expired(reason = "expired");
    }
    "gateway_grpc_published_total": "Messages published by backends" {
        grpc_published;
    }
    /// Of `PublishToDevices`.
    "gateway_grpc_fanout_devices_total": "Devices that one message to many was given to" {
        grpc_fanout_devices;
    }
    /// Messages with `deliver_at`.
    "gateway_grpc_scheduled_total": "Messages with a time to be published at, by what became of them" {
        /// kept
        grpc_scheduled_accepted(result = "accepted");
        /// `grpc.scheduled_messages` or `grpc.scheduled_bytes`
        grpc_scheduled_refused(result = "refused");
        /// by a backend
        grpc_scheduled_cancelled(result = "cancelled");
        /// in time
        grpc_scheduled_published(result = "published");
        /// more than 5 s late
        grpc_scheduled_late(result = "late");
        /// no device took them, or the limits of the gateway no longer allow them
        grpc_scheduled_failed(result = "failed");
    }
    "gateway_grpc_keys_total": "Publishes whose idempotency key was known" {
        /// while the first publish waited
        grpc_keys_joined(result = "joined");
        /// afterwards
        grpc_keys_answered(result = "answered");
        /// with another message, refused
        grpc_keys_reused(result = "other_content");
    }
    "gateway_grpc_keys_dropped_total": "Idempotency keys forgotten before their time" {
        /// `grpc.idempotency_keys`
        grpc_keys_dropped_count(reason = "count");
        /// the budget
        grpc_keys_dropped_memory(reason = "memory");
    }
    "gateway_grpc_delivered_total": "Messages sent to backend streams" {
        grpc_delivered;
    }
    /// A stream that loses something is told how much.
    "gateway_grpc_stream_dropped_total": "Messages dropped for backend streams" {
        /// a backend that reads too slowly
        grpc_stream_dropped_full(reason = "buffer_full");
        /// the process-wide budget
        grpc_stream_dropped_memory(reason = "memory");
        /// a message above the stream's buffer
        grpc_stream_dropped_too_large(reason = "too_large");
        /// what came while a stream was ending
        grpc_stream_dropped_closed(reason = "closed");
    }
}
