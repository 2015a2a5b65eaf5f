//! Places to ask a remote source: as many questions at once as may be asked; other clients wait for their turn, and a flood of
//! logins that wait for an answer displaces its own.

use std::sync::Arc;

use broker::Account;
use edge::door::SourceAddress;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::login_queue::{LoginClient, LoginQueue, LoginTicket};

/// See the module.
pub(super) struct QuestionPlaces {
    inner: Mutex<QuestionPlacesState>,
    /// Clients that may wait for a place.
    most: usize,
}

struct QuestionPlacesState {
    /// More than none only while nobody waits.
    free: usize,
    waiting: LoginQueue<oneshot::Sender<Place>>,
}

/// A place, until it is dropped: then it is that of the client whose turn is next.
pub(super) struct Place(Option<Arc<QuestionPlaces>>);

impl QuestionPlaces {
    /// For `at_once` questions, of clients of which no more than `all` have a place or wait for one.
    pub(super) fn new(at_once: usize, all: usize) -> Arc<Self> {
        let free = at_once.min(all);
        Arc::new(Self {
            inner: Mutex::new(QuestionPlacesState { free, waiting: LoginQueue::new() }),
            most: all - free,
        })
    }

    /// Names a client by its address and the name that it claims.
    pub(super) fn login_client(&self, address: Option<SourceAddress>, name: Option<&str>) -> LoginClient {
        self.inner.lock().waiting.login_client(address, name)
    }

    /// Remembers what became of a question: it decides whose are asked first.
    pub(super) fn told(&self, login_client: LoginClient, allowed: bool) {
        self.inner.lock().waiting.told(login_client, allowed);
    }

    /// Charges what is remembered to this account from now on; before that nothing is.
    pub(super) fn charge_to(&self, account: &Arc<Account>) {
        self.inner.lock().waiting.charge_to(account);
    }

    /// A place, if one is free.
    pub(super) fn take_free(self: &Arc<Self>) -> Option<Place> {
        let mut inner = self.inner.lock();
        inner.free = inner.free.checked_sub(1)?;
        Some(Place(Some(Arc::clone(self))))
    }

    /// Waits for a place. `None` if too many wait, and this client has least claim to. Cancel safe.
    pub(super) async fn take(self: &Arc<Self>, login_client: LoginClient) -> Option<Place> {
        if let Some(place) = self.take_free() {
            return Some(place);
        }
        let (give, given) = oneshot::channel();
        let (ticket, displaced) = self.inner.lock().waiting.push(login_client, give, self.most);
        drop(displaced);
        let _waits = PlaceWait { places: self, ticket };
        given.await.ok()
    }

    /// Places that are free, and clients that wait.
    #[cfg(test)]
    pub(super) fn count(&self) -> (usize, usize) {
        let inner = self.inner.lock();
        (inner.free, inner.waiting.len())
    }

    fn pass_on(self: &Arc<Self>) {
        loop {
            let mut inner = self.inner.lock();
            let Some(next) = inner.waiting.pop() else {
                inner.free += 1;
                return;
            };
            drop(inner);
            match next.send(Place(Some(Arc::clone(self)))) {
                Ok(()) => return,
                // Gone meanwhile: the place is still to be passed on.
                Err(mut place) => place.0 = None,
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(places) = self.0.take() {
            places.pass_on();
        }
    }
}

/// A client that waits for a place.
struct PlaceWait<'a> {
    places: &'a QuestionPlaces,
    ticket: LoginTicket,
}

impl Drop for PlaceWait<'_> {
    fn drop(&mut self) {
        let left = self.places.inner.lock().waiting.remove(self.ticket);
        drop(left);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        future::Future as _,
        net::SocketAddr,
        pin::pin,
        task::{Context, Poll, Waker},
    };

    use super::*;

    fn from(places: &QuestionPlaces, ip: &str, name: &str) -> LoginClient {
        places.login_client(Some(SocketAddr::new(ip.parse().unwrap(), 1).into()), Some(name))
    }

    /// Otherwise the client that asks first and most keeps all others out for as long as the source is slow.
    #[tokio::test]
    async fn a_flood_displaces_its_own_and_others_take_turns_with_it() {
        let places = QuestionPlaces::new(1, 11);
        let held = places.take_free().expect("a place");
        let flood: Vec<_> = (0..20)
            .map(|n| {
                let (places, login_client) =
                    (Arc::clone(&places), from(&places, "192.0.2.1", &format!("f{n}")));
                tokio::spawn(async move { places.take(login_client).await })
            })
            .collect();
        while flood.iter().filter(|task| task.is_finished()).count() < 10 {
            tokio::task::yield_now().await;
        }
        let mut other = pin!(places.take(from(&places, "198.51.100.1", "ann")));
        let context = &mut Context::from_waker(Waker::noop());
        assert!(other.as_mut().poll(context).is_pending(), "a place in the queue");
        drop(held);
        // One of the flood is before; it is dropped with its task's result.
        let mut passed = 0;
        for task in flood {
            passed += usize::from(task.await.expect("no panic").is_some());
            if let Poll::Ready(place) = other.as_mut().poll(context) {
                assert!(place.is_some());
                break;
            }
        }
        assert!(passed <= 11, "{passed}");
    }

    #[tokio::test]
    async fn a_place_of_a_client_that_has_gone_is_passed_on() {
        let places = QuestionPlaces::new(1, 10);
        let held = places.take_free().expect("a place");
        let context = &mut Context::from_waker(Waker::noop());
        let mut second = Box::pin(places.take(from(&places, "192.0.2.1", "a")));
        let mut third = Box::pin(places.take(from(&places, "192.0.2.2", "b")));
        assert!(second.as_mut().poll(context).is_pending() && third.as_mut().poll(context).is_pending());
        drop(held);
        // The place is on its way to the second.
        drop(second);
        assert!(matches!(third.as_mut().poll(context), Poll::Ready(Some(_))));
        drop(third);
        assert_eq!(places.inner.lock().free, 1);
        assert!(
            QuestionPlaces::new(5, 0).take(from(&places, "192.0.2.1", "a")).await.is_none(),
            "nobody may wait"
        );
    }
}
