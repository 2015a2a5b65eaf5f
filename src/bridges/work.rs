//! What a bridge has in hand: messages of its group, and what became of each.

use std::{sync::Arc, time::Duration};

use gateway_core::{SharedMessage, Timestamp};
use groups::{Delivery, IdRange, Ranges};

/// What became of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fate {
    /// Nothing yet.
    Open,
    /// The other side has it.
    Done,
    /// It will never be taken, and why.
    Refused(String),
    /// Its end is told to the group.
    Settled,
}

/// One message in hand.
#[derive(Debug)]
pub(super) struct BridgeItem {
    pub(super) delivery: Delivery,
    pub(super) fate: Fate,
}

impl BridgeItem {
    pub(super) fn message(&self) -> &Arc<SharedMessage> {
        &self.delivery.record.message
    }

    /// Names the message for ever, as the API does: the log, the partition and the place in it.
    pub(super) fn id(&self, log: u64) -> String {
        format!("{log:016x}-{:02x}-{:016x}", self.delivery.partition.0, self.delivery.record.offset)
    }

    /// How long it is still worth anything; `None` for ever.
    pub(super) fn left(&self, now: Timestamp) -> Option<Duration> {
        let expires = self.message().expires?;
        Some(Duration::from_millis(expires.0.saturating_sub(now.0)))
    }
}

/// Messages in the order in which they came, which is that of each device.
#[derive(Debug, Default)]
pub(super) struct BridgeBatch {
    items: Vec<BridgeItem>,
    bytes: usize,
}

impl BridgeBatch {
    pub(super) fn add(&mut self, deliveries: Vec<Delivery>) {
        for delivery in deliveries {
            self.bytes += delivery.record.message.borrow().cost();
            self.items.push(BridgeItem { delivery, fate: Fate::Open });
        }
    }

    pub(super) fn len(&self) -> usize {
        self.items.len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn item(&self, at: usize) -> &BridgeItem {
        &self.items[at]
    }

    /// The places of what is open, in order.
    pub(super) fn open(&self) -> Vec<usize> {
        let items = self.items.iter().enumerate();
        items.filter(|(_, item)| item.fate == Fate::Open).map(|(at, _)| at).collect()
    }

    pub(super) fn set(&mut self, at: usize, fate: Fate) {
        self.items[at].fate = fate;
    }

    /// Settles what has expired; returns how many.
    pub(super) fn expire(&mut self, now: Timestamp) -> usize {
        let mut count = 0;
        for item in &mut self.items {
            if item.fate == Fate::Open && item.left(now).is_some_and(|left| left.is_zero()) {
                item.fate = Fate::Done;
                count += 1;
            }
        }
        count
    }

    /// Deliveries that are not settled.
    pub(super) fn held(&self) -> Ranges {
        ranges(self.items.iter().filter(|item| item.fate != Fate::Settled))
    }

    /// Takes those that are done: their deliveries, how many, and the bytes of their payloads.
    pub(super) fn take_done(&mut self) -> (Ranges, usize, usize) {
        let done = |item: &&BridgeItem| item.fate == Fate::Done;
        let all = ranges(self.items.iter().filter(done));
        let count = self.items.iter().filter(done).count();
        let bytes = self.items.iter().filter(done).map(|item| item.message().payload.len()).sum();
        for item in self.items.iter_mut().filter(|item| item.fate == Fate::Done) {
            item.fate = Fate::Settled;
        }
        (all, count, bytes)
    }

    /// Takes those that are refused: the delivery of each, and why.
    pub(super) fn take_refused(&mut self) -> Vec<(Ranges, String)> {
        let mut all = Vec::new();
        for item in &mut self.items {
            if let Fate::Refused(why) = &mut item.fate {
                let id = item.delivery.id;
                all.push((Ranges::of([IdRange { first: id, last: id }]), std::mem::take(why)));
                item.fate = Fate::Settled;
            }
        }
        all
    }
}

fn ranges<'a>(items: impl Iterator<Item = &'a BridgeItem>) -> Ranges {
    Ranges::of(items.map(|item| IdRange { first: item.delivery.id, last: item.delivery.id }))
}
