//! Memory that a session holds besides its queue, charged in steps, so that a message acknowledged at once touches
//! no shared counter.

use gateway_core::Budget;

/// This much is not charged: every session may hold it.
pub(super) const FREE: usize = 4 << 10;
/// Bytes that are charged at once if the budget has room for more than is needed.
const STEP: usize = 16 << 10;

/// Bytes on the budget for messages in flight and topic aliases.
#[derive(Debug)]
pub(super) struct SessionReservation {
    charged: usize,
    /// The session may hold this much without asking the budget again.
    room: usize,
    /// Below this, some is given back.
    low: usize,
}

impl Default for SessionReservation {
    fn default() -> Self {
        Self { charged: 0, room: FREE, low: 0 }
    }
}

impl SessionReservation {
    /// Returns whether the session may hold `needed` bytes here, besides `others` that are charged elsewhere.
    #[inline]
    pub(super) fn covers(&mut self, needed: usize, others: usize, budget: &dyn Budget) -> bool {
        needed <= self.room || self.grows(needed, others, budget)
    }

    #[cold]
    fn grows(&mut self, needed: usize, others: usize, budget: &dyn Budget) -> bool {
        let missing = needed - self.charged;
        let held = self.charged + others;
        let granted = [missing.next_multiple_of(STEP), missing].into_iter().find(|n| budget.charge(held, *n));
        self.is_charged(self.charged + granted.unwrap_or_default());
        granted.is_some()
    }

    /// The session now holds `bytes`, whatever was granted.
    #[inline]
    pub(super) fn settle(&mut self, bytes: usize, budget: &dyn Budget) {
        if bytes > self.room || bytes < self.low {
            self.moves(bytes, budget);
        }
    }

    #[cold]
    fn moves(&mut self, bytes: usize, budget: &dyn Budget) {
        let charged = if bytes <= FREE { 0 } else { bytes };
        if charged > self.charged {
            budget.force(charged - self.charged);
        } else {
            budget.release(self.charged - charged);
        }
        self.is_charged(charged);
    }

    fn is_charged(&mut self, bytes: usize) {
        self.charged = bytes;
        self.room = bytes.max(FREE);
        // The last message gives back everything; before that, only an excess of more than two steps is given back.
        self.low = bytes.min(1).max((bytes + 1).saturating_sub(2 * STEP));
    }

    /// Bytes on the budget.
    pub(super) fn charged(&self) -> usize {
        self.charged
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz::TestBudget;

    /// The failure: an in-flight window that is not counted, or a shared counter that every message touches.
    #[test]
    fn small_traffic_touches_no_budget_and_all_of_the_rest_comes_back() {
        let account = TestBudget::new(256 << 10);
        let held = || account.held.get();
        let mut reservation = SessionReservation::default();
        assert!(reservation.covers(FREE, 0, &account) && held() == 0);
        assert!(reservation.covers(FREE + 1, 0, &account) && held() == STEP);
        assert!(reservation.covers(STEP, 0, &account) && held() == STEP, "a step is taken once");
        reservation.settle(100, &account);
        assert_eq!(held(), STEP, "nor is it given back for every message");
        assert!(!reservation.covers(300 << 10, 0, &account), "more than there is");
        reservation.settle(300 << 10, &account);
        assert_eq!(
            (held(), reservation.charged()),
            (300 << 10, 300 << 10),
            "what is there all the same counts"
        );
        reservation.settle(0, &account);
        assert_eq!((held(), reservation.charged()), (0, 0));
    }
}
