//! Topics that parts of the gateway own, such as those of commands: a prefix, the client id of a device as one level, and more.

use std::sync::Arc;

use crate::parse_shared;

/// The prefixes of all parts of the gateway that own topics; cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct ReservedTopics {
    prefixes: Arc<[Box<str>]>,
    /// One bit for each byte that a prefix begins with: nearly every topic is told from them by that alone.
    first: [u64; 4],
}

impl ReservedTopics {
    /// Creates the set of the topics below these prefixes, one for each part.
    pub fn new<'a>(prefixes: impl IntoIterator<Item = &'a str>) -> Self {
        let prefixes: Arc<[Box<str>]> = prefixes.into_iter().map(Box::from).collect();
        let mut first = [0; 4];
        for byte in prefixes.iter().filter_map(|prefix| prefix.bytes().next()) {
            first[usize::from(byte) / 64] |= 1 << (byte % 64);
        }
        Self { prefixes, first }
    }

    /// Returns whether a topic or filter may belong to a part: asked of every message, so only one byte is looked at.
    #[inline(always)]
    pub fn may_have(&self, topic: &str) -> bool {
        topic.bytes().next().is_some_and(|byte| self.first[usize::from(byte) / 64] >> (byte % 64) & 1 != 0)
    }

    /// The number of the part that has this topic or filter, and what is after its prefix.
    pub fn find<'a>(&self, topic: &'a str) -> Option<(usize, &'a str)> {
        let behind = |prefix: &str| topic.strip_prefix(prefix);
        self.prefixes.iter().enumerate().find_map(|(part, prefix)| behind(prefix).map(|rest| (part, rest)))
    }

    /// Returns whether a topic, or all topics of a filter, belong to a part and to this device: it may publish or
    /// subscribe to them. Of a shared subscription the filter after the group counts. A client id that is not one level
    /// has no such topics, since they could be another device's.
    pub fn owns(&self, client_id: &str, topic: &str) -> bool {
        if self.prefixes.is_empty() {
            return false;
        }
        let Ok(shared) = parse_shared(topic) else { return false };
        let topic = shared.map_or(topic, |(_, filter)| filter);
        self.find(topic).is_some_and(|(_, behind)| below_own_name(client_id, behind).is_some())
    }

    /// Returns whether a filter, shared or not, can match a topic of a part that is not of this device, where the
    /// part's prefix begins with `$`: no wildcard in a filter's first level matches such a prefix [MQTT-4.7.2-1], so
    /// the filter was made for it.
    pub fn reaches_foreign(&self, client_id: &str, filter: &str) -> bool {
        // Most filters begin with something else.
        if self.prefixes.is_empty() || !filter.starts_with('$') {
            return false;
        }
        let Ok(shared) = parse_shared(filter) else { return false };
        let filter = shared.map_or(filter, |(_, filter)| filter);
        let mut private = self.prefixes.iter().filter(|prefix| prefix.starts_with('$'));
        private.any(|prefix| reaches(prefix, filter)) && !self.owns(client_id, filter)
    }

    /// Returns whether a topic belongs to a part but not to this device, which then must not publish to it.
    #[inline]
    pub fn is_foreign(&self, client_id: &str, topic: &str) -> bool {
        self.may_have(topic) && self.is_below_another(client_id, topic)
    }

    #[cold]
    fn is_below_another(&self, client_id: &str, topic: &str) -> bool {
        self.find(topic).is_some_and(|(_, behind)| below_own_name(client_id, behind).is_none())
    }
}

/// Returns whether a device of this client id can have reserved topics: the id must be one level of a topic, without
/// wildcards.
pub fn is_one_level(client_id: &str) -> bool {
    !client_id.is_empty() && !client_id.bytes().any(|byte| matches!(byte, b'/' | b'+' | b'#' | 0))
}

/// Returns whether a filter can match topics that begin with this prefix.
fn reaches(prefix: &str, filter: &str) -> bool {
    let mut levels = filter.split('/');
    for (place, own) in prefix.trim_end_matches('/').split('/').enumerate() {
        match levels.next() {
            Some("#") if place > 0 => return true,
            Some("+") if place > 0 => {}
            Some(level) if level == own => {}
            _ => return false,
        }
    }
    // The prefix itself is no topic of the part, but `prefix/#` matches it too.
    levels.next().is_some()
}

/// Returns the rest of a topic after the part's prefix and the device's own name; `None` if another name follows the
/// prefix.
pub fn below_own_name<'a>(client_id: &str, behind: &'a str) -> Option<&'a str> {
    let rest = behind.strip_prefix(client_id)?.strip_prefix('/')?;
    is_one_level(client_id).then_some(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_owns_or_may_publish_what_is_below_anothers_name() {
        let topics = ReservedTopics::new(["cmd/", "$aws/things/"]);
        // Client id, topic or filter, owned, foreign.
        let cases = [
            ("d", "cmd/d/1/reply/200", true, false),
            ("d", "cmd/d/+/+", true, false),
            ("d", "cmd/d/#", true, false),
            ("d", "$share/g/cmd/d/#", true, false),
            ("d", "$share/g/cmd/e/#", false, false),
            ("d", "$aws/things/d/shadow/update", true, false),
            ("d", "$aws/things/e/shadow/update", false, true),
            ("d", "cmd/e/1/reply/200", false, true),
            ("d", "cmd/dd/1/reply/200", false, true),
            ("d", "cmd/+/1/reply", false, true),
            ("d", "cmd/#", false, true),
            ("d", "cmd/", false, true),
            ("d", "cmd/d", false, true),
            ("d", "cmd", false, false),
            ("d", "#", false, false),
            ("d", "cmds/e/1", false, false),
            ("d/e", "cmd/d/e/1/reply", false, true),
            ("+", "cmd/+/1/reply", false, true),
            ("#", "cmd/#/1", false, true),
            ("", "cmd//1/reply", false, true),
        ];
        for (client_id, topic, owned, foreign) in cases {
            assert_eq!(topics.owns(client_id, topic), owned, "{client_id} owns {topic}");
            assert_eq!(topics.is_foreign(client_id, topic), foreign, "{client_id} and {topic}");
        }
        for (filter, foreign) in [
            ("$aws/things/d/shadow/#", false),
            ("$aws/things/d/#", false),
            ("$share/g/$aws/things/d/shadow/#", false),
            ("$aws/things/e/shadow/#", true),
            ("$share/g/$aws/things/e/shadow/#", true),
            ("$aws/things/+/shadow/#", true),
            ("$aws/+/d/#", true),
            ("$aws/things/#", true),
            ("$aws/#", true),
            ("$aws/things", false),
            ("$aws/other/#", false),
            ("$SYS/#", false),
            ("#", false),
            ("+/things/e/#", false),
            ("cmd/#", false),
        ] {
            assert_eq!(topics.reaches_foreign("d", filter), foreign, "{filter}");
        }
        assert!(!ReservedTopics::default().owns("d", "cmd/d/1"));
        assert!(!ReservedTopics::default().is_foreign("d", "cmd/e/1"));
    }
}
