//! Status of a group, for the outside.

use std::sync::Arc;

use gateway_core::{Partition, Timestamp};

use super::{
    super::{
        config::millis,
        member::{Amount, MemberKey},
        partition::PartitionState,
    },
    Group,
};

/// Counts since the process began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GroupTotals {
    /// Deliveries.
    pub delivered: u64,
    /// Of those, not the first of their message.
    pub redelivered: u64,
    /// Messages that were acknowledged.
    pub settled: u64,
    /// Their cost.
    pub settled_bytes: u64,
    /// Deliveries that were given back by a nack.
    pub nacked: u64,
    /// Deliveries that were not acknowledged in time.
    pub timed_out: u64,
    /// Messages that were given up and copied.
    pub given_up: u64,
    /// Messages that were seen but not settled, and are no longer in the log.
    pub lost: u64,
}

/// Status of a group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeliveryStatus {
    /// Delivered and not acknowledged.
    pub outstanding: Amount,
    /// Members, those in their lease included.
    pub members: usize,
    /// Messages that are remembered one by one to come again.
    pub waiting: usize,
    /// Keys that lag behind their partition.
    pub lagging_keys: usize,
    /// Counts since the process began.
    pub totals: GroupTotals,
}

/// A member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberStatus {
    /// Its name.
    pub name: Arc<str>,
    /// Has a stream, or has fetched within its lease.
    pub is_connected: bool,
    /// Number of partitions that the member owns.
    pub partitions: usize,
    /// Messages that the member has not acknowledged.
    pub outstanding: Amount,
    /// Time at which the member goes, if nothing is heard of it.
    pub lease_until: Option<Timestamp>,
    /// Time at which the member got its oldest unacknowledged message, those aside that it keeps longer than others.
    pub oldest: Option<Timestamp>,
}

/// A message that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pending {
    /// Partition of the message.
    pub partition: Partition,
    /// Place of the message in its partition.
    pub offset: u64,
    /// Number of its deliveries so far.
    pub attempts: u32,
    /// Event for which the message waits.
    pub state: PendingState,
}

/// Event for which a message waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PendingState {
    /// To be acknowledged, until then.
    Outstanding(Timestamp),
    /// To be delivered.
    Delayed(Delayed),
}

/// Since when a message is not delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delayed {
    /// Its pause lasts until then.
    Until(Timestamp),
    /// As soon as there is room, and what is before it is settled.
    Ready,
}

impl Group {
    /// Returns the status of the group.
    pub fn status(&self) -> DeliveryStatus {
        let mut status =
            DeliveryStatus { waiting: self.waiting, totals: self.totals, ..DeliveryStatus::default() };
        for member in self.members.iter().flatten() {
            status.members += 1;
            status.outstanding.messages += member.outstanding.messages;
            status.outstanding.bytes += member.outstanding.bytes;
        }
        status.lagging_keys = self.partitions.iter().map(|state| state.lagging.len()).sum();
        status
    }

    /// Returns the counts since the process began.
    pub fn totals(&self) -> GroupTotals {
        self.totals
    }

    /// Returns the messages that were read for a member and that it has not taken yet.
    pub fn ahead(&self, key: MemberKey) -> Amount {
        let member = self.members.get(key.index as usize).and_then(Option::as_ref);
        member
            .filter(|member| member.number == key.number)
            .map_or_else(Amount::default, |member| member.ahead)
    }

    /// Returns whether the member of this number is there.
    pub fn has_member(&self, number: u64) -> bool {
        self.numbers.contains_key(&number)
    }

    /// All members.
    pub fn members(&self) -> Vec<MemberStatus> {
        let given = millis(self.config.ack_deadline);
        let members = self.members.iter().flatten().map(|member| MemberStatus {
            name: Arc::clone(&member.name),
            is_connected: member.is_here(),
            partitions: member.partitions,
            outstanding: member.outstanding,
            lease_until: member.lease_until,
            oldest: member.deliveries.oldest().map(|at| Timestamp(at.0.saturating_sub(given))),
        });
        members.collect()
    }

    /// Messages that were delivered and are not settled, or wait to be delivered again, in order of partition and place: at
    /// most `limit` behind `after`.
    pub fn pending(&self, after: Option<(Partition, u64)>, limit: usize) -> Vec<Pending> {
        let first = after.map_or(0, |(partition, _)| partition.0);
        let mut all = Vec::new();
        for partition in first..=u8::MAX {
            let behind = after.filter(|(at, _)| at.0 == partition).map(|(_, offset)| offset);
            let mut page = self.pending_of(partition, behind);
            page.sort_unstable_by_key(|pending| pending.offset);
            all.extend(page.into_iter().take(limit - all.len()));
            if all.len() >= limit {
                break;
            }
        }
        all
    }

    fn pending_of(&self, index: u8, behind: Option<u64>) -> Vec<Pending> {
        let state: &PartitionState = self.at(index);
        let pending =
            |offset, attempts, state| Pending { partition: Partition(index), offset, attempts, state };
        let ready = PendingState::Delayed(Delayed::Ready);
        let mut all = Vec::new();
        for entry in state.out.iter() {
            let slot = self.member(entry.member).and_then(|member| member.deliveries.get(entry.delivery));
            let deadline = slot.map_or(Timestamp(0), |slot| slot.deadline);
            all.push(pending(entry.offset, entry.attempt, PendingState::Outstanding(deadline)));
        }
        all.extend(state.again.iter().map(|waiting| pending(waiting.offset, waiting.attempts, ready)));
        all.extend(state.ready.iter().map(|one| pending(one.record.offset, one.attempts, ready)));
        for lagging in state.lagging.values() {
            let since = lagging.due.map_or(ready, |due| PendingState::Delayed(Delayed::Until(due)));
            let todo = lagging.todo.iter();
            all.extend(todo.map(|waiting| pending(waiting.offset, waiting.attempts, since)));
        }
        all.retain(|pending| behind.is_none_or(|behind| pending.offset > behind));
        all
    }
}
