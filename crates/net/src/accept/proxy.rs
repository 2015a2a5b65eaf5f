//! PROXY protocol, versions 1 and 2: the real peer address in front of the connection's bytes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

const V2_SIGNATURE: &[u8; 12] = b"\r\n\r\n\0\r\nQUIT\n";
const V1_LONGEST: usize = 107;
const V2_LONGEST: usize = 16 + 1024;
/// The command of a proxied connection; 0 is LOCAL, the proxy's own.
const PROXY: u8 = 1;
/// Families.
const UNSPEC: u8 = 0;
const INET: u8 = 1;
const INET6: u8 = 2;
const UNIX: u8 = 3;
/// The highest transport; 1 is a stream.
const DATAGRAM: u8 = 2;

/// Result of parsing the bytes so far.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ProxyHeader {
    /// More bytes are needed.
    Partial,
    /// Header of `len` bytes; the address is `None` if the proxy speaks on its own behalf (LOCAL, such as health
    /// checks) and for families that have no IP address.
    Complete {
        /// Bytes to skip.
        len: usize,
        /// The client's address.
        peer: Option<SocketAddr>,
    },
    /// Not a PROXY header, or one that contradicts itself: the peer is not known, so it is not let in.
    Invalid,
}

/// Reads a header at the start of `bytes`.
pub(crate) fn parse(bytes: &[u8]) -> ProxyHeader {
    let known = bytes.len().min(V2_SIGNATURE.len());
    if bytes[..known] == V2_SIGNATURE[..known] {
        return if known < V2_SIGNATURE.len() { ProxyHeader::Partial } else { parse_v2(bytes) };
    }
    let known = bytes.len().min(6);
    if bytes[..known] != b"PROXY "[..known] {
        return ProxyHeader::Invalid;
    }
    parse_v1(bytes)
}

fn parse_v1(bytes: &[u8]) -> ProxyHeader {
    let window = &bytes[..bytes.len().min(V1_LONGEST)];
    let Some(end) = window.windows(2).position(|pair| pair == b"\r\n") else {
        return if bytes.len() >= V1_LONGEST { ProxyHeader::Invalid } else { ProxyHeader::Partial };
    };
    let Ok(line) = std::str::from_utf8(&bytes[..end]) else { return ProxyHeader::Invalid };
    let len = end + 2;
    let mut words = line.split(' ').skip(1);
    // The words after UNKNOWN are to be ignored.
    let family = words.next();
    if family == Some("UNKNOWN") {
        return ProxyHeader::Complete { len, peer: None };
    }
    let addresses =
        [words.next(), words.next()].map(|word| word.and_then(|text| text.parse::<IpAddr>().ok()));
    let ports = [words.next(), words.next()].map(|word| word.and_then(port));
    let ([Some(source), Some(destination)], [Some(port), Some(_)], None) = (addresses, ports, words.next())
    else {
        return ProxyHeader::Invalid;
    };
    let is_family = match family {
        Some("TCP4") => source.is_ipv4() && destination.is_ipv4(),
        Some("TCP6") => source.is_ipv6() && destination.is_ipv6(),
        _ => false,
    };
    if is_family {
        ProxyHeader::Complete { len, peer: Some(SocketAddr::new(source, port)) }
    } else {
        ProxyHeader::Invalid
    }
}

/// A port in decimal, without sign or leading zeroes.
fn port(text: &str) -> Option<u16> {
    let plain = text == "0" || text.starts_with(|first: char| first.is_ascii_digit() && first != '0');
    text.parse().ok().filter(|_| plain)
}

fn parse_v2(bytes: &[u8]) -> ProxyHeader {
    let Some(&[version_command, family, high, low]) = bytes.get(12..16) else { return ProxyHeader::Partial };
    let len = 16 + usize::from(u16::from_be_bytes([high, low]));
    let (version, command) = (version_command >> 4, version_command & 0x0F);
    let (family, transport) = (family >> 4, family & 0x0F);
    if version != 2 || command > PROXY || family > UNIX || transport > DATAGRAM || len > V2_LONGEST {
        return ProxyHeader::Invalid;
    }
    let shortest = match (command, family) {
        (PROXY, INET) => 12,
        (PROXY, INET6) => 36,
        (PROXY, UNIX) => 216,
        _ => 0,
    };
    // A connection over TCP cannot be a proxied datagram.
    if len < 16 + shortest || (command == PROXY && family != UNSPEC && transport == DATAGRAM) {
        return ProxyHeader::Invalid;
    }
    let Some(body) = bytes.get(16..len) else { return ProxyHeader::Partial };
    let peer = match (command, family, body) {
        (PROXY, INET, [a, b, c, d, _, _, _, _, p, q, ..]) => {
            Some(SocketAddr::new(Ipv4Addr::new(*a, *b, *c, *d).into(), u16::from_be_bytes([*p, *q])))
        }
        (PROXY, INET6, body) => body
            .first_chunk::<16>()
            .zip(body.get(32..).and_then(<[u8]>::first_chunk))
            .map(|(source, port)| SocketAddr::new(Ipv6Addr::from(*source).into(), u16::from_be_bytes(*port))),
        _ => None,
    };
    ProxyHeader::Complete { len, peer }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_give_the_client_address() {
        let v1 = b"PROXY TCP4 192.0.2.1 192.0.2.2 5000 1883\r\nrest";
        assert_eq!(parse(v1), ProxyHeader::Complete { len: 42, peer: "192.0.2.1:5000".parse().ok() });
        let mut v2 = V2_SIGNATURE.to_vec();
        v2.extend_from_slice(&[0x21, 0x11, 0, 12, 192, 0, 2, 1, 192, 0, 2, 2, 0x13, 0x88, 7, 0x5B, 0xFF]);
        assert_eq!(parse(&v2), ProxyHeader::Complete { len: 28, peer: "192.0.2.1:5000".parse().ok() });
        for cut in 0..28 {
            assert_eq!(parse(&v2[..cut]), ProxyHeader::Partial, "cut at {cut}");
        }
        assert_eq!(parse(b"\x10\x0c"), ProxyHeader::Invalid);
        assert_eq!(parse(b"PROXY UNKNOWN\r\n"), ProxyHeader::Complete { len: 15, peer: None });
        assert_eq!(parse(&[b'P'; 200]), ProxyHeader::Invalid);
    }

    #[test]
    fn a_first_version_whose_words_do_not_fit_together_is_refused() {
        for line in [
            "PROXY TCP4 2001:db8::1 2001:db8::2 5000 1883",
            "PROXY TCP4 192.0.2.1 2001:db8::2 5000 1883",
            "PROXY TCP6 192.0.2.1 192.0.2.2 5000 1883",
            "PROXY TCP4 192.0.2.1 192.0.2.2 5000",
            "PROXY TCP4 192.0.2.1 192.0.2.2 5000 1883 more",
            "PROXY TCP4 192.0.2.1  192.0.2.2 5000 1883",
            "PROXY TCP4 192.0.2.1 192.0.2.2 65536 1883",
            "PROXY TCP4 192.0.2.1 192.0.2.2 +500 1883",
            "PROXY TCP4 192.0.2.1 192.0.2.2 0500 1883",
            "PROXY TCP5 192.0.2.1 192.0.2.2 5000 1883",
            "PROXY ",
        ] {
            assert_eq!(parse(format!("{line}\r\n").as_bytes()), ProxyHeader::Invalid, "{line}");
        }
        let v6 = b"PROXY TCP6 2001:db8::1 2001:db8::2 0 1883\r\n";
        assert_eq!(parse(v6), ProxyHeader::Complete { len: v6.len(), peer: "[2001:db8::1]:0".parse().ok() });
        let unknown = b"PROXY UNKNOWN ffff::1 x\r\n";
        assert_eq!(parse(unknown), ProxyHeader::Complete { len: unknown.len(), peer: None });
    }

    fn v2(command: u8, family: u8, body: &[u8]) -> Vec<u8> {
        let mut bytes = V2_SIGNATURE.to_vec();
        bytes.extend_from_slice(&[command, family]);
        bytes.extend_from_slice(&(body.len() as u16).to_be_bytes());
        bytes.extend_from_slice(body);
        bytes
    }

    #[test]
    fn a_second_version_with_a_short_body_or_an_unknown_command_is_refused() {
        for (command, family, body) in [
            (0x21, 0x11, 11),
            (0x21, 0x21, 35),
            (0x21, 0x31, 215),
            (0x22, 0x11, 12),
            (0x2F, 0x11, 12),
            (0x21, 0x41, 36),
            (0x21, 0x13, 12),
            (0x21, 0x12, 12),
            (0x11, 0x11, 12),
        ] {
            let header = v2(command, family, &vec![1; body]);
            assert_eq!(parse(&header), ProxyHeader::Invalid, "{command:#x} {family:#x} {body}");
            // The header is refused by its head: a body that never comes is not waited for.
            assert_eq!(parse(&header[..16]), ProxyHeader::Invalid, "{command:#x} {family:#x} {body}");
        }
    }

    #[test]
    fn what_a_proxy_says_for_itself_has_no_address_whatever_the_body_is() {
        for (command, family, body) in [(0x20, 0x00, 0), (0x20, 0x11, 12), (0x20, 0x21, 5), (0x21, 0x00, 7)] {
            let header = v2(command, family, &vec![1; body]);
            assert_eq!(parse(&header), ProxyHeader::Complete { len: header.len(), peer: None });
            assert!(header.len() == 16 || parse(&header[..header.len() - 1]) == ProxyHeader::Partial);
        }
        let unix = v2(0x21, 0x31, &[0; 216]);
        assert_eq!(parse(&unix), ProxyHeader::Complete { len: unix.len(), peer: None });
        let mut body = [0; 40];
        body[15] = 1;
        body[32..34].copy_from_slice(&[0x13, 0x88]);
        let inet6 = v2(0x21, 0x21, &body);
        assert_eq!(
            parse(&inet6),
            ProxyHeader::Complete { len: inet6.len(), peer: "[::1]:5000".parse().ok() }
        );
    }
}
