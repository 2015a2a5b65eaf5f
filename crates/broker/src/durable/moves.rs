//! Messages on their way from one durable queue to another. The store writes both ends in one step or refuses them
//! together; what it refuses is offered again about once a second.

use std::{collections::BTreeSet, sync::Arc};

use gateway_core::{Commit, CommitRefused, QueueId, Yielded};
use store::StoreHealth;

use super::{Durable, StoreAnswers};
use crate::memory::{Account, MemoryKind};

/// Moves that the store refused, for the next tick. The list is bounded: groups are limited in number, and messages that members
/// gave back were in memory already and count against the budget.
#[derive(Default)]
pub(crate) struct Stalled {
    pub(crate) groups: BTreeSet<u32>,
    /// Groups whose queue could not be read.
    pub(crate) unread: BTreeSet<u32>,
    pub(crate) yielded: Vec<(Yielded, QueueId)>,
}

impl Durable {
    /// Ends the caller's own part of the commit of a move. If the store refuses it both queues are as they were before:
    /// then `offer_again` puts the message where the next tick finds it.
    pub(crate) fn watch(
        &self,
        commit: &Arc<Commit>,
        offer_again: impl FnOnce(&dyn StoreAnswers) + Send + 'static,
    ) {
        let answers = self.answers.clone();
        commit.then(move |result| {
            if result == Err(CommitRefused)
                && let Some(answers) = answers.upgrade()
            {
                offer_again(&*answers);
            }
        });
        commit.done();
    }

    /// Returns whether the store is sure to refuse a message now. While it fails, one attempt a second is let through.
    pub(crate) fn is_stalled(&self) -> bool {
        self.state().health() != StoreHealth::Sound && !self.state().accepts()
    }

    /// Has the group's members told at the next tick that messages are waiting for them.
    pub(crate) fn stall(&self, group: u32) {
        self.stalled.lock().groups.insert(group);
    }

    /// Keeps a message that a member gave back and that could not be moved out of its durable queue `from`, if it was in one.
    pub(crate) fn stall_yielded(&self, account: &Account, mut yielded: Yielded, from: QueueId) {
        // The receipt already knows what became of it.
        yielded.message = yielded.message.without_receipt();
        account.force(MemoryKind::Queued, yielded.message.cost());
        self.stalled.lock().yielded.push((yielded, from));
    }

    /// The group's queue could not be read; the next tick tries again.
    pub(crate) fn stall_reading(&self, group: u32) {
        self.stalled.lock().unread.insert(group);
    }

    /// Takes what is to be offered again now. Messages stay while the store is sure to refuse them.
    pub(crate) fn take_stalled(&self) -> Stalled {
        let mut stalled = self.stalled.lock();
        let wait = !stalled.yielded.is_empty() && self.is_stalled();
        let mut taken = std::mem::take(&mut *stalled);
        if wait {
            std::mem::swap(&mut stalled.yielded, &mut taken.yielded);
        }
        taken
    }
}
