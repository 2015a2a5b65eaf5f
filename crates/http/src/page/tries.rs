//! Logins that fail: a limited number a minute from one address, so that nobody tries tokens by the thousand, or has the gateway
//! check signatures without end.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr, SocketAddr},
};

use gateway_core::Timestamp;
use parking_lot::Mutex;

/// Most failures of an address within [`SPAN`].
const MOST: u32 = 20;
/// Milliseconds.
const SPAN: u64 = 60_000;
/// Most addresses that are known; one more forgets the one that began first.
const ADDRESSES: usize = 1_024;

/// See the module.
#[derive(Default)]
pub(super) struct Tries(Mutex<HashMap<IpAddr, Failures>>);

struct Failures {
    since: Timestamp,
    count: u32,
}

/// Returns the address that tries are counted by: in IPv6 a network, of which a host has as many addresses as it likes.
fn whose(peer: SocketAddr) -> IpAddr {
    match peer.ip().to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & (!0 << 64)).into(),
        address => address,
    }
}

impl Tries {
    /// Seconds until a token of this address is looked at again; `None` if it is now.
    pub(super) fn wait(&self, peer: SocketAddr, now: Timestamp) -> Option<u64> {
        let tries = self.0.lock();
        let failures = tries.get(&whose(peer)).filter(|failures| failures.count >= MOST)?;
        let end = failures.since.plus_millis(SPAN);
        (now < end).then(|| (end.0 - now.0).div_ceil(1_000))
    }

    /// A token of this address is none.
    pub(super) fn failed(&self, peer: SocketAddr, now: Timestamp) {
        let mut tries = self.0.lock();
        let whose = whose(peer);
        if tries.len() >= ADDRESSES && !tries.contains_key(&whose) {
            tries.retain(|_, failures| now < failures.since.plus_millis(SPAN));
            let oldest = tries.iter().min_by_key(|(_, failures)| failures.since).map(|(address, _)| *address);
            if tries.len() >= ADDRESSES
                && let Some(oldest) = oldest
            {
                tries.remove(&oldest);
            }
        }
        let failures = tries.entry(whose).or_insert(Failures { since: now, count: 0 });
        if now >= failures.since.plus_millis(SPAN) {
            *failures = Failures { since: now, count: 0 };
        }
        failures.count = failures.count.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(text: &str) -> SocketAddr {
        SocketAddr::new(text.parse().unwrap(), 1)
    }

    #[test]
    fn who_fails_too_often_waits_for_the_rest_of_the_minute_and_nobody_else() {
        let (tries, start) = (Tries::default(), Timestamp(1_000));
        let (bad, good) = (peer("192.0.2.1"), peer("192.0.2.2"));
        for n in 0..MOST {
            assert_eq!(tries.wait(bad, start), None, "{n}");
            tries.failed(bad, start);
        }
        assert_eq!(tries.wait(bad, start), Some(60));
        assert_eq!(tries.wait(peer("::ffff:192.0.2.1"), start.plus_millis(59_500)), Some(1));
        assert_eq!(tries.wait(good, start), None);
        assert_eq!(tries.wait(bad, start.plus_millis(SPAN)), None);
        tries.failed(bad, start.plus_millis(SPAN));
        assert_eq!(tries.wait(bad, start.plus_millis(SPAN)), None, "counted anew");
    }

    #[test]
    fn a_host_with_a_network_of_addresses_is_one() {
        let tries = Tries::default();
        for n in 0..MOST {
            tries.failed(peer(&format!("2001:db8::{n:x}")), Timestamp(1_000));
        }
        assert!(tries.wait(peer("2001:db8::ffff"), Timestamp(1_000)).is_some());
        assert!(tries.wait(peer("2001:db8:0:1::1"), Timestamp(1_000)).is_none());
    }

    #[test]
    fn addresses_are_not_remembered_without_end() {
        let tries = Tries::default();
        for n in 0..5_000_u32 {
            tries.failed(SocketAddr::new(IpAddr::V4(n.into()), 1), Timestamp(1_000 + u64::from(n)));
        }
        assert_eq!(tries.0.lock().len(), ADDRESSES);
    }
}
