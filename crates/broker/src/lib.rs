//! Routing: who gets a message. Knows topics, subscriptions, retained messages, shared groups, wills and
//! the registry of sessions; knows receivers only as [`Target`]. Knows no wire format, socket or database.
//!
//! [`Broker`] is the facade: its methods, all in one file, are the way of a message, a subscription or a session through the
//! parts. Each part is a module that owns its state and its rules, and takes what it needs of others as arguments. A part uses
//! only parts that stand below it here:
//!
//! ```text
//! facade         the broker, what its users hold between two calls, and the topics that a part of the gateway answers
//! log            which consumer groups want a message, and its append to their log
//! routing        subscribe, match, and hand a message to its receivers
//! events         what happens to devices, for watchers
//! shared         shared groups and what waits in them
//! sessions       open, close and end sessions; find, list and describe them; their wills; receivers as such
//! retained       the last message of each topic, and its replay to new subscriptions
//! durable        the stores of what outlives the process, the owners of queues on disk, and moves between these
//! quota_holders  quotas that several connections share: those of identities and of tenants
//! memory         the account of what peers make the process hold
//! ```
//!
//! Beside them stand small modules that know no part: `counters`, `subscriber` is an entry of the index, `slab` and `half_hash` are
//! tables. Inside a module, files import what they need from beside them, and only `mod.rs` says what
//! others may use. The test `modules_of_a_crate_form_no_circle` keeps the order.
//!
//! Invariant: no lock of this crate is held while a target is called, and a target never calls back in.
//! (The accessor [`Session::core`] is no call in this sense.) Lock order: registry shard, session state, then
//! one of timers or index; slots last.

pub mod counters;
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

pub use store::{QueueSummary, StateStore};

pub use durable::{DurabilityRules, Stores};
pub use events::{Event, EventKind, EventOrGap, EventPlace, EventReader};
pub use facade::{
    Broker, BrokerConfig, Gauges, OpenedSession, Reserved, ReservedOutcome, Restored, Routing,
    SessionCleanup, Spread, StreamHandle, WillAuthorizer,
};
pub use log::{EventKinds, GroupFilter, GroupLog, InScope, Selector, is_event, is_event_message};
pub use memory::{Account, Charge, KindBudget, MemoryKind};
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
