//! Memory of clients that have not authenticated: little in all. When that is not enough, the address that holds most
//! gives way: its oldest client is closed, even in the middle of a packet, so that a flood ends its own connections.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
};

use broker::{Account, Charge, MemoryKind};
use edge::door::SourceAddress;
use parking_lot::Mutex;
use tokio::sync::Notify;

/// Bytes that a handshake may hold uncharged: nearly all buffers of a handshake come in one piece of this size.
const FREE: usize = 1 << 10;

/// Everybody who holds something before authentication.
pub(crate) struct Unauthenticated {
    account: Arc<Account>,
    next: AtomicU64,
    pending_ones: Mutex<UnauthenticatedClients>,
}

/// Clients of an unknown address, of Unix sockets and of proxies that have not named it, count as one address.
#[derive(Default)]
struct UnauthenticatedClients {
    all: HashMap<u64, UnauthenticatedClient>,
    addresses: BTreeMap<Option<SourceAddress>, AddressHolds>,
    /// Addresses by the bytes they hold.
    by_bytes: BTreeSet<(usize, Option<SourceAddress>)>,
}

struct UnauthenticatedClient {
    address: Option<SourceAddress>,
    charge: Charge,
    told: Arc<Notify>,
}

#[derive(Default)]
struct AddressHolds {
    bytes: usize,
    /// In the order in which they came.
    pending_ones: BTreeSet<u64>,
}

/// Place of a client that has not authenticated; its charges are given back on drop.
pub(crate) struct UnauthenticatedPlace {
    all: Arc<Unauthenticated>,
    number: u64,
    address: OnceLock<SourceAddress>,
    /// True if this client is, or was, among the pending connections: most never are.
    listed: AtomicBool,
    told: Arc<Notify>,
}

/// There is no room, or the place was given to others.
#[derive(Debug)]
pub(crate) struct Crowded;

impl Unauthenticated {
    pub(crate) fn new(account: &Arc<Account>) -> Arc<Self> {
        Arc::new(Self {
            account: Arc::clone(account),
            next: AtomicU64::new(0),
            pending_ones: Mutex::default(),
        })
    }

    /// The place of one who comes from `address`, if that is known yet.
    pub(crate) fn enter(self: &Arc<Self>, address: Option<SourceAddress>) -> UnauthenticatedPlace {
        let number = self.next.fetch_add(1, Relaxed);
        UnauthenticatedPlace {
            all: Arc::clone(self),
            number,
            address: address.map(OnceLock::from).unwrap_or_default(),
            listed: AtomicBool::new(false),
            told: Arc::default(),
        }
    }
}

impl UnauthenticatedClients {
    /// Changes what a pending connection holds; false if that does not fit.
    fn set(&mut self, number: u64, place: &UnauthenticatedPlace, bytes: usize) -> bool {
        let pending = self.all.entry(number).or_insert_with(|| UnauthenticatedClient {
            address: place.address.get().copied(),
            charge: Charge::new(&place.all.account, MemoryKind::Unauthenticated),
            told: Arc::clone(&place.told),
        });
        let (address, before) = (pending.address, pending.charge.bytes());
        let fits = pending.charge.set(bytes);
        let now = pending.charge.bytes();
        let holds = self.addresses.entry(address).or_default();
        self.by_bytes.remove(&(holds.bytes, address));
        holds.bytes = holds.bytes + now - before;
        holds.pending_ones.insert(number);
        self.by_bytes.insert((holds.bytes, address));
        fits
    }

    fn remove(&mut self, number: u64) -> Option<UnauthenticatedClient> {
        let pending = self.all.remove(&number)?;
        if let Some(holds) = self.addresses.get_mut(&pending.address) {
            self.by_bytes.remove(&(holds.bytes, pending.address));
            holds.bytes -= pending.charge.bytes();
            holds.pending_ones.remove(&number);
            if holds.pending_ones.is_empty() {
                self.addresses.remove(&pending.address);
            } else {
                self.by_bytes.insert((holds.bytes, pending.address));
            }
        }
        Some(pending)
    }

    /// Chooses the pending connection that leaves so that the one with this number can hold `bytes`: the oldest of the address
    /// that would hold most then. None if that address has no other pending connection: the one with this number has too much.
    fn leaves_for(&self, number: u64, bytes: usize) -> Option<u64> {
        let pending = self.all.get(&number)?;
        let (own, held) = (pending.address, pending.charge.bytes());
        let oldest_of = |address: Option<SourceAddress>| {
            let holds = self.addresses.get(&address)?;
            holds.pending_ones.iter().copied().find(|pending| *pending != number)
        };
        let would_hold = self.addresses.get(&own).map_or(0, |holds| holds.bytes) - held + bytes;
        let other = self.by_bytes.iter().rev().copied().find(|(_, address)| *address != own);
        match other {
            Some((most, address)) if most >= would_hold => oldest_of(address).or_else(|| oldest_of(own)),
            _ => oldest_of(own),
        }
    }
}

impl UnauthenticatedPlace {
    /// His address is known only now, from his proxy.
    pub(crate) fn named(&self, address: SourceAddress) {
        let held = self.held();
        // He is listed under his address from the next time on that he holds something.
        self.leave();
        let _ = self.address.set(address);
        if held > 0 {
            self.all.pending_ones.lock().set(self.number, self, held);
        }
    }

    /// He holds `bytes` now. Makes room by sending others away.
    ///
    /// # Errors
    /// His address would hold most, and there is nobody else of it to send away.
    pub(crate) fn hold(&self, bytes: usize) -> Result<(), Crowded> {
        if bytes <= FREE {
            self.leave();
            return Ok(());
        }
        self.listed.store(true, Relaxed);
        let mut pending_ones = self.all.pending_ones.lock();
        while !pending_ones.set(self.number, self, bytes) {
            broker::counters::count(|c| c.memory_unauthenticated.add(1));
            let Some(gone) =
                pending_ones.leaves_for(self.number, bytes).and_then(|number| pending_ones.remove(number))
            else {
                pending_ones.remove(self.number);
                return Err(Crowded);
            };
            gone.told.notify_one();
        }
        Ok(())
    }

    /// Waits until the place is given to others. Cancel safe.
    pub(crate) async fn lost(&self) {
        self.told.notified().await;
    }

    fn held(&self) -> usize {
        if !self.listed.load(Relaxed) {
            return 0;
        }
        self.all.pending_ones.lock().all.get(&self.number).map_or(0, |pending| pending.charge.bytes())
    }

    fn leave(&self) {
        if self.listed.load(Relaxed) {
            self.all.pending_ones.lock().remove(self.number);
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
        let places: Vec<UnauthenticatedPlace> = (0..100).map(|_| all.enter(None)).collect();
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

    /// Otherwise one address with many CONNECTs sends everybody else away.
    #[test]
    fn who_leaves_is_of_the_address_that_holds_most() {
        let account = Arc::new(Account::new(16 << 20));
        let all = Unauthenticated::new(&account);
        let from = |host: u8| Some(std::net::SocketAddr::from(([192, 0, 2, host], 1)).into());
        let alone = all.enter(from(1));
        assert!(alone.hold(100 << 10).is_ok());
        let proxied = all.enter(None);
        assert!(proxied.hold(50 << 10).is_ok());
        proxied.named(from(3).unwrap());
        let many: Vec<UnauthenticatedPlace> = (0..100).map(|_| all.enter(from(2))).collect();
        for place in &many {
            assert!(place.hold(100 << 10).is_ok());
            assert!(account.used() <= 1 << 20);
        }
        let lost = |place: &UnauthenticatedPlace| {
            pin!(place.lost()).poll(&mut Context::from_waker(Waker::noop())).is_ready()
        };
        assert!(!lost(&alone) && !lost(&proxied), "they came first, and hold little");
        assert_eq!(many.iter().filter(|place| lost(place)).count(), 92);
        assert!(alone.hold(900 << 10).is_err(), "nobody leaves for one whose address would hold most");
        assert!(!lost(&proxied));
        assert!(alone.hold(400 << 10).is_ok(), "others of the largest address leave");
        drop(many);
        // The address of these two holds no more than `alone`, but would hold more.
        let two = [all.enter(from(4)), all.enter(from(4))];
        assert!(two[0].hold(200 << 10).is_ok() && two[1].hold(200 << 10).is_ok());
        assert!(two[1].hold(450 << 10).is_ok());
        assert!(lost(&two[0]) && !lost(&alone));
        drop(two);
        drop((alone, proxied));
        assert_eq!(account.used(), 0);
        let pending_ones = all.pending_ones.lock();
        assert!(
            pending_ones.all.is_empty()
                && pending_ones.addresses.is_empty()
                && pending_ones.by_bytes.is_empty()
        );
    }
}
