//! `[backends]`: who may call over gRPC and HTTP, and as what.

use std::{path::PathBuf, time::Duration};

use access::backends::{Role, Scope};
use serde::{Deserialize, Serialize};

use super::{Config, Span, address::optional, validate::Check};

/// `[backends]`. With nothing set in it, whoever reaches gRPC and HTTP may do everything.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Backends {
    /// File of bearer tokens, as `mqtt-server token` makes it; one that is not there is empty.
    #[serde(with = "optional")]
    pub tokens: Option<PathBuf>,
    /// Role, with all topics and devices, of a client certificate that no entry of `certificates` names.
    #[serde(with = "optional")]
    pub certificate_role: Option<Role>,
    /// Roles of client certificates; the first entry that names one counts.
    pub certificates: Vec<BackendCertificate>,
    /// `[backends.jwt]`.
    pub jwt: BackendJwt,
}

/// `[backends.jwt]`: JSON Web Tokens, signed by an issuer of the operator.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct BackendJwt {
    /// Public key, PEM, or key set, JWKS; empty takes no such tokens.
    #[serde(with = "optional")]
    pub key_file: Option<PathBuf>,
    /// `iss` must be this; empty takes every one.
    pub issuer: String,
    /// `aud` must have one of these; none takes every one.
    pub audience: Vec<String>,
    /// By how much the issuer's clock may differ.
    pub leeway: Span,
    /// Claim with the name of the caller. As in all of these, `a.b` is `b` inside `a`.
    pub name: String,
    /// Claim with the role, or roles of which the first known one counts. A token without it is refused.
    pub role: String,
    /// Claim with topic filters; a token without it has none. Empty is all topics for every token.
    pub topics: String,
    /// Claim with patterns of client ids; a token without it has none. Empty is all devices for every token.
    pub devices: String,
}

impl Default for BackendJwt {
    fn default() -> Self {
        Self {
            key_file: None,
            issuer: String::new(),
            audience: Vec::new(),
            leeway: Span(Duration::from_secs(5)),
            name: "sub".to_owned(),
            role: "role".to_owned(),
            topics: String::new(),
            devices: String::new(),
        }
    }
}

/// One `[[backends.certificates]]` entry.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct BackendCertificate {
    /// Common name or a subject alternative name (DNS, URI or e-mail), with `*` for any characters.
    pub name: String,
    /// Role of the holder.
    pub role: Role,
    /// Topic filters; without it all topics.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topics: Option<Vec<String>>,
    /// Patterns of client ids, with `*` for any characters; without it all devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<Vec<String>>,
}

impl Backends {
    /// Returns whether callers must show who they are.
    pub fn is_on(&self) -> bool {
        let by_certificate = self.certificate_role.is_some() || !self.certificates.is_empty();
        self.takes_bearers() || by_certificate
    }

    /// Returns whether callers can identify themselves with a bearer token.
    pub fn takes_bearers(&self) -> bool {
        self.tokens.is_some() || self.jwt.key_file.is_some()
    }
}

impl Config {
    pub(super) fn check_backends_section(&self, check: &mut Check) {
        let backends = &self.backends;
        for (number, entry) in backends.certificates.iter().enumerate() {
            if entry.name.is_empty() {
                check.fail(
                    format!("backends.certificates[{number}].name"),
                    "\"\"",
                    "no name",
                    "write the common name of the certificate, or a DNS name, URI or e-mail address in it",
                );
            }
            if let Err(error) = Scope::new(entry.topics.clone(), entry.devices.clone()) {
                let text = error.to_string();
                let (problem, fix) = text.split_once(": ").unwrap_or((&text, "use fewer"));
                check.fail(format!("backends.certificates[{number}]"), &entry.name, problem, fix);
            }
        }
        if backends.jwt.key_file.is_some() && backends.jwt.role.is_empty() {
            check.fail("backends.jwt.role", "\"\"", "no claim for the role", "name the claim that has it");
        }
        let by_certificate = backends.certificate_role.is_some() || !backends.certificates.is_empty();
        if by_certificate && !(self.grpc.tls && self.grpc.client_ca.is_some()) {
            check.fail(
                "backends.certificates",
                format!("{} entries", backends.certificates.len()),
                "nothing asks backends for certificates",
                "set grpc.client_ca, and grpc.tls = true",
            );
        }
    }
}
