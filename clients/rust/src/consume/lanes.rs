//! Lanes of messages that run, wait and are done: one for each device, and for each topic of backends, so that their
//! messages are handled in their order.
//!
//! Knows no stream and no task. Bounded by what the gateway may have outstanding with a member, and by [`REMEMBERED`].

use std::{
    collections::{HashMap, HashSet, VecDeque},
    time::Duration,
};

use gateway_api::gateway::v1::{ConsumedMessage, DeliveryRange, consumed_message::Content};
use tokio::time::Instant;

/// Time for which a lane waits for a message that was given back. The message does not come at all if it became a dead
/// letter.
const BLOCKED: Duration = Duration::from_secs(5);

/// Most remembered messages that were done and whose acknowledgement was lost with a stream, and most remembered failures.
const REMEMBERED: usize = 10_000;

/// Time for which they are remembered: a message that comes later was asked for, and is handled again.
const REMEMBERED_FOR: Duration = Duration::from_secs(120);

/// Longest that work on one message may take before its deadline is no longer moved: a handler that hangs does not keep its message
/// from everybody for ever.
const LONGEST_WORK: Duration = Duration::from_secs(3600);

/// Report to the gateway about a handler that has ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Finished {
    /// Nothing, or it is among the acknowledgements.
    Settled,
    /// This delivery is to be given back.
    GiveBack(u64),
    /// The message is to be given back once its delivery is known: [`Lanes::resume`] says.
    Later(String),
}

#[derive(Default)]
pub(super) struct Lanes {
    lanes: HashMap<String, Lane>,
    /// Lanes of which nothing runs and something waits.
    ready: VecDeque<String>,
    /// Lanes that are blocked, or were, and until when; the first ends first.
    blocked: VecDeque<(Instant, String)>,
    running: HashMap<u64, Running>,
    names: u64,
    /// Time from a delivery, and from each move of its deadline, to the next move.
    extend_every: Duration,
    /// Done and not said yet, by delivery id.
    acknowledgements: VecDeque<u64>,
    /// Done, said perhaps, and not confirmed: delivery id and message id.
    unconfirmed: HashMap<u64, String>,
    done: Remembered,
    /// Messages that a stream begins with which is not there yet.
    named: Vec<String>,
}

#[derive(Default)]
struct Lane {
    waiting: VecDeque<LaneMessage>,
    busy: bool,
    /// The message that was given back last, until it comes again, and how long that is waited for: what the gateway had sent
    /// after it is void, and may be on its way still.
    blocked: Option<(String, Instant)>,
}

impl Lane {
    fn may_start(&self) -> bool {
        !self.busy && self.blocked.is_none()
    }

    fn is_over(&self) -> bool {
        self.may_start() && self.waiting.is_empty()
    }
}

/// Result of a handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HandlerEnd {
    /// The message is handled.
    Done,
    /// The message is given back, and comes again.
    Back,
    /// The message is given up: it does not come again.
    Up,
}

struct LaneMessage {
    message: ConsumedMessage,
    held: HeldSince,
}

struct Running {
    lane: String,
    message_id: String,
    /// Its delivery on the stream of now; none once that is void.
    delivery_id: Option<u64>,
    held: HeldSince,
}

/// Since when a message is here, and when its deadline is to be moved next.
#[derive(Clone, Copy)]
struct HeldSince {
    since: Instant,
    extend_at: Instant,
}

impl HeldSince {
    fn is_due(&self, now: Instant) -> bool {
        self.extend_at <= now && now - self.since < LONGEST_WORK
    }
}

#[derive(Default)]
struct Remembered {
    ids: HashSet<String>,
    /// Ids in the order in which they came; may name some that are remembered no more.
    order: VecDeque<(Instant, String)>,
}

impl Remembered {
    fn add(&mut self, id: String, now: Instant) {
        if self.ids.insert(id.clone()) {
            self.order.push_back((now, id));
        }
        self.forget(now);
    }

    fn forget(&mut self, now: Instant) {
        let is_over = |len: usize, since: Instant| len > REMEMBERED || now - since > REMEMBERED_FOR;
        while let Some((since, _)) = self.order.front()
            && is_over(self.order.len(), *since)
            && let Some((_, id)) = self.order.pop_front()
        {
            self.ids.remove(&id);
        }
    }
}

impl Lanes {
    /// From now on.
    pub(super) fn set_extend_every(&mut self, time: Duration) {
        self.extend_every = time;
    }

    /// Messages that the next stream begins with, at most `most`: those that run, and those that are done and not confirmed.
    pub(super) fn name(&mut self, most: usize) -> Vec<String> {
        let running = self.running.values().map(|running| &running.message_id);
        self.named = running.chain(&self.done.ids).take(most).cloned().collect();
        self.named.clone()
    }

    /// The stream is there: what it began with has the delivery ids 1, 2, 3... but for `void` ones, unless the gateway knows
    /// of a different number of them. Returns deliveries whose handler has not, or no longer, the message: they are to be given
    /// back.
    pub(super) fn resume(&mut self, known: u32, void: &[DeliveryRange], now: Instant) -> Vec<(u64, String)> {
        let named = std::mem::take(&mut self.named);
        if known as usize != named.len() {
            return Vec::new();
        }
        let extend_every = self.extend_every;
        let mut running: HashMap<String, &mut Running> =
            self.running.values_mut().map(|running| (running.message_id.clone(), running)).collect();
        let mut left = Vec::new();
        for (id, message_id) in (1..).zip(named) {
            if void.iter().any(|range| (range.first..=range.last).contains(&id)) {
                continue;
            }
            if let Some(running) = running.get_mut(&message_id) {
                running.delivery_id = Some(id);
                running.held.extend_at = now + extend_every;
            } else if self.done.ids.contains(&message_id) {
                self.acknowledgements.push_back(id);
                self.unconfirmed.insert(id, message_id);
            } else {
                left.push((id, message_id));
            }
        }
        left
    }

    /// A message has come.
    pub(super) fn deliver(&mut self, message: ConsumedMessage, now: Instant) {
        self.done.forget(now);
        if self.done.ids.contains(&message.message_id) {
            self.acknowledgements.push_back(message.delivery_id);
            self.unconfirmed.insert(message.delivery_id, message.message_id);
            return;
        }
        let key = match &message.content {
            // As the gateway orders them: what comes from no device, by topic. No client id has a NUL.
            Some(Content::Message(message)) if message.device_id.is_empty() => format!("\0{}", message.topic),
            Some(Content::Message(message)) => message.device_id.clone(),
            Some(Content::Event(event)) => event.device_id.clone(),
            None => String::new(),
        };
        // The hour of a message whose handler still runs, on a delivery that is void, does not begin again.
        let since = self.running.values().find(|running| running.message_id == message.message_id);
        let since = since.map_or(now, |running| running.held.since);
        let waiting = LaneMessage { held: HeldSince { since, extend_at: now + self.extend_every }, message };
        let message = &waiting.message;
        let lane = self.lanes.entry(key.clone()).or_default();
        let is_back = lane.blocked.take_if(|(id, _)| *id == message.message_id).is_some();
        let is_next = is_back || lane.waiting.is_empty();
        if is_back {
            lane.waiting.push_front(waiting);
        } else {
            lane.waiting.push_back(waiting);
        }
        if is_next && lane.may_start() {
            self.ready.push_back(key);
        }
    }

    /// The next message to handle, with the name that [`Self::finish`] takes.
    pub(super) fn start(&mut self) -> Option<(u64, ConsumedMessage)> {
        loop {
            let key = self.ready.pop_front()?;
            let Some(lane) = self.lanes.get_mut(&key).filter(|lane| lane.may_start()) else { continue };
            let Some(LaneMessage { message, held }) = lane.waiting.pop_front() else {
                self.lanes.remove(&key);
                continue;
            };
            if self.done.ids.contains(&message.message_id) {
                // Done by a handler of an earlier stream while this waited.
                self.acknowledgements.push_back(message.delivery_id);
                self.unconfirmed.insert(message.delivery_id, message.message_id);
                self.ready.push_front(key);
                continue;
            }
            lane.busy = true;
            self.names += 1;
            let (delivery_id, message_id) = (Some(message.delivery_id), message.message_id.clone());
            self.running.insert(self.names, Running { lane: key, message_id, delivery_id, held });
            return Some((self.names, message));
        }
    }

    /// A handler has ended.
    pub(super) fn finish(&mut self, name: u64, ended: HandlerEnd, now: Instant) -> Finished {
        let Some(running) = self.running.remove(&name) else { return Finished::Settled };
        let Running { lane: key, message_id, delivery_id, .. } = running;
        if let Some(lane) = self.lanes.get_mut(&key) {
            lane.busy = false;
            let comes_again = delivery_id.is_some() || self.named.contains(&message_id);
            if ended == HandlerEnd::Back && comes_again {
                lane.blocked = Some((message_id.clone(), now + BLOCKED));
                self.blocked.push_back((now + BLOCKED, key.clone()));
            }
            if lane.is_over() {
                self.lanes.remove(&key);
            } else if lane.may_start() {
                self.ready.push_back(key);
            }
        }
        if self.blocked.len() > REMEMBERED
            && let Some(due) = self.blocked_until()
        {
            self.unblock(due);
        }
        match (delivery_id, ended == HandlerEnd::Done) {
            (Some(id), true) => {
                self.acknowledgements.push_back(id);
                self.unconfirmed.insert(id, message_id);
                Finished::Settled
            }
            (Some(id), false) => Finished::GiveBack(id),
            (None, false) if self.named.contains(&message_id) => Finished::Later(message_id),
            (None, true) => {
                self.done.add(message_id, now);
                Finished::Settled
            }
            (None, false) => Finished::Settled,
        }
    }

    /// Returns when to call [`Self::unblock`] next, if at all.
    pub(super) fn blocked_until(&self) -> Option<Instant> {
        self.blocked.front().map(|(until, _)| *until)
    }

    /// Lets lanes go on that have waited long enough for a message to come again.
    pub(super) fn unblock(&mut self, now: Instant) {
        while let Some((due, key)) = self.blocked.pop_front_if(|(until, _)| *until <= now) {
            let Some(lane) = self.lanes.get_mut(&key) else { continue };
            if lane.blocked.take_if(|(_, until)| *until <= due).is_none() {
                // The message has come, or another one is waited for since.
                continue;
            }
            if lane.is_over() {
                self.lanes.remove(&key);
            } else if lane.may_start() {
                self.ready.push_back(key);
            }
        }
    }

    /// Returns the number of deliveries to acknowledge.
    pub(super) fn acknowledgements(&self) -> usize {
        self.acknowledgements.len()
    }

    /// Deliveries to acknowledge, at most `most`.
    pub(super) fn acknowledge(&mut self, most: usize) -> Vec<u64> {
        let count = self.acknowledgements.len().min(most);
        self.acknowledgements.drain(..count).collect()
    }

    /// Acknowledgements are on the disk; how many of them are ours.
    pub(super) fn confirm(&mut self, first: u64, last: u64) -> u64 {
        let (before, done) = (self.unconfirmed.len(), &mut self.done.ids);
        self.unconfirmed.retain(|id, message_id| {
            let is_confirmed = (first..=last).contains(id);
            if is_confirmed {
                // Should it come again, somebody wants it to be handled again.
                done.remove(message_id);
            }
            !is_confirmed
        });
        (before - self.unconfirmed.len()) as u64
    }

    /// Acknowledgements came too late: the messages come again, to whomever.
    pub(super) fn lose(&mut self, first: u64, last: u64, now: Instant) {
        let lost: Vec<u64> =
            self.unconfirmed.keys().copied().filter(|id| (first..=last).contains(id)).collect();
        for id in lost {
            if let Some(message_id) = self.unconfirmed.remove(&id) {
                self.done.add(message_id, now);
            }
        }
    }

    /// Deliveries are void.
    pub(super) fn revoke(&mut self, first: u64, last: u64) {
        let void = |id: u64| (first..=last).contains(&id);
        for lane in self.lanes.values_mut() {
            lane.waiting.retain(|waiting| !void(waiting.message.delivery_id));
        }
        self.lanes.retain(|_, lane| !lane.is_over());
        for running in self.running.values_mut() {
            running.delivery_id = running.delivery_id.filter(|id| !void(*id));
        }
    }

    /// The stream is lost, and all its deliveries with it. What runs goes on.
    pub(super) fn lose_stream(&mut self, now: Instant) {
        for lane in self.lanes.values_mut() {
            lane.waiting.clear();
            lane.blocked = None;
        }
        self.lanes.retain(|_, lane| lane.busy);
        self.ready.clear();
        self.blocked.clear();
        for running in self.running.values_mut() {
            running.delivery_id = None;
        }
        self.acknowledgements.clear();
        self.named.clear();
        for (_, message_id) in std::mem::take(&mut self.unconfirmed) {
            self.done.add(message_id, now);
        }
    }

    /// Returns whether some message runs or waits.
    pub(super) fn is_holding(&self) -> bool {
        !self.lanes.is_empty()
    }

    /// Deliveries that run or wait and whose deadline is to be moved now, at most `most`; the rest is due still.
    pub(super) fn extend(&mut self, now: Instant, most: usize) -> Vec<u64> {
        let running =
            self.running.values_mut().filter_map(|running| Some((running.delivery_id?, &mut running.held)));
        let waiting = self.lanes.values_mut().flat_map(|lane| &mut lane.waiting);
        let waiting = waiting.map(|waiting| (waiting.message.delivery_id, &mut waiting.held));
        let due = running.chain(waiting).filter(|(_, held)| held.is_due(now)).take(most);
        let moved = due.map(|(id, held)| {
            held.extend_at = now + self.extend_every;
            id
        });
        moved.collect()
    }

    /// Messages whose handler has begun and whose acknowledgement is not confirmed.
    pub(super) fn unsettled(&self) -> usize {
        self.running.len() + self.unconfirmed.len()
    }
}

#[cfg(test)]
mod tests {
    use gateway_api::gateway::v1::ReceivedMessage;

    use super::*;

    fn message(delivery_id: u64, device: &str) -> ConsumedMessage {
        let content = ReceivedMessage { device_id: device.to_owned(), ..ReceivedMessage::default() };
        ConsumedMessage {
            delivery_id,
            message_id: format!("m{delivery_id}"),
            content: Some(Content::Message(content)),
            ..ConsumedMessage::default()
        }
    }

    fn started(lanes: &mut Lanes) -> Vec<(u64, u64)> {
        std::iter::from_fn(|| lanes.start()).map(|(name, message)| (name, message.delivery_id)).collect()
    }

    #[test]
    fn messages_of_one_device_never_run_at_the_same_time() {
        let mut lanes = Lanes::default();
        for (id, device) in [(1, "a"), (2, "a"), (3, "b"), (4, "a")] {
            lanes.deliver(message(id, device), Instant::now());
        }
        let first = started(&mut lanes);
        assert_eq!(first.iter().map(|(_, id)| *id).collect::<Vec<_>>(), [1, 3]);
        assert_eq!(lanes.finish(first[0].0, HandlerEnd::Done, Instant::now()), Finished::Settled);
        let second = started(&mut lanes);
        assert_eq!(second.iter().map(|(_, id)| *id).collect::<Vec<_>>(), [2]);
        assert_eq!(lanes.acknowledge(9), [1]);
        assert_eq!(lanes.confirm(1, 1), 1);
    }

    /// The failure: what ran over a lost stream was acknowledged only after it had come again, and given back never.
    #[test]
    fn what_runs_over_a_lost_stream_has_its_delivery_on_the_next() {
        let (mut lanes, now) = (Lanes::default(), Instant::now());
        for (id, device) in [(1, "a"), (2, "b"), (3, "c"), (4, "d"), (5, "a")] {
            lanes.deliver(message(id, device), now);
        }
        let running = started(&mut lanes);
        lanes.finish(running[0].0, HandlerEnd::Done, now);
        lanes.lose_stream(now);
        let named = lanes.name(9);
        let id = |message: &str| (1..).zip(&named).find(|(_, id)| *id == message).map(|(id, _)| id).unwrap();
        assert_eq!(named.len(), 4, "and not what waited");
        assert_eq!(lanes.finish(running[1].0, HandlerEnd::Back, now), Finished::Later("m2".into()));
        let void = DeliveryRange { first: id("m3"), last: id("m3") };
        assert_eq!(lanes.resume(4, &[void], now), [(id("m2"), "m2".to_owned())]);
        assert_eq!(lanes.acknowledge(9), [id("m1")]);
        assert_eq!(lanes.finish(running[3].0, HandlerEnd::Back, now), Finished::GiveBack(id("m4")));
        assert_eq!(lanes.finish(running[2].0, HandlerEnd::Done, now), Finished::Settled);
        assert!(lanes.acknowledge(9).is_empty(), "it is not this member's");
        lanes.name(9);
        assert!(lanes.resume(0, &[], now).is_empty(), "a gateway that does not know of this");
    }

    #[test]
    fn what_waits_behind_a_message_that_is_given_back_is_not_handled() {
        let mut lanes = Lanes::default();
        lanes.deliver(message(1, "a"), Instant::now());
        lanes.deliver(message(2, "a"), Instant::now());
        let first = started(&mut lanes);
        assert_eq!(lanes.finish(first[0].0, HandlerEnd::Back, Instant::now()), Finished::GiveBack(1));
        assert!(started(&mut lanes).is_empty());
        lanes.deliver(ConsumedMessage { delivery_id: 3, ..message(1, "a") }, Instant::now());
        assert_eq!(started(&mut lanes).len(), 1);
    }

    /// The failure: what the gateway sent before it knew of the failure runs before the message that failed.
    #[test]
    fn what_comes_late_waits_for_the_message_that_was_given_back() {
        let (mut lanes, now) = (Lanes::default(), Instant::now());
        lanes.deliver(message(1, "a"), Instant::now());
        let first = started(&mut lanes);
        assert_eq!(lanes.finish(first[0].0, HandlerEnd::Back, now), Finished::GiveBack(1));
        lanes.deliver(message(2, "a"), Instant::now());
        assert!(started(&mut lanes).is_empty());
        lanes.revoke(2, 2);
        lanes.deliver(ConsumedMessage { delivery_id: 3, ..message(1, "a") }, Instant::now());
        lanes.deliver(ConsumedMessage { delivery_id: 4, ..message(2, "a") }, Instant::now());
        let again = started(&mut lanes);
        assert_eq!(again.iter().map(|(_, id)| *id).collect::<Vec<_>>(), [3]);
        lanes.finish(again[0].0, HandlerEnd::Done, now);
        assert_eq!(started(&mut lanes).len(), 1);
    }

    /// The failure: what waits behind a message that does not come again is never handled, and runs into its deadline.
    #[test]
    fn what_waits_behind_a_message_that_is_given_up_is_handled() {
        let (mut lanes, now) = (Lanes::default(), Instant::now());
        for id in 1..=3 {
            lanes.deliver(message(id, "a"), Instant::now());
        }
        let first = started(&mut lanes);
        lanes.finish(first[0].0, HandlerEnd::Up, now);
        let second = started(&mut lanes);
        assert_eq!(second.iter().map(|(_, id)| *id).collect::<Vec<_>>(), [2], "told to be a dead letter");
        lanes.finish(second[0].0, HandlerEnd::Back, now);
        assert!(started(&mut lanes).is_empty());
        lanes.unblock(now + BLOCKED);
        assert_eq!(lanes.blocked_until(), None);
        assert_eq!(started(&mut lanes)[0].1, 3, "it was the last attempt, which only the gateway knew");
    }

    /// The failure: messages that are replayed on purpose are acknowledged unseen, since they were done once.
    #[test]
    fn what_was_done_and_confirmed_is_handled_when_it_is_replayed() {
        let mut lanes = Lanes::default();
        lanes.deliver(message(1, "a"), Instant::now());
        let first = started(&mut lanes);
        lanes.finish(first[0].0, HandlerEnd::Done, Instant::now());
        lanes.lose_stream(Instant::now());
        lanes.deliver(message(1, "a"), Instant::now());
        assert_eq!(lanes.acknowledge(9), [1]);
        assert_eq!(lanes.confirm(1, 1), 1);
        lanes.deliver(ConsumedMessage { delivery_id: 2, ..message(1, "a") }, Instant::now());
        assert_eq!(started(&mut lanes).len(), 1);
    }

    #[test]
    fn what_was_done_as_the_stream_was_lost_is_not_done_twice() {
        let mut lanes = Lanes::default();
        for (id, device) in [(1, "a"), (2, "b"), (3, "c")] {
            lanes.deliver(message(id, device), Instant::now());
        }
        let first = started(&mut lanes);
        lanes.finish(first[0].0, HandlerEnd::Done, Instant::now());
        assert_eq!(lanes.acknowledge(9), [1]);
        lanes.lose_stream(Instant::now());
        // Its handler ends on no stream; the third one's goes on while its message comes again.
        lanes.finish(first[1].0, HandlerEnd::Done, Instant::now());
        for (id, device) in [(1, "a"), (2, "b"), (3, "c")] {
            lanes.deliver(message(id, device), Instant::now());
        }
        assert!(started(&mut lanes).is_empty());
        assert_eq!(lanes.acknowledge(9), [1, 2]);
        lanes.finish(first[2].0, HandlerEnd::Done, Instant::now());
        assert!(started(&mut lanes).is_empty());
        assert_eq!(lanes.acknowledge(9), [3]);
        assert_eq!(lanes.confirm(1, 3), 3);
    }

    /// The failure: as before, where the acknowledgement had arrived although nobody heard so.
    #[test]
    fn what_was_done_long_ago_is_handled_when_it_is_replayed() {
        let (mut lanes, now) = (Lanes::default(), Instant::now());
        lanes.deliver(message(1, "a"), now);
        let first = started(&mut lanes);
        lanes.finish(first[0].0, HandlerEnd::Done, now);
        lanes.lose_stream(now);
        lanes.deliver(message(2, "b"), now + REMEMBERED_FOR);
        assert_eq!(lanes.done.ids.len(), 1);
        lanes.deliver(message(1, "a"), now + REMEMBERED_FOR + Duration::from_secs(1));
        assert_eq!(started(&mut lanes).len(), 2);
    }

    #[test]
    fn a_void_delivery_is_neither_handled_nor_acknowledged() {
        let mut lanes = Lanes::default();
        lanes.deliver(message(1, "a"), Instant::now());
        lanes.deliver(message(2, "a"), Instant::now());
        let first = started(&mut lanes);
        lanes.revoke(1, 2);
        lanes.finish(first[0].0, HandlerEnd::Done, Instant::now());
        assert!(started(&mut lanes).is_empty());
        assert!(lanes.acknowledge(9).is_empty());
        assert_eq!(lanes.unsettled(), 0);
    }

    /// The failure: what waits behind a slow handler runs into its deadline, and is given to another member.
    #[test]
    fn deadlines_of_what_runs_and_what_waits_are_moved_in_time() {
        let (mut lanes, now) = (Lanes::default(), Instant::now());
        let second = Duration::from_secs(1);
        lanes.set_extend_every(15 * second);
        let extended = |lanes: &mut Lanes, after: u32, most| {
            let mut ids = lanes.extend(now + after * second, most);
            ids.sort_unstable();
            ids
        };
        lanes.deliver(message(1, "a"), now);
        lanes.deliver(message(2, "a"), now);
        lanes.deliver(message(3, "b"), now + 10 * second);
        let first = started(&mut lanes);
        assert!(extended(&mut lanes, 14, 9).is_empty());
        assert_eq!(extended(&mut lanes, 16, 9), [1, 2], "one runs, one waits");
        assert_eq!(extended(&mut lanes, 26, 9), [3]);
        lanes.finish(first[0].0, HandlerEnd::Done, now);
        assert_eq!(extended(&mut lanes, 45, 1).len(), 1);
        assert_eq!(extended(&mut lanes, 45, 9).len(), 1, "what one request did not take is in the next");
        assert!(extended(&mut lanes, 45, 9).is_empty(), "it is done, or not due");
        lanes.revoke(3, 3);
        assert_eq!(extended(&mut lanes, 100, 9), [2], "what is void has no deadline");
    }

    /// The failure: a handler that hangs keeps its message for ever, or for another hour with each stream.
    #[test]
    fn the_deadline_of_a_message_is_moved_for_an_hour_at_most() {
        let (mut lanes, now) = (Lanes::default(), Instant::now());
        lanes.deliver(message(1, "a"), now);
        started(&mut lanes);
        let almost = now + LONGEST_WORK - Duration::from_secs(1);
        assert_eq!(lanes.extend(almost, 9), [1]);
        lanes.lose_stream(almost);
        lanes.deliver(message(1, "a"), almost);
        assert_eq!(lanes.extend(almost, 9), [1], "it waits for its handler, which still runs");
        assert!(lanes.extend(now + LONGEST_WORK, 9).is_empty());
        lanes.deliver(ConsumedMessage { delivery_id: 2, ..message(2, "b") }, almost);
        assert_eq!(lanes.extend(now + LONGEST_WORK, 9), [2], "each has an hour of its own");
    }
}
