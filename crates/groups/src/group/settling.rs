//! Answers of members to their deliveries: acknowledged, given back, extended.

use std::{collections::VecDeque, iter, time::Duration};

use gateway_core::{Partition, Timestamp};

use super::{
    super::{
        ack_id::AckId,
        config::{MAX_REASON, OrderKey, millis},
        lagging::Undelivered,
        member::MemberKey,
        outstanding::OutstandingEntry,
        partition::{Dying, ReadyMessage},
        ranges::{IdRange, Ranges},
    },
    Group, MemberGone,
};

/// Answer to acknowledgements, once they are on disk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SettlingAnswer {
    /// These never come again.
    pub ok: Ranges,
    /// Too late: these come, or came, again.
    pub lost: Ranges,
}

/// Result of one acknowledgement without a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AckResult {
    /// The message never comes again. Also if it was acknowledged before.
    Ok,
    /// Too late: it comes, or came, again.
    Fenced,
    /// Not of this group.
    Invalid,
}

/// Terms on which messages are given back.
#[derive(Debug, Clone, Default)]
pub struct Nack {
    /// Not sooner than this; otherwise the group's pause.
    pub delay: Option<Duration>,
    /// Kept with the message; cut at [`MAX_REASON`].
    pub reason: String,
    /// Give up at once.
    pub dead_letter: bool,
}

impl Group {
    /// Acknowledges deliveries of the member. The answer may be given once [`changes`](Group::changes) are written that were
    /// taken after this call.
    ///
    /// # Errors
    /// [`MemberGone`] if the member is.
    pub fn acknowledge(&mut self, key: MemberKey, ranges: &Ranges) -> Result<SettlingAnswer, MemberGone> {
        self.find(key)?;
        let mut answer = SettlingAnswer::default();
        for range in ranges.iter() {
            let Some(member) = self.member(key.index) else { break };
            member.deliveries.classify(range, &mut answer.ok, &mut answer.lost);
            for id in member.deliveries.within(range) {
                self.settle(key.index, id);
            }
        }
        Ok(answer)
    }

    /// Gives deliveries of the member back: each comes again after its pause, and what came later of its key is void and
    /// comes after it. What the member no longer has is passed over. At most `limit` at once, since each looks through
    /// what came later; returns what is left for the next call.
    ///
    /// # Errors
    /// [`MemberGone`] if the member is.
    pub fn nack(
        &mut self,
        key: MemberKey,
        ranges: &Ranges,
        nack: &Nack,
        now: Timestamp,
        limit: usize,
    ) -> Result<Ranges, MemberGone> {
        self.find(key)?;
        let mut room = limit;
        let mut further = ranges.iter();
        while let Some(range) = further.next() {
            let Some(member) = self.member(key.index) else { break };
            let ids = member.deliveries.within(range);
            for &id in ids.iter().take(room) {
                self.give_back_delivery(key.index, id, nack, now);
            }
            if let Some(&first) = ids.get(room) {
                let left = IdRange { first, last: range.last };
                return Ok(Ranges::of(iter::once(left).chain(further)));
            }
            room -= ids.len();
        }
        Ok(Ranges::default())
    }

    /// Gives deliveries of the member so long from now on. A message of a partition that is handed over is kept until the
    /// handover ends, and no longer.
    ///
    /// # Errors
    /// [`MemberGone`] if the member is.
    pub fn extend(
        &mut self,
        key: MemberKey,
        ranges: &Ranges,
        time: Duration,
        now: Timestamp,
    ) -> Result<(), MemberGone> {
        self.find(key)?;
        for range in ranges.iter() {
            let Some(member) = self.member(key.index) else { break };
            for id in member.deliveries.within(range) {
                self.extend_delivery(key.index, id, now.plus_millis(millis(time)));
            }
        }
        Ok(())
    }

    /// Acknowledges one delivery by its name; the answer may be given as that of [`Self::acknowledge`].
    pub fn acknowledge_id(&mut self, id: &AckId, now: Timestamp) -> AckResult {
        match self.locate(id, now) {
            Ok((index, delivery)) => {
                self.settle(index, delivery);
                AckResult::Ok
            }
            Err(result) => result,
        }
    }

    /// Gives one delivery back by its name.
    pub fn nack_id(&mut self, id: &AckId, nack: &Nack, now: Timestamp) -> AckResult {
        match self.locate(id, now) {
            Ok((index, delivery)) => {
                self.give_back_delivery(index, delivery, nack, now);
                AckResult::Ok
            }
            Err(result) => result,
        }
    }

    /// Gives one delivery so long from now on, by its name.
    pub fn extend_id(&mut self, id: &AckId, time: Duration, now: Timestamp) -> AckResult {
        match self.locate(id, now) {
            Ok((index, delivery)) => {
                self.extend_delivery(index, delivery, now.plus_millis(millis(time)));
                AckResult::Ok
            }
            Err(result) => result,
        }
    }

    /// The member that has what is named and its number there, or what to answer if none has.
    fn locate(&mut self, id: &AckId, now: Timestamp) -> Result<(u32, u64), AckResult> {
        if id.group != self.identity.group || id.generation > self.identity.generation {
            return Err(AckResult::Invalid);
        }
        if id.generation != self.identity.generation {
            return Err(AckResult::Fenced);
        }
        if let Some(&index) = self.numbers.get(&id.member)
            && let Some(member) = self.member_mut(index)
        {
            if member.fetches {
                member.lease_until = Some(now.plus_millis(member.lease));
            }
            let slot = member.deliveries.get(id.delivery);
            if slot.is_some_and(|slot| slot.partition == id.partition.0 && slot.offset == id.offset) {
                return Ok((index, id.delivery));
            }
            // An earlier process numbered the deliveries of its members differently.
            let is_restored = member.is_restored;
            let entry = self.at(id.partition.0).out.get(id.offset);
            if let Some(entry) = entry.filter(|entry| is_restored && entry.member == index) {
                return Ok((index, entry.delivery));
            }
        }
        let settled = self.at(id.partition.0).is_settled(id.offset, id.key);
        Err(if settled { AckResult::Ok } else { AckResult::Fenced })
    }

    /// Takes a delivery from its member. `void` if an acknowledgement of it is too late now.
    pub(super) fn take_back(&mut self, member: u32, id: u64, void: bool) -> Option<(u8, OutstandingEntry)> {
        let slot = self.member(member)?.deliveries.get(id)?;
        let entry = self.at_mut(slot.partition).out.remove(slot.offset);
        debug_assert!(entry.is_some_and(|entry| entry.member == member && entry.delivery == id));
        let entry = entry?;
        self.release(&entry, void);
        Some((slot.partition, entry))
    }

    fn settle(&mut self, member: u32, id: u64) {
        let Some((partition, entry)) = self.take_back(member, id, false) else { return };
        self.totals.settled += 1;
        self.totals.settled_bytes += u64::from(entry.cost);
        self.soil(partition);
        self.returned(partition, member);
        self.unblock(partition, &entry);
    }

    /// A message is settled: what waited for it may come.
    fn unblock(&mut self, partition: u8, entry: &OutstandingEntry) {
        let state = self.at_mut(partition);
        if state.lagging.is_empty() {
            return;
        }
        let Some(lagging) = state.lagging.get_mut(&entry.key) else { return };
        if lagging.blocked == Some(entry.offset) {
            lagging.blocked = None;
            lagging.reason = None;
            if lagging.due.is_none() && lagging.is_done() {
                state.lagging.remove(&entry.key);
            }
            self.hungry(partition);
        }
    }

    fn give_back_delivery(&mut self, member: u32, id: u64, nack: &Nack, now: Timestamp) {
        let Some((partition, entry)) = self.take_back(member, id, true) else { return };
        self.totals.nacked += 1;
        let delay = nack.delay.map_or_else(|| self.config.backoff(entry.attempt), millis);
        let reason: String = cut(&nack.reason, MAX_REASON).to_owned();
        self.give_back(partition, entry, delay, Some(reason), nack.dead_letter, now);
        self.returned(partition, member);
    }

    /// The deadline of a delivery has passed.
    pub(super) fn time_out(&mut self, member: u32, id: u64, now: Timestamp) {
        let Some((partition, entry)) = self.take_back(member, id, true) else { return };
        self.totals.timed_out += 1;
        if let Some(member) = self.member_mut(member) {
            member.revoked.insert(id);
        }
        self.wake(member);
        let delay = self.config.backoff(entry.attempt);
        self.give_back(partition, entry, delay, None, false, now);
        self.returned(partition, member);
    }

    /// A message has failed: it comes again after `delay`, and then what came later of its key; or it is given up.
    fn give_back(
        &mut self,
        partition: u8,
        entry: OutstandingEntry,
        delay: u64,
        reason: Option<String>,
        give_up: bool,
        now: Timestamp,
    ) {
        self.soil(partition);
        if give_up || self.config.gives_up(entry.attempt) {
            let before = self.at_mut(partition).lagging.get_mut(&entry.key);
            let before = before.filter(|lagging| lagging.blocked == Some(entry.offset));
            let before = before.and_then(|lagging| lagging.reason.take());
            let reason = reason.map_or_else(|| before.unwrap_or_default(), String::into_boxed_str);
            self.give_up(partition, entry.offset, Dying { attempts: entry.attempt, reason });
            self.unblock(partition, &entry);
            self.hungry(partition);
            return;
        }
        self.revoke_later(partition, &entry);
        let state = &mut self.partitions[usize::from(partition)];
        let lagging = state.lagging.entry(entry.key).or_default();
        let before = lagging.due.take();
        if lagging.blocked == Some(entry.offset) {
            lagging.blocked = None;
        }
        if lagging.give_back(Undelivered { offset: entry.offset, attempts: entry.attempt }) {
            self.waiting += 1;
        }
        lagging.alone = true;
        if let Some(reason) = reason {
            lagging.reason = Some(reason.into_boxed_str());
        }
        if let Some(before) = before {
            self.delayed.remove(&(before, partition, entry.key));
        }
        if delay == 0 {
            self.hungry(partition);
        } else {
            let due = now.plus_millis(delay);
            lagging.due = Some(due);
            self.delayed.insert((due, partition, entry.key));
        }
    }

    /// Revokes later deliveries of the key of a message that has failed: they must come again after it.
    fn revoke_later(&mut self, partition: u8, entry: &OutstandingEntry) {
        if self.config.order_key == OrderKey::None {
            return;
        }
        let state = &mut self.partitions[usize::from(partition)];
        let is_later = |other: &OutstandingEntry| other.key == entry.key && other.offset > entry.offset;
        let later: Vec<OutstandingEntry> =
            state.out.from(entry.offset).filter(|other| is_later(other)).copied().collect();
        let has_ready = state.ready.iter().any(|one| one.key == entry.key);
        if later.is_empty() && !has_ready {
            return;
        }
        state.lagging.entry(entry.key).or_default();
        for other in later {
            let state = self.at_mut(partition);
            state.out.remove(other.offset);
            let waiting = Undelivered { offset: other.offset, attempts: other.attempt - 1 };
            let takes = self.at_mut(partition).wait(other.key, waiting);
            self.waiting += usize::from(takes);
            self.release(&other, true);
            if let Some(member) = self.member_mut(other.member) {
                member.revoked.insert(other.delivery);
            }
            self.wake(other.member);
            self.returned(partition, other.member);
        }
        if has_ready {
            self.unread_key(partition, entry.key);
        }
    }

    /// Forgets the messages of a key that were read and not delivered, to be read again.
    fn unread_key(&mut self, partition: u8, key: u64) {
        let state = &mut self.partitions[usize::from(partition)];
        let mut owner = state.owner.and_then(|index| self.members[index as usize].as_mut());
        let (gone, kept): (VecDeque<ReadyMessage>, VecDeque<ReadyMessage>) =
            std::mem::take(&mut state.ready).into_iter().partition(|one| one.key == key);
        state.ready = kept;
        for one in gone {
            if let Some(owner) = &mut owner {
                owner.ahead.sub(one.cost);
            }
            let waiting = Undelivered { offset: one.record.offset, attempts: one.attempts };
            self.waiting += usize::from(state.wait(key, waiting));
        }
        if let Some(owner) = state.owner {
            self.wake(owner);
        }
    }

    /// A message is given up: from [`Self::given_up`] on it is the caller's to keep a copy.
    pub(super) fn give_up(&mut self, partition: u8, offset: u64, dying: Dying) {
        self.at_mut(partition).dying.insert(offset, dying);
        self.dying.push_back((partition, offset));
    }

    pub(super) fn extend_delivery(&mut self, index: u32, id: u64, deadline: Timestamp) {
        let Some(member) = self.members[index as usize].as_mut() else { return };
        let Some(slot) = member.deliveries.get(id) else { return };
        let state = &self.partitions[usize::from(slot.partition)];
        let limit = if state.owner == Some(index) { None } else { state.handover_until };
        let deadline = limit.map_or(deadline, |limit| deadline.min(limit));
        if let Some(before) = member.deliveries.extend(id, deadline) {
            if let Some(before) = before {
                self.extended.remove(&(before, index, id));
            }
            self.extended.insert((deadline, index, id));
        }
    }

    /// Takes messages that were given up: at most `limit`. Each is read from the log by the caller, and [buried](Self::bury)
    /// when its copy is about to be written.
    pub fn given_up(&mut self, limit: usize) -> Vec<(Partition, u64)> {
        let count = limit.min(self.dying.len());
        self.dying.drain(..count).map(|(partition, offset)| (Partition(partition), offset)).collect()
    }

    /// Returns whether [`Self::given_up`] would return something.
    pub fn has_given_up(&self) -> bool {
        !self.dying.is_empty()
    }

    /// A message that was given up could not be copied yet: it is among [`Self::given_up`] again.
    pub fn not_buried(&mut self, partition: Partition, offset: u64) {
        if self.at(partition.0).dying.contains_key(&offset) {
            self.dying.push_back((partition.0, offset));
        }
    }

    /// Settles a message that was given up: its attempts and the reason of the last nack. `None` if the group has been moved
    /// meanwhile. Its copy must be in the same write as the [`changes`](Group::changes) taken next.
    pub fn bury(&mut self, partition: Partition, offset: u64) -> Option<(u32, String)> {
        let dying = self.at_mut(partition.0).dying.remove(&offset)?;
        self.totals.given_up += 1;
        self.soil(partition.0);
        self.hungry(partition.0);
        Some((dying.attempts, dying.reason.into()))
    }
}

/// The start of a text, in whole characters.
fn cut(text: &str, bytes: usize) -> &str {
    &text[..text.floor_char_boundary(bytes)]
}
