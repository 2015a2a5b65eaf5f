//! Listeners: where they bind, what they speak, and who may connect through them.

use std::{collections::BTreeMap, net::IpAddr};

use super::draft::quoted;

/// Who may connect, and what they may do: of all listeners, or of one with `per_listener_settings`.
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
pub(super) struct Listener {
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
    pub(super) require_certificate: bool,
    pub(super) identity_as_username: bool,
    pub(super) origins: Vec<String>,
    pub(super) proxy_protocol: bool,
    pub(super) guard: ListenerGuard,
    /// Keys of `[limits]` that are of a listener there: value, and the line.
    pub(super) limits: BTreeMap<&'static str, (u64, String)>,
    /// Why it cannot be carried over without letting in others than before.
    pub(super) blocked: Vec<String>,
}

/// What became of a listener.
pub(super) enum Made {
    Table(String),
    /// It would let in others than before, or cannot be bound.
    Blocked(Vec<String>),
}

impl Listener {
    /// What it is called in logs, metrics and rules.
    pub(super) fn name(&self) -> String {
        let kind = match (self.websockets, self.certfile.is_some()) {
            (false, false) => "mqtt",
            (false, true) => "mqtts",
            (true, false) => "ws",
            (true, true) => "wss",
        };
        let host = self.host.as_deref().filter(|host| !matches!(*host, "0.0.0.0" | "::"));
        match (&self.unix, host) {
            (Some(path), _) => format!("unix:{path}"),
            (None, None) => format!("{kind}-{}", self.port),
            (None, Some(host)) => format!("{kind}-{host}-{}", self.port),
        }
    }

    fn address(&self) -> Result<String, String> {
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

    /// The steps of `[auth]` that do what Mosquitto did.
    fn steps(&self) -> Result<Vec<&'static str>, String> {
        if let Some(plugin) = &self.guard.plugin {
            return Err(format!(
                "the plugin {plugin} may decide who connects and what they may do; use [auth.http], [auth.grpc] or a password \
                 file with rules in its place, and open the listener then"
            ));
        }
        if self.identity_as_username {
            return match self.cafile {
                Some(_) => Ok(vec!["certificate"]),
                None => {
                    Err("use_identity_as_username without cafile: nothing checks the certificates".to_owned())
                }
            };
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

    /// The TOML of it, with where it comes from.
    pub(super) fn make(&self) -> Made {
        let (mut blocked, mut found) = (self.blocked.clone(), (String::new(), Vec::new()));
        match self.address() {
            Ok(address) => found.0 = address,
            Err(problem) => blocked.push(problem),
        }
        match self.steps() {
            Ok(steps) => found.1 = steps,
            Err(problem) => blocked.push(problem),
        }
        let mut rows = vec![
            format!("name = {}", quoted(&self.name())),
            format!("address = {}", quoted(&found.0)),
            format!("kind = {}", quoted(self.kind())),
        ];
        match (&self.certfile, &self.keyfile) {
            (Some(cert), Some(key)) => {
                rows.push(format!("cert = {}", quoted(cert)));
                rows.push(format!("key = {}", quoted(key)));
            }
            (None, None) => {}
            _ => blocked.push("certfile and keyfile belong together, and one is missing".to_owned()),
        }
        match &self.cafile {
            Some(ca) if self.asks_for_certificates() => {
                rows.push(format!("client_ca = {}", quoted(ca)));
                if self.require_certificate {
                    rows.push("require_client_cert = true".to_owned());
                }
            }
            None if self.require_certificate => blocked.push(
                "require_certificate needs a file of certificates here: put those of capath into one"
                    .to_owned(),
            ),
            _ => {}
        }
        let steps: Vec<String> = found.1.iter().map(|step| quoted(step)).collect();
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
        if !blocked.is_empty() {
            return Made::Blocked(blocked);
        }
        Made::Table(format!("# {}\n[[listeners]]\n{}\n", self.place, rows.join("\n")))
    }

    pub(super) fn asks_for_certificates(&self) -> bool {
        self.require_certificate || self.identity_as_username
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
