//! Checks of the host that a request names, against web pages that make a browser talk to this machine.

use std::net::IpAddr;

/// `host` of `host`, `host:port` or `[v6]:port`, without brackets.
fn host_of(authority: &str) -> &str {
    if let Some(rest) = authority.strip_prefix('[') {
        return rest.split(']').next().unwrap_or(rest);
    }
    authority.split(':').next().unwrap_or(authority)
}

/// Returns whether `authority` can only mean this machine: `localhost` or a loopback address, with or without a port.
/// Any other name may have been pointed here by its owner.
pub fn is_this_machine(authority: &str) -> bool {
    let host = host_of(authority);
    host.eq_ignore_ascii_case("localhost")
        || host.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback())
}

/// Pages that may open a WebSocket: origins like `https://app.example.com`, `*` for all; none is pages of the host that
/// the request names, on any port. Clients that are no browsers send no origin, or any: the check guards users against
/// pages, not the gateway against clients.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Origins(pub Vec<String>);

impl Origins {
    /// Returns whether a page of `origin` may connect to `host`, which is the Host header.
    pub fn allow(&self, origin: Option<&str>, host: Option<&str>) -> bool {
        let Some(origin) = origin else { return true };
        if !self.0.is_empty() {
            return self.0.iter().any(|allowed| allowed == "*" || allowed.eq_ignore_ascii_case(origin));
        }
        let (Some((_, page)), Some(host)) = (origin.split_once("://"), host) else { return false };
        host_of(page).eq_ignore_ascii_case(host_of(host)) && !host_of(page).is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_nobody_else_owns_are_this_machine() {
        for ours in
            ["localhost", "LOCALHOST:9090", "127.0.0.1", "127.0.0.1:9090", "127.8.9.1", "[::1]", "[::1]:9090"]
        {
            assert!(is_this_machine(ours), "{ours}");
        }
        for other in [
            "",
            ":9090",
            "evil.example",
            "localhost.evil.example:9090",
            "192.0.2.1",
            "[2001:db8::1]:80",
            "127.0.0.1.evil",
        ] {
            assert!(!is_this_machine(other), "{other}");
        }
    }

    #[test]
    fn pages_of_the_same_host_may_connect_and_clients_without_origin() {
        let same = Origins::default();
        assert!(same.allow(None, Some("gw.example:8083")));
        assert!(same.allow(Some("https://gw.example"), Some("gw.example:8083")));
        assert!(same.allow(Some("http://GW.example:3000"), Some("gw.example:8083")));
        assert!(same.allow(Some("http://[::1]:3000"), Some("[::1]:8083")));
        for bad in ["https://evil.example", "null", "", "https://", "https://gw.example.evil"] {
            assert!(!same.allow(Some(bad), Some("gw.example:8083")), "{bad}");
        }
        assert!(!same.allow(Some("https://gw.example"), None));
    }

    #[test]
    fn a_list_replaces_the_rule_and_a_star_allows_all() {
        let listed = Origins(vec!["https://app.example:8443".to_owned()]);
        assert!(listed.allow(Some("https://APP.example:8443"), Some("gw.example")));
        assert!(!listed.allow(Some("https://gw.example"), Some("gw.example")));
        assert!(!listed.allow(Some("http://app.example:8443"), Some("gw.example")));
        let all = Origins(vec!["*".to_owned()]);
        assert!(all.allow(Some("null"), None));
    }
}
