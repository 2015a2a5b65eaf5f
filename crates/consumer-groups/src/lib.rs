//! Consumer groups at work: the log, the logic of each group, and the records of how far it is, joined.
//!
//! Each module uses only those below it:
//!
//! ```text
//! calls          members without a stream
//! requeue        dead letters: listed, put back, removed
//! pending        messages that wait
//! succession     groups that come in the place of others
//! service        all groups: made, found, changed and ended
//! upkeep         retention, and the trimming of the log
//! resuming       members that come back, and what they work on
//! member         one that reads: polled by its stream, or by a call
//! watching       what becomes durable goes to the groups that want it
//! info           a group as others see it
//! live           one group: its lock, its wakers, what is written of it
//! dead_letters   what was given up
//! records        what is kept of a group, and its keys
//! scope          whose scope covers a group
//! state          records of groups in the store, each group's under an epoch
//! waypoints      places at which a group can begin to keep less
//! start          places at which a group begins
//! marker         what the broker does for groups
//! definition     what a group was asked to be
//! error          why something cannot be done
//! ```
//!
//! Knows no tonic and no engine. Nothing waits under a group's lock; the log's thread takes it for as long as messages are
//! pushed to queues in memory.

mod calls;
mod dead_letters;
mod definition;
mod error;
mod info;
mod live;
mod marker;
mod member;
mod pending;
mod records;
mod requeue;
mod resuming;
mod scope;
mod service;
mod start;
mod state;
mod succession;
#[cfg(test)]
mod tests;
mod upkeep;
mod watching;
mod waypoints;

pub use dead_letters::DeadLetter;
pub use definition::{Definition, GroupMessageFilter, KeptOrder, RetentionPolicy};
pub use error::{GroupError, MemberEnd};
pub use info::{GroupStatus, Info};
pub use marker::{Intake, Marker, MemberMemory, MessageFilter};
pub use member::{Joining, LiveMember, MemberBatch};
pub use pending::{PendingMessage, PendingPage};
pub use scope::in_scope;
pub use service::{ConsumerGroups, GroupsOptions};
pub use start::GroupStart;
