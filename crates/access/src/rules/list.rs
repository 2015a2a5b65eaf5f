//! Rules as people read them: those that were compiled, in the order in which they are looked at.

use super::{
    LONGEST, Rule, Rules, connect,
    who::{NamePattern, RuleCondition},
};

/// Most topics of a rule, and names of a condition, that are told.
const MOST: usize = 100;

/// A rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedRule {
    /// Line of the rule in the file.
    pub line: u32,
    /// True if the rule denies.
    pub deny: bool,
    /// True if the rule is about publishing.
    pub publish: bool,
    /// True if the rule is about subscribing.
    pub subscribe: bool,
    /// Its first topics; client ids, if it is about neither.
    pub topics: Vec<String>,
    /// Number of its topics or client ids.
    pub topic_count: usize,
    /// Conditions on the party, as `users: anna, ops-*`; all must hold, and none is everybody.
    pub conditions: Vec<String>,
    /// Limits of its permission.
    pub limits: Vec<String>,
}

impl Rules {
    /// The rules behind the first `from`.
    pub fn list(&self, from: usize) -> impl Iterator<Item = ListedRule> + '_ {
        self.rules.iter().skip(from).map(Rule::listed)
    }
}

impl Rule {
    fn listed(&self) -> ListedRule {
        let mut limits = Vec::new();
        if self.max_qos < 2 {
            limits.push(format!("QoS {} at most", self.max_qos));
        }
        if !self.retain {
            limits.push("not retained".to_owned());
        }
        if self.max_bytes != u32::MAX {
            limits.push(format!("{} bytes at most", self.max_bytes));
        }
        if self.on_delivery {
            limits.push("subscriptions are filtered on delivery".to_owned());
        }
        let topics = self.patterns.iter().take(MOST).map(|pattern| cut(&pattern.to_string()));
        ListedRule {
            line: self.line,
            deny: self.deny,
            publish: self.publish,
            subscribe: self.subscribe,
            topics: topics.chain(connect::shown(&self.client_ids, MOST)).collect(),
            topic_count: self.patterns.len() + self.client_ids.len(),
            conditions: self.who.conditions().iter().map(told).collect(),
            limits,
        }
    }
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

/// A condition with the names that it has in the file.
fn told(condition: &RuleCondition) -> String {
    let listed = |names: &mut dyn Iterator<Item = String>, count: usize| {
        let shown: Vec<String> = names.take(MOST).map(|name| cut(&name)).collect();
        let more = count - shown.len();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("{}{more}", shown.join(", "))
    };
    let of = |names: &[NamePattern]| listed(&mut names.iter().map(NamePattern::to_string), names.len());
    let (kind, names) = match condition {
        RuleCondition::Clients(names)
        | RuleCondition::Users(names)
        | RuleCondition::CommonNames(names)
        | RuleCondition::Listeners(names) => (condition.name().to_owned(), of(names)),
        RuleCondition::Groups(names) => {
            (condition.name().to_owned(), listed(&mut names.iter().map(|name| name.to_string()), names.len()))
        }
        RuleCondition::Claim(claim, names) => (format!("claim {}", cut(claim)), of(names)),
        RuleCondition::Anonymous(true) => return "anonymous".to_owned(),
        RuleCondition::Anonymous(false) => return "not anonymous".to_owned(),
    };
    format!("{kind}: {names}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_is_told_with_all_that_it_says() {
        let many: Vec<String> = (0..103).map(|number| format!("\"c{number}\"")).collect();
        let text = format!(
            "[[rules]]\nallow = \"publish\"\ntopics = [\"a/%c/#\", \"b/+\"]\nusers = [\"anna\", \"ops-*\"]\n\
             claims = {{ site = \"north\" }}\nanonymous = false\nmax_qos = 1\nretain = false\nmax_bytes = \"1 KiB\"\n\
             [[rules]]\ndeny = \"all\"\ntopics = [\"{}\"]\n\
             [[rules]]\nallow = \"subscribe\"\ntopics = [\"#\"]\nclients = [{}]\ngroups = [\"g\"]\nfilter = \"on-delivery\"\n",
            "x".repeat(300),
            many.join(", ")
        );
        let rules = Rules::parse(&text).expect("rules");
        let listed: Vec<ListedRule> = rules.list(0).collect();
        let first = &listed[0];
        assert_eq!((first.line, first.deny, first.publish, first.subscribe), (2, false, true, false));
        assert_eq!((first.topics.join(" ").as_str(), first.topic_count), ("a/%{c}/# b/+", 2));
        assert_eq!(first.conditions, ["not anonymous", "users: anna, ops-*", "claim site: north"]);
        assert_eq!(first.limits, ["QoS 1 at most", "not retained", "1024 bytes at most"]);
        let second = &listed[1];
        assert!(second.deny && second.publish && second.subscribe && second.conditions.is_empty());
        assert_eq!(second.topics, [format!("{}...", "x".repeat(LONGEST))]);
        let third = &listed[2];
        assert!(
            third.conditions[0].ends_with("c99 and 3 more") && third.conditions[1] == "groups: g",
            "{third:?}"
        );
        assert_eq!(third.limits, ["subscriptions are filtered on delivery"]);
        assert_eq!(rules.list(2).map(|rule| rule.line).collect::<Vec<_>>(), [third.line]);
    }
}
