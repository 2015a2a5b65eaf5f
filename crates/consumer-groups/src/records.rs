//! Records that are kept of a group, and their keys.

use bytes::Bytes;
use gateway_core::{GroupId, PARTITIONS, Partition, Timestamp};
use groups::{Progress, Roster};
use serde::{Deserialize, Deserializer, Serialize, de::IgnoredAny};
use store::Expect;

use super::{
    Definition, GroupError,
    state::{GroupState, StateChange},
};

/// Keys of a group's records.
pub(super) const DEFINITION: &[u8] = b"d";
const PROGRESS: u8 = b'p';
pub(super) const COUNTS: &[u8] = b"t";
pub(super) const MEMBERS: &[u8] = b"m";

/// A group as it is kept: what was asked for, and what the gateway added.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct KeptDefinition {
    pub(super) definition: Definition,
    /// Changes with each change of the definition.
    pub(super) etag: u64,
    /// Time of creation, in milliseconds of the process's clock.
    pub(super) created: u64,
    /// See [`groups::Identity`].
    pub(super) generation: u32,
    pub(super) seed: u64,
    /// The log that its places are of.
    pub(super) log: u64,
    /// In each partition, where the group began.
    pub(super) start: Vec<u64>,
    /// In each partition, where messages are marked for the group; before it the filter says which are its.
    pub(super) born: Vec<u64>,
    /// Had other filters, under a version that could change them and kept a list of these. Some of its messages may have come
    /// under them.
    #[serde(
        default,
        alias = "former",
        deserialize_with = "told_or_listed",
        skip_serializing_if = "std::ops::Not::not"
    )]
    pub(super) had_other_filters: bool,
}

fn told_or_listed<'de, D: Deserializer<'de>>(value: D) -> Result<bool, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum KeptGroup {
        Told(bool),
        Listed(Vec<IgnoredAny>),
    }
    Ok(match KeptGroup::deserialize(value)? {
        KeptGroup::Told(had) => had,
        KeptGroup::Listed(former) => !former.is_empty(),
    })
}

impl KeptDefinition {
    pub(super) fn created(&self) -> Timestamp {
        Timestamp(self.created)
    }
}

pub(super) fn definition_change(kept: &KeptDefinition) -> StateChange {
    let json = serde_json::to_vec(kept).unwrap_or_default();
    put(Bytes::from_static(DEFINITION), Bytes::from(json))
}

pub(super) fn put(key: Bytes, value: Bytes) -> StateChange {
    StateChange { key, value: Some(value), expect: Expect::Any }
}

pub(super) fn progress_key(partition: Partition) -> Bytes {
    Bytes::copy_from_slice(&[PROGRESS, partition.0])
}

/// Counts of a group's settled messages, and the other numbers that each write changes, in the kept form.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SettledCounts {
    pub(super) messages: u64,
    pub(super) bytes: u64,
    pub(super) lost: u64,
    /// Tells two records apart that are otherwise the same.
    pub(super) writes: u64,
    /// The number of the next dead letter; 0 in records of versions that did not keep it.
    pub(super) next_letter: u64,
}

impl SettledCounts {
    pub(super) fn encode(self) -> Bytes {
        let numbers = [self.messages, self.bytes, self.lost, self.writes, self.next_letter];
        Bytes::from(numbers.map(u64::to_le_bytes).concat())
    }

    fn decode(bytes: &[u8]) -> Self {
        let number = |at: usize| {
            let bytes = bytes.get(8 * at..8 * at + 8).and_then(|bytes| bytes.try_into().ok());
            bytes.map_or(0, u64::from_le_bytes)
        };
        let (messages, bytes, lost, writes) = (number(0), number(1), number(2), number(3));
        Self { messages, bytes, lost, writes, next_letter: number(4) }
    }
}

/// Reads how much of a group is settled, and what it must still be when the group is written. Before anything else is read of
/// the group: every write changes it.
pub(super) async fn load_counts(
    state: &GroupState,
    group: GroupId,
) -> Result<(SettledCounts, Option<Expect>), GroupError> {
    let counts = state.read(group, Bytes::from_static(COUNTS), None, 1).await?;
    Ok(match counts.into_iter().next() {
        Some(record) => (SettledCounts::decode(&record.value), Some(Expect::Value(record.value))),
        None => (SettledCounts::default(), Some(Expect::Absent)),
    })
}

/// Reads who was in a group.
pub(super) async fn load_members(state: &GroupState, group: GroupId) -> Result<Option<Roster>, GroupError> {
    let records = state.read(group, Bytes::from_static(MEMBERS), None, 1).await?;
    let roster = records.first().map(|record| Roster::decode(&record.value));
    roster.transpose().map_err(|_| GroupError::Damaged)
}

/// Reads how far a group is.
pub(super) async fn load_progress(
    state: &GroupState,
    group: GroupId,
) -> Result<Vec<(Partition, Progress)>, GroupError> {
    let mut all = Vec::new();
    let mut after = None;
    loop {
        let page = state.read(group, Bytes::copy_from_slice(&[PROGRESS]), after, PARTITIONS).await?;
        let Some(last) = page.last() else { break };
        after = Some(last.key.clone());
        for record in &page {
            let progress = Progress::decode(&record.value).map_err(|_| GroupError::Damaged)?;
            let partition = record.key.get(1).copied().ok_or(GroupError::Damaged)?;
            all.push((Partition(partition), progress));
        }
    }
    Ok(all)
}
