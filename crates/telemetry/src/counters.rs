//! Counters of traces.

gateway_core::counters! {
    /// The trace shows how many, in their place.
    "gateway_grpc_trace_missed_total": "Packets of traced devices that did not fit into the buffer of who traces" {
        trace_missed;
    }
}
