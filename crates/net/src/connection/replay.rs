//! Messages that wait outside the session and come as it has room: retained messages, queues of shared groups.

use std::{
    collections::{BTreeMap, HashMap},
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use broker::{ReplayWork, RetainedCursor, Session, Target};
use gateway_core::{Bucket, Durability, Effort, Timestamp, clock};
use tokio::time::Sleep;

use super::{Connection, durable::HeldAnswer};
use crate::{
    local::{PacketWork, go_on_after_others},
    timers,
};
use device::Device;

/// The replays of one connection, one for a filter: their number is bounded by that of its subscriptions.
pub(crate) struct Replays {
    /// In the order of their beginning.
    cursors: BTreeMap<u64, RetainedCursor>,
    places: HashMap<Box<str>, u64>,
    /// Place of the next one.
    next: u64,
    /// Topics that may be looked at.
    pace: Bucket,
    /// Until more of them may.
    pause: Option<Pin<Box<Sleep>>>,
}

impl Replays {
    fn new(rate: u32, now: Timestamp) -> Self {
        Self {
            cursors: BTreeMap::new(),
            places: HashMap::new(),
            next: 0,
            pace: Bucket::new(f64::from(rate), now),
            pause: None,
        }
    }

    /// Adds one; what is left of an earlier one for the same filter goes.
    fn add(&mut self, cursor: RetainedCursor) {
        let before = self.places.insert(Box::from(cursor.filter()), self.next);
        if let Some(before) = before {
            self.cursors.remove(&before);
        }
        self.cursors.insert(self.next, cursor);
        self.next += 1;
    }

    fn remove(&mut self, filter: &str) {
        if let Some(place) = self.places.remove(filter) {
            self.cursors.remove(&place);
        }
    }

    fn remove_first(&mut self) {
        if let Some((_, cursor)) = self.cursors.pop_first() {
            self.places.remove(cursor.filter());
        }
    }

    /// Returns whether the state is not worth keeping: without it the client may look at a second's worth of topics at
    /// once.
    fn is_over(&mut self) -> bool {
        self.cursors.is_empty() && self.pace.is_nearly_full(clock::now())
    }

    /// Returns whether looking at topics must wait.
    fn poll_pause(&mut self, cx: &mut Context<'_>) -> bool {
        let waits = self.pause.as_mut().is_some_and(|pause| pause.as_mut().poll(cx).is_pending());
        if !waits {
            self.pause = None;
        }
        waits
    }

    /// Notes that this number of topics was looked at.
    fn note_scanned(&mut self, topics: usize, now: Timestamp) {
        let wait = self.pace.take(topics as f64, now);
        if wait > 0.0 {
            let wait = Duration::from_secs_f64(wait.min(60.0));
            self.pause = Some(Box::pin(timers::sleep(wait.max(Duration::from_millis(1)))));
        }
    }
}

impl Connection {
    /// Returns whether the session has room for messages from outside; if not, the task is woken when it has.
    fn has_room(device: &Device) -> bool {
        let mut slot = device.lock();
        let room = slot.out.has_room();
        if let Some(link) = &mut slot.link {
            link.notify_room = !room;
        }
        room
    }

    /// Takes more from the queues of shared groups as long as there is room.
    fn drain_groups(&mut self, work: &mut PacketWork) {
        let Some(rare) = self.rare.as_mut().filter(|rare| rare.group_queues) else { return };
        // The second look asks to be woken.
        for _ in 0..2 {
            if !Self::has_room(&self.device) {
                return;
            }
            work.now = clock::now();
            let session = Arc::clone(&self.device) as Arc<dyn Session>;
            rare.group_queues = self.device.broker().online(&session, work.now, &mut work.turn);
            if !rare.group_queues {
                self.rare.take_if(|rare| rare.is_unused());
                return;
            }
        }
    }

    /// Sends the retained messages of a new subscription, as [`Self::poll_replays`] comes to them.
    pub(crate) fn begin_replay(&mut self, cursor: RetainedCursor, now: Timestamp) {
        let rate = self.device.broker().limits().retained_scan_rate;
        self.rare().replays.get_or_insert_with(|| Box::new(Replays::new(rate, now))).add(cursor);
    }

    /// Does what was asked of the connection for subscriptions that are not its own doing.
    pub(crate) fn do_replay_work(&mut self) {
        for replay_work in self.device.take_all_replay_work(self.epoch) {
            match replay_work {
                ReplayWork::Replay(cursor) => self.begin_replay(cursor, clock::now()),
                ReplayWork::EndReplay(filter) => self.end_replay(&filter),
            }
        }
    }

    /// Sends no more of the retained messages for this filter.
    pub(crate) fn end_replay(&mut self, filter: &str) {
        if let Some(replays) = self.rare.as_mut().and_then(|rare| rare.replays.as_mut()) {
            replays.remove(filter);
        }
    }

    /// Delivers retained messages of new subscriptions as long as there is room. Spends half of the poll's account: what
    /// the client sends meanwhile, above all its acknowledgements, must not wait for the end of a long search.
    pub(crate) fn poll_replays(&mut self, work: &mut PacketWork, cx: &mut Context<'_>) {
        self.drain_groups(work);
        let Some(rare) = &mut self.rare else { return };
        // After the SUBACK, which may wait for the disk, or for the rest of its SUBSCRIBE.
        if rare.unfinished.is_some() || rare.held.iter().any(HeldAnswer::is_whole) {
            return;
        }
        let Some(replays) = &mut rare.replays else { return };
        if replays.poll_pause(cx) {
            return;
        }
        let now = clock::now();
        work.now = now;
        let device = &self.device;
        let effort = &mut work.turn.effort;
        while let Some(mut first) = replays.cursors.first_entry() {
            if effort.spent() >= u64::from(Effort::TURN / 2) {
                go_on_after_others(cx);
                break;
            }
            if !Self::has_room(device) {
                break;
            }
            let most = effort.affords(Effort::TOPIC);
            let mut left = most;
            let polled = first.get_mut().poll_next(device.broker(), now, &mut left, cx);
            effort.spend(Effort::NODE);
            effort.spend_each(Effort::TOPIC, most - left);
            let Poll::Ready(next) = polled else {
                replays.note_scanned(most - left, now);
                break;
            };
            if let Some(Some(message)) = &next {
                let mut message = message.borrow_at(now);
                // Nobody waits for a replay: it was acknowledged when it was published.
                message.durability = Durability::Interval;
                // The message's time with the gateway counts against its expiry [MQTT-3.3.2-6], not against the age of
                // waiting messages.
                message.received = now;
                let delivered = device.deliver(&message, first.get().offer());
                effort.spend(Effort::DELIVERY);
                if delivered.flush {
                    work.turn.dirty.push(Arc::clone(device) as Arc<dyn Target>);
                }
            }
            if next.is_none() {
                replays.remove_first();
            }
            replays.note_scanned(most - left, now);
            if replays.poll_pause(cx) {
                break;
            }
        }
        if replays.is_over() {
            rare.replays = None;
            self.rare.take_if(|rare| rare.is_unused());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_s_worth_of_topics_is_free_and_more_must_wait() {
        let timers = timers::TimerRuntime::start().expect("start");
        timers.serve_this_thread();
        let mut replays = Replays::new(1000, Timestamp(0));
        let mut cx = Context::from_waker(std::task::Waker::noop());
        replays.note_scanned(1000, Timestamp(0));
        assert!(!replays.poll_pause(&mut cx));
        replays.note_scanned(60_000, Timestamp(0));
        assert!(replays.poll_pause(&mut cx));
        let mut unbounded = Replays::new(0, Timestamp(0));
        unbounded.note_scanned(1_000_000, Timestamp(0));
        assert!(!unbounded.poll_pause(&mut cx));
    }
}
