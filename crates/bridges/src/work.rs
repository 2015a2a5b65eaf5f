//! Work that a bridge has in hand: messages of its group, and the fate of each.

use std::{sync::Arc, time::Duration};

use gateway_core::{SharedMessage, Timestamp};
use groups::{Delivery, IdRange, Ranges};

use super::status::BridgeRefusal;

/// Fate of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fate {
    /// Nothing yet.
    Open,
    /// The other side has it.
    Done,
    /// Refused for good; why, in a word and in words.
    Refused(BridgeRefusal, String),
    /// Its end is told to the group.
    Settled,
}

/// One message in hand.
#[derive(Debug)]
pub(super) struct BridgeItem {
    pub(super) delivery: Delivery,
    pub(super) fate: Fate,
    /// Attempts of this bridge that failed while it was being sent.
    failed: u32,
}

/// A message that is refused, with all that is told about it.
pub(super) struct RefusedMessage {
    pub(super) delivery: Ranges,
    pub(super) topic: Arc<str>,
    pub(super) refusal: BridgeRefusal,
    pub(super) why: String,
    /// Attempts to send it, this last one with them.
    pub(super) attempts: u32,
}

impl BridgeItem {
    pub(super) fn message(&self) -> &Arc<SharedMessage> {
        &self.delivery.record.message
    }

    /// Bytes of the message, with all that belongs to it.
    pub(super) fn cost(&self) -> usize {
        self.message().borrow().cost()
    }

    /// Names the message for ever, as the API does: the log, the partition and the place in it.
    pub(super) fn id(&self, log: u64) -> String {
        format!("{log:016x}-{:02x}-{:016x}", self.delivery.partition.0, self.delivery.record.offset)
    }

    /// The number of the attempt that is or comes next: those of the group, and those of this bridge that failed.
    pub(super) fn attempt(&self) -> u32 {
        self.delivery.attempt.saturating_add(self.failed)
    }

    /// Returns whether the two messages must arrive in their order.
    pub(super) fn is_in_order_with(&self, other: &Self) -> bool {
        match (&self.message().client_id, &other.message().client_id) {
            (Some(one), Some(another)) => one == another,
            (None, None) => self.message().topic == other.message().topic,
            _ => false,
        }
    }

    /// Returns the time for which the message is still worth anything; `None` for ever.
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
    /// Takes more messages in hand, behind those that are, and forgets those that are settled: places change.
    pub(super) fn add(&mut self, deliveries: Vec<Delivery>) {
        self.items.retain(|item| item.fate != Fate::Settled);
        for delivery in deliveries {
            let item = BridgeItem { delivery, fate: Fate::Open, failed: 0 };
            self.bytes += item.cost();
            self.items.push(item);
        }
    }

    /// Messages whose end is not told to the group.
    pub(super) fn len(&self) -> usize {
        self.items.iter().filter(|item| item.fate != Fate::Settled).count()
    }

    /// Bytes of these.
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

    pub(super) fn is_open(&self, at: usize) -> bool {
        self.items.get(at).is_some_and(|item| item.fate == Fate::Open)
    }

    pub(super) fn set(&mut self, at: usize, fate: Fate) {
        self.items[at].fate = fate;
    }

    /// Counts a failed attempt for those of these messages whose fate is open.
    pub(super) fn attempt_failed(&mut self, sent: &[usize]) {
        for &at in sent {
            if let Some(item) = self.items.get_mut(at)
                && item.fate == Fate::Open
            {
                item.failed = item.failed.saturating_add(1);
            }
        }
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
            self.bytes = self.bytes.saturating_sub(item.cost());
            item.fate = Fate::Settled;
        }
        (all, count, bytes)
    }

    /// Takes those that are refused.
    pub(super) fn take_refused(&mut self) -> Vec<RefusedMessage> {
        let mut all = Vec::new();
        for item in &mut self.items {
            if let Fate::Refused(refusal, why) = &mut item.fate {
                let id = item.delivery.id;
                let (refusal, why) = (*refusal, std::mem::take(why));
                all.push(RefusedMessage {
                    delivery: Ranges::of([IdRange { first: id, last: id }]),
                    topic: Arc::clone(&item.message().topic),
                    refusal,
                    why,
                    attempts: item.attempt(),
                });
                self.bytes = self.bytes.saturating_sub(item.cost());
                item.fate = Fate::Settled;
            }
        }
        all
    }
}

fn ranges<'a>(items: impl Iterator<Item = &'a BridgeItem>) -> Ranges {
    Ranges::of(items.map(|item| IdRange { first: item.delivery.id, last: item.delivery.id }))
}
