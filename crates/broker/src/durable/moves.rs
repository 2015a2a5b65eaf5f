//! Messages on their way from one durable queue to another. The store writes both ends in one step or refuses them
//! together; what it refuses is offered again about once a second.

use std::{collections::BTreeSet, sync::Arc};

use gateway_core::{Commit, CommitRefused, QueueId, Timestamp, Yielded};
use store::StoreHealth;

use super::Durable;
use crate::{Broker, BrokerInner, MemoryKind, Turn};

/// Moves that the store refused, for the next tick. The list is bounded: groups are limited in number, and messages that members
/// gave back were in memory already and count against the budget.
#[derive(Default)]
pub(crate) struct Stalled {
    groups: BTreeSet<u32>,
    /// Groups whose queue could not be read.
    unread: BTreeSet<u32>,
    yielded: Vec<(Yielded, QueueId)>,
}

impl Durable {
    /// Ends the caller's own part of the commit of a move. If the store refuses it both queues are as they were before:
    /// then `offer_again` puts the message where the next tick finds it.
    pub(crate) fn watch(
        &self,
        commit: &Arc<Commit>,
        offer_again: impl FnOnce(&BrokerInner, &Self) + Send + 'static,
    ) {
        let inner = self.inner.clone();
        commit.then(move |result| {
            if result == Err(CommitRefused)
                && let Some(inner) = inner.upgrade()
                && let Some(durable) = &inner.durable
            {
                offer_again(&inner, durable);
            }
        });
        commit.done();
    }

    /// Returns whether the store is sure to refuse a message now. While it fails, one attempt a second is let through.
    pub(crate) fn is_stalled(&self) -> bool {
        self.queues().health() != StoreHealth::Sound && !self.queues().accepts()
    }

    /// Has the group's members told at the next tick that messages are waiting for them.
    pub(crate) fn stall(&self, group: u32) {
        self.stalled.lock().groups.insert(group);
    }

    /// Keeps a message that a member gave back and that could not be moved out of its durable queue `from`, if it was in one.
    pub(crate) fn stall_yielded(&self, inner: &BrokerInner, mut yielded: Yielded, from: QueueId) {
        // The receipt already knows what became of it.
        yielded.message = yielded.message.without_receipt();
        inner.account.force(MemoryKind::Queued, yielded.message.cost());
        self.stalled.lock().yielded.push((yielded, from));
    }

    /// The group's queue could not be read; the next tick tries again.
    pub(crate) fn stall_reading(&self, group: u32) {
        self.stalled.lock().unread.insert(group);
    }
}

impl Broker {
    /// Offers again what the store refused.
    pub(crate) fn retry_stalled(&self, now: Timestamp, turn: &mut Turn) {
        let inner = &*self.inner;
        let Some(durable) = &inner.durable else { return };
        let Stalled { mut groups, unread, yielded } = {
            let mut stalled = durable.stalled.lock();
            let wait = !stalled.yielded.is_empty() && durable.is_stalled();
            let mut taken = std::mem::take(&mut *stalled);
            if wait {
                std::mem::swap(&mut stalled.yielded, &mut taken.yielded);
            }
            taken
        };
        for (yielded, from) in yielded {
            inner.account.release(MemoryKind::Queued, yielded.message.cost());
            // The message is still on disk where it was, but a session never rereads a message that it gave away.
            self.redeliver(vec![yielded], from, now, turn);
        }
        for group in &unread {
            if let Some(group) = inner.index.group(*group) {
                group.load_failed(&inner.account);
            }
        }
        groups.extend(unread);
        for group in groups {
            if let Some(group) = inner.index.group(group) {
                group.nudge();
            }
        }
    }
}
