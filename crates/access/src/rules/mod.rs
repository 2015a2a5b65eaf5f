//! Rights of devices: rules from a file, compiled once, and decisions by them.
//!
//! The first rule that names the action, the party and the topic decides; what no rule names is denied. A rule's limits
//! for publishing are part of its decision, they do not hand it on to later rules. So all that can be said about one
//! topic is one [`RuleGrant`], which the caller may remember. Once a rule has `connect`, a client needs one that names its
//! client id to connect at all.
//!
//! `#` and `+` at the beginning of a filter cover no topic that begins with `$`, as everywhere in MQTT [MQTT-4.7.2-1]. A
//! placeholder whose value has `+`, `#` or `/` in it stands for nothing in a rule that allows, and for everything from its
//! level on in a rule that denies: a client cannot choose a name that gets it more.

mod connect;
mod cover;
mod explain;
mod file;
#[cfg(any(test, feature = "fuzz"))]
mod fuzz;
mod list;
mod mosquitto;
mod pattern;
mod recent;
#[cfg(test)]
mod tests;
mod tree;
mod who;

use std::collections::BTreeMap;

use gateway_core::{QoS, has_wildcard, parse_shared};

use self::{
    connect::ClientIdPattern,
    cover::Cover,
    pattern::Pattern,
    tree::{NONE, RuleMatcher, RuleTree},
    who::{RuleGroupMembers, RuleSubject},
};
use crate::Subject;

pub use explain::{AccessQuestion, Explanation};
pub use file::Mistake;
#[cfg(any(test, feature = "fuzz"))]
pub use fuzz::fuzz_rules;
pub use list::ListedRule;
pub use mosquitto::{ImportedRules, import_mosquitto};
pub use recent::RecentDecisions;

/// Characters of a filter or a name that are shown.
const LONGEST: usize = 200;

/// The rules of a file.
#[derive(Debug, Default)]
pub struct Rules {
    rules: Vec<Rule>,
    groups: BTreeMap<Box<str>, RuleGroupMembers>,
    publish: RuleTree,
    subscribe: RuleTree,
    /// Rules that allow subscriptions which are filtered on delivery.
    on_delivery: Vec<u32>,
    /// Rules with `connect`.
    connecting: Vec<u32>,
    /// Texts between a name and what a client chooses, in any of them.
    separators: Vec<Box<str>>,
}

#[derive(Debug)]
struct Rule {
    /// Line of the rule in the file.
    line: u32,
    deny: bool,
    publish: bool,
    subscribe: bool,
    patterns: Vec<Pattern>,
    /// Of a rule with `connect`, which has nothing else.
    client_ids: Vec<ClientIdPattern>,
    who: RuleSubject,
    max_qos: u8,
    retain: bool,
    max_bytes: u32,
    on_delivery: bool,
}

/// All that the rules say about one topic and one party. Small, to be remembered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RuleGrant {
    /// Line of the rule that decided; 0 if none names the topic, which denies it.
    pub line: u32,
    /// Largest payload.
    max_bytes: u32,
    allowed: bool,
    max_qos: u8,
    retain: bool,
}

/// Why a message may not be published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Excess {
    /// The topic is denied.
    Topic,
    /// Its QoS is above the limit of the rule.
    Qos,
    /// The rule allows no retained messages.
    Retain,
    /// Its payload is above the limit of the rule.
    Bytes,
}

impl Excess {
    /// For the log.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Topic => "topic",
            Self::Qos => "qos",
            Self::Retain => "retain",
            Self::Bytes => "bytes",
        }
    }
}

impl RuleGrant {
    /// Nobody names it, so that it is denied.
    pub const DENIED: Self = Self { line: 0, max_bytes: 0, allowed: false, max_qos: 0, retain: false };

    /// A grant by another authority than the rules.
    pub const ALLOWED: Self = Self { line: 0, max_bytes: u32::MAX, allowed: true, max_qos: 2, retain: true };

    /// The same for messages of at most this QoS and this many bytes of payload, retained or not; what is denied stays so.
    #[must_use]
    pub const fn with_limits(self, max_qos: u8, retain: bool, max_bytes: u32) -> Self {
        Self { max_qos, retain, max_bytes, ..self }
    }

    /// Returns whether no rule names the topic.
    pub fn is_unnamed(&self) -> bool {
        self.line == 0 && !self.allowed
    }

    /// Returns whether the topic is allowed at all.
    pub fn is_allowed(&self) -> bool {
        self.allowed
    }

    /// Checks whether a message with this QoS, RETAIN flag and size of payload is allowed.
    ///
    /// # Errors
    /// The property that is not allowed.
    #[inline]
    pub fn permits(&self, qos: QoS, retain: bool, bytes: usize) -> Result<(), Excess> {
        if !self.allowed {
            return Err(Excess::Topic);
        }
        if qos as u8 > self.max_qos {
            return Err(Excess::Qos);
        }
        if retain && !self.retain {
            return Err(Excess::Retain);
        }
        if bytes > self.max_bytes as usize && self.max_bytes != u32::MAX {
            return Err(Excess::Bytes);
        }
        Ok(())
    }
}

/// Answer of the rules about a subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subscribing {
    /// Every topic of the filter is allowed.
    Allowed,
    /// Some may be: each message is to be looked at before it is delivered.
    OnDelivery,
    /// The subscription is refused. The line of the rule that denies some of its topics; 0 if no rule names them.
    Denied(u32),
}

impl Subscribing {
    /// Refused, and not by a rule.
    pub const DENIED: Self = Self::Denied(0);
}

impl Rules {
    /// Reads and compiles a rules file.
    ///
    /// # Errors
    /// Every mistake in it, each with its line.
    pub fn parse(text: &str) -> Result<Self, Vec<Mistake>> {
        file::read(text)
    }

    /// Returns the number of rules.
    pub fn len(&self) -> usize {
        self.rules.len()
    }

    /// Returns whether there are no rules, so that nothing is allowed.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Returns the grant for publishing to a topic name, which is valid.
    pub fn publish(&self, subject: &Subject<'_>, topic: &str) -> RuleGrant {
        self.grant(&self.publish, subject, topic)
    }

    /// Returns the grant for receiving messages of a topic, by whatever subscription.
    pub fn receive(&self, subject: &Subject<'_>, topic: &str) -> RuleGrant {
        self.grant(&self.subscribe, subject, topic)
    }

    /// Decides about a subscription to a filter, which is valid and may begin with `$share/group/`. A shared subscription is
    /// never filtered on delivery: a message that one member may not have would be lost to the others.
    pub fn subscribe(&self, subject: &Subject<'_>, filter: &str) -> Subscribing {
        let shared = parse_shared(filter).ok().flatten();
        let inner = shared.map_or(filter, |(_, inner)| inner);
        let matcher = SubjectRules { rules: self, subject };
        let Err(uncovered) = Cover::new(&self.subscribe, subject, &matcher).check(inner) else {
            return Subscribing::Allowed;
        };
        if shared.is_none() && has_wildcard(inner) && self.may_filter(&matcher, inner) {
            return Subscribing::OnDelivery;
        }
        Subscribing::Denied(self.line(uncovered.rule))
    }

    /// Returns whether some rule grants a part of the filter on delivery.
    fn may_filter(&self, matcher: &SubjectRules<'_>, filter: &str) -> bool {
        let asked: Vec<&str> = filter.split('/').collect();
        let overlaps =
            |rule: &Rule| rule.patterns.iter().any(|pattern| pattern.overlaps(&asked, matcher.subject));
        self.on_delivery
            .iter()
            .any(|number| matcher.concerns(*number) && overlaps(&self.rules[*number as usize]))
    }

    fn grant(&self, tree: &RuleTree, subject: &Subject<'_>, topic: &str) -> RuleGrant {
        let number = tree.first(topic, subject, &SubjectRules { rules: self, subject });
        let Some(rule) = self.rules.get(number as usize) else { return RuleGrant::DENIED };
        RuleGrant {
            line: rule.line,
            max_bytes: rule.max_bytes,
            allowed: !rule.deny,
            max_qos: rule.max_qos,
            retain: rule.retain,
        }
    }

    fn line(&self, number: u32) -> u32 {
        self.rules.get(number as usize).map_or(0, |rule| rule.line)
    }

    fn add(&mut self, rule: Rule) {
        let number = u32::try_from(self.rules.len()).unwrap_or(NONE);
        for pattern in &rule.patterns {
            if rule.publish {
                self.publish.add(pattern, number, rule.deny);
            }
            if rule.subscribe {
                self.subscribe.add(pattern, number, rule.deny);
            }
        }
        if !rule.client_ids.is_empty() {
            self.connecting.push(number);
        }
        for separator in rule.client_ids.iter().filter_map(ClientIdPattern::separator) {
            if !self.separators.iter().any(|known| **known == *separator) {
                self.separators.push(separator.into());
            }
        }
        if rule.on_delivery {
            self.on_delivery.push(number);
        }
        self.rules.push(rule);
    }
}

/// The rules as they concern one party.
struct SubjectRules<'a> {
    rules: &'a Rules,
    subject: &'a Subject<'a>,
}

impl RuleMatcher for SubjectRules<'_> {
    fn concerns(&self, rule: u32) -> bool {
        let who = &self.rules.rules[rule as usize].who;
        who.has(self.subject, &self.rules.groups)
    }

    fn denies(&self, rule: u32) -> bool {
        self.rules.rules[rule as usize].deny
    }
}
