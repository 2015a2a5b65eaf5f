//! Memory of gRPC connections that have not shown credentials: a share of the account for all of them together. When it is short,
//! the connection that holds most is closed for another, and among equals the oldest, so that a flood ends its own connections.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, HashMap},
    sync::{
        Arc,
        atomic::{
            AtomicU8, AtomicU64,
            Ordering::{Acquire, Relaxed, Release},
        },
    },
};

use broker::{Account, Charge, MemoryKind};
use parking_lot::Mutex;
use tokio::sync::Notify;

/// Bytes that one connection may hold before it has shown credentials.
const MOST_OF_ONE: usize = 512 << 10;
/// The part of the budget, as its divisor, that is set aside, so that a health check is answered and a backend may log in when
/// everything else is used up; and its least bytes.
const RESERVE: usize = 128;
const LEAST_RESERVE: usize = 256 << 10;

/// The share of all unauthenticated connections.
#[derive(Debug)]
pub(crate) struct UnauthenticatedMemory {
    reserve: usize,
    next: AtomicU64,
    holders: Mutex<Holders>,
}

#[derive(Debug)]
struct Holders {
    total: usize,
    charge: Charge,
    by_number: HashMap<u64, Holder>,
    /// Bytes and number: the last one is closed first.
    by_size: BTreeSet<(usize, Reverse<u64>)>,
}

#[derive(Debug)]
struct Holder {
    bytes: usize,
    connection: Arc<UnauthenticatedConnection>,
}

#[derive(Debug)]
struct UnauthenticatedConnection {
    state: AtomicU8,
    told: Notify,
}

const UNAUTHENTICATED: u8 = 0;
const AUTHENTICATED: u8 = 1;
const CLOSED: u8 = 2;

/// The part of one connection, until it has shown credentials.
#[derive(Debug)]
pub(super) struct UnauthenticatedPart {
    all: Arc<UnauthenticatedMemory>,
    number: u64,
    connection: Arc<UnauthenticatedConnection>,
}

impl UnauthenticatedMemory {
    /// A share of `account`, of which a small reserve is set aside at once.
    pub(crate) fn new(account: &Arc<Account>) -> Arc<Self> {
        let reserve = (account.limit() / RESERVE).max(LEAST_RESERVE);
        let charge = Charge::forced(account, MemoryKind::GrpcUnauthenticated, reserve);
        let holders = Holders { total: 0, charge, by_number: HashMap::new(), by_size: BTreeSet::new() };
        Arc::new(Self { reserve, next: AtomicU64::new(0), holders: Mutex::new(holders) })
    }

    pub(super) fn open(self: &Arc<Self>) -> UnauthenticatedPart {
        let connection = Arc::new(UnauthenticatedConnection {
            state: AtomicU8::new(UNAUTHENTICATED),
            told: Notify::new(),
        });
        UnauthenticatedPart { all: Arc::clone(self), number: self.next.fetch_add(1, Relaxed), connection }
    }
}

impl Holders {
    /// Makes the total `bytes`; false, and changes nothing, if it must grow and may not.
    fn charge(&mut self, bytes: usize, reserve: usize) -> bool {
        let fits = self.charge.set(bytes.max(reserve));
        if fits {
            self.total = bytes;
        }
        fits
    }

    fn set(&mut self, number: u64, bytes: usize, connection: &Arc<UnauthenticatedConnection>) {
        self.remove(number);
        if bytes > 0 {
            self.by_size.insert((bytes, Reverse(number)));
            self.by_number.insert(number, Holder { bytes, connection: Arc::clone(connection) });
        }
    }

    fn remove(&mut self, number: u64) -> Option<Holder> {
        let holder = self.by_number.remove(&number)?;
        self.by_size.remove(&(holder.bytes, Reverse(number)));
        Some(holder)
    }

    fn held(&self, number: u64) -> usize {
        self.by_number.get(&number).map_or(0, |holder| holder.bytes)
    }

    /// Closes the largest connection but `number`, unless it holds less than `bytes`.
    fn close_largest(&mut self, number: u64, bytes: usize, reserve: usize) -> bool {
        let largest = self.by_size.iter().rev().find(|(_, other)| other.0 != number).copied();
        let Some((size, Reverse(other))) = largest.filter(|(size, _)| *size >= bytes) else { return false };
        if let Some(holder) = self.remove(other) {
            holder.connection.state.store(CLOSED, Release);
            holder.connection.told.notify_one();
        }
        let left = self.total - size;
        self.charge(left, reserve)
    }
}

impl UnauthenticatedPart {
    /// Tells whether it has shown credentials.
    pub(super) fn is_authenticated(&self) -> bool {
        self.connection.state.load(Acquire) == AUTHENTICATED
    }

    /// Makes room for `more` bytes. False, and nothing is changed, if it may not have them; `None` if the connection is charged
    /// elsewhere, since it has shown credentials.
    pub(super) fn take(&self, more: usize) -> Option<bool> {
        if self.connection.state.load(Acquire) == AUTHENTICATED {
            return None;
        }
        let UnauthenticatedMemory { reserve, holders, .. } = &*self.all;
        let mut holders = holders.lock();
        match self.connection.state.load(Acquire) {
            AUTHENTICATED => return None,
            CLOSED => return Some(false),
            _ => {}
        }
        let wanted = holders.held(self.number).saturating_add(more);
        let fits = wanted <= MOST_OF_ONE
            && loop {
                let total = holders.total + more;
                if holders.charge(total, *reserve) {
                    break true;
                }
                if !holders.close_largest(self.number, wanted, *reserve) {
                    break false;
                }
            };
        if fits {
            holders.set(self.number, wanted, &self.connection);
        }
        Some(fits)
    }

    /// Gives `less` bytes back; false if the connection is charged elsewhere.
    pub(super) fn give_back(&self, less: usize) -> bool {
        if self.connection.state.load(Acquire) == AUTHENTICATED {
            return false;
        }
        let UnauthenticatedMemory { reserve, holders, .. } = &*self.all;
        let mut holders = holders.lock();
        match self.connection.state.load(Acquire) {
            AUTHENTICATED => return false,
            CLOSED => return true,
            _ => {}
        }
        let held = holders.held(self.number);
        let less = less.min(held);
        holders.set(self.number, held - less, &self.connection);
        let left = holders.total - less;
        holders.charge(left, *reserve);
        true
    }

    /// The connection has shown credentials: `charge` is called with what it holds and puts that on another account. False if it
    /// could not, or the connection is closed; `None` if it had been authenticated before.
    pub(super) fn authenticate(&self, charge: impl FnOnce(usize) -> bool) -> Option<bool> {
        let UnauthenticatedMemory { reserve, holders, .. } = &*self.all;
        let mut holders = holders.lock();
        match self.connection.state.load(Acquire) {
            AUTHENTICATED => return None,
            CLOSED => return Some(false),
            _ => {}
        }
        let held = holders.held(self.number);
        if !charge(held) {
            return Some(false);
        }
        holders.remove(self.number);
        let left = holders.total - held;
        holders.charge(left, *reserve);
        self.connection.state.store(AUTHENTICATED, Release);
        Some(true)
    }

    /// Waits until the connection has to close, since others need the memory. Cancel safe.
    pub(super) async fn closed(&self) {
        self.connection.told.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;
    const KIB: usize = 1 << 10;

    fn is_closed(part: &UnauthenticatedPart) -> bool {
        part.connection.state.load(Acquire) == CLOSED
    }

    /// Rules out that a flood of connections with much to hold sends away one that has only begun.
    #[test]
    fn the_largest_leaves_first_and_among_equals_the_oldest() {
        // An eighth of this is for unauthenticated connections.
        let account = Arc::new(Account::new(8 * MIB));
        let all = UnauthenticatedMemory::new(&account);
        let kind = MemoryKind::GrpcUnauthenticated;
        assert_eq!(account.held(kind), LEAST_RESERVE, "set aside");
        let newcomer = all.open();
        assert_eq!(newcomer.take(32 * KIB), Some(true));
        let flood: Vec<UnauthenticatedPart> = (0..100).map(|_| all.open()).collect();
        for part in &flood {
            assert_eq!(part.take(32 * KIB), Some(true));
            assert_eq!(part.take(68 * KIB), Some(true));
            assert!(account.held(kind) <= MIB);
        }
        assert!(!is_closed(&newcomer));
        let closed = flood.iter().take_while(|part| is_closed(part)).count();
        assert_eq!(closed, flood.iter().filter(|part| is_closed(part)).count(), "the oldest");
        assert!((89..100).contains(&closed), "{closed}");
        // One that wants more than all others have sends nobody away.
        assert_eq!(flood[99].take(219 * KIB), Some(false));
        assert_eq!(flood[99].take(MOST_OF_ONE), Some(false));
        assert!(!is_closed(&flood[98]));
        // The holdings of a closed connection end later, and are not counted twice.
        assert_eq!(flood[0].take(1), Some(false));
        assert!(flood[0].give_back(100 * KIB));
        for part in &flood[closed..] {
            assert!(part.give_back(100 * KIB));
        }
        assert!(newcomer.give_back(32 * KIB));
        assert_eq!(account.held(kind), LEAST_RESERVE);
        assert_eq!(all.holders.lock().total, 0);
    }

    /// Rules out that backends and devices which use up the budget leave no health check and no login to anybody.
    #[test]
    fn a_reserve_is_left_when_all_other_memory_is_used() {
        let account = Arc::new(Account::new(8 * MIB));
        let all = UnauthenticatedMemory::new(&account);
        account.force(MemoryKind::Queued, 8 * MIB);
        let parts: Vec<UnauthenticatedPart> = (0..40).map(|_| all.open()).collect();
        assert!(parts.iter().all(|part| part.take(48 * KIB) == Some(true)));
        assert_eq!(parts.iter().filter(|part| !is_closed(part)).count(), LEAST_RESERVE / (48 * KIB));
    }

    #[test]
    fn a_connection_that_shows_credentials_is_charged_elsewhere_from_then_on() {
        let account = Arc::new(Account::new(8 * MIB));
        let all = UnauthenticatedMemory::new(&account);
        let part = all.open();
        assert_eq!(part.take(300 * KIB), Some(true));
        assert_eq!(part.authenticate(|_| false), Some(false), "there is no room for it");
        assert_eq!(account.held(MemoryKind::GrpcUnauthenticated), 300 * KIB);
        let mut moved = 0;
        let charge = |held| {
            moved = held;
            true
        };
        assert_eq!(part.authenticate(charge), Some(true));
        assert_eq!((moved, account.held(MemoryKind::GrpcUnauthenticated)), (300 * KIB, LEAST_RESERVE));
        assert_eq!((part.take(1), part.give_back(1), part.authenticate(|_| true)), (None, false, None));
    }
}
