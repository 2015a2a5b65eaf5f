//! Deliveries that wait: for the in-flight window, for room in the out-buffer, or for a connection.

use std::{collections::VecDeque, sync::Arc};

use crate::types::{QoS, SharedMessage};

/// One message on its way to one session.
#[derive(Debug, Clone)]
pub(super) struct Delivery {
    pub(super) message: Arc<SharedMessage>,
    pub(super) ids: Option<Box<[u32]>>,
    pub(super) group: u32,
    pub(super) qos: QoS,
    pub(super) retain: bool,
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
