//! Messages that members of shared groups gave back, and moves that the store refused.

use std::sync::Arc;

use gateway_core::{DropReason, Outcome, QueueId, QueueOp, Timestamp, Unit, Yielded};

use super::Index;
use crate::{
    MemoryKind, Target,
    durable::{Stalled, Storage},
    shared::{DeliveryContext, SharedGroup},
};

/// Gives messages of shared groups to other members.
#[derive(Clone, Copy)]
pub(crate) struct Redelivery<'a> {
    pub(crate) index: &'a Index,
    pub(crate) storage: Storage<'a>,
    pub(crate) now: Timestamp,
}

impl Redelivery<'_> {
    /// Gives a shared group's messages to other members, or to the group's queue [MQTT-4.8.2-4].
    /// `from` is the durable queue that they were in: they leave it once they are submitted to another.
    pub(crate) fn redeliver(self, messages: Vec<Yielded>, from: QueueId, dirty: &mut Vec<Arc<dyn Target>>) {
        for yielded in messages {
            let Yielded { group, message, .. } = &yielded;
            let expired = message.is_expired(self.now);
            match self.index.group(*group).filter(|_| !expired) {
                Some(group) => self.move_to(&group, yielded, from, dirty),
                None => {
                    let reason = if expired { DropReason::Expired } else { DropReason::SessionEnded };
                    reason.count(1);
                    if let Some(receipt) = &message.receipt {
                        receipt.update(|state| state.given_up(reason));
                    }
                    self.remove(&yielded, from);
                }
            }
        }
    }

    /// Gives a message to another member of its group, from one queue to the other in one step. Otherwise a crash or a refusal
    /// could leave it in neither, or QoS 2 in both.
    fn move_to(self, group: &SharedGroup, yielded: Yielded, from: QueueId, dirty: &mut Vec<Arc<dyn Target>>) {
        let Storage { durable, .. } = self.storage;
        let Yielded { message, place, .. } = &yielded;
        let moved = place.zip(durable);
        let mut borrowed = message.borrow_at(self.now);
        borrowed.unit = moved.is_some();
        let unit = moved.map(|(_, durable)| Unit::new(&borrowed, durable.state()));
        let mut context = DeliveryContext::new(self.storage, dirty, self.now);
        let outcome = group.deliver(&borrowed, &mut context);
        let seq = place.unwrap_or_default();
        let close = |unit| QueueOp::Remove { queue: from, seq, unit: Some(unit) };
        if !unit.is_some_and(|unit| unit.close(close)) {
            self.remove(&yielded, from);
        }
        // The publisher knows that it was accepted; only a drop is news.
        if let Outcome::Dropped(reason) = outcome
            && let Some(receipt) = &message.receipt
        {
            receipt.update(|state| state.given_up(reason));
        }
        let commit = borrowed.issued().cloned();
        drop(borrowed);
        if let (Some(durable), Some(commit)) = (durable, commit) {
            durable.watch(&commit, move |answers| answers.take_refused_yielded(yielded, from));
        }
    }

    /// Removes a message from the durable queue that it was in, if it was in one.
    fn remove(self, yielded: &Yielded, queue: QueueId) {
        if let Some((seq, durable)) = yielded.place.zip(self.storage.durable) {
            durable.state().submit(QueueOp::Remove { queue, seq, unit: None });
        }
    }

    /// Offers again what the store refused.
    pub(crate) fn retry(self, dirty: &mut Vec<Arc<dyn Target>>) {
        let Storage { account, durable } = self.storage;
        let Some(durable) = durable else { return };
        let Stalled { mut groups, unread, yielded } = durable.take_stalled();
        for (yielded, from) in yielded {
            account.release(MemoryKind::Queued, yielded.message.cost());
            // The message is still on disk where it was, but a session never rereads a message that it gave away.
            self.redeliver(vec![yielded], from, dirty);
        }
        for group in &unread {
            if let Some(group) = self.index.group(*group) {
                group.load_failed(account);
            }
        }
        groups.extend(unread);
        for group in groups {
            if let Some(group) = self.index.group(group) {
                group.nudge();
            }
        }
    }
}
