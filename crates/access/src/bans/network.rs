//! Networks of addresses, as in `192.0.2.0/24`.

use std::{cmp::Ordering, fmt, net::IpAddr, str::FromStr};

use ipnet::IpNet;
use thiserror::Error;

/// An IPv4 or IPv6 network; a single address is one of full length. IPv4-mapped IPv6 is IPv4, so that an address is the
/// same however a socket shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Network(IpNet);

/// Text that is not a network.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NetworkError {
    /// The part before the slash.
    #[error("{0:?} is not an IP address; write it like 192.0.2.1, 192.0.2.0/24 or 2001:db8::/32")]
    Address(String),
    /// The part after it.
    #[error("{0:?} is not the length of a network: 0 to 32 for IPv4, 0 to 128 for IPv6")]
    Length(String),
    /// The text reads as one network and is another.
    #[error("{0} has bits behind its length; write {1}")]
    Loose(String, Network),
}

impl Network {
    /// The first `length` bits of `ip`; `None` if it has not so many.
    pub fn new(ip: IpAddr, length: u8) -> Option<Self> {
        let (ip, length) = match (ip.to_canonical(), length.checked_sub(96)) {
            (canonical, Some(length)) if canonical != ip => (canonical, length),
            _ => (ip, length),
        };
        Some(Self(IpNet::new(ip, length).ok()?.trunc()))
    }

    /// Returns whether `ip` is in the network.
    pub fn contains(self, ip: IpAddr) -> bool {
        self.0.contains(&ip.to_canonical())
    }

    /// Its family, `true` for IPv4, and its length.
    pub(super) fn kind(self) -> (bool, u8) {
        (self.0.addr().is_ipv4(), self.0.prefix_len())
    }

    /// The network of this length that has `ip`, whose family has such a length.
    pub(super) fn around(ip: IpAddr, length: u8) -> Self {
        Self(IpNet::new_assert(ip.to_canonical(), length).trunc())
    }
}

/// Networks of a family and a length together.
impl Ord for Network {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.kind(), self.0).cmp(&(other.kind(), other.0))
    }
}

impl PartialOrd for Network {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl FromStr for Network {
    type Err = NetworkError;

    /// An address, or an address with `/` and a length; bits after the length must be 0, since they are most likely a
    /// mistake in the length.
    fn from_str(text: &str) -> Result<Self, NetworkError> {
        let (address, length) = text.split_once('/').map_or((text, None), |(ip, len)| (ip, Some(len)));
        let ip: IpAddr = address.parse().map_err(|_| NetworkError::Address(address.to_owned()))?;
        let full = if ip.is_ipv4() { 32 } else { 128 };
        let network = match length {
            None => Self::new(ip, full),
            Some(length) => length.parse().ok().and_then(|length| Self::new(ip, length)),
        };
        let network = network.ok_or_else(|| NetworkError::Length(length.unwrap_or_default().to_owned()))?;
        if network.0.addr() != ip.to_canonical() {
            return Err(NetworkError::Loose(text.to_owned(), network));
        }
        Ok(network)
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.prefix_len() == self.0.max_prefix_len() { self.0.addr().fmt(f) } else { self.0.fmt(f) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(text: &str) -> Network {
        text.parse().unwrap()
    }

    fn has(network_text: &str, ip: &str) -> bool {
        network(network_text).contains(ip.parse().unwrap())
    }

    #[test]
    fn an_address_is_in_its_network_and_in_no_other() {
        assert!(has("192.0.2.0/24", "192.0.2.255") && !has("192.0.2.0/24", "192.0.3.0"));
        assert!(has("192.0.2.7", "192.0.2.7") && !has("192.0.2.7", "192.0.2.6"));
        assert!(has("2001:db8::/32", "2001:db8:ffff::1") && !has("2001:db8::/32", "2001:db9::"));
        assert!(has("0.0.0.0/0", "255.255.255.255") && has("::/0", "2001:db8::1"));
        assert!(has("2001:db8::/33", "2001:db8:7fff::") && !has("2001:db8::/33", "2001:db8:8000::"));
    }

    #[test]
    fn an_ipv4_mapped_address_is_ipv4_and_no_ipv6_network_has_it() {
        assert!(has("192.0.2.0/24", "::ffff:192.0.2.1"));
        assert_eq!(network("::ffff:192.0.2.0/120"), network("192.0.2.0/24"));
        assert!(!has("::/0", "192.0.2.1") && !has("::/0", "::ffff:192.0.2.1"));
        assert!(!has("0.0.0.0/0", "2001:db8::1"));
    }

    #[test]
    fn networks_are_ordered_by_family_length_and_address() {
        let ordered =
            ["::/0", "2001:db8::/32", "2001:db9::/32", "2001:db8::1", "10.0.0.0/8", "9.0.0.0/16", "8.8.8.8"];
        assert!(ordered.map(network).is_sorted());
    }

    #[test]
    fn text_is_read_strictly_and_written_as_it_was_read() {
        for text in ["192.0.2.0/24", "192.0.2.1", "2001:db8::/32", "2001:db8::1", "0.0.0.0/0", "::/0"] {
            assert_eq!(network(text).to_string(), text);
        }
        let error = |text: &str| text.parse::<Network>().unwrap_err().to_string();
        assert!(error("192.0.2.1/24").ends_with("write 192.0.2.0/24"));
        for bad in ["", "x", "192.0.2.0/33", "192.0.2.0/", "192.0.2.0/-1", "::/129", "1.2.3", "/8"] {
            error(bad);
        }
    }
}
