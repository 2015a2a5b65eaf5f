//! Counters of device shadows.

gateway_core::counters! {
    /// See [device shadows](api/shadows.md).
    "gateway_shadow_requests_total": "Requests for device shadows" {
        shadow_updates_device(op = "update", by = "device");
        shadow_gets_device(op = "get", by = "device");
        shadow_deletes_device(op = "delete", by = "device");
        shadow_updates_backend(op = "update", by = "backend");
        shadow_deletes_backend(op = "delete", by = "backend");
    }
    "gateway_shadow_rejected_total": "Requests of devices that were answered with a rejection" {
        shadow_rejected;
    }
    "gateway_shadow_deltas_total": "Updates of shadows after which something is desired that is not reported" {
        shadow_deltas;
    }
    /// Another gateway shares the database.
    "gateway_shadow_retried_total": "Changes of shadows made anew as somebody else had changed the shadow" {
        shadow_retried;
    }
    "gateway_shadow_store_errors_total": "Calls that the store of shadows did not answer, or not in time" {
        shadow_store_errors;
    }
    "gateway_shadow_watch_missed_total": "Changes that a watcher of shadows did not get, for want of memory" {
        shadow_watch_missed;
    }
}
