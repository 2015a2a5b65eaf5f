//! Events about devices, for their watchers.

mod drops;
mod recent;

use std::sync::Arc;

use gateway_core::{ClientId, DropReason, QoS, Timestamp};
use tokio::sync::broadcast;

use crate::{Account, ConnectionInfo, SessionCore};

use drops::Drops;
use recent::RecentEvents;

pub use recent::{EventOrGap, EventPlace, EventReader};

/// Events that a slow receiver may fall behind before it loses the oldest, and that are kept for those that resume.
const EVENT_CAPACITY: usize = 4096;

/// Something that happened, for `Events.WatchEvents` and logs.
#[derive(Debug, Clone)]
pub struct Event {
    /// Time of the event.
    pub at: Timestamp,
    /// The device concerned.
    pub client_id: ClientId,
    /// Kind of the event, with its details.
    pub kind: EventKind,
}

/// Kinds of events.
#[derive(Debug, Clone)]
pub enum EventKind {
    /// A connection was accepted.
    Connected {
        /// Its details.
        info: Box<ConnectionInfo>,
        /// True if an earlier session was resumed.
        session_present: bool,
    },
    /// A connection ended.
    Disconnected {
        /// Why, in a few words of a fixed set.
        reason: &'static str,
    },
    /// Another connection took the session over.
    TakenOver,
    /// A subscription was made.
    Subscribed {
        /// Full filter.
        filter: String,
        /// Granted QoS.
        qos: QoS,
    },
    /// A subscription was removed.
    Unsubscribed {
        /// Full filter.
        filter: String,
    },
    /// The session is over.
    SessionEnded {
        /// Why: `expired`, `clean_start`, `administrative`.
        reason: &'static str,
    },
    /// Messages were dropped for this session when they were routed, or lost unsent with its connection: one event a
    /// second for each reason. What expires in a queue is only counted.
    Dropped {
        /// Why.
        reason: DropReason,
        /// Number of messages since the last event.
        count: u64,
    },
    /// Authentication failed.
    AuthFailed,
}

/// Watchers of events, and the last events for those that come again.
pub(crate) struct Events {
    sender: broadcast::Sender<Event>,
    recent: Arc<RecentEvents>,
    drops: Drops,
}

impl Events {
    /// No events so far; those that are kept are charged to `account`.
    pub(crate) fn new(account: &Arc<Account>) -> Self {
        Self {
            sender: broadcast::Sender::new(EVENT_CAPACITY),
            recent: RecentEvents::new(account),
            drops: Drops::default(),
        }
    }

    /// Events from now on; a slow receiver loses the oldest and is told.
    pub(crate) fn subscribe(&self) -> broadcast::Receiver<Event> {
        self.sender.subscribe()
    }

    /// A reader from `from` on, or from now on; `None` if that place is not known.
    pub(crate) fn watch(&self, from: Option<EventPlace>) -> Option<EventReader> {
        self.recent.open(from)
    }

    /// Returns whether anybody receives events, or may ask for them later.
    fn is_watched(&self) -> bool {
        self.recent.is_kept() || self.sender.receiver_count() > 0
    }

    /// Sends an event to watchers.
    pub(crate) fn emit(&self, event: Event) {
        if self.recent.is_kept() {
            self.recent.push(event.clone());
        }
        // An error means that nobody watches.
        let _ = self.sender.send(event);
    }

    /// Makes and sends an event only if somebody watches.
    pub(crate) fn emit_with(&self, at: Timestamp, core: &SessionCore, kind: impl FnOnce() -> EventKind) {
        if self.is_watched() {
            self.emit(Event { at, client_id: core.client_id().clone(), kind: kind() });
        }
    }

    /// Notes messages dropped for a session, for the next tick's event. Does nothing unless somebody watches.
    pub(crate) fn note_dropped(&self, client_id: &ClientId, reason: DropReason, messages: u64) {
        if messages > 0 && self.is_watched() {
            self.drops.note(client_id, reason, messages);
        }
    }

    /// Sends the drops gathered since the last tick, and forgets events that nobody has asked for in a while.
    pub(crate) fn tick(&self, now: Timestamp) {
        self.drops.take(now).for_each(|event| self.emit(event));
        self.recent.tick(now);
    }

    #[cfg(test)]
    pub(crate) fn receiver_count(&self) -> usize {
        self.sender.receiver_count()
    }
}
