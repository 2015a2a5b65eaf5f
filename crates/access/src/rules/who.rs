//! Devices that a rule concerns.

use std::{collections::BTreeMap, fmt};

use crate::{Method, Subject};

/// A name, or with `*` at its end every name that begins so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum NamePattern {
    Exact(Box<str>),
    Prefix(Box<str>),
}

impl NamePattern {
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

/// As it is written in the file.
impl fmt::Display for NamePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(exact) => f.write_str(exact),
            Self::Prefix(prefix) => write!(f, "{prefix}*"),
        }
    }
}

fn any(names: &[NamePattern], name: Option<&str>) -> bool {
    name.is_some_and(|name| names.iter().any(|known| known.is(name)))
}

/// Members of a group that the file names. Whoever is named in one of the lists belongs to it.
#[derive(Debug, Clone, Default)]
pub(super) struct RuleGroupMembers {
    pub(super) clients: Vec<NamePattern>,
    pub(super) users: Vec<NamePattern>,
    pub(super) common_names: Vec<NamePattern>,
}

impl RuleGroupMembers {
    fn has(&self, subject: &Subject<'_>) -> bool {
        any(&self.clients, Some(subject.client_id))
            || any(&self.users, subject.principal.username.as_deref())
            || any(&self.common_names, subject.principal.common_name.as_deref())
    }
}

/// All conditions must hold; none is everybody. Most rules have one or two.
#[derive(Debug, Clone, Default)]
pub(super) struct RuleSubject(Box<[RuleCondition]>);

#[derive(Debug, Clone)]
pub(super) enum RuleCondition {
    Clients(Vec<NamePattern>),
    Users(Vec<NamePattern>),
    CommonNames(Vec<NamePattern>),
    Groups(Vec<Box<str>>),
    Listeners(Vec<NamePattern>),
    Claim(Box<str>, Vec<NamePattern>),
    Anonymous(bool),
}

impl RuleCondition {
    /// As it is called in the file.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Clients(_) => "clients",
            Self::Users(_) => "users",
            Self::CommonNames(_) => "common_names",
            Self::Groups(_) => "groups",
            Self::Listeners(_) => "listeners",
            Self::Claim(..) => "claims",
            Self::Anonymous(_) => "anonymous",
        }
    }

    fn holds(&self, subject: &Subject<'_>, groups: &BTreeMap<Box<str>, RuleGroupMembers>) -> bool {
        let principal = subject.principal;
        match self {
            Self::Clients(names) => any(names, Some(subject.client_id)),
            Self::Users(names) => any(names, principal.username.as_deref()),
            Self::CommonNames(names) => any(names, principal.common_name.as_deref()),
            Self::Listeners(names) => any(names, Some(subject.listener)),
            Self::Anonymous(wanted) => *wanted == (principal.method == Method::Anonymous),
            Self::Groups(names) => names.iter().any(|name| {
                principal.groups.iter().any(|group| group == name)
                    || groups.get(name).is_some_and(|members| members.has(subject))
            }),
            Self::Claim(name, wanted) => {
                let values = principal.claims.get(name).map_or(&[][..], |values| values);
                values.iter().any(|value| any(wanted, Some(value)))
            }
        }
    }
}

impl RuleSubject {
    pub(super) fn new(conditions: Vec<RuleCondition>) -> Self {
        Self(conditions.into())
    }

    /// The conditions, those first that are decided fastest.
    pub(super) fn conditions(&self) -> &[RuleCondition] {
        &self.0
    }

    pub(super) fn is_everybody(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether all conditions hold for the subject.
    pub(super) fn has(&self, subject: &Subject<'_>, groups: &BTreeMap<Box<str>, RuleGroupMembers>) -> bool {
        self.0.iter().all(|condition| condition.holds(subject, groups))
    }

    /// The first condition that does not hold for the subject, by its name in the file.
    pub(super) fn misses(
        &self,
        subject: &Subject<'_>,
        groups: &BTreeMap<Box<str>, RuleGroupMembers>,
    ) -> Option<&'static str> {
        let missed = self.0.iter().find(|condition| !condition.holds(subject, groups));
        missed.map(RuleCondition::name)
    }
}
