//! Why something cannot be done with a group, or goes on no longer for a member.

use store::StoreError;
use thiserror::Error;

use super::state::StateError;

/// Why something cannot be done with a group.
#[derive(Debug, Error)]
pub enum GroupError {
    /// There is none of this name.
    #[error("there is no group of this name")]
    NotFound,
    /// There is one of this name, and it is another.
    #[error("a group of this name exists with another configuration")]
    Exists,
    /// There are as many as there may be.
    #[error("there are as many groups as there may be")]
    TooManyGroups,
    /// The group has as many members as there may be.
    #[error("the group has as many members as there may be")]
    TooManyMembers,
    /// There is no memory for one more.
    #[error("there is no memory for another member")]
    Memory,
    /// The group has changed since its etag was read.
    #[error("the group has changed")]
    EtagMismatch,
    /// A group in whose place it came still has messages.
    #[error("the group goes on where another ends, which still has messages")]
    Draining,
    /// A place that is no longer in the log, or never was.
    #[error("the place is not kept any more")]
    OutOfRange,
    /// Not a token of this gateway.
    #[error("not a token")]
    BadToken,
    /// Its records cannot be read.
    #[error("records of the group are damaged")]
    Damaged,
    /// The group was deleted meanwhile, or no longer belongs to this gateway.
    #[error("the group is not served any more")]
    Gone,
    /// The member's name was taken by another stream meanwhile.
    #[error("the member is not in the group any more")]
    Fenced,
    /// Some messages of the group are outside the caller's scope.
    #[error("messages of the group are out of scope")]
    OutOfScope,
    /// The store cannot be reached.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl From<StateError> for GroupError {
    fn from(error: StateError) -> Self {
        match error {
            StateError::Store(error) => Self::Store(error),
            StateError::Fenced | StateError::Conflict => Self::Gone,
        }
    }
}

impl From<MemberEnd> for GroupError {
    fn from(ended: MemberEnd) -> Self {
        match ended {
            MemberEnd::Fenced => Self::Fenced,
            MemberEnd::GroupGone => Self::Gone,
        }
    }
}

/// Why a member gets nothing more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum MemberEnd {
    /// Another stream has its name, or its lease has ended.
    #[error("another stream has taken the member's name")]
    Fenced,
    /// The group was deleted, or is no longer this gateway's.
    #[error("the group is not served any more")]
    GroupGone,
}
