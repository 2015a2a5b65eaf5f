//! Records of groups in a store of records, each group's under an epoch.
//!
//! A key is the number of the group (4 bytes, big-endian), and then 0 for its epoch, or 1 and the key of a record. The records of
//! one group are changed by whoever has acquired it, and only as long as nobody else has: every acquisition begins another
//! *epoch*, and a change under an older one is refused as a whole. Whoever acquires says which epoch it knows: so the acquisition
//! may be left until there is something to write, and a start needs none.

use std::sync::Arc;

use bytes::{BufMut as _, Bytes, BytesMut};
use gateway_core::GroupId;
use store::{
    DAMAGED_VERSION, Expect, RecordChange, RecordFence, RecordKind, RecordOutcome, RecordRange, RecordStore,
    RecordWrite, StoreError,
};
use thiserror::Error;

const EPOCH: u8 = 0;
const RECORD: u8 = 1;

/// Records that one step of a removal takes.
const REMOVED_AT_ONCE: usize = 1_000;

/// Counts the owners that a group has had; 0 is that of a group which had none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Epoch(pub(super) u64);

/// One change of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StateChange {
    /// Key of the record among its group's; at most 400 bytes.
    pub(super) key: Bytes,
    /// New value of the record; `None` removes it.
    pub(super) value: Option<Bytes>,
    /// Condition on the record under which the write is made.
    pub(super) expect: Expect,
}

/// One record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StateRecord {
    /// Its key among its group's.
    pub(super) key: Bytes,
    /// Its value.
    pub(super) value: Bytes,
}

/// Why a write was not made.
#[derive(Debug, Error)]
pub(super) enum StateError {
    /// Somebody else has acquired the group since.
    #[error("another gateway has taken the group over")]
    Fenced,
    /// A record was not what was expected.
    #[error("a record of the group has changed")]
    Conflict,
    /// The store could not do it.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Records of groups: what they are, how far they are, what they gave up.
#[derive(Clone)]
pub(super) struct GroupState(Arc<dyn RecordStore>);

impl GroupState {
    pub(super) fn new(records: Arc<dyn RecordStore>) -> Self {
        Self(records)
    }

    /// Every group that has records, in order of its number.
    pub(super) async fn groups(&self) -> Result<Vec<GroupId>, StoreError> {
        let mut groups = Vec::new();
        let mut range = RecordRange { limit: 1, value_bytes: 0, ..of(Bytes::new()) };
        // A look or two for each group, however many records it has.
        while let Some(record) = self.0.read(range.clone()).await?.pop() {
            let Some((id, kind)) = split(&record.key) else { break };
            if kind == RECORD {
                groups.push(id);
                range.after = Some(key(id, RECORD + 1, b""));
            } else {
                range.after = Some(record.key);
            }
        }
        Ok(groups)
    }

    /// The last epoch of the group that began; the first there is if none did.
    pub(super) async fn epoch(&self, group: GroupId) -> Result<Epoch, StoreError> {
        let epoch = match self.0.get(RecordKind::Groups, key(group, EPOCH, b"")).await {
            Ok(value) => value.map(|value| value.first_chunk().copied().map(u64::from_le_bytes)),
            Err(StoreError::Damaged(_)) => Some(None),
            Err(error) => return Err(error),
        };
        // Nobody has one so high: the group is acquired anew.
        Ok(Epoch(epoch.map_or(0, |epoch| epoch.unwrap_or(DAMAGED_VERSION))))
    }

    /// Begins the epoch behind `after`, of a group which may have no records yet; [`StateError::Fenced`] if `after` is not its
    /// last. Durable when it returns `Ok`.
    pub(super) async fn acquire(&self, group: GroupId, after: Epoch) -> Result<Epoch, StateError> {
        let epoch = Epoch(after.0.saturating_add(1));
        let value = Bytes::copy_from_slice(&epoch.0.to_le_bytes());
        let change = RecordChange::put(RecordKind::Groups, key(group, EPOCH, b""), value);
        let changes = vec![RecordChange { expect: Expect::Version(after.0), ..change }];
        match self.0.write(RecordWrite { changes, fence: None }).await? {
            RecordOutcome::Done => Ok(epoch),
            RecordOutcome::Conflict | RecordOutcome::Fenced | RecordOutcome::Full => Err(StateError::Fenced),
        }
    }

    /// Makes all of `changes` or none; durable when it returns `Ok`. Writes of one group are made in the order in which they are
    /// first polled. Dropped before it is done, it may or may not be made.
    pub(super) async fn write(
        &self,
        group: GroupId,
        epoch: Epoch,
        changes: Vec<StateChange>,
    ) -> Result<(), StateError> {
        let fence = RecordFence { kind: RecordKind::Groups, key: key(group, EPOCH, b""), version: epoch.0 };
        let changes = changes.into_iter().map(|StateChange { key: name, value, expect }| RecordChange {
            kind: RecordKind::Groups,
            key: key(group, RECORD, &name),
            value,
            expect,
        });
        match self.0.write(RecordWrite { changes: changes.collect(), fence: Some(fence) }).await? {
            RecordOutcome::Done => Ok(()),
            RecordOutcome::Fenced => Err(StateError::Fenced),
            RecordOutcome::Conflict | RecordOutcome::Full => Err(StateError::Conflict),
        }
    }

    /// Records of the group whose key begins with `prefix`, in order of key, behind `after` if given: at most `limit`, and
    /// fewer where they are large. Fewer than one means that there are no more. Damaged ones are left out.
    pub(super) async fn read(
        &self,
        group: GroupId,
        prefix: Bytes,
        after: Option<Bytes>,
        limit: usize,
    ) -> Result<Vec<StateRecord>, StoreError> {
        let skip = key(group, RECORD, b"").len();
        let after = after.map(|after| key(group, RECORD, &after));
        let range = RecordRange { after, limit, ..of(key(group, RECORD, &prefix)) };
        let found = self.0.read_sound(range).await?.into_iter();
        Ok(found.map(|(key, value)| StateRecord { key: key.slice(skip..), value }).collect())
    }

    /// Removes all records of the group, under its epoch; durable when it returns `Ok`. In steps: cut short, some may be left.
    pub(super) async fn remove(&self, group: GroupId, epoch: Epoch) -> Result<(), StateError> {
        let skip = key(group, RECORD, b"").len();
        let range = RecordRange { limit: REMOVED_AT_ONCE, value_bytes: 0, ..of(key(group, RECORD, b"")) };
        loop {
            // Damaged ones, too.
            let found = self.0.read(range.clone()).await?.into_iter();
            let removal = |record: store::Record| StateChange {
                key: record.key.slice(skip..),
                value: None,
                expect: Expect::Any,
            };
            let changes: Vec<_> = found.map(removal).collect();
            let is_last = changes.len() < REMOVED_AT_ONCE;
            self.write(group, epoch, changes).await?;
            if is_last {
                return Ok(());
            }
        }
    }
}

fn of(prefix: Bytes) -> RecordRange {
    RecordRange::of(RecordKind::Groups, prefix)
}

fn key(group: GroupId, kind: u8, name: &[u8]) -> Bytes {
    let mut key = BytesMut::with_capacity(5 + name.len());
    key.put_u32(group.0);
    key.put_u8(kind);
    key.extend_from_slice(name);
    key.freeze()
}

/// Group and kind of a key.
fn split(key: &[u8]) -> Option<(GroupId, u8)> {
    let (group, rest) = key.split_first_chunk::<4>()?;
    Some((GroupId(u32::from_be_bytes(*group)), *rest.first()?))
}

#[cfg(test)]
mod tests {
    use store::MemoryRecords;

    use super::*;

    const G: GroupId = GroupId(7);
    const OTHER: GroupId = GroupId(8);

    fn state() -> GroupState {
        GroupState::new(Arc::new(MemoryRecords::new()))
    }

    /// Nobody has the group any more; its records are still there, and go with it.
    #[tokio::test]
    async fn a_group_with_damaged_records_is_acquired_and_removed() {
        let memory = Arc::new(MemoryRecords::new());
        let state = GroupState::new(Arc::clone(&memory) as _);
        let epoch = own(&state, G).await;
        state.write(G, epoch, vec![set("a", "1"), set("b", "1")]).await.unwrap();
        memory.damage(RecordKind::Groups, &key(G, EPOCH, b""));
        memory.damage(RecordKind::Groups, &key(G, RECORD, b"a"));
        assert!(matches!(state.write(G, epoch, vec![set("b", "2")]).await, Err(StateError::Fenced)));
        let later = own(&state, G).await;
        assert!(later > epoch);
        assert_eq!(records(&state, G, "").await, [("b".into(), "1".into())]);
        state.remove(G, later).await.unwrap();
        assert_eq!(state.groups().await.unwrap(), []);
    }

    fn set(key: &str, value: &str) -> StateChange {
        let (key, value) = (Bytes::from(key.to_owned()), Some(Bytes::from(value.to_owned())));
        StateChange { key, value, expect: Expect::Any }
    }

    fn unset(key: &str) -> StateChange {
        StateChange { value: None, ..set(key, "") }
    }

    /// Acquires the group, whether or not another has it.
    async fn own(state: &GroupState, group: GroupId) -> Epoch {
        let last = state.epoch(group).await.unwrap();
        state.acquire(group, last).await.unwrap()
    }

    async fn records(state: &GroupState, group: GroupId, prefix: &'static str) -> Vec<(String, String)> {
        let found = state.read(group, Bytes::from(prefix), None, 100).await.unwrap();
        let text = |bytes: Bytes| String::from_utf8(bytes.to_vec()).unwrap();
        found.into_iter().map(|record| (text(record.key), text(record.value))).collect()
    }

    #[tokio::test]
    async fn writes_need_the_epoch() {
        let state = state();
        assert!(matches!(state.write(G, Epoch(1), vec![set("a", "0")]).await, Err(StateError::Fenced)));
        assert_eq!(state.epoch(G).await.unwrap(), Epoch(0));
        let first = own(&state, G).await;
        assert_eq!(state.groups().await.unwrap(), [], "a group has no records by being acquired");
        state.write(G, first, vec![set("a", "1")]).await.unwrap();
        let second = own(&state, G).await;
        assert!(second > first);
        assert_eq!(state.epoch(G).await.unwrap(), second);
        // An owner that began before another comes too late, and does no harm to the one that was in time.
        for late in [Epoch(0), first] {
            assert!(matches!(state.acquire(G, late).await, Err(StateError::Fenced)));
        }
        assert_eq!(state.epoch(G).await.unwrap(), second);
        assert!(matches!(state.write(G, first, vec![set("a", "2")]).await, Err(StateError::Fenced)));
        assert!(matches!(state.remove(G, first).await, Err(StateError::Fenced)));
        assert_eq!(records(&state, G, "").await, [("a".into(), "1".into())]);
        state.write(G, second, vec![set("a", "2")]).await.unwrap();
        let other = own(&state, OTHER).await;
        state.write(OTHER, other, vec![set("a", "other")]).await.unwrap();
        assert_eq!(state.groups().await.unwrap(), [G, OTHER]);
        assert_eq!(records(&state, G, "").await, [("a".into(), "2".into())]);
    }

    #[tokio::test]
    async fn records_are_the_groups_own_and_have_conditions() {
        let state = state();
        let (epoch, other) = (own(&state, G).await, own(&state, OTHER).await);
        state.write(OTHER, other, vec![set("a", "other")]).await.unwrap();
        // An empty value is a value, an empty key a key.
        state.write(G, epoch, vec![set("", ""), set("p/1", "1"), set("p/2", "2")]).await.unwrap();
        let wrong = StateChange { expect: Expect::Absent, ..set("", "1") };
        assert!(matches!(state.write(G, epoch, vec![set("c", ""), wrong]).await, Err(StateError::Conflict)));
        assert_eq!(records(&state, G, "").await.len(), 3);
        assert_eq!(records(&state, G, "p/").await, [("p/1".into(), "1".into()), ("p/2".into(), "2".into())]);
        let behind = state.read(G, Bytes::from("p/"), Some(Bytes::from("p/1")), 9).await.unwrap();
        assert_eq!(behind.len(), 1);
        state.write(G, epoch, vec![unset(""), unset("p/1"), unset("p/2")]).await.unwrap();
        assert_eq!(state.groups().await.unwrap(), [OTHER]);
    }

    #[tokio::test]
    async fn a_group_is_removed_under_its_epoch() {
        let state = state();
        let (epoch, other) = (own(&state, G).await, own(&state, OTHER).await);
        state.write(OTHER, other, vec![set("a", "other")]).await.unwrap();
        for part in 0..3 {
            let changes = (0..1_000).map(|n| set(&format!("x/{part}/{n}"), "x")).collect();
            state.write(G, epoch, changes).await.unwrap();
        }
        state.remove(G, epoch).await.unwrap();
        assert_eq!(records(&state, G, "").await, []);
        assert_eq!(state.groups().await.unwrap(), [OTHER]);
        assert_eq!(records(&state, OTHER, "").await.len(), 1);
        assert!(own(&state, G).await > epoch, "an epoch is never given twice");
    }
}
