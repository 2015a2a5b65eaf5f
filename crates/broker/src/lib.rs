//! Routing: who gets a message. Knows topics, subscriptions, retained messages, shared groups, wills and
//! the registry of sessions; knows receivers only as [`Target`]. Knows no wire format, socket or database.
//!
//! Each folder is one concept and has its part of [`Broker`]'s methods:
//!
//! ```text
//! routing    publish, subscribe, match, and hand a message to its receivers
//! sessions   open, close and end sessions; find, list and describe them; publish wills
//! shared     shared groups and what waits in them
//! log        which consumer groups want a message, and its append to their log
//! reserved   topics that a part of the gateway answers
//! levels     how operators write those after the client id
//! retained   the last message of each topic, and its replay to new subscriptions
//! durable    what outlives the process: restore it, and move messages between queues on disk
//! quota_holders  quotas that several connections share: those of identities and of tenants
//! memory     the account of what peers make the process hold, and shedding when it is short
//! ```
//!
//! The folders use each other through `BrokerInner`, which holds one part of each: a subscription concerns a session, a group,
//! the index and the disk at once. Inside a folder, files import what they need from beside them, and only `mod.rs` says
//! what others may use. `api` has the arguments and results of calls, `target` the receivers' side, `events` what
//! happens to devices, `drops` what was dropped of theirs.
//!
//! Invariant: no lock of this module is held while a target is called, and a target never calls back in.
//! (The accessor [`Session::core`] is no call in this sense.) Lock order: registry shard, session state, then
//! one of timers or index; slots last.

mod drops;
mod durable;
mod events;
mod facade;
mod half_hash;
mod log;
mod memory;
mod quota_holders;
mod retained;
mod routing;
mod sessions;
mod shared;
mod slab;
mod subscriber;

pub use store::{QueueStore, QueueSummary};

pub use durable::{DurabilityRules, Stores};
pub use events::{Event, EventKind, EventOrGap, EventPlace, EventReader};
pub use facade::{
    Broker, BrokerConfig, Gauges, JudgeWill, OpenedSession, Reserved, ReservedOutcome, Restored, Routing,
    SessionCleanup, Spread, StreamHandle,
};
pub use log::{EventKinds, GroupFilter, GroupLog, InScope, Selector, is_event, is_event_message};
pub use memory::{Account, Charge, MemoryKind};
pub(crate) use quota_holders::QuotaHolderKind;
pub use quota_holders::{Counted, QuotaExceeded, QuotaHolder, QuotaHolders};
pub use retained::{RetainError, RetainedCursor, RetainedPage};
pub use routing::{
    DirectOutcome, Offline, Published, Shortage, SubscribeError, SubscribeRequest, Subscribed, Turn,
};
pub use sessions::{
    CloseReason, Closed, ConnectionInfo, Delivered, DeviceFilter, DeviceInfo, DevicePage, OpenRequest,
    QueueInfo, Queued, ReplayWork, Session, SessionCore, Target, Will,
};

#[cfg(test)]
mod tests;
