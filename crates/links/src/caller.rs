//! Facts about the caller of a call that is passed on, from the gateway that checked it to the one that answers.

use std::net::SocketAddr;

use access::backends::{Role, Scope, TokenGrant};
use base64::{Engine as _, prelude::BASE64_STANDARD_NO_PAD};
use serde::{Deserialize, Serialize};

use crate::MOST_HEADER;

/// A caller whose rights were checked. Fields that a newer version adds are passed over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassedCaller {
    /// Kind of credential by which the caller is known, for the audit log.
    pub credential: String,
    /// Address of the caller, unless it is inside the gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<SocketAddr>,
    id: String,
    role: Role,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    topics: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    devices: Option<Vec<String>>,
    /// Seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    expires: Option<u64>,
}

impl PassedCaller {
    /// The caller with this grant.
    pub fn new(credential: &str, grant: &TokenGrant, peer: Option<SocketAddr>) -> Self {
        let list = |list: &[Box<str>]| list.iter().map(|entry| entry.to_string()).collect();
        Self {
            credential: credential.to_owned(),
            peer,
            id: grant.id.clone(),
            role: grant.role,
            topics: grant.scope.topics().map(list),
            devices: grant.scope.devices().map(list),
            expires: grant.expires,
        }
    }

    /// The rights that it has; `None` if its scope is not one.
    pub fn grant(&self) -> Option<TokenGrant> {
        Some(TokenGrant {
            id: self.id.clone(),
            role: self.role,
            scope: Scope::new(self.topics.clone(), self.devices.clone()).ok()?,
            created: 0,
            expires: self.expires,
            note: String::new(),
            hash: Default::default(),
        })
    }

    /// As the value of a header; `None` if that would be too long.
    pub(crate) fn to_header(&self) -> Option<String> {
        let header = BASE64_STANDARD_NO_PAD.encode(serde_json::to_vec(self).ok()?);
        (header.len() <= MOST_HEADER).then_some(header)
    }

    /// Reads the value of a header; `None` if it is not one.
    pub(crate) fn from_header(value: &[u8]) -> Option<Self> {
        serde_json::from_slice(&BASE64_STANDARD_NO_PAD.decode(value).ok()?).ok()
    }
}
