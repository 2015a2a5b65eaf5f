//! Address of a listener: `ip:port`, `[v6]:port` or `unix:/path`, and the permissions of the latter.

use std::{
    fmt,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    path::PathBuf,
    str::FromStr,
};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A listening address.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Address {
    /// An IP address and port.
    Ip(SocketAddr),
    /// A Unix domain socket.
    Unix(PathBuf),
}

impl Address {
    /// Returns whether only this machine can reach the address.
    pub fn is_local(&self) -> bool {
        match self {
            Self::Ip(addr) => addr.ip().to_canonical().is_loopback(),
            Self::Unix(_) => true,
        }
    }

    /// Returns whether the address is one of IPv6.
    pub fn is_ipv6(&self) -> bool {
        matches!(self, Self::Ip(addr) if addr.is_ipv6())
    }
}

/// Address that a socket binds, with its options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binding {
    /// Address.
    pub address: Address,
    /// True if `[::]` takes no connections over IPv4.
    pub ipv6_only: bool,
}

impl Binding {
    /// Returns whether binding both would fail; port 0 never collides.
    pub fn collides(&self, other: &Self) -> bool {
        match (&self.address, &other.address) {
            (Address::Ip(a), Address::Ip(b)) => {
                let (ip_a, ip_b) = (a.ip().to_canonical(), b.ip().to_canonical());
                let same_port = a.port() != 0 && a.port() == b.port();
                same_port && (ip_a == ip_b || self.covers(ip_a, ip_b) || other.covers(ip_b, ip_a))
            }
            (Address::Unix(a), Address::Unix(b)) => a == b,
            _ => false,
        }
    }

    /// Returns whether its own address `any` stands for all addresses of the family of `ip`.
    fn covers(&self, any: IpAddr, ip: IpAddr) -> bool {
        any.is_unspecified() && (any.is_ipv4() == ip.is_ipv4() || any.is_ipv6() && !self.ipv6_only)
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("unix:") {
            Some("") => {
                Err("a Unix socket needs a path; write it like unix:/run/mqtt-server.sock".to_owned())
            }
            Some(path) => Ok(Self::Unix(PathBuf::from(path))),
            None => socket_address(text).map(Self::Ip),
        }
    }
}

/// `ip:port`. An error says what is wrong and, after a semicolon, what to write.
pub(super) fn socket_address(text: &str) -> Result<SocketAddr, String> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    if let Some((scheme, rest)) = text.split_once("://") {
        return Err(format!("a URL; write it without {scheme}://, like {}", rest.trim_end_matches('/')));
    }
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if text.parse::<IpAddr>().is_err() => (host, port),
        _ => match text.parse() {
            Ok(IpAddr::V4(_)) => return Err(format!("no port; write it like {text}:8883")),
            Ok(IpAddr::V6(_)) => return Err(format!("no port; write it like [{text}]:8883")),
            Err(_) => return Err("not an address; write ip:port, [v6]:port or unix:/path".to_owned()),
        },
    };
    if port.parse::<u16>().is_err() {
        return Err(match !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()) {
            true => format!("there is no port {port}; ports are 0 to 65535"),
            false => format!("no port after the colon; write it like {host}:8883"),
        });
    }
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    Err(match bare {
        "" | "*" => {
            format!(
                "no IP address; write 127.0.0.1:{port} for this machine, 0.0.0.0:{port} for every interface"
            )
        }
        "localhost" => format!("host names are not looked up; write 127.0.0.1:{port} or [::1]:{port}"),
        bare if bare.parse::<Ipv6Addr>().is_ok() => {
            format!("an IPv6 address without brackets; write it like [{bare}]:{port}")
        }
        _ if host.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') => {
            format!("{host} is not an IP address; write it like 127.0.0.1:{port}")
        }
        _ => format!("host names are not looked up; write an IP address, like 127.0.0.1:{port}"),
    })
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(addr) => addr.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl Serialize for Address {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Address {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// Permissions of a Unix socket, as octal text: `0660`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileMode(pub u32);

impl Default for FileMode {
    fn default() -> Self {
        Self(0o660)
    }
}

impl FromStr for FileMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777);
        mode.map(Self).ok_or_else(|| "not permissions; write octal digits such as 0660".to_owned())
    }
}

impl fmt::Display for FileMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

impl Serialize for FileMode {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for FileMode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// An address that is always one of IP.
pub(super) mod socket {
    use std::net::SocketAddr;

    use serde::{Deserialize, Deserializer, Serializer, de};

    pub(crate) fn serialize<S: Serializer>(value: &SocketAddr, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SocketAddr, D::Error> {
        let text = String::deserialize(deserializer)?;
        if text.starts_with("unix:") {
            return Err(de::Error::custom("cannot be a Unix socket; write ip:port or [v6]:port"));
        }
        super::socket_address(&text).map_err(de::Error::custom)
    }
}

/// Optional settings as text: empty is none, so that the environment can unset what the file sets.
pub(super) mod optional {
    use std::{fmt::Display, str::FromStr};

    use serde::{Deserialize, Deserializer, Serializer, de};

    pub(crate) fn serialize<T: AsText, S: Serializer>(
        value: &Option<T>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&value.as_ref().map(AsText::text).unwrap_or_default())
    }

    pub(crate) fn deserialize<'de, T, D>(deserializer: D) -> Result<Option<T>, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        let text = String::deserialize(deserializer)?;
        if text.is_empty() {
            return Ok(None);
        }
        text.parse().map(Some).map_err(de::Error::custom)
    }

    /// Text that reads back as the same value.
    pub(crate) trait AsText {
        fn text(&self) -> String;
    }

    impl AsText for std::path::PathBuf {
        fn text(&self) -> String {
            self.to_string_lossy().into_owned()
        }
    }

    impl AsText for std::net::SocketAddr {
        fn text(&self) -> String {
            self.to_string()
        }
    }

    impl AsText for super::Address {
        fn text(&self) -> String {
            self.to_string()
        }
    }

    impl AsText for String {
        fn text(&self) -> String {
            self.clone()
        }
    }

    impl AsText for access::backends::Role {
        fn text(&self) -> String {
            self.to_string()
        }
    }

    impl AsText for super::super::SharedStrategy {
        fn text(&self) -> String {
            self.to_string()
        }
    }

    impl AsText for super::super::DurabilityMode {
        fn text(&self) -> String {
            self.to_string()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_written() {
        for text in ["127.0.0.1:8883", "[::1]:8883", "unix:/run/x.sock"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn what_is_not_an_address_is_told_what_to_write() {
        for (text, remedy) in [
            ("localhost:1883", "write 127.0.0.1:1883 or [::1]:1883"),
            ("example.org:1883", "write an IP address"),
            ("127.0.0.1", "write it like 127.0.0.1:8883"),
            ("::1", "write it like [::1]:8883"),
            ("fd00::1:2:8883:70000", "70000"),
            ("8883", "write ip:port"),
            (":8883", "0.0.0.0:8883 for every interface"),
            ("*:8883", "0.0.0.0:8883 for every interface"),
            ("unix:", "needs a path"),
            ("127.0.0.1:99999", "ports are 0 to 65535"),
            ("127.0.0.1:-1", "write it like 127.0.0.1:8883"),
            ("127.0.0.1:", "write it like 127.0.0.1:8883"),
            ("127.0.0.1:mqtt", "write it like 127.0.0.1:8883"),
            ("127.0.0.256:1", "write it like 127.0.0.1:1"),
            ("mqtts://127.0.0.1:8883/", "without mqtts://, like 127.0.0.1:8883"),
            ("", "write ip:port"),
        ] {
            let error = text.parse::<Address>().unwrap_err();
            assert!(error.contains(remedy) && error.contains("; "), "{text}: {error}");
        }
    }

    #[test]
    fn permissions_are_octal() {
        assert_eq!("0600".parse(), Ok(FileMode(0o600)));
        assert_eq!(FileMode(0o600).to_string(), "0600");
        for text in ["", "0888", "1777", "rw", "-1"] {
            assert!(text.parse::<FileMode>().is_err(), "{text}");
        }
    }

    #[test]
    fn any_address_collides_with_a_specific_one() {
        let address = |text: &str| Binding { address: text.parse().unwrap(), ipv6_only: false };
        let ipv6_only = |text: &str| Binding { ipv6_only: true, ..address(text) };
        assert!(address("0.0.0.0:1").collides(&address("127.0.0.1:1")));
        assert!(!address("0.0.0.0:1").collides(&address("127.0.0.1:2")));
        for ip in ["127.0.0.1:1", "0.0.0.0:1", "[::1]:1", "[::]:1"] {
            assert!(
                address("[::]:1").collides(&address(ip)) && address(ip).collides(&address("[::]:1")),
                "{ip}"
            );
        }
        assert!(!ipv6_only("[::]:1").collides(&address("127.0.0.1:1")));
        assert!(!address("0.0.0.0:1").collides(&ipv6_only("[::]:1")));
        assert!(!address("0.0.0.0:1").collides(&address("[::1]:1")));
        assert!(ipv6_only("[::]:1").collides(&address("[::1]:1")));
        assert!(!address("127.0.0.1:0").collides(&address("127.0.0.1:0")));
        assert!(address("unix:/a").collides(&address("unix:/a")));
    }
}
