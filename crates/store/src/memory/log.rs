//! A [`PartitionedLog`] in memory, for the tests of others: it can be slow, out of order between partitions, full and
//! failing.

use std::{collections::BTreeMap, sync::Arc};

use gateway_core::{
    Commit, Feeder, GroupId, LogRecord, Message, NoRoom, PARTITIONS, Partition, SharedMessage, Shares,
    Timestamp,
};
use parking_lot::Mutex;

use crate::{
    BoxFuture, LogFull, LogRead, LogWatcher, Mark, MissingReason, MissingRecords, PartitionBounds,
    PartitionedLog, ReadLimit, Slice, StoreError, StoreHealth,
};

/// Messages between two marks.
const MARK_EVERY: u64 = 100;

/// Options of a [`MemoryLog`].
#[derive(Debug, Clone)]
pub struct MemoryLogOptions {
    /// Cost of messages that may wait; beyond it nothing is taken.
    pub max_waiting_bytes: usize,
    /// Messages wait until [`MemoryLog::settle`] or [`MemoryLog::fail`] is called.
    pub held: bool,
    /// The distance between two places of a partition: larger than 1, there are holes.
    pub stride: u64,
    /// Reads are answered later, as from a disk.
    pub late: bool,
}

impl Default for MemoryLogOptions {
    fn default() -> Self {
        Self { max_waiting_bytes: 64 << 20, held: false, stride: 1, late: false }
    }
}

/// A log in memory.
pub struct MemoryLog {
    options: MemoryLogOptions,
    /// Bytes of waiting messages, by sender.
    shares: Shares,
    state: Mutex<MemoryLogState>,
    /// The last that was set: a log that is opened again is the same one here.
    watcher: Mutex<Option<Arc<dyn LogWatcher>>>,
}

/// Messages and their cost, by group.
type MemoryLogCounts = BTreeMap<GroupId, (u64, u64)>;

#[derive(Default)]
struct MemoryLogState {
    waiting: Vec<WaitingAppend>,
    submitted: u64,
    partitions: Vec<MemoryPartition>,
    counts: MemoryLogCounts,
    marks: Vec<(u64, Timestamp, MemoryLogCounts)>,
    /// One for all partitions.
    next: u64,
    written: u64,
    latest: Timestamp,
    failing: bool,
}

#[derive(Default)]
struct MemoryPartition {
    records: BTreeMap<u64, LogRecord>,
    /// Places that are told as damaged.
    damaged: BTreeMap<u64, ()>,
    start: u64,
    end: u64,
}

struct WaitingAppend {
    /// Number of messages submitted before this one.
    number: u64,
    partition: Partition,
    groups: Arc<[GroupId]>,
    message: Arc<SharedMessage>,
    commit: Option<Arc<Commit>>,
}

impl Default for MemoryLog {
    fn default() -> Self {
        Self::new(MemoryLogOptions::default())
    }
}

impl MemoryLog {
    /// An empty one.
    pub fn new(options: MemoryLogOptions) -> Self {
        let mut state =
            MemoryLogState { marks: vec![(0, Timestamp(0), BTreeMap::new())], ..MemoryLogState::default() };
        state.partitions.resize_with(PARTITIONS, MemoryPartition::default);
        let shares = Shares::new(options.max_waiting_bytes);
        Self { options, shares, state: Mutex::new(state), watcher: Mutex::default() }
    }

    /// Returns the number of waiting messages.
    pub fn waiting(&self) -> usize {
        self.state.lock().waiting.len()
    }

    /// Makes messages durable for which `choose` is true, unless one before them in their partition stays: called again and
    /// again, it mixes the partitions. Returns how many.
    pub fn settle(&self, mut choose: impl FnMut(Partition) -> bool) -> usize {
        let mut state = self.state.lock();
        let (mut passed, mut settled, mut rest) = ([false; PARTITIONS], Vec::new(), Vec::new());
        for waiting in std::mem::take(&mut state.waiting) {
            let passed = &mut passed[usize::from(waiting.partition.0)];
            if !*passed && choose(waiting.partition) {
                settled.push(waiting);
            } else {
                *passed = true;
                rest.push(waiting);
            }
        }
        state.waiting = rest;
        self.write(state, settled)
    }

    /// Makes all that waits durable.
    pub fn settle_all(&self) -> usize {
        self.settle(|_| true)
    }

    /// All that waits is refused, as by a disk that fails.
    pub fn fail(&self) -> usize {
        let waiting = {
            let mut state = self.state.lock();
            state.failing = true;
            std::mem::take(&mut state.waiting)
        };
        for WaitingAppend { message, commit, .. } in &waiting {
            self.shares.give_back(Feeder::from(&**message), message.cost());
            if let Some(commit) = commit {
                commit.refuse();
            }
        }
        waiting.len()
    }

    /// Makes a record unreadable.
    pub fn damage(&self, partition: Partition, offset: u64) {
        let part = &mut self.state.lock().partitions[usize::from(partition.0)];
        if part.records.remove(&offset).is_some() {
            part.damaged.insert(offset, ());
        }
    }

    fn write(
        &self,
        mut state: parking_lot::MutexGuard<'_, MemoryLogState>,
        settled: Vec<WaitingAppend>,
    ) -> usize {
        let count = settled.len();
        let (mut records, mut commits) = (Vec::with_capacity(count), Vec::new());
        for WaitingAppend { partition, groups, message, commit, .. } in settled {
            let cost = message.cost();
            self.shares.give_back(Feeder::from(&*message), cost);
            state.failing = false;
            let offset = state.next;
            state.next += self.options.stride.max(1);
            state.written += 1;
            state.latest = state.latest.max(message.received);
            if state.written.is_multiple_of(MARK_EVERY) {
                let mark = (offset, state.latest, state.counts.clone());
                state.marks.push(mark);
            }
            for group in &*groups {
                let count = state.counts.entry(*group).or_default();
                count.0 += 1;
                count.1 += cost as u64;
            }
            let record = LogRecord { offset, groups, message };
            let part = &mut state.partitions[usize::from(partition.0)];
            part.records.insert(offset, record.clone());
            part.end = offset + 1;
            records.push((partition, record));
            commits.extend(commit);
        }
        drop(state);
        commits.iter().for_each(|commit| commit.done());
        let watcher = self.watcher.lock().clone();
        if count > 0
            && let Some(watcher) = watcher
        {
            watcher.appended(&records);
        }
        count
    }

    fn slice(&self, partition: Partition, from: u64, limit: ReadLimit) -> Slice {
        let state = self.state.lock();
        let part = &state.partitions[usize::from(partition.0)];
        let mut slice = Slice { next: from, ..Slice::default() };
        if from < part.start {
            slice.missing = Some(MissingRecords { reason: MissingReason::Trimmed, until: part.start });
            slice.next = part.start;
        }
        let mut bytes = 0;
        loop {
            let record = part.records.range(slice.next..).next();
            let damaged = part.damaged.range(slice.next..).next().map(|(offset, ())| *offset);
            if let Some(damaged) = damaged.filter(|at| record.is_none_or(|(offset, _)| at < offset)) {
                let another = slice.missing.is_some_and(|missing| missing.reason != MissingReason::Damaged);
                if !slice.records.is_empty() || another {
                    return slice;
                }
                slice.missing = Some(MissingRecords { reason: MissingReason::Damaged, until: damaged + 1 });
                slice.next = damaged + 1;
                continue;
            }
            let Some((offset, record)) = record else {
                slice.next = slice.next.max(state.next);
                return slice;
            };
            bytes += record.message.cost();
            let full = slice.records.len() >= limit.records.max(1) || bytes > limit.bytes;
            if full && !slice.records.is_empty() {
                return slice;
            }
            slice.next = offset + 1;
            slice.records.push(record.clone());
        }
    }
}

impl PartitionedLog for MemoryLog {
    fn append(
        &self,
        partition: Partition,
        groups: &Arc<[GroupId]>,
        message: &Arc<SharedMessage>,
        commit: Option<Arc<Commit>>,
    ) -> Result<(), LogFull> {
        let mut state = self.state.lock();
        let feeder = Feeder::from(&**message);
        self.shares.admit(message.qos, message.cost(), || feeder).map_err(|_| LogFull)?;
        self.shares.take(feeder, message.cost());
        let (groups, message) = (Arc::clone(groups), message.without_receipt());
        let number = state.submitted;
        state.submitted += 1;
        state.waiting.push(WaitingAppend { number, partition, groups, message, commit });
        if !self.options.held {
            let all = std::mem::take(&mut state.waiting);
            self.write(state, all);
        }
        Ok(())
    }

    fn admit(&self, message: &Message<'_>) -> Result<(), NoRoom> {
        self.shares.admit_message(message)
    }

    fn submitted(&self) -> u64 {
        self.state.lock().submitted
    }

    fn ended(&self) -> u64 {
        let state = self.state.lock();
        state.waiting.first().map_or(state.submitted, |first| first.number)
    }

    fn read(&self, partition: Partition, from: u64, limit: ReadLimit) -> LogRead {
        let slice = self.slice(partition, from, limit);
        match self.options.late {
            true => LogRead::Later(Box::pin(async move { Ok(slice) })),
            false => LogRead::Now(slice),
        }
    }

    fn find(&self, partition: Partition, time: Timestamp) -> BoxFuture<'static, Result<u64, StoreError>> {
        let state = self.state.lock();
        let part = &state.partitions[usize::from(partition.0)];
        let found = part.records.iter().find(|(_, record)| record.message.received >= time);
        let place = found.map_or(part.end, |(offset, _)| *offset);
        Box::pin(async move { Ok(place) })
    }

    fn bounds(&self, partition: Partition) -> PartitionBounds {
        let part = &self.state.lock().partitions[usize::from(partition.0)];
        PartitionBounds { start: part.start, end: part.end }
    }

    fn trim(&self, partition: Partition, before: u64) {
        let part = &mut self.state.lock().partitions[usize::from(partition.0)];
        part.start = part.start.max(before.min(part.end));
        part.records = part.records.split_off(&part.start);
        part.damaged = part.damaged.split_off(&part.start);
    }

    fn marks(&self, group: GroupId) -> Vec<Mark> {
        let state = self.state.lock();
        let first = state.partitions.iter().filter_map(|part| part.records.keys().next()).min();
        let first = first.copied().unwrap_or(state.next);
        let mark = |offset, time, counts: &MemoryLogCounts| {
            let (messages, bytes) = counts.get(&group).copied().unwrap_or_default();
            Mark { offset, time, messages, bytes }
        };
        // The last that is not after what is there, and all after it.
        let begin = state.marks.iter().rposition(|(offset, ..)| *offset <= first).unwrap_or(0);
        let marks = state.marks[begin..].iter().map(|(offset, time, counts)| mark(*offset, *time, counts));
        marks.chain([mark(state.next, state.latest, &state.counts)]).collect()
    }

    fn forget(&self, group: GroupId) {
        let mut state = self.state.lock();
        state.counts.remove(&group);
        for (.., counts) in &mut state.marks {
            counts.remove(&group);
        }
    }

    fn bytes(&self) -> u64 {
        let state = self.state.lock();
        let records = state.partitions.iter().flat_map(|part| part.records.values());
        records.map(|record| record.message.cost() as u64).sum()
    }

    fn id(&self) -> u64 {
        1
    }

    fn watch(&self, watcher: Arc<dyn LogWatcher>) {
        *self.watcher.lock() = Some(watcher);
    }

    fn health(&self) -> StoreHealth {
        if self.state.lock().failing { StoreHealth::Failing } else { StoreHealth::Sound }
    }
}
