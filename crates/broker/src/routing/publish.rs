//! Routing of one message: retained store, latest value, history, subscribers.

use gateway_core::{
    DropReason, Effort, Message, NoRoom, Offer, OriginKind, Outcome, QoS, QueueId, QueueOp, Timestamp, Unit,
    Yielded, metrics::count, warn_limited,
};
use store::StoreHealth;
use tracing::field::display;

use crate::{
    Broker, BrokerInner, Delivered, DirectOutcome, Offline, Published, QuotaHolders, RetainError, Routing,
    Shortage, Turn, drops::drop_message, shared::DeliveryContext,
};

/// Publishing.
impl Broker {
    /// Routes one message by MQTT rules: retained store, latest value and history (devices only), subscribers. What a device
    /// says to a topic that a part of the gateway owns goes to that part alone ([`crate::Reserved`]).
    ///
    /// The caller has validated topic and properties. Refused as a whole only when a QoS 1 or 2 message finds the
    /// memory budget used up; QoS 0 is left to each target. The result counts each delivery as its target took it; what
    /// becomes of it later the target reports to the message's receipt.
    pub fn publish(&self, message: &Message<'_>, turn: &mut Turn) -> Published {
        match self.publish_some(message, turn) {
            Routing::Done(published) => published,
            Routing::More(mut spread) => loop {
                turn.effort.renew();
                if let Some(published) = spread.go_on(turn) {
                    return published;
                }
            },
        }
    }

    /// As [`Self::publish`], but serves only as many receivers as the turn's effort affords. The caller continues with
    /// the rest after it has let the other tasks of its thread run.
    pub fn publish_some(&self, message: &Message<'_>, turn: &mut Turn) -> Routing {
        self.publish_of(message, None, turn)
    }

    /// As [`Self::publish_some`]; if retained, it counts for `quota_holders`. `None` are those of the session in whose name it
    /// is.
    #[inline(always)]
    pub(crate) fn publish_of(
        &self,
        message: &Message<'_>,
        quota_holders: Option<QuotaHolders>,
        turn: &mut Turn,
    ) -> Routing {
        let reserved = self.inner.reserved.as_ref();
        if let Some(taken) = reserved.and_then(|parts| parts.take(message, self, turn)) {
            return Routing::Done(taken);
        }
        match self.admit(message, quota_holders, turn) {
            Ok(withheld) => self.route_some(message, withheld, turn),
            Err(refusal) => Routing::Done(Published { refused: Some(refusal), ..Published::default() }),
        }
    }

    /// Everything before the receivers. Returns whether only streams get the message, or why it is refused.
    #[inline(always)]
    fn admit(
        &self,
        message: &Message<'_>,
        quota_holders: Option<QuotaHolders>,
        turn: &mut Turn,
    ) -> Result<bool, Shortage> {
        if message.qos != QoS::AtMostOnce
            && let Some(refusal) = self.refusal(message, |broker| {
                broker.admit_to_store(message, turn)?;
                let BrokerInner { log, index, sessions, .. } = &*broker.inner;
                log.as_ref().map_or(Ok(()), |log| log.admit_matched(message, index, &sessions.slots, turn))
            })
        {
            return Err(refusal);
        }
        let from_device = message.origin.kind == OriginKind::Device;
        let withheld = self.inner.non_broker && from_device;
        if message.retain && !withheld {
            turn.effort.spend(Effort::RETAINED);
            let quota_holders = match quota_holders {
                Some(quota_holders) => quota_holders,
                None if self.inner.quota_holders.counts_retained() => self.publisher(message),
                None => QuotaHolders::default(),
            };
            match self.inner.retained.set(message, &quota_holders) {
                Err(RetainError::Quota) => {
                    count(|c| c.retained_refused.add(1));
                    self.tell_not_retained(message);
                }
                Err(RetainError::Memory) => {
                    count(|c| c.retained_memory.add(1));
                    self.tell_not_retained(message);
                }
                Ok(_) | Err(RetainError::Unavailable | RetainError::QuotaHolder) => {}
            }
        }
        if from_device && let Some(latest) = &self.inner.latest {
            latest.record(message, &mut turn.effort);
        }
        if from_device && let Some(history) = &self.inner.history {
            history.record(message, &mut turn.effort);
        }
        Ok(withheld)
    }

    /// Tells that a message was delivered and not stored: its publisher is not, since it was accepted.
    #[cold]
    fn tell_not_retained(&self, message: &Message<'_>) {
        let client_id = message.origin.client_id.map(display);
        let limit = self.inner.retained.refused().map(|(_, key)| key);
        warn_limited!(
            client_id,
            topic = message.topic,
            limit,
            "retained message is not stored, a limit is reached"
        );
    }

    /// The quota holders of the session in whose name a message is.
    #[cold]
    fn publisher(&self, message: &Message<'_>) -> QuotaHolders {
        let slot = message.origin.slot;
        let session = match slot {
            0 => None,
            slot => self.inner.sessions.slots.session(slot),
        };
        session.map(|session| session.core().state.lock().quota_holders()).unwrap_or_default()
    }

    /// Hands one message to one device, subscribed or not. It never sets a retained message.
    pub fn publish_to_device(
        &self,
        device: &str,
        message: &Message<'_>,
        offline: Offline,
        turn: &mut Turn,
    ) -> DirectOutcome {
        let Some(session) = self.inner.sessions.find(device) else { return DirectOutcome::UnknownDevice };
        if offline == Offline::Fail && !session.is_online() {
            return DirectOutcome::DeviceOffline;
        }
        let admit = |broker: &Self| {
            let durable = broker.inner.durable.as_ref().filter(|_| session.is_durable());
            durable.map_or(Ok(()), |durable| durable.queues().admit(message))
        };
        if message.qos != QoS::AtMostOnce
            && let Some(refusal) = self.refusal(message, admit)
        {
            return DirectOutcome::Refused(refusal);
        }
        let offer = Offer {
            qos: QoS::ExactlyOnce,
            retain: false,
            ids: &[],
            group: 0,
            group_queue: QueueId::NONE,
            queue_offline: offline == Offline::Queue,
        };
        let Delivered { outcome, flush } = session.deliver(message, offer);
        if flush {
            turn.dirty.push(session);
        }
        self.hurry(message);
        if offline == Offline::Fail && outcome == Outcome::Dropped(DropReason::Offline) {
            return DirectOutcome::DeviceOffline;
        }
        DirectOutcome::Done(outcome)
    }

    /// Tells whoever waits for messages to a device that have expired in memory: they are dropped when it is their turn.
    pub fn tell_expired(&self, device: &str) {
        if let Some(session) = self.inner.sessions.find(device) {
            session.tell_expired();
        }
    }

    /// Gives a shared group's messages to other members, or to the group's queue [MQTT-4.8.2-4].
    /// `from` is the durable queue that they were in: they leave it once they are submitted to another.
    pub(crate) fn redeliver(&self, messages: Vec<Yielded>, from: QueueId, now: Timestamp, turn: &mut Turn) {
        let durable = self.inner.durable.as_ref();
        for yielded in messages {
            let Yielded { group, message, place } = &yielded;
            let moved = place.zip(durable);
            let remove = || {
                if let Some((seq, durable)) = moved {
                    durable.queues().submit(QueueOp::Remove { queue: from, seq, unit: None });
                }
            };
            let group = self.inner.index.group(*group);
            let Some(group) = group.filter(|_| !message.is_expired(now)) else {
                let expired = message.is_expired(now);
                let reason = if expired { DropReason::Expired } else { DropReason::SessionEnded };
                drop_message(&message.receipt, reason);
                remove();
                continue;
            };
            let mut borrowed = message.borrow_at(now);
            // From one queue to another in one step. Otherwise a crash or a refusal could leave it in neither, or QoS 2
            // in both.
            borrowed.unit = moved.is_some();
            let unit = moved.map(|(_, durable)| Unit::new(&borrowed, durable.queues()));
            let mut context = DeliveryContext::new(self.inner.storage(), &mut turn.dirty, now);
            let outcome = group.deliver(&borrowed, &mut context);
            let seq = place.unwrap_or_default();
            let close = |unit| QueueOp::Remove { queue: from, seq, unit: Some(unit) };
            if !unit.is_some_and(|unit| unit.close(close)) {
                remove();
            }
            // The publisher knows that it was accepted; only a drop is news.
            if let Outcome::Dropped(reason) = outcome
                && let Some(receipt) = &message.receipt
            {
                receipt.update(|state| {
                    state.dropped += 1;
                    state.reason = Some(reason);
                });
            }
            let commit = borrowed.issued().cloned();
            drop(borrowed);
            if let (Some(durable), Some(commit)) = (durable, commit) {
                durable.watch(&commit, move |answers| answers.take_refused_yielded(yielded, from));
            }
        }
    }

    /// Asks the store to hurry now that a message is routed, if its sender waits for the disk. A unit hurries when it
    /// is closed.
    pub(crate) fn hurry(&self, message: &Message<'_>) {
        if let Some(durable) = &self.inner.durable
            && message.issued().is_some_and(|commit| !commit.is_unit())
        {
            durable.queues().hurry();
        }
    }

    /// Why a QoS 1 or 2 message must be refused before anybody gets it, if it must; counted.
    fn refusal(
        &self,
        message: &Message<'_>,
        admit: impl FnOnce(&Self) -> Result<(), NoRoom>,
    ) -> Option<Shortage> {
        if !self.inner.account.has_room(message.payload.len() + message.topic.len()) {
            count(|c| c.refused_memory.add(1));
            return Some(Shortage::Memory);
        }
        let Err(reason) = admit(self) else { return None };
        count(|c| match reason {
            NoRoom::Full | NoRoom::QosZero => c.refused_store.add(1),
            NoRoom::Share => c.refused_share.add(1),
        });
        Some(Shortage::Store)
    }

    /// Refuses a message that matches a session which keeps it on disk while the store does not take it: then nobody gets
    /// it.
    fn admit_to_store(&self, message: &Message<'_>, turn: &mut Turn) -> Result<(), NoRoom> {
        let Some(durable) = &self.inner.durable else { return Ok(()) };
        let queues = durable.queues();
        if queues.health() == StoreHealth::Sound && queues.admit(message).is_ok() {
            return Ok(());
        }
        let Turn { matches, effort, .. } = turn;
        let list = matches.find(&self.inner.index, &self.inner.sessions.slots, message.topic, effort);
        let concerned = list.targets.iter().any(|matched| matched.target.is_durable())
            || list.groups.iter().any(|group| group.is_durable());
        // Asked last: while the disk fails only a few messages are let through to try it, and those must really be
        // written.
        if concerned { queues.admit(message) } else { Ok(()) }
    }
}
