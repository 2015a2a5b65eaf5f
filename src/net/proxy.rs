//! PROXY protocol, versions 1 and 2: the real peer address in front of the connection's bytes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

const V2_SIGNATURE: &[u8; 12] = b"\r\n\r\n\0\r\nQUIT\n";
const V1_LONGEST: usize = 107;
const V2_LONGEST: usize = 16 + 1024;

/// What the bytes so far say.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Header {
    /// More bytes are needed.
    Partial,
    /// Header of `len` bytes; the address is `None` for health checks and unknown families.
    Complete {
        /// Bytes to skip.
        len: usize,
        /// The client's address.
        peer: Option<SocketAddr>,
    },
    /// Not a PROXY header.
    Invalid,
}

/// Reads a header at the start of `bytes`.
pub(super) fn parse(bytes: &[u8]) -> Header {
    let known = bytes.len().min(V2_SIGNATURE.len());
    if bytes[..known] == V2_SIGNATURE[..known] {
        return if known < V2_SIGNATURE.len() { Header::Partial } else { parse_v2(bytes) };
    }
    let known = bytes.len().min(6);
    if bytes[..known] != b"PROXY "[..known] {
        return Header::Invalid;
    }
    parse_v1(bytes)
}

fn parse_v1(bytes: &[u8]) -> Header {
    let window = &bytes[..bytes.len().min(V1_LONGEST)];
    let Some(end) = window.windows(2).position(|pair| pair == b"\r\n") else {
        return if bytes.len() >= V1_LONGEST { Header::Invalid } else { Header::Partial };
    };
    let Ok(line) = std::str::from_utf8(&bytes[..end]) else { return Header::Invalid };
    let mut words = line.split(' ').skip(1);
    let len = end + 2;
    let family = words.next();
    if family == Some("UNKNOWN") {
        return Header::Complete { len, peer: None };
    }
    let source = words.next().and_then(|text| text.parse::<IpAddr>().ok());
    let port = words.nth(1).and_then(|text| text.parse::<u16>().ok());
    match (family, source, port) {
        (Some("TCP4" | "TCP6"), Some(ip), Some(port)) => {
            Header::Complete { len, peer: Some(SocketAddr::new(ip, port)) }
        }
        _ => Header::Invalid,
    }
}

fn parse_v2(bytes: &[u8]) -> Header {
    let Some(&[version_command, family, high, low]) = bytes.get(12..16) else { return Header::Partial };
    let len = 16 + usize::from(u16::from_be_bytes([high, low]));
    if version_command >> 4 != 2 || len > V2_LONGEST {
        return Header::Invalid;
    }
    let Some(body) = bytes.get(16..len) else { return Header::Partial };
    let local = version_command & 0x0F == 0;
    let peer = match (family >> 4, body) {
        _ if local => None,
        (1, [a, b, c, d, _, _, _, _, p, q, ..]) => {
            Some(SocketAddr::new(Ipv4Addr::new(*a, *b, *c, *d).into(), u16::from_be_bytes([*p, *q])))
        }
        (2, body) if body.len() >= 36 => {
            let mut address = [0; 16];
            address.copy_from_slice(&body[..16]);
            Some(SocketAddr::new(Ipv6Addr::from(address).into(), u16::from_be_bytes([body[32], body[33]])))
        }
        _ => None,
    };
    Header::Complete { len, peer }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_give_the_client_address() {
        let v1 = b"PROXY TCP4 192.0.2.1 192.0.2.2 5000 1883\r\nrest";
        assert_eq!(parse(v1), Header::Complete { len: 42, peer: "192.0.2.1:5000".parse().ok() });
        let mut v2 = V2_SIGNATURE.to_vec();
        v2.extend_from_slice(&[0x21, 0x11, 0, 12, 192, 0, 2, 1, 192, 0, 2, 2, 0x13, 0x88, 7, 0x5B, 0xFF]);
        assert_eq!(parse(&v2), Header::Complete { len: 28, peer: "192.0.2.1:5000".parse().ok() });
        for cut in 0..28 {
            assert_eq!(parse(&v2[..cut]), Header::Partial, "cut at {cut}");
        }
        assert_eq!(parse(b"\x10\x0c"), Header::Invalid);
        assert_eq!(parse(b"PROXY UNKNOWN\r\n"), Header::Complete { len: 15, peer: None });
        assert_eq!(parse(&[b'P'; 200]), Header::Invalid);
    }
}
