//! Counters of calls that failed.

gateway_core::counters! {
    "gateway_grpc_errors_total": "gRPC calls answered with an error" {
        grpc_requests_failed;
    }
}
