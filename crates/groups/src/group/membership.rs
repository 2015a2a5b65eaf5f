//! Members of the group, and the owner of each partition.

use std::{sync::Arc, time::Duration};

use gateway_core::{PARTITIONS, Partition, Timestamp};
use thiserror::Error;

use super::{
    super::{
        config::{Credit, MAX_CREDIT, MAX_MEMBERS, millis},
        lagging::Undelivered,
        member::{Member, MemberKey},
        outstanding::OutstandingEntry,
        partition::Dying,
    },
    Group, MemberGone,
    resuming::ClaimedPlace,
};

/// Terms on which a member joins.
#[derive(Debug, Clone)]
pub struct MemberOptions<'a> {
    /// A member that has it already is fenced, and this one takes over what it had.
    pub name: &'a str,
    /// Time that the member stays without a stream; 0: not at all. For a member that [fetches](Self::fetches), from each call on.
    pub lease: Duration,
    /// Bound on the messages that the member may have unacknowledged.
    pub credit: Credit,
    /// The member never has a stream: calls of the same name are one member as long as its lease lasts.
    pub fetches: bool,
    /// Messages that the member was delivered before and works on: these have the numbers 1, 2, 3... as far as they are still its
    /// own, and do not come again. as far as they are still its own, and do not come again. At most
    /// [`MAX_CLAIMS`](super::super::config::MAX_CLAIMS). Unless there are none, [`next_recall`](Group::next_recall) and
    /// [`resume`](Group::resume) follow, before anything is taken.
    pub outstanding: &'a [ClaimedPlace],
}

/// Somebody has joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Joined {
    /// Key of the member.
    pub member: MemberKey,
    /// True if the member was here within its lease: no message of its partitions was given to others meanwhile.
    pub resumed: bool,
}

/// The group has [`MAX_MEMBERS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the group has {MAX_MEMBERS} members")]
pub struct TooManyMembers;

impl Group {
    /// A member comes, or comes back: then what it had and does not say that it works on is delivered to it again, before
    /// anything else. That counts as no attempt.
    ///
    /// # Errors
    /// [`TooManyMembers`].
    pub fn join(&mut self, options: &MemberOptions<'_>, now: Timestamp) -> Result<Joined, TooManyMembers> {
        let credit = clamp(options.credit);
        let lease = millis(options.lease);
        let lease_until = options.fetches.then(|| now.plus_millis(lease));
        if let Some(&index) = self.names.get(options.name)
            && let Some(member) = self.member_mut(index)
        {
            if options.fetches && member.fetches {
                (member.lease, member.lease_until, member.credit) = (lease, lease_until, credit);
                let key = MemberKey { index, number: member.number };
                self.await_no_more(index);
                return Ok(Joined { member: key, resumed: true });
            }
            self.wake(index);
            self.keep_claimed(index, options.outstanding, now);
            self.cancel_reads(index);
            let number = self.next_number;
            self.next_number += 1;
            let mut before = 0;
            if let Some(member) = self.member_mut(index) {
                before = member.number;
                member.number = number;
                (member.lease, member.lease_until, member.credit) = (lease, lease_until, credit);
                (member.fetches, member.draining, member.woken) = (options.fetches, false, false);
            }
            self.numbers.remove(&before);
            self.numbers.insert(number, index);
            self.soil_roster();
            self.balance(now);
            if options.outstanding.is_empty() {
                self.await_no_more(index);
            }
            self.look_again(index);
            return Ok(Joined { member: MemberKey { index, number }, resumed: true });
        }
        let free = self.members.iter().position(Option::is_none);
        if free.is_none() && self.members.len() >= MAX_MEMBERS {
            return Err(TooManyMembers);
        }
        let index = free.unwrap_or_else(|| {
            self.members.push(None);
            self.members.len() - 1
        });
        let number = self.next_number;
        self.next_number += 1;
        let name: Arc<str> = Arc::from(options.name);
        let fetches = options.fetches;
        let member = Member { lease_until, fetches, credit, ..Member::new(Arc::clone(&name), number, lease) };
        self.members[index] = Some(member);
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        self.names.insert(name, index);
        self.numbers.insert(number, index);
        self.keep_claimed(index, options.outstanding, now);
        self.soil_roster();
        self.balance(now);
        Ok(Joined { member: MemberKey { index, number }, resumed: false })
    }

    /// A call of a member without a stream goes on: its lease begins anew.
    ///
    /// # Errors
    /// [`MemberGone`] if the member is.
    pub fn renew(&mut self, key: MemberKey, now: Timestamp) -> Result<(), MemberGone> {
        self.find(key)?;
        if let Some(member) = self.member_mut(key.index)
            && member.fetches
        {
            member.lease_until = Some(now.plus_millis(member.lease));
        }
        Ok(())
    }

    /// The process ends the stream of a member: what it gives back at once counts as no attempt, since that is nobody's fault.
    /// [`Self::close`] follows.
    pub fn part(&mut self, key: MemberKey) {
        if self.find(key).is_ok_and(|member| member.lease == 0) {
            self.rewind_member(key.index, false);
        }
    }

    /// The stream of a member has ended. Without a lease everything it had is given back at once. Whoever was fenced
    /// changes nothing.
    pub fn close(&mut self, key: MemberKey, now: Timestamp) {
        if self.find(key).is_err() {
            return;
        }
        self.cancel_reads(key.index);
        let Some(member) = self.member_mut(key.index) else { return };
        if member.lease == 0 || member.draining {
            self.leave(key.index, now);
        } else {
            member.lease_until = Some(now.plus_millis(member.lease));
        }
    }

    /// The member wants nothing new: its partitions go to others, what it has it may settle.
    ///
    /// # Errors
    /// [`MemberGone`] if the member is.
    pub fn drain(&mut self, key: MemberKey, now: Timestamp) -> Result<(), MemberGone> {
        self.find(key)?;
        if let Some(member) = self.member_mut(key.index) {
            member.draining = true;
        }
        self.balance(now);
        self.wake(key.index);
        Ok(())
    }

    /// Changes how much the member may have unacknowledged. What it has beyond that it keeps.
    ///
    /// # Errors
    /// [`MemberGone`] if the member is.
    pub fn set_credit(&mut self, key: MemberKey, credit: Credit) -> Result<(), MemberGone> {
        self.find(key)?;
        if let Some(member) = self.member_mut(key.index) {
            member.credit = clamp(credit);
        }
        self.wake(key.index);
        Ok(())
    }

    /// A member goes, and everything it had comes again.
    pub(super) fn leave(&mut self, index: u32, now: Timestamp) {
        self.await_no_more(index);
        self.rewind_member(index, true);
        for partition in 0..=u8::MAX {
            if self.at(partition).owner == Some(index) {
                self.set_owner(partition, None, now);
            }
        }
        if let Some(member) = self.members[index as usize].take() {
            debug_assert_eq!((member.outstanding, member.ahead), Default::default());
            self.names.remove(&member.name);
            self.numbers.remove(&member.number);
        }
        self.soil_roster();
        self.balance(now);
    }

    /// Reads under way for the member will not come back.
    fn cancel_reads(&mut self, index: u32) {
        for partition in 0..=u8::MAX {
            let state = self.at_mut(partition);
            if state.owner == Some(index) && state.reading.is_some() {
                state.cancel_read();
                self.hungry(partition);
            }
        }
    }

    /// All that is with the member comes again; see [`Self::rewind`].
    fn rewind_member(&mut self, index: u32, counts: bool) {
        if self.member(index).is_none_or(|member| member.outstanding.messages == 0) {
            return;
        }
        for partition in 0..=u8::MAX {
            self.rewind(partition, |entry| entry.member == index, false, counts);
        }
    }

    /// Takes back the deliveries of a partition for which `which` returns true, so that they come again before anything else of
    /// it: without a pause, since the messages are not at fault. With `tell`, their members, which are still there, are told. If
    /// the return `counts`, it is a failed attempt of the first message of each key.
    pub(super) fn rewind(
        &mut self,
        partition: u8,
        which: impl Fn(&OutstandingEntry) -> bool,
        tell: bool,
        counts: bool,
    ) {
        let entries = self.at_mut(partition).out.extract(which);
        if entries.is_empty() {
            return;
        }
        self.soil(partition);
        // Messages read already come after these.
        self.unread(partition);
        let mut keys = hashbrown::HashSet::<u64, ahash::RandomState>::default();
        for entry in entries {
            self.release(&entry, true);
            if tell {
                if let Some(member) = self.member_mut(entry.member) {
                    member.revoked.insert(entry.delivery);
                }
                self.wake(entry.member);
            }
            // Of each key only the first can be what its member died of.
            let has_failed = counts && keys.insert(entry.key);
            if has_failed && self.config.gives_up(entry.attempt) {
                let lagging = self.at_mut(partition).lagging.get_mut(&entry.key);
                let lagging = lagging.filter(|lagging| lagging.blocked == Some(entry.offset));
                let reason = lagging.and_then(|lagging| {
                    lagging.blocked = None;
                    lagging.reason.take()
                });
                let dying = Dying { attempts: entry.attempt, reason: reason.unwrap_or_default() };
                self.give_up(partition, entry.offset, dying);
            } else {
                let attempts = if has_failed { entry.attempt } else { entry.attempt - 1 };
                let takes =
                    self.at_mut(partition).wait(entry.key, Undelivered { offset: entry.offset, attempts });
                self.waiting += usize::from(takes);
            }
            self.returned(partition, entry.member);
        }
        self.forget_done(partition);
        self.hungry(partition);
    }

    fn set_owner(&mut self, partition: u8, owner: Option<u32>, now: Timestamp) {
        self.soil_roster();
        self.unread(partition);
        let deadline = now.plus_millis(millis(self.config.ack_deadline));
        let state = &mut self.partitions[usize::from(partition)];
        if let Some(before) = state.owner.and_then(|owner| self.members[owner as usize].as_mut()) {
            before.partitions -= 1;
            before.ready.retain(|&listed| listed != partition);
            before.hungry.retain(|&queued| queued != partition);
        }
        (state.listed, state.queued, state.owner) = (false, false, owner);
        if let Some(member) = owner.and_then(|owner| self.members[owner as usize].as_mut()) {
            member.partitions += 1;
            if let Some(gap) = state.gap.take() {
                member.add_gap(gap);
            }
        }
        state.foreign = state.out.iter().filter(|entry| Some(entry.member) != owner).count();
        let is_handover = owner.is_some() && state.foreign > 0;
        match (state.handover_until, is_handover) {
            (None, true) => {
                state.handover_until = Some(deadline);
                self.handovers += 1;
            }
            (Some(_), false) => {
                state.handover_until = None;
                self.handovers -= 1;
            }
            _ => {}
        }
        self.hungry(partition);
    }

    /// Spreads the partitions evenly over those who want something new, and moves as few as that takes.
    pub(super) fn balance(&mut self, now: Timestamp) {
        let mut able: Vec<(u32, usize)> = Vec::new();
        for (index, member) in self.members.iter().enumerate() {
            if let Some(member) = member.as_ref().filter(|member| !member.draining) {
                able.push((u32::try_from(index).unwrap_or(u32::MAX), member.partitions));
            }
        }
        // The members with most partitions may keep one more, so that nothing moves without need.
        able.sort_by_key(|&(index, partitions)| (usize::MAX - partitions, index));
        let mut quota = vec![0; self.members.len()];
        for (rank, &(index, _)) in able.iter().enumerate() {
            quota[index as usize] = PARTITIONS / able.len() + usize::from(rank < PARTITIONS % able.len());
        }
        let mut free = Vec::new();
        let mut kept = vec![0; self.members.len()];
        for partition in 0..=u8::MAX {
            match self.at(partition).owner {
                Some(owner) if kept[owner as usize] < quota[owner as usize] => kept[owner as usize] += 1,
                _ => free.push(partition),
            }
        }
        for (index, _) in able {
            while kept[index as usize] < quota[index as usize]
                && let Some(partition) = free.pop()
            {
                kept[index as usize] += 1;
                self.set_owner(partition, Some(index), now);
            }
        }
        for partition in free {
            if self.at(partition).owner.is_some() {
                self.set_owner(partition, None, now);
            }
        }
    }

    /// Makes a returned member's partitions due again: all that is there for it is to be taken.
    fn look_again(&mut self, index: u32) {
        for partition in 0..=u8::MAX {
            if self.at(partition).owner == Some(index) {
                self.list(partition);
                self.hungry(partition);
            }
        }
        self.wake(index);
    }

    /// The partitions that the member owns.
    pub fn partitions(&self, key: MemberKey) -> impl Iterator<Item = Partition> + '_ {
        let owner = self.find(key).is_ok().then_some(key.index);
        Partition::all().filter(move |partition| owner.is_some() && self.at(partition.0).owner == owner)
    }
}

fn clamp(credit: Credit) -> Credit {
    Credit { messages: credit.messages.clamp(1, MAX_CREDIT), ..credit }
}
