//! The durable log that consumer groups read.

use std::sync::Arc;

use gateway_core::{Commit, GroupId, LogRecord, Message, NoRoom, Partition, SharedMessage, Timestamp};

use super::{BoxFuture, StoreError, StoreHealth};

/// Keeps messages in [partitions](Partition), each in order, until they are trimmed.
///
/// Durable messages can be read, and no others: a reader that has told others of a message never finds later that another took
/// its place. Offsets grow within a partition and may have holes.
pub trait PartitionedLog: Send + Sync {
    /// Submits a message after all that were submitted to its partition before; without blocking. `groups` want it; they
    /// are kept with it, in order and without repetition. `commit` carries a part, which ends once the message is durable or
    /// is refused when it never will be.
    ///
    /// # Errors
    /// [`LogFull`] if it takes this message not now: too much waits for the disk, of all or of its sender, or the disk takes
    /// nothing. The part of the commit is still the caller's.
    fn append(
        &self,
        partition: Partition,
        groups: &Arc<[GroupId]>,
        message: &Arc<SharedMessage>,
        commit: Option<Arc<Commit>>,
    ) -> Result<(), LogFull>;

    /// Tells, as far as is known, whether [`Self::append`] would take the message now. While the disk fails few are let
    /// through to try it: to be asked last, and by a caller that then really appends.
    ///
    /// # Errors
    /// The reason why not.
    fn admit(&self, message: &Message<'_>) -> Result<(), NoRoom>;

    /// Returns the number of messages that [`Self::append`] has taken. They wait for the disk until [`Self::ended`] is as much;
    /// only then are all durable ones among them within [`Self::bounds`].
    fn submitted(&self) -> u64;

    /// Returns how many of the first of these have ended: each can be read, or was refused and never will be.
    fn ended(&self) -> u64;

    /// Reads records of a partition from `from` on, in order: what is in memory at once, the rest from the disk.
    fn read(&self, partition: Partition, from: u64, limit: ReadLimit) -> LogRead;

    /// The place of the first message that was received at `time` or later, or the end. Received times may be slightly out of
    /// order; what comes before the place is older. Cancel safe.
    fn find(&self, partition: Partition, time: Timestamp) -> BoxFuture<'static, Result<u64, StoreError>>;

    /// Returns the bounds of the messages that are left of a partition.
    fn bounds(&self, partition: Partition) -> PartitionBounds;

    /// Nothing of the partition before this place is needed from now on; the next process must say so again. The log frees room
    /// when it can; until then [`Self::bounds`] and [`Self::read`] may still show it.
    fn trim(&self, partition: Partition, before: u64);

    /// Trims up to a place at or after this one free nothing more: what is there is freed together with what comes.
    fn trimmable(&self) -> u64 {
        u64::MAX
    }

    /// Places in the log at which a group's messages are counted, in order: about one for every 64 MiB, from the start of
    /// what is there to its end, both included. For lag after a seek, for retention, for the age of what is left.
    fn marks(&self, group: GroupId) -> Vec<Mark>;

    /// About when what is at this place was received: the time of the last of the [`Self::marks`] that is not after it.
    /// Asked for each look at a group, so not to be found by making all of them where there are many.
    fn time_at(&self, offset: u64) -> Option<Timestamp> {
        let marks = self.marks(GroupId(0));
        marks.iter().rfind(|mark| mark.offset <= offset).or_else(|| marks.first()).map(|mark| mark.time)
    }

    /// The group is gone for good: what was counted for it may be forgotten, if there is anything.
    fn forget(&self, _group: GroupId) {}

    /// Bytes that the log takes on the disk.
    fn bytes(&self) -> u64;

    /// Names this log among all logs of all gateways: message ids are made of it.
    fn id(&self) -> u64;

    /// Sets what is told of messages that have become durable. Called once, before the first append.
    fn watch(&self, watcher: Arc<dyn LogWatcher>);

    /// Its health.
    fn health(&self) -> StoreHealth;
}

/// Hears of messages that have become durable. Called by the thread that writes them, which must not wait.
pub trait LogWatcher: Send + Sync {
    /// These can be read now: records of any partitions, those of one partition in order.
    fn appended(&self, records: &[(Partition, LogRecord)]);
}

/// The log takes nothing at the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogFull;

/// Limits of one read.
#[derive(Debug, Clone, Copy)]
pub struct ReadLimit {
    /// Records, at least one.
    pub records: usize,
    /// Bytes of messages, as [`SharedMessage::cost`]; the first comes whatever it costs.
    pub bytes: usize,
}

/// Result of [`PartitionedLog::read`].
pub enum LogRead {
    /// The records were in memory.
    Now(Slice),
    /// The records are on the disk. Cancel safe.
    Later(BoxFuture<'static, Result<Slice, StoreError>>),
}

/// A stretch of a partition.
#[derive(Debug, Clone, Default)]
pub struct Slice {
    /// In order; none if nothing of the partition is in the stretch.
    pub records: Vec<LogRecord>,
    /// Place to read on from: after the last record, and after a stretch that has no record of this partition; so it may be
    /// beyond the end of the partition's [`PartitionBounds`]. Greater than `from` unless nothing is there yet.
    pub next: u64,
    /// Places before the first record that can be read no more.
    pub missing: Option<MissingRecords>,
}

/// Something that was in the log and cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MissingRecords {
    /// Why.
    pub reason: MissingReason,
    /// One more than the last place that is missing.
    pub until: u64,
}

/// Why something cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MissingReason {
    /// The places were trimmed.
    Trimmed,
    /// The places are damaged and were set aside.
    Damaged,
}

/// Bounds of the messages that are left of a partition.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PartitionBounds {
    /// The first place that may be read.
    pub start: u64,
    /// One more than the place of the last message; nothing of the partition is there if that is not after `start`.
    pub end: u64,
}

/// A place in the log, and what a group had got by then.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    /// The place in each partition that this is; one for all where offsets are those of the whole log.
    pub offset: u64,
    /// Approximate time at which messages from here on were received. Never earlier than anything before this place, although a
    /// record may be older than the ones before it: messages given up for their age end at a mark.
    pub time: Timestamp,
    /// Messages of the group before this place, since the log began.
    pub messages: u64,
    /// Their cost.
    pub bytes: u64,
}
