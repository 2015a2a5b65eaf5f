//! Shares out the places that all callers need, so that no single caller takes them all.
//!
//! A caller is identified by its credentials, or by its address where no credentials are asked for. Each caller has at most
//! a configured number of places. The last quarter is for callers who have few, as on the memory account: neither one
//! caller nor several together take the places that others need.

use std::{
    net::SocketAddr,
    sync::{Arc, LazyLock},
};

use ahash::RandomState;
use edge::door::SourceAddress;
use hashbrown::HashMap;
use parking_lot::Mutex;

use super::{Caller, CredentialKind};

/// For the keys of this process.
static KEYS: LazyLock<RandomState> = LazyLock::new(RandomState::new);

/// Keyed hash of a caller who holds places, so that no name is copied for each call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CallerKey(u64);

impl CallerKey {
    /// The key of a caller at `peer`, which counts where callers are not asked who they are.
    pub fn of(caller: &Caller, peer: Option<SocketAddr>) -> Self {
        let address = peer.filter(|_| caller.credential == CredentialKind::Unasked).map(SourceAddress::from);
        Self(KEYS.hash_one((caller.credential.as_str(), &caller.grant.id, address)))
    }

    /// The key of somebody at `peer` who is told apart by the address alone.
    pub fn at(peer: SocketAddr) -> Self {
        Self(KEYS.hash_one(SourceAddress::from(peer)))
    }

    /// The key of somebody who is known by this name alone.
    #[cfg(any(test, feature = "test-util"))]
    pub fn named(name: &str) -> Self {
        Self(KEYS.hash_one(name))
    }
}

/// Extension of a request inside the process: the address of the client on whose behalf it is made.
#[derive(Debug, Clone, Copy)]
pub struct ForwardedFor(pub SocketAddr);

/// Places, and how many of them one caller may have.
#[derive(Debug, Clone, Copy)]
pub struct CallerPlaces {
    /// In all.
    pub most: usize,
    /// Of one caller.
    pub per_caller: usize,
}

/// Why a caller gets no place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoPlace {
    /// All are taken.
    All,
    /// The caller has its share.
    Caller,
}

/// In the last quarter nobody gets another place who has one part in this many of what is left.
const PART: usize = 16;

impl CallerPlaces {
    /// Tells whether a caller who holds `held` may have one more when `taken` are taken.
    ///
    /// # Errors
    /// Why not.
    pub fn check(self, taken: usize, held: usize) -> Result<(), NoPlace> {
        let left = self.most.saturating_sub(taken);
        if left == 0 {
            return Err(NoPlace::All);
        }
        let is_short = left <= self.most / 4;
        if held >= self.per_caller || (is_short && held >= (left / PART).max(1)) {
            return Err(NoPlace::Caller);
        }
        Ok(())
    }
}

/// Places that are taken and given back, by caller.
#[derive(Debug)]
pub struct CallerShares {
    places: CallerPlaces,
    taken: Mutex<TakenPlaces>,
}

#[derive(Debug, Default)]
struct TakenPlaces {
    all: usize,
    /// Callers who hold none are not here.
    by_caller: HashMap<CallerKey, usize, RandomState>,
}

impl CallerShares {
    pub fn new(places: CallerPlaces) -> Arc<Self> {
        Arc::new(Self { places, taken: Mutex::default() })
    }

    /// A place for `caller`.
    ///
    /// # Errors
    /// Why there is none.
    pub fn take(self: &Arc<Self>, caller: CallerKey) -> Result<Share, NoPlace> {
        let mut taken = self.taken.lock();
        let held = taken.by_caller.get(&caller).copied().unwrap_or_default();
        self.places.check(taken.all, held)?;
        taken.all += 1;
        taken.by_caller.insert(caller, held + 1);
        Ok(Share { of: Arc::clone(self), caller })
    }
}

/// One place of a caller, given back on drop.
#[derive(Debug)]
pub struct Share {
    of: Arc<CallerShares>,
    caller: CallerKey,
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut taken = self.of.taken.lock();
        taken.all -= 1;
        if let Some(held) = taken.by_caller.get_mut(&self.caller) {
            *held -= 1;
            if *held == 0 {
                taken.by_caller.remove(&self.caller);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::BackendAuthenticator;
    use super::*;

    fn key(number: u64) -> CallerKey {
        CallerKey(number)
    }

    /// Rules out that one caller, or a few, take every place and others find none.
    #[test]
    fn the_last_quarter_of_places_is_for_callers_who_have_few() {
        let shares = CallerShares::new(CallerPlaces { most: 100, per_caller: 60 });
        let take = |caller: u64| std::iter::from_fn(|| shares.take(key(caller)).ok()).collect::<Vec<_>>();
        let first = take(1);
        assert_eq!(first.len(), 60);
        assert_eq!(shares.take(key(1)).unwrap_err(), NoPlace::Caller);
        let second = take(2);
        assert_eq!(second.len(), 15, "three quarters are taken");
        let others: Vec<Share> = (3..28).map(|caller| shares.take(key(caller)).unwrap()).collect();
        assert_eq!(shares.take(key(99)).unwrap_err(), NoPlace::All);
        drop((first, second, others));
        let taken = shares.taken.lock();
        assert!(taken.all == 0 && taken.by_caller.is_empty());
    }

    #[test]
    fn callers_who_are_not_asked_are_told_apart_by_their_address() {
        let backends = BackendAuthenticator::open(&config::Backends::default()).unwrap();
        let anybody = backends.anybody();
        let at = |text: &str| CallerKey::of(anybody, Some(text.parse().unwrap()));
        assert_eq!(at("192.0.2.1:1"), at("192.0.2.1:2"));
        assert_ne!(at("192.0.2.1:1"), at("192.0.2.2:1"));
        assert_eq!(at("[2001:db8::1]:1"), at("[2001:db8::2]:1"), "a network is one");
        let known = Caller { credential: CredentialKind::Token, grant: Arc::clone(&anybody.grant) };
        let known_at = |text: &str| CallerKey::of(&known, Some(text.parse().unwrap()));
        assert_eq!(known_at("192.0.2.1:1"), known_at("192.0.2.2:1"), "wherever it calls from");
    }
}
