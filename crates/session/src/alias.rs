//! Topic aliases, inbound (the client's) and outbound (ours). Both end with the connection [MQTT-3.3.2-7].

use std::{collections::HashMap, sync::Arc};

/// Aliases that the client has set.
#[derive(Debug, Default)]
pub(super) struct InboundAliases {
    topics: Vec<Option<Arc<str>>>,
    bytes: usize,
}

impl InboundAliases {
    /// Remembers `topic` for `alias`, which the caller has checked against the maximum.
    pub(super) fn set(&mut self, alias: u16, topic: &str) {
        let index = usize::from(alias);
        if self.topics.len() <= index {
            // Doubled, and no more than is counted.
            let places = (index + 1).next_power_of_two();
            self.topics.reserve_exact(places - self.topics.len());
            self.topics.resize(places, None);
        }
        let known = self.topics[index].as_deref();
        if known != Some(topic) {
            self.bytes += topic.len() + OVERHEAD;
            self.bytes -= known.map_or(0, |known| known.len() + OVERHEAD);
            self.topics[index] = Some(Arc::from(topic));
        }
    }

    /// Bytes that the aliases take, those of no topic included: a client may begin with the highest.
    pub(super) fn bytes(&self) -> usize {
        self.bytes + self.topics.len() * size_of::<Option<Arc<str>>>()
    }

    /// The topic of `alias`, if set.
    pub(super) fn get(&self, alias: u16) -> Option<Arc<str>> {
        self.topics.get(usize::from(alias)).cloned().flatten()
    }
}

/// Aliases that we gave to the client: the first topics that are sent get one, for as long as the connection lasts.
#[derive(Debug)]
pub(super) struct OutboundAliases {
    maximum: u16,
    topics: HashMap<Box<str>, u16, ahash::RandomState>,
    bytes: usize,
}

/// Bytes of topics that we give aliases, per connection.
const OUTBOUND_BYTES: usize = 64 << 10;
/// Bytes counted for an alias beside its topic.
const OVERHEAD: usize = 64;

/// Form in which a topic is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AliasUse {
    /// No alias.
    None,
    /// Topic and alias together, which sets it.
    Set(u16),
    /// The alias alone, topic empty.
    Known(u16),
}

impl OutboundAliases {
    /// At most `maximum` aliases [MQTT-3.1.2-26], of which we use at most 1,024, for at most 64 KiB of topics.
    pub(super) fn new(maximum: u16) -> Self {
        Self { maximum: maximum.min(1024), topics: HashMap::default(), bytes: 0 }
    }

    /// Bytes that the aliases take.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns how to send `topic`; changes nothing, see [`Self::assign`].
    pub(super) fn choose(&self, topic: &str) -> AliasUse {
        if let Some(alias) = self.topics.get(topic) {
            return AliasUse::Known(*alias);
        }
        let fits = self.bytes + topic.len() + OVERHEAD <= OUTBOUND_BYTES;
        match u16::try_from(self.topics.len()) {
            Ok(used) if used < self.maximum && fits => AliasUse::Set(used + 1),
            _ => AliasUse::None,
        }
    }

    /// Records that `choose` answered `Set` and the frame was appended.
    pub(super) fn assign(&mut self, topic: &str, alias: u16) {
        self.bytes += topic.len() + OVERHEAD;
        self.topics.insert(topic.into(), alias);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table for 65,535 aliases was counted as the one alias in it.
    #[test]
    fn the_highest_alias_costs_the_whole_table() {
        let mut aliases = InboundAliases::default();
        aliases.set(u16::MAX, "t");
        assert!(aliases.bytes() >= 1 << 20);
        assert_eq!(aliases.get(u16::MAX).as_deref(), Some("t"));
        assert_eq!(aliases.get(1), None);
    }
}
