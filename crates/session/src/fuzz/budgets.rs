//! Budgets for tests and fuzz targets.

use std::cell::Cell;

use gateway_core::Budget;

/// Has room for everything and counts nothing.
pub(crate) struct Unlimited;

impl Budget for Unlimited {
    fn charge(&self, _held: usize, _bytes: usize) -> bool {
        true
    }
    fn force(&self, _bytes: usize) {}
    fn release(&self, _bytes: usize) {}
}

/// Counts, up to a limit that may change.
pub(crate) struct TestBudget {
    pub(crate) held: Cell<usize>,
    pub(crate) limit: Cell<usize>,
}

impl TestBudget {
    /// An empty one.
    pub(crate) fn new(limit: usize) -> Self {
        Self { held: Cell::new(0), limit: Cell::new(limit) }
    }
}

impl Budget for TestBudget {
    fn charge(&self, _held: usize, bytes: usize) -> bool {
        let fits = self.held.get().saturating_add(bytes) <= self.limit.get();
        if fits {
            self.force(bytes);
        }
        fits
    }
    fn force(&self, bytes: usize) {
        self.held.set(self.held.get() + bytes);
    }
    fn release(&self, bytes: usize) {
        assert!(self.held.get() >= bytes, "more released than charged");
        self.held.set(self.held.get() - bytes);
    }
}
