//! `[auth]`: who may connect, and how a device proves who it is.

use std::{fmt, path::PathBuf, time::Duration};

use access::{ClientIdTemplate, certificate::NameTemplate};
use serde::{Deserialize, Serialize};

use super::{
    Address, AuthGrpc, Config, ConfigError, Listener, OnError, RemoteLimits, Span, address::optional,
    validate::Check,
};

/// One step of the chain that a device's CONNECT goes through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AuthStep {
    /// The client certificate that TLS has verified.
    Certificate,
    /// A JSON Web Token as password or user name.
    Jwt,
    /// SCRAM-SHA-256 in MQTT 5's enhanced authentication, from the password file.
    Scram,
    /// User name and password, from the password file.
    Password,
    /// The answer of a service of yours over HTTP.
    Http,
    /// The answer of a service of yours over gRPC.
    Grpc,
    /// Devices that present no password are let in.
    Anonymous,
}

impl fmt::Display for AuthStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// `[auth.certificate]`: what a verified client certificate says about its device. Templates may have {cn}, {ou}, {o},
/// {dns}, {uri}, {email}, {serial} and {fingerprint}.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct AuthCertificate {
    /// Template of the user name; empty is none.
    pub username: String,
    /// Template of the client id that the device must use; empty lets it choose.
    pub client_id: String,
    /// Templates of its groups.
    pub groups: Vec<String>,
    /// Template of its tenant; empty is that of the listener.
    pub tenant: String,
}

impl Default for AuthCertificate {
    fn default() -> Self {
        Self {
            username: "{cn}".to_owned(),
            client_id: String::new(),
            groups: Vec::new(),
            tenant: String::new(),
        }
    }
}

/// `[auth.password]`: what a user of the password file may do with it, by the steps `password` and `scram`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct AuthPassword {
    /// Template of the client id that a user must connect with; empty lets the device choose. It has {username} once.
    pub client_id: String,
}

/// `[auth.jwt]`: tokens that devices bring as password. In names of claims `a.b` is `b` inside `a`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct AuthJwt {
    /// Public key, PEM, or key set, JWKS.
    #[serde(with = "optional")]
    pub key_file: Option<PathBuf>,
    /// Shared secret of tokens that are signed with HS256, HS384 or HS512.
    #[serde(with = "optional")]
    pub secret_file: Option<PathBuf>,
    /// URL from which a key set is fetched; empty is nowhere.
    #[serde(with = "optional")]
    pub jwks_url: Option<String>,
    /// CA of that server's certificate, PEM.
    #[serde(with = "optional")]
    pub jwks_ca: Option<PathBuf>,
    /// How often it is fetched.
    pub jwks_interval: Span,
    /// The token is the user name.
    pub in_username: bool,
    /// What `iss` must be; empty takes every one.
    pub issuer: String,
    /// Accepted `aud`: the claim must be, or have, one of these; none takes every one.
    pub audience: Vec<String>,
    /// By how much the issuer's clock may differ.
    pub leeway: Span,
    /// Refuse tokens that never expire.
    pub require_expiry: bool,
    /// Claim with the user name.
    pub username: String,
    /// Claim with the client id that the device must use; empty lets it choose.
    pub client_id: String,
    /// Claim with the groups; empty is none.
    pub groups: String,
    /// Claim with the tenant; empty is that of the listener.
    pub tenant: String,
}

impl Default for AuthJwt {
    fn default() -> Self {
        Self {
            key_file: None,
            secret_file: None,
            jwks_url: None,
            jwks_ca: None,
            jwks_interval: Span(Duration::from_secs(300)),
            in_username: false,
            issuer: String::new(),
            audience: Vec::new(),
            leeway: Span(Duration::from_secs(5)),
            require_expiry: true,
            username: "sub".to_owned(),
            client_id: String::new(),
            groups: String::new(),
            tenant: String::new(),
        }
    }
}

impl AuthJwt {
    /// Returns whether there is a key to check tokens with.
    pub fn is_on(&self) -> bool {
        self.key_file.is_some() || self.secret_file.is_some() || self.jwks_url.is_some()
    }
}

/// `[auth.http]`: a service that is asked about each login.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct AuthHttp {
    /// Where logins are posted to; empty asks nobody.
    #[serde(with = "optional")]
    pub url: Option<String>,
    /// CA of the service's certificate, PEM.
    #[serde(with = "optional")]
    pub ca: Option<PathBuf>,
    /// Treatment of a login while the service does not answer and nothing is remembered about it.
    pub on_error: OnError,
    /// `[auth.http.limits]`.
    pub limits: RemoteLimits,
}

/// `[auth]`.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Auth {
    /// Steps in their order; none takes every step that is configured.
    pub order: Vec<AuthStep>,
    /// Let devices connect that prove nothing, on every listener that does not say otherwise.
    pub allow_anonymous: bool,
    /// File of users and hashes.
    #[serde(with = "optional")]
    pub password_file: Option<PathBuf>,
    /// Threads that hash passwords, 0 is half of the cores.
    pub hash_threads: usize,
    /// Logins that may wait for them; fewer, if not so many can be checked in time. One more is refused as busy.
    pub max_waiting_hashes: usize,
    /// Time for which a password that was right need not be hashed again, 0 hashes each time.
    pub password_cache_ttl: Span,
    /// Passwords of which that is remembered.
    pub password_cache_size: usize,
    /// `[auth.password]`.
    pub password: AuthPassword,
    /// `[auth.certificate]`.
    pub certificate: AuthCertificate,
    /// `[auth.jwt]`.
    pub jwt: AuthJwt,
    /// `[auth.http]`.
    pub http: AuthHttp,
    /// `[auth.grpc]`.
    pub grpc: AuthGrpc,
}

impl Default for Auth {
    fn default() -> Self {
        Self {
            order: Vec::new(),
            allow_anonymous: false,
            password_file: None,
            hash_threads: 0,
            max_waiting_hashes: 1_000,
            password_cache_ttl: Span(Duration::from_hours(24)),
            password_cache_size: 100_000,
            password: AuthPassword::default(),
            certificate: AuthCertificate::default(),
            jwt: AuthJwt::default(),
            http: AuthHttp::default(),
            grpc: AuthGrpc::default(),
        }
    }
}

impl Config {
    /// The steps of a listener, in their order: its own, else those of `[auth]`, else every one that is configured.
    /// None means that nobody may connect.
    pub fn auth_steps(&self, address: &Address, listener: &Listener) -> Vec<AuthStep> {
        let named = [&listener.auth, &self.auth.order].into_iter().find(|steps| !steps.is_empty());
        if let Some(steps) = named {
            return steps.clone();
        }
        let tls = self.listener_tls(listener);
        let certificates = listener.kind.is_tls() && tls.client_ca.is_some();
        let mut steps = Vec::new();
        let configured = [
            (AuthStep::Certificate, certificates),
            (AuthStep::Jwt, self.auth.jwt.is_on()),
            (AuthStep::Scram, self.auth.password_file.is_some()),
            (AuthStep::Password, self.auth.password_file.is_some()),
            (AuthStep::Http, self.auth.http.url.is_some()),
            (AuthStep::Grpc, self.auth.grpc.authenticates()),
        ];
        steps.extend(configured.into_iter().filter_map(|(step, configured)| configured.then_some(step)));
        // On this machine only, what is meant for trying things out goes on working.
        let required = listener.kind.is_tls() && tls.require_client_cert;
        let open = !self.checks_devices() && address.is_local() && !required;
        if self.auth.allow_anonymous || open {
            steps.push(AuthStep::Anonymous);
        }
        steps
    }

    /// Returns whether some method is configured by which devices of every listener can prove themselves.
    fn checks_devices(&self) -> bool {
        let auth = &self.auth;
        let remote = auth.http.url.is_some() || auth.grpc.authenticates();
        auth.password_file.is_some() || auth.jwt.is_on() || remote
    }

    /// Threads that hash passwords.
    pub fn hash_threads(&self) -> usize {
        match self.auth.hash_threads {
            0 => std::thread::available_parallelism().map_or(1, |cores| cores.get().div_ceil(2)),
            threads => threads,
        }
    }

    /// Refuses listeners that other machines reach and that let in whoever comes, where nobody has said so. Not asked
    /// of a gateway whose embedding program decides who may connect.
    ///
    /// # Errors
    /// Each such listener, with the ways out.
    pub fn check_devices(&self) -> Result<(), ConfigError> {
        let mut check = Check::default();
        for (address, listener) in self.effective_listeners() {
            if !address.is_local() && self.auth_steps(&address, &listener).is_empty() {
                let number = self.listeners.iter().position(|known| known.name == listener.name);
                let key = number.map_or_else(|| "addr".to_owned(), |n| format!("listeners[{n}].address"));
                check.fail(
                    key,
                    &address,
                    "reachable from other machines, and nothing says which devices may connect",
                    "set auth.password_file or another step of [auth], or require client certificates \
                     (tls.client_ca and tls.require_client_cert), or let everybody in with --allow-anonymous",
                );
            }
        }
        check.finish()
    }

    /// Returns a warning, in one line, about listeners that take devices which prove nothing; meant for gateways where
    /// no embedding program decides.
    pub fn anonymous_warning(&self) -> Option<String> {
        let open = |(address, listener): &(Address, Listener)| {
            self.auth_steps(address, listener).contains(&AuthStep::Anonymous)
        };
        let names: Vec<String> =
            self.effective_listeners().into_iter().filter(open).map(|(_, listener)| listener.name).collect();
        (!names.is_empty()).then(|| {
            format!(
                "devices are anonymous on listener {}: nothing checks who connects; see docs/security.md",
                names.join(", ")
            )
        })
    }

    pub(super) fn check_auth(&self, check: &mut Check) {
        let auth = &self.auth;
        check.positive("auth.max_waiting_hashes", auth.max_waiting_hashes, auth.max_waiting_hashes == 0);
        if auth.hash_threads > 256 {
            check.fail(
                "auth.hash_threads",
                auth.hash_threads,
                "more threads than make sense",
                "use 0 for half of the cores",
            );
        }
        let interval = auth.jwt.jwks_interval;
        check.positive("auth.jwt.jwks_interval", interval, interval.0.is_zero());
        auth.http.limits.check("auth.http.limits", check);
        auth.grpc.check(check);
        let certificate = &auth.certificate;
        let groups = certificate.groups.iter().map(|text| ("groups", text));
        let single = [
            ("username", &certificate.username),
            ("client_id", &certificate.client_id),
            ("tenant", &certificate.tenant),
        ];
        for (name, text) in single.into_iter().chain(groups) {
            if let Err(problem) = NameTemplate::parse(text) {
                check.fail(
                    format!("auth.certificate.{name}"),
                    text,
                    problem.to_string(),
                    "use {cn}, {ou}, {o}, {dns}, {uri}, {email}, {serial} or {fingerprint}",
                );
            }
        }
        self.check_client_id_of_users(check);
        let lists = std::iter::once(("auth.order".to_owned(), &auth.order));
        let own = self.listeners.iter().enumerate();
        let own = own.map(|(number, listener)| (format!("listeners[{number}].auth"), &listener.auth));
        for (key, steps) in lists.chain(own) {
            self.check_steps(&key, steps, check);
        }
    }

    fn check_client_id_of_users(&self, check: &mut Check) {
        let (key, client_id) = ("auth.password.client_id", &self.auth.password.client_id);
        if client_id.is_empty() {
            return;
        }
        if let Err(problem) = ClientIdTemplate::parse(client_id) {
            check.fail(key, client_id, problem.to_string(), "write it like {username} or lab-{username}");
        }
        if self.auth.password_file.is_none() {
            let fix =
                "set auth.password_file, or remove it; certificates and tokens have a client_id of their own";
            check.fail(key, client_id, "there is no password file whose users it could be about", fix);
        }
    }

    fn check_steps(&self, key: &str, steps: &[AuthStep], check: &mut Check) {
        for (number, step) in steps.iter().enumerate() {
            if steps[..number].contains(step) {
                check.fail(key, step, "is there twice", "name each step once");
            }
            let missing = match step {
                AuthStep::Jwt if !self.auth.jwt.is_on() => Some("auth.jwt.key_file, secret_file or jwks_url"),
                AuthStep::Scram | AuthStep::Password if self.auth.password_file.is_none() => {
                    Some("auth.password_file")
                }
                AuthStep::Http if self.auth.http.url.is_none() => Some("auth.http.url"),
                AuthStep::Grpc if !self.auth.grpc.authenticates() => {
                    Some("auth.grpc.url and auth.grpc.authenticate")
                }
                _ => None,
            };
            if let Some(missing) = missing {
                check.fail(key, step, format!("needs {missing}"), "set it, or leave the step out");
            }
        }
    }
}
