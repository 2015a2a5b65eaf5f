//! Rate at which an address may connect: a token bucket for each address, kept only while it is not full.

use std::{
    collections::{BTreeSet, HashMap},
    time::Duration,
};

use super::SourceAddress;

/// Connections that may come at once after a pause, as the time in which the rate allows them.
const BURST: Duration = Duration::from_secs(30);
/// Addresses remembered. Beyond that the one that would be full soonest is forgotten, which loses the least.
const REMEMBERED: usize = 65_536;

/// The buckets. A bucket is a time: when it will be full again.
#[derive(Debug)]
pub(super) struct Rates {
    /// Between two arrivals; `None` is no limit.
    interval: Option<Duration>,
    full_at: HashMap<SourceAddress, Duration>,
    order: BTreeSet<(Duration, SourceAddress)>,
}

impl Rates {
    /// `rate` arrivals a second; 0 for no limit.
    pub(super) fn new(rate: u32) -> Self {
        let interval = (rate > 0).then(|| Duration::from_secs(1) / rate);
        Self { interval, full_at: HashMap::new(), order: BTreeSet::new() }
    }

    /// Takes a token of `address`; false if it has none.
    pub(super) fn take(&mut self, address: SourceAddress, now: Duration) -> bool {
        let Some(interval) = self.interval else { return true };
        while let Some(&(full_at, known)) = self.order.first()
            && (full_at <= now || self.order.len() > REMEMBERED)
        {
            self.order.pop_first();
            self.full_at.remove(&known);
        }
        let before = self.full_at.get(&address).copied().unwrap_or(now);
        let after = before.max(now) + interval;
        if after > now + BURST {
            return false;
        }
        self.order.remove(&(before, address));
        self.order.insert((after, address));
        self.full_at.insert(address, after);
        true
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        assert_eq!(self.order.len(), self.full_at.len());
        self.order.len()
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use super::*;

    fn address(number: u32) -> SourceAddress {
        SocketAddr::new(Ipv4Addr::from_bits(number).into(), 1).into()
    }

    fn taken(rates: &mut Rates, address: SourceAddress, now: Duration) -> usize {
        (0..1_000).take_while(|_| rates.take(address, now)).count()
    }

    #[test]
    fn an_address_has_a_burst_and_then_its_rate_and_others_have_theirs() {
        let mut rates = Rates::new(2);
        let start = Duration::from_secs(5);
        assert_eq!(taken(&mut rates, address(1), start), 60);
        assert_eq!(taken(&mut rates, address(2), start), 60);
        assert_eq!(taken(&mut rates, address(1), start + Duration::from_secs(3)), 6);
        assert_eq!(taken(&mut rates, address(1), start + Duration::from_secs(900)), 60);
        assert_eq!(taken(&mut Rates::new(0), address(1), start), 1_000, "no limit");
    }

    #[test]
    fn what_is_remembered_is_bounded_and_forgotten_when_it_no_longer_matters() {
        let mut rates = Rates::new(1);
        let now = Duration::from_secs(1);
        assert_eq!(taken(&mut rates, address(7), now), 30);
        for number in 0..2 * REMEMBERED {
            assert!(rates.take(address(1_000_000 + number as u32), now));
        }
        assert!(rates.len() <= REMEMBERED + 1, "{}", rates.len());
        assert!(!rates.take(address(7), now), "who has taken most is not the one forgotten");
        assert!(rates.take(address(1), now + Duration::from_secs(60)));
        assert_eq!(rates.len(), 1);
    }
}
