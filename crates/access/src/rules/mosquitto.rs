//! Rules from an ACL file of Mosquitto.
//!
//! Mosquitto looks at what is denied before what is allowed, at the lines of a user before the patterns, and filters what
//! a subscription gets instead of refusing it. The rules are in that order, and those for reading are filtered on
//! delivery.

use std::{collections::BTreeMap, fmt::Write as _};

use super::pattern::Pattern;

/// An ACL file as our rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Imported {
    /// The text of a rules file, with what could not be expressed as comments.
    pub rules: String,
    /// Lines that could not be expressed, and why.
    pub left_out: Vec<String>,
}

#[derive(Default)]
struct Section {
    denied: Vec<(Access, String)>,
    allowed: Vec<(Access, String)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    Write,
    Both,
}

impl Access {
    fn as_str(self) -> &'static str {
        match self {
            Self::Read => "subscribe",
            Self::Write => "publish",
            Self::Both => "all",
        }
    }
}

/// Whom the lines after a `user` line are for.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum For {
    Anonymous,
    User(String),
    Pattern,
}

/// Reads an ACL file of Mosquitto. What cannot be expressed is left out and said.
pub fn import_mosquitto(text: &str) -> Imported {
    let mut sections: BTreeMap<usize, (For, Section)> = BTreeMap::new();
    let mut known: BTreeMap<For, usize> = BTreeMap::new();
    let mut left_out = Vec::new();
    let mut user = None;
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        let mut refuse = |why: &str| left_out.push(format!("line {}: {why}: {line}", number + 1));
        let whom = match word {
            "user" if rest.is_empty() || rest.contains('*') || rest.chars().any(char::is_control) => {
                refuse("a user name that rules cannot have, and what follows is left out with it");
                user = Some(None);
                continue;
            }
            "user" => {
                user = Some(Some(rest.to_owned()));
                continue;
            }
            "topic" => match &user {
                None => For::Anonymous,
                Some(Some(name)) => For::User(name.clone()),
                Some(None) => {
                    refuse("of a user that is left out");
                    continue;
                }
            },
            "pattern" => For::Pattern,
            _ => {
                refuse("not understood");
                continue;
            }
        };
        let (access, topic) = access(rest);
        let filter = match &whom {
            For::Pattern => pattern(topic),
            _ => topic.replace('%', "%%"),
        };
        if filter.chars().any(char::is_control) {
            refuse("a control character");
            continue;
        }
        if let Err(why) = Pattern::parse(&filter) {
            refuse(&why);
            continue;
        }
        // In the order of the file, patterns after the others.
        let next = known.len() + 1;
        let place = match whom {
            For::Pattern => usize::MAX,
            For::Anonymous => 0,
            For::User(ref name) => *known.entry(For::User(name.clone())).or_insert(next),
        };
        let (_, section) = sections.entry(place).or_insert_with(|| (whom, Section::default()));
        match access {
            None => section.denied.push((Access::Both, filter)),
            Some(access) => section.allowed.push((access, filter)),
        }
    }
    Imported { rules: written(sections.into_values(), &left_out), left_out }
}

/// `read`, `write`, `readwrite` or nothing before the topic; `None` is `deny`.
fn access(text: &str) -> (Option<Access>, &str) {
    let (word, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    let rest = rest.trim();
    match word {
        "read" if !rest.is_empty() => (Some(Access::Read), rest),
        "write" if !rest.is_empty() => (Some(Access::Write), rest),
        "readwrite" if !rest.is_empty() => (Some(Access::Both), rest),
        "deny" if !rest.is_empty() => (None, rest),
        _ => (Some(Access::Both), text),
    }
}

/// In a pattern `%c` and `%u` alone in a level are placeholders, and everything else is text.
fn pattern(text: &str) -> String {
    let level = |level: &str| match level {
        "%c" | "%u" => level.to_owned(),
        other => other.replace('%', "%%"),
    };
    text.split('/').map(level).collect::<Vec<_>>().join("/")
}

fn written(sections: impl Iterator<Item = (For, Section)>, left_out: &[String]) -> String {
    let mut text = String::from(
        "# Imported from an ACL file of Mosquitto. The first rule that matches decides; what none names is denied.\n",
    );
    for line in left_out {
        // A comment of TOML has no control characters but tabs.
        let line = line.replace(|letter: char| letter.is_control() && letter != '\t', "?");
        let _ = writeln!(text, "# Left out, {line}");
    }
    for (whom, section) in sections {
        let (comment, condition) = match &whom {
            For::Anonymous => ("devices without a user name".to_owned(), "anonymous = true\n".to_owned()),
            For::User(name) => (format!("user {name}"), format!("users = [{}]\n", quoted(name))),
            For::Pattern => ("every device".to_owned(), String::new()),
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
            if verb == "allow" && access != Access::Write {
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
