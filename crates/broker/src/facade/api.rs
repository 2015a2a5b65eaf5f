//! Settings of a broker, and results of its calls.

use std::{collections::BTreeMap, sync::Arc};

use gateway_core::{
    ClientId, Commit, Quotas,
    limits::{Limits, SharedStrategy},
};
use store::Recorder;

use super::{Reserved, SessionCleanup};
use crate::{DurabilityRules, GroupLog, Session, Stores, Will};

/// Start parameters. The default is a broker in memory, with nothing switched on.
#[derive(Default)]
pub struct BrokerConfig {
    /// Bounds.
    pub limits: Arc<Limits>,
    /// Devices talk to backends only.
    pub non_broker: bool,
    /// Pattern of a device's own namespace in non-broker mode, with `{client_id}`.
    pub namespace: String,
    /// Strategy of the shared groups that a listener's clients create, by listener name. The limits decide for
    /// listeners that are not here, and for groups that they list by name.
    pub listener_strategies: BTreeMap<String, SharedStrategy>,
    /// Recorder of latest values; `None` switches them off.
    pub latest: Option<Arc<dyn Recorder>>,
    /// Recorder of the history of the topics that have one; `None` switches it off.
    pub history: Option<Arc<dyn Recorder>>,
    /// Stores of sessions, queues and retained messages; with `None` all of these end with the process.
    pub stores: Option<Stores>,
    /// The log that messages for consumer groups are appended to; with `None` there are no groups.
    pub log: Option<GroupLog>,
    /// The parts of the gateway that own topics to which devices publish.
    pub reserved: Vec<Arc<dyn Reserved>>,
    /// Rules for the moment at which a message is acknowledged.
    pub durability: DurabilityRules,
    /// Authorizes each will when it is to be published; with `None` all are.
    pub authorize_will: Option<Arc<WillAuthorizer>>,
    /// Quotas by tenant; `*` is every tenant that is not here.
    pub tenants: BTreeMap<String, Quotas>,
}

/// Authorizes the will of this client to be published now. Called under no lock; must not block.
pub type WillAuthorizer = dyn Fn(&ClientId, &Will) -> bool + Send + Sync;

/// Result of [`super::Broker::open`].
pub struct OpenedSession {
    /// The session, old or new.
    pub session: Arc<dyn Session>,
    /// True if state was resumed [MQTT-3.2.2-2].
    pub present: bool,
    /// Commit that CONNACK waits for: the record of a new persistent session, or the removal of a discarded one.
    pub commit: Option<Arc<Commit>>,
    /// Work left to do for the replaced session or connection, if there is too much of it for one turn.
    pub cleanup: Option<Box<SessionCleanup>>,
    /// True if the session had a connection, which ends now.
    pub took_over: bool,
    /// Number of the session's connection, from 1. The connection owns the session until there is a higher one.
    pub epoch: u32,
}

/// Current sizes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Gauges {
    /// Sessions with a connection.
    pub online: usize,
    /// Sessions in all.
    pub sessions: usize,
    /// Highest number of sessions with a connection so far.
    pub online_peak: usize,
    /// Subscriptions.
    pub subscriptions: usize,
    /// Shared groups.
    pub shared_groups: usize,
    /// Retained messages.
    pub retained: usize,
    /// Bytes of retained messages.
    pub retained_bytes: usize,
    /// Bytes of messages that wait in memory, for sessions and streams.
    pub queued_bytes: usize,
    /// gRPC streams.
    pub streams: usize,
}
