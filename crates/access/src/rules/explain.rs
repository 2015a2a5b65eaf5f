//! Why a decision is as it is, rule by rule. Decides for itself, the slow way, and so checks the fast one.

use std::fmt::{self, Write as _};

use gateway_core::{QoS, has_wildcard, parse_shared};

use super::{LONGEST, Rule, Rules, SubjectRules, Subscribing, connect, cover::Cover};
use crate::Subject;

/// Filters of a rule that are shown.
const SHOWN: usize = 3;

/// Action of a client that is to be judged.
#[derive(Debug, Clone, Copy)]
pub enum AccessQuestion<'a> {
    /// Publish to a topic.
    Publish {
        /// Topic name.
        topic: &'a str,
        /// QoS.
        qos: QoS,
        /// RETAIN flag.
        retain: bool,
        /// Bytes of payload.
        bytes: usize,
    },
    /// Connect under its client id.
    Connect,
    /// Subscribe to a filter, or `$share/group/filter`.
    Subscribe {
        /// The filter.
        filter: &'a str,
    },
}

/// A decision with its reasons.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// True if the action is allowed.
    pub allowed: bool,
    /// Line of the rule that decided; 0 if none did.
    pub line: u32,
    /// A line for each rule that was looked at, and the conclusion at the end.
    pub lines: Vec<String>,
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lines.iter().try_for_each(|line| writeln!(f, "{line}"))
    }
}

impl Rules {
    /// Explains a decision.
    pub fn explain(&self, subject: &Subject<'_>, asked: &AccessQuestion<'_>) -> Explanation {
        match *asked {
            AccessQuestion::Publish { topic, .. } => self.explain_topic(subject, topic, asked),
            AccessQuestion::Connect => self.explain_client_id(subject),
            AccessQuestion::Subscribe { filter } => {
                let inner = parse_shared(filter).ok().flatten().map_or(filter, |(_, inner)| inner);
                if has_wildcard(inner) {
                    self.explain_filter(subject, filter, inner)
                } else {
                    self.explain_topic(subject, inner, asked)
                }
            }
        }
    }

    fn explain_topic(&self, subject: &Subject<'_>, topic: &str, asked: &AccessQuestion<'_>) -> Explanation {
        let publish = matches!(asked, AccessQuestion::Publish { .. });
        let mut lines = Vec::new();
        for rule in &self.rules {
            let says = |why: &str| format!("line {}: {}: {why}", rule.line, rule.title());
            if let Some(why) = self.passes(rule, publish, subject) {
                lines.push(says(&why));
                continue;
            }
            if !rule.patterns.iter().any(|pattern| pattern.matches(topic, subject, rule.deny)) {
                let empty = rule.patterns.iter().find_map(|pattern| pattern.empty_placeholder(subject));
                let empty = empty.map(|why| format!("; {why}")).unwrap_or_default();
                lines.push(says(&format!("no filter of it matches the topic{empty}")));
                continue;
            }
            let within = match *asked {
                AccessQuestion::Publish { qos, retain, bytes, .. } => rule.within(qos, retain, bytes),
                AccessQuestion::Subscribe { .. } | AccessQuestion::Connect => Ok(()),
            };
            let allowed = !rule.deny && within.is_ok();
            let verdict = if allowed { "allowed" } else { "denied" };
            let why = within.err().filter(|_| !rule.deny).unwrap_or_else(|| "matches".to_owned());
            lines.push(says(&format!("{why}, and decides")));
            lines.push(format!("{verdict} by line {}", rule.line));
            return Explanation { allowed, line: rule.line, lines };
        }
        lines.push("denied: no rule names it".to_owned());
        Explanation { allowed: false, line: 0, lines }
    }

    fn explain_client_id(&self, subject: &Subject<'_>) -> Explanation {
        let (line, mut lines) = self.explain_connect(subject);
        let allowed = self.connect(subject);
        lines.push(match line {
            Some(line) => format!("allowed by line {line}"),
            None if allowed => "allowed: no rule has 'connect'".to_owned(),
            None => "denied: no rule lets it connect under this client id".to_owned(),
        });
        Explanation { allowed, line: line.unwrap_or_default(), lines }
    }

    fn explain_filter(&self, subject: &Subject<'_>, filter: &str, inner: &str) -> Explanation {
        let asked: Vec<&str> = inner.split('/').collect();
        let mut lines = Vec::new();
        for rule in &self.rules {
            let why = self.passes(rule, false, subject).unwrap_or_else(|| {
                let overlaps = rule.patterns.iter().any(|pattern| pattern.overlaps(&asked, subject));
                if overlaps { "matches topics of the filter" } else { "matches no topic of the filter" }
                    .to_owned()
            });
            lines.push(format!("line {}: {}: {why}", rule.line, rule.title()));
        }
        let matcher = SubjectRules { rules: self, subject };
        let uncovered = Cover::new(&self.subscribe, subject, &matcher).check(inner).err();
        let (allowed, line) = match self.subscribe(subject, filter) {
            Subscribing::Allowed => {
                lines.push("allowed: every topic of the filter is".to_owned());
                (true, 0)
            }
            Subscribing::OnDelivery => {
                lines.push("allowed, and each message is looked at on delivery".to_owned());
                (true, 0)
            }
            Subscribing::Denied(line) => {
                let example = uncovered.map(|uncovered| uncovered.example).unwrap_or_default();
                let by =
                    if line == 0 { "named by no rule".to_owned() } else { format!("denied by line {line}") };
                lines.push(format!("denied: '{example}' is {by}"));
                (false, line)
            }
        };
        Explanation { allowed, line, lines }
    }

    /// Why a rule says nothing about somebody's action, if it does not.
    fn passes(&self, rule: &Rule, publish: bool, subject: &Subject<'_>) -> Option<String> {
        if publish && !rule.publish || !publish && !rule.subscribe {
            return Some("another action".to_owned());
        }
        rule.who.misses(subject, &self.groups).map(|condition| format!("another party, by '{condition}'"))
    }
}

impl Rule {
    pub(super) fn title(&self) -> String {
        if !self.client_ids.is_empty() {
            let shown: Vec<String> = connect::shown(&self.client_ids, SHOWN).collect();
            let more = self.client_ids.len().saturating_sub(SHOWN);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            return format!("connect as {}{more}", shown.join(", "));
        }
        let verb = if self.deny { "deny" } else { "allow" };
        let action = match (self.publish, self.subscribe) {
            (true, true) => "all",
            (true, false) => "publish",
            (false, _) => "subscribe",
        };
        let whom = if self.who.is_everybody() { " for everybody" } else { "" };
        let mut title = format!("{verb} {action}{whom}");
        for (number, pattern) in self.patterns.iter().take(SHOWN).enumerate() {
            let between = if number == 0 { " on" } else { "," };
            // Filters are as long as the file has them.
            let text = pattern.to_string();
            let shown: String = text.chars().take(LONGEST).collect();
            let cut = if shown.len() < text.len() { "..." } else { "" };
            let _ = write!(title, "{between} {shown}{cut}");
        }
        if self.patterns.len() > SHOWN {
            let _ = write!(title, " and {} more", self.patterns.len() - SHOWN);
        }
        title
    }

    fn within(&self, qos: QoS, retain: bool, bytes: usize) -> Result<(), String> {
        if qos as u8 > self.max_qos {
            return Err(format!("matches, but allows QoS {} at most", self.max_qos));
        }
        if retain && !self.retain {
            return Err("matches, but allows no retained message".to_owned());
        }
        if self.max_bytes != u32::MAX && bytes > self.max_bytes as usize {
            return Err(format!("matches, but allows {} bytes at most", self.max_bytes));
        }
        Ok(())
    }
}
