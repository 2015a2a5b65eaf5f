//! Shared subscriptions: a group of sessions of which one gets each message [MQTT-4.8.2-4].
//!
//! Online members come first. While none is online, QoS 1 and 2 messages wait in the group's bounded queue (on disk, if
//! there is a store) and not in a member's session, so that whoever returns first gets them. Deliveries work on a
//! snapshot of the members: no lock is held while one is called.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
};

use ahash::RandomState;
use gateway_core::{
    DropReason, Message, Offer, Outcome, QoS, QueueId, Timestamp, limits::SharedStrategy, parse_shared,
};
use parking_lot::{Mutex, RwLock};
use store::SessionOp;

use super::queue::{Most, SharedQueue};
use crate::{
    Delivered, Target,
    durable::{Durable, Storage},
    memory::Account,
    subscriber::Options,
};

/// Most queued messages delivered before one new message.
pub(super) const DRAIN_PER_MESSAGE: usize = 64;

/// One session in a group.
#[derive(Clone)]
pub(crate) struct SharedMember {
    pub(crate) target: Arc<dyn Target>,
    pub(crate) slot: u32,
    /// Subscription identifier, 0 for none.
    pub(crate) id: u32,
    pub(crate) options: Options,
}

impl SharedMember {
    pub(crate) fn slot(&self) -> u32 {
        self.slot
    }
}

/// Sessions that share one filter under one group name.
pub(crate) struct SharedGroup {
    pub(super) id: u32,
    /// `$share/name/filter`.
    full_name: Box<str>,
    strategy: SharedStrategy,
    hasher: RandomState,
    pub(super) members: RwLock<Arc<[SharedMember]>>,
    /// Round robin: the next member; random: the generator's state.
    next: AtomicU64,
    /// Sticky: the slot of the chosen member.
    sticky: AtomicU32,
    pub(super) queue: Mutex<SharedQueue>,
    /// True if `queue` holds messages; readable without its lock.
    pub(super) queued: AtomicBool,
    pub(super) most: Most,
    /// The queue's number on disk, 0 if it was never there.
    pub(super) stored: AtomicU64,
}

/// Inputs and results of deliveries to shared groups: receivers to flush, and the number of members visited.
pub(crate) struct DeliveryContext<'a> {
    pub(crate) dirty: &'a mut Vec<Arc<dyn Target>>,
    pub(crate) account: &'a Account,
    pub(crate) durable: Option<&'a Durable>,
    pub(crate) now: Timestamp,
    /// Members visited.
    pub(crate) visited: usize,
}

impl<'a> DeliveryContext<'a> {
    pub(crate) fn new(storage: Storage<'a>, dirty: &'a mut Vec<Arc<dyn Target>>, now: Timestamp) -> Self {
        Self { dirty, account: storage.account, durable: storage.durable, now, visited: 0 }
    }
}

impl SharedGroup {
    pub(crate) fn new(
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
            queue: Mutex::new(SharedQueue::default()),
            queued: AtomicBool::new(false),
            most,
            stored: AtomicU64::new(0),
        }
    }

    /// Lets go of its members, in memory only.
    pub(crate) fn release_members(&self) {
        let members = std::mem::replace(&mut *self.members.write(), Arc::from([]));
        drop(members);
    }

    /// Its durable queue, or none.
    pub(crate) fn stored_queue(&self) -> QueueId {
        QueueId(self.stored.load(Ordering::Acquire))
    }

    /// Returns whether messages that its members take at QoS 1 and 2 go to disk.
    pub(crate) fn is_durable(&self) -> bool {
        self.members.read().iter().any(|member| member.target.is_durable())
    }

    /// The durable queue, made if there is none. Called under the lock of the queue, which must not be closed.
    pub(super) fn make_stored(&self, durable: &Durable) -> QueueId {
        let known = self.stored_queue();
        if known != QueueId::NONE {
            return known;
        }
        let queue = durable.next_queue();
        self.stored.store(queue.0, Ordering::Release);
        durable.note_group(queue, self.id);
        durable.state().submit_session(SessionOp::Group(queue, self.full_name.to_string()));
        queue
    }

    /// Its durable queue, made if there is none, unless the group is gone, since then nobody would remove it. The
    /// group's name is on disk no later than anything submitted to the sessions' store after this.
    pub(crate) fn keep_on_disk(&self, durable: &Durable) -> QueueId {
        let queue = self.queue.lock();
        if queue.closed { self.stored_queue() } else { self.make_stored(durable) }
    }

    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    pub(crate) fn full_name(&self) -> &str {
        &self.full_name
    }

    /// The filter without `$share/name/`.
    pub(crate) fn filter(&self) -> &str {
        parse_shared(&self.full_name).ok().flatten().map_or("", |(_, filter)| filter)
    }

    pub(crate) fn len(&self) -> usize {
        self.members.read().len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn has_member(&self, slot: u32) -> bool {
        self.member_options(slot).is_some()
    }

    pub(crate) fn member_options(&self, slot: u32) -> Option<Options> {
        self.members.read().iter().find(|member| member.slot == slot).map(|member| member.options)
    }

    /// Adds or replaces a member.
    pub(crate) fn set_member(&self, member: SharedMember) {
        let mut members = self.members.write();
        let mut list = members.to_vec();
        match list.iter_mut().find(|other| other.slot == member.slot) {
            Some(other) => *other = member,
            None => list.push(member),
        }
        *members = list.into();
    }

    /// Removes a member; false if it is none.
    pub(crate) fn remove_member(&self, slot: u32) -> bool {
        let mut members = self.members.write();
        let list: Arc<[SharedMember]> =
            members.iter().filter(|member| member.slot != slot).cloned().collect();
        let removed = list.len() < members.len();
        *members = list;
        removed
    }

    /// Delivers one message to one member, or keeps it for the first that returns.
    pub(crate) fn deliver(&self, message: &Message<'_>, context: &mut DeliveryContext<'_>) -> Outcome {
        let outcome = self.deliver_or_keep(message, context);
        if outcome == Outcome::Dropped(DropReason::NotAuthorized) {
            DropReason::NotAuthorized.count(1);
        }
        outcome
    }

    fn deliver_or_keep(&self, message: &Message<'_>, context: &mut DeliveryContext<'_>) -> Outcome {
        let members = Arc::clone(&*self.members.read());
        // Messages left by members that could not take all of them come first.
        let mut online = true;
        let behind = self.has_queued() && self.drain_before(message, &members, context, &mut online);
        if !behind {
            let offered = self.offer(message, &members, context);
            online = offered.is_some();
            if let Some(outcome) = offered {
                // A persistent member that is behind takes nothing for the group. The message then waits here although
                // members are connected.
                let waits = outcome == Outcome::Dropped(DropReason::QueueFull)
                    && message.qos > QoS::AtMostOnce
                    && members.iter().any(|member| member.target.is_durable());
                if !waits {
                    return outcome;
                }
            }
        }
        let outcome = self.enqueue(message, &members, online, context);
        if outcome != Outcome::Queued {
            return outcome;
        }
        context.visited += members.len();
        // The members of this moment: one may have come or joined since the choice, and found the queue still empty.
        let members = Arc::clone(&*self.members.read());
        if !is_any_online(&members) {
            // The last member may have gone meanwhile.
            if online {
                self.park(context.account);
            }
        } else {
            self.drain(&members, None, DRAIN_PER_MESSAGE, context);
            if self.is_at_hand() {
                // Nobody else would tell the members that were full.
                nudge(&members);
            }
        }
        outcome
    }

    /// Offers to online members in the strategy's order. `None` if none is online. What no online member may have is for
    /// the session of one that is away and may, so that it keeps nothing waiting that others may have; if there is none it
    /// is dropped.
    pub(super) fn offer(
        &self,
        message: &Message<'_>,
        members: &[SharedMember],
        context: &mut DeliveryContext<'_>,
    ) -> Option<Outcome> {
        if members.is_empty() {
            return None;
        }
        let start = self.start(message, members);
        if self.strategy == SharedStrategy::LeastInflight {
            context.visited += members.len();
        }
        let (mut refused, mut away) = (None, false);
        for step in 0..members.len() {
            context.visited += 1;
            let member = &members[(start + step) % members.len()];
            if !member.target.is_online() {
                away = true;
                continue;
            }
            let outcome = self.hand(member, message, false, context);
            match outcome {
                Outcome::Dropped(DropReason::NotAuthorized) => refused = refused.or(Some(outcome)),
                // Another member may have room; QoS 0 is not worth the search.
                Outcome::Dropped(_) if message.qos > QoS::AtMostOnce => refused = Some(outcome),
                // Not for this member; it may be for another.
                Outcome::Ignored => refused = refused.or(Some(outcome)),
                _ => return Some(outcome),
            }
        }
        let nobody = refused == Some(Outcome::Dropped(DropReason::NotAuthorized));
        if nobody && away && message.qos > QoS::AtMostOnce {
            let taken = members.iter().filter(|member| !member.target.is_online()).find_map(|member| {
                context.visited += 1;
                let outcome = self.hand(member, message, true, context);
                matches!(outcome, Outcome::Sent | Outcome::Queued).then_some(outcome)
            });
            return taken.or(refused);
        }
        refused
    }

    /// Offers to one member, whose session may keep the message if it is `away`.
    pub(super) fn hand(
        &self,
        member: &SharedMember,
        message: &Message<'_>,
        away: bool,
        context: &mut DeliveryContext<'_>,
    ) -> Outcome {
        let ids = [member.id];
        let offer = Offer {
            qos: member.options.qos(),
            retain: member.options.retain_as_published() && message.retain,
            ids: if member.id == 0 { &[] } else { &ids },
            group: self.id,
            group_queue: self.group_queue(member, context.durable),
            queue_offline: away,
        };
        let Delivered { outcome, flush } = member.target.deliver(message, offer);
        if flush {
            context.dirty.push(Arc::clone(&member.target));
        }
        if self.strategy == SharedStrategy::Sticky && !matches!(outcome, Outcome::Dropped(_)) {
            self.sticky.store(member.slot, Ordering::Relaxed);
        }
        outcome
    }

    /// Index of the member that is tried first.
    fn start(&self, message: &Message<'_>, members: &[SharedMember]) -> usize {
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

    /// The online member with the fewest messages; in turn among equals.
    fn least_loaded(&self, members: &[SharedMember]) -> usize {
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

    /// The group's durable queue, if the member keeps messages on disk: its entries name that queue, so that they can
    /// come back to the group.
    fn group_queue(&self, member: &SharedMember, durable: Option<&Durable>) -> QueueId {
        let known = self.stored_queue();
        match durable {
            Some(durable) if known == QueueId::NONE && member.target.is_durable() => {
                self.keep_on_disk(durable)
            }
            _ => known,
        }
    }

    #[cfg(test)]
    pub(crate) fn queue_len(&self) -> usize {
        self.queue.lock().len()
    }
}

pub(super) fn is_any_online(members: &[SharedMember]) -> bool {
    members.iter().any(|member| member.target.is_online())
}

/// Tells members that were full that the queue has something for them. They may have got room, and found the queue
/// empty, just before.
pub(super) fn nudge(members: &[SharedMember]) {
    members.iter().for_each(|member| member.target.nudge());
}
