//! Counters of what is written to devices.

gateway_core::counters! {
    "mqtt_bytes_sent_total": "Bytes written to devices" {
        bytes_out;
    }
}
