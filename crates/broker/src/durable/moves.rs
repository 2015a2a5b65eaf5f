//! Messages on their way from one durable queue to another. The store writes both ends in one step or refuses them
//! together; what it refuses is offered again about once a second.

use std::{collections::BTreeSet, sync::Arc};

use gateway_core::{Commit, DropReason, QueueId, Refused, Timestamp, Yielded};
use store::StoreHealth;

use crate::{Broker, Inner, MemoryKind, Turn, drops::count_drop, durable::Durable, shared::QueuedMessage};

/// A message that is being moved.
pub(crate) enum Moved {
    /// A message out of the group's own queue.
    Queued { group: u32, waiting: QueuedMessage },
    /// A message that a member gave back; it is in that member's durable queue `from` if it has a place.
    Yielded { yielded: Yielded, from: QueueId },
}

/// What the store refused, for the next tick. It is bounded: there are only so many groups, and what members gave back
/// was in memory already and counts against the budget.
#[derive(Default)]
pub(crate) struct Stalled {
    groups: BTreeSet<u32>,
    /// Groups whose queue could not be read.
    unread: BTreeSet<u32>,
    yielded: Vec<(Yielded, QueueId)>,
}

impl Durable {
    /// Ends the caller's own part of the commit of a move, and has it offered again if it is refused.
    pub(crate) fn watch(&self, commit: &Arc<Commit>, moved: Moved) {
        let inner = self.inner.clone();
        commit.then(move |result| {
            if result == Err(Refused)
                && let Some(inner) = inner.upgrade()
            {
                inner.offer_again(moved);
            }
        });
        commit.done();
    }

    /// Whether the store is sure to refuse a message now. While it fails, one attempt a second is let through.
    pub(crate) fn is_stalled(&self) -> bool {
        self.queues().health() != StoreHealth::Sound && !self.queues().accepts()
    }

    /// Has the group's members told at the next tick that messages are waiting for them.
    pub(crate) fn stall(&self, group: u32) {
        self.stalled.lock().groups.insert(group);
    }

    /// The group's queue could not be read; the next tick tries again.
    pub(crate) fn stall_reading(&self, group: u32) {
        self.stalled.lock().unread.insert(group);
    }
}

impl Inner {
    /// The store refused a move: both queues are as they were before.
    fn offer_again(&self, moved: Moved) {
        let Some(durable) = &self.durable else { return };
        match moved {
            Moved::Queued { group, waiting } => {
                // The group's queue went with it.
                let Some(found) = self.index.group(group) else {
                    return count_drop(DropReason::SessionEnded);
                };
                found.put_back(waiting, &self.account);
                durable.stall(group);
            }
            Moved::Yielded { mut yielded, from } => {
                // The receipt already knows what became of it.
                yielded.message = yielded.message.without_receipt();
                self.account.force(MemoryKind::Queued, yielded.message.cost());
                durable.stalled.lock().yielded.push((yielded, from));
            }
        }
    }
}

/// What the store did not take.
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
            // It is still on disk where it was, but a session never rereads what it gave away.
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
