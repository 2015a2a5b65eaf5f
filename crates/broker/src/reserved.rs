//! Topics that the gateway itself answers: replies to commands, and whatever else a part of it hears from devices. Such a
//! part is a [`Reserved`].
//!
//! All of its topics begin with a prefix of its own, the client id of a device as one level, and go on: `cmd/{client_id}/...`.
//! A message that a device publishes below its own name goes to the part and to nobody else: it is not retained, recorded,
//! appended or delivered, in non-broker mode neither. Below the name of another it is refused. Messages of backends and of the
//! gateway are routed like any other.
//!
//! A device may publish to these topics of its own, and subscribe to filters inside them, without a rule that says so, and
//! outside its namespace in non-broker mode ([`ReservedTopics::owns`]).

use std::sync::Arc;

use gateway_core::{ClientId, Message, OriginKind, metrics::count, parse_shared};

use crate::{Broker, Published, Routing, Shortage, Turn};

/// A part of the gateway that owns topics to which devices publish.
pub trait Reserved: Send + Sync {
    /// What all its topics begin with, as long as it lives: whole levels, each with the `/` after it. No part's prefix
    /// begins another's.
    fn prefix(&self) -> &str;

    /// Takes what a device has published to a topic below its own name; `rest` is the topic after the client id and its
    /// `/`. The message may be a will.
    ///
    /// What must be on disk before the device has its PUBACK or PUBREC takes a part of the message's commit
    /// ([`Message::plain_part`]). Called on a thread that serves devices, under no lock of the broker: must not block, and
    /// charges what it does beyond a lookup to the turn's effort. It may publish in this turn, also to the same device.
    fn take(&self, message: &Message<'_>, rest: &str, broker: &Broker, turn: &mut Turn) -> ReservedOutcome;

    /// A device has a connection and can be sent to. Called for each connection, perhaps more than once; must neither block
    /// nor call back.
    fn connected(&self, device: &ClientId) {
        let _ = device;
    }
}

/// What became of a message in [`Reserved::take`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReservedOutcome {
    /// It is the part's, or was not worth anything: acknowledged as if it had a receiver.
    Taken,
    /// It cannot be taken now (0x97): the device may send it again.
    Refused(Shortage),
}

/// The prefixes of all parts; cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct ReservedTopics {
    prefixes: Arc<[Box<str>]>,
    /// One bit for each byte that a prefix begins with: nearly every topic is told from them by that alone.
    first: [u64; 4],
}

impl ReservedTopics {
    /// Those of parts with these prefixes.
    pub fn new<'a>(prefixes: impl IntoIterator<Item = &'a str>) -> Self {
        let prefixes: Arc<[Box<str>]> = prefixes.into_iter().map(Box::from).collect();
        let mut first = [0; 4];
        for byte in prefixes.iter().filter_map(|prefix| prefix.bytes().next()) {
            first[usize::from(byte) / 64] |= 1 << (byte % 64);
        }
        Self { prefixes, first }
    }

    /// Whether a topic or filter may belong to a part: asked of every message, so it looks at one byte.
    #[inline(always)]
    fn may_have(&self, topic: &str) -> bool {
        topic.bytes().next().is_some_and(|byte| self.first[usize::from(byte) / 64] >> (byte % 64) & 1 != 0)
    }

    /// The number of the part that has this topic or filter, and what is after its prefix.
    fn find<'a>(&self, topic: &'a str) -> Option<(usize, &'a str)> {
        let behind = |prefix: &str| topic.strip_prefix(prefix);
        self.prefixes.iter().enumerate().find_map(|(part, prefix)| behind(prefix).map(|rest| (part, rest)))
    }

    /// Whether a topic belongs to a part, or all topics of a filter do, and to this device: it may publish to it, or
    /// subscribe. Of a shared subscription the filter after the group counts. A client id that is not one level has no such
    /// topics, since they could be somebody else's.
    pub fn owns(&self, client_id: &str, topic: &str) -> bool {
        if self.prefixes.is_empty() {
            return false;
        }
        let Ok(shared) = parse_shared(topic) else { return false };
        let topic = shared.map_or(topic, |(_, filter)| filter);
        self.find(topic).is_some_and(|(_, behind)| own(client_id, behind).is_some())
    }

    /// Whether a filter, shared or not, can match a topic of a part that is not of this device, where the part's prefix begins
    /// with `$`: no wildcard in a filter's first level matches that [MQTT-4.7.2-1], so such a filter was made for it.
    pub(crate) fn reaches_foreign(&self, client_id: &str, filter: &str) -> bool {
        // Most filters begin with something else.
        if self.prefixes.is_empty() || !filter.starts_with('$') {
            return false;
        }
        let Ok(shared) = parse_shared(filter) else { return false };
        let filter = shared.map_or(filter, |(_, filter)| filter);
        let mut private = self.prefixes.iter().filter(|prefix| prefix.starts_with('$'));
        private.any(|prefix| reaches(prefix, filter)) && !self.owns(client_id, filter)
    }

    /// Whether a topic belongs to a part, but not to this device: it must not publish to it.
    #[inline]
    pub fn is_foreign(&self, client_id: &str, topic: &str) -> bool {
        self.may_have(topic) && self.is_below_another(client_id, topic)
    }

    #[cold]
    fn is_below_another(&self, client_id: &str, topic: &str) -> bool {
        self.find(topic).is_some_and(|(_, behind)| own(client_id, behind).is_none())
    }
}

/// Whether a device of this client id can have reserved topics: it must be one level of a topic, and no wildcard.
pub fn is_one_level(client_id: &str) -> bool {
    !client_id.is_empty() && !client_id.bytes().any(|byte| matches!(byte, b'/' | b'+' | b'#' | 0))
}

/// Whether a filter can match topics that begin with this prefix.
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

/// What is after the device's name in a topic after its prefix.
fn own<'a>(client_id: &str, behind: &'a str) -> Option<&'a str> {
    let rest = behind.strip_prefix(client_id)?.strip_prefix('/')?;
    is_one_level(client_id).then_some(rest)
}

/// The parts, in the order of their topics.
pub(crate) struct Parts {
    pub(crate) topics: ReservedTopics,
    parts: Box<[Arc<dyn Reserved>]>,
}

impl Parts {
    /// `None` where there is no part.
    pub(crate) fn new(parts: Vec<Arc<dyn Reserved>>) -> Option<Self> {
        let topics = ReservedTopics::new(parts.iter().map(|part| part.prefix()));
        (!parts.is_empty()).then(|| Self { topics, parts: parts.into() })
    }

    pub(crate) fn connected(&self, device: &ClientId) {
        for part in &self.parts {
            part.connected(device);
        }
    }
}

/// Reserved topics.
impl Broker {
    /// Whether a device may not publish to this topic, whatever its rules say, since it is reserved for another.
    #[inline]
    pub fn is_foreign(&self, client_id: &str, topic: &str) -> bool {
        self.inner.reserved.as_ref().is_some_and(|parts| parts.topics.is_foreign(client_id, topic))
    }

    /// Gives a device's message to the part that has its topic; `None` if none has.
    #[inline(always)]
    pub(crate) fn take_reserved(&self, message: &Message<'_>, turn: &mut Turn) -> Option<Routing> {
        let parts = self.inner.reserved.as_ref()?;
        if message.origin.kind != OriginKind::Device || !parts.topics.may_have(message.topic) {
            return None;
        }
        self.take_by_prefix(parts, message, turn).map(Routing::Done)
    }

    #[cold]
    fn take_by_prefix(&self, parts: &Parts, message: &Message<'_>, turn: &mut Turn) -> Option<Published> {
        let (part, behind) = parts.topics.find(message.topic)?;
        Some(self.taken_by(&*parts.parts[part], message, behind, turn))
    }

    fn taken_by(
        &self,
        part: &dyn Reserved,
        message: &Message<'_>,
        behind: &str,
        turn: &mut Turn,
    ) -> Published {
        let client_id = message.origin.client_id.map_or("", ClientId::as_str);
        let Some(rest) = own(client_id, behind) else {
            // A PUBLISH is refused before; this is a will.
            count(|c| c.reserved_foreign.add(1));
            return Published::default();
        };
        match part.take(message, rest, self, turn) {
            ReservedOutcome::Taken => Published { matched: 1, sent: 1, ..Published::default() },
            ReservedOutcome::Refused(shortage) => {
                Published { refused: Some(shortage), ..Published::default() }
            }
        }
    }
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
