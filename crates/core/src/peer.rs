//! A connection's remote address, small enough to keep for every connection.

use std::{
    fmt,
    net::{IpAddr, Ipv6Addr, SocketAddr},
};

/// Remote IP address and port in 18 bytes, or the value that stands for a Unix socket. IPv4 is kept as an IPv4-mapped
/// IPv6 address and shown as IPv4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    ip: [u8; 16],
    port: [u8; 2],
}

impl Peer {
    /// A client of a Unix socket: it has no address.
    pub const UNIX: Self = Self { ip: [0; 16], port: [0; 2] };

    /// Its IP address; the unspecified one for a client of a Unix socket.
    pub fn ip(self) -> IpAddr {
        SocketAddr::from(self).ip()
    }
}

impl From<SocketAddr> for Peer {
    fn from(address: SocketAddr) -> Self {
        let ip = match address.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        Self { ip: ip.octets(), port: address.port().to_be_bytes() }
    }
}

impl From<Peer> for SocketAddr {
    fn from(peer: Peer) -> Self {
        Self::new(Ipv6Addr::from(peer.ip).to_canonical(), u16::from_be_bytes(peer.port))
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::UNIX {
            return f.write_str("unix");
        }
        SocketAddr::from(*self).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_come_back_as_they_were() {
        for text in ["127.0.0.1:1883", "[2001:db8::1]:8883", "0.0.0.0:0"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(Peer::from(address).to_string(), text);
        }
        assert_eq!(Peer::UNIX.to_string(), "unix");
        assert_eq!(size_of::<Peer>(), 18);
    }
}
