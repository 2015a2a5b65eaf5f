//! The last events, for watchers that are slow or come again.
//!
//! All watchers read from one ring, each at its own place, so that a place is the same thing to all of them and a watcher that
//! was cut off goes on where it was. Nothing is kept before the first watcher comes, nor when there has been none for some
//! minutes: then a place that was told is no longer known.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use gateway_core::{Timestamp, clock};
use parking_lot::Mutex;
use tokio::sync::watch;

use super::{EVENT_CAPACITY, Event, EventKind};
use crate::{Account, Charge, MemoryKind};

/// Most bytes of events, besides the last one.
const MOST_BYTES: usize = 4 << 20;
/// Milliseconds for which events are kept although nobody watches.
const KEPT: u64 = 5 * 60_000;

/// The place after an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventPlace {
    /// Since when events are kept without a break; never the same in two processes, as time goes on.
    pub run: u64,
    /// Number of the events before this place.
    pub number: u64,
}

/// The ring.
pub(super) struct RecentEvents {
    /// Read without the lock by those that have an event.
    kept: AtomicBool,
    state: Mutex<EventRing>,
    more: watch::Sender<()>,
}

struct EventRing {
    events: VecDeque<Event>,
    run: u64,
    /// The number of the next event.
    next: u64,
    bytes: usize,
    charge: Charge,
    readers: usize,
    /// Since when there is no reader.
    left: Timestamp,
}

impl EventRing {
    /// The number of the first event that is kept.
    fn first(&self) -> u64 {
        self.next - self.events.len() as u64
    }

    fn drop_oldest(&mut self) {
        if let Some(event) = self.events.pop_front() {
            self.bytes -= cost(&event);
        }
    }
}

/// Bytes of an event.
fn cost(event: &Event) -> usize {
    let more = match &event.kind {
        EventKind::Connected { info, .. } => {
            size_of_val(&**info) + info.username.as_ref().map_or(0, |name| name.len())
        }
        EventKind::Subscribed { filter, .. } | EventKind::Unsubscribed { filter } => filter.len(),
        _ => 0,
    };
    size_of::<Event>() + event.client_id.as_str().len() + more
}

impl RecentEvents {
    pub(super) fn new(account: &Arc<Account>) -> Arc<Self> {
        let state = EventRing {
            events: VecDeque::new(),
            run: 0,
            next: 0,
            bytes: 0,
            charge: Charge::new(account, MemoryKind::GrpcStreams),
            readers: 0,
            left: Timestamp(0),
        };
        Arc::new(Self {
            kept: AtomicBool::new(false),
            state: Mutex::new(state),
            more: watch::Sender::new(()),
        })
    }

    /// Returns whether events are kept.
    pub(super) fn is_kept(&self) -> bool {
        self.kept.load(Relaxed)
    }

    /// Adds an event, and lets the oldest go for it.
    pub(super) fn push(&self, event: Event) {
        {
            let mut state = self.state.lock();
            let state = &mut *state;
            if state.run == 0 {
                return;
            }
            state.bytes += cost(&event);
            state.events.push_back(event);
            state.next += 1;
            while state.events.len() > EVENT_CAPACITY || state.bytes > MOST_BYTES {
                state.drop_oldest();
            }
            while !state.charge.set(state.bytes) && !state.events.is_empty() {
                state.drop_oldest();
            }
        }
        self.more.send_replace(());
    }

    /// A reader from `from` on, or from now on.
    pub(super) fn open(self: &Arc<Self>, from: Option<EventPlace>) -> Option<EventReader> {
        let mut state = self.state.lock();
        if let Some(EventPlace { run, number }) = from
            && (run == 0 || run != state.run || number > state.next)
        {
            return None;
        }
        if !self.kept.swap(true, Relaxed) {
            state.run = clock::now().0.max(1);
        }
        state.readers += 1;
        let number = from.map_or(state.next, |place| place.number);
        Some(EventReader { recent: Arc::clone(self), number, run: state.run, more: self.more.subscribe() })
    }

    /// Stops keeping events if nobody has read for long. Call once a second.
    pub(super) fn tick(&self, now: Timestamp) {
        if !self.is_kept() {
            return;
        }
        let mut state = self.state.lock();
        if state.readers > 0 || now < state.left.plus_millis(KEPT) {
            return;
        }
        self.kept.store(false, Relaxed);
        state.run = 0;
        state.events = VecDeque::new();
        state.bytes = 0;
        state.charge.set(0);
    }
}

/// Item that a reader receives.
#[derive(Debug, Clone)]
pub enum EventOrGap {
    /// An event.
    Event(Event),
    /// So many events went before the reader came to them.
    Missed(u64),
}

/// Reads events from a place on. Slow ones lose the oldest.
pub struct EventReader {
    recent: Arc<RecentEvents>,
    run: u64,
    number: u64,
    more: watch::Receiver<()>,
}

impl EventReader {
    /// The place after what was read.
    pub fn place(&self) -> EventPlace {
        EventPlace { run: self.run, number: self.number }
    }

    /// Waits until there is something to be read. Cancel safe.
    pub async fn ready(&mut self) {
        loop {
            self.more.borrow_and_update();
            if self.recent.state.lock().next > self.number {
                return;
            }
            if self.more.changed().await.is_err() {
                // The sender is in what this holds.
                return std::future::pending().await;
            }
        }
    }

    /// Reads what is next, if there is something.
    pub fn read(&mut self) -> Option<EventOrGap> {
        let state = self.recent.state.lock();
        let missed = state.first().saturating_sub(self.number);
        if missed > 0 {
            self.number += missed;
            return Some(EventOrGap::Missed(missed));
        }
        let index = usize::try_from(self.number - state.first()).unwrap_or(usize::MAX);
        let event = state.events.get(index)?.clone();
        self.number += 1;
        Some(EventOrGap::Event(event))
    }
}

impl Drop for EventReader {
    fn drop(&mut self) {
        let mut state = self.recent.state.lock();
        state.readers -= 1;
        state.left = clock::now();
    }
}

#[cfg(test)]
mod tests {
    use gateway_core::ClientId;

    use super::*;

    fn event(number: u64, bytes: usize) -> Event {
        let kind = EventKind::Unsubscribed { filter: "x".repeat(bytes) };
        Event { at: Timestamp(number), client_id: ClientId::new("d"), kind }
    }

    /// The numbers of the next events, at most `most`.
    fn numbers(reader: &mut EventReader, most: usize) -> Vec<u64> {
        let mut number = || match reader.read()? {
            EventOrGap::Event(event) => Some(event.at.0),
            EventOrGap::Missed(count) => panic!("{count} missed"),
        };
        (0..most).map_while(|_| number()).collect()
    }

    #[test]
    fn who_comes_again_gets_what_came_meanwhile_and_is_told_what_is_gone() {
        let recent = RecentEvents::new(&Arc::new(Account::new(64 << 20)));
        let mut reader = recent.open(None).expect("a reader");
        (0..10).for_each(|number| recent.push(event(number, 0)));
        assert_eq!(numbers(&mut reader, 4), [0, 1, 2, 3]);
        let place = reader.place();
        drop(reader);
        recent.push(event(10, 0));
        let mut again = recent.open(Some(place)).expect("the place");
        assert_eq!(numbers(&mut again, 100), [4, 5, 6, 7, 8, 9, 10]);
        (0..EVENT_CAPACITY as u64 + 3).for_each(|number| recent.push(event(11 + number, 0)));
        assert!(matches!(again.read(), Some(EventOrGap::Missed(3))));
        assert_eq!(numbers(&mut again, 2), [14, 15]);
        assert!(recent.open(Some(EventPlace { number: 1 << 40, ..place })).is_none(), "not there yet");
        assert!(recent.open(Some(EventPlace { run: place.run + 1, ..place })).is_none(), "another process");
    }

    #[test]
    fn events_are_bounded_charged_and_gone_when_nobody_watches_for_long() {
        let account = Arc::new(Account::new(64 << 20));
        let recent = RecentEvents::new(&account);
        let reader = recent.open(None).expect("a reader");
        (0..1_000).for_each(|number| recent.push(event(number, 64 << 10)));
        let held = account.held(MemoryKind::GrpcStreams);
        assert!(held > MOST_BYTES / 2 && held <= MOST_BYTES, "{held}");
        let place = reader.place();
        drop(reader);
        let left = recent.state.lock().left;
        recent.tick(left.plus_millis(KEPT - 1));
        assert!(recent.is_kept());
        recent.tick(left.plus_millis(KEPT));
        assert!(!recent.is_kept());
        assert_eq!(account.held(MemoryKind::GrpcStreams), 0);
        recent.push(event(0, 1));
        assert!(recent.open(Some(place)).is_none(), "what came since is not known");
        assert!(recent.open(None).is_some());
        assert!(recent.open(Some(EventPlace { run: 0, number: 0 })).is_none());
    }

    /// A gateway whose memory is used up keeps no events, and says so.
    #[test]
    fn a_reader_is_told_of_events_for_which_there_was_no_memory() {
        let recent = RecentEvents::new(&Arc::new(Account::new(0)));
        let mut reader = recent.open(None).expect("a reader");
        recent.push(event(0, 1 << 20));
        assert!(matches!(reader.read(), Some(EventOrGap::Missed(1))));
    }
}
