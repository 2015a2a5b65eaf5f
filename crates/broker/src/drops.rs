//! Drops, counted by reason.

use std::sync::Arc;

use gateway_core::{DropReason, Receipt, metrics::count};

/// Counts a drop by the broker itself, and tells the receipt of a message that had been accepted.
pub(super) fn drop_message(receipt: &Option<Arc<Receipt>>, reason: DropReason) {
    count_drop(reason);
    if let Some(receipt) = receipt {
        receipt.update(|state| {
            state.dropped += 1;
            state.reason = Some(reason);
        });
    }
}

/// Counts a drop by its reason.
pub(super) fn count_drop(reason: DropReason) {
    count(|c| match reason {
        DropReason::Offline => c.dropped_offline.add(1),
        DropReason::QueueFull => c.dropped_queue_full.add(1),
        DropReason::Memory => c.dropped_memory.add(1),
        DropReason::Expired => c.dropped_expired.add(1),
        DropReason::TooLarge => c.dropped_too_large.add(1),
        DropReason::ConnectionLost => c.dropped_connection_lost.add(1),
        DropReason::SessionEnded => c.dropped_session_ended.add(1),
        DropReason::NotAuthorized => c.dropped_not_authorized.add(1),
        DropReason::Purged => c.dropped_purged.add(1),
    });
}
