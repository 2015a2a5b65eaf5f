//! Authors of things that outlive their connection, as text that is kept with the thing, also on disk.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Method, Principal};

/// The client that left something: all that rules can ask about it, but for its client id.
#[derive(Debug, Clone)]
pub struct Author {
    /// Name of the listener through which it came.
    pub listener: String,
    /// Identity of the client at that time.
    pub principal: Principal,
    /// Not a rule allowed what was left, but a service of the user.
    pub by_service: bool,
}

#[derive(Serialize, Deserialize)]
struct AuthorFields {
    listener: String,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    by_service: bool,
    method: Method,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    username: Option<Box<str>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    common_name: Option<Box<str>>,
    #[serde(default, skip_serializing_if = "<[_]>::is_empty")]
    groups: Box<[Box<str>]>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    claims: BTreeMap<Box<str>, Box<[Box<str>]>>,
}

impl Author {
    /// As text, without tenant and expiry, of which rules know nothing.
    pub fn write(listener: &str, principal: &Principal, by_service: bool) -> String {
        let written = AuthorFields {
            listener: listener.to_owned(),
            by_service,
            method: principal.method,
            username: principal.username.clone(),
            common_name: principal.common_name.clone(),
            groups: principal.groups.clone(),
            claims: principal.claims.clone(),
        };
        // Nothing of it can fail to be JSON; if it did, the author would be unknown, to whom nothing is allowed.
        serde_json::to_string(&written).unwrap_or_default()
    }

    /// Reads what [`Self::write`] wrote; `None` if it is something else.
    pub fn read(text: &str) -> Option<Self> {
        let AuthorFields { listener, by_service, method, username, common_name, groups, claims } =
            serde_json::from_str(text).ok()?;
        let principal = Principal { method, username, common_name, groups, claims, ..Principal::default() };
        Some(Self { listener, principal, by_service })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_author_comes_back_with_all_that_rules_can_ask() {
        let principal = Principal {
            method: Method::Jwt,
            username: Some("an\"na".into()),
            common_name: Some("gate".into()),
            groups: ["a".into(), "b".into()].into(),
            claims: BTreeMap::from([("site".into(), ["north".into()].into())]),
            ..Principal::default()
        };
        for principal in [principal, Principal::default()] {
            let read = Author::read(&Author::write("lab", &principal, true)).unwrap();
            assert_eq!((read.listener.as_str(), read.by_service), ("lab", true));
            assert!(!Author::read(&Author::write("lab", &principal, false)).unwrap().by_service);
            assert_eq!(format!("{:?}", read.principal), format!("{principal:?}"));
        }
        for text in ["", "{}", "null", "{\"listener\":\"a\",\"method\":\"other\"}"] {
            assert!(Author::read(text).is_none(), "{text}");
        }
    }
}
