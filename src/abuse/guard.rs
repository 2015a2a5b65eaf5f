//! Who is not let in now: whom a ban hits, and whose address waits after failed logins.

use std::{net::IpAddr, sync::Arc, time::Duration};

use access::{Backoff, BackoffRule, Flapping, bans::Presented};
use gateway_core::{Peer, Timestamp, metrics::count, warn_limited};
use parking_lot::Mutex;

use super::Bans;
use crate::{config, door::Address};

/// Addresses whose failures, and client ids whose connects, are remembered.
const REMEMBERED: usize = 65_536;

/// Why somebody is not let in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Barred {
    /// A ban.
    Banned {
        /// For what: see [`access::bans::BanTarget::kind`].
        kind: &'static str,
        /// The reason that was given with the ban.
        reason: Box<str>,
    },
    /// Logins from the address have failed, and this is how much longer it waits.
    Waits(Duration),
}

/// What stands at the door and at CONNECT.
pub(crate) struct AbuseGuard {
    bans: Arc<Bans>,
    failures: Option<Mutex<Backoff<Address>>>,
    flapping: Option<(Mutex<Flapping>, Duration)>,
}

impl AbuseGuard {
    /// One with these bans, and rules as configured.
    pub(crate) fn new(config: &config::Bans, bans: Arc<Bans>) -> Self {
        let rule = BackoffRule {
            free: config.failed_logins,
            first: config.first_wait.0,
            longest: config.longest_wait.0,
        };
        let failures = (rule.free > 0).then(|| Mutex::new(Backoff::new(rule, REMEMBERED)));
        let (connects, within) = (config.flapping_connects, config.flapping_within.0);
        let flapping = (connects > 0)
            .then(|| (Mutex::new(Flapping::new(connects, within, REMEMBERED)), config.flapping_ban.0));
        Self { bans, failures, flapping }
    }

    /// A guard that lets everybody in.
    #[cfg(test)]
    pub(crate) fn idle() -> Self {
        let config = config::Bans { failed_logins: 0, ..config::Bans::default() };
        let bans = Bans::open(&config, None).expect("no file is read");
        Self::new(&config, Arc::new(bans))
    }

    /// Whether a socket of `peer` is closed before anything is read from it. A client of a Unix socket never is.
    pub(crate) fn at_door(&self, peer: Peer, now: Timestamp) -> Option<Barred> {
        let ip = address(peer)?;
        let banned = self.bans.of_address(ip).map(|ban| banned(&ban));
        banned.or_else(|| self.waits(peer, now))
    }

    /// Whether a CONNECT of somebody is refused without looking at what it would prove. The door has been passed, which
    /// may be long ago, or by many at once.
    pub(crate) fn at_connect(&self, who: &Presented<'_>, peer: Peer, now: Timestamp) -> Option<Barred> {
        let who = Presented { address: address(peer), ..*who };
        let hit = self.bans.of(&who).map(|ban| banned(&ban));
        hit.or_else(|| self.waits(peer, now))
    }

    /// A login has failed.
    pub(crate) fn failed(&self, peer: Peer, now: Timestamp) {
        let (Some(failures), Some(_)) = (&self.failures, address(peer)) else { return };
        if failures.lock().failed(door(peer), now).is_some() {
            count(|c| c.backoff_begun.add(1));
        }
    }

    /// Somebody is let in, and has `proved` who he is or need not. False if he connects so often that he is banned from now
    /// on. Only proof ends the wait of his address: whoever guesses passwords would come without one in between.
    pub(crate) fn admitted(&self, client_id: &str, proved: bool, peer: Peer, now: Timestamp) -> bool {
        if let (Some(failures), Some(_)) = (self.failures.as_ref().filter(|_| proved), address(peer)) {
            let mut failures = failures.lock();
            if !failures.is_empty() {
                failures.succeeded(door(peer));
            }
        }
        let Some((flapping, ban)) = &self.flapping else { return true };
        if !flapping.lock().connected(client_id, now) {
            return true;
        }
        count(|c| c.flapping_bans.add(1));
        if let Err(error) = self.bans.add_flapping(client_id, ban.as_secs().max(1)) {
            warn_limited!(client_id, %error, "a client connects too often and is not banned");
        }
        false
    }

    fn waits(&self, peer: Peer, now: Timestamp) -> Option<Barred> {
        let failures = self.failures.as_ref()?.lock();
        if failures.is_empty() {
            return None;
        }
        failures.wait(door(peer), now).map(Barred::Waits)
    }
}

fn banned(ban: &access::bans::Ban) -> Barred {
    Barred::Banned { kind: ban.target.kind(), reason: ban.reason.clone() }
}

fn address(peer: Peer) -> Option<IpAddr> {
    (peer != Peer::UNIX).then(|| peer.ip())
}

fn door(peer: Peer) -> Address {
    std::net::SocketAddr::from(peer).into()
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use crate::config::Span;

    fn guard(config: config::Bans) -> AbuseGuard {
        let bans = Bans::open(&config, None).unwrap();
        AbuseGuard::new(&config, Arc::new(bans))
    }

    fn peer(ip: &str) -> Peer {
        SocketAddr::new(ip.parse().unwrap(), 1).into()
    }

    fn at(seconds: u64) -> Timestamp {
        Timestamp(1_000_000 + seconds * 1000)
    }

    /// In virtual time.
    #[test]
    fn an_address_that_fails_waits_at_the_door_and_its_network_with_it() {
        let guard = guard(config::Bans { failed_logins: 2, ..config::Bans::default() });
        for _ in 0..3 {
            guard.failed(peer("2001:db8::1"), at(0));
        }
        let wait = Some(Barred::Waits(Duration::from_secs(1)));
        assert_eq!(guard.at_door(peer("2001:db8::2"), at(0)), wait);
        let who = Presented { client_id: "c", ..Presented::default() };
        assert_eq!(guard.at_connect(&who, peer("2001:db8::3"), at(0)), wait);
        assert_eq!(guard.at_door(peer("2001:db8:0:1::1"), at(0)), None);
        assert_eq!(guard.at_door(peer("2001:db8::1"), at(1)), None);
        guard.failed(peer("2001:db8::1"), at(1));
        assert_eq!(guard.at_door(peer("2001:db8::1"), at(1)), Some(Barred::Waits(Duration::from_secs(2))));
        assert!(guard.admitted("c", false, peer("2001:db8::9"), at(1)));
        assert!(
            guard.at_door(peer("2001:db8::1"), at(1)).is_some(),
            "an anonymous client has proved nothing"
        );
        assert!(guard.admitted("c", true, peer("2001:db8::9"), at(1)));
        assert_eq!(guard.at_door(peer("2001:db8::1"), at(1)), None, "somebody there knows his password");
    }

    /// All of them would share one fate.
    #[test]
    fn clients_of_a_unix_socket_never_wait() {
        let guard = guard(config::Bans { failed_logins: 1, ..config::Bans::default() });
        for _ in 0..10 {
            guard.failed(Peer::UNIX, at(0));
        }
        assert_eq!(guard.at_door(Peer::UNIX, at(0)), None);
    }

    #[test]
    fn a_client_that_flaps_is_banned_and_others_are_not() {
        let config = config::Bans {
            flapping_connects: 3,
            flapping_ban: Span(Duration::from_secs(100)),
            ..config::Bans::default()
        };
        let guard = guard(config);
        let from = peer("192.0.2.1");
        let admitted: Vec<bool> = (0..4).map(|second| guard.admitted("c", true, from, at(second))).collect();
        assert_eq!(admitted, [true, true, true, false]);
        let barred =
            |id: &str| guard.at_connect(&Presented { client_id: id, ..Presented::default() }, from, at(9));
        assert!(matches!(barred("c"), Some(Barred::Banned { kind: "client_id", .. })));
        assert_eq!(barred("d"), None);
        assert_eq!(guard.bans.list()[0].source, super::super::Source::Flapping);
    }
}
