//! State of consumer groups that must not be forgotten: small records beside the log.

use bytes::Bytes;
use gateway_core::GroupId;
use thiserror::Error;

use super::{BoxFuture, StoreError, StoreHealth};

/// Keeps small records of groups: what they are, how far they are, what they gave up.
///
/// The records of one group are changed by whoever has acquired it, and only as long as nobody else has: every acquisition
/// begins another *epoch*, and a change under an older one is refused as a whole. Whoever acquires says which epoch it knows:
/// so the acquisition may be left until there is something to write, and a start needs none.
pub trait GroupState: Send + Sync {
    /// Every group that has records, in order of its number. For the start.
    fn groups(&self) -> BoxFuture<'static, Result<Vec<GroupId>, StoreError>>;

    /// The last epoch of the group that began; the first there is if none did.
    fn epoch(&self, group: GroupId) -> BoxFuture<'static, Result<Epoch, StoreError>>;

    /// Begins the epoch behind `after`, of a group which may have no records yet; [`StateError::Fenced`] if `after` is not its
    /// last. Durable when it returns `Ok`.
    fn acquire(&self, group: GroupId, after: Epoch) -> BoxFuture<'static, Result<Epoch, StateError>>;

    /// Makes all of `changes` or none; durable when it returns `Ok`. Writes of one group are made in the order of the calls.
    /// Dropped before it is done, it may or may not be made.
    fn write(
        &self,
        group: GroupId,
        epoch: Epoch,
        changes: Vec<StateChange>,
    ) -> BoxFuture<'static, Result<(), StateError>>;

    /// Records of the group whose key begins with `prefix`, in order of key, behind `after` if given: at most `limit`, and
    /// fewer where they are large. Fewer than one means that there are no more. What [`Self::write`] has returned for is seen.
    fn read(
        &self,
        group: GroupId,
        prefix: Bytes,
        after: Option<Bytes>,
        limit: usize,
    ) -> BoxFuture<'static, Result<Vec<StateRecord>, StoreError>>;

    /// Removes all records of the group, under its epoch; durable when it returns `Ok`. In steps: cut short, some may be left.
    fn remove(&self, group: GroupId, epoch: Epoch) -> BoxFuture<'static, Result<(), StateError>>;

    /// Its health.
    fn health(&self) -> StoreHealth;
}

/// Counts the owners that a group has had; 0 is that of a group which had none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Epoch(pub u64);

/// One change of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateChange {
    /// Key of the record; at most 400 bytes.
    pub key: Bytes,
    /// New value of the record; `None` removes it.
    pub value: Option<Bytes>,
    /// Condition on the record under which the write is made.
    pub expect: Expect,
}

/// Condition on a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expect {
    /// Anything.
    Any,
    /// Not there.
    Absent,
    /// This.
    Value(Bytes),
}

/// One record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateRecord {
    /// Its key.
    pub key: Bytes,
    /// Its value.
    pub value: Bytes,
}

/// Why a write was not made.
#[derive(Debug, Error)]
pub enum StateError {
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
