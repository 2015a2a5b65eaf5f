//! One guard for each remote source: a deadline, a limit on questions at once and on those that wait, a circuit breaker, and a
//! cache of answers that also helps out while nobody answers. Answers that allow are remembered apart from those that deny, so
//! that a flood of wrong passwords pushes no good answer out.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use access::remote::{Breaker, Cache, CachedAnswer};
use aws_lc_rs::rand;
use gateway_core::{Timestamp, clock, metrics::count};
use parking_lot::Mutex;
use tokio::{
    runtime::Handle,
    sync::{Semaphore, oneshot},
    time::timeout,
};
use tracing::{info, warn};

use super::ServiceAnswer;
use crate::config::RemoteLimits;

/// The longest that a source that does not answer is left alone.
pub(super) const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Why there is no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Away {
    /// Too many wait for one.
    Busy,
    /// The source does not answer, or what it says is no answer.
    Silent,
}

/// See the module.
pub(super) struct ServiceGuard<P> {
    name: &'static str,
    limits: RemoteLimits,
    /// Where questions are asked: neither on shards nor on their timers.
    runtime: Handle,
    places: Arc<Semaphore>,
    waiting: Arc<AtomicUsize>,
    breaker: Mutex<Breaker>,
    caches: Mutex<Caches<P>>,
}

/// Answers that are remembered, each for its question in one of the two.
struct Caches<P> {
    allowed: Cache<ServiceAnswer<P>>,
    others: Cache<ServiceAnswer<P>>,
}

impl<P: Clone> Caches<P> {
    fn get(&self, key: &[u8; 32], now: Timestamp) -> CachedAnswer<ServiceAnswer<P>> {
        match self.allowed.get(key, now) {
            CachedAnswer::Nothing => self.others.get(key, now),
            found => found,
        }
    }
}

/// A question that is being asked. Dropped before its outcome was told, since what asks has panicked, it has failed: the
/// breaker would wait for ever for the outcome of its try.
struct Asking<'a> {
    breaker: &'a Mutex<Breaker>,
    is_told: bool,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        if !self.is_told {
            count(|c| c.hook_failures.add(1));
            self.breaker.lock().failed(clock::now());
        }
    }
}

impl<P: Clone + Send + 'static> ServiceGuard<P> {
    /// For a source of this name in the log. To be called within the runtime where questions are to be asked.
    pub(super) fn new(name: &'static str, limits: RemoteLimits) -> Arc<Self> {
        Arc::new(Self {
            name,
            runtime: Handle::current(),
            places: Arc::new(Semaphore::new(limits.max_concurrent)),
            waiting: Arc::default(),
            breaker: Mutex::new(Breaker::new(limits.failures, limits.retry_after.0, LONGEST_PAUSE)),
            caches: Mutex::new(Caches {
                allowed: Cache::new(limits.cache_size),
                others: Cache::new(limits.cache_size),
            }),
            limits,
        })
    }

    /// The answer to the question with this digest, which `ask` asks if need be. Cancel safe: what was asked is heard and
    /// kept all the same, and what waits for its turn is not asked.
    ///
    /// # Errors
    /// [`Away`], within twice the deadline.
    pub(super) async fn answer<F>(self: &Arc<Self>, key: [u8; 32], ask: F) -> Result<ServiceAnswer<P>, Away>
    where
        F: Future<Output = Result<ServiceAnswer<P>, String>> + Send + 'static,
    {
        let found = self.caches.lock().get(&key, clock::now());
        let stale = match found {
            CachedAnswer::Fresh(answer) => {
                count(|c| c.hook_cached.add(1));
                return Ok(answer);
            }
            CachedAnswer::Stale(answer) => Some(answer),
            CachedAnswer::Nothing => None,
        };
        match self.ask(key, ask).await {
            Ok(answer) => Ok(answer),
            Err(away) => stale.map_or(Err(away), |answer| {
                count(|c| c.hook_stale.add(1));
                Ok(answer)
            }),
        }
    }

    async fn ask<F>(self: &Arc<Self>, key: [u8; 32], ask: F) -> Result<ServiceAnswer<P>, Away>
    where
        F: Future<Output = Result<ServiceAnswer<P>, String>> + Send + 'static,
    {
        // Nobody waits for a place to ask one who does not answer.
        if self.breaker.lock().is_open() && self.places.available_permits() < self.limits.max_concurrent {
            count(|c| c.hook_open.add(1));
            return Err(Away::Silent);
        }
        let Some(waits) = Waits::enter(&self.waiting, self.limits.max_waiting) else {
            count(|c| c.hook_busy.add(1));
            return Err(Away::Busy);
        };
        let this = Arc::clone(self);
        let (asker, gone) = oneshot::channel::<()>();
        let asked = self.runtime.spawn(async move {
            // Also while the one who asked is gone.
            let _waits = waits;
            let deadline = this.limits.deadline.0;
            let place = tokio::select! {
                biased;
                // With it goes what the peer sent.
                _ = gone => return Err(Away::Busy),
                place = timeout(deadline, Arc::clone(&this.places).acquire_owned()) => place,
            };
            let Ok(Ok(_place)) = place else {
                count(|c| c.hook_busy.add(1));
                return Err(Away::Busy);
            };
            if !this.breaker.lock().may_ask(clock::now()) {
                count(|c| c.hook_open.add(1));
                return Err(Away::Silent);
            }
            let mut asking = Asking { breaker: &this.breaker, is_told: false };
            let told = timeout(deadline, ask).await.unwrap_or_else(|_| Err("no answer in time".to_owned()));
            asking.is_told = true;
            this.take(key, told, clock::now())
        });
        let answer = asked.await.unwrap_or(Err(Away::Silent));
        drop(asker);
        answer
    }

    fn take(
        &self,
        key: [u8; 32],
        told: Result<ServiceAnswer<P>, String>,
        now: Timestamp,
    ) -> Result<ServiceAnswer<P>, Away> {
        match told {
            Ok(answer) => {
                count(|c| c.hook_answers.add(1));
                let was_open = {
                    let mut breaker = self.breaker.lock();
                    let was_open = breaker.is_open();
                    breaker.succeeded();
                    was_open
                };
                if was_open {
                    info!(source = self.name, "answers again");
                }
                let limits = &self.limits;
                let fresh = match &answer {
                    ServiceAnswer::Allow(_) => limits.cache_ttl.0,
                    ServiceAnswer::Deny | ServiceAnswer::Ignore => limits.cache_negative_ttl.0,
                };
                let mut jitter = [0];
                let _ = rand::fill(&mut jitter);
                let mut caches = self.caches.lock();
                let Caches { allowed, others } = &mut *caches;
                let (own, other) = match &answer {
                    ServiceAnswer::Allow(_) => (allowed, others),
                    ServiceAnswer::Deny | ServiceAnswer::Ignore => (others, allowed),
                };
                own.put(key, answer.clone(), now, fresh, limits.stale_if_error.0, jitter[0]);
                // It may have been another before.
                other.forget(&key);
                drop(caches);
                Ok(answer)
            }
            Err(problem) => {
                count(|c| c.hook_failures.add(1));
                if self.breaker.lock().failed(now) {
                    warn!(source = self.name, problem, "does not answer, it is left alone for a while");
                }
                Err(Away::Silent)
            }
        }
    }
}

/// One who waits for an answer, until it is dropped.
struct Waits(Arc<AtomicUsize>);

impl Waits {
    fn enter(waiting: &Arc<AtomicUsize>, most: usize) -> Option<Self> {
        let waits = Self(Arc::clone(waiting));
        (waiting.fetch_add(1, Relaxed) < most).then_some(waits)
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Span;

    fn guard(limits: RemoteLimits) -> Arc<ServiceGuard<u8>> {
        ServiceGuard::new("test", limits)
    }

    async fn answer(
        guard: &Arc<ServiceGuard<u8>>,
        key: u8,
        answer: ServiceAnswer<u8>,
    ) -> Result<ServiceAnswer<u8>, Away> {
        guard.answer([key; 32], async move { Ok(answer) }).await
    }

    #[tokio::test]
    async fn a_question_that_panics_leaves_no_try_open_for_ever() {
        let limits =
            RemoteLimits { failures: 1, retry_after: Span(Duration::ZERO), ..RemoteLimits::default() };
        let guard = guard(limits);
        for _ in 0..2 {
            // The first opens the breaker, the second is its try.
            let asked = guard.answer([1; 32], async { panic!("a bug of ours") }).await;
            assert_eq!(asked.err(), Some(Away::Silent));
        }
        let asked = answer(&guard, 1, ServiceAnswer::Allow(7)).await;
        assert!(matches!(asked, Ok(ServiceAnswer::Allow(7))), "it is asked again");
    }

    /// The question holds credentials of a client that has left.
    #[tokio::test]
    async fn a_question_that_waits_for_its_turn_ends_with_whom_it_is_for() {
        let guard = guard(RemoteLimits { max_concurrent: 1, ..RemoteLimits::default() });
        let (hold, held) = oneshot::channel::<()>();
        let first = tokio::spawn({
            let guard = Arc::clone(&guard);
            let asks = async move {
                let _ = held.await;
                Ok(ServiceAnswer::Allow(1))
            };
            async move { guard.answer([1; 32], asks).await }
        });
        while guard.places.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        let credentials = Arc::new("a password");
        let waits = tokio::spawn({
            let (guard, credentials) = (Arc::clone(&guard), Arc::clone(&credentials));
            let asks = async move { Ok(ServiceAnswer::Allow(credentials.len() as u8)) };
            async move { guard.answer([2; 32], asks).await }
        });
        while guard.waiting.load(Relaxed) < 2 {
            tokio::task::yield_now().await;
        }
        waits.abort();
        while Arc::strong_count(&credentials) > 1 {
            tokio::task::yield_now().await;
        }
        assert_eq!(guard.waiting.load(Relaxed), 1);
        hold.send(()).expect("it is still asked");
        assert!(matches!(first.await, Ok(Ok(ServiceAnswer::Allow(1)))));
    }

    #[tokio::test]
    async fn failed_logins_push_no_good_answer_out_and_a_new_answer_counts() {
        let guard = guard(RemoteLimits { cache_size: 4, ..RemoteLimits::default() });
        answer(&guard, 0, ServiceAnswer::Allow(7)).await.expect("an answer");
        for key in 1..=10 {
            answer(&guard, key, ServiceAnswer::Deny).await.expect("an answer");
        }
        let known = guard.answer([0; 32], async { Err("not to be asked".to_owned()) }).await;
        assert!(matches!(known, Ok(ServiceAnswer::Allow(7))));
        let denied = guard.take([0; 32], Ok(ServiceAnswer::Deny), clock::now());
        assert!(matches!(denied, Ok(ServiceAnswer::Deny)));
        let known = guard.answer([0; 32], async { Err("not to be asked".to_owned()) }).await;
        assert!(matches!(known, Ok(ServiceAnswer::Deny)), "what it said last");
    }
}
