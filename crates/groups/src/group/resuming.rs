//! Members that come back: to their partitions, and to the messages that they still work on.
//!
//! Within a process the group knows what a member was delivered. Of what an earlier process delivered it knows which members had
//! which partitions ([`Roster`](super::super::roster::Roster)) and no more: a member says itself what it works on. Each of its
//! messages is read from the log before it counts as delivered, so that nothing but a message of the group that is not settled
//! can be claimed, and only by a member that had its partition.

use bytes::Bytes;
use gateway_core::{LogRecord, Partition, Timestamp};

use super::{
    super::{
        ack_id::AckId,
        config::{MAX_CLAIMS, MAX_WAITING, READ_BYTES, READ_RECORDS, millis},
        deliveries::Deliveries,
        lagging::Undelivered,
        member::{Claim, Member, MemberKey},
        outstanding::OutstandingEntry,
        ranges::Ranges,
        roster::{Roster, RosterMember},
    },
    Group, MemberGone,
    reading::cost,
};

/// A message that a member names: its partition and its place there. `None` if it is of another log.
pub type ClaimedPlace = Option<(Partition, u64)>;

/// A stretch of the log that may have what a member has named. What it brings goes to [`Group::recall`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recall {
    /// Partition to read.
    pub partition: Partition,
    /// From which place on.
    pub from: u64,
    /// Records at most.
    pub records: usize,
    /// Bytes at most, but one record.
    pub bytes: usize,
}

impl Group {
    /// Brings the members of an earlier process back, each to its partitions and for its lease from now on. After all of
    /// [`Self::restore`] and [`Self::set_end`], and before the first member joins.
    pub fn restore_members(&mut self, roster: Roster, now: Timestamp) {
        for (index, member) in (0..).zip(roster.members) {
            let RosterMember { name, number, lease, fetches } = member;
            let mut restored = Member::new(name.as_str().into(), number, lease);
            restored.fetches = fetches;
            restored.lease_until = Some(now.plus_millis(lease));
            (restored.is_restored, restored.is_missing) = (true, true);
            self.names.insert(restored.name.clone(), index);
            self.numbers.insert(number, index);
            self.members.push(Some(restored));
        }
        for (partition, (owner, others)) in (0..=u8::MAX).zip(roster.partitions) {
            let mut awaited: Vec<u32> = owner.into_iter().chain(others).collect();
            awaited.sort_unstable();
            awaited.dedup();
            let state = self.at_mut(partition);
            (state.owner, state.awaited) = (owner, awaited);
            if let Some(owner) = owner.and_then(|owner| self.member_mut(owner)) {
                owner.partitions += 1;
            }
        }
        // By then they would have lost what they had of another's partition.
        self.awaits_until = Some(now.plus_millis(millis(self.config.ack_deadline)));
        self.balance(now);
        for partition in 0..=u8::MAX {
            self.hungry(partition);
        }
        self.has_roster = self.members.iter().any(Option::is_some);
        self.roster = self.encode_roster();
        self.roster_dirty = false;
    }

    /// Returns the roster that must be written, if it differs from the one taken before; see [`Self::changes`].
    pub fn roster_change(&mut self) -> Option<Bytes> {
        if !std::mem::take(&mut self.roster_dirty) {
            return None;
        }
        let roster = self.encode_roster();
        self.has_roster = self.has_leases();
        (roster != self.roster).then(|| {
            self.roster = roster.clone();
            roster
        })
    }

    fn has_leases(&self) -> bool {
        self.members.iter().flatten().any(|member| member.lease > 0)
    }

    /// Members, or their partitions, are others than before. What goes with its stream need not be kept.
    pub(super) fn soil_roster(&mut self) {
        self.roster_dirty = self.roster_dirty || self.has_roster || self.has_leases();
    }

    fn encode_roster(&self) -> Bytes {
        let mut places = vec![None; self.members.len()];
        let mut members = Vec::new();
        for (index, member) in self.members.iter().enumerate() {
            let Some(member) = member.as_ref().filter(|member| member.lease > 0) else { continue };
            places[index] = u32::try_from(members.len()).ok();
            let Member { number, lease, fetches, .. } = *member;
            members.push(RosterMember { name: member.name.as_ref().into(), number, lease, fetches });
        }
        let place = |index: u32| places[index as usize];
        let partitions = self.partitions.iter().map(|state| {
            let owner = state.owner.and_then(place);
            let mut others: Vec<u32> = Vec::new();
            if state.foreign > 0 {
                others.extend(state.out.iter().filter_map(|entry| place(entry.member)));
            }
            others.extend(state.awaited.iter().filter_map(|&index| place(index)));
            others.sort_unstable();
            others.dedup();
            others.retain(|&other| Some(other) != owner);
            (owner, others)
        });
        let partitions = partitions.collect();
        Roster { members, partitions }.encode()
    }

    /// Gives the numbers 1, 2, 3... to the messages that the member of this index claims to work on. A claimed delivery that the
    /// member has is kept; a delivery that it had and does not name comes again, which counts as no attempt.
    pub(super) fn keep_claimed(&mut self, index: u32, claimed: &[ClaimedPlace], now: Timestamp) {
        let deadline = now.plus_millis(millis(self.config.ack_deadline));
        let mut claims: Vec<Claim> = Vec::with_capacity(claimed.len());
        let mut refused = Vec::new();
        for (id, place) in (1..).zip(claimed) {
            match place {
                Some((partition, offset)) => {
                    claims.push(Claim { partition: partition.0, offset: *offset, id });
                }
                None => refused.push(id),
            }
        }
        claims.sort_unstable();
        claims.dedup_by(|later, first| {
            let is_again = (later.partition, later.offset) == (first.partition, first.offset);
            if is_again {
                refused.push(later.id);
            }
            is_again
        });
        let is_claimed = |partition: u8, offset: u64| {
            claims.binary_search_by_key(&(partition, offset), |claim| (claim.partition, claim.offset)).is_ok()
        };
        if self.member(index).is_some_and(|member| member.outstanding.messages > 0) {
            for partition in 0..=u8::MAX {
                let is_left =
                    |entry: &OutstandingEntry| entry.member == index && !is_claimed(partition, entry.offset);
                self.rewind(partition, is_left, false, false);
            }
        }
        let before = self.member_mut(index).map(|member| {
            member.revoked = Ranges::default();
            std::mem::replace(&mut member.deliveries, Deliveries::after(claimed.len()))
        });
        let before = before.unwrap_or_default();
        for (id, deadline) in before.extended() {
            self.extended.remove(&(deadline, index, id));
        }
        claims.retain(|claim| !self.renumber(index, claim, deadline, &before));
        if let Some(member) = self.member_mut(index) {
            (member.claims, member.refused) = (claims.into(), Ranges::default());
        }
        refused.into_iter().for_each(|id| self.refuse_claim(index, id));
    }

    /// Gives a delivery of the member another number. False if it does not have it.
    fn renumber(&mut self, index: u32, claim: &Claim, deadline: Timestamp, before: &Deliveries) -> bool {
        let state = &mut self.partitions[usize::from(claim.partition)];
        let Some(entry) = state.out.get_mut(claim.offset).filter(|entry| entry.member == index) else {
            return false;
        };
        let slot = before.get(entry.delivery);
        entry.delivery = claim.id;
        if let Some(member) = self.members[index as usize].as_mut() {
            member.deliveries.keep(claim.id, claim.partition, claim.offset, deadline);
        }
        // The member has asked for more time for this one.
        if let Some(longer) = slot.map(|slot| slot.deadline).filter(|&longer| longer > deadline) {
            self.extend_delivery(index, claim.id, longer);
        }
        true
    }

    /// Returns the next stretch of the log to read for the messages that the member has named; `None` if all are known.
    ///
    /// # Errors
    /// [`MemberGone`] if the member is.
    pub fn next_recall(&mut self, key: MemberKey) -> Result<Option<Recall>, MemberGone> {
        self.find(key)?;
        loop {
            let Some(&claim) = self.member(key.index).and_then(|member| member.claims.front()) else {
                return Ok(None);
            };
            let state = self.at(claim.partition);
            let end = if state.awaited.contains(&key.index) { state.end } else { state.read };
            if claim.offset >= end {
                self.member_mut(key.index).map(|member| member.claims.pop_front());
                self.refuse_claim(key.index, claim.id);
                continue;
            }
            let from = claim.offset.min(state.read);
            let (records, bytes) = (READ_RECORDS, READ_BYTES);
            return Ok(Some(Recall { partition: Partition(claim.partition), from, records, bytes }));
        }
    }

    /// Takes in the result of a recall: records in order, and where to read on. `wanted` says of a record whether it is the
    /// group's.
    ///
    /// # Errors
    /// [`MemberGone`] if the member is.
    pub fn recall(
        &mut self,
        key: MemberKey,
        recall: &Recall,
        records: &[LogRecord],
        next: u64,
        wanted: impl Fn(&LogRecord) -> bool,
        now: Timestamp,
    ) -> Result<(), MemberGone> {
        self.find(key)?;
        let index = recall.partition.0;
        let deadline = now.plus_millis(millis(self.config.ack_deadline));
        let claims = self.take_claims(key.index, index);
        let state = self.at(index);
        // Nothing is learned where nothing is unknown, nor for what is not there.
        let end = if state.awaited.contains(&key.index) { state.end } else { 0 };
        let last = claims.iter().rev().map(|claim| claim.offset).find(|&last| last < end).unwrap_or_default();
        let mut left = claims.into_iter().peekable();
        for record in records {
            if !self.learn(index, record, last, &wanted) {
                break;
            }
            while let Some(claim) = left.next_if(|claim| claim.offset < record.offset) {
                self.refuse_claim(key.index, claim.id);
            }
            if let Some(claim) = left.next_if(|claim| claim.offset == record.offset)
                && !(wanted(record) && self.claim(key.index, claim, record, deadline))
            {
                self.refuse_claim(key.index, claim.id);
            }
        }
        let is_full = self.waiting >= MAX_WAITING;
        let state = self.at_mut(index);
        if recall.from <= state.read && state.read <= last && !is_full {
            state.read = state.read.max(next.min(last + 1));
        }
        // Nothing more comes of these.
        let end = if is_full || next <= recall.from { u64::MAX } else { next };
        while let Some(claim) = left.next_if(|claim| claim.offset < end) {
            self.refuse_claim(key.index, claim.id);
        }
        if let Some(member) = self.member_mut(key.index) {
            member.claims.extend(left);
            member.claims.make_contiguous().sort_unstable();
        }
        Ok(())
    }

    /// Takes what the member claims of a partition.
    fn take_claims(&mut self, index: u32, partition: u8) -> Vec<Claim> {
        let Some(member) = self.member_mut(index) else { return Vec::new() };
        let from = member.claims.partition_point(|claim| claim.partition < partition);
        let until = member.claims.partition_point(|claim| claim.partition <= partition);
        member.claims.drain(from..until).collect()
    }

    /// A message of the group that was not read yet, and is not behind the last that is claimed, is remembered to be delivered.
    /// False if there is no memory for more.
    fn learn(
        &mut self,
        index: u8,
        record: &LogRecord,
        last: u64,
        wanted: impl Fn(&LogRecord) -> bool,
    ) -> bool {
        if record.offset < self.at(index).read || record.offset > last {
            return true;
        }
        if self.waiting >= MAX_WAITING {
            return false;
        }
        self.at_mut(index).read = record.offset + 1;
        if wanted(record) {
            let key = self.identity.key(self.config.order_key, record.offset, &record.message);
            let state = &mut self.partitions[usize::from(index)];
            let takes = match state.lagging.get_mut(&key) {
                Some(lagging) => lagging.skip(record.offset),
                None => {
                    state.again.push_back(Undelivered { offset: record.offset, attempts: 0 });
                    true
                }
            };
            self.waiting += usize::from(takes);
        }
        true
    }

    /// A message is with the member again, or was settled. False if it is neither.
    fn claim(&mut self, index: u32, claim: Claim, record: &LogRecord, deadline: Timestamp) -> bool {
        let key = self.identity.key(self.config.order_key, record.offset, &record.message);
        let state = &mut self.partitions[usize::from(claim.partition)];
        if !state.awaited.contains(&index) {
            return state.is_settled(claim.offset, key);
        }
        let lagging = state.lagging.get_mut(&key);
        let attempts = match state.again.binary_search_by_key(&claim.offset, |waiting| waiting.offset) {
            Ok(at) => {
                let attempts = state.again.remove(at).map_or(0, |waiting| waiting.attempts);
                if let Some(lagging) = lagging.filter(|lagging| attempts > 0 && lagging.blocked.is_none()) {
                    lagging.blocked = Some(claim.offset);
                }
                attempts
            }
            Err(_) => {
                // A message that was given back is with no member, and neither is one that waits behind another.
                let is_first = |waiting: &mut Undelivered| waiting.offset == claim.offset;
                let lagging = lagging.filter(|lagging| lagging.place().is_some());
                let Some((lagging, first)) = lagging
                    .and_then(|lagging| lagging.todo.pop_front_if(is_first).map(|first| (lagging, first)))
                else {
                    return state.is_settled(claim.offset, key);
                };
                if std::mem::take(&mut lagging.alone) {
                    lagging.blocked = Some(claim.offset);
                }
                first.attempts
            }
        };
        let cost = cost(record);
        let Some(member) = self.members[index as usize].as_mut() else { return false };
        member.outstanding.add(cost);
        member.deliveries.keep(claim.id, claim.partition, claim.offset, deadline);
        let attempt = attempts.saturating_add(1);
        state.out.insert(OutstandingEntry::new(claim.offset, key, index, claim.id, attempt, cost));
        if state.owner != Some(index) {
            state.foreign += 1;
            if state.owner.is_some() && state.handover_until.is_none() {
                state.handover_until = Some(deadline);
                self.handovers += 1;
            }
        }
        self.forgot(1);
        self.forget_done(claim.partition);
        true
    }

    fn refuse_claim(&mut self, index: u32, id: u64) {
        if let Some(member) = self.member_mut(index) {
            member.refused.insert(id);
            member.deliveries.refuse(id);
        }
    }

    /// The member is back: what it has is known now. Returns the numbers of what it named and does not have.
    ///
    /// # Errors
    /// [`MemberGone`] if the member is.
    pub fn resume(&mut self, key: MemberKey) -> Result<Ranges, MemberGone> {
        self.find(key)?;
        let claims = self.member_mut(key.index).map(|member| std::mem::take(&mut member.claims));
        for claim in claims.unwrap_or_default() {
            // Of another's partition, or what could not be read in time.
            self.refuse_claim(key.index, claim.id);
        }
        self.await_no_more(key.index);
        Ok(self.member_mut(key.index).map(|member| std::mem::take(&mut member.refused)).unwrap_or_default())
    }

    /// Nothing is kept back for this member any more.
    pub(super) fn await_no_more(&mut self, index: u32) {
        let was_missing = self.member_mut(index).is_some_and(|member| std::mem::take(&mut member.is_missing));
        if !was_missing {
            return;
        }
        for partition in 0..=u8::MAX {
            let state = self.at_mut(partition);
            if state.awaited.contains(&index) {
                state.awaited.retain(|&awaited| awaited != index);
                self.hungry(partition);
            }
        }
    }

    /// Members that have lost what they had of others' partitions are not awaited there any more. Returns when that is due.
    pub(super) fn end_awaiting(&mut self, now: Timestamp) -> Option<Timestamp> {
        let until = self.awaits_until.filter(|&until| until > now);
        if self.awaits_until.is_some() && until.is_none() {
            self.awaits_until = None;
            for partition in 0..=u8::MAX {
                let state = self.at_mut(partition);
                let owner = state.owner;
                state.awaited.retain(|&awaited| Some(awaited) == owner);
                self.hungry(partition);
            }
        }
        until
    }

    fn missing_member(&self, id: &AckId) -> Option<u32> {
        let is_here = (id.group, id.generation) == (self.identity.group, self.identity.generation);
        let &index = self.numbers.get(&id.member).filter(|_| is_here)?;
        self.member(index)?;
        self.at(id.partition.0).awaited.contains(&index).then_some(index)
    }

    /// The member that this names says by it that it has the message. Returns the member, for [`Self::next_recall`], if an
    /// earlier process may have delivered that, and nothing is known of it here.
    pub fn claim_id(&mut self, id: &AckId) -> Option<MemberKey> {
        let index = self.missing_member(id)?;
        let member = self.member_mut(index).filter(|member| member.claims.len() < MAX_CLAIMS)?;
        let number = member.deliveries.skip();
        let claim = Claim { partition: id.partition.0, offset: id.offset, id: number };
        let at = member.claims.partition_point(|other| *other < claim);
        member.claims.insert(at, claim);
        Some(MemberKey { index, number: member.number })
    }
}
