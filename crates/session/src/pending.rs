//! Deliveries that wait: for the in-flight window, for room in the out-buffer, or for a connection.

use std::{collections::VecDeque, sync::Arc};

use gateway_core::{Message, Offer, QoS, QueueId, Receipt, SharedMessage, Timestamp, Yielded};

use super::durable::OnDisk;

/// One message on its way to one session.
#[derive(Debug, Clone)]
pub(super) struct Delivery {
    pub(super) message: Arc<SharedMessage>,
    pub(super) ids: Option<Box<[u32]>>,
    /// Its place in the session. Without a store it gets one when it is sent.
    pub(super) place: u64,
    pub(super) group: u32,
    pub(super) qos: QoS,
    pub(super) retain: bool,
    pub(super) awaited: Awaited,
    /// When it will have waited too long, if it waited without a connection.
    pub(super) until: Option<Timestamp>,
    pub(super) on_disk: OnDisk,
}

/// What a waiting publisher was told of a delivery, so that each delivery is reported exactly once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Awaited {
    /// Nobody waits: there is no receipt, or the delivery was queued for an offline session.
    No,
    /// Not yet reported as sent.
    Unsent,
    /// Reported as sent.
    Sent,
}

impl Delivery {
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

    /// How it was offered.
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

    /// Whether it must not be sent any more.
    pub(super) fn is_expired(&self, now: Timestamp) -> bool {
        self.message.is_expired(now) || self.until.is_some_and(|at| at <= now)
    }

    /// Where to report, if somebody waits for this delivery.
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
pub(super) struct Pending {
    queue: VecDeque<Delivery>,
    bytes: usize,
    qos0: usize,
}

impl Pending {
    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether QoS 0 messages wait (a new one must then wait behind them [MQTT-4.6.0-5]).
    pub(super) fn has_qos0(&self) -> bool {
        self.qos0 > 0
    }

    /// Whether QoS 1 or 2 messages wait.
    pub(super) fn has_acknowledged(&self) -> bool {
        self.queue.len() > self.qos0
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(super) fn front(&self) -> Option<&Delivery> {
        self.queue.front()
    }

    pub(super) fn push(&mut self, delivery: Delivery) {
        self.bytes += delivery.message.cost();
        self.qos0 += usize::from(delivery.qos == QoS::AtMostOnce);
        self.queue.push_back(delivery);
    }

    pub(super) fn pop(&mut self) -> Option<Delivery> {
        let delivery = self.queue.pop_front()?;
        self.forget(&delivery);
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
    pub(super) fn extract(&mut self, wanted: impl Fn(&Delivery) -> bool) -> Vec<Delivery> {
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
        taken
    }

    /// Takes out, in order, what is or may become durable behind the last delivery of a shared group.
    pub(super) fn take_end(&mut self) -> Vec<Delivery> {
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
        taken
    }

    fn forget(&mut self, delivery: &Delivery) {
        self.bytes -= delivery.message.cost();
        self.qos0 -= usize::from(delivery.qos == QoS::AtMostOnce);
    }
}
