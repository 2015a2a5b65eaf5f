//! The rules of one consumer group, without a log, a disk, sockets and a clock: messages and time in, deliveries and records to
//! write out.
//!
//! Words:
//!
//! - A *group* reads the messages of a log that are marked with its number. The log is in 256 *partitions*, each with its own
//!   places (*offsets*), which grow and have holes.
//! - A *member* is a stream or a caller of Fetch. Each partition has one *owner* among them, which gets what is new of it.
//! - A *delivery* is one message with one member, from [`Group::take`] until it is *settled* (acknowledged, or given up), or
//!   *given back*: by a nack, by its deadline, or since its member is gone. Given back, a message comes again.
//! - A *key* is the thing within which messages keep their order: the device, mostly. After a message was given back by a nack
//!   or its deadline, later deliveries of its key are *void*; they come again after it. Until then the key *lags*.
//! - *Progress* is the record kept of a partition: the place from which on nothing was read, and the unsettled messages before
//!   it.
//!
//! Invariants, for any calls in any order:
//!
//! - No message of a key is delivered before an earlier one of the key, except again.
//! - An acknowledged message is never delivered again, also by another process that continues from the
//!   [changes](Group::changes) taken after it.
//! - An unsettled message is delivered to a member, as long as the group has one.
//! - A member never has more than its credit.
//! - Memory follows credits, members and keys that lag, each of which has a bound; never how far the group is behind.
//!
//! Times are [`Timestamp`](gateway_core::Timestamp)s of the process's clock, which never jumps: what a delivery shows as its
//! deadline needs no second clock, and tests choose it as they like.
//!
//! Must not know: tokio, stores, the log's engine, MQTT.

mod ack_id;
mod config;
mod deliveries;
mod group;
mod lagging;
mod member;
#[cfg(test)]
mod model;
mod outstanding;
mod partition;
mod progress;
mod ranges;
mod roster;
#[cfg(test)]
mod tests;

pub use ack_id::{AckId, BadAckId};
pub use config::{
    Credit, GroupConfig, GroupIdentity, MAX_AHEAD, MAX_CLAIMS, MAX_CREDIT, MAX_MEMBERS, MAX_REASON, OrderKey,
};
pub use group::{
    AckResult, ClaimedPlace, Delayed, Delivery, DeliveryStatus, Group, GroupTotals, Joined, MemberGone,
    MemberOptions, MemberStatus, Nack, PartitionChange, Pending, PendingState, Read, ReadGap, Recall, Room,
    SettlingAnswer, TakenDeliveries, TooManyMembers,
};
pub use member::{Amount, Gap, GapReason, MemberKey};
pub use progress::{BadProgress, Progress};
pub use ranges::{IdRange, Ranges};
pub use roster::{BadRoster, Roster};
