//! Deliveries that wait: for the in-flight window, for room in the out-buffer, or for a connection.

use std::{collections::VecDeque, sync::Arc};

use crate::types::{QoS, Receipt, SharedMessage};

/// One message on its way to one session.
#[derive(Debug, Clone)]
pub(super) struct Delivery {
    pub(super) message: Arc<SharedMessage>,
    pub(super) ids: Option<Box<[u32]>>,
    pub(super) group: u32,
    pub(super) qos: QoS,
    pub(super) retain: bool,
    pub(super) awaited: Awaited,
}

/// Whether a publisher waits for a delivery, so that each delivery is reported once whatever happens to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Awaited {
    /// Nobody waits: no receipt, or queued for an offline session.
    No,
    /// Not yet reported as sent.
    Unsent,
    /// Reported as sent.
    Sent,
}

impl Delivery {
    /// Where to report, if somebody waits for this delivery.
    pub(super) fn receipt(&self) -> Option<&Arc<Receipt>> {
        self.message.receipt.as_ref().filter(|_| self.awaited != Awaited::No)
    }

    /// The message for another member of its shared group: with the receipt only if somebody waits, and with
    /// the report of its sending taken back.
    pub(super) fn into_shared(self) -> (u32, Arc<SharedMessage>) {
        if self.awaited == Awaited::Sent
            && let Some(receipt) = &self.message.receipt
        {
            receipt.update(|state| state.sent -= 1);
        }
        let message = match self.awaited {
            Awaited::No => self.message.without_receipt(),
            Awaited::Unsent | Awaited::Sent => self.message,
        };
        (self.group, message)
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

    /// Takes out what `wanted` chooses, in order.
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

    fn forget(&mut self, delivery: &Delivery) {
        self.bytes -= delivery.message.cost();
        self.qos0 -= usize::from(delivery.qos == QoS::AtMostOnce);
    }
}
