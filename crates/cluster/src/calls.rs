//! Calls of the ledger that are repeated until they are answered.

use std::{
    future::poll_fn,
    pin::pin,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    task::Poll,
    time::Duration,
};

use ledger::{BoxFuture, Unknown};

use crate::Clock;

/// Time after which a call without an answer is repeated for the first time; it doubles.
const FIRST_REPEAT: Duration = Duration::from_millis(200);
/// Most time between repeats.
const REPEAT: Duration = Duration::from_secs(1);
/// Most attempts of a call that are under way at a time: an engine that hangs is not drowned.
const ATTEMPTS: usize = 3;
/// Time after which the oldest attempt gives way to a new one: its connection may be dead without telling.
const GIVE_WAY: Duration = Duration::from_secs(10);

/// Output of the first of two futures.
pub(crate) enum First<A, B> {
    /// The one that is asked first.
    One(A),
    /// The other.
    Other(B),
}

/// Waits for the first of two, and drops the other.
pub(crate) async fn first<A, B>(one: impl Future<Output = A>, other: impl Future<Output = B>) -> First<A, B> {
    let (mut one, mut other) = (pin!(one), pin!(other));
    poll_fn(|context| {
        if let Poll::Ready(output) = one.as_mut().poll(context) {
            return Poll::Ready(First::One(output));
        }
        other.as_mut().poll(context).map(First::Other)
    })
    .await
}

/// Waits for both.
pub(crate) async fn both(one: impl Future<Output = ()>, other: impl Future<Output = ()>) {
    let (mut one, mut other) = (pin!(one), pin!(other));
    let (mut one_ended, mut other_ended) = (false, false);
    poll_fn(|context| {
        one_ended = one_ended || one.as_mut().poll(context).is_ready();
        other_ended = other_ended || other.as_mut().poll(context).is_ready();
        if one_ended && other_ended { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// Makes a call until it is answered, and returns the answer with the time at which the answered attempt began. An attempt without
/// an answer goes on beside its repeats: an engine that is slower than the repeats is still heard. `repeats` counts them.
pub(crate) async fn until_answered<'a, T>(
    clock: &dyn Clock,
    repeats: &AtomicU64,
    mut call: impl FnMut() -> BoxFuture<'a, Result<T, Unknown>>,
) -> (Duration, T) {
    let mut attempts = vec![(clock.now(), call())];
    let mut delay = FIRST_REPEAT;
    loop {
        match first(any(&mut attempts), clock.sleep(delay)).await {
            First::One(answer) => return answer,
            First::Other(()) => delay = REPEAT.min(delay * 2),
        }
        let is_dead = |(begun, _): &(Duration, _)| clock.now().saturating_sub(*begun) >= GIVE_WAY;
        if attempts.len() >= ATTEMPTS && attempts.first().is_some_and(is_dead) {
            drop(attempts.remove(0));
        }
        if attempts.len() < ATTEMPTS {
            repeats.fetch_add(1, Relaxed);
            attempts.push((clock.now(), call()));
        }
    }
}

/// Waits for any attempt that is answered; those that end unknown are removed.
async fn any<T>(attempts: &mut Vec<(Duration, BoxFuture<'_, Result<T, Unknown>>)>) -> (Duration, T) {
    poll_fn(|context| {
        let mut answer = None;
        attempts.retain_mut(|(begun, attempt)| match attempt.as_mut().poll(context) {
            Poll::Ready(Ok(value)) if answer.is_none() => {
                answer = Some((*begun, value));
                false
            }
            Poll::Ready(_) => false,
            Poll::Pending => true,
        });
        answer.map_or(Poll::Pending, Poll::Ready)
    })
    .await
}
