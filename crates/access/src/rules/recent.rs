//! Latest decisions: most devices use few topics, and each decision is about one.

use super::RuleGrant;

/// Topics whose decisions are remembered, and the longest of them in bytes.
const REMEMBERED: usize = 8;
const LONGEST: usize = 256;

/// Latest decisions about a few topics, for one party and one action.
#[derive(Debug, Default)]
pub struct RecentDecisions {
    version: u32,
    next: u32,
    /// Of what it holds beside itself.
    bytes: u32,
    grants: Vec<(Box<str>, RuleGrant)>,
}

impl RecentDecisions {
    /// The most bytes that it holds, itself included.
    pub const MOST_BYTES: usize =
        size_of::<Self>() + REMEMBERED * (size_of::<(Box<str>, RuleGrant)>() + LONGEST);

    /// Bytes that it holds beside itself. They change with a new decision only.
    pub fn bytes(&self) -> usize {
        self.bytes as usize
    }

    /// The decision about a topic under this version of the rules, made by `decide` if it is not remembered. What was decided
    /// under another version is forgotten.
    #[inline]
    pub fn find(&mut self, version: u32, topic: &str, decide: impl FnOnce() -> RuleGrant) -> RuleGrant {
        if self.version == version
            && let Some((_, grant)) = self.grants.iter().find(|(known, _)| **known == *topic)
        {
            return *grant;
        }
        self.decide(version, topic, decide)
    }

    #[cold]
    fn decide(&mut self, version: u32, topic: &str, decide: impl FnOnce() -> RuleGrant) -> RuleGrant {
        if self.version != version {
            // Rules that come in between are remembered under the version before them, and so not for long.
            (self.version, self.next) = (version, 0);
            self.grants.clear();
        }
        let grant = decide();
        if topic.len() > LONGEST {
            return grant;
        }
        if self.grants.len() < REMEMBERED {
            if self.grants.is_empty() {
                // Most have one topic.
                self.grants.reserve_exact(1);
            }
            self.grants.push((topic.into(), grant));
        } else {
            self.grants[self.next as usize] = (topic.into(), grant);
            self.next = (self.next + 1) % REMEMBERED as u32;
        }
        let topics: usize = self.grants.iter().map(|(topic, _)| topic.len()).sum();
        let bytes = self.grants.capacity() * size_of::<(Box<str>, RuleGrant)>() + topics;
        self.bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        grant
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_decision_is_made_once_in_a_version_and_anew_in_the_next() {
        let made = Cell::new(0);
        let mut recent = RecentDecisions::default();
        let mut find = |version, topic: &str| {
            let before = made.get();
            recent.find(version, topic, || {
                made.set(made.get() + 1);
                RuleGrant::DENIED
            });
            made.get() > before
        };
        assert_eq!([find(1, "a"), find(1, "a"), find(1, "b"), find(1, "a")], [true, false, true, false]);
        assert_eq!([find(2, "a"), find(2, "a"), find(2, "b")], [true, false, true]);
        for number in 0..REMEMBERED {
            assert!(find(2, &format!("c/{number}")));
        }
        assert_eq!([find(2, "a"), find(2, "c/7")], [true, false], "the oldest goes first");
        let long = "l".repeat(LONGEST + 1);
        assert_eq!([find(2, &long), find(2, &long)], [true, true], "not remembered");
    }
}
