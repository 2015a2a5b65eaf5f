//! The unit that counts as one address for limits.

use std::{
    net::{IpAddr, SocketAddr},
    num::NonZeroU64,
};

/// One IPv4 address or one IPv6 network of 64 bits, which is what a single machine gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SourceAddress(NonZeroU64);

/// The network that an address belongs to, as far as one owner can be supposed: an IPv4 /24 or an IPv6 /48.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SourceNetwork(u64);

impl SourceAddress {
    /// The network of the address.
    pub fn network(self) -> SourceNetwork {
        let number = self.0.get();
        // IPv4 addresses have numbers of 33 bits: see below.
        let is_v4 = number >> 32 == 1;
        SourceNetwork(if is_v4 { number >> 8 } else { number >> 16 << 16 })
    }
}

impl From<SocketAddr> for SourceAddress {
    fn from(address: SocketAddr) -> Self {
        let number = match address.ip().to_canonical() {
            // 0:1::/32 is nobody's, so that no network shares a number with an IPv4 address.
            IpAddr::V4(ip) => 1 << 32 | u64::from(ip.to_bits()),
            // ::/64, of which ::1 is, has a number that no source has.
            IpAddr::V6(ip) => (ip.to_bits() >> 64) as u64,
        };
        Self(NonZeroU64::new(number).unwrap_or(NonZeroU64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> SourceAddress {
        SourceAddress::from(SocketAddr::new(text.parse().unwrap(), 1883))
    }

    #[test]
    fn an_ipv6_network_is_one_address_and_so_is_ipv4_in_either_form() {
        assert_eq!(address("2001:db8:1:2::1"), address("2001:db8:1:2:ffff:ffff:ffff:ffff"));
        assert_ne!(address("2001:db8:1:2::1"), address("2001:db8:1:3::1"));
        assert_eq!(address("::ffff:192.0.2.1"), address("192.0.2.1"));
        assert_ne!(address("192.0.2.1"), address("192.0.2.2"));
        assert_ne!(address("::1"), address("127.0.0.1"));
        assert_eq!(size_of::<Option<SourceAddress>>(), 8);
    }

    #[test]
    fn a_network_is_24_bits_of_ipv4_or_48_of_ipv6() {
        let network = |text| address(text).network();
        assert_eq!(network("192.0.2.1"), network("192.0.2.255"));
        assert_ne!(network("192.0.2.1"), network("192.0.3.1"));
        assert_eq!(network("2001:db8:1:2::1"), network("2001:db8:1:ffff::1"));
        assert_ne!(network("2001:db8:1:2::1"), network("2001:db8:2:2::1"));
        assert_ne!(network("::1"), network("0.0.0.1"));
    }
}
