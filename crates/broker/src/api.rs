//! Arguments and results of the broker's calls.

use std::{collections::BTreeMap, sync::Arc};

use gateway_core::{
    ClientId, Commit, DropReason, Outcome, QoS, Quotas, Timestamp,
    limits::{Limits, SharedStrategy},
};

use store::Recorder;

use super::{
    ConnectionInfo, DurabilityRules, QueueInfo, QuotaHolders, RetainedCursor, Session, Stores, Will,
};

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
    pub reserved: Vec<Arc<dyn super::Reserved>>,
    /// Rules for the moment at which a message is acknowledged.
    pub durability: DurabilityRules,
    /// Decides about each will when it is to be published; with `None` all are.
    pub judge_will: Option<Arc<JudgeWill>>,
    /// Quotas by tenant; `*` is every tenant that is not here.
    pub tenants: BTreeMap<String, Quotas>,
}

/// The log of consumer groups.
#[derive(Clone)]
pub struct GroupLog {
    /// The log.
    pub log: Arc<dyn store::PartitionedLog>,
    /// Bytes of memory that it may take, which are on the account as long as there is a group.
    pub memory: usize,
}

/// Judges whether the will of this client may be published now. Called under no lock; must not block.
pub type JudgeWill = dyn Fn(&ClientId, &Will) -> bool + Send + Sync;

/// A CONNECT that passed validation and authentication.
pub struct OpenRequest {
    /// Client id, assigned if it was empty.
    pub client_id: ClientId,
    /// Discard an earlier session.
    pub clean_start: bool,
    /// Session expiry in seconds after the connection ends; `u32::MAX` never.
    pub expiry: u32,
    /// Will.
    pub will: Option<Will>,
    /// Connection details.
    pub info: ConnectionInfo,
    /// Quota holders whose quotas the session counts for: see [`super::Broker::quota_holders`].
    pub quota_holders: QuotaHolders,
    /// Time.
    pub now: Timestamp,
}

/// Result of [`super::Broker::open`].
pub struct OpenedSession {
    /// The session, old or new.
    pub session: Arc<dyn Session>,
    /// True if state was resumed [MQTT-3.2.2-2].
    pub present: bool,
    /// Commit that CONNACK waits for: the record of a new persistent session, or the removal of a discarded one.
    pub commit: Option<Arc<Commit>>,
    /// Work left to do for the replaced session or connection, if there is too much of it for one turn.
    pub cleanup: Option<Box<super::SessionCleanup>>,
    /// True if the session had a connection, which ends now.
    pub took_over: bool,
    /// Number of the session's connection, from 1. The connection owns the session until there is a higher one.
    pub epoch: u32,
}

/// End of a connection, for [`super::Broker::closed`].
#[derive(Debug, Clone, Copy)]
pub struct Closed {
    /// Publish the will (false after DISCONNECT 0x00 [MQTT-3.14.4-3]).
    pub publish_will: bool,
    /// New session expiry from a v5 DISCONNECT.
    pub expiry: Option<u32>,
    /// Reason for the event and log.
    pub reason: &'static str,
}

/// One filter of a SUBSCRIBE.
pub struct SubscribeRequest<'a> {
    /// Full text with `$share/group/` if shared.
    pub filter: &'a str,
    /// Wanted QoS.
    pub qos: QoS,
    /// No Local.
    pub no_local: bool,
    /// Retain As Published.
    pub retain_as_published: bool,
    /// Retain Handling 0, 1, 2.
    pub retain_handling: u8,
    /// Subscription identifier.
    pub id: Option<u32>,
    /// Gets a part that is done when the subscription is on disk, if the session is persistent.
    pub commit: Option<&'a Arc<Commit>>,
}

/// A subscription that was made.
pub struct Subscribed {
    /// Granted QoS.
    pub qos: QoS,
    /// True if the subscription replaces one of the same filter.
    pub existed: bool,
    /// Retained messages to replay after the SUBACK, paced by the connection.
    pub replay: Option<RetainedCursor>,
    /// Messages are waiting in the queue of the group that was joined: call [`super::Broker::online`] to get them.
    pub group_queue: bool,
    /// Members of the shared group that were visited.
    pub members: usize,
}

/// Why a filter was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SubscribeError {
    /// Not a valid filter (0x8F).
    Invalid,
    /// Shared subscription without group or with No Local (protocol error) [MQTT-3.8.3-4].
    NoLocalShared,
    /// The session has too many subscriptions (0x97).
    Quota,
    /// Not authorized, or outside the device's namespace in non-broker mode (0x87).
    NotAuthorized,
    /// Switched off (0xA2).
    WildcardUnavailable,
    /// Switched off (0x9E).
    SharedUnavailable,
    /// Switched off (0xA1).
    IdUnavailable,
}

/// Result of [`super::Broker::publish`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Published {
    /// Subscribers matched: sessions, and streams that want the message.
    pub matched: u32,
    /// Of those that took it now.
    pub sent: u32,
    /// Of those that queued it for an offline session.
    pub queued: u32,
    /// Of those that dropped it.
    pub dropped: u32,
    /// Why the last one dropped it.
    pub reason: Option<DropReason>,
    /// Refused as a whole before any target had it (0x97).
    pub refused: Option<Shortage>,
}

/// Why a message is refused as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shortage {
    /// The memory budget is used up.
    Memory,
    /// The store accepts nothing more, or nothing more of this publisher, and a persistent session or a consumer group would
    /// have to store it.
    Store,
}

/// Treatment of a message whose device, in [`super::Broker::publish_to_device`], has no connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offline {
    /// Wait in its session.
    Queue,
    /// Report it.
    Fail,
    /// Drop quietly.
    Drop,
}

/// Result of [`super::Broker::publish_to_device`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DirectOutcome {
    /// As [`Outcome`].
    Done(Outcome),
    /// No session of that client id.
    UnknownDevice,
    /// Refused before it was offered.
    Refused(Shortage),
    /// Offline, and the policy is `Fail`.
    DeviceOffline,
}

/// A device as `Devices` shows it.
#[derive(Debug, Clone)]
pub struct DeviceInfo {
    /// Client id.
    pub client_id: ClientId,
    /// Connected now.
    pub online: bool,
    /// Details of the current or last connection.
    pub connection: ConnectionInfo,
    /// True if the device has not connected in this process: only the stored facts about its last connection are known.
    pub restored: bool,
    /// Time at which the current state (connected or not) began.
    pub since: Timestamp,
    /// Session expiry in seconds.
    pub expiry: u32,
    /// Number of the session's subscriptions; [`super::Broker::subscriptions`] lists them.
    pub subscription_count: usize,
    /// Queue figures.
    pub queue: QueueInfo,
}

/// Selects the devices of a page.
#[derive(Clone, Copy)]
pub struct DeviceFilter<'a> {
    /// Only those with a connection.
    pub online_only: bool,
    /// Only those with such a client id. Asked first, since it costs least.
    pub name: &'a dyn Fn(&str) -> bool,
    /// Only those of which that is so.
    pub info: Option<&'a dyn Fn(&DeviceInfo) -> bool>,
}

impl DeviceFilter<'_> {
    /// All of them.
    pub const ALL: Self = Self { online_only: false, name: &|_| true, info: None };
}

/// One page of [`super::Broker::devices`].
#[derive(Debug, Default)]
pub struct DevicePage {
    /// The devices, each with the start of a page that continues after it.
    pub devices: Vec<(u32, DeviceInfo)>,
    /// Start of the next page; `None` at the end.
    pub next: Option<u32>,
}

/// Retained message operations refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetainError {
    /// Count or bytes limit.
    Quota,
    /// The memory budget, or the share of it that retained messages may take, is used up.
    Memory,
    /// A quota of the publisher's identity or tenant; counted already.
    QuotaHolder,
    /// Switched off.
    Unavailable,
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
