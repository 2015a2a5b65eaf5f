//! Whom a rule concerns.

use std::collections::BTreeMap;

use crate::{Method, Subject};

/// A name, or with `*` at its end every name that begins so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Name {
    Exact(Box<str>),
    Prefix(Box<str>),
}

impl Name {
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        match text.strip_suffix('*') {
            _ if text.is_empty() => Err("a name is not empty".into()),
            Some(prefix) if !prefix.contains('*') => Ok(Self::Prefix(prefix.into())),
            None if !text.contains('*') => Ok(Self::Exact(text.into())),
            _ => Err("'*' stands at the end of a name only".into()),
        }
    }

    fn is(&self, name: &str) -> bool {
        match self {
            Self::Exact(exact) => **exact == *name,
            Self::Prefix(prefix) => name.starts_with(&**prefix),
        }
    }
}

fn any(names: &[Name], name: Option<&str>) -> bool {
    name.is_some_and(|name| names.iter().any(|known| known.is(name)))
}

/// Members of a group that the file names. Whoever is named in one of the lists belongs to it.
#[derive(Debug, Clone, Default)]
pub(super) struct Members {
    pub(super) clients: Vec<Name>,
    pub(super) users: Vec<Name>,
    pub(super) common_names: Vec<Name>,
}

impl Members {
    fn has(&self, subject: &Subject<'_>) -> bool {
        any(&self.clients, Some(subject.client_id))
            || any(&self.users, subject.principal.username.as_deref())
            || any(&self.common_names, subject.principal.common_name.as_deref())
    }
}

/// All conditions that are given must hold; none given is everybody.
#[derive(Debug, Clone, Default)]
pub(super) struct Who {
    pub(super) clients: Option<Vec<Name>>,
    pub(super) users: Option<Vec<Name>>,
    pub(super) common_names: Option<Vec<Name>>,
    pub(super) groups: Option<Vec<Box<str>>>,
    pub(super) listeners: Option<Vec<Name>>,
    pub(super) claims: Vec<(Box<str>, Vec<Name>)>,
    pub(super) anonymous: Option<bool>,
}

impl Who {
    pub(super) fn is_everybody(&self) -> bool {
        self.clients.is_none()
            && self.users.is_none()
            && self.common_names.is_none()
            && self.groups.is_none()
            && self.listeners.is_none()
            && self.claims.is_empty()
            && self.anonymous.is_none()
    }

    /// The first condition that does not hold for the subject, by its name in the file.
    pub(super) fn misses(&self, subject: &Subject<'_>, groups: &BTreeMap<Box<str>, Members>) -> Option<&str> {
        let principal = subject.principal;
        let lacks = |names: &Option<Vec<Name>>, name| names.as_ref().is_some_and(|names| !any(names, name));
        if lacks(&self.clients, Some(subject.client_id)) {
            return Some("clients");
        }
        if lacks(&self.users, principal.username.as_deref()) {
            return Some("users");
        }
        if lacks(&self.common_names, principal.common_name.as_deref()) {
            return Some("common_names");
        }
        if lacks(&self.listeners, Some(subject.listener)) {
            return Some("listeners");
        }
        if self.anonymous.is_some_and(|wanted| wanted != (principal.method == Method::Anonymous)) {
            return Some("anonymous");
        }
        let in_group = |name: &str| {
            principal.groups.iter().any(|group| **group == *name)
                || groups.get(name).is_some_and(|members| members.has(subject))
        };
        if self.groups.as_ref().is_some_and(|groups| !groups.iter().any(|name| in_group(name))) {
            return Some("groups");
        }
        let lacking = self.claims.iter().find(|(name, wanted)| {
            let values = principal.claims.get(name).map_or(&[][..], |values| values);
            !values.iter().any(|value| any(wanted, Some(value)))
        });
        lacking.map(|_| "claims")
    }
}
