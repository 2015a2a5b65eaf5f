//! Events about devices, for their watchers.

mod recent;

pub use recent::{EventOrGap, EventPlace, EventReader};

pub(super) use recent::RecentEvents;

use gateway_core::{ClientId, DropReason, QoS, Timestamp};
use tokio::sync::broadcast;

use super::{Broker, ConnectionInfo, SessionCore};

/// Events that a slow receiver may fall behind before it loses the oldest, and that are kept for those that resume.
pub(super) const EVENT_CAPACITY: usize = 4096;

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

/// Events.
impl Broker {
    /// Events from now on; a slow receiver loses the oldest and is told (broadcast lag).
    pub fn events(&self) -> broadcast::Receiver<Event> {
        self.inner.events.subscribe()
    }

    /// Events from now on, or from `from` on, with as many of the last as are kept. `None` if nobody remembers that place: it
    /// is of another process, or nobody has watched for some minutes since.
    pub fn watch_events(&self, from: Option<EventPlace>) -> Option<EventReader> {
        self.inner.recent.open(from)
    }

    /// Returns whether anybody receives events, or may ask for them later.
    pub(super) fn is_watched(&self) -> bool {
        self.inner.recent.is_kept() || self.inner.events.receiver_count() > 0
    }

    /// Sends an event to watchers.
    pub fn emit(&self, event: Event) {
        if self.inner.recent.is_kept() {
            self.inner.recent.push(event.clone());
        }
        // An error means that nobody watches.
        let _ = self.inner.events.send(event);
    }

    /// Makes and sends an event only if somebody watches.
    pub(super) fn emit_with(&self, at: Timestamp, core: &SessionCore, kind: impl FnOnce() -> EventKind) {
        if self.is_watched() {
            self.emit(Event { at, client_id: core.client_id().clone(), kind: kind() });
        }
    }
}
