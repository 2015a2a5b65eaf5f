//! Memory of the last logins: their outcomes by address and network, and the identities that were let in, each with its address.
//! The rank of the next login comes from it.

use std::{
    collections::{HashMap, HashSet, VecDeque, hash_map::RandomState},
    hash::{BuildHasher, Hash},
    sync::Arc,
};

use broker::{Account, Charge, MemoryKind};
use edge::door::{SourceAddress, SourceNetwork};

use super::turns::LoginRank;

/// Addresses and networks that are remembered.
const SOURCES: usize = 8_192;
/// Identities that are remembered.
const IDENTITIES: usize = 65_536;
/// Outcomes of a source that count; older ones count half.
const OUTCOMES: u16 = 32;

/// Bytes that an entry takes in its map and its order, at most.
const ENTRY: usize = 96;

/// The client that asks for a job, as far as the order of jobs is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LoginClient {
    pub(super) address: Option<SourceAddress>,
    pub(super) identity: Option<LoginDigest>,
}

impl LoginClient {
    /// The network of the address.
    pub(super) fn network(self) -> Option<SourceNetwork> {
        self.address.map(SourceAddress::network)
    }
}

/// A digest of an address and a user name that only this process can make.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct LoginDigest(pub(super) u64);

/// See the module.
#[derive(Debug)]
pub(super) struct LastLogins {
    random: RandomState,
    sources: Bounded<LoginSource, Outcomes>,
    known: Bounded<LoginDigest, ()>,
    /// Identities with a job that waits before all others: one each, so that who guesses the password of a known user from its
    /// own address does not keep others waiting.
    ahead: HashSet<LoginDigest>,
    /// None before there is an account, and then nothing is remembered.
    charge: Option<Charge>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum LoginSource {
    Address(SourceAddress),
    Network(SourceNetwork),
}

#[derive(Debug, Clone, Copy, Default)]
struct Outcomes {
    good: u16,
    bad: u16,
}

impl LastLogins {
    pub(super) fn new() -> Self {
        Self {
            random: RandomState::new(),
            sources: Bounded::new(SOURCES),
            known: Bounded::new(IDENTITIES),
            ahead: HashSet::new(),
            charge: None,
        }
    }

    /// Charges what is remembered to this account from now on.
    pub(super) fn charge_to(&mut self, account: &Arc<Account>) {
        self.charge = Some(Charge::new(account, MemoryKind::Logins));
    }

    /// Names a client by its address and the user name that it claims.
    pub(super) fn login_client(&self, address: Option<SourceAddress>, user: Option<&str>) -> LoginClient {
        let identity = user.map(|user| LoginDigest(self.random.hash_one((address, user))));
        LoginClient { address, identity }
    }

    /// The rank of a job that begins to wait; [`Self::leaves`] must be told when it no longer does.
    pub(super) fn rank(&mut self, login_client: LoginClient) -> LoginRank {
        match login_client.identity {
            Some(identity) if self.known.get(&identity).is_some() && self.ahead.insert(identity) => {
                LoginRank::Known
            }
            _ if self.is_failing(login_client.address) => LoginRank::Failing,
            _ => LoginRank::Fresh,
        }
    }

    /// A job of this rank waits no longer.
    pub(super) fn leaves(&mut self, login_client: LoginClient, rank: LoginRank) {
        if let (LoginRank::Known, Some(identity)) = (rank, login_client.identity) {
            self.ahead.remove(&identity);
        }
    }

    /// A login has come to its end. While memory is short, only what is known already changes.
    pub(super) fn told(&mut self, login_client: LoginClient, good: bool) {
        let more = (self.sources.len() + self.known.len() + 3) * ENTRY;
        let has_room = self.charge.as_mut().is_some_and(|charge| charge.set(more));
        if let Some(identity) = login_client.identity {
            if !good {
                self.known.remove(&identity);
            } else if has_room {
                self.known.put(identity, ());
            }
        }
        let sources = login_client
            .address
            .map(|address| [LoginSource::Address(address), LoginSource::Network(address.network())]);
        for source in sources.into_iter().flatten() {
            let known = self.sources.get(&source).copied();
            if has_room || known.is_some() {
                let mut outcomes = known.unwrap_or_default();
                outcomes.add(good);
                self.sources.put(source, outcomes);
            }
        }
        let held = (self.sources.len() + self.known.len()) * ENTRY;
        if let Some(charge) = &mut self.charge {
            charge.set(held);
        }
    }

    /// Returns whether most of the last logins from an address were wrong; of its network, if nobody has come from the address.
    fn is_failing(&self, address: Option<SourceAddress>) -> bool {
        let Some(address) = address else { return false };
        let network = || self.sources.get(&LoginSource::Network(address.network()));
        let outcomes = self.sources.get(&LoginSource::Address(address)).or_else(network);
        outcomes.is_some_and(|outcomes| outcomes.bad > outcomes.good)
    }
}

impl Outcomes {
    fn add(&mut self, good: bool) {
        if self.good + self.bad >= OUTCOMES {
            (self.good, self.bad) = (self.good / 2, self.bad / 2);
        }
        if good {
            self.good += 1;
        } else {
            self.bad += 1;
        }
    }
}

/// A map in which the oldest entry makes room for a new one.
#[derive(Debug)]
struct Bounded<K, V> {
    entries: HashMap<K, V>,
    /// Each key once, in the order in which they came; with some that were removed.
    order: VecDeque<K>,
    most: usize,
}

impl<K: Copy + Eq + Hash, V> Bounded<K, V> {
    fn new(most: usize) -> Self {
        Self { entries: HashMap::new(), order: VecDeque::new(), most }
    }

    fn get(&self, key: &K) -> Option<&V> {
        self.entries.get(key)
    }

    fn put(&mut self, key: K, value: V) {
        if self.entries.insert(key, value).is_some() {
            return;
        }
        self.order.push_back(key);
        while self.order.len() > self.most {
            let Some(oldest) = self.order.pop_front() else { return };
            self.entries.remove(&oldest);
        }
    }

    /// Its place in the order goes with it.
    fn remove(&mut self, key: &K) {
        if self.entries.remove(key).is_some()
            && let Some(at) = self.order.iter().position(|known| known == key)
        {
            self.order.remove(at);
        }
    }

    fn len(&self) -> usize {
        self.order.len()
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    fn last_logins() -> LastLogins {
        let mut last = LastLogins::new();
        last.charge_to(&Arc::new(Account::new(1 << 30)));
        last
    }

    fn login_client(last: &LastLogins, ip: &str, user: &str) -> LoginClient {
        let address = SocketAddr::new(ip.parse().unwrap(), 1).into();
        last.login_client(Some(address), Some(user))
    }

    #[test]
    fn who_was_let_in_from_there_goes_first_until_a_password_is_wrong() {
        let mut last = last_logins();
        let ann = login_client(&last, "192.0.2.1", "ann");
        assert_eq!(last.rank(ann), LoginRank::Fresh);
        last.told(ann, true);
        assert_eq!(last.rank(ann), LoginRank::Known);
        assert_eq!(last.rank(ann), LoginRank::Fresh, "one at a time");
        last.leaves(ann, LoginRank::Known);
        assert_eq!(last.rank(ann), LoginRank::Known);
        last.leaves(ann, LoginRank::Known);
        let elsewhere = login_client(&last, "192.0.2.2", "ann");
        assert_eq!(last.rank(elsewhere), LoginRank::Fresh);
        last.told(ann, false);
        assert_eq!(last.rank(ann), LoginRank::Fresh);
    }

    #[test]
    fn an_address_that_fails_is_told_from_its_neighbours() {
        let mut last = last_logins();
        let (bad, good) = (login_client(&last, "192.0.2.1", "x"), login_client(&last, "192.0.2.2", "y"));
        let stranger = login_client(&last, "192.0.2.3", "z");
        last.told(good, true);
        for _ in 0..100 {
            last.told(bad, false);
        }
        assert_eq!(last.rank(bad), LoginRank::Failing);
        assert_eq!(last.rank(login_client(&last, "192.0.2.2", "new")), LoginRank::Fresh);
        assert_eq!(last.rank(stranger), LoginRank::Failing, "of a network where most are wrong");
        assert_eq!(last.rank(login_client(&last, "198.51.100.1", "z")), LoginRank::Fresh);
        for _ in 0..40 {
            last.told(bad, true);
        }
        assert_eq!(last.rank(login_client(&last, "192.0.2.1", "new")), LoginRank::Fresh);
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut last = last_logins();
        for n in 0..100_000_u32 {
            let address = SocketAddr::new(std::net::Ipv4Addr::from_bits(n << 8).into(), 1).into();
            let login_client = last.login_client(Some(address), Some("u"));
            last.told(login_client, true);
        }
        assert_eq!((last.sources.entries.len(), last.known.entries.len()), (SOURCES, IDENTITIES));
        assert_eq!((last.sources.order.len(), last.known.order.len()), (SOURCES, IDENTITIES));
        let held = last.charge.as_ref().unwrap().bytes();
        assert_eq!(held, (SOURCES + IDENTITIES) * ENTRY);
        let small = Arc::new(Account::new(16 * 10 * ENTRY));
        let mut last = LastLogins::new();
        last.charge_to(&small);
        for n in 0..100_u32 {
            let address = SocketAddr::new(std::net::Ipv4Addr::from_bits(n << 8).into(), 1).into();
            let login_client = last.login_client(Some(address), Some("u"));
            last.told(login_client, true);
        }
        assert!((8 * ENTRY..=10 * ENTRY).contains(&small.used()), "{}", small.used());
    }
}
