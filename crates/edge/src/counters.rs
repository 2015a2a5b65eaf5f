//! Counters of handshakes and of connections to services.

gateway_core::counters! {
    "mqtt_tls_handshakes_total": "TLS handshakes" {
        handshake_tls_ok(result = "ok");
        handshake_tls_failed(result = "failed");
    }
    /// `[auth.http]`, `[auth.grpc]`, `[auth.jwt]` and bridges that post.
    "gateway_remote_too_much_total": "Connections to services that were ended, as more came than was asked for" {
        remote_too_much;
    }
}
