//! Rules from an ACL file of Mosquitto.
//!
//! Mosquitto looks at what is denied before what is allowed, at the lines of a user before the patterns, and filters what
//! a subscription gets instead of refusing it. The rules are in that order, and those for reading are filtered on
//! delivery.

use std::{collections::BTreeMap, fmt::Write as _};

use super::pattern::Pattern;

/// An ACL file as our rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImportedRules {
    /// The text of a rules file, with what could not be expressed as comments.
    pub rules: String,
    /// Lines that could not be expressed, and why.
    pub left_out: Vec<String>,
}

#[derive(Default)]
struct AclSection {
    denied: Vec<(AclAccess, String)>,
    allowed: Vec<(AclAccess, String)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum AclAccess {
    Read,
    Write,
    Both,
}

impl AclAccess {
    fn as_str(self) -> &'static str {
        match self {
            Self::Read => "subscribe",
            Self::Write => "publish",
            Self::Both => "all",
        }
    }
}

/// Clients for which the lines after a `user` line are.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum AclUser {
    Anonymous,
    User(String),
    Pattern,
}

/// Reads an ACL file of Mosquitto as Mosquitto 2.0 and 2.1 do. What cannot be expressed is left out and said.
///
/// An import never allows more than the file did. A line that allows is left out alone. One that denies, or that may say whom the
/// next lines are for, leaves nothing allowed at all, as Mosquitto does not start with a file that it cannot read.
pub fn import_mosquitto(text: &str) -> ImportedRules {
    let mut reader = AclReader::default();
    for (number, line) in text.split('\n').enumerate() {
        reader.line(number + 1, line.trim_end_matches('\r'));
    }
    let AclReader { sections, left_out, closed, .. } = reader;
    match closed {
        true => ImportedRules { rules: closed_rules(&left_out), left_out },
        false => ImportedRules { rules: written(sections.into_values(), &left_out), left_out },
    }
}

#[derive(Default)]
struct AclReader {
    /// By their order among the rules.
    sections: BTreeMap<usize, (AclUser, AclSection)>,
    known: BTreeMap<AclUser, usize>,
    left_out: Vec<String>,
    /// The user that lines are for: none yet, one that is left out, or a name.
    user: Option<Option<String>>,
    /// Nothing is allowed.
    closed: bool,
}

impl AclReader {
    fn refuse(&mut self, number: usize, line: &str, why: &str) {
        self.left_out.push(format!("line {number}: {why}: {}", line.trim()));
    }

    fn close(&mut self, number: usize, line: &str, why: &str) {
        self.refuse(number, line, &format!("{why}; nothing is allowed until it is corrected"));
        self.closed = true;
    }

    /// Words are divided by blanks and by nothing else.
    fn line(&mut self, number: usize, line: &str) {
        if line.trim().is_empty() || line.trim().starts_with('#') {
            return;
        }
        let (word, rest) = line.trim_start_matches(' ').split_once(' ').unwrap_or((line, ""));
        let rest = rest.trim_matches(|letter: char| letter.is_ascii_whitespace());
        match word.trim_start_matches(' ') {
            "user" if rest.is_empty() => self.close(number, line, "a user without a name"),
            "user" if rest.chars().any(char::is_control) => {
                self.refuse(
                    number,
                    line,
                    "a user name that nobody can have, and what follows is left out with it",
                );
                self.user = Some(None);
            }
            "user" => self.user = Some(Some(rest.to_owned())),
            "topic" | "pattern" if rest.is_empty() => self.refuse(number, line, "no topic"),
            "topic" => match self.user.clone() {
                None => self.rule(number, line, AclUser::Anonymous, rest),
                Some(Some(name)) => self.rule(number, line, AclUser::User(name), rest),
                Some(None) => self.refuse(number, line, "of a user that is left out"),
            },
            "pattern" => self.rule(number, line, AclUser::Pattern, rest),
            _ => self.close(number, line, "not understood"),
        }
    }

    fn rule(&mut self, number: usize, line: &str, whom: AclUser, rest: &str) {
        let Some((access, topic)) = access(rest) else {
            let word = rest.split(' ').next().unwrap_or_default().to_ascii_lowercase();
            return match matches!(word.as_str(), "read" | "write" | "readwrite") {
                true => self.refuse(number, line, "read, write and readwrite are spelt so"),
                false => self.close(number, line, "neither read, write, readwrite nor deny"),
            };
        };
        let filters = match &whom {
            AclUser::Pattern => patterns(topic, access.is_none()),
            _ => vec![topic.replace('%', "%%")],
        };
        let problem = filters.iter().find_map(|filter| match filter.chars().any(char::is_control) {
            true => Some("a control character".to_owned()),
            false => Pattern::parse(filter).err(),
        });
        match (problem, access) {
            (None, _) => {}
            (Some(why), None) => return self.close(number, line, &why),
            (Some(why), Some(_)) => return self.refuse(number, line, &why),
        }
        if access.is_some() && matches!(&whom, AclUser::User(name) if name.contains('*')) {
            return self.refuse(
                number,
                line,
                "a user name with *, which in rules stands for other names, too",
            );
        }
        if whom == AclUser::Pattern && topic.split('/').any(|level| level.len() > 2 && has_placeholder(level))
        {
            let why = "%c and %u are text where they are not alone in their level, as for Mosquitto 2.1";
            self.refuse(number, line, why);
        }
        let (_, section) = self.section(whom);
        for filter in filters {
            match access {
                None => section.denied.push((AclAccess::Both, filter)),
                Some(access) => section.allowed.push((access, filter)),
            }
        }
    }

    /// In the order of the file, patterns after the others.
    fn section(&mut self, whom: AclUser) -> &mut (AclUser, AclSection) {
        let next = self.known.len() + 1;
        let place = match whom {
            AclUser::Pattern => usize::MAX,
            AclUser::Anonymous => 0,
            AclUser::User(ref name) => *self.known.entry(AclUser::User(name.clone())).or_insert(next),
        };
        self.sections.entry(place).or_insert_with(|| (whom, AclSection::default()))
    }
}

/// `read`, `write`, `readwrite`, `deny` or nothing before the topic: the access, `None` for `deny`, and the topic. `None` for
/// another word.
fn access(text: &str) -> Option<(Option<AclAccess>, &str)> {
    let Some((word, rest)) = text.split_once(' ') else { return Some((Some(AclAccess::Both), text)) };
    let access = match word {
        "read" => Some(AclAccess::Read),
        "write" => Some(AclAccess::Write),
        "readwrite" => Some(AclAccess::Both),
        "deny" => None,
        _ => return None,
    };
    Some((access, rest.trim_start_matches(|letter: char| letter.is_ascii_whitespace())))
}

fn has_placeholder(level: &str) -> bool {
    level.contains("%c") || level.contains("%u")
}

/// In a pattern `%c` and `%u` alone in a level are placeholders, and everything else is text. What Mosquitto 2.0.11 fills in
/// within a level, too, is denied in both readings.
fn patterns(text: &str, deny: bool) -> Vec<String> {
    let level = |level: &str| match level {
        "%c" | "%u" => level.to_owned(),
        other => other.replace('%', "%%"),
    };
    let anywhere = |level: &str| {
        let escaped = level.replace('%', "%%");
        escaped.replace("%%c", "%c").replace("%%u", "%u")
    };
    let joined = |read: &dyn Fn(&str) -> String| text.split('/').map(read).collect::<Vec<_>>().join("/");
    let mut filters = vec![joined(&level)];
    if deny && joined(&anywhere) != filters[0] {
        filters.push(joined(&anywhere));
    }
    filters
}

/// A rules file that allows nothing.
fn closed_rules(left_out: &[String]) -> String {
    let mut text = head(left_out);
    text.push_str("# Nothing is allowed: Mosquitto does not start with a file that has such a line. Correct it and import anew.\n");
    text
}

fn head(left_out: &[String]) -> String {
    let mut text = String::from(
        "# Imported from an ACL file of Mosquitto. The first rule that matches decides; what none names is denied.\n",
    );
    for line in left_out {
        // A comment of TOML has no control characters but tabs.
        let line = line.replace(|letter: char| letter.is_control() && letter != '\t', "?");
        let _ = writeln!(text, "# Left out, {line}");
    }
    text
}

/// The name as rules have it. A `*` in it stands for any end there, which only denies more.
fn rule_name(name: &str) -> String {
    match name.split_once('*') {
        Some((before, _)) => format!("{before}*"),
        None => name.to_owned(),
    }
}

fn written(sections: impl Iterator<Item = (AclUser, AclSection)>, left_out: &[String]) -> String {
    let mut text = head(left_out);
    for (whom, section) in sections {
        let (comment, condition) = match &whom {
            AclUser::Anonymous => ("devices without a user name".to_owned(), "anonymous = true\n".to_owned()),
            AclUser::User(name) => {
                (format!("user {name}"), format!("users = [{}]\n", quoted(&rule_name(name))))
            }
            AclUser::Pattern => ("every device".to_owned(), String::new()),
        };
        let _ = writeln!(text, "\n# For {comment}.");
        let denied = section.denied.iter().map(|(access, filter)| ("deny", *access, filter));
        let allowed = section.allowed.iter().map(|(access, filter)| ("allow", *access, filter));
        for (verb, access, filter) in denied.chain(allowed) {
            let _ = write!(
                text,
                "[[rules]]\n{verb} = \"{}\"\n{condition}topics = [{}]\n",
                access.as_str(),
                quoted(filter)
            );
            if verb == "allow" && access != AclAccess::Write {
                text.push_str("filter = \"on-delivery\"\n");
            }
        }
    }
    text
}

/// As a string of TOML.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}
