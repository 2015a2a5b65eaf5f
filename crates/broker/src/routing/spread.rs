//! From the match to the receivers. A message with very many of them is delivered in parts, so that it does not block
//! its thread: a [`Spread`] keeps the match as it was at the beginning, and how far it has come.

use std::sync::Arc;

use gateway_core::{
    Commit, Durability, Effort, Message, Offer, Outcome, QoS, QueueId, SharedMessage, Unit, metrics::count,
};

use super::index::{MatchList, Matched};
use crate::{
    Broker, Delivered, Published, Target, Turn,
    shared::{DeliveryContext, SharedGroup},
};

/// Up to this many receivers are served in one go, since to continue later costs a copy of the message.
const MANY: usize = 1024;
/// Receivers served between two checks of the effort that is left.
const PART: usize = 8;

/// Result of [`Broker::publish_some`].
pub enum Routing {
    /// Every receiver has it.
    Done(Published),
    /// Some receivers do not have it yet.
    More(Box<Spread>),
}

/// A message that some of its receivers do not have yet. They get it in any case: when this is dropped, the rest is
/// served at once.
pub struct Spread {
    broker: Broker,
    list: Arc<MatchList>,
    way: SpreadProgress,
    message: Arc<SharedMessage>,
    durability: Durability,
    unit: bool,
    commit: Option<Arc<Commit>>,
    done: bool,
}

/// Progress of a message through a list of receivers.
#[derive(Default)]
struct SpreadProgress {
    /// Receivers served so far: first the list's targets, then its groups.
    served: usize,
    /// Only streams get the message.
    only_streams: bool,
    published: Published,
}

/// Publishing to many, in parts.
impl Broker {
    /// Delivers the message to all receivers, or to as many as the effort affords.
    #[inline(always)]
    pub(crate) fn route_some(&self, message: &Message<'_>, only_streams: bool, turn: &mut Turn) -> Routing {
        let Turn { dirty, matches, effort } = turn;
        // With more than one node, this is the one place to ask which others want the message.
        let list = matches.find(&self.inner.index, &self.inner.sessions.slots, message.topic, effort);
        if list.len() > MANY {
            return self.begin(message, only_streams, turn);
        }
        let published = self.hand_out(list, message, only_streams, dirty, effort);
        Routing::Done(self.conclude(message, published))
    }

    /// As [`Self::route_some`], for very many receivers.
    #[cold]
    fn begin(&self, message: &Message<'_>, only_streams: bool, turn: &mut Turn) -> Routing {
        let Turn { dirty, matches, effort } = turn;
        let list =
            Arc::clone(matches.find(&self.inner.index, &self.inner.sessions.slots, message.topic, effort));
        let mut way = SpreadProgress { only_streams, ..SpreadProgress::default() };
        self.hand_out_some(&list, message, &mut way, dirty, effort);
        if way.served == list.len() {
            return Routing::Done(self.conclude(message, way.published));
        }
        // Later receivers may need one, and from now on duplicates of the message wait for it.
        let commit = message.commit().cloned();
        Routing::More(Box::new(Spread {
            broker: self.clone(),
            list,
            way,
            message: Arc::clone(message.share()),
            durability: message.durability,
            unit: message.unit,
            commit,
            done: false,
        }))
    }

    /// Delivers the message to all in `list`. This and what it calls is most of what a message costs.
    #[inline(always)]
    fn hand_out(
        &self,
        list: &MatchList,
        message: &Message<'_>,
        only_streams: bool,
        dirty: &mut Vec<Arc<dyn Target>>,
        effort: &mut Effort,
    ) -> Published {
        let mut published = Published::default();
        if only_streams {
            count_blocked(list);
        }
        self.deliver(list, &list.targets, message, only_streams, &mut published, dirty);
        effort.spend_each(Effort::DELIVERY, list.targets.len());
        if !only_streams {
            for group in &list.groups {
                self.deliver_to_group(group, message, &mut published, dirty, effort);
            }
        }
        published
    }

    /// Continues in `list` until the effort is spent.
    fn hand_out_some(
        &self,
        list: &MatchList,
        message: &Message<'_>,
        way: &mut SpreadProgress,
        dirty: &mut Vec<Arc<dyn Target>>,
        effort: &mut Effort,
    ) {
        if way.only_streams && way.served == 0 {
            count_blocked(list);
        }
        while let Some(rest) = list.targets.get(way.served..).filter(|rest| !rest.is_empty()) {
            let part = &rest[..rest.len().min(PART)];
            let listed = dirty.len();
            self.deliver(list, part, message, way.only_streams, &mut way.published, dirty);
            way.served += part.len();
            effort.spend_each(Effort::DELIVERY, part.len());
            effort.spend_each(Effort::FLUSH, dirty.len() - listed);
            if effort.is_spent() {
                return;
            }
        }
        while let Some(group) = list.groups.get(way.served - list.targets.len()) {
            way.served += 1;
            let listed = dirty.len();
            if !way.only_streams {
                self.deliver_to_group(group, message, &mut way.published, dirty, effort);
            }
            effort.spend_each(Effort::FLUSH, dirty.len() - listed);
            if effort.is_spent() {
                return;
            }
        }
    }

    /// Delivers the message to `part` of the list's targets.
    #[inline(always)]
    fn deliver(
        &self,
        list: &MatchList,
        part: &[Matched],
        message: &Message<'_>,
        only_streams: bool,
        published: &mut Published,
        dirty: &mut Vec<Arc<dyn Target>>,
    ) {
        let offline_qos0 = self.inner.limits.offline_qos0;
        for matched in part {
            if only_streams && !matched.stream {
                continue;
            }
            let Some(merged) = matched.for_sender(message.origin.slot) else { continue };
            let offer = Offer {
                qos: merged.qos,
                retain: merged.retain_as_published && message.retain,
                ids: list.ids(&merged),
                group: 0,
                group_queue: QueueId::NONE,
                queue_offline: offline_qos0 || message.qos.min(merged.qos) > QoS::AtMostOnce,
            };
            let Delivered { outcome, flush } = matched.target.deliver(message, offer);
            if flush {
                dirty.push(Arc::clone(&matched.target));
            }
            published.add(outcome);
        }
    }

    /// Shared subscriptions are apart from the others: each group gets its own copy [MQTT-4.8.2-5].
    fn deliver_to_group(
        &self,
        group: &SharedGroup,
        message: &Message<'_>,
        published: &mut Published,
        dirty: &mut Vec<Arc<dyn Target>>,
        effort: &mut Effort,
    ) {
        let mut context = DeliveryContext::new(self.inner.storage(), dirty, message.now);
        published.add(group.deliver(message, &mut context));
        effort.spend(Effort::DELIVERY);
        effort.spend_each(Effort::MEMBER, context.visited);
    }

    /// Every receiver has the message.
    #[inline(always)]
    fn conclude(&self, message: &Message<'_>, published: Published) -> Published {
        self.hurry(message);
        if published.matched == 0 {
            count(|c| c.no_match.add(1));
        }
        published
    }
}

/// Counts the devices that get nothing.
#[cold]
fn count_blocked(list: &MatchList) {
    let blocked = list.targets.iter().filter(|matched| !matched.stream).count() + list.groups.len();
    count(|c| c.non_broker_blocked.add(blocked as u64));
}

impl Spread {
    /// Delivers the message to more receivers; returns the result once all have it.
    pub fn go_on(&mut self, turn: &mut Turn) -> Option<Published> {
        // If a receiver panics, the rest is lost, as it would be in one go.
        self.done = true;
        let mut message = self.message.borrow().with_commit(self.commit.take());
        (message.durability, message.unit) = (self.durability, self.unit);
        let broker = &self.broker;
        let stores = broker.stores().filter(|_| self.unit);
        let unit = stores.map(|stores| Unit::new(&message, &*stores.queues));
        broker.hand_out_some(&self.list, &message, &mut self.way, &mut turn.dirty, &mut turn.effort);
        if let Some(unit) = unit {
            unit.keep_open();
        }
        self.commit = message.issued().cloned();
        self.done = self.way.served >= self.list.len();
        self.done.then(|| broker.conclude(&message, self.way.published))
    }

    /// Returns the commit that must be on disk before the message is acknowledged, if there is one. The caller ends its holder's
    /// part.
    pub fn commit(&self) -> Option<&Arc<Commit>> {
        self.commit.as_ref()
    }

    /// The same, if it is a unit, with a part for the operation that closes it, which the caller submits.
    pub fn unit(&self) -> Option<Arc<Commit>> {
        self.commit.as_ref().filter(|commit| commit.is_unit()).map(Commit::part)
    }
}

impl Drop for Spread {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        let mut turn = Turn::default();
        while self.go_on(&mut turn).is_none() {
            turn.flush();
            turn.effort.renew();
        }
        turn.flush();
        let Some(commit) = self.commit.take() else { return };
        if let Some(stores) = self.broker.stores().filter(|_| self.unit) {
            let mut message = self.message.borrow().with_commit(Some(Arc::clone(&commit)));
            message.unit = true;
            drop(Unit::new(&message, &*stores.queues));
        }
        commit.done();
    }
}

impl Published {
    fn add(&mut self, outcome: Outcome) {
        self.matched += u32::from(outcome != Outcome::Ignored);
        match outcome {
            Outcome::Ignored => {}
            Outcome::Sent => self.sent += 1,
            Outcome::Queued => self.queued += 1,
            Outcome::Dropped(reason) => {
                self.dropped += 1;
                self.reason = Some(reason);
            }
        }
    }
}
