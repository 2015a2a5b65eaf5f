//! Client ids that rules let clients connect with.

use std::fmt;

use super::{LONGEST, Rules, pattern::PatternPart};
use crate::Subject;

/// Client ids that one client may have, such as `%u:*`: text, at most one placeholder, and `*` at the end for any text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ClientIdPattern {
    before: Box<str>,
    placeholder: Option<PatternPart>,
    behind: Box<str>,
    /// Ends with `*`.
    open: bool,
}

impl ClientIdPattern {
    /// Reads a pattern of client ids.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Err("a client id is not empty".into());
        }
        let (fixed, open) = text.strip_suffix('*').map_or((text, false), |fixed| (fixed, true));
        if fixed.contains('*') {
            return Err("'*' stands at the end of a client id only".into());
        }
        let mut pattern = Self { before: "".into(), placeholder: None, behind: "".into(), open };
        for part in PatternPart::parse_all(fixed)? {
            match part {
                PatternPart::Text(text) if pattern.placeholder.is_none() => pattern.before = text,
                PatternPart::Text(text) => pattern.behind = text,
                PatternPart::ClientId => {
                    return Err("%c is what the client chooses; tie it to %u, %cn or %{claim.NAME}".into());
                }
                part if pattern.placeholder.is_none() => pattern.placeholder = Some(part),
                _ => return Err("a client id has at most one placeholder".into()),
            }
        }
        if open && pattern.placeholder.is_some() && pattern.behind.is_empty() {
            let what = "between a placeholder and '*' stands a text that no name has, as in %u:*; else 'ann' may connect \
                        as 'anna'";
            return Err(what.into());
        }
        Ok(pattern)
    }

    /// Text that separates a name from what the client chooses.
    pub(super) fn separator(&self) -> Option<&str> {
        (self.open && self.placeholder.is_some()).then_some(&*self.behind)
    }

    /// Tells whether the client has one of these ids. A name with one of `separators` in it stands for nothing.
    fn covers(&self, subject: &Subject<'_>, separators: &[Box<str>]) -> bool {
        let Some(rest) = subject.client_id.strip_prefix(&*self.before) else { return false };
        let Some(placeholder) = &self.placeholder else { return self.open || rest.is_empty() };
        placeholder.values(subject).filter(|value| stands(value, separators)).any(|value| {
            let rest = rest.strip_prefix(value).and_then(|rest| rest.strip_prefix(&*self.behind));
            rest.is_some_and(|rest| self.open || rest.is_empty())
        })
    }

    /// Why its placeholder stands for nothing, if it does.
    fn empty_placeholder(&self, subject: &Subject<'_>, separators: &[Box<str>]) -> Option<String> {
        let placeholder = self.placeholder.as_ref()?;
        let mut values = placeholder.values(subject).peekable();
        if values.peek().is_none() {
            return Some(format!("nothing stands for {placeholder}"));
        }
        let why =
            || format!("{placeholder} has a text in it that separates names from the rest of a client id");
        values.all(|value| !stands(value, separators)).then(why)
    }
}

/// Tells whether a name ends where the first separator behind it begins: otherwise two names would share client ids.
fn stands(value: &str, separators: &[Box<str>]) -> bool {
    let ends = |separator: &str| format!("{value}{separator}").find(separator) == Some(value.len());
    separators.iter().all(|separator| ends(separator))
}

/// As it is written in the file, give or take braces.
impl fmt::Display for ClientIdPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.before.replace('%', "%%"))?;
        self.placeholder.iter().try_for_each(|placeholder| placeholder.fmt(f))?;
        f.write_str(&self.behind.replace('%', "%%"))?;
        f.write_str(if self.open { "*" } else { "" })
    }
}

impl Rules {
    /// Tells whether the client may connect under its client id: some rule with `connect` names both, or no rule has `connect`.
    pub fn connect(&self, subject: &Subject<'_>) -> bool {
        self.connecting.is_empty() || self.connecting.iter().any(|number| self.connects(*number, subject))
    }

    /// Tells whether the rule lets the client connect under its client id.
    fn connects(&self, number: u32, subject: &Subject<'_>) -> bool {
        let Some(rule) = self.rules.get(number as usize) else { return false };
        rule.client_ids.iter().any(|pattern| pattern.covers(subject, &self.separators))
            && rule.who.has(subject, &self.groups)
    }

    /// The line of the rule that lets the client connect under its client id, and a line about each rule up to it.
    pub(super) fn explain_connect(&self, subject: &Subject<'_>) -> (Option<u32>, Vec<String>) {
        let mut lines = Vec::new();
        for (number, rule) in (0..).zip(&self.rules) {
            let mut says = |why: &str| lines.push(format!("line {}: {}: {why}", rule.line, rule.title()));
            if rule.client_ids.is_empty() {
                says("another action");
            } else if let Some(condition) = rule.who.misses(subject, &self.groups) {
                says(&format!("another party, by '{condition}'"));
            } else if self.connects(number, subject) {
                says("matches, and decides");
                return (Some(rule.line), lines);
            } else {
                let empty = rule
                    .client_ids
                    .iter()
                    .find_map(|known| known.empty_placeholder(subject, &self.separators));
                let empty = empty.map(|why| format!("; {why}")).unwrap_or_default();
                says(&format!("the client id is none of it{empty}"));
            }
        }
        (None, lines)
    }
}

/// Patterns for people, the first `most` of them.
pub(super) fn shown(patterns: &[ClientIdPattern], most: usize) -> impl Iterator<Item = String> {
    patterns.iter().take(most).map(|pattern| {
        let text = pattern.to_string();
        let cut = text.char_indices().nth(LONGEST);
        cut.map_or_else(|| text.clone(), |(end, _)| format!("{}...", &text[..end]))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Method, Principal,
        rules::{AccessQuestion, RuleGrant},
    };

    fn may(rules: &Rules, client_id: &str, principal: &Principal) -> bool {
        let subject = Subject { client_id, listener: "default", principal };
        let explained = rules.explain(&subject, &AccessQuestion::Connect);
        assert_eq!(explained.allowed, rules.connect(&subject), "{explained}");
        explained.allowed
    }

    fn user(name: &str) -> Principal {
        Principal { method: Method::Password, username: Some(name.into()), ..Principal::default() }
    }

    const TEXT: &str = r#"[groups]
people = { users = ["anna", "b:b"] }
[[rules]]
allow = "all"
topics = ["lab/#"]
[[rules]]
connect = ["%u"]
anonymous = false
[[rules]]
connect = ["%u:*", "shared"]
groups = ["people"]
[[rules]]
connect = ["gate-%{claim.site}"]
"#;

    /// The failure: whoever has a password takes over the session of another user.
    #[test]
    fn a_client_connects_only_under_ids_of_its_own() {
        let rules = Rules::parse(TEXT).expect("rules");
        // User, client id, and whether it may connect.
        let cases = [
            ("anna", "anna", true),
            ("anna", "anna:phone", true),
            ("anna", "anna:", true),
            ("anna", "annabel", false),
            ("anna", "shared", true),
            ("anna", "s1", false),
            ("anna", "", false),
            ("s1", "s1", true),
            ("s1", "s1:phone", false),
            ("s1", "s11", false),
            ("s1", "S1", false),
            ("s1", "shared", false),
            ("s1", "gate-s1", false),
        ];
        for (name, client_id, allowed) in cases {
            assert_eq!(may(&rules, client_id, &user(name)), allowed, "{name} as {client_id}");
        }
        assert!(!may(&rules, "anna", &Principal::default()), "nobody has no name");
        let claims = [("site".into(), [Box::from("north"), Box::from("")].into())].into();
        let gate = Principal { method: Method::Jwt, claims, ..Principal::default() };
        assert!(may(&rules, "gate-north", &gate) && !may(&rules, "gate-", &gate));
        // Rules about topics decide as they would without `connect`.
        let anna = user("anna");
        let subject = Subject { client_id: "s1", listener: "default", principal: &anna };
        assert!(rules.publish(&subject, "lab/x").is_allowed());
        assert_eq!(rules.publish(&subject, "x"), RuleGrant::DENIED);
    }

    /// The failure: a user is called so that his ids are those of another one.
    #[test]
    fn no_two_names_share_a_client_id() {
        let rules = Rules::parse(TEXT).expect("rules");
        for client_id in ["b:b", "b:b:x", "b:b:b"] {
            assert!(!may(&rules, client_id, &user("b:b")), "{client_id} may be of user b");
        }
        let twofold = Rules::parse("[[rules]]\nconnect = [\"%u--*\"]\n").expect("rules");
        assert!(may(&twofold, "a---x", &user("a")));
        assert!(!may(&twofold, "a---x", &user("a-")), "'a-' ends within the separator");
    }

    #[test]
    fn without_a_rule_that_says_connect_every_id_may_connect() {
        let rules = Rules::parse("[[rules]]\nallow = \"all\"\ntopics = [\"#\"]\n").expect("rules");
        assert!(may(&rules, "any", &Principal::default()));
        assert!(may(&Rules::default(), "any", &user("anna")));
        let any = Rules::parse("[[rules]]\nconnect = [\"*\"]\nusers = [\"anna\"]\n").expect("rules");
        assert!(may(&any, "any", &user("anna")) && !may(&any, "any", &user("bob")));
    }

    #[test]
    fn a_pattern_that_would_let_in_others_is_a_mistake() {
        for text in ["", "a*b", "%c", "dev-%c", "%u*", "%u%cn", "%x", "%{claim.}", "*%u"] {
            assert!(ClientIdPattern::parse(text).is_err(), "{text}");
        }
        for text in ["a", "*", "a*", "%{u}", "dev-%{cn}:*", "100%%-%{claim.site}"] {
            let pattern = ClientIdPattern::parse(text).expect(text);
            assert_eq!(pattern.to_string(), text);
        }
        // Line of the mistake.
        for (text, line) in [
            ("[[rules]]\nallow = \"all\"\ntopics = [\"a\"]\nconnect = [\"a\"]\n", 4),
            ("[[rules]]\ntopics = [\"a\"]\nconnect = [\"a\"]\n", 3),
            ("[[rules]]\nconnect = []\n", 2),
            ("[[rules]]\nconnect = [\"a\"]\nclients = [\"a\"]\n", 2),
            ("[[rules]]\nconnect = [\"a\"]\nmax_qos = 1\n", 3),
            ("[[rules]]\nconnect = [\"a\"]\nfilter = \"on-delivery\"\n", 3),
            ("[[rules]]\nconnect = [\"%u*\"]\n", 2),
            ("[[rules]]\nallow = \"all\"\n", 1),
        ] {
            let mistakes = Rules::parse(text).expect_err(text);
            assert_eq!((mistakes[0].line, mistakes.len()), (line, 1), "{text}: {mistakes:?}");
        }
    }

    #[test]
    fn a_rule_about_connecting_is_told_with_its_client_ids() {
        let rules = Rules::parse(TEXT).expect("rules");
        let listed: Vec<_> = rules.list(2).collect();
        assert!(!listed[0].publish && !listed[0].subscribe && !listed[0].deny);
        assert_eq!((listed[0].topics.join(" ").as_str(), listed[0].topic_count), ("%{u}:* shared", 2));
        let anna = user("anna");
        let subject = Subject { client_id: "bob", listener: "default", principal: &anna };
        let told = rules.explain(&subject, &AccessQuestion::Connect).to_string();
        for part in [
            "line 4: allow all for everybody on lab/#: another action",
            "line 7: connect as %{u}: the client id",
        ] {
            assert!(told.contains(part), "{told}");
        }
        assert!(told.ends_with("denied: no rule lets it connect under this client id\n"), "{told}");
    }
}
