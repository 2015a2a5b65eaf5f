//! Drops: counted by reason, and gathered for `Events.WatchEvents`: one event a second for each session and reason.

use std::{collections::HashMap, sync::Arc};

use ahash::RandomState;
use gateway_core::{ClientId, DropReason, Receipt, Timestamp, metrics::count};
use parking_lot::Mutex;

use super::{Broker, Event, EventKind};

/// (session, reason) pairs remembered between two ticks; drops beyond them are counted but cause no event.
const MAX_PAIRS: usize = 4096;

/// Messages dropped since the last tick, counted by client and reason.
#[derive(Default)]
pub(super) struct Drops {
    counts: Mutex<HashMap<(ClientId, DropReason), u64, RandomState>>,
}

/// Drops.
impl Broker {
    /// Notes messages dropped for a session, for the next tick's event. Does nothing unless somebody watches. A target
    /// may call it: its lock is short and covers nothing else.
    pub fn note_dropped(&self, client_id: &ClientId, reason: DropReason, messages: u64) {
        if messages == 0 || !self.is_watched() {
            return;
        }
        let mut counts = self.inner.drops.counts.lock();
        let full = counts.len() >= MAX_PAIRS;
        match counts.get_mut(&(client_id.clone(), reason)) {
            Some(count) => *count += messages,
            None if full => count(|c| c.events_untold.add(messages)),
            None => {
                counts.insert((client_id.clone(), reason), messages);
            }
        }
    }

    /// Sends the events gathered since the last tick.
    pub(super) fn tell_drops(&self, now: Timestamp) {
        let counts = std::mem::take(&mut *self.inner.drops.counts.lock());
        for ((client_id, reason), count) in counts {
            self.emit(Event { at: now, client_id, kind: EventKind::Dropped { reason, count } });
        }
    }
}

/// Counts a drop by the broker itself, and tells the receipt of a message that had been accepted.
pub(super) fn drop_message(receipt: &Option<Arc<Receipt>>, reason: DropReason) {
    count_drop(reason);
    if let Some(receipt) = receipt {
        receipt.update(|state| {
            state.dropped += 1;
            state.reason = Some(reason);
        });
    }
}

/// Counts a drop by its reason.
pub(super) fn count_drop(reason: DropReason) {
    count(|c| match reason {
        DropReason::Offline => c.dropped_offline.add(1),
        DropReason::QueueFull => c.dropped_queue_full.add(1),
        DropReason::Memory => c.dropped_memory.add(1),
        DropReason::Expired => c.dropped_expired.add(1),
        DropReason::TooLarge => c.dropped_too_large.add(1),
        DropReason::ConnectionLost => c.dropped_connection_lost.add(1),
        DropReason::SessionEnded => c.dropped_session_ended.add(1),
        DropReason::NotAuthorized => c.dropped_not_authorized.add(1),
        DropReason::Purged => c.dropped_purged.add(1),
    });
}
