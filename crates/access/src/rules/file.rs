//! The rules file: TOML, read once. Every mistake is told with its line.

use std::{collections::BTreeMap, fmt, ops::Range};

use gateway_core::units::ByteSize;
use serde::Deserialize;
use toml::Spanned;

use super::{
    Rule, Rules,
    connect::ClientIdPattern,
    pattern::Pattern,
    who::{NamePattern, RuleCondition, RuleGroupMembers, RuleSubject},
};

/// Bytes of a rules file.
const MOST_BYTES: usize = 4 << 20;
/// Filters of all rules together.
const MOST_FILTERS: usize = 100_000;
/// Mistakes that are told at once.
const MOST_MISTAKES: usize = 50;

/// A mistake in a rules file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    /// Line, from 1.
    pub line: usize,
    /// Mistake in the line.
    pub what: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.what)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleFile {
    #[serde(default)]
    groups: BTreeMap<Box<str>, RuleGroup>,
    #[serde(default)]
    rules: Vec<Spanned<RuleEntry>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
#[derive(Default)]
struct RuleGroup {
    clients: Vec<Spanned<String>>,
    users: Vec<Spanned<String>>,
    common_names: Vec<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleEntry {
    allow: Option<Spanned<Actions>>,
    deny: Option<Spanned<Actions>>,
    connect: Option<Spanned<Vec<Spanned<String>>>>,
    topics: Option<Spanned<Vec<Spanned<String>>>>,
    clients: Option<Vec<Spanned<String>>>,
    users: Option<Vec<Spanned<String>>>,
    common_names: Option<Vec<Spanned<String>>>,
    groups: Option<Vec<Spanned<String>>>,
    listeners: Option<Vec<Spanned<String>>>,
    #[serde(default)]
    claims: BTreeMap<Box<str>, Spanned<RuleClaim>>,
    anonymous: Option<bool>,
    max_qos: Option<Spanned<u8>>,
    retain: Option<Spanned<bool>>,
    max_bytes: Option<Spanned<ByteSize>>,
    filter: Option<Spanned<FilterCheck>>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Actions {
    Publish,
    Subscribe,
    All,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum RuleClaim {
    One(String),
    Several(Vec<String>),
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum FilterCheck {
    Covered,
    OnDelivery,
}

/// Reads a file.
///
/// # Errors
/// Every mistake in it, in the order of their lines; the first one only if it is no TOML of the right form.
pub(super) fn read(text: &str) -> Result<Rules, Vec<Mistake>> {
    if text.len() > MOST_BYTES {
        let what = format!("the file has more than {}", ByteSize(MOST_BYTES));
        return Err(vec![Mistake { line: 1, what }]);
    }
    let file: RuleFile = toml::from_str(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        vec![Mistake { line: line_of(text, at), what: error.message().replace('\n', " ") }]
    })?;
    let mut reader = RuleReader { text, mistakes: Vec::new(), filters: 0 };
    let mut rules = Rules::default();
    for (name, group) in file.groups {
        let mut names = |list: &[Spanned<String>]| reader.names(list);
        let (clients, users) = (names(&group.clients), names(&group.users));
        let common_names = names(&group.common_names);
        rules.groups.insert(name, RuleGroupMembers { clients, users, common_names });
    }
    for entry in file.rules {
        if let Some(rule) = reader.rule(&entry) {
            rules.add(rule);
        }
    }
    if reader.mistakes.is_empty() {
        return Ok(rules);
    }
    reader.mistakes.sort_by_key(|mistake| mistake.line);
    reader.mistakes.truncate(MOST_MISTAKES);
    Err(reader.mistakes)
}

fn line_of(text: &str, at: usize) -> usize {
    let before = text.as_bytes().get(..at).unwrap_or(text.as_bytes());
    before.iter().filter(|byte| **byte == b'\n').count() + 1
}

struct RuleReader<'a> {
    text: &'a str,
    mistakes: Vec<Mistake>,
    filters: usize,
}

impl RuleReader<'_> {
    fn wrong(&mut self, at: Range<usize>, what: impl Into<String>) {
        let line = line_of(self.text, at.start);
        self.mistakes.push(Mistake { line, what: what.into() });
    }

    fn rule(&mut self, entry: &Spanned<RuleEntry>) -> Option<Rule> {
        let here = entry.span();
        let entry = entry.get_ref();
        if let Some(client_ids) = &entry.connect {
            return self.connecting_rule(entry, client_ids);
        }
        let (deny, actions) = match (&entry.allow, &entry.deny) {
            (Some(allow), None) => (false, allow),
            (None, Some(deny)) => (true, deny),
            (Some(_), Some(deny)) => {
                self.wrong(deny.span(), "a rule has 'allow' or 'deny', not both");
                return None;
            }
            (None, None) => {
                let what = "a rule needs 'allow' or 'deny' with \"publish\", \"subscribe\" or \"all\", or 'connect' with \
                            client ids";
                self.wrong(here, what);
                return None;
            }
        };
        let (publish, subscribe) = match actions.get_ref() {
            Actions::Publish => (true, false),
            Actions::Subscribe => (false, true),
            Actions::All => (true, true),
        };
        self.check_limits(entry, deny, publish, subscribe);
        let Some(topics) = &entry.topics else {
            self.wrong(here, "a rule needs topics; all are [\"#\"]");
            return None;
        };
        if topics.get_ref().is_empty() {
            self.wrong(topics.span(), "a rule needs topics; all are [\"#\"]");
        }
        let patterns = self.patterns(topics, Pattern::parse)?;
        let who = self.who(entry);
        let limit = |size: &Spanned<ByteSize>| u32::try_from(size.get_ref().0).unwrap_or(u32::MAX);
        Some(Rule {
            line: self.line(actions.span()),
            deny,
            publish,
            subscribe,
            patterns,
            client_ids: Vec::new(),
            who,
            max_qos: entry.max_qos.as_ref().map_or(2, |qos| *qos.get_ref()),
            retain: entry.retain.as_ref().is_none_or(|retain| *retain.get_ref()),
            max_bytes: entry.max_bytes.as_ref().map_or(u32::MAX, limit),
            on_delivery: entry
                .filter
                .as_ref()
                .is_some_and(|filter| *filter.get_ref() == FilterCheck::OnDelivery),
        })
    }

    /// A rule about connecting: client ids, and whom they are for.
    fn connecting_rule(
        &mut self,
        entry: &RuleEntry,
        client_ids: &Spanned<Vec<Spanned<String>>>,
    ) -> Option<Rule> {
        let here = client_ids.span();
        if entry.allow.is_some() || entry.deny.is_some() || entry.topics.is_some() {
            self.wrong(here, "a rule with 'connect' has no 'allow', 'deny' or 'topics': write two rules");
            return None;
        }
        if entry.clients.is_some() {
            self.wrong(here, "'connect' names client ids already, leave out 'clients'");
            return None;
        }
        self.check_limits(entry, false, false, false);
        if client_ids.get_ref().is_empty() {
            self.wrong(client_ids.span(), "a rule needs client ids; all are [\"*\"]");
        }
        let client_ids = self.patterns(client_ids, ClientIdPattern::parse)?;
        Some(Rule {
            line: self.line(here),
            deny: false,
            publish: false,
            subscribe: false,
            patterns: Vec::new(),
            client_ids,
            who: self.who(entry),
            max_qos: 2,
            retain: true,
            max_bytes: u32::MAX,
            on_delivery: false,
        })
    }

    /// Returns the texts that parse; `None` if there are too many.
    fn patterns<T>(
        &mut self,
        texts: &Spanned<Vec<Spanned<String>>>,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Option<Vec<T>> {
        let mut patterns = Vec::new();
        for text in texts.get_ref() {
            match parse(text.get_ref()) {
                Ok(pattern) => patterns.push(pattern),
                Err(what) => self.wrong(text.span(), format!("'{}': {what}", text.get_ref())),
            }
        }
        self.filters += patterns.len();
        if self.filters > MOST_FILTERS {
            self.wrong(texts.span(), format!("there are more than {MOST_FILTERS} filters"));
            return None;
        }
        Some(patterns)
    }

    fn line(&self, at: Range<usize>) -> u32 {
        u32::try_from(line_of(self.text, at.start)).unwrap_or(u32::MAX)
    }

    /// The conditions that are given, those first that are decided fastest.
    fn who(&mut self, entry: &RuleEntry) -> RuleSubject {
        let mut conditions = Vec::new();
        conditions.extend(entry.anonymous.map(RuleCondition::Anonymous));
        let mut names = |list: &Option<Vec<_>>| list.as_deref().map(|list| self.names(list));
        conditions.extend(names(&entry.clients).map(RuleCondition::Clients));
        conditions.extend(names(&entry.users).map(RuleCondition::Users));
        conditions.extend(names(&entry.common_names).map(RuleCondition::CommonNames));
        conditions.extend(names(&entry.listeners).map(RuleCondition::Listeners));
        if let Some(groups) = &entry.groups {
            let names = groups.iter().map(|name| name.get_ref().as_str().into());
            conditions.push(RuleCondition::Groups(names.collect()));
        }
        for (name, claim) in &entry.claims {
            conditions.push(RuleCondition::Claim(name.clone(), self.claim(claim)));
        }
        RuleSubject::new(conditions)
    }

    /// Limits say how much is allowed, so they belong to rules that allow.
    fn check_limits(&mut self, entry: &RuleEntry, deny: bool, publish: bool, subscribe: bool) {
        if let Some(qos) = &entry.max_qos
            && *qos.get_ref() > 2
        {
            self.wrong(qos.span(), "'max_qos' is 0, 1 or 2");
        }
        let limits = [
            ("max_qos", entry.max_qos.as_ref().map(Spanned::span)),
            ("retain", entry.retain.as_ref().map(Spanned::span)),
            ("max_bytes", entry.max_bytes.as_ref().map(Spanned::span)),
        ];
        for (name, at) in limits {
            if let Some(at) = at.filter(|_| deny || !publish) {
                self.wrong(at, format!("'{name}' limits what a rule allows to be published"));
            }
        }
        if let Some(filter) = &entry.filter
            && (deny || !subscribe)
        {
            self.wrong(filter.span(), "'filter' says how a rule allows a subscription");
        }
    }

    fn names(&mut self, list: &[Spanned<String>]) -> Vec<NamePattern> {
        let mut names = Vec::new();
        for text in list {
            match NamePattern::parse(text.get_ref()) {
                Ok(name) => names.push(name),
                Err(what) => self.wrong(text.span(), format!("'{}': {what}", text.get_ref())),
            }
        }
        names
    }

    fn claim(&mut self, claim: &Spanned<RuleClaim>) -> Vec<NamePattern> {
        let wanted = match claim.get_ref() {
            RuleClaim::One(value) => std::slice::from_ref(value),
            RuleClaim::Several(values) => values,
        };
        let mut names = Vec::new();
        for text in wanted {
            match NamePattern::parse(text) {
                Ok(name) => names.push(name),
                Err(what) => self.wrong(claim.span(), format!("'{text}': {what}")),
            }
        }
        names
    }
}
