//! The process-wide memory budget of queued messages.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Bytes queued in the process against their bound.
pub(super) struct Budget {
    used: AtomicUsize,
    limit: usize,
}

impl Budget {
    pub(super) fn new(limit: usize) -> Self {
        Self { used: AtomicUsize::new(0), limit }
    }

    /// Takes `bytes`; false, and takes nothing, if they don't fit.
    pub(super) fn charge(&self, bytes: usize) -> bool {
        let before = self.used.fetch_add(bytes, Relaxed);
        if before.saturating_add(bytes) <= self.limit {
            return true;
        }
        self.used.fetch_sub(bytes, Relaxed);
        false
    }

    /// Takes `bytes`, beyond the limit if need be.
    pub(super) fn force(&self, bytes: usize) {
        self.used.fetch_add(bytes, Relaxed);
    }

    /// Gives bytes back.
    pub(super) fn release(&self, bytes: usize) {
        let before = self.used.fetch_sub(bytes, Relaxed);
        debug_assert!(before >= bytes, "more bytes released than charged");
    }

    /// Whether `bytes` would fit now.
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        self.used().saturating_add(bytes) <= self.limit
    }

    pub(super) fn used(&self) -> usize {
        self.used.load(Relaxed)
    }
}
