//! Events as something that consumer groups get: taken from those that watchers get, as long as a group wants some.

use std::sync::Arc;

use gateway_core::{GroupId, LogRecord, Message, OriginKind, Partition, SharedMessage};
use parking_lot::Mutex;
use tokio::sync::{
    Notify,
    broadcast::{Receiver, error::RecvError},
};

use super::{GroupFilter, GroupIndex, LogTarget};
use crate::{Event, EventKind, counters::count, events::Events};

/// Prefix of the topics under which events are appended: the rest of the topic is the kind.
const TOPIC: &str = "$events/";

/// Kinds of events, as a set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EventKinds(u16);

impl EventKinds {
    /// The names of all kinds, in the order of [`EventKind`].
    const NAMES: [&str; 8] = [
        "connected",
        "disconnected",
        "taken_over",
        "subscribed",
        "unsubscribed",
        "session_ended",
        "dropped",
        "auth_failed",
    ];

    /// With one more kind, by its name; unchanged if there is none of that name.
    #[must_use]
    pub fn with(self, name: &str) -> Self {
        let bit = Self::NAMES.iter().position(|known| *known == name);
        Self(self.0 | bit.map_or(0, |bit| 1 << bit))
    }

    /// Returns whether the set is empty.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    fn has(self, name: &str) -> bool {
        !self.is_empty() && self.with(name) == self
    }
}

impl EventKind {
    /// Its name.
    pub fn name(&self) -> &'static str {
        let place = match self {
            Self::Connected { .. } => 0,
            Self::Disconnected { .. } => 1,
            Self::TakenOver => 2,
            Self::Subscribed { .. } => 3,
            Self::Unsubscribed { .. } => 4,
            Self::SessionEnded { .. } => 5,
            Self::Dropped { .. } => 6,
            Self::AuthFailed => 7,
        };
        EventKinds::NAMES[place]
    }
}

/// Returns whether a record is an event, whose encoded form is the payload; otherwise it is a message.
pub fn is_event(record: &LogRecord) -> bool {
    is_event_message(&record.message)
}

/// As [`is_event`], of a message that was in a record.
pub fn is_event_message(message: &SharedMessage) -> bool {
    message.kind == OriginKind::Server && message.topic.starts_with(TOPIC)
}

impl GroupFilter {
    /// Returns whether the group gets this message because it is an event.
    pub(super) fn matches_event(&self, message: &Message<'_>) -> bool {
        message.origin.kind == OriginKind::Server
            && message.topic.strip_prefix(TOPIC).is_some_and(|kind| self.events.has(kind))
            && self.selector.wants_device(message.origin.client_id.map(|id| id.as_str()))
    }
}

/// Queue in which events wait to be appended, once a group wants some.
#[derive(Default)]
pub(super) struct Feed {
    state: Mutex<FeedState>,
    begun: Notify,
}

#[derive(Default)]
struct FeedState {
    /// Not yet taken.
    receiver: Option<Receiver<Event>>,
    /// True once the receiver is taken and read.
    is_read: bool,
}

impl LogTarget {
    /// Groups that want events have come or gone.
    pub(super) fn follow_events(&self, events: &Events) {
        let wanted = self.wants_events();
        let mut state = self.feed.state.lock();
        if wanted && state.receiver.is_none() && !state.is_read {
            state.receiver = Some(events.subscribe());
            self.feed.begun.notify_one();
        } else if !wanted {
            state.receiver = None;
        }
    }

    fn wants_events(&self) -> bool {
        self.table.read().groups.values().any(|kept| !kept.filter.events.is_empty())
    }
}

impl GroupIndex {
    /// The groups that want an event.
    fn wanting_event(&self, event: &Event) -> Vec<GroupId> {
        let wants = |filter: &GroupFilter| {
            filter.events.has(event.kind.name())
                && filter.selector.wants_device(Some(event.client_id.as_str()))
        };
        self.groups.iter().filter(|(_, kept)| wants(&kept.filter)).map(|(id, _)| *id).collect()
    }
}

impl LogTarget {
    /// Appends events for the groups that want them, as `encode` writes them; for ever. Without a group that wants events none
    /// is made. An event is not waited for: what the log does not take, or comes faster than it is appended, is counted.
    pub(crate) async fn append_events(self: Arc<Self>, encode: impl Fn(Event) -> Vec<u8> + Send) {
        loop {
            self.feed.begun.notified().await;
            let receiver = {
                let mut state = self.feed.state.lock();
                state.is_read = state.receiver.is_some();
                state.receiver.take()
            };
            let Some(mut receiver) = receiver else { continue };
            loop {
                match receiver.recv().await {
                    Ok(event) => self.append_event(event, &encode),
                    Err(RecvError::Lagged(missed)) => count(|c| c.groups_dropped_events.add(missed)),
                    Err(RecvError::Closed) => return,
                }
                if !self.wants_events() {
                    let mut state = self.feed.state.lock();
                    // One may have come meanwhile, and found that this one reads.
                    if !self.wants_events() {
                        state.is_read = false;
                        break;
                    }
                }
            }
        }
    }
}

impl LogTarget {
    fn append_event(&self, event: Event, encode: &impl Fn(Event) -> Vec<u8>) {
        // Until it is submitted, as for messages.
        let table = self.table.read();
        let groups = table.wanting_event(&event);
        if groups.is_empty() {
            return;
        }
        let topic = format!("{TOPIC}{}", event.kind.name());
        let (at, client_id) = (event.at, event.client_id.clone());
        let payload = encode(event);
        let mut message = Message::new(&topic, &payload, at, gateway_core::Origin::SERVER);
        message.origin.client_id = Some(&client_id);
        let message: &Arc<SharedMessage> = message.share();
        let partition = Partition::of(Some(client_id.as_str()), &topic);
        match self.log.append(partition, &self.set(&groups), message, None) {
            Ok(()) => count(|c| c.groups_appended.add(1)),
            Err(store::LogFull) => count(|c| c.groups_dropped_events.add(1)),
        }
    }
}
