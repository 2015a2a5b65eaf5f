//! Listeners: addresses, protocols, and the clients that may connect through them.

use std::{collections::BTreeMap, net::IpAddr};

use config::TlsVersion;

use super::draft::quoted;

/// Settings on who may connect, and with which rights: of all listeners, or of one with `per_listener_settings`.
#[derive(Default, Clone)]
pub(super) struct ListenerGuard {
    pub(super) allow_anonymous: Option<bool>,
    pub(super) password_file: Option<String>,
    pub(super) acl_file: Option<String>,
    /// A plugin that may decide about either.
    pub(super) plugin: Option<String>,
}

/// A listener as Mosquitto's configuration describes it.
#[derive(Default)]
pub(super) struct MosquittoListener {
    pub(super) place: String,
    pub(super) port: u16,
    /// Address or host name.
    pub(super) host: Option<String>,
    pub(super) unix: Option<String>,
    pub(super) ipv6_only: bool,
    pub(super) websockets: bool,
    pub(super) max_connections: Option<u64>,
    pub(super) certfile: Option<String>,
    pub(super) keyfile: Option<String>,
    pub(super) cafile: Option<String>,
    pub(super) capath: Option<String>,
    pub(super) crlfile: Option<String>,
    pub(super) tls_version: Option<TlsVersion>,
    pub(super) require_certificate: bool,
    pub(super) identity_as_username: bool,
    pub(super) origins: Vec<String>,
    pub(super) proxy_protocol: bool,
    pub(super) guard: ListenerGuard,
    /// Keys of `[limits]` that are of a listener there: value, and the line.
    pub(super) limits: BTreeMap<&'static str, (u64, String)>,
    /// Reasons for which the listener cannot be carried over without letting in others than before.
    pub(super) blocked: Vec<String>,
}

/// Fate of a listener.
pub(super) enum Made {
    Table(String),
    /// The listener would let in others than before, or cannot be bound.
    Blocked(Vec<String>),
}

impl MosquittoListener {
    /// Returns the listener's name in logs, metrics and rules.
    pub(super) fn name(&self) -> String {
        let kind = match (self.websockets, self.certfile.is_some()) {
            (false, false) => "mqtt",
            (false, true) => "mqtts",
            (true, false) => "ws",
            (true, true) => "wss",
        };
        let host = match self.host.as_deref() {
            None if self.ipv6_only => Some("::"),
            host => host.filter(|host| *host != "0.0.0.0"),
        };
        match (&self.unix, host) {
            (Some(path), _) => format!("unix:{path}"),
            (None, None) => format!("{kind}-{}", self.port),
            (None, Some(host)) => format!("{kind}-{host}-{}", self.port),
        }
    }

    /// Returns the address to bind, as the configuration names it.
    pub(super) fn address(&self) -> Result<String, String> {
        if let Some(path) = &self.unix {
            return Ok(format!("unix:{path}"));
        }
        let ip = match self.host.as_deref() {
            None if self.ipv6_only => "::",
            None => "0.0.0.0",
            Some("localhost") if self.ipv6_only => "::1",
            Some("localhost") => "127.0.0.1",
            Some(host) => host,
        };
        match ip.parse::<IpAddr>() {
            Ok(IpAddr::V4(ip)) => Ok(format!("{ip}:{}", self.port)),
            Ok(IpAddr::V6(ip)) => Ok(format!("[{ip}]:{}", self.port)),
            Err(_) => Err(format!("host names are not looked up; write the IP address of {ip}")),
        }
    }

    /// Tells whether it is on all addresses of IPv6, and those alone: Mosquitto always binds `::` so.
    pub(super) fn takes_ipv6_only(&self) -> bool {
        self.address().is_ok_and(|address| address.starts_with("[::]:"))
    }

    /// The steps of `[auth]` that do what Mosquitto did.
    fn steps(&self) -> Result<Vec<&'static str>, String> {
        if let Some(plugin) = &self.guard.plugin {
            return Err(format!(
                "the plugin {plugin} may decide who connects and what they may do; use [auth.http], [auth.grpc] or a password \
                 file with rules in its place, and open the listener then"
            ));
        }
        if self.identity_as_username {
            return Ok(vec!["certificate"]);
        }
        let mut steps = Vec::new();
        if self.guard.password_file.is_some() {
            steps.push("password");
        }
        if self.guard.allow_anonymous == Some(true) {
            steps.push("anonymous");
        }
        if steps.is_empty() {
            return Err(
                "allow_anonymous is false and there is no password_file: Mosquitto let nobody in; set [auth]"
                    .to_owned(),
            );
        }
        Ok(steps)
    }

    /// Returns the parts of TLS that are missing, without which the listener would let in others than Mosquitto did.
    fn tls_problems(&self) -> Vec<&'static str> {
        let mut problems = Vec::new();
        let of_tls = self.cafile.is_some()
            || self.capath.is_some()
            || self.crlfile.is_some()
            || self.require_certificate
            || self.identity_as_username;
        match (&self.certfile, &self.keyfile) {
            (None, None) if of_tls => problems.push(
                "there are options for certificates of clients, and neither certfile nor keyfile: nobody would be asked for one",
            ),
            (None, None) | (Some(_), Some(_)) => {}
            _ => problems.push("certfile and keyfile belong together, and one is missing"),
        }
        if self.require_certificate && self.cafile.is_none() {
            problems.push("require_certificate needs a file of certificates here: name it as cafile, and put those of capath into it");
        }
        if self.identity_as_username && !self.require_certificate {
            problems.push(
                "use_identity_as_username without require_certificate: Mosquitto asks for no certificate then, and let nobody in; \
                 with it those get in whom cafile has certified",
            );
        }
        problems
    }

    /// The TOML of it, with where it comes from.
    pub(super) fn make(&self) -> Made {
        let mut blocked = self.blocked.clone();
        let address = self.address().unwrap_or_else(|problem| {
            blocked.push(problem);
            String::new()
        });
        let steps = self.steps().unwrap_or_else(|problem| {
            blocked.push(problem);
            Vec::new()
        });
        blocked.extend(self.tls_problems().into_iter().map(str::to_owned));
        if !blocked.is_empty() {
            return Made::Blocked(blocked);
        }
        let mut rows = vec![
            format!("name = {}", quoted(&self.name())),
            format!("address = {}", quoted(&address)),
            format!("kind = {}", quoted(self.kind())),
        ];
        if self.takes_ipv6_only() {
            rows.push("ipv6_only = true".to_owned());
        }
        if let (Some(cert), Some(key)) = (&self.certfile, &self.keyfile) {
            rows.push(format!("cert = {}", quoted(cert)));
            rows.push(format!("key = {}", quoted(key)));
        }
        if let (Some(ca), true) = (&self.cafile, self.asks_for_certificates()) {
            rows.push(format!("client_ca = {}", quoted(ca)));
            rows.push("require_client_cert = true".to_owned());
        }
        let steps: Vec<String> = steps.iter().map(|step| quoted(step)).collect();
        rows.push(format!("auth = [{}]", steps.join(", ")));
        if let Some(count) = self.max_connections {
            rows.push(format!("max_connections = {count}"));
        }
        if self.proxy_protocol {
            rows.push("proxy_protocol = true".to_owned());
        }
        if !self.origins.is_empty() {
            let origins: Vec<String> = self.origins.iter().map(|origin| quoted(origin)).collect();
            rows.push(format!("allowed_origins = [{}]", origins.join(", ")));
        }
        Made::Table(format!("# {}\n[[listeners]]\n{}\n", self.place, rows.join("\n")))
    }

    /// Tells whether who has no certificate is refused.
    pub(super) fn asks_for_certificates(&self) -> bool {
        self.require_certificate
    }

    fn kind(&self) -> &'static str {
        match (self.websockets, self.certfile.is_some()) {
            (false, false) => "tcp",
            (false, true) => "tls",
            (true, false) => "ws",
            (true, true) => "wss",
        }
    }
}
