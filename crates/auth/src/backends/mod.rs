//! Callers over gRPC and HTTP, and their rights: the gateway's side of [`access::backends`].
//!
//! [`BackendAuthenticator`] says who a caller is, by the bearer token or the client certificate that it shows. Callers that stay,
//! such as streams, ask again when something has changed ([`BackendAuthenticator::changes`]).

pub mod audit;
pub mod callers;
mod certificate;
pub mod file;
mod jwt;

use std::{net::IpAddr, path::PathBuf, sync::Arc};

use access::backends::{Role, Roles, Scope, TokenGrant, Tokens};
use arc_swap::ArcSwap;
use config::{self, BackendCertificate, ConfigError, Problem};
use edge::reload::Reload;
use gateway_core::clock;
use thiserror::Error;
use tokio::sync::watch;
use tracing::warn;

use access::jwt::looks_like_token;
use audit::AuditLine;
pub use certificate::CertificateNames;
use jwt::Jwt;

use crate::counters::count;

/// Somebody who calls, as long as that is so.
#[derive(Debug, Clone)]
pub struct Caller {
    /// By what it is known.
    pub credential: CredentialKind,
    /// Its name and what it may do.
    pub grant: Arc<TokenGrant>,
}

impl Caller {
    /// Returns whether both are one party.
    pub fn is_same_as(&self, other: &Self) -> bool {
        self.credential.as_str() == other.credential.as_str() && self.grant.id == other.grant.id
    }
}

/// By what a caller is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CredentialKind {
    /// Nobody was asked: `[backends]` is empty.
    Unasked,
    /// A token of the file.
    Token,
    /// A token that another party has signed, with keys of this reading of their file.
    Jwt(u64),
    /// The client certificate.
    Certificate,
}

impl CredentialKind {
    /// For logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unasked => "unasked",
            Self::Token => "token",
            Self::Jwt(_) => "jwt",
            Self::Certificate => "certificate",
        }
    }
}

/// Error that left a caller unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum UnknownCaller {
    /// Shows nothing that says who it is.
    #[error(
        "no credentials: send the metadata 'authorization: Bearer TOKEN', or use a client certificate that has a role"
    )]
    Nobody,
    /// Shows something that is none of ours.
    #[error("the credentials are not known here")]
    Wrong,
    /// The presented credentials have expired.
    #[error("the credentials have expired")]
    Expired,
    /// The presented credentials are no longer good.
    #[error("the credentials were revoked or changed")]
    Revoked,
}

impl UnknownCaller {
    /// The stable name for programs.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Nobody => "CREDENTIALS_MISSING",
            Self::Wrong => "CREDENTIALS_UNKNOWN",
            Self::Expired => "CREDENTIALS_EXPIRED",
            Self::Revoked => "CREDENTIALS_REVOKED",
        }
    }

    /// Counts a call that was denied for it.
    pub fn count(self) {
        count(|c| match self {
            Self::Nobody => c.backend_denied_nobody.add(1),
            Self::Wrong | Self::Revoked => c.backend_denied_wrong.add(1),
            Self::Expired => c.backend_denied_expired.add(1),
        });
    }
}

/// Everybody who may call.
pub struct BackendAuthenticator {
    on: bool,
    bearers: bool,
    tokens: ArcSwap<Tokens>,
    file: Option<PathBuf>,
    jwt: Option<(PathBuf, Jwt)>,
    /// Patterns of names and their grants.
    certificates: Vec<(String, TokenGrant)>,
    any_certificate: Option<Role>,
    anybody: Caller,
    changed: watch::Sender<u64>,
}

impl BackendAuthenticator {
    /// Opens the backends of a valid configuration.
    ///
    /// # Errors
    /// The faults of the file of tokens, a problem for each line.
    pub fn open(config: &config::Backends) -> Result<Self, ConfigError> {
        let file = config.tokens.clone();
        let tokens = match &file {
            Some(path) => file::read(path).map_err(|problems| {
                let of = |text| Problem::new("backends.tokens", path.display(), text, "");
                ConfigError(problems.into_iter().map(of).collect())
            })?,
            None => Tokens::default(),
        };
        let jwt = match &config.jwt.key_file {
            Some(path) => {
                let jwt = Jwt::open(path, &config.jwt);
                let wrong = |text| Problem::new("backends.jwt.key_file", path.display(), text, "");
                Some((path.clone(), jwt.map_err(|text| ConfigError(vec![wrong(text)]))?))
            }
            None => None,
        };
        if let Some(path) = file.as_ref().filter(|_| tokens.list().is_empty()) {
            warn!(
                file = %path.display(),
                "there are no tokens for backends yet; make one with 'mqtt-server token create'"
            );
        }
        Ok(Self {
            on: config.is_on(),
            bearers: config.takes_bearers(),
            tokens: ArcSwap::from_pointee(tokens),
            file,
            jwt,
            certificates: config.certificates.iter().map(of_entry).collect(),
            any_certificate: config.certificate_role,
            anybody: Caller {
                credential: CredentialKind::Unasked,
                grant: Arc::new(unlimited("anybody", Role::Admin)),
            },
            changed: watch::Sender::new(0),
        })
    }

    /// The caller where callers need not identify themselves.
    pub fn anybody(&self) -> &Caller {
        &self.anybody
    }

    /// Returns whether callers must identify themselves.
    pub fn is_on(&self) -> bool {
        self.on
    }

    /// The tokens now.
    pub fn tokens(&self) -> Arc<Tokens> {
        self.tokens.load_full()
    }

    /// Changes whenever what a caller may do could have changed.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// The caller with this value of `authorization`, or with a client certificate that has these names. A wrong value is not
    /// made good by a certificate.
    ///
    /// # Errors
    /// The reason for which the caller is not known.
    pub fn identify(
        &self,
        authorization: Option<&[u8]>,
        certificate: Option<&CertificateNames>,
    ) -> Result<Caller, UnknownCaller> {
        if !self.on {
            return Ok(self.anybody.clone());
        }
        match (authorization, certificate) {
            (Some(value), _) => self.bearer(value),
            (None, Some(names)) => self.holder(names),
            (None, None) => Err(UnknownCaller::Nobody),
        }
    }

    fn bearer(&self, value: &[u8]) -> Result<Caller, UnknownCaller> {
        let text = std::str::from_utf8(value).map_err(|_| UnknownCaller::Wrong)?;
        let (scheme, token) = text.split_once(' ').ok_or(UnknownCaller::Wrong)?;
        if !scheme.eq_ignore_ascii_case("bearer") {
            return Err(UnknownCaller::Wrong);
        }
        let token = token.trim();
        if let Some((_, jwt)) = self.jwt.as_ref().filter(|_| looks_like_token(token)) {
            let (grant, reading) = jwt.find(token)?;
            return Ok(Caller { credential: CredentialKind::Jwt(reading), grant });
        }
        let grant = Arc::clone(self.tokens.load().find(token).ok_or(UnknownCaller::Wrong)?);
        if grant.is_expired(now()) {
            return Err(UnknownCaller::Expired);
        }
        Ok(Caller { credential: CredentialKind::Token, grant })
    }

    fn holder(&self, names: &CertificateNames) -> Result<Caller, UnknownCaller> {
        let named = |(pattern, _): &&(String, TokenGrant)| {
            names.all().any(|name| access::backends::pattern_matches(pattern, name))
        };
        let mut grant = match (self.certificates.iter().find(named), self.any_certificate) {
            (Some((_, grant)), _) => grant.clone(),
            (None, Some(role)) => unlimited("", role),
            (None, None) => return Err(UnknownCaller::Nobody),
        };
        // A connection may outlive its certificate.
        grant.expires = names.until;
        if grant.is_expired(now()) {
            return Err(UnknownCaller::Expired);
        }
        grant.id = names.all().next().unwrap_or("certificate without a name").to_owned();
        Ok(Caller { credential: CredentialKind::Certificate, grant: Arc::new(grant) })
    }

    /// Checks that the credentials of `caller` are still good.
    ///
    /// # Errors
    /// The reason for which the credentials are no longer good.
    pub fn check(&self, caller: &Caller) -> Result<(), UnknownCaller> {
        if caller.grant.is_expired(now()) {
            return Err(UnknownCaller::Expired);
        }
        match caller.credential {
            CredentialKind::Jwt(reading)
                if self.jwt.as_ref().is_none_or(|(_, jwt)| jwt.reading() != reading) =>
            {
                Err(UnknownCaller::Revoked)
            }
            CredentialKind::Token if !self.tokens.load().has(&caller.grant) => Err(UnknownCaller::Revoked),
            _ => Ok(()),
        }
    }

    /// Checks that the metrics may be shown to the sender of this value of `authorization`: to anybody where HTTP asks
    /// for none, else to a caller that may read and has all devices in scope, since the figures are those of all
    /// devices. A denial is counted and logged.
    ///
    /// # Errors
    /// The caller is not known, or may not.
    pub fn may_read_metrics(&self, authorization: Option<&[u8]>, peer: IpAddr) -> Result<(), MetricsDenied> {
        if !self.bearers {
            return Ok(());
        }
        let line = |caller| AuditLine { caller, method: "GET /metrics", target: None, peer: Some(peer) };
        match self.identify(authorization, None) {
            Ok(caller)
                if caller.grant.scope.devices().is_none() && Roles::READ.include(caller.grant.role) =>
            {
                Ok(())
            }
            Ok(caller) => {
                count(|c| c.backend_denied_scope.add(1));
                audit::denied(line(Some(&caller)), &"OUT_OF_SCOPE");
                Err(MetricsDenied::Scope)
            }
            Err(unknown) => {
                unknown.count();
                audit::denied(line(None), &unknown.reason());
                Err(MetricsDenied::Unknown)
            }
        }
    }

    /// Takes these tokens for the ones there are, and has callers that stay ask again.
    fn take(&self, tokens: Tokens) {
        self.tokens.store(Arc::new(tokens));
        self.changed.send_modify(|changes| *changes += 1);
    }

    /// Changes the file by `edit`, as [`file::edit`] does, and takes what it has then. Blocks.
    ///
    /// # Errors
    /// The errors of [`file::edit`], or a missing file.
    pub fn edit<E: From<file::FileError>>(
        &self,
        edit: impl FnOnce(&str) -> Result<String, E>,
    ) -> Result<(), E> {
        let path = self.file.as_ref().ok_or(file::FileError::None)?;
        let tokens = file::edit(path, edit)?;
        self.take(tokens);
        Ok(())
    }
}

/// Reason to show no metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricsDenied {
    /// To nobody known.
    Unknown,
    /// Refusal to a caller whose scope is too small.
    Scope,
}

impl Reload for BackendAuthenticator {
    fn name(&self) -> &'static str {
        "tokens"
    }

    fn files(&self) -> Vec<PathBuf> {
        self.file.iter().cloned().collect()
    }

    fn reload(&self) -> Result<String, Vec<String>> {
        let Some(path) = &self.file else { return Ok("no file".to_owned()) };
        let tokens = file::read(path)?;
        let count = tokens.list().len();
        self.take(tokens);
        Ok(format!("{count} tokens"))
    }
}

/// The public keys of JSON Web Tokens, which are read again apart from the tokens of the file.
pub struct JwtKeys(pub Arc<BackendAuthenticator>);

impl Reload for JwtKeys {
    fn name(&self) -> &'static str {
        "keys of backends"
    }

    fn files(&self) -> Vec<PathBuf> {
        self.0.jwt.iter().map(|(path, _)| path.clone()).collect()
    }

    fn reload(&self) -> Result<String, Vec<String>> {
        let Some((path, jwt)) = &self.0.jwt else { return Ok("no file".to_owned()) };
        if jwt.reload(path).map_err(|problem| vec![problem])? {
            self.0.changed.send_modify(|changes| *changes += 1);
        }
        Ok(format!("{} keys", jwt.keys()))
    }
}

fn of_entry(entry: &BackendCertificate) -> (String, TokenGrant) {
    let scope = Scope::new(entry.topics.clone(), entry.devices.clone());
    // Validation has seen it; nothing at all is in the scope of one that is wrong.
    let none = || Scope::new(Some(Vec::new()), Some(Vec::new())).unwrap_or_default();
    (entry.name.clone(), TokenGrant { scope: scope.unwrap_or_else(|_| none()), ..unlimited("", entry.role) })
}

/// All that a role may do.
fn unlimited(id: &str, role: Role) -> TokenGrant {
    let (id, note) = (id.to_owned(), String::new());
    TokenGrant { id, role, scope: Scope::ALL, created: 0, expires: None, note, hash: Default::default() }
}

/// Seconds since 1970 on the wall clock.
pub fn now() -> u64 {
    clock::to_wall(clock::now()).0 / 1_000
}

#[cfg(test)]
mod tests {
    use access::backends::{hash, mint};

    use super::*;
    use config::Backends as Section;

    fn grant(id: &str, token: &str, expires: Option<u64>) -> TokenGrant {
        TokenGrant { hash: hash(token), expires, ..unlimited(id, Role::Reader) }
    }

    #[test]
    fn a_caller_is_who_its_token_says_as_long_as_the_file_does() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens");
        let section = Section { tokens: Some(path.clone()), ..Section::default() };
        let backends = BackendAuthenticator::open(&section).unwrap();
        let bearer = |text: &str| backends.identify(Some(text.as_bytes()), None);
        let (token, id) = mint().unwrap();
        assert_eq!(bearer(&format!("Bearer {token}")).unwrap_err(), UnknownCaller::Wrong);
        let mut changes = backends.changes();
        let write = |grant: &TokenGrant| {
            backends.edit(|text| Tokens::with(text, grant).map_err(|_| file::FileError::None)).unwrap();
        };
        write(&grant(&id, &token, None));
        assert!(changes.has_changed().unwrap());
        changes.mark_unchanged();
        let caller = bearer(&format!("bearer  {token} ")).unwrap();
        assert_eq!((caller.credential, caller.grant.id.as_str()), (CredentialKind::Token, id.as_str()));
        assert_eq!(backends.check(&caller), Ok(()));
        for wrong in ["", "Bearer", &token, "Basic eDp5", "Bearer mqs_x", "Bearer \u{fe}"] {
            assert_eq!(bearer(wrong).unwrap_err(), UnknownCaller::Wrong, "{wrong}");
        }
        assert_eq!(backends.identify(Some(b"Bearer \xff"), None).unwrap_err(), UnknownCaller::Wrong);
        assert_eq!(backends.identify(None, None).unwrap_err(), UnknownCaller::Nobody);
        write(&grant("old", "mqs_old", Some(1_000)));
        assert_eq!(bearer("Bearer mqs_old").unwrap_err(), UnknownCaller::Expired);

        let left = Tokens::without(&std::fs::read_to_string(&path).unwrap(), &id).unwrap();
        std::fs::write(&path, format!("{left}nonsense\n")).unwrap();
        let problems = backends.reload().unwrap_err();
        assert!(problems[0].contains("line 2"), "{problems:?}");
        assert_eq!(backends.check(&caller), Ok(()), "a broken file keeps what was there");
        std::fs::write(&path, left).unwrap();
        assert_eq!(backends.reload().unwrap(), "1 tokens");
        assert_eq!(backends.check(&caller), Err(UnknownCaller::Revoked));
    }

    #[test]
    fn the_first_entry_that_names_a_certificate_counts() {
        let entry = |name: &str, role| BackendCertificate {
            name: name.to_owned(),
            role,
            topics: Some(vec!["a/#".to_owned()]),
            devices: None,
        };
        let section = Section {
            certificates: vec![
                entry("*.ops.example.com", Role::Operator),
                entry("*.example.com", Role::Reader),
            ],
            ..Section::default()
        };
        let named = |names: &[&str]| CertificateNames::of(names.iter().map(|name| (*name).to_owned()));
        let role = |section: &Section, names: &[&str]| {
            let backends = BackendAuthenticator::open(section).unwrap();
            backends.identify(None, Some(&named(names))).map(|caller| caller.grant.role)
        };
        assert_eq!(role(&section, &["x.ops.example.com"]), Ok(Role::Operator));
        assert_eq!(role(&section, &["CN", "x.example.com"]), Ok(Role::Reader));
        assert_eq!(role(&section, &["x.example.org"]), Err(UnknownCaller::Nobody));
        let section = Section { certificate_role: Some(Role::Admin), ..section };
        assert_eq!(role(&section, &["x.example.org"]), Ok(Role::Admin));
        let backends = BackendAuthenticator::open(&section).unwrap();
        let mut over = named(&["x.ops.example.com"]);
        over.until = Some(1_000);
        assert_eq!(backends.identify(None, Some(&over)).unwrap_err(), UnknownCaller::Expired);
        let wrong = backends.identify(Some(b"Bearer x"), Some(&named(&["x.ops.example.com"])));
        assert_eq!(wrong.unwrap_err(), UnknownCaller::Wrong, "a wrong token beside a good certificate");
    }
}
