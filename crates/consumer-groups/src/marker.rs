//! Services of the broker for groups: marks of messages, and memory.

use std::sync::Arc;

use gateway_core::{GroupId, Message};

use super::{GroupError, GroupMessageFilter};

/// Tells whether a message that was appended before the group was made is the group's by its filter.
pub type MessageFilter = dyn Fn(&Message<'_>) -> bool + Send + Sync;

/// Marks messages for groups as they are appended, and has the account of memory: the broker.
pub trait Marker: Send + Sync {
    /// From now on messages that this filter wants are appended with the group's number.
    fn keep_for(&self, group: GroupId, filter: &GroupMessageFilter);
    /// The same in the place of the group `old`, for which no message is appended from now on.
    fn replace(&self, old: GroupId, new: GroupId, filter: &GroupMessageFilter);
    /// From now on no message is appended for the group.
    fn keep_no_more_for(&self, group: GroupId);
    /// Sets the treatment of messages that the group wants, from now on.
    fn set_intake(&self, group: GroupId, intake: Intake);
    /// The same filter, for messages that were appended before the group was made.
    fn matcher(&self, filter: &GroupMessageFilter) -> Arc<MessageFilter>;
    /// Sets bytes aside for a member; false if there are not enough.
    fn hold(&self, bytes: usize) -> bool;
    /// Gives bytes of a member back.
    fn release(&self, bytes: usize);
}

/// Treatment of messages that a group wants.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Intake {
    /// Appended for the group.
    #[default]
    All,
    /// Refused to their publisher at QoS 1 and 2, and not appended for the group at QoS 0: the group is full.
    Refuses,
    /// Not appended for the group, unnoticed by their publisher.
    Skips,
}

/// Memory set aside: for a member, as long as it has a stream or a call, or something was read for its next call.
pub struct MemberMemory {
    marker: Arc<dyn Marker>,
    bytes: usize,
}

impl MemberMemory {
    /// # Errors
    /// [`GroupError::Memory`] if there are not so many bytes.
    pub(super) fn take(marker: &Arc<dyn Marker>, bytes: usize) -> Result<Self, GroupError> {
        if !marker.hold(bytes) {
            return Err(GroupError::Memory);
        }
        Ok(Self { marker: Arc::clone(marker), bytes })
    }
}

impl Drop for MemberMemory {
    fn drop(&mut self) {
        self.marker.release(self.bytes);
    }
}
