//! Proved identities.

use std::{collections::BTreeMap, sync::Arc};

use gateway_core::Timestamp;
use serde::{Deserialize, Serialize};

/// Method by which a device has proved its identity.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// Not at all.
    #[default]
    Anonymous,
    /// By the client certificate that TLS verified.
    Certificate,
    /// By user name and password.
    Password,
    /// By a JSON Web Token.
    Jwt,
    /// By SCRAM, in MQTT 5's enhanced authentication.
    Scram,
    /// Somebody else has decided: a hook, or the embedding program.
    Hook,
}

impl Method {
    /// Returns whether the method proves anything.
    pub fn is_proof(self) -> bool {
        self != Self::Anonymous
    }
}

/// Identity that a device has proved. It does not change while the device is connected, but for re-authentication,
/// which replaces it as a whole. The client id is no part of it: many devices may share one identity.
#[derive(Debug, Clone, Default)]
pub struct Principal {
    /// Method of proof.
    pub method: Method,
    /// User name, `%u` in rules. From a password, SCRAM, a token's claim, a certificate's template or a hook.
    pub username: Option<Box<str>>,
    /// Common name of the verified certificate, `%cn` in rules.
    pub common_name: Option<Box<str>>,
    /// Groups that rules may name.
    pub groups: Box<[Box<str>]>,
    /// Further claims of a token or hook, as text.
    pub claims: BTreeMap<Box<str>, Box<[Box<str>]>>,
    /// Tenant whose quotas count; `None` counts the quotas of the listener.
    pub tenant: Option<Arc<str>>,
    /// Time from which the identity is no longer valid, on the clock of the gateway; `None` is never.
    pub expires: Option<Timestamp>,
}

/// Bytes of a text, or of a list of them, beside its content.
const TEXT: usize = size_of::<Box<str>>();

impl Principal {
    /// Bytes of its names, groups and claims, with what keeping them apart takes.
    pub fn bytes(&self) -> usize {
        let texts = |texts: &[Box<str>]| texts.iter().map(|text| TEXT + text.len()).sum::<usize>();
        let names = [self.username.as_deref(), self.common_name.as_deref(), self.tenant.as_deref()];
        names.into_iter().flatten().map(str::len).sum::<usize>()
            + texts(&self.groups)
            + self.claims.iter().map(|(name, values)| 2 * TEXT + name.len() + texts(values)).sum::<usize>()
    }
}

/// Somebody at the moment of a decision.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    /// Client id, `%c` in rules.
    pub client_id: &'a str,
    /// Name of the listener through which it came.
    pub listener: &'a str,
    /// Identity.
    pub principal: &'a Principal,
}
