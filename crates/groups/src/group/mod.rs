//! One group: its members, its partitions, and what goes from one to the other.

mod membership;
mod moving;
mod reading;
mod resuming;
mod settling;
mod status;
mod taking;
mod timing;
#[cfg(test)]
mod verify;

use std::{
    collections::{BTreeSet, VecDeque},
    sync::Arc,
};

use ahash::RandomState;
use bytes::Bytes;
use gateway_core::{PARTITIONS, Partition, Timestamp};
use hashbrown::HashMap;

pub use membership::{Joined, MemberOptions, TooManyMembers};
pub use reading::{Read, ReadGap};
pub use resuming::{ClaimedPlace, Recall};
pub use settling::{AckResult, Nack, SettlingAnswer};
pub use status::{Delayed, DeliveryStatus, GroupTotals, MemberStatus, Pending, PendingState};
pub use taking::{Delivery, MemberGone, Room, TakenDeliveries};

use super::{
    config::{GroupConfig, GroupIdentity, MAX_PAUSE, MAX_WAITING},
    lagging::Undelivered,
    member::{Member, MemberKey},
    outstanding::OutstandingEntry,
    partition::{Dying, PartitionState},
    progress::Progress,
};

/// The state of one group, and all that may happen to it.
///
/// Every call that may give somebody something to do adds those members to [`Self::woken`], and every call that changes what
/// must outlive the process adds partitions to [`Self::changes`]: whoever calls looks at both.
#[derive(Debug)]
pub struct Group {
    identity: GroupIdentity,
    config: GroupConfig,
    partitions: Vec<PartitionState>,
    members: Vec<Option<Member>>,
    names: HashMap<Arc<str>, u32, RandomState>,
    numbers: HashMap<u64, u32, RandomState>,
    next_number: u64,
    /// Deadlines of deliveries that have one of their own: when, member, number.
    extended: BTreeSet<(Timestamp, u32, u64)>,
    /// Keys that wait for their pause to end: when, partition, key.
    delayed: BTreeSet<(Timestamp, u8, u64)>,
    /// Places remembered in all partitions.
    waiting: usize,
    /// Partitions were left unread since there are too many of them.
    gated: bool,
    /// Partitions being handed over.
    handovers: usize,
    /// Until when members of an earlier process are awaited that had messages of another's partition.
    awaits_until: Option<Timestamp>,
    /// The members as they were written last, and whether there were any.
    roster: Bytes,
    has_roster: bool,
    roster_dirty: bool,
    woken: Vec<u64>,
    dirty: Vec<u8>,
    /// Messages to be given up: partition, offset.
    dying: VecDeque<(u8, u64)>,
    totals: GroupTotals,
}

/// Change of one partition that must be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartitionChange {
    /// Partition that has changed.
    pub partition: Partition,
    /// The record: a [`Progress`].
    pub record: Bytes,
    /// Once it is written, the group no longer needs anything before this place.
    pub floor: u64,
}

impl Group {
    /// A group without members that has read nothing, and settled nothing. [`Self::restore`] and [`Self::set_end`] for each
    /// partition follow.
    pub fn new(identity: GroupIdentity, config: GroupConfig) -> Self {
        Self {
            identity,
            config,
            partitions: (0..PARTITIONS).map(|_| PartitionState::default()).collect(),
            members: Vec::new(),
            names: HashMap::default(),
            numbers: HashMap::default(),
            next_number: (u64::from(identity.life) << 32) + 1,
            extended: BTreeSet::new(),
            delayed: BTreeSet::new(),
            waiting: 0,
            gated: false,
            handovers: 0,
            awaits_until: None,
            roster: Bytes::new(),
            has_roster: false,
            roster_dirty: false,
            woken: Vec::new(),
            dirty: Vec::new(),
            dying: VecDeque::new(),
            totals: GroupTotals::default(),
        }
    }

    /// Continues a partition where a record says. Before the first member. What was given up and not copied yet is given up
    /// again, and pauses go on.
    pub fn restore(&mut self, partition: Partition, progress: Progress, now: Timestamp) {
        let index = partition.0;
        self.waiting += self.at_mut(index).restore(progress);
        let latest = now.plus_millis(MAX_PAUSE);
        let state = &mut self.partitions[usize::from(index)];
        for (&key, lagging) in &mut state.lagging {
            lagging.due = lagging.due.filter(|&due| due > now).map(|due| due.min(latest));
            self.delayed.extend(lagging.due.map(|due| (due, index, key)));
        }
        let config = self.config;
        let (given_up, again) = std::mem::take(&mut state.again)
            .into_iter()
            .partition(|waiting| config.gives_up(waiting.attempts));
        state.again = again;
        self.forgot(given_up.len());
        for Undelivered { offset, attempts } in given_up {
            self.give_up(index, offset, Dying { attempts, reason: Box::default() });
        }
    }

    /// Says that messages may be there up to this place. Before the first [`Self::appended`].
    pub fn set_end(&mut self, partition: Partition, end: u64) {
        let state = &mut self.partitions[usize::from(partition.0)];
        state.end = state.end.max(end);
        self.hungry(partition.0);
    }

    /// Returns the identity of this group.
    pub fn identity(&self) -> GroupIdentity {
        self.identity
    }

    /// Returns the rules by which the group delivers.
    pub fn config(&self) -> GroupConfig {
        self.config
    }

    /// Changes how it delivers; deadlines that are running stay. The order key does not change.
    pub fn set_config(&mut self, config: GroupConfig) {
        self.config = GroupConfig { order_key: self.config.order_key, ..config };
        for partition in 0..=u8::MAX {
            self.list(partition);
            self.hungry(partition);
        }
    }

    /// Takes the members that have something to do, each by the number of its [`MemberKey`]. Also those that were fenced.
    pub fn woken(&mut self) -> Vec<u64> {
        if self.woken.is_empty() {
            return Vec::new();
        }
        for member in self.members.iter_mut().flatten() {
            member.woken = false;
        }
        std::mem::take(&mut self.woken)
    }

    /// Returns whether [`Self::changes`] or [`Self::roster_change`] may return something.
    pub fn has_changes(&self) -> bool {
        !self.dirty.is_empty() || self.roster_dirty
    }

    /// Takes what must be written, all of it in one step. Whatever was answered before this call holds once it is written.
    pub fn changes(&mut self) -> Vec<PartitionChange> {
        let dirty = std::mem::take(&mut self.dirty);
        let changes = dirty.into_iter().map(|partition| {
            let state = &mut self.partitions[usize::from(partition)];
            state.dirty = false;
            let progress = state.progress();
            let floor = progress.floor();
            state.written = floor;
            PartitionChange { partition: Partition(partition), record: progress.encode(), floor }
        });
        changes.collect()
    }

    /// Makes [`Self::changes`] return also partitions that have moved on without an acknowledgement since they were written,
    /// if what was written keeps the log from being trimmed up to `place`. Anything else is not worth a write.
    pub fn touch(&mut self, place: u64) {
        for partition in 0..=u8::MAX {
            let state = &self.partitions[usize::from(partition)];
            if !state.dirty && state.written < place && state.floor() > state.written {
                self.soil(partition);
            }
        }
    }

    fn at(&self, partition: u8) -> &PartitionState {
        &self.partitions[usize::from(partition)]
    }

    fn at_mut(&mut self, partition: u8) -> &mut PartitionState {
        &mut self.partitions[usize::from(partition)]
    }

    fn member_mut(&mut self, index: u32) -> Option<&mut Member> {
        self.members.get_mut(index as usize)?.as_mut()
    }

    fn member(&self, index: u32) -> Option<&Member> {
        self.members.get(index as usize)?.as_ref()
    }

    /// The member, unless it is gone or was fenced.
    fn find(&self, key: MemberKey) -> Result<&Member, MemberGone> {
        self.member(key.index).filter(|member| member.number == key.number).ok_or(MemberGone)
    }

    /// Something of the partition must be written.
    fn soil(&mut self, partition: u8) {
        let state = &mut self.partitions[usize::from(partition)];
        if !state.dirty {
            state.dirty = true;
            self.dirty.push(partition);
        }
    }

    fn wake(&mut self, index: u32) {
        if let Some(member) = self.members[index as usize].as_mut()
            && !member.woken
        {
            member.woken = true;
            self.woken.push(member.number);
        }
    }

    /// The credit of a delivered message is its member's again, and it no longer has a deadline. `void` if its member must
    /// not acknowledge it later.
    fn release(&mut self, entry: &OutstandingEntry, void: bool) {
        let Some(member) = self.members[entry.member as usize].as_mut() else {
            debug_assert!(false, "the member of an entry is there");
            return;
        };
        let deliveries = &mut member.deliveries;
        let removed = if void { deliveries.void(entry.delivery) } else { deliveries.remove(entry.delivery) };
        member.outstanding.sub(entry.cost);
        let busy = !member.ready.is_empty() || !member.hungry.is_empty() || member.draining;
        if let Some((slot, true)) = removed {
            self.extended.remove(&(slot.deadline, entry.member, entry.delivery));
        }
        if busy {
            self.wake(entry.member);
        }
    }

    /// One message less of the partition is with others than its owner, if it was.
    fn returned(&mut self, partition: u8, from: u32) {
        let state = &mut self.partitions[usize::from(partition)];
        if state.foreign == 0 || state.owner == Some(from) {
            return;
        }
        state.foreign -= 1;
        if state.foreign == 0 {
            if state.handover_until.take().is_some() {
                self.handovers -= 1;
            }
            self.list(partition);
            self.hungry(partition);
        }
    }

    /// Forgets the messages read ahead for the owner, to be read again: another member may get them.
    fn unread(&mut self, partition: u8) {
        let state = &mut self.partitions[usize::from(partition)];
        let mut owner = state.owner.and_then(|index| self.members[index as usize].as_mut());
        for one in std::mem::take(&mut state.ready) {
            if let Some(owner) = &mut owner {
                owner.ahead.sub(one.cost);
            }
            let waiting = Undelivered { offset: one.record.offset, attempts: one.attempts };
            self.waiting += usize::from(state.wait(one.key, waiting));
        }
        state.cancel_read();
        // The owner has credit again.
        if let Some(owner) = state.owner {
            self.wake(owner);
        }
    }

    /// So many remembered places are gone.
    fn forgot(&mut self, places: usize) {
        self.waiting -= places;
        if self.gated && self.waiting < MAX_WAITING {
            self.gated = false;
            for partition in 0..=u8::MAX {
                self.hungry(partition);
            }
        }
    }
}
