//! With which topics and devices a caller may have to do.

use std::fmt;

use gateway_core::{TopicFilter, matches};
use thiserror::Error;

/// Most topic filters, and most device patterns, of a scope.
const MOST: usize = 100;
/// Longest device pattern.
const MOST_BYTES: usize = 1_024;

/// Topics and devices. A message is in scope if its topic is and, where devices are limited, if a device in scope has
/// sent it: what backends and the gateway itself have published has no device.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Scope {
    topics: Option<Box<[Box<str>]>>,
    devices: Option<Box<[Box<str>]>>,
}

/// Why a scope is not one.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ScopeError {
    /// Not a topic filter.
    #[error("'{0}' is not a topic filter: use + as a whole level and # as the last level")]
    Filter(String),
    /// Not a pattern of client ids.
    #[error("'{0}' is not a pattern of client ids: use 1 to {MOST_BYTES} characters, with * for any others")]
    Device(String),
    /// Too long a list.
    #[error("more than {MOST} topic filters or device patterns")]
    Many,
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "topics {:?}, devices {:?}", self.topics, self.devices)
    }
}

impl Scope {
    /// All topics, those that begin with `$` included, and all devices.
    pub const ALL: Self = Self { topics: None, devices: None };

    /// Topics that match one of these filters, and devices whose client id matches one of these patterns, in which `*`
    /// stands for any characters. `None` is all of them; an empty list is none.
    ///
    /// # Errors
    /// The first entry that is not one.
    pub fn new(topics: Option<Vec<String>>, devices: Option<Vec<String>>) -> Result<Self, ScopeError> {
        let lists = [topics.as_deref(), devices.as_deref()];
        if lists.into_iter().flatten().any(|list| list.len() > MOST) {
            return Err(ScopeError::Many);
        }
        for filter in topics.iter().flatten() {
            if TopicFilter::check(filter).is_err() || filter.starts_with("$share/") {
                return Err(ScopeError::Filter(filter.clone()));
            }
        }
        for pattern in devices.iter().flatten() {
            if pattern.is_empty() || pattern.len() > MOST_BYTES || pattern.contains('\0') {
                return Err(ScopeError::Device(pattern.clone()));
            }
        }
        let boxed = |list: Option<Vec<String>>| {
            list.map(|list| list.into_iter().map(String::into_boxed_str).collect::<Box<[_]>>())
        };
        // Otherwise every message would be matched for nothing.
        let devices = devices.filter(|patterns| patterns.iter().all(|pattern| pattern != "*"));
        Ok(Self { topics: boxed(topics), devices: boxed(devices) })
    }

    /// The topic filters; `None` is all topics.
    pub fn topics(&self) -> Option<&[Box<str>]> {
        self.topics.as_deref()
    }

    /// The patterns of client ids; `None` is all devices.
    pub fn devices(&self) -> Option<&[Box<str>]> {
        self.devices.as_deref()
    }

    /// Returns whether the scope excludes nothing.
    pub fn is_all(&self) -> bool {
        self.topics.is_none() && self.devices.is_none()
    }

    /// Returns whether `topic` is in scope.
    pub fn has_topic(&self, topic: &str) -> bool {
        self.topics().is_none_or(|filters| filters.iter().any(|filter| matches(filter, topic)))
    }

    /// Returns whether the device with this client id is in scope.
    pub fn has_device(&self, client_id: &str) -> bool {
        self.devices()
            .is_none_or(|patterns| patterns.iter().any(|pattern| pattern_matches(pattern, client_id)))
    }

    /// Returns whether a message on `topic` that `device` has sent is in scope; `None` is a backend, or the gateway.
    pub fn has_message(&self, device: Option<&str>, topic: &str) -> bool {
        let by_device = match device {
            Some(device) => self.has_device(device),
            None => self.devices.is_none(),
        };
        by_device && self.has_topic(topic)
    }

    /// Returns whether any topic that `filter` matches is in scope.
    pub fn meets(&self, filter: &str) -> bool {
        self.topics().is_none_or(|filters| filters.iter().any(|own| intersection(own, filter).is_some()))
    }

    /// Filters that together match what `filters` match and is in scope. `None` if there would be more than `most`.
    pub fn narrow(&self, filters: &[String], most: usize) -> Option<Vec<String>> {
        let Some(own) = self.topics() else { return Some(filters.to_vec()) };
        let mut narrowed = Vec::new();
        for filter in filters {
            narrowed.extend(own.iter().filter_map(|own| intersection(own, filter)));
            if narrowed.len() > most {
                return None;
            }
        }
        narrowed.sort_unstable();
        narrowed.dedup();
        Some(narrowed)
    }

    /// Returns whether all that is in `other` is in this scope, as far as each entry of `other` lies within a single
    /// entry here.
    pub fn covers(&self, other: &Self) -> bool {
        let within = |own: Option<&[Box<str>]>, theirs: Option<&[Box<str>]>, one: fn(&str, &str) -> bool| {
            let Some(own) = own else { return true };
            theirs.is_some_and(|theirs| theirs.iter().all(|entry| own.iter().any(|own| one(own, entry))))
        };
        // A star among the characters to be matched stands for itself, and what matches it matches all it stands for.
        within(self.topics(), other.topics(), covers)
            && within(self.devices(), other.devices(), pattern_matches)
    }
}

/// Returns whether every topic that matches `inner` matches `outer`, too. Does not see that `#` is within `+/#`, which
/// is the same in other words.
pub fn covers(outer: &str, inner: &str) -> bool {
    intersection(outer, inner).as_deref() == Some(inner)
}

/// The filter that matches just those topics which match both; `None` if there are none.
pub fn intersection(one: &str, other: &str) -> Option<String> {
    let mut common: Vec<&str> = Vec::new();
    let (mut ones, mut others) = (one.split('/').peekable(), other.split('/').peekable());
    let hidden = |text: &str| text.starts_with('$');
    let wild = |text: &str| text.starts_with(['+', '#']);
    // [MQTT-4.7.2-1]
    if hidden(one) && wild(other) || hidden(other) && wild(one) {
        return None;
    }
    loop {
        match (ones.peek(), others.peek()) {
            (Some(&"#"), _) => {
                common.extend(others);
                break;
            }
            (_, Some(&"#")) => {
                common.extend(ones);
                break;
            }
            (None, None) => break,
            (None, _) | (_, None) => return None,
            (Some(&a), Some(&b)) => {
                common.push(match (a, b) {
                    ("+", level) | (level, "+") => level,
                    (a, b) if a == b => a,
                    _ => return None,
                });
                ones.next();
                others.next();
            }
        }
    }
    Some(common.join("/"))
}

/// Returns whether `text` is `pattern` with any characters in the place of each `*`. Takes time of at most the product
/// of both.
pub fn pattern_matches(pattern: &str, text: &str) -> bool {
    let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
    let (mut at, mut place) = (0, 0);
    // The last star, and where in the text its part ends for now.
    let mut star = None;
    while place < text.len() {
        match pattern.get(at) {
            Some(b'*') => {
                star = Some((at, place));
                at += 1;
            }
            Some(byte) if *byte == text[place] => (at, place) = (at + 1, place + 1),
            _ => match &mut star {
                Some((begin, end)) => {
                    *end += 1;
                    (at, place) = (*begin + 1, *end);
                }
                None => return false,
            },
        }
    }
    pattern[at..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scope(topics: &[&str], devices: &[&str]) -> Scope {
        let list = |list: &[&str]| Some(list.iter().map(|text| (*text).to_owned()).collect());
        Scope::new(list(topics), list(devices)).unwrap()
    }

    #[test]
    fn patterns_match_whole_ids_and_stars_anything() {
        for (pattern, id, expected) in [
            ("a", "a", true),
            ("a", "ab", false),
            ("a*", "a", true),
            ("a*", "abc", true),
            ("*c", "abc", true),
            ("*b", "abc", false),
            ("a*c*e", "abcde", true),
            ("a*c*e", "abcdef", false),
            ("a*ab", "aaab", true),
            ("*", "", true),
            ("**", "x", true),
            ("", "", true),
            ("ü*", "üx", true),
            ("a*b*", "ab", true),
        ] {
            assert_eq!(pattern_matches(pattern, id), expected, "{pattern} {id}");
        }
        let long = "a".repeat(4_000);
        assert!(!pattern_matches(&"*a".repeat(50).replace('a', "ab"), &long));
    }

    /// All filters of up to three levels over a small alphabet, and all topics: an intersection matches exactly what both
    /// match, and containment is that of the sets.
    #[test]
    fn an_intersection_matches_what_both_match() {
        let mut filters: Vec<String> = Vec::new();
        let mut topics: Vec<String> = Vec::new();
        let (levels, names) = (["a", "", "$s", "+", "#"], ["a", "b", "", "$s"]);
        let grow = |before: &[String], levels: &[&str]| -> Vec<String> {
            let open = before.iter().filter(|before| !before.ends_with('#'));
            open.flat_map(|before| levels.iter().map(move |level| format!("{before}/{level}"))).collect()
        };
        let mut last: Vec<String> = levels.iter().map(|level| (*level).to_owned()).collect();
        let mut named: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        for _ in 0..3 {
            filters.extend(last.iter().filter(|filter| TopicFilter::check(filter).is_ok()).cloned());
            topics.extend(named.iter().filter(|topic| !topic.is_empty()).cloned());
            last = grow(&last, &levels);
            named = grow(&named, &names);
        }
        topics.extend(named);
        let matched = |filter: &str| topics.iter().map(|topic| matches(filter, topic)).collect::<Vec<_>>();
        let sets: Vec<Vec<bool>> = filters.iter().map(|filter| matched(filter)).collect();
        for (a, in_a) in filters.iter().zip(&sets) {
            for (b, in_b) in filters.iter().zip(&sets) {
                let both: Vec<bool> = in_a.iter().zip(in_b).map(|(a, b)| *a && *b).collect();
                match intersection(a, b) {
                    Some(common) => assert_eq!(matched(&common), both, "{a} {b}: {common}"),
                    None => assert!(both.iter().all(|both| !both), "{a} {b}"),
                }
                if covers(a, b) {
                    assert_eq!(&both, in_b, "{a} covers {b}");
                } else if in_b.contains(&true) && !a.ends_with("+/#") {
                    // +/# is as much as #, for no topic is empty.
                    assert_ne!(&both, in_b, "{a} covers {b}");
                }
            }
        }
    }

    #[test]
    fn a_message_needs_its_topic_and_its_device() {
        let both = scope(&["a/#", "$SYS/#"], &["dev-*"]);
        assert!(both.has_message(Some("dev-1"), "a/b") && both.has_message(Some("dev-1"), "$SYS/x"));
        assert!(!both.has_message(Some("other"), "a/b") && !both.has_message(Some("dev-1"), "b"));
        assert!(!both.has_message(None, "a/b"), "of no device, where devices are limited");
        assert!(Scope::new(Some(vec!["a/#".into()]), None).unwrap().has_message(None, "a/b"));
        assert!(scope(&["a/#"], &["*"]).has_message(None, "a/b"), "a star alone is no limit");
        assert!(!scope(&["#"], &["*"]).has_topic("$SYS/x"), "as # in MQTT");
        assert!(Scope::ALL.has_message(None, "$SYS/x") && Scope::ALL.is_all());
        assert!(!scope(&[], &["*"]).has_topic("a"), "an empty list is none");
    }

    #[test]
    fn narrowed_filters_match_what_is_in_scope() {
        let tenant = scope(&["t/a/#", "public/+"], &["*"]);
        let narrow = |filters: &[&str]| {
            let filters: Vec<String> = filters.iter().map(|filter| (*filter).to_owned()).collect();
            tenant.narrow(&filters, 3)
        };
        assert_eq!(narrow(&["#"]).unwrap(), ["public/+", "t/a/#"]);
        assert_eq!(narrow(&["t/+/x", "t/#"]).unwrap(), ["t/a/#", "t/a/x"]);
        assert_eq!(narrow(&["t/b/#"]).unwrap(), [""; 0]);
        assert_eq!(narrow(&["#", "+/#"]), None, "more than three");
        assert_eq!(Scope::ALL.narrow(&["#".to_owned()], 0).unwrap(), ["#"]);
        assert!(tenant.meets("t/#") && !tenant.meets("t/b/#"));
    }

    #[test]
    fn a_scope_covers_what_lies_within() {
        let tenant = scope(&["t/a/#"], &["a-*"]);
        assert!(Scope::ALL.covers(&tenant) && !tenant.covers(&Scope::ALL));
        assert!(tenant.covers(&tenant) && tenant.covers(&scope(&["t/a/+/x", "t/a"], &["a-1", "a-*-b"])));
        assert!(!tenant.covers(&scope(&["t/+"], &["a-1"])) && !tenant.covers(&scope(&["t/a"], &["*a-"])));
        assert!(tenant.covers(&scope(&[], &[])), "nothing is within anything");
    }

    #[test]
    fn what_is_no_filter_or_pattern_is_named() {
        let one = |topic: &str, device: &str| Scope::new(Some(vec![topic.into()]), Some(vec![device.into()]));
        assert_eq!(one("a/#/b", "x"), Err(ScopeError::Filter("a/#/b".into())));
        assert_eq!(one("$share/g/a", "x"), Err(ScopeError::Filter("$share/g/a".into())));
        assert_eq!(one("a", ""), Err(ScopeError::Device(String::new())));
        assert_eq!(Scope::new(Some(vec!["a".into(); MOST + 1]), None), Err(ScopeError::Many));
    }
}
