//! Moves of the whole group: seeks, and retention.

use gateway_core::Partition;

use super::{
    super::{
        lagging::Undelivered,
        member::{Gap, GapReason},
        partition::{PartitionState, ReadyMessage},
        progress::Progress,
    },
    Group,
};

impl Group {
    /// Moves the group: each partition to the place that `to` says. What is outstanding is void, and acknowledgements of it
    /// by name are fenced, since [`GroupIdentity::generation`](super::super::GroupIdentity) grows.
    pub fn seek(&mut self, to: impl Fn(Partition) -> u64) {
        self.identity.generation += 1;
        for partition in Partition::all() {
            let index = partition.0;
            for entry in self.at_mut(index).out.extract(|_| true) {
                self.release(&entry, true);
                if let Some(member) = self.member_mut(entry.member) {
                    member.revoked.insert(entry.delivery);
                }
                self.wake(entry.member);
                self.returned(index, entry.member);
            }
            self.unread(index);
            let waiting = self.remembered(index);
            let state = &mut self.partitions[usize::from(index)];
            state.again.clear();
            state.lagging.clear();
            state.dying.clear();
            state.gap = None;
            state.awaited.clear();
            state.read = to(partition);
            state.end = state.end.max(state.read);
            self.forgot(waiting);
            self.soil(index);
        }
        self.delayed.clear();
        self.dying.clear();
        for index in 0..=u8::MAX {
            self.hungry(index);
        }
    }

    /// Keeps nothing before `floor` for the group from now on: messages that wait there are lost, and the partition's owner is
    /// told. Members may still settle the messages that they have. Returns the number of messages that were seen before and are
    /// lost, see [`Self::seen_before`]; messages between [`Self::place`] and the floor are the caller's to count: `unread`, if it
    /// knows.
    pub fn raise(&mut self, partition: Partition, floor: u64, unread: Option<u64>) -> usize {
        let index = partition.0;
        let from = self.at(index).floor();
        if from >= floor {
            return 0;
        }
        let state = &mut self.partitions[usize::from(index)];
        let mut owner = state.owner.and_then(|owner| self.members[owner as usize].as_mut());
        let mut lost = 0;
        let skips = state.read < floor;
        let mut ready = std::mem::take(&mut state.ready);
        ready.retain(|one: &ReadyMessage| {
            let stays = one.record.offset >= floor;
            if !stays {
                lost += 1;
                if let Some(owner) = &mut owner {
                    owner.ahead.sub(one.cost);
                }
                if let Some(lagging) = state.lagging.get_mut(&one.key)
                    && lagging.blocked == Some(one.record.offset)
                {
                    lagging.blocked = None;
                }
            }
            stays
        });
        state.ready = ready;
        let before = places(state);
        let again = state.again.partition_point(|waiting| waiting.offset < floor);
        state.again.drain(..again);
        for lagging in state.lagging.values_mut() {
            let gone = lagging.todo.partition_point(|waiting| waiting.offset < floor);
            lagging.todo.drain(..gone);
            lagging.alone &= gone == 0;
            lagging.scan = lagging.scan.map(|scan| scan.max(floor)).filter(|&scan| scan < state.read);
        }
        let forgotten = before - places(state);
        lost += forgotten;
        state.dying.retain(|&offset, _| offset >= floor);
        state.read = state.read.max(floor);
        state.end = state.end.max(state.read);
        state.cancel_read();
        // Once: what members have from before may stay for long.
        let count = if skips { unread } else { Some(0) }.map(|unread| unread + lost as u64);
        if count != Some(0) {
            let gap = Gap { partition, from, until: floor, reason: GapReason::Removed, count };
            match state.owner {
                Some(owner) => {
                    if let Some(member) = self.member_mut(owner) {
                        member.add_gap(gap);
                    }
                    self.wake(owner);
                }
                None => state.gap = Some(state.gap.map_or(gap, |first| first.with(gap))),
            }
        }
        self.totals.lost += lost as u64;
        self.forgot(forgotten);
        self.forget_done(index);
        self.soil(index);
        self.hungry(index);
        lost
    }

    /// Nothing of the group is before this place of a partition that was not seen: it need not be read. Only where nothing
    /// else waits.
    pub fn pass(&mut self, partition: Partition, from: u64, next: u64) {
        let state = self.at_mut(partition.0);
        if state.read == from && state.reading.is_none() && next > from {
            state.read = next;
            state.end = state.end.max(next);
        }
    }

    /// Returns the place from which on the partition is unread.
    pub fn place(&self, partition: Partition) -> u64 {
        self.at(partition.0).read
    }

    /// Tells whether nothing of the partition waits but unread messages, and no member will read them.
    pub fn is_unread(&self, partition: Partition) -> bool {
        let state = self.at(partition.0);
        state.owner.is_none() && state.is_idle() && state.read < state.end
    }

    /// Returns whether the partition has no member to read it.
    pub fn is_unowned(&self, partition: Partition) -> bool {
        self.at(partition.0).owner.is_none()
    }

    /// Messages from before this place that were read and that no member has.
    pub fn seen_before(&self, partition: Partition, place: u64) -> usize {
        let state = self.at(partition.0);
        let ready = state.ready.iter().filter(|one| one.record.offset < place).count();
        let before = |waiting: &Undelivered| waiting.offset < place;
        let again = state.again.partition_point(before);
        let todo = state.lagging.values().map(|lagging| lagging.todo.partition_point(before));
        ready + again + todo.sum::<usize>()
    }

    /// Messages from before this place that members have: not lost, they may still settle them.
    pub fn outstanding_before(&self, partition: Partition, place: u64) -> usize {
        let out = &self.at(partition.0).out;
        out.len() - out.from(place).count()
    }

    /// Returns whether no message of the partition waits, as far as is known.
    pub fn is_idle(&self, partition: Partition) -> bool {
        let state = self.at(partition.0);
        state.is_idle() && state.read >= state.end
    }

    /// The first place of the partition that is not settled.
    pub fn floor(&self, partition: Partition) -> u64 {
        self.at(partition.0).floor()
    }

    /// Returns the group's progress in the partition, as it would be written.
    pub fn progress(&self, partition: Partition) -> Progress {
        self.at(partition.0).progress()
    }

    fn remembered(&self, index: u8) -> usize {
        places(self.at(index))
    }
}

fn places(state: &PartitionState) -> usize {
    state.again.len() + state.lagging.values().map(|lagging| lagging.todo.len()).sum::<usize>()
}
