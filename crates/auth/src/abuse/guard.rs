//! Refusals of the moment: for clients hit by a ban, and for addresses that wait after failed logins.

use std::{net::IpAddr, sync::Arc, time::Duration};

use access::{
    BackoffRule, Flapping, Principal,
    bans::{Ban, BanSubject},
};
use arc_swap::ArcSwap;
use edge::door::SourceAddress;
use gateway_core::{Peer, Timestamp, warn_limited};
use parking_lot::Mutex;

use super::{
    BanRegistry,
    logins::{LoginHistory, LoginName},
};
use crate::counters::count;

/// Client ids whose connects are remembered.
const REMEMBERED: usize = 65_536;

/// Bar that keeps a client out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Barred {
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

/// Guards the door and the CONNECT.
pub struct AbuseGuard {
    bans: Arc<BanRegistry>,
    /// More bans that hold here: those of homes, which come and go.
    of_homes: ArcSwap<Vec<Arc<BanRegistry>>>,
    logins: Option<Mutex<LoginHistory>>,
    flapping: Option<(Mutex<Flapping>, Duration)>,
}

impl AbuseGuard {
    /// One with these bans, and rules as configured.
    pub fn new(config: &config::Bans, bans: Arc<BanRegistry>) -> Self {
        let rule = BackoffRule {
            free: config.failed_logins,
            first: config.first_wait.0,
            longest: config.longest_wait.0,
        };
        let logins = (rule.free > 0).then(|| Mutex::new(LoginHistory::new(rule)));
        let (connects, within) = (config.flapping_connects, config.flapping_within.0);
        let flapping = (connects > 0)
            .then(|| (Mutex::new(Flapping::new(connects, within, REMEMBERED)), config.flapping_ban.0));
        Self { bans, of_homes: ArcSwap::default(), logins, flapping }
    }

    /// A guard of doors to homes, whose bans hold there, too. Whoever connects too often is found by its home.
    pub fn before_homes(config: &config::Bans, bans: Arc<BanRegistry>) -> Self {
        Self { flapping: None, ..Self::new(config, bans) }
    }

    /// From now on the bans of these homes hold, too, and no others.
    pub fn set_homes(&self, bans: Vec<Arc<BanRegistry>>) {
        self.of_homes.store(Arc::new(bans));
    }

    fn find(&self, find: impl Fn(&BanRegistry) -> Option<Ban>) -> Option<Barred> {
        let found = find(&self.bans).or_else(|| self.of_homes.load().iter().find_map(|bans| find(bans)));
        found.map(|ban| banned(&ban))
    }

    /// A guard that lets everybody in.
    #[cfg(any(test, feature = "test-util"))]
    pub fn idle() -> Self {
        let config = config::Bans { failed_logins: 0, ..config::Bans::default() };
        let bans = BanRegistry::open(&config, None).expect("no file is read");
        Self::new(&config, Arc::new(bans))
    }

    /// Returns the bar if a socket of `peer` is to be closed before anything is read from it. A client of a Unix socket
    /// never is.
    pub fn at_door(&self, peer: Peer, now: Timestamp) -> Option<Barred> {
        let ip = address(peer)?;
        let banned = self.find(|bans| bans.of_address(ip));
        let logins = self.logins.as_ref();
        let wait = || logins?.lock().wait_at_door(door(peer), now).map(Barred::Waits);
        banned.or_else(wait)
    }

    /// Returns the bar if a CONNECT is to be refused before its credentials are looked at. The door has been passed,
    /// which may be long ago, or by many at once.
    pub fn at_connect(
        &self,
        who: &BanSubject<'_>,
        login: &LoginName<'_>,
        peer: Peer,
        now: Timestamp,
    ) -> Option<Barred> {
        self.ban(who, peer).or_else(|| self.waits(login, peer, now).map(Barred::Waits))
    }

    /// Tells whether a client is banned.
    pub fn ban(&self, who: &BanSubject<'_>, peer: Peer) -> Option<Barred> {
        let who = BanSubject { address: address(peer), ..*who };
        self.find(|bans| bans.of(&who))
    }

    /// A login has failed.
    pub fn failed(&self, login: &LoginName<'_>, peer: Peer, now: Timestamp) {
        let (Some(logins), Some(_)) = (&self.logins, address(peer)) else { return };
        if logins.lock().failed(login, door(peer), now) {
            count(|c| c.backoff_begun.add(1));
        }
    }

    /// Notes that a client is let in as `principal`. False if the client id connects so often that it is banned from
    /// now on. A login takes back the failures of its own account only: otherwise an attacker who guesses passwords
    /// would log in, or come without one, in between.
    pub fn admitted(&self, login: &LoginName<'_>, principal: &Principal, peer: Peer, now: Timestamp) -> bool {
        let logins = self.logins.as_ref().filter(|_| principal.method.is_proof());
        if let (Some(logins), Some(_)) = (logins, address(peer)) {
            logins.lock().succeeded(login, principal.username.as_deref(), door(peer), now);
        }
        let client_id = login.client_id;
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

    /// Returns the time that a login must still wait before it is looked at.
    pub fn waits(&self, login: &LoginName<'_>, peer: Peer, now: Timestamp) -> Option<Duration> {
        address(peer)?;
        self.logins.as_ref()?.lock().wait(login, door(peer), now)
    }
}

fn banned(ban: &Ban) -> Barred {
    Barred::Banned { kind: ban.target.kind(), reason: ban.reason.clone() }
}

fn address(peer: Peer) -> Option<IpAddr> {
    (peer != Peer::UNIX).then(|| peer.ip())
}

fn door(peer: Peer) -> SourceAddress {
    std::net::SocketAddr::from(peer).into()
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use access::Method;

    use super::*;
    use config::Span;

    fn guard(config: config::Bans) -> AbuseGuard {
        let bans = BanRegistry::open(&config, None).unwrap();
        AbuseGuard::new(&config, Arc::new(bans))
    }

    fn peer(ip: &str) -> Peer {
        SocketAddr::new(ip.parse().unwrap(), 1).into()
    }

    fn at(seconds: u64) -> Timestamp {
        Timestamp(1_000_000 + seconds * 1000)
    }

    fn login<'a>(username: &'a str, client_id: &'a str) -> LoginName<'a> {
        LoginName { username: Some(username).filter(|name| !name.is_empty()), client_id }
    }

    fn user(name: &str) -> Principal {
        Principal { method: Method::Password, username: Some(name.into()), ..Principal::default() }
    }

    /// In virtual time.
    #[test]
    fn an_address_that_fails_waits_at_the_door_and_its_network_with_it() {
        let guard = guard(config::Bans { failed_logins: 2, ..config::Bans::default() });
        let ann = login("ann", "c");
        for _ in 0..3 {
            guard.failed(&ann, peer("2001:db8::1"), at(0));
        }
        let wait = Some(Barred::Waits(Duration::from_secs(1)));
        assert_eq!(guard.at_door(peer("2001:db8::2"), at(0)), wait);
        let who = BanSubject { client_id: "c", ..BanSubject::default() };
        assert_eq!(guard.at_connect(&who, &login("bob", "d"), peer("2001:db8::3"), at(0)), wait);
        assert_eq!(guard.at_door(peer("2001:db8:0:1::1"), at(0)), None);
        assert_eq!(guard.at_door(peer("2001:db8::1"), at(1)), None);
        guard.failed(&ann, peer("2001:db8::1"), at(1));
        assert_eq!(guard.at_door(peer("2001:db8::1"), at(1)), Some(Barred::Waits(Duration::from_secs(2))));
        assert!(guard.admitted(&ann, &Principal::default(), peer("2001:db8::9"), at(1)));
        assert!(
            guard.at_door(peer("2001:db8::1"), at(1)).is_some(),
            "an anonymous client has proved nothing"
        );
        assert!(guard.admitted(&ann, &user("ann"), peer("2001:db8::9"), at(1)));
        assert_eq!(guard.at_door(peer("2001:db8::1"), at(1)), None, "she knows her password");
        assert_eq!(guard.waits(&login("bob", "d"), peer("2001:db8::1"), at(1)), None);
    }

    /// The failure: a client with an account guesses at another's, and logs in between two guesses.
    #[test]
    fn a_login_of_ones_own_does_not_end_the_wait_for_guessing_at_another() {
        let from = peer("192.0.2.1");
        let guesses = [login("bob", "x"), login("eve", "x"), login("", "x")];
        // A name that is merely given proves nothing about the client: a token of ann's comes with any name.
        let own = [login("ann", "x"), login("bob", "x"), login("", "x"), login("", "bob")];
        for (guess, own) in guesses.iter().flat_map(|guess| own.iter().map(move |own| (guess, own))) {
            let guard = guard(config::Bans { failed_logins: 3, ..config::Bans::default() });
            let mut looked_at = 0;
            for _ in 0..20 {
                if guard.waits(guess, from, at(0)).is_none() {
                    guard.failed(guess, from, at(0));
                    looked_at += 1;
                }
                assert!(guard.admitted(own, &user("ann"), from, at(0)));
            }
            assert_eq!(looked_at, 4, "{guess:?} beside {own:?}");
        }
        // Nor does it help to guess at each of many accounts once.
        let guard = guard(config::Bans { failed_logins: 3, ..config::Bans::default() });
        let mut looked_at = 0;
        for number in 0..20 {
            let name = format!("user{number}");
            if guard.waits(&login(&name, "x"), from, at(0)).is_none() {
                guard.failed(&login(&name, "x"), from, at(0));
                looked_at += 1;
            }
            assert!(guard.admitted(&login("ann", "x"), &user("ann"), from, at(0)));
        }
        assert_eq!(looked_at, 4);
    }

    /// The failure: devices behind one address cannot come back for one among them that guesses.
    #[test]
    fn who_has_logged_in_from_an_address_does_not_wait_for_others_there() {
        let guard = guard(config::Bans { failed_logins: 1, ..config::Bans::default() });
        let from = peer("192.0.2.1");
        assert!(guard.admitted(&login("ann", "a"), &user("ann"), from, at(0)));
        let certificate = Principal { method: Method::Certificate, ..user("device") };
        assert!(guard.admitted(&login("", "c"), &certificate, from, at(0)));
        for _ in 0..9 {
            guard.failed(&login("bob", "b"), from, at(0));
        }
        assert_eq!(guard.at_door(from, at(0)), None, "some there need not wait");
        assert_eq!(guard.waits(&login("ann", "other"), from, at(0)), None);
        assert_eq!(guard.waits(&login("", "c"), from, at(0)), None);
        for other in [login("bob", "b"), login("eve", "a"), login("", "a"), login("ann ", "a")] {
            assert!(guard.waits(&other, from, at(0)).is_some(), "{other:?}");
        }
        assert_eq!(guard.waits(&login("bob", "b"), peer("192.0.2.2"), at(0)), None);
        // But for failures of its own.
        for _ in 0..2 {
            guard.failed(&login("ann", "a"), from, at(0));
        }
        assert!(guard.waits(&login("ann", "a"), from, at(0)).is_some());
    }

    /// All of them would share one fate.
    #[test]
    fn clients_of_a_unix_socket_never_wait() {
        let guard = guard(config::Bans { failed_logins: 1, ..config::Bans::default() });
        for _ in 0..10 {
            guard.failed(&login("ann", "c"), Peer::UNIX, at(0));
        }
        assert_eq!(guard.at_door(Peer::UNIX, at(0)), None);
        assert_eq!(guard.waits(&login("ann", "c"), Peer::UNIX, at(0)), None);
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
        let admitted: Vec<bool> =
            (0..4).map(|second| guard.admitted(&login("", "c"), &user("u"), from, at(second))).collect();
        assert_eq!(admitted, [true, true, true, false]);
        let barred = |id: &str| guard.ban(&BanSubject { client_id: id, ..BanSubject::default() }, from);
        assert!(matches!(barred("c"), Some(Barred::Banned { kind: "client_id", .. })));
        assert_eq!(barred("d"), None);
        assert_eq!(guard.bans.list()[0].source, super::super::BanOrigin::Flapping);
    }
}
