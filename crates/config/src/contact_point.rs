//! Contact points of a cluster: `HOST[:PORT]`, HOST a name, an IPv4 address or an IPv6 address in brackets.

/// Port of nodes that do not name one.
const PORT: u16 = 9042;

/// `text` as `host:port`.
pub(super) fn contact_point(text: &str) -> Result<String, String> {
    let text = text.trim();
    if let Some((scheme, rest)) = text.split_once("://") {
        return Err(format!("is a URL; write it without {scheme}://, like {}", rest.trim_end_matches('/')));
    }
    let (host, port) = match text.strip_prefix('[').map(|rest| rest.split_once(']')) {
        Some(Some((address, port))) => {
            address.parse::<std::net::Ipv6Addr>().map_err(|_| "is not an address".to_owned())?;
            (format!("[{address}]"), port.strip_prefix(':').or_else(|| port.is_empty().then_some("")))
        }
        Some(None) => return Err("lacks a ]".to_owned()),
        None => match text.split_once(':') {
            Some((host, port)) => (host.to_owned(), Some(port).filter(|port| !port.is_empty())),
            None => (text.to_owned(), Some("")),
        },
    };
    let named = !host.is_empty()
        && (host.starts_with('[')
            || host.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_')));
    if !named {
        return Err("names no host".to_owned());
    }
    match port {
        Some("") => Ok(format!("{host}:{PORT}")),
        Some(port) => match port.parse::<u16>() {
            Ok(port) if port > 0 => Ok(format!("{host}:{port}")),
            _ => Err("has no port after the colon".to_owned()),
        },
        None => Err("has no port after the colon".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contact_points_are_hosts_with_or_without_a_port() {
        for (text, point) in [
            ("db", "db:9042"),
            (" db.example.org:19042 ", "db.example.org:19042"),
            ("10.0.0.1", "10.0.0.1:9042"),
            ("[fd00::1]", "[fd00::1]:9042"),
            ("[::1]:1", "[::1]:1"),
        ] {
            assert_eq!(contact_point(text), Ok(point.to_owned()), "{text}");
        }
        for text in [
            "",
            " ",
            ":9042",
            "db:",
            "db:0",
            "db:99999",
            "db:x",
            "::1",
            "[::1",
            "[db]:1",
            "[::1]1",
            "a b",
            "http://db",
        ] {
            assert!(contact_point(text).is_err(), "{text}");
        }
    }
}
