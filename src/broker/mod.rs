//! Routing: who gets a message. Knows topics, subscriptions, retained messages, shared groups, wills and
//! the registry of sessions; knows receivers only as [`Target`]. Knows no wire format, socket or database.
//!
//! Invariant: no lock of this module is held while a target is called, and a target never calls back in.

mod target;

use std::sync::Arc;

use tokio::sync::broadcast;

use crate::config::Limits;
use crate::types::{ClientId, DropReason, Message, QoS, SharedMessage, Timestamp};

pub use target::*;

/// Per-thread cache of topic -> targets, validated by the index's generations.
#[derive(Default)]
pub struct MatchCache {}

/// The broker's part of one session. Embedded in the session object of net, so that there is one allocation.
pub struct SessionCore {}

impl SessionCore {
    /// The client id.
    pub fn client_id(&self) -> &ClientId {
        todo!()
    }
    /// The session's slot; never 0, reused only after the session ended.
    pub fn slot(&self) -> u32 {
        todo!()
    }
}

/// Start parameters.
pub struct BrokerConfig {
    /// Bounds.
    pub limits: Arc<Limits>,
    /// Devices talk to backends only.
    pub non_broker: bool,
    /// Pattern of a device's own namespace in non-broker mode, with `{client_id}`.
    pub namespace: String,
    /// Latest values; `None` switches them off.
    pub latest: Option<Arc<crate::store::Latest>>,
}

/// The routing core; cheap to clone, callable from any thread.
#[derive(Clone)]
pub struct Broker {}

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
    pub info: Arc<ConnectionInfo>,
    /// Time.
    pub now: Timestamp,
}

/// Result of [`Broker::open`].
pub struct Opened {
    /// The session, old or new.
    pub session: Arc<dyn Session>,
    /// Whether state was resumed [MQTT-3.2.2-2].
    pub present: bool,
    /// Grows with every open; the connection owns the session while no higher one exists.
    pub epoch: u64,
}

/// How a connection ended, for [`Broker::closed`].
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
}

/// A subscription that was made.
pub struct Subscribed {
    /// Granted QoS.
    pub qos: QoS,
    /// Retained messages to replay after the SUBACK, paced by the connection.
    pub replay: Option<RetainedCursor>,
}

/// Why a filter was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SubscribeError {
    /// Not a valid filter (0x8F).
    Invalid,
    /// Shared subscription without group or with No Local (protocol error) [MQTT-3.8.3-4].
    NoLocalShared,
    /// Subscriptions per session (0x97).
    Quota,
    /// Not allowed, also outside the namespace in non-broker mode (0x87).
    NotAuthorized,
    /// Switched off (0xA2).
    WildcardUnavailable,
    /// Switched off (0x9E).
    SharedUnavailable,
    /// Switched off (0xA1).
    IdUnavailable,
}

/// Position in the retained messages that match one new subscription.
pub struct RetainedCursor {}

impl RetainedCursor {
    /// The next message, skipping expired ones; `None` at the end. Looks at a bounded number of topics per
    /// call: `Some(None)` means "call again".
    pub fn next(&mut self, _broker: &Broker, _now: Timestamp) -> Option<Option<Arc<SharedMessage>>> {
        todo!()
    }
    /// Options for delivering what [`Self::next`] yields (replay is set).
    pub fn options(&self) -> MatchOptions<'_> {
        todo!()
    }
}

/// What [`Broker::publish`] did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Published {
    /// Subscribers matched (sessions and streams).
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
    pub refused: bool,
}

/// What to do when the device of [`Broker::publish_to_device`] has no connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offline {
    /// Wait in its session.
    Queue,
    /// Report it.
    Fail,
    /// Drop quietly.
    Drop,
}

/// Result of [`Broker::publish_to_device`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DirectOutcome {
    /// As [`Outcome`].
    Done(Outcome),
    /// No session of that client id.
    UnknownDevice,
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
    pub connection: Arc<ConnectionInfo>,
    /// When the current state (connected or not) began.
    pub since: Timestamp,
    /// Session expiry in seconds.
    pub expiry: u32,
    /// Subscriptions: full filter and granted QoS.
    pub subscriptions: Vec<(String, QoS)>,
    /// Queue figures.
    pub queue: QueueInfo,
}

/// Retained message operations refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetainError {
    /// Count or bytes limit.
    Quota,
    /// Switched off.
    Unavailable,
}

impl Broker {
    /// An empty broker.
    pub fn new(_config: BrokerConfig) -> Self {
        todo!()
    }

    /// Opens the session of a client id: discards, resumes or creates it, and asks the old connection to end.
    /// `make` builds the session object for a new session. Asynchronous for clustered registries.
    pub async fn open(
        &self,
        _request: OpenRequest,
        _make: impl FnOnce(SessionCore) -> Arc<dyn Session>,
        _turn: &mut Turn,
    ) -> Opened {
        todo!()
    }

    /// Tells that the connection of `epoch` ended. Ignored if a later epoch exists. Publishes or schedules the
    /// will, ends the session if its expiry is 0.
    pub fn closed(
        &self,
        _session: &Arc<dyn Session>,
        _epoch: u64,
        _closed: Closed,
        _now: Timestamp,
        _turn: &mut Turn,
    ) {
        todo!()
    }

    /// Adds or replaces one subscription.
    pub fn subscribe(
        &self,
        _session: &Arc<dyn Session>,
        _request: &SubscribeRequest<'_>,
        _now: Timestamp,
    ) -> Result<Subscribed, SubscribeError> {
        todo!()
    }

    /// Removes one subscription; false if there was none (0x11).
    pub fn unsubscribe(
        &self,
        _session: &Arc<dyn Session>,
        _filter: &str,
        _now: Timestamp,
        _turn: &mut Turn,
    ) -> bool {
        todo!()
    }

    /// Routes one message by MQTT rules: retained store, latest value (devices only), subscribers.
    pub fn publish(&self, _message: &Message<'_>, _turn: &mut Turn) -> Published {
        todo!()
    }

    /// Hands one message to one device, subscribed or not.
    pub fn publish_to_device(
        &self,
        _device: &str,
        _message: &Message<'_>,
        _offline: Offline,
        _turn: &mut Turn,
    ) -> DirectOutcome {
        todo!()
    }

    /// Gives a shared group's messages to other members, or to the group's queue.
    pub fn redeliver(&self, _messages: Vec<(u32, Arc<SharedMessage>)>, _now: Timestamp, _turn: &mut Turn) {
        todo!()
    }

    /// Called by net after a session has its new link: group queues drain to it.
    pub fn online(&self, _session: &Arc<dyn Session>, _now: Timestamp, _turn: &mut Turn) {
        todo!()
    }

    /// Registers a gRPC stream for MQTT filters (already valid; `#` includes no `$` topics). Never shared.
    pub fn attach_stream(&self, _target: Arc<dyn Target>, _filters: &[String]) -> StreamHandle {
        todo!()
    }

    /// A retained message, if set and not expired.
    pub fn retained(&self, _topic: &str, _now: Timestamp) -> Option<Arc<SharedMessage>> {
        todo!()
    }

    /// Sets (non-empty payload) or clears (empty) a retained message without routing it. True if one was there.
    pub fn set_retained(&self, _message: &Message<'_>) -> Result<bool, RetainError> {
        todo!()
    }

    /// Retained messages that match `filter`, after topic `after`, at most `limit`.
    pub fn list_retained(
        &self,
        _filter: &str,
        _after: Option<&str>,
        _limit: usize,
        _now: Timestamp,
    ) -> Vec<Arc<SharedMessage>> {
        todo!()
    }

    /// One device.
    pub fn device(&self, _client_id: &str) -> Option<DeviceInfo> {
        todo!()
    }

    /// Devices in order of client id, after `after`, at most `limit`.
    pub fn devices(&self, _after: Option<&str>, _limit: usize, _online_only: bool) -> Vec<DeviceInfo> {
        todo!()
    }

    /// Ends a device's connection and, with `discard`, its session. False if there is no such session.
    pub fn disconnect(
        &self,
        _client_id: &str,
        _code: u8,
        _discard: bool,
        _now: Timestamp,
        _turn: &mut Turn,
    ) -> bool {
        todo!()
    }

    /// Every session with a connection, for shutdown pacing.
    pub fn online_sessions(&self) -> Vec<Arc<dyn Session>> {
        todo!()
    }

    /// Events from now on; a slow receiver loses the oldest and is told (broadcast lag).
    pub fn events(&self) -> broadcast::Receiver<Event> {
        todo!()
    }

    /// Sends an event to watchers.
    pub fn emit(&self, _event: Event) {
        todo!()
    }

    /// Runs what is due: session expiry, delayed wills, retained expiry. Call about once a second.
    pub fn tick(&self, _now: Timestamp, _turn: &mut Turn) {
        todo!()
    }

    /// Bytes queued in the process are charged here; false refuses (memory budget).
    pub fn charge(&self, _bytes: usize) -> bool {
        todo!()
    }

    /// Gives charged bytes back.
    pub fn release(&self, _bytes: usize) {
        todo!()
    }

    /// Latest values, if on.
    pub fn latest(&self) -> Option<&Arc<crate::store::Latest>> {
        todo!()
    }

    /// Bounds in force.
    pub fn limits(&self) -> &Arc<Limits> {
        todo!()
    }

    /// Gauges for metrics and `$SYS`.
    pub fn gauges(&self) -> Gauges {
        todo!()
    }
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
    /// Bytes charged against the memory budget.
    pub queued_bytes: usize,
    /// gRPC streams.
    pub streams: usize,
}

/// Keeps a gRPC stream registered; dropping it removes the stream.
pub struct StreamHandle {}
