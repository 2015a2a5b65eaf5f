//! Shared subscriptions: a group of sessions of which one gets each message [MQTT-4.8.2-4].
//!
//! Online members come first. While none is online, QoS 1 and 2 messages wait in the group's bounded queue, not
//! in a member's session, so that whoever returns first gets them. Members are read as a snapshot: no lock is
//! held while one is called.

mod queue;

use std::sync::{
    Arc,
    atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering},
};

use ahash::RandomState;
use parking_lot::{Mutex, RwLock};

pub(super) use self::queue::Most;
use self::queue::{Queue, Waiting};
use super::{
    Delivered, MatchOptions, Outcome, Target, budget::Budget, drops::count_drop, durable::Durable,
    index::Options,
};
use crate::{
    config::SharedStrategy,
    store::SessionOp,
    telemetry::count,
    types::{
        DropReason, Entry, Message, OpenUnit, QoS, QueueId, QueueOp, SharedMessage, Timestamp, parse_shared,
    },
};

/// Queued messages handed out before one new message, at most.
const DRAIN_PER_MESSAGE: usize = 64;

/// One session in a group.
#[derive(Clone)]
pub(super) struct Member {
    pub(super) target: Arc<dyn Target>,
    pub(super) slot: u32,
    /// Subscription identifier, 0 for none.
    pub(super) id: u32,
    pub(super) options: Options,
}

impl Member {
    pub(super) fn slot(&self) -> u32 {
        self.slot
    }
}

/// Sessions that share one filter under one group name.
pub(super) struct Group {
    id: u32,
    /// `$share/name/filter`.
    full_name: Box<str>,
    strategy: SharedStrategy,
    hasher: RandomState,
    members: RwLock<Arc<[Member]>>,
    /// Round robin: the next member; random: the generator's state.
    next: AtomicU64,
    /// Sticky: the slot of the chosen member.
    sticky: AtomicU32,
    queue: Mutex<Queue>,
    /// Length of `queue`, readable without its lock.
    queued: AtomicUsize,
    most: Most,
    /// Where the queue is on disk, 0 if it never was.
    stored: AtomicU64,
}

/// Where a group's deliveries leave their traces.
pub(super) struct Delivery<'a> {
    pub(super) dirty: &'a mut Vec<Arc<dyn Target>>,
    pub(super) budget: &'a Budget,
    pub(super) durable: Option<&'a Durable>,
    pub(super) now: Timestamp,
}

impl Group {
    pub(super) fn new(
        id: u32,
        full_name: &str,
        strategy: SharedStrategy,
        hasher: RandomState,
        most: Most,
    ) -> Self {
        Self {
            id,
            full_name: Box::from(full_name),
            strategy,
            hasher,
            members: RwLock::new(Arc::from([])),
            next: AtomicU64::new(0),
            sticky: AtomicU32::new(0),
            queue: Mutex::new(Queue::default()),
            queued: AtomicUsize::new(0),
            most,
            stored: AtomicU64::new(0),
        }
    }

    /// Its durable queue, or none.
    pub(super) fn stored_queue(&self) -> QueueId {
        QueueId(self.stored.load(Ordering::Acquire))
    }

    /// What an earlier process left: the queue `id` and its messages with their places, in order.
    pub(super) fn restore(&self, id: QueueId, messages: Vec<(u64, Arc<SharedMessage>)>, budget: &Budget) {
        self.stored.store(id.0, Ordering::Release);
        let mut queue = self.queue.lock();
        for (place, message) in messages {
            budget.force(message.cost());
            queue.push(Waiting { message, place });
        }
        self.queued.store(queue.len(), Ordering::Release);
    }

    /// Whether what its members take at QoS 1 and 2 goes to disk.
    pub(super) fn is_durable(&self) -> bool {
        self.members.read().iter().any(|member| member.target.is_durable())
    }

    /// The durable queue, made if there is none. Called under the queue's lock.
    fn make_stored(&self, durable: &Durable) -> QueueId {
        let known = self.stored_queue();
        if known != QueueId::NONE {
            return known;
        }
        let queue = durable.next_queue();
        self.stored.store(queue.0, Ordering::Release);
        durable.note_group(queue, self.id);
        durable.sessions().submit(SessionOp::Group(queue, self.full_name.to_string()));
        queue
    }

    pub(super) fn id(&self) -> u32 {
        self.id
    }

    pub(super) fn full_name(&self) -> &str {
        &self.full_name
    }

    /// The filter without `$share/name/`.
    pub(super) fn filter(&self) -> &str {
        parse_shared(&self.full_name).ok().flatten().map_or("", |(_, filter)| filter)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.members.read().is_empty()
    }

    /// Whether messages wait for a member that takes them.
    pub(super) fn has_queued(&self) -> bool {
        self.queued.load(Ordering::Acquire) > 0
    }

    pub(super) fn has_member(&self, slot: u32) -> bool {
        self.member_options(slot).is_some()
    }

    pub(super) fn member_options(&self, slot: u32) -> Option<Options> {
        self.members.read().iter().find(|member| member.slot == slot).map(|member| member.options)
    }

    /// Adds or replaces a member.
    pub(super) fn set_member(&self, member: Member) {
        let mut members = self.members.write();
        let mut list = members.to_vec();
        match list.iter_mut().find(|other| other.slot == member.slot) {
            Some(other) => *other = member,
            None => list.push(member),
        }
        *members = list.into();
    }

    /// Removes a member; false if it is none.
    pub(super) fn remove_member(&self, slot: u32) -> bool {
        let mut members = self.members.write();
        let list: Arc<[Member]> = members.iter().filter(|member| member.slot != slot).cloned().collect();
        let removed = list.len() < members.len();
        *members = list;
        removed
    }

    /// Gives one message to one member, or keeps it for the first that returns.
    pub(super) fn deliver(&self, message: &Message<'_>, delivery: &mut Delivery<'_>) -> Outcome {
        let members = Arc::clone(&*self.members.read());
        if self.has_queued() {
            // Messages left by a member that could not take all of them come first.
            self.drain(&members, None, DRAIN_PER_MESSAGE, delivery);
        }
        if let Some(outcome) = self.offer(message, &members, delivery) {
            // A persistent member that is behind takes nothing for the group: then it waits here, not for a connection.
            let waits = outcome == Outcome::Dropped(DropReason::QueueFull)
                && message.qos > QoS::AtMostOnce
                && members.iter().any(|member| member.target.is_durable());
            if !waits {
                return outcome;
            }
        }
        let outcome = self.enqueue(message, &members, delivery);
        if outcome == Outcome::Queued && members.iter().any(|member| member.target.is_online()) {
            // A member came between the choice and the queue, and may have drained it just before.
            self.drain(&members, None, DRAIN_PER_MESSAGE, delivery);
            if self.has_queued() {
                // Members that were full: nobody else would tell them.
                nudge(&members);
            }
        }
        outcome
    }

    /// Hands `limit` messages of the queue to a member that has come online, or as many as it takes; true if something
    /// is left.
    pub(super) fn drain_to(&self, slot: u32, limit: usize, delivery: &mut Delivery<'_>) -> bool {
        if !self.has_queued() {
            return false;
        }
        let members = Arc::clone(&*self.members.read());
        self.drain(&members, Some(slot), limit, delivery);
        self.has_queued()
    }

    /// Ends the group: what still waits is dropped and counted.
    pub(super) fn close(&self, budget: &Budget, durable: Option<&Durable>) {
        let messages = self.queue.lock().close();
        self.queued.store(0, Ordering::Release);
        for Waiting { message, .. } in messages {
            budget.release(message.cost());
            debug_assert!(message.receipt.is_none(), "what is queued is not waited for");
            count_drop(DropReason::SessionEnded);
        }
        let stored = self.stored_queue();
        if let Some(durable) = durable.filter(|_| stored != QueueId::NONE) {
            durable.forget_group(stored);
        }
    }

    /// Offers to online members in the strategy's order. `None` if none is online.
    fn offer(
        &self,
        message: &Message<'_>,
        members: &[Member],
        delivery: &mut Delivery<'_>,
    ) -> Option<Outcome> {
        if members.is_empty() {
            return None;
        }
        let start = self.start(message, members);
        let mut refused = None;
        for step in 0..members.len() {
            let member = &members[(start + step) % members.len()];
            if !member.target.is_online() {
                continue;
            }
            let outcome = self.hand(member, message, delivery);
            match outcome {
                // Another member may have room; QoS 0 is not worth the search.
                Outcome::Dropped(_) if message.qos > QoS::AtMostOnce => refused = Some(outcome),
                _ => return Some(outcome),
            }
        }
        refused
    }

    fn hand(&self, member: &Member, message: &Message<'_>, delivery: &mut Delivery<'_>) -> Outcome {
        let ids = [member.id];
        let options = MatchOptions {
            qos: member.options.qos(),
            retain_as_published: member.options.retain_as_published(),
            replay: false,
            ids: if member.id == 0 { &[] } else { &ids },
            group: self.id,
            group_queue: self.group_queue(member, delivery.durable),
            queue_offline: false,
        };
        let Delivered { outcome, flush } = member.target.deliver(message, options);
        if flush {
            delivery.dirty.push(Arc::clone(&member.target));
        }
        if self.strategy == SharedStrategy::Sticky && !matches!(outcome, Outcome::Dropped(_)) {
            self.sticky.store(member.slot, Ordering::Relaxed);
        }
        outcome
    }

    /// Where the search for a member begins.
    fn start(&self, message: &Message<'_>, members: &[Member]) -> usize {
        let len = members.len() as u64;
        let number = match self.strategy {
            SharedStrategy::RoundRobin => self.next.fetch_add(1, Ordering::Relaxed),
            SharedStrategy::Random => {
                const STEP: u64 = 0x9E37_79B9_7F4A_7C15;
                let state = self.next.fetch_add(STEP, Ordering::Relaxed);
                self.hasher.hash_one(state)
            }
            SharedStrategy::HashClient => match message.origin.client_id {
                Some(client_id) => self.hasher.hash_one(client_id.as_str()),
                None => 0,
            },
            SharedStrategy::HashTopic => self.hasher.hash_one(message.topic),
            SharedStrategy::Sticky => {
                let slot = self.sticky.load(Ordering::Relaxed);
                return members.iter().position(|member| member.slot == slot).unwrap_or(0);
            }
            SharedStrategy::LeastInflight => return self.least_loaded(members),
        };
        (number % len) as usize
    }

    /// The online member with the least to do; in turn among equals.
    fn least_loaded(&self, members: &[Member]) -> usize {
        let turn = self.next.fetch_add(1, Ordering::Relaxed) as usize % members.len();
        let mut best = turn;
        let mut least = usize::MAX;
        for step in 0..members.len() {
            let position = (turn + step) % members.len();
            let target = &members[position].target;
            let load = if least > 0 && target.is_online() { target.load() } else { usize::MAX };
            if load < least {
                (best, least) = (position, load);
            }
        }
        best
    }

    /// What a member keeps on disk names the group's queue, so that it can come back to the group.
    fn group_queue(&self, member: &Member, durable: Option<&Durable>) -> QueueId {
        let known = self.stored_queue();
        match durable {
            Some(durable) if known == QueueId::NONE && member.target.is_durable() => {
                let _queue = self.queue.lock();
                self.make_stored(durable)
            }
            _ => known,
        }
    }

    fn enqueue(&self, message: &Message<'_>, members: &[Member], delivery: &Delivery<'_>) -> Outcome {
        let budget = delivery.budget;
        let granted = members.iter().map(|member| member.options.qos()).max().unwrap_or_default();
        if message.qos.min(granted) == QoS::AtMostOnce {
            count(|c| c.dropped_offline.add(1));
            return Outcome::Dropped(DropReason::Offline);
        }
        // Whoever waits does not wait for what is queued.
        let kept = message.share().without_receipt();
        let cost = kept.cost();
        if !budget.charge(cost) {
            count(|c| c.dropped_memory.add(1));
            return Outcome::Dropped(DropReason::Memory);
        }
        let refused = {
            let mut queue = self.queue.lock();
            if queue.closed {
                Some(DropReason::SessionEnded)
            } else if queue.is_full(cost, &self.most) {
                Some(DropReason::QueueFull)
            } else {
                let place = queue.next;
                if let Some(durable) = delivery.durable {
                    // Submitted under the lock: in the order of places.
                    let ticket = message.ticket().cloned();
                    let qos = message.qos.min(granted);
                    let mut entry =
                        Entry::new(self.make_stored(durable), place, Arc::clone(&kept), qos, ticket);
                    entry.expires = self.most.until(kept.received, kept.expires);
                    durable.queues().submit(QueueOp::Append(Arc::new(entry)));
                }
                queue.push(Waiting { message: kept, place });
                self.queued.store(queue.len(), Ordering::Release);
                None
            }
        };
        let Some(reason) = refused else { return Outcome::Queued };
        budget.release(cost);
        count_drop(reason);
        Outcome::Dropped(reason)
    }

    /// Hands out queued messages in order, to the member of `slot` or to any, until one is refused.
    fn drain(&self, members: &[Member], slot: Option<u32>, limit: usize, delivery: &mut Delivery<'_>) {
        let only = slot.and_then(|slot| members.iter().find(|member| member.slot == slot));
        for _ in 0..limit {
            let Some(Waiting { message, place }) = self.pop() else { return };
            let cost = message.cost();
            let until = self.most.until(message.received, message.expires);
            if until.is_some_and(|at| at <= delivery.now) {
                delivery.budget.release(cost);
                count_drop(DropReason::Expired);
                self.remove(place, delivery);
                continue;
            }
            let mut queued = Delivery { dirty: &mut *delivery.dirty, ..*delivery };
            let mut borrowed = message.borrow();
            // From this queue to the member's in one step, or QoS 2 would be there twice or not at all.
            borrowed.unit = message.qos == QoS::ExactlyOnce;
            let unit = queued.durable.map(|durable| OpenUnit::new(&borrowed, durable.queues()));
            let outcome = match (slot, only) {
                (Some(_), None) => None,
                (Some(_), Some(member)) => Some(self.hand(member, &borrowed, &mut queued)),
                (None, _) => self.offer(&borrowed, members, &mut queued),
            };
            match outcome {
                // What is too large no member can ever take: don't let it block the others.
                Some(
                    Outcome::Sent
                    | Outcome::Queued
                    | Outcome::Ignored
                    | Outcome::Dropped(DropReason::TooLarge | DropReason::Expired),
                ) => {
                    let queue = self.stored_queue();
                    let remove = |unit| QueueOp::Remove { queue, seq: place, unit: Some(unit) };
                    let removed = unit.is_some_and(|unit| unit.close(remove));
                    drop(borrowed);
                    delivery.budget.release(cost);
                    if !removed {
                        self.remove(place, delivery);
                    }
                }
                None | Some(Outcome::Dropped(_)) => {
                    drop(unit);
                    drop(borrowed);
                    self.put_back(Waiting { message, place }, delivery.budget);
                    // A member asks by itself again.
                    if outcome == Some(Outcome::Dropped(DropReason::QueueFull)) && slot.is_none() {
                        nudge(members);
                    }
                    return;
                }
            }
        }
    }

    /// The message of `place` is gone from the queue.
    fn remove(&self, place: u64, delivery: &Delivery<'_>) {
        let queue = self.stored_queue();
        if let Some(durable) = delivery.durable.filter(|_| queue != QueueId::NONE) {
            durable.queues().submit(QueueOp::Remove { queue, seq: place, unit: None });
        }
    }

    fn pop(&self) -> Option<Waiting> {
        let mut queue = self.queue.lock();
        let waiting = queue.pop()?;
        self.queued.store(queue.len(), Ordering::Release);
        Some(waiting)
    }

    fn put_back(&self, waiting: Waiting, budget: &Budget) {
        let cost = waiting.message.cost();
        let closed = {
            let mut queue = self.queue.lock();
            if !queue.closed {
                queue.put_back(waiting);
                self.queued.store(queue.len(), Ordering::Release);
            }
            queue.closed
        };
        if closed {
            budget.release(cost);
            count_drop(DropReason::SessionEnded);
        }
    }

    #[cfg(test)]
    pub(super) fn queue_len(&self) -> usize {
        self.queue.lock().len()
    }
}

/// Tells members that were full that the queue has something for them. They may have had room, and found nothing, just
/// before it came there.
fn nudge(members: &[Member]) {
    members.iter().for_each(|member| member.target.nudge());
}
