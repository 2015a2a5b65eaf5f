//! From the log into the group: what to read next, and what has been read.

use gateway_core::{LogRecord, Partition};

use super::{
    super::{
        config::{MAX_AHEAD, MAX_DYING, MAX_LAGGING, MAX_WAITING, READ_BYTES, READ_RECORDS},
        lagging::Undelivered,
        member::{Gap, GapReason, MemberKey},
        partition::{PartitionKind, PartitionRead, ReadyMessage},
    },
    Group, MemberGone,
};

/// A stretch of the log that a member waits for. What it brings goes to [`Group::feed`], a failure to [`Group::failed`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Read {
    /// Partition to read.
    pub partition: Partition,
    /// From which place on.
    pub from: u64,
    /// Records at most.
    pub records: usize,
    /// Bytes at most, but one record.
    pub bytes: usize,
    ticket: u64,
}

/// Places from where a read began that cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadGap {
    /// One more than the last.
    pub until: u64,
    /// Why.
    pub reason: GapReason,
}

impl Group {
    /// A message of the group became durable; those of a partition are told in order. It is taken at once if its owner has
    /// read all before and has room. Constant time.
    pub fn appended(&mut self, partition: Partition, record: &LogRecord) {
        let index = partition.0;
        let state = &mut self.partitions[usize::from(index)];
        let end = state.end;
        state.end = end.max(record.offset + 1);
        if record.offset < state.read {
            return;
        }
        let owner = state.owner.and_then(|owner| self.members[owner as usize].as_ref());
        let cost = cost(record);
        let keeps_up = state.read >= end
            && state.again.is_empty()
            && state.foreign == 0
            && state.awaited.is_empty()
            && !state.reading.is_some_and(|reading| reading.kind == PartitionKind::Main)
            && owner.is_some_and(|owner| owner.is_here() && owner.has_room(cost))
            && self.may_read_new(index);
        if keeps_up {
            self.at_mut(index).read = record.offset + 1;
            self.admit(index, record.clone(), 0);
        } else {
            self.hungry(index);
        }
    }

    /// Returns the reads that the member wants now: at most `limit`, as long as it has credit. Each is under way from then on.
    ///
    /// # Errors
    /// [`MemberGone`] if the member is.
    pub fn wants(&mut self, member: MemberKey, limit: usize) -> Result<Vec<Read>, MemberGone> {
        self.find(member)?;
        let mut reads = Vec::new();
        while reads.len() < limit {
            let Some(owner) = self.members[member.index as usize].as_mut() else { break };
            if !owner.has_room(1) {
                break;
            }
            let Some(partition) = owner.hungry.pop_front() else { break };
            let room = owner.credit.messages - owner.outstanding.messages - owner.ahead.messages;
            let bytes = owner.credit.bytes.saturating_sub(owner.outstanding.bytes + owner.ahead.bytes);
            let bytes = bytes.min(MAX_AHEAD.saturating_sub(owner.ahead.bytes));
            let state = &mut self.partitions[usize::from(partition)];
            state.queued = false;
            if state.owner != Some(member.index) {
                continue;
            }
            let Some((kind, from)) = self.kind(partition) else { continue };
            let state = &mut self.partitions[usize::from(partition)];
            state.ticket += 1;
            state.reading = Some(PartitionRead { ticket: state.ticket, kind });
            state.replayed = kind == PartitionKind::Lagging;
            let many = state.sparse || kind == PartitionKind::Lagging;
            let records = if many { READ_RECORDS } else { room.clamp(1, READ_RECORDS) };
            let bytes = if many { READ_BYTES } else { bytes.clamp(1, READ_BYTES) };
            reads.push(Read { partition: Partition(partition), from, records, bytes, ticket: state.ticket });
        }
        Ok(reads)
    }

    /// Returns the next read of the partition: its kind and its first place.
    pub(super) fn kind(&mut self, partition: u8) -> Option<(PartitionKind, u64)> {
        let state = &self.partitions[usize::from(partition)];
        if state.reading.is_some() || state.foreign > 0 || !state.awaited.is_empty() || self.config.paused {
            return None;
        }
        if let Some(first) = state.again.front() {
            return Some((PartitionKind::Again, first.offset));
        }
        let lagging = state.lagging_place().map(|place| (PartitionKind::Lagging, place));
        let new =
            state.read < state.end && (lagging.is_none() || state.replayed) && self.may_read_new(partition);
        if new {
            return Some((PartitionKind::Main, self.at(partition).read));
        }
        lagging
    }

    /// Returns whether there is memory for the entries that new messages of the partition may need.
    fn may_read_new(&mut self, partition: u8) -> bool {
        if self.waiting >= MAX_WAITING {
            self.gated = true;
            return false;
        }
        let state = &self.partitions[usize::from(partition)];
        state.lagging.len() < MAX_LAGGING && state.dying.len() < MAX_DYING && !self.config.paused
    }

    /// The partition's owner is to ask for a read of it, if there is something to be read.
    pub(super) fn hungry(&mut self, partition: u8) {
        let state = &self.partitions[usize::from(partition)];
        let Some(owner) = state.owner else { return };
        if state.queued || self.kind(partition).is_none() {
            return;
        }
        self.at_mut(partition).queued = true;
        if let Some(owner) = self.member_mut(owner) {
            owner.hungry.push_back(partition);
        }
        self.wake(owner);
    }

    /// A read has failed; it will be asked for again.
    pub fn failed(&mut self, read: &Read) {
        let state = self.at_mut(read.partition.0);
        if state.reading.is_some_and(|reading| reading.ticket == read.ticket) {
            state.reading = None;
            self.hungry(read.partition.0);
        }
    }

    /// Takes in the result of a read: records in order, places before them that are missing, and where to read on. `wanted` says
    /// of a record whether it is the group's; it is asked of those that the group has not seen before.
    pub fn feed(
        &mut self,
        read: &Read,
        records: Vec<LogRecord>,
        next: u64,
        missing: Option<ReadGap>,
        mut wanted: impl FnMut(&LogRecord) -> bool,
    ) {
        let index = read.partition.0;
        let state = self.at_mut(index);
        let Some(reading) = state.reading.take_if(|reading| reading.ticket == read.ticket) else { return };
        if let Some(missing) = missing {
            self.miss(index, reading.kind, missing);
        }
        match reading.kind {
            PartitionKind::Main => self.feed_new(index, read, records, next, &mut wanted),
            PartitionKind::Again => self.feed_again(index, records, next.max(read.from + 1)),
            PartitionKind::Lagging => self.feed_lagging(index, read.from, records, next, &mut wanted),
        }
        self.hungry(index);
    }

    fn feed_new(
        &mut self,
        index: u8,
        read: &Read,
        records: Vec<LogRecord>,
        next: u64,
        wanted: &mut impl FnMut(&LogRecord) -> bool,
    ) {
        let (came, mut taken) = (records.len(), 0);
        for record in records {
            if record.offset < self.at(index).read {
                continue;
            }
            let is_wanted = wanted(&record);
            if is_wanted && !self.owner_has_room(index, &record) {
                return;
            }
            self.at_mut(index).read = record.offset + 1;
            if is_wanted {
                taken += 1;
                self.admit(index, record, 0);
            }
        }
        let state = self.at_mut(index);
        state.sparse = taken * 4 < came;
        state.read = state.read.max(next);
        if state.read <= read.from {
            // There is nothing, whatever was said of its end.
            state.end = state.read;
        }
        state.end = state.end.max(state.read);
    }

    fn feed_again(&mut self, index: u8, records: Vec<LogRecord>, next: u64) {
        for record in records {
            self.lose_again(index, record.offset);
            let Some(&first) = self.at(index).again.front() else { return };
            if first.offset != record.offset {
                continue;
            }
            if !self.owner_has_room(index, &record) {
                return;
            }
            self.at_mut(index).again.pop_front();
            self.forgot(1);
            self.admit(index, record, first.attempts);
        }
        self.lose_again(index, next);
    }

    /// Counts messages before this place that were to be read again as lost.
    fn lose_again(&mut self, index: u8, until: u64) {
        let state = self.at_mut(index);
        let lost = state.again.partition_point(|waiting| waiting.offset < until);
        if lost > 0 {
            state.again.drain(..lost);
            self.lost(index, lost);
        }
    }

    fn feed_lagging(
        &mut self,
        index: u8,
        from: u64,
        records: Vec<LogRecord>,
        next: u64,
        wanted: &mut impl FnMut(&LogRecord) -> bool,
    ) {
        let mut until = next.max(from + 1);
        for record in records {
            let key = self.identity.key(self.config.order_key, record.offset, &record.message);
            let state = self.at(index);
            let Some(lagging) = state.lagging.get(&key) else { continue };
            let Some(place) = lagging.place().filter(|&place| place <= record.offset && place >= from) else {
                continue;
            };
            let remembered = lagging.todo.front().is_some();
            // A remembered place before this record that did not come is lost, which the end of this function sees.
            let expected = lagging.todo.iter().find(|waiting| waiting.offset >= record.offset);
            let is_next = match expected {
                Some(waiting) => waiting.offset == record.offset,
                None => {
                    lagging.scan.is_some_and(|scan| scan <= record.offset)
                        && record.offset < state.read
                        && wanted(&record)
                }
            };
            if !is_next {
                continue;
            }
            if !self.owner_has_room(index, &record) {
                until = record.offset;
                break;
            }
            if remembered {
                self.lose_todo(index, key, record.offset);
            }
            debug_assert!(place <= record.offset);
            self.deliver_lagging(index, key, record);
        }
        self.pass_lagging(index, from, until);
    }

    /// The next message of a key that lags is there.
    fn deliver_lagging(&mut self, index: u8, key: u64, record: LogRecord) {
        let state = &mut self.partitions[usize::from(index)];
        let Some(lagging) = state.lagging.get_mut(&key) else { return };
        let (mut attempts, mut forgotten) = (0, 0);
        if let Some(first) = lagging.todo.pop_front_if(|first| first.offset == record.offset) {
            (attempts, forgotten) = (first.attempts, 1);
        } else {
            lagging.scan = Some(record.offset + 1).filter(|&scan| scan < state.read);
        }
        if std::mem::take(&mut lagging.alone) {
            lagging.blocked = Some(record.offset);
        }
        self.ready(index, ReadyMessage { key, attempts, cost: cost(&record), record });
        self.forgot(forgotten);
    }

    /// Counts remembered messages of a key before this place as lost.
    fn lose_todo(&mut self, index: u8, key: u64, until: u64) {
        let Some(lagging) = self.at_mut(index).lagging.get_mut(&key) else { return };
        let lost = lagging.todo.partition_point(|waiting| waiting.offset < until);
        if lost > 0 {
            lagging.todo.drain(..lost);
            lagging.alone = false;
            self.lost(index, lost);
        }
    }

    /// A stretch was read for keys that lag: those that were not before it have read it too.
    fn pass_lagging(&mut self, index: u8, from: u64, until: u64) {
        let read = self.at(index).read;
        let passed: Vec<u64> = self
            .at(index)
            .lagging
            .iter()
            .filter(|(_, lagging)| lagging.place().is_some_and(|place| place >= from && place < until))
            .map(|(&key, _)| key)
            .collect();
        for key in passed {
            self.lose_todo(index, key, until);
            if let Some(lagging) = self.at_mut(index).lagging.get_mut(&key) {
                let scan = lagging.scan.map(|scan| scan.max(until));
                lagging.scan = scan.filter(|&scan| scan < read);
            }
        }
        self.forget_done(index);
    }

    /// Keys of which nothing waits now are ordinary keys again.
    pub(super) fn forget_done(&mut self, index: u8) {
        let state = self.at_mut(index);
        if !state.lagging.is_empty() {
            state.lagging.retain(|_, lagging| lagging.due.is_some() || !lagging.is_done());
        }
    }

    /// A message that was read goes to the partition's owner, or behind what waits of its key.
    fn admit(&mut self, index: u8, record: LogRecord, attempts: u32) {
        let key = self.identity.key(self.config.order_key, record.offset, &record.message);
        let state = &mut self.partitions[usize::from(index)];
        if !state.lagging.is_empty()
            && let Some(lagging) = state.lagging.get_mut(&key)
        {
            let offset = record.offset;
            let takes = if offset + 1 == state.read && attempts == 0 {
                lagging.skip(offset)
            } else {
                lagging.give_back(Undelivered { offset, attempts })
            };
            self.waiting += usize::from(takes);
            return;
        }
        self.ready(index, ReadyMessage { key, attempts, cost: cost(&record), record });
    }

    fn ready(&mut self, index: u8, one: ReadyMessage) {
        let state = &mut self.partitions[usize::from(index)];
        if let Some(owner) = state.owner.and_then(|owner| self.members[owner as usize].as_mut()) {
            owner.ahead.add(one.cost);
        }
        state.ready.push_back(one);
        self.list(index);
    }

    /// The partition's owner is to take what is ready of it.
    pub(super) fn list(&mut self, index: u8) {
        let state = &mut self.partitions[usize::from(index)];
        let Some(owner) = state.owner else { return };
        if state.ready.is_empty() || state.foreign > 0 || self.config.paused {
            return;
        }
        if !state.listed {
            state.listed = true;
            if let Some(member) = self.members[owner as usize].as_mut() {
                member.ready.push_back(index);
            }
        }
        self.wake(owner);
    }

    fn owner_has_room(&self, index: u8, record: &LogRecord) -> bool {
        let owner = self.at(index).owner.and_then(|owner| self.member(owner));
        owner.is_some_and(|owner| owner.has_room(cost(record)))
    }

    /// A stretch cannot be read. What waits in it is lost when the rest of the read is looked at; the owner is told.
    fn miss(&mut self, index: u8, kind: PartitionKind, missing: ReadGap) {
        let state = self.at(index);
        let from = match kind {
            PartitionKind::Main => Some(state.read),
            PartitionKind::Again => state.again.front().map(|first| first.offset),
            PartitionKind::Lagging => state.lagging_place(),
        };
        let Some(from) = from.filter(|&from| from < missing.until) else { return };
        let owner = state.owner;
        if kind == PartitionKind::Main {
            self.at_mut(index).read = missing.until;
            self.soil(index);
        }
        if let Some(owner) = owner {
            let ReadGap { until, reason } = missing;
            // Nobody knows what was there.
            let gap = Gap { partition: Partition(index), from, until, reason, count: None };
            if let Some(member) = self.member_mut(owner) {
                member.add_gap(gap);
            }
            self.wake(owner);
        }
    }

    /// This number of remembered messages is gone.
    pub(super) fn lost(&mut self, index: u8, messages: usize) {
        self.totals.lost += messages as u64;
        self.soil(index);
        self.forgot(messages);
    }
}

pub(super) fn cost(record: &LogRecord) -> u32 {
    u32::try_from(record.message.cost()).unwrap_or(u32::MAX)
}
