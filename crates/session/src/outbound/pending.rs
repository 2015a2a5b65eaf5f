//! Deliveries that wait: for the in-flight window, for room in the out-buffer, or for a connection.

use std::{
    collections::{BTreeSet, VecDeque},
    sync::Arc,
};

use gateway_core::{
    Message, Offer, QoS, QueueEntry, QueueId, QueueOp, Receipt, SharedMessage, Timestamp, Yielded,
};

use crate::{Disk, Env};

/// One message on its way to one session.
#[derive(Debug, Clone)]
pub(super) struct PendingDelivery {
    pub(super) message: Arc<SharedMessage>,
    pub(super) ids: Option<Box<[u32]>>,
    /// Its place in the session. Without a store it gets one when it is sent.
    pub(super) place: u64,
    pub(super) group: u32,
    pub(super) qos: QoS,
    pub(super) retain: bool,
    pub(super) awaited: Awaited,
    /// Time at which the message will have waited too long, if it waited without a connection.
    pub(super) until: Option<Timestamp>,
    pub(super) on_disk: OnDisk,
}

/// Reports about a delivery that its waiting publisher has had so far, so that each delivery is reported exactly once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Awaited {
    /// Nobody waits: there is no receipt, or the delivery was queued for an offline session.
    No,
    /// Not yet reported as sent.
    Unsent,
    /// Reported as sent.
    Sent,
}

/// State of a delivery on disk.
#[derive(Debug, Clone)]
pub(super) enum OnDisk {
    /// Nowhere.
    No,
    /// On its way to the disk, or there.
    Submitted(Arc<QueueEntry>),
    /// On disk.
    Stored,
}

impl OnDisk {
    /// The session is over: what is not written yet need not be written.
    pub(super) fn settle(&self) {
        if let Self::Submitted(entry) = self {
            entry.settle();
        }
    }

    /// The delivery of `place` is over.
    pub(super) fn remove(&self, place: u64, env: &Env<'_>) {
        let written = match self {
            Self::No => false,
            Self::Submitted(entry) => !entry.settle(),
            Self::Stored => true,
        };
        if written && let Some(Disk { journal, queue }) = env.disk {
            journal.submit(QueueOp::Remove { queue, seq: place, unit: None });
        }
    }
}

impl PendingDelivery {
    /// Keeps an offer, so far in memory only.
    pub(super) fn keep(message: &Message<'_>, qos: QoS, offer: Offer<'_>) -> Self {
        Self {
            message: Arc::clone(message.share()),
            ids: if offer.ids.is_empty() { None } else { Some(offer.ids.into()) },
            place: 0,
            group: offer.group,
            qos,
            retain: offer.retain,
            awaited: if message.receipt.is_some() { Awaited::Unsent } else { Awaited::No },
            until: None,
            on_disk: OnDisk::No,
        }
    }

    /// Returns the offer that the delivery came with.
    pub(super) fn offer(&self) -> Offer<'_> {
        Offer {
            qos: self.qos,
            retain: self.retain,
            ids: self.ids.as_deref().unwrap_or_default(),
            group: self.group,
            group_queue: QueueId::NONE,
            queue_offline: true,
        }
    }

    /// Returns whether the message must no longer be sent.
    pub(super) fn is_expired(&self, now: Timestamp) -> bool {
        self.message.is_expired(now) || self.until.is_some_and(|at| at <= now)
    }

    /// Returns the time at which to tell a waiting publisher that the message has expired.
    fn tells_expiry(&self) -> Option<Timestamp> {
        self.receipt().and(self.message.expires)
    }

    /// Returns the receipt, if a publisher waits for this delivery.
    pub(super) fn receipt(&self) -> Option<&Arc<Receipt>> {
        self.message.receipt.as_ref().filter(|_| self.awaited != Awaited::No)
    }

    /// The message for another member of its shared group. It keeps the receipt only if somebody waits, and a report
    /// that it was sent is taken back.
    pub(super) fn into_shared(self, place: u64) -> Yielded {
        if self.awaited == Awaited::Sent
            && let Some(receipt) = &self.message.receipt
        {
            receipt.update(|state| state.sent -= 1);
        }
        let message = match self.awaited {
            Awaited::No => self.message.without_receipt(),
            Awaited::Unsent | Awaited::Sent => self.message,
        };
        let place = (!matches!(self.on_disk, OnDisk::No)).then_some(place);
        Yielded { group: self.group, message, place }
    }
}

/// The queue with its sizes.
#[derive(Debug, Default)]
pub(super) struct PendingQueue {
    queue: VecDeque<PendingDelivery>,
    bytes: usize,
    qos0: usize,
    /// There is one while somebody waits for a delivery that expires.
    due: Option<Box<Due>>,
}

/// Deliveries that expire while a publisher waits for them, so that a glance at the clock need not go through the queue.
#[derive(Debug, Default)]
struct Due {
    /// Expiry of each, and its place: its index plus the number of deliveries that have left the front since this set
    /// was made.
    places: BTreeSet<(Timestamp, u64)>,
    left: u64,
}

impl PendingQueue {
    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns whether QoS 0 messages wait (a new one must then wait behind them [MQTT-4.6.0-5]).
    pub(super) fn has_qos0(&self) -> bool {
        self.qos0 > 0
    }

    /// Returns whether QoS 1 or 2 messages wait.
    pub(super) fn has_acknowledged(&self) -> bool {
        self.queue.len() > self.qos0
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Returns the deliveries from the index `from` on.
    pub(super) fn skip(&self, from: usize) -> impl Iterator<Item = &PendingDelivery> {
        self.queue.range(from.min(self.queue.len())..)
    }

    pub(super) fn front(&self) -> Option<&PendingDelivery> {
        self.queue.front()
    }

    pub(super) fn push(&mut self, delivery: PendingDelivery) {
        self.bytes += delivery.message.cost();
        self.qos0 += usize::from(delivery.qos == QoS::AtMostOnce);
        if let Some(at) = delivery.tells_expiry() {
            let due = self.due.get_or_insert_default();
            due.places.insert((at, due.left + self.queue.len() as u64));
        }
        self.queue.push_back(delivery);
    }

    pub(super) fn pop(&mut self) -> Option<PendingDelivery> {
        let delivery = self.queue.pop_front()?;
        self.forget(&delivery);
        if let Some(due) = &mut self.due {
            if let Some(at) = delivery.tells_expiry() {
                due.places.remove(&(at, due.left));
            }
            due.left += 1;
            self.due.take_if(|due| due.places.is_empty());
        }
        if self.queue.is_empty() && self.queue.capacity() > 64 {
            self.queue = VecDeque::new();
        }
        Some(delivery)
    }

    /// The connection ended: what waits may do so until `until`, if there is a limit.
    pub(super) fn limit(&mut self, until: Option<Timestamp>) {
        if until.is_some() {
            self.queue.iter_mut().for_each(|delivery| delivery.until = delivery.until.or(until));
        }
    }

    /// Takes out what `wanted` selects, in order.
    pub(super) fn extract(&mut self, wanted: impl Fn(&PendingDelivery) -> bool) -> Vec<PendingDelivery> {
        let mut taken = Vec::new();
        let mut kept = VecDeque::with_capacity(self.queue.len());
        for delivery in std::mem::take(&mut self.queue) {
            if wanted(&delivery) {
                self.forget(&delivery);
                taken.push(delivery);
            } else {
                kept.push_back(delivery);
            }
        }
        self.queue = kept;
        self.place_again();
        taken
    }

    /// Calls `tell` for each delivery that has expired and that somebody waits for: after it, nobody does. It stays where it
    /// is until it is its turn to be dropped. Returns how many that were: no other is looked at.
    pub(super) fn tell_expired(&mut self, now: Timestamp, tell: impl Fn(&PendingDelivery)) -> usize {
        let Some(due) = &mut self.due else { return 0 };
        let mut told = 0;
        while let Some((_, place)) = due.places.first().copied().filter(|(at, _)| *at <= now) {
            due.places.pop_first();
            told += 1;
            let index = usize::try_from(place - due.left).unwrap_or(usize::MAX);
            if let Some(delivery) = self.queue.get_mut(index) {
                tell(delivery);
                delivery.awaited = Awaited::No;
            }
        }
        self.due.take_if(|due| due.places.is_empty());
        told
    }

    /// Deliveries have left from between others.
    fn place_again(&mut self) {
        if self.due.take().is_none() {
            return;
        }
        let mut due = Box::<Due>::default();
        let at =
            |(index, delivery): (usize, &PendingDelivery)| Some((delivery.tells_expiry()?, index as u64));
        due.places.extend(self.queue.iter().enumerate().filter_map(at));
        self.due = Some(due).filter(|due| !due.places.is_empty());
    }

    /// Takes out, in order, what is or may become durable after the last delivery of a shared group.
    pub(super) fn take_end(&mut self) -> Vec<PendingDelivery> {
        let keep = self.queue.iter().rposition(|delivery| delivery.group != 0).map_or(0, |last| last + 1);
        let mut taken = Vec::new();
        let end = self.queue.split_off(keep);
        for delivery in end {
            if delivery.qos == QoS::AtMostOnce && matches!(delivery.on_disk, OnDisk::No) {
                self.queue.push_back(delivery);
            } else {
                self.forget(&delivery);
                taken.push(delivery);
            }
        }
        if self.queue.is_empty() {
            self.queue = VecDeque::new();
        }
        self.place_again();
        taken
    }

    fn forget(&mut self, delivery: &PendingDelivery) {
        self.bytes -= delivery.message.cost();
        self.qos0 -= usize::from(delivery.qos == QoS::AtMostOnce);
    }
}

#[cfg(test)]
mod tests {
    use gateway_core::Origin;
    use proptest::prelude::*;

    use super::*;

    fn delivery(expires: Option<u64>, group: u32) -> (PendingDelivery, Arc<Receipt>) {
        let receipt = Arc::<Receipt>::default();
        let mut message = Message::new("t", b"", Timestamp(0), Origin::BACKEND);
        (message.receipt, message.expires) = (Some(&receipt), expires.map(Timestamp));
        let offer = Offer {
            qos: QoS::AtLeastOnce,
            retain: false,
            ids: &[],
            group,
            group_queue: QueueId::NONE,
            queue_offline: true,
        };
        (PendingDelivery::keep(&message, QoS::AtLeastOnce, offer), receipt)
    }

    proptest! {
        /// Deliveries leave the queue from anywhere: the publishers of expired ones are told, and no others.
        #[test]
        fn what_is_told_is_what_has_expired(steps in proptest::collection::vec((0..8_u8, 0..60_u64), 1..80)) {
            let mut pending = PendingQueue::default();
            let mut list: Vec<(Option<u64>, u32, Arc<Receipt>)> = Vec::new();
            let mut clock = 0;
            for (step, argument) in steps {
                match step {
                    0..=3 => {
                        let (expires, group) = ((argument % 4 > 0).then_some(clock + argument), (argument % 3) as u32 / 2);
                        let (delivery, receipt) = delivery(expires, group);
                        pending.push(delivery);
                        list.push((expires, group, receipt));
                    }
                    4 => {
                        let popped = pending.pop().is_some();
                        assert_eq!(popped, !list.is_empty());
                        list.drain(..usize::from(popped));
                    }
                    5 if argument < 20 => {
                        pending.extract(|delivery| delivery.group != 0);
                        list.retain(|(_, group, _)| *group == 0);
                    }
                    6 if argument < 20 => {
                        pending.take_end();
                        let keep = list.iter().rposition(|(_, group, _)| *group != 0).map_or(0, |last| last + 1);
                        list.truncate(keep);
                    }
                    _ => {
                        clock += argument / 4;
                        pending.tell_expired(Timestamp(clock), |delivery| {
                            delivery.receipt().unwrap().update(|state| state.dropped += 1);
                        });
                        for (expires, _, receipt) in &list {
                            let expired = expires.is_some_and(|at| at <= clock);
                            assert_eq!(receipt.state().dropped, u32::from(expired));
                        }
                    }
                }
                assert_eq!(pending.len(), list.len());
                let untold = list.iter().any(|(at, _, receipt)| at.is_some() && receipt.state().dropped == 0);
                assert_eq!(pending.due.is_some(), untold, "nothing is kept that nobody waits for");
            }
        }
    }
}
