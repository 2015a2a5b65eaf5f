//! The seam between routing and receivers: sessions of devices, and gRPC streams.

use std::{any::Any, sync::Arc};

use gateway_core::{Message, Offer, Outcome, QoS, SharedMessage, Yielded};
use store::QueueSummary;

use super::SessionCore;
use crate::{Charge, RetainedCursor};

/// Result of [`Target::deliver`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delivered {
    /// Outcome of the delivery.
    pub outcome: Outcome,
    /// The target has bytes to flush and is on no flush list yet: the broker puts it on the turn's.
    pub flush: bool,
}

/// Receives messages. Called under no broker lock; must not call back into the broker.
pub trait Target: Any + Send + Sync {
    /// Takes or refuses one message without blocking and without a system call.
    fn deliver(&self, message: &Message<'_>, offer: Offer<'_>) -> Delivered;

    /// Sends what earlier deliveries left. Called once for each `flush: true`, at the latest at the end of the turn.
    fn flush(self: Arc<Self>);

    /// Sends the same sooner, if that costs little. [`Self::flush`] still follows, and until then further deliveries
    /// return `flush: false`.
    fn flush_early(&self) {}

    /// Returns whether the receiver is connected.
    fn is_online(&self) -> bool;

    /// The session that this target is, if it is one.
    fn into_session(self: Arc<Self>) -> Option<Arc<dyn Session>> {
        None
    }

    /// Returns whether messages that the receiver takes at QoS 1 and 2 go to disk.
    fn is_durable(&self) -> bool {
        false
    }

    /// A shared group's queue has messages for which the session was too full; it should ask for them when it has room.
    fn nudge(&self) {}

    /// Messages waiting or un-acknowledged (for `least_inflight` and gauges).
    fn load(&self) -> usize;
}

/// A target that is an MQTT session.
pub trait Session: Target {
    /// The broker's part of the session. A plain accessor: it is called under registry locks.
    fn core(&self) -> &SessionCore;

    /// Asks the connection of `epoch`, or an older one, to end for `reason`. If the connection of `epoch` has not
    /// attached yet, it ends when it does. Does not wait. False if it was asked before.
    fn close(&self, epoch: u32, reason: CloseReason) -> bool;

    /// The session is over: drops what waits, and returns what a shared group may give to another member, which is
    /// never QoS 2 in flight [MQTT-4.8.2-5]. The broker removes what is on disk.
    fn end(&self) -> Vec<Yielded>;

    /// The connection ended: returns what a shared group queued here and was not sent yet, unless another connection
    /// has come since. The session never rereads from disk what it returned.
    fn yield_shared(&self) -> Vec<Yielded>;

    /// Restores what an earlier process left on disk. Called once, before anybody else has the session.
    fn restore(&self, stored: &QueueSummary);

    /// The connection has ended: notes in the queue on disk what the client may have begun to receive, unless a new connection
    /// has come.
    fn note_sent(&self) {}

    /// Returns whether the entry in this place must stay on disk although it has expired, because the client may have begun to
    /// receive it.
    fn may_have_sent(&self, place: u64, qos: QoS) -> bool;

    /// Messages that were on disk only have expired there.
    fn note_expired(&self, messages: usize, bytes: u64);

    /// For getting the concrete type back.
    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync>;

    /// Counts for `Devices.Get` and metrics.
    fn queue(&self) -> QueueInfo;

    /// Bytes of the memory account that it holds for messages on their way to the client.
    fn held(&self) -> usize {
        0
    }

    /// Memory is short and the session holds much: drops what is on disk or what its overflow policy allows, else ends
    /// the connection.
    fn give_back(&self) {}

    /// Tells whoever waits for messages that are in memory and have expired. Looks at no others.
    fn tell_expired(&self) {}

    /// Returns the messages in memory for the client, first the sent and unacknowledged ones, from the index `from` on.
    fn queued(&self, _from: usize, _most: usize) -> Queued {
        Queued::default()
    }

    /// Drops all that waits for the client and was not sent. Returns about how many messages that were.
    fn purge(&self) -> usize {
        0
    }

    /// Has the connection do what follows from a subscription that was made or removed by somebody other than the client. Does
    /// not wait.
    ///
    /// # Errors
    /// There is no connection, or it has too much to do; gives back what is not done.
    fn take_replay_work(&self, replay_work: ReplayWork) -> Result<(), ReplayWork> {
        Err(replay_work)
    }

    /// Lets the session get what is allowed it by somebody whom its rules do not know. Whether that is new; `None` if it can
    /// have no more of these.
    fn grant(&self, _filter: &str) -> Option<bool> {
        Some(false)
    }

    /// Takes that back.
    fn withdraw(&self, _filter: &str) {}
}

/// Work of a connection for a subscription that its client has not asked for.
pub enum ReplayWork {
    /// A subscription was made: these retained messages are sent, as the connection has room for them.
    Replay(RetainedCursor),
    /// The subscription to this filter was removed: no more retained messages are sent for it.
    EndReplay(Box<str>),
}

/// A part of a session's queue.
#[derive(Debug, Default)]
pub struct Queued {
    /// Messages in memory: each with the QoS of its delivery, and whether it was sent.
    pub messages: Vec<(Arc<SharedMessage>, QoS, bool)>,
    /// The place from which on there are more on disk, if there are.
    pub tail: Option<u64>,
}

/// Queue figures of one session.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueInfo {
    /// Sent and not acknowledged.
    pub inflight: usize,
    /// Waiting.
    pub pending: usize,
    /// Bytes waiting.
    pub pending_bytes: usize,
    /// Dropped since the session began.
    pub dropped: u64,
}

/// Why the gateway ends a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CloseReason {
    /// Another connection uses the client id [MQTT-3.1.4-3].
    TakenOver,
    /// An administrator (gRPC Devices.Disconnect) asked for it, with this v5 reason code.
    Administrative(u8),
    /// The client may no longer be connected: its certificate was revoked, or its token has expired (0x87).
    NotAuthorized,
    /// The client is banned (0x8A).
    Banned,
    /// Its queue overflowed and the policy is to disconnect.
    SlowConsumer,
    /// The gateway shuts down.
    ServerShutdown,
    /// Nothing was read for 1.5 times the keep alive [MQTT-3.1.2-22].
    KeepAlive,
    /// A packet that had begun did not continue in time.
    PacketTimeout,
    /// Memory is short, and the connection holds more than is allowed then.
    Memory,
    /// A write made no progress.
    WriteTimeout,
    /// The session's expiry ended while it was connected, or the session was discarded.
    SessionEnded,
    /// The session is another gateway's: this one knows nothing of it any more, and tells the client nothing.
    GivenUp,
}

/// A will, published when its connection ends without DISCONNECT 0x00.
#[derive(Debug, Clone)]
pub struct Will {
    /// The message, retain flag and all. `expires` is set from `expiry` when it is published.
    pub message: Arc<SharedMessage>,
    /// Message expiry interval in seconds, counted from publication.
    pub expiry: Option<u32>,
    /// Will Delay Interval in seconds.
    pub delay: u32,
    /// Its bytes on the memory account, for as long as it is kept.
    pub charge: Option<Arc<Charge>>,
    /// Author of the will, for [`WillAuthorizer`](crate::WillAuthorizer); `None` if wills are not authorized when they are published.
    pub author: Option<Arc<String>>,
}

/// Facts known of a connection, for `Devices` and events.
#[derive(Debug, Clone)]
pub struct ConnectionInfo {
    /// Remote address.
    pub peer: gateway_core::Peer,
    /// Listener name.
    pub listener: Arc<String>,
    /// Protocol level.
    pub protocol: gateway_core::Protocol,
    /// Effective keep alive in seconds.
    pub keep_alive: u16,
    /// User name, if any.
    pub username: Option<Box<str>>,
    /// Identity of the client, for the code that authenticates and authorises it; `None` for an anonymous one. The broker keeps
    /// it and never looks into it.
    pub identity: Option<Arc<dyn Any + Send + Sync>>,
}
