//! Drops gathered for `Events.WatchEvents`: one event a second for each session and reason.

use std::collections::HashMap;

use ahash::RandomState;
use gateway_core::{ClientId, DropReason, Timestamp};
use parking_lot::Mutex;

use super::{Event, EventKind};
use crate::counters::count;

/// (session, reason) pairs remembered between two ticks; drops beyond them are counted but cause no event.
const MAX_PAIRS: usize = 4096;

/// Messages dropped since the last tick, counted by client and reason.
#[derive(Default)]
pub(super) struct Drops {
    counts: Mutex<HashMap<(ClientId, DropReason), u64, RandomState>>,
}

impl Drops {
    /// Adds dropped messages.
    pub(super) fn note(&self, client_id: &ClientId, reason: DropReason, messages: u64) {
        let mut counts = self.counts.lock();
        let full = counts.len() >= MAX_PAIRS;
        match counts.get_mut(&(client_id.clone(), reason)) {
            Some(count) => *count += messages,
            None if full => count(|c| c.events_untold.add(messages)),
            None => {
                counts.insert((client_id.clone(), reason), messages);
            }
        }
    }

    /// Takes the events gathered since the last tick.
    pub(super) fn take(&self, at: Timestamp) -> impl Iterator<Item = Event> + use<> {
        let counts = std::mem::take(&mut *self.counts.lock());
        counts.into_iter().map(move |((client_id, reason), count)| Event {
            at,
            client_id,
            kind: EventKind::Dropped { reason, count },
        })
    }
}
