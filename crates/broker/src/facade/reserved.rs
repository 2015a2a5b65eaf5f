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

use gateway_core::{ClientId, Message, OriginKind, ReservedTopics, below_own_name};

use super::Broker;
use crate::{Published, Shortage, Turn};

/// A part of the gateway that owns topics to which devices publish.
pub trait Reserved: Send + Sync {
    /// Returns the prefix of all the part's topics, which never changes: whole levels, each with the `/` after it. No part's
    /// prefix begins another's.
    fn prefix(&self) -> &str;

    /// Takes what a device has published to a topic below its own name; `rest` is the topic after the client id and its
    /// `/`. The message may be a will.
    ///
    /// Work that must be on disk before the device has its PUBACK or PUBREC takes a part of the message's commit
    /// ([`Message::plain_part`]). Called on a thread that serves devices, under no lock of the broker: must not block, and
    /// charges any work beyond a lookup to the turn's effort. The part may publish in this turn, also to the same device.
    fn take(&self, message: &Message<'_>, rest: &str, broker: &Broker, turn: &mut Turn) -> ReservedOutcome;

    /// A device has a connection and can be sent to. Called for each connection, perhaps more than once; must neither block
    /// nor call back.
    fn connected(&self, device: &ClientId) {
        let _ = device;
    }
}

/// Result of [`Reserved::take`] for a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReservedOutcome {
    /// The message is the part's, or was not worth anything: acknowledged as if it had a receiver.
    Taken,
    /// The part cannot take the message now (0x97): the device may send it again.
    Refused(Shortage),
}

/// The parts, in the order of their topics.
pub(crate) struct ReservedParts {
    topics: ReservedTopics,
    parts: Box<[Arc<dyn Reserved>]>,
}

impl ReservedParts {
    /// `None` where there is no part.
    pub(super) fn new(parts: Vec<Arc<dyn Reserved>>) -> Option<Self> {
        let topics = ReservedTopics::new(parts.iter().map(|part| part.prefix()));
        (!parts.is_empty()).then(|| Self { topics, parts: parts.into() })
    }

    /// The topics of all parts.
    pub(super) fn topics(&self) -> &ReservedTopics {
        &self.topics
    }

    /// Tells the parts that a device has a connection.
    pub(crate) fn connected(&self, device: &ClientId) {
        for part in &self.parts {
            part.connected(device);
        }
    }

    /// Gives a device's message to the part that has its topic; `None` if none has.
    #[inline(always)]
    pub(crate) fn take(&self, message: &Message<'_>, broker: &Broker, turn: &mut Turn) -> Option<Published> {
        if message.origin.kind != OriginKind::Device || !self.topics.may_have(message.topic) {
            return None;
        }
        self.take_by_prefix(message, broker, turn)
    }

    #[cold]
    fn take_by_prefix(&self, message: &Message<'_>, broker: &Broker, turn: &mut Turn) -> Option<Published> {
        let (part, behind) = self.topics.find(message.topic)?;
        let client_id = message.origin.client_id.map_or("", ClientId::as_str);
        let Some(rest) = below_own_name(client_id, behind) else {
            // A PUBLISH is refused before; this is a will.
            gateway_core::counters::count(|c| c.reserved_foreign.add(1));
            return Some(Published::default());
        };
        Some(match self.parts[part].take(message, rest, broker, turn) {
            ReservedOutcome::Taken => Published { matched: 1, sent: 1, ..Published::default() },
            ReservedOutcome::Refused(shortage) => {
                Published { refused: Some(shortage), ..Published::default() }
            }
        })
    }
}
