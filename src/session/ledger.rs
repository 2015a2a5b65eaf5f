//! What a session holds beside its queue, charged in steps: a message that is acknowledged at once touches no shared
//! counter.

use super::Budget;

/// So much is not charged: every session may hold it.
pub(super) const FREE: usize = 4 << 10;
/// Bytes that are charged at once, where the budget has room for more than is needed.
const STEP: usize = 16 << 10;

/// Bytes on the budget for messages in flight and topic aliases.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    charged: usize,
}

impl Ledger {
    /// Whether the session may hold `needed` bytes here, beside `others` that are charged elsewhere.
    pub(super) fn covers(&mut self, needed: usize, others: usize, budget: &dyn Budget) -> bool {
        if needed <= self.charged.max(FREE) {
            return true;
        }
        let missing = needed - self.charged;
        let held = self.charged + others;
        let granted = [missing.next_multiple_of(STEP), missing].into_iter().find(|n| budget.charge(held, *n));
        self.charged += granted.unwrap_or_default();
        granted.is_some()
    }

    /// The session holds `bytes`, whatever was asked before.
    pub(super) fn settle(&mut self, bytes: usize, budget: &dyn Budget) {
        if bytes > self.charged.max(FREE) {
            budget.force(bytes - self.charged);
            self.charged = bytes;
        } else if self.charged > 0 && (bytes == 0 || self.charged - bytes.min(self.charged) >= 2 * STEP) {
            let kept = if bytes <= FREE { 0 } else { bytes };
            budget.release(self.charged - kept);
            self.charged = kept;
        }
    }

    /// Bytes on the budget.
    pub(super) fn charged(&self) -> usize {
        self.charged
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    struct Purse {
        held: Cell<usize>,
        limit: usize,
    }

    impl Budget for Purse {
        fn charge(&self, _held: usize, bytes: usize) -> bool {
            let fits = self.held.get() + bytes <= self.limit;
            if fits {
                self.force(bytes);
            }
            fits
        }
        fn force(&self, bytes: usize) {
            self.held.set(self.held.get() + bytes);
        }
        fn release(&self, bytes: usize) {
            self.held.set(self.held.get() - bytes);
        }
    }

    /// Rules out an in-flight window that nobody counts, and a counter that every message touches.
    #[test]
    fn small_traffic_touches_no_budget_and_all_of_the_rest_comes_back() {
        let account = Purse { held: Cell::new(0), limit: 256 << 10 };
        let held = || account.held.get();
        let mut ledger = Ledger::default();
        assert!(ledger.covers(FREE, 0, &account) && held() == 0);
        assert!(ledger.covers(FREE + 1, 0, &account) && held() == STEP);
        assert!(ledger.covers(STEP, 0, &account) && held() == STEP, "a step is taken once");
        ledger.settle(100, &account);
        assert_eq!(held(), STEP, "nor is it given back for every message");
        assert!(!ledger.covers(300 << 10, 0, &account), "more than there is");
        ledger.settle(300 << 10, &account);
        assert_eq!((held(), ledger.charged()), (300 << 10, 300 << 10), "what is there all the same counts");
        ledger.settle(0, &account);
        assert_eq!((held(), ledger.charged()), (0, 0));
    }
}
