//! Knowledge of a group about one partition, without members.

use std::collections::{BTreeMap, VecDeque};

use ahash::RandomState;
use gateway_core::{LogRecord, Timestamp};
use hashbrown::HashMap;

use super::{
    lagging::{Lagging, Undelivered, insert},
    member::Gap,
    outstanding::Outstanding,
    progress::Progress,
};

/// A message that was read and is to be delivered.
#[derive(Debug)]
pub(crate) struct ReadyMessage {
    pub(crate) record: LogRecord,
    pub(crate) key: u64,
    pub(crate) attempts: u32,
    pub(crate) cost: u32,
}

/// A message that is being given up: until its copy is written it is not settled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Dying {
    pub(crate) attempts: u32,
    pub(crate) reason: Box<str>,
}

/// Messages to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PartitionKind {
    /// New ones.
    Main,
    /// Messages of [`PartitionState::again`].
    Again,
    /// Messages of keys that lag.
    Lagging,
}

/// A read under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PartitionRead {
    pub(crate) ticket: u64,
    pub(crate) kind: PartitionKind,
}

/// Everything before `read` is settled but: what is delivered (`out`), what was read to be delivered (`ready`), what is to
/// be delivered again before anything new is read (`again`), what is being given up (`dying`), and what waits of keys that
/// lag. A message is in one of these places only.
#[derive(Debug, Default)]
pub(crate) struct PartitionState {
    pub(crate) owner: Option<u32>,
    /// Place from which on new messages are read.
    pub(crate) read: u64,
    /// One more than the place of the last message that is known to be there.
    pub(crate) end: u64,
    pub(crate) out: Outstanding,
    /// Number of entries of `out` that are with members other than the owner: until there are none, the owner gets nothing.
    pub(crate) foreign: usize,
    /// Time at which the other members' entries are taken back.
    pub(crate) handover_until: Option<Timestamp>,
    /// Members that had messages of it when an earlier process ended, and have not come back: until none is left, nobody gets
    /// anything.
    pub(crate) awaited: Vec<u32>,
    pub(crate) ready: VecDeque<ReadyMessage>,
    pub(crate) again: VecDeque<Undelivered>,
    pub(crate) lagging: HashMap<u64, Lagging, RandomState>,
    pub(crate) dying: BTreeMap<u64, Dying>,
    pub(crate) reading: Option<PartitionRead>,
    pub(crate) ticket: u64,
    /// Keys that lag were read last: it is the turn of new messages.
    pub(crate) replayed: bool,
    /// The last read found little for the group.
    pub(crate) sparse: bool,
    /// Is in its owner's queue of partitions to be read.
    pub(crate) queued: bool,
    /// Is in its owner's queue of partitions with messages.
    pub(crate) listed: bool,
    pub(crate) dirty: bool,
    /// Messages lost while the partition had no owner: told to its next one.
    pub(crate) gap: Option<Gap>,
    /// The floor of what was written last.
    pub(crate) written: u64,
}

impl PartitionState {
    /// Continues from a record. Returns how many places it remembers.
    pub(crate) fn restore(&mut self, progress: Progress) -> usize {
        self.written = progress.floor();
        self.read = progress.read;
        self.end = self.end.max(progress.read);
        let waiting = progress.named();
        self.again = progress.unsettled.into();
        self.lagging = progress.lagging.into_iter().collect();
        waiting
    }

    /// The record of how far it is.
    pub(crate) fn progress(&self) -> Progress {
        let out =
            self.out.iter().map(|entry| Undelivered { offset: entry.offset, attempts: entry.attempt - 1 });
        let ready =
            self.ready.iter().map(|one| Undelivered { offset: one.record.offset, attempts: one.attempts });
        let again = self.again.iter().copied();
        let dying =
            self.dying.iter().map(|(&offset, dying)| Undelivered { offset, attempts: dying.attempts });
        let mut unsettled: Vec<Undelivered> = out.chain(ready).chain(again).chain(dying).collect();
        if !unsettled.is_sorted_by_key(|waiting| waiting.offset) {
            unsettled.sort_unstable_by_key(|waiting| waiting.offset);
        }
        let kept = self.lagging.iter().filter(|(_, lagging)| lagging.first().is_some());
        let mut lagging: Vec<(u64, Lagging)> = kept
            .map(|(&key, lagging)| {
                let Lagging { todo, scan, due, reason, .. } = lagging.clone();
                (key, Lagging { todo, scan, due, reason, ..Lagging::default() })
            })
            .collect();
        lagging.sort_unstable_by_key(|&(key, _)| key);
        Progress { read: self.read, unsettled, lagging }
    }

    /// The first place that is not settled.
    pub(crate) fn floor(&self) -> u64 {
        let out = self.out.iter().next().map(|entry| entry.offset);
        let ready = self.ready.iter().map(|one| one.record.offset).min();
        let again = self.again.front().map(|waiting| waiting.offset);
        let dying = self.dying.first_key_value().map(|(&offset, _)| offset);
        let lagging = self.lagging.values().filter_map(Lagging::first).min();
        [out, ready, again, dying, lagging].into_iter().flatten().fold(self.read, u64::min)
    }

    /// Returns whether nothing waits except new messages.
    pub(crate) fn is_idle(&self) -> bool {
        self.out.len() == 0
            && self.ready.is_empty()
            && self.again.is_empty()
            && self.dying.is_empty()
            && self.lagging.is_empty()
    }

    pub(crate) fn is_settled(&self, offset: u64, key: u64) -> bool {
        offset < self.read
            && self.out.get(offset).is_none()
            && self.again.binary_search_by_key(&offset, |waiting| waiting.offset).is_err()
            && !self.dying.contains_key(&offset)
            && !self.lagging.get(&key).is_some_and(|lagging| lagging.holds(offset))
            && !self.ready.iter().any(|one| one.record.offset == offset)
    }

    /// Puts a message where it waits to be read again. True if its place takes memory it did not take before.
    pub(crate) fn wait(&mut self, key: u64, waiting: Undelivered) -> bool {
        if let Some(lagging) = self.lagging.get_mut(&key) {
            if lagging.blocked == Some(waiting.offset) {
                lagging.blocked = None;
                lagging.alone = true;
            }
            return lagging.give_back(waiting);
        }
        insert(&mut self.again, waiting)
    }

    /// Returns the place from which keys that lag are to be read.
    pub(crate) fn lagging_place(&self) -> Option<u64> {
        if self.lagging.is_empty() {
            return None;
        }
        self.lagging.values().filter_map(Lagging::place).min()
    }

    /// Cancels a read under way: its records no longer count.
    pub(crate) fn cancel_read(&mut self) {
        self.reading = None;
    }
}
