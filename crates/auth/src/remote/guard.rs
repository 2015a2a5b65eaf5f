//! One guard for each remote source: a deadline, a limit on questions at once and on those that wait, a circuit
//! breaker, and a cache of answers that also helps out while nobody answers. Answers that allow are remembered apart
//! from those that deny, so that a flood of wrong passwords pushes no good answer out. While the breaker is open, the
//! clients that the source has allowed lately go first.

use std::{future::Future, sync::Arc, time::Duration};

use access::{
    breaker::{Breaker, BreakerRule, QuestionFailure, QuestionPermit},
    remote::{Cache, CachedAnswer},
};
use aws_lc_rs::rand;
use broker::Account;
use config::RemoteLimits;
use edge::door::SourceAddress;
use gateway_core::{Timestamp, clock, warn_limited};
use parking_lot::Mutex;
use tokio::{runtime::Handle, sync::oneshot, time::timeout};
use tracing::{info, warn};

use super::{
    ServiceAnswer,
    keys::{AllowedRecently, QuestionKeys},
    places::{Place, QuestionPlaces},
    status::NoAnswer,
};
use crate::{counters::count, login_queue::LoginClient};

/// The longest that a source that does not answer is left alone.
pub(super) const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Deadlines for which odd answers must have been all that there was before they count against the source.
const SILENT_DEADLINES: u32 = 5;

/// Error that left a question without an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unanswered {
    /// Too many wait for one.
    Busy,
    /// The source does not answer, or what it says is no answer.
    Silent,
}

/// See the module.
pub(super) struct ServiceGuard<P> {
    name: &'static str,
    limits: RemoteLimits,
    /// Runtime on which questions are asked: neither on shards nor on their timers.
    runtime: Handle,
    places: Arc<QuestionPlaces>,
    breaker: Mutex<Breaker>,
    caches: Mutex<Caches<P>>,
    allowed: Mutex<AllowedRecently>,
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
    permit: QuestionPermit,
    is_told: bool,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        if !self.is_told {
            count(|c| c.hook_failures.add(1));
            self.breaker.lock().failed(self.permit, QuestionFailure::Unusable, clock::now());
        }
    }
}

impl<P: Clone + Send + 'static> ServiceGuard<P> {
    /// For a source of this name in the log. To be called within the runtime where questions are to be asked.
    pub(super) fn new(name: &'static str, limits: RemoteLimits) -> Arc<Self> {
        Arc::new(Self {
            name,
            runtime: Handle::current(),
            places: QuestionPlaces::new(limits.max_concurrent, limits.max_waiting),
            breaker: Mutex::new(Breaker::new(rule(&limits))),
            caches: Mutex::new(Caches {
                allowed: Cache::new(limits.cache_size),
                others: Cache::new(limits.cache_size),
            }),
            allowed: Mutex::new(AllowedRecently::new()),
            limits,
        })
    }

    /// Names a client by its address and the name that it claims.
    pub(super) fn login_client(&self, address: Option<SourceAddress>, name: Option<&str>) -> LoginClient {
        self.places.login_client(address, name)
    }

    /// Charges what is remembered of clients to this account from now on; before that nothing is.
    pub(super) fn charge_to(&self, account: &Arc<Account>) {
        self.places.charge_to(account);
    }

    /// Returns the answer to the question of a client with these digests, which `ask` asks if need be. Cancel safe: the
    /// answer to an asked question is heard and kept all the same, and a question that waits for its turn is not asked.
    ///
    /// # Errors
    /// [`Unanswered`], within twice the deadline.
    pub(super) async fn answer<F>(
        self: &Arc<Self>,
        login_client: LoginClient,
        keys: QuestionKeys,
        ask: F,
    ) -> Result<ServiceAnswer<P>, Unanswered>
    where
        F: Future<Output = Result<ServiceAnswer<P>, NoAnswer>> + Send + 'static,
    {
        let found = self.caches.lock().get(&keys.question, clock::now());
        let stale = match found {
            CachedAnswer::Fresh(answer) => {
                count(|c| c.hook_cached.add(1));
                return Ok(answer);
            }
            CachedAnswer::Stale(answer) => Some(answer),
            CachedAnswer::Nothing => None,
        };
        match self.ask(login_client, keys, ask).await {
            Ok(answer) => Ok(answer),
            Err(away) => stale.map_or(Err(away), |answer| {
                count(|c| c.hook_stale.add(1));
                Ok(answer)
            }),
        }
    }

    async fn ask<F>(
        self: &Arc<Self>,
        login_client: LoginClient,
        keys: QuestionKeys,
        ask: F,
    ) -> Result<ServiceAnswer<P>, Unanswered>
    where
        F: Future<Output = Result<ServiceAnswer<P>, NoAnswer>> + Send + 'static,
    {
        let admitted = self.admit_at_once(&keys)?;
        let this = Arc::clone(self);
        let (client, gone) = oneshot::channel::<()>();
        let asked = self.runtime.spawn(async move {
            let (permit, _place) = match admitted {
                Some(admitted) => admitted,
                None => tokio::select! {
                    biased;
                    // With it goes what the peer sent.
                    _ = gone => return Err(Unanswered::Busy),
                    admitted = this.admit(login_client, &keys) => admitted?,
                },
            };
            let mut asking = Asking { breaker: &this.breaker, permit, is_told: false };
            let late = || NoAnswer::Failed(QuestionFailure::Unreachable, "no answer in time".to_owned());
            let told = timeout(this.limits.deadline.0, ask).await.unwrap_or_else(|_| Err(late()));
            asking.is_told = true;
            this.take(login_client, &keys, permit, told, clock::now())
        });
        let answer = asked.await.unwrap_or(Err(Unanswered::Silent));
        drop(client);
        answer
    }

    /// While the breaker is open: a place for a question that it lets pass, since nobody waits for a place to ask a source that
    /// does not answer. `None` while the breaker is closed.
    fn admit_at_once(&self, keys: &QuestionKeys) -> Result<Option<(QuestionPermit, Place)>, Unanswered> {
        if !self.breaker.lock().is_open() {
            return Ok(None);
        }
        let Some(place) = self.places.take_free() else {
            count(|c| c.hook_open.add(1));
            return Err(Unanswered::Silent);
        };
        Ok(Some((self.permit(keys)?, place)))
    }

    /// A place, waited for.
    async fn admit(
        &self,
        login_client: LoginClient,
        keys: &QuestionKeys,
    ) -> Result<(QuestionPermit, Place), Unanswered> {
        let place = timeout(self.limits.deadline.0, self.places.take(login_client)).await;
        let Ok(Some(place)) = place else {
            count(|c| c.hook_busy.add(1));
            return Err(Unanswered::Busy);
        };
        Ok((self.permit(keys)?, place))
    }

    fn permit(&self, keys: &QuestionKeys) -> Result<QuestionPermit, Unanswered> {
        let history = self.allowed.lock().history(keys);
        let permit = self.breaker.lock().may_ask(history, clock::now());
        permit.ok_or_else(|| {
            count(|c| c.hook_open.add(1));
            Unanswered::Silent
        })
    }

    fn take(
        &self,
        login_client: LoginClient,
        keys: &QuestionKeys,
        permit: QuestionPermit,
        told: Result<ServiceAnswer<P>, NoAnswer>,
        now: Timestamp,
    ) -> Result<ServiceAnswer<P>, Unanswered> {
        match told {
            Ok(answer) => {
                count(|c| c.hook_answers.add(1));
                if self.breaker.lock().succeeded(now) {
                    info!(source = self.name, "answers again");
                }
                match answer {
                    ServiceAnswer::Allow(_) => {
                        self.allowed.lock().insert(keys);
                        self.places.told(login_client, true);
                    }
                    ServiceAnswer::Deny => self.places.told(login_client, false),
                    ServiceAnswer::Ignore => (),
                }
                self.remember(keys.question, &answer, now);
                Ok(answer)
            }
            Err(NoAnswer::Denied(_)) => {
                count(|c| c.hook_status.add(1));
                self.breaker.lock().undecided(permit);
                self.places.told(login_client, false);
                self.remember(keys.question, &ServiceAnswer::Deny, now);
                Ok(ServiceAnswer::Deny)
            }
            Err(NoAnswer::Failed(failure, problem)) => {
                count(|c| c.hook_failures.add(1));
                let opens = self.breaker.lock().failed(permit, failure, now);
                if !opens {
                    warn_limited!(source = self.name, problem, "question has no answer");
                } else {
                    warn!(
                        source = self.name,
                        problem, "does not answer, it is left alone for a while but for one question in ten"
                    );
                }
                Err(Unanswered::Silent)
            }
        }
    }

    fn remember(&self, key: [u8; 32], answer: &ServiceAnswer<P>, now: Timestamp) {
        let limits = &self.limits;
        let mut jitter = [0];
        let _ = rand::fill(&mut jitter);
        let mut caches = self.caches.lock();
        let Caches { allowed, others } = &mut *caches;
        let (own, other, fresh) = match answer {
            ServiceAnswer::Allow(_) => (allowed, others, limits.cache_ttl.0),
            ServiceAnswer::Deny | ServiceAnswer::Ignore => (others, allowed, limits.cache_negative_ttl.0),
        };
        own.put(key, answer.clone(), now, fresh, limits.stale_if_error.0, jitter[0]);
        // The previous answer may be in the other cache.
        other.forget(&key);
    }
}

fn rule(limits: &RemoteLimits) -> BreakerRule {
    BreakerRule {
        threshold: limits.failures,
        silence: (limits.deadline.0 * SILENT_DEADLINES).min(LONGEST_PAUSE),
        pause: limits.retry_after.0,
        longest: LONGEST_PAUSE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::Span;

    fn guard(limits: RemoteLimits) -> Arc<ServiceGuard<u8>> {
        ServiceGuard::new("test", limits)
    }

    fn keys(key: u8) -> QuestionKeys {
        QuestionKeys { question: [key; 32], proof: [key; 16], name: [key; 16] }
    }

    fn nobody(guard: &ServiceGuard<u8>) -> LoginClient {
        guard.login_client(None, None)
    }

    async fn answer(
        guard: &Arc<ServiceGuard<u8>>,
        key: u8,
        answer: ServiceAnswer<u8>,
    ) -> Result<ServiceAnswer<u8>, Unanswered> {
        guard.answer(nobody(guard), keys(key), async move { Ok(answer) }).await
    }

    async fn fails(guard: &Arc<ServiceGuard<u8>>, key: u8) -> Result<ServiceAnswer<u8>, Unanswered> {
        let failure = NoAnswer::Failed(QuestionFailure::Unreachable, "test".to_owned());
        guard.answer(nobody(guard), keys(key), async move { Err(failure) }).await
    }

    /// Nothing is remembered, so that each question is asked.
    fn forgetful() -> RemoteLimits {
        let zero = Span(Duration::ZERO);
        RemoteLimits {
            cache_ttl: zero,
            cache_negative_ttl: zero,
            stale_if_error: zero,
            ..RemoteLimits::default()
        }
    }

    #[tokio::test]
    async fn a_question_that_panics_leaves_no_try_open_for_ever() {
        let limits = RemoteLimits {
            failures: 1,
            retry_after: Span(Duration::ZERO),
            deadline: Span(Duration::ZERO),
            ..forgetful()
        };
        let guard = guard(limits);
        for _ in 0..2 {
            // The first opens the breaker, the second is its try.
            let asked = guard.answer(nobody(&guard), keys(1), async { panic!("a bug of ours") }).await;
            assert_eq!(asked.err(), Some(Unanswered::Silent));
            assert!(guard.breaker.lock().is_open());
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
            async move { guard.answer(nobody(&guard), keys(1), asks).await }
        });
        while guard.places.count() != (0, 0) {
            tokio::task::yield_now().await;
        }
        let credentials = Arc::new("a password");
        let waits = tokio::spawn({
            let (guard, credentials) = (Arc::clone(&guard), Arc::clone(&credentials));
            let asks = async move { Ok(ServiceAnswer::Allow(credentials.len() as u8)) };
            async move { guard.answer(nobody(&guard), keys(2), asks).await }
        });
        while guard.places.count() != (0, 1) {
            tokio::task::yield_now().await;
        }
        waits.abort();
        while Arc::strong_count(&credentials) > 1 {
            tokio::task::yield_now().await;
        }
        while guard.places.count() != (0, 0) {
            tokio::task::yield_now().await;
        }
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
        let known = fails(&guard, 0).await;
        assert!(matches!(known, Ok(ServiceAnswer::Allow(7))));
        guard.remember([0; 32], &ServiceAnswer::Deny, clock::now());
        let known = fails(&guard, 0).await;
        assert!(matches!(known, Ok(ServiceAnswer::Deny)), "what it said last");
    }

    /// The failure: who was let in before is refused beside strangers while the source is away, and does not learn that
    /// it is back.
    #[tokio::test]
    async fn while_the_source_is_left_alone_those_who_were_allowed_go_first() {
        let limits =
            RemoteLimits { failures: 3, retry_after: Span(Duration::from_secs(3600)), ..forgetful() };
        let guard = guard(limits);
        answer(&guard, 1, ServiceAnswer::Allow(1)).await.expect("an answer");
        // A question of the same millisecond may have been asked before the answer.
        let answered = clock::now();
        while clock::now() <= answered {
            tokio::task::yield_now().await;
        }
        for _ in 0..3 {
            assert_eq!(fails(&guard, 2).await.err(), Some(Unanswered::Silent));
        }
        assert!(guard.breaker.lock().is_open());
        let mut asked = 0;
        for _ in 0..100 {
            let answer =
                guard.answer(nobody(&guard), keys(3), async { Err(NoAnswer::Denied(String::new())) }).await;
            asked += usize::from(answer.is_ok());
        }
        assert_eq!(asked, 10, "one in ten of the strangers");
        assert!(guard.breaker.lock().is_open(), "a status about one login closes nothing");
        let known = answer(&guard, 1, ServiceAnswer::Allow(1)).await;
        assert!(matches!(known, Ok(ServiceAnswer::Allow(1))));
        assert!(!guard.breaker.lock().is_open(), "and one good answer closes it");
    }
}
