//! Limit of the requests under way: fewer while the database is overloaded, slowly more again.

use parking_lot::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit};

/// Additive increase, multiplicative decrease: an overloaded answer halves what may be under way, down to one; as many good
/// answers as may be under way allow one more, up to the bound.
pub(super) struct Limit {
    semaphore: Semaphore,
    most: usize,
    state: Mutex<RequestAllowance>,
}

struct RequestAllowance {
    allowed: usize,
    /// Permits to withdraw as they come back.
    debt: usize,
    /// Good answers since the last change.
    good: usize,
    /// Halvings so far. What was asked before the last one tells nothing new.
    halvings: u64,
}

/// Leave for one request; given back when dropped.
pub(super) struct RequestPermit<'a> {
    limit: &'a Limit,
    held: Option<SemaphorePermit<'a>>,
    halvings: u64,
}

impl Limit {
    pub(super) fn new(most: usize) -> Self {
        let most = most.clamp(1, Semaphore::MAX_PERMITS);
        let state = RequestAllowance { allowed: most, debt: 0, good: 0, halvings: 0 };
        Self { semaphore: Semaphore::new(most), most, state: Mutex::new(state) }
    }

    /// Waits until one more request may start. Cancel safe.
    pub(super) async fn permit(&self) -> RequestPermit<'_> {
        // Never closed.
        let held = self.semaphore.acquire().await.ok();
        RequestPermit { limit: self, held, halvings: self.state.lock().halvings }
    }

    #[cfg(test)]
    pub(super) fn allowed(&self) -> usize {
        self.state.lock().allowed
    }
}

impl RequestPermit<'_> {
    /// The request was answered in time.
    pub(super) fn good(self) {
        let limit = self.limit;
        let mut state = limit.state.lock();
        state.good += 1;
        if state.good >= state.allowed && state.allowed < limit.most {
            state.good = 0;
            state.allowed += 1;
            if state.debt > 0 {
                state.debt -= 1;
            } else {
                limit.semaphore.add_permits(1);
            }
        }
    }

    /// The database had too much to do.
    pub(super) fn overloaded(self) {
        let mut state = self.limit.state.lock();
        if state.halvings == self.halvings && state.allowed > 1 {
            let less = state.allowed / 2;
            let excess = state.debt + state.allowed - less;
            state.debt = excess - self.limit.semaphore.forget_permits(excess);
            state.allowed = less;
            state.halvings += 1;
        }
        state.good = 0;
    }
}

impl Drop for RequestPermit<'_> {
    fn drop(&mut self) {
        let mut state = self.limit.state.lock();
        if state.debt > 0
            && let Some(held) = self.held.take()
        {
            state.debt -= 1;
            held.forget();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn free(limit: &Limit) -> usize {
        limit.semaphore.available_permits()
    }

    #[tokio::test]
    async fn one_overload_halves_once_however_many_requests_met_it() {
        let limit = Limit::new(8);
        let mut permits = Vec::new();
        for _ in 0..8 {
            permits.push(limit.permit().await);
        }
        permits.into_iter().for_each(RequestPermit::overloaded);
        assert_eq!((limit.allowed(), free(&limit)), (4, 4));
        limit.permit().await.overloaded();
        assert_eq!((limit.allowed(), free(&limit)), (2, 2));
        for _ in 0..5 {
            limit.permit().await.overloaded();
        }
        assert_eq!((limit.allowed(), free(&limit)), (1, 1), "never none");
    }

    #[tokio::test]
    async fn what_was_taken_away_comes_back_slowly_and_not_beyond_the_bound() {
        let limit = Limit::new(8);
        limit.permit().await.overloaded();
        assert_eq!(limit.allowed(), 4);
        for _ in 0..4 {
            limit.permit().await.good();
        }
        assert_eq!((limit.allowed(), free(&limit)), (5, 5));
        for _ in 0..100 {
            limit.permit().await.good();
        }
        assert_eq!((limit.allowed(), free(&limit)), (8, 8));
    }

    #[tokio::test]
    async fn a_request_that_is_given_up_gives_its_permit_back() {
        let limit = Limit::new(2);
        let (first, second) = (limit.permit().await, limit.permit().await);
        first.overloaded();
        assert_eq!((limit.allowed(), free(&limit)), (1, 0));
        drop(second);
        assert_eq!(free(&limit), 1);
        let _permit = limit.permit().await;
        assert_eq!(free(&limit), 0);
    }
}
