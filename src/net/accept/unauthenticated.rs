//! What those hold who have not authenticated: little in all. When that is not enough, whoever has held the longest
//! leaves, whatever he was about to send: a flood ends its own connections.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
};

use broker::{Account, Charge, MemoryKind};
use gateway_core::metrics::count;
use parking_lot::Mutex;
use tokio::sync::Notify;

/// What a handshake may hold uncharged: nearly all that there are come in one piece of this size.
const FREE: usize = 1 << 10;

/// Everybody who holds something before authentication.
pub(in crate::net) struct Unauthenticated {
    account: Arc<Account>,
    next: AtomicU64,
    /// In the order in which they came.
    guests: Mutex<BTreeMap<u64, UnauthenticatedGuest>>,
}

struct UnauthenticatedGuest {
    charge: Charge,
    told: Arc<Notify>,
}

/// One who has not authenticated; what he holds is given back on drop.
pub(in crate::net) struct UnauthenticatedPlace {
    all: Arc<Unauthenticated>,
    number: u64,
    /// Whether he is, or was, among the guests: most never are.
    listed: AtomicBool,
    told: Arc<Notify>,
}

/// There is no room, or the place was given to others.
#[derive(Debug)]
pub(in crate::net) struct Crowded;

impl Unauthenticated {
    pub(in crate::net) fn new(account: &Arc<Account>) -> Arc<Self> {
        Arc::new(Self { account: Arc::clone(account), next: AtomicU64::new(0), guests: Mutex::default() })
    }

    pub(in crate::net) fn enter(self: &Arc<Self>) -> UnauthenticatedPlace {
        let number = self.next.fetch_add(1, Relaxed);
        UnauthenticatedPlace {
            all: Arc::clone(self),
            number,
            listed: AtomicBool::new(false),
            told: Arc::default(),
        }
    }
}

impl UnauthenticatedPlace {
    /// He holds `bytes` now. Makes room by sending away those who came before.
    ///
    /// # Errors
    /// He alone has too much.
    pub(in crate::net) fn hold(&self, bytes: usize) -> Result<(), Crowded> {
        if bytes <= FREE {
            self.leave();
            return Ok(());
        }
        self.listed.store(true, Relaxed);
        let mut guests = self.all.guests.lock();
        loop {
            let guest = guests.entry(self.number).or_insert_with(|| UnauthenticatedGuest {
                charge: Charge::new(&self.all.account, MemoryKind::Unauthenticated),
                told: Arc::clone(&self.told),
            });
            if guest.charge.set(bytes) {
                return Ok(());
            }
            count(|c| c.memory_unauthenticated.add(1));
            let oldest = guests.keys().copied().find(|number| *number != self.number);
            let Some(gone) = oldest.and_then(|number| guests.remove(&number)) else {
                guests.remove(&self.number);
                return Err(Crowded);
            };
            gone.told.notify_one();
        }
    }

    /// Waits until the place is given to others. Cancel safe.
    pub(in crate::net) async fn lost(&self) {
        self.told.notified().await;
    }

    fn leave(&self) {
        if self.listed.load(Relaxed) {
            self.all.guests.lock().remove(&self.number);
        }
    }
}

impl Drop for UnauthenticatedPlace {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        future::Future as _,
        pin::pin,
        task::{Context, Waker},
    };

    #[test]
    fn the_first_leaves_for_others_and_nobody_holds_more_than_there_is() {
        // A sixteenth of this is for those who have not authenticated.
        let account = Arc::new(Account::new(16 << 20));
        let all = Unauthenticated::new(&account);
        let places: Vec<UnauthenticatedPlace> = (0..100).map(|_| all.enter()).collect();
        for place in &places {
            assert!(place.hold(FREE).is_ok());
            assert!(place.hold(100 << 10).is_ok());
            assert!(account.used() <= 1 << 20);
        }
        let lost = |place: &UnauthenticatedPlace| {
            pin!(place.lost()).poll(&mut Context::from_waker(Waker::noop())).is_ready()
        };
        let gone = places.iter().filter(|place| lost(place)).count();
        assert_eq!(gone, 90);
        assert!(places[90..].iter().all(|place| !lost(place)), "the youngest stay");
        assert!(places[99].hold(2 << 20).is_err());
        drop(places);
        assert_eq!(account.used(), 0);
    }
}
