//! Small records that must not be forgotten: answers to idempotency keys, scheduled messages, commands, consumer groups, shadows.

use std::sync::Arc;

use bytes::Bytes;
use gateway_core::Commit;
use tokio::sync::oneshot;

use super::{BoxFuture, StoreError, StoreHealth};

/// Longest key of a record.
pub const MAX_RECORD_KEY: usize = 480;

/// Version of a damaged record, so that its owner can begin anew. No other record has one so high.
pub const DAMAGED_VERSION: u64 = u64::MAX >> 1;

/// Keeps small records. Their content is the callers' own; the store says whether they are whole.
///
/// Writes of one [owner](RecordKind::owner) are made in the order of the calls. Owners take turns, and so do kinds: none waits for
/// all that another has submitted.
pub trait RecordStore: Send + Sync + 'static {
    /// Submits changes that are made together or not at all; without blocking. With a `commit` the store ends its part of it
    /// once they are durable, or refuses it: then no value of them is written, and what was to be removed goes some time all
    /// the same. Changes that nobody waits for are made some time; they have no conditions, and a later one of the same key replaces
    /// one not yet written.
    fn submit(&self, changes: Vec<RecordChange>, commit: Option<Arc<Commit>>);

    /// Makes all changes of `write` or none, if all is as it expects. Submitted by the call; durable when it returns
    /// [`RecordOutcome::Done`]. After an error, and dropped before it is done, it may or may not be made.
    fn write(&self, write: RecordWrite) -> BoxFuture<'static, Result<RecordOutcome, StoreError>>;

    /// Records in the order of their keys; none means that there are no more. Records that were written before are seen.
    fn read(&self, range: RecordRange) -> BoxFuture<'static, Result<Vec<Record>, StoreError>>;

    /// Reads all records of a kind in the order of their keys; damaged ones are counted, reported and removed. For the start:
    /// blocks on the disk.
    fn restore(&self, kind: RecordKind, into: &mut dyn FnMut(Bytes, Bytes)) -> Result<(), StoreError>;

    /// Returns whether a new operation should be submitted: commits succeed, or it is time to try again.
    fn accepts(&self) -> bool;

    /// Its health.
    fn health(&self) -> StoreHealth;

    /// Keys and values of the records that are not damaged, as [`Self::read`].
    fn read_sound(&self, mut range: RecordRange) -> BoxFuture<'_, Result<Vec<(Bytes, Bytes)>, StoreError>> {
        Box::pin(async move {
            loop {
                let records = self.read(range.clone()).await?;
                range.after = records.last().map(|record| record.key.clone());
                let sound = records.into_iter().filter_map(|record| Some((record.key, record.value?)));
                let sound: Vec<_> = sound.collect();
                if !sound.is_empty() || range.after.is_none() {
                    return Ok(sound);
                }
            }
        })
    }

    /// The value of one record; [`StoreError::Damaged`] if it cannot be read, to be told apart from one that is not there.
    fn get(&self, kind: RecordKind, key: Bytes) -> BoxFuture<'static, Result<Option<Bytes>, StoreError>> {
        let read = self.read(RecordRange { limit: 1, ..RecordRange::of(kind, key.clone()) });
        Box::pin(async move {
            match read.await?.pop().filter(|record| record.key == key) {
                None => Ok(None),
                Some(Record { value: Some(value), .. }) => Ok(Some(value)),
                Some(Record { value: None, .. }) => {
                    Err(StoreError::Damaged(format!("a record of {}", kind.name())))
                }
            }
        })
    }
}

/// A kind of record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RecordKind {
    /// Messages that came with an idempotency key, and what was answered.
    Answers,
    /// Messages to be published later.
    Scheduled,
    /// Commands to devices.
    Commands,
    /// State of consumer groups. A key begins with the number of the group, 4 bytes.
    Groups,
    /// Device shadows. A key begins with the client id of the device and a NUL.
    Shadows,
}

impl RecordKind {
    /// All kinds.
    pub const ALL: [Self; 5] = [Self::Answers, Self::Scheduled, Self::Commands, Self::Groups, Self::Shadows];

    /// Its name, also that of its table.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Answers => "answers",
            Self::Scheduled => "scheduled",
            Self::Commands => "commands",
            Self::Groups => "groups",
            Self::Shadows => "shadows",
        }
    }

    /// The part of a key that names the owner of its record. A scheduled message and the answer to its idempotency key are one
    /// write, so answers and scheduled messages have the same owner.
    pub fn owner(self, key: &Bytes) -> Bytes {
        match self {
            Self::Answers | Self::Scheduled => Bytes::new(),
            Self::Commands => Bytes::from_static(b"commands"),
            Self::Groups => key.slice(..key.len().min(4)),
            Self::Shadows => key.slice(..key.iter().position(|&byte| byte == 0).unwrap_or(key.len())),
        }
    }
}

/// One change of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordChange {
    /// Kind of the record.
    pub kind: RecordKind,
    /// Key of the record; 1 to [`MAX_RECORD_KEY`] bytes.
    pub key: Bytes,
    /// New value of the record; `None` removes it.
    pub value: Option<Bytes>,
    /// Condition on the record under which the write is made.
    pub expect: Expect,
}

impl RecordChange {
    /// Adds or replaces a record.
    pub fn put(kind: RecordKind, key: Bytes, value: Bytes) -> Self {
        Self { kind, key, value: Some(value), expect: Expect::Any }
    }

    /// Removes a record.
    pub fn remove(kind: RecordKind, key: Bytes) -> Self {
        Self { kind, key, value: None, expect: Expect::Any }
    }

    /// Returns whether it removes a record, whatever is there.
    pub fn is_removal(&self) -> bool {
        self.value.is_none() && self.expect == Expect::Any
    }
}

/// Changes of one owner that are made together or not at all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RecordWrite {
    /// Changes, made in this order. Conditions are on the records before all of them.
    pub changes: Vec<RecordChange>,
    /// Epoch of the owner under which they are made.
    pub fence: Option<RecordFence>,
}

impl RecordWrite {
    /// Returns whether all keys have a possible length.
    pub fn is_valid(&self) -> bool {
        self.changes.iter().all(|change| (1..=MAX_RECORD_KEY).contains(&change.key.len()))
    }
}

/// A record that counts the holders of an owner's records: whoever takes them over begins the next *epoch* by a write with the
/// condition [`Expect::Version`], and all writes under an older one are refused from then on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordFence {
    /// Kind of the record.
    pub kind: RecordKind,
    /// Key of the record.
    pub key: Bytes,
    /// Its expected [version](Expect::Version).
    pub version: u64,
}

/// Condition on a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expect {
    /// Anything.
    Any,
    /// Not there.
    Absent,
    /// This value.
    Value(Bytes),
    /// A value that begins with this number, 8 bytes, little-endian; 0 is that there is none.
    Version(u64),
}

impl Expect {
    /// Returns whether a record is as expected; `Some(None)` is a damaged one.
    pub fn is_met(&self, found: Option<Option<&[u8]>>) -> bool {
        match self {
            Self::Any => true,
            Self::Absent => found.is_none(),
            Self::Value(value) => found == Some(Some(value)),
            Self::Version(version) => record_version(found) == *version,
        }
    }
}

/// Version of a record, see [`Expect::Version`]; `Some(None)` is a damaged one.
fn record_version(found: Option<Option<&[u8]>>) -> u64 {
    let Some(value) = found else { return 0 };
    value.and_then(|value| value.first_chunk()).map_or(DAMAGED_VERSION, |bytes| u64::from_le_bytes(*bytes))
}

/// Outcome of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordOutcome {
    /// The write is made.
    Done,
    /// Nothing is changed: a record is not as expected.
    Conflict,
    /// Nothing is changed: the owner is in another epoch.
    Fenced,
    /// Nothing is changed: there is no room for more of this kind, or not for more of this owner.
    Full,
}

/// Someone who waits for a write.
pub enum RecordWaiter {
    /// Nobody.
    Nobody,
    /// A part of a commit.
    Commit(Arc<Commit>),
    /// A call.
    Call(oneshot::Sender<Result<RecordOutcome, StoreError>>),
}

impl RecordWaiter {
    /// Returns whether nobody waits.
    pub fn is_nobody(&self) -> bool {
        matches!(self, Self::Nobody)
    }

    /// Tells the result.
    pub fn tell(self, result: Result<RecordOutcome, StoreError>) {
        match self {
            Self::Nobody => {}
            Self::Commit(part) if matches!(result, Ok(RecordOutcome::Done)) => part.done(),
            Self::Commit(part) => part.refuse(),
            // A caller that is gone wants no answer.
            Self::Call(reply) => drop(reply.send(result)),
        }
    }
}

/// A range of records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordRange {
    /// Kind of the records.
    pub kind: RecordKind,
    /// The beginning of their keys.
    pub prefix: Bytes,
    /// The key behind which they begin, if given.
    pub after: Option<Bytes>,
    /// The most records; fewer come where they are large.
    pub limit: usize,
    /// The most bytes of each value; the rest is left out.
    pub value_bytes: usize,
}

impl RecordRange {
    /// All records of the kind whose keys begin so.
    pub fn of(kind: RecordKind, prefix: Bytes) -> Self {
        Self { kind, prefix, after: None, limit: usize::MAX, value_bytes: usize::MAX }
    }
}

/// One record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Its key.
    pub key: Bytes,
    /// Its value; `None` if it is damaged.
    pub value: Option<Bytes>,
}
