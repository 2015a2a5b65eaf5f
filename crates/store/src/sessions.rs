//! Durable sessions: who they are, what they subscribe to, their wills.

use std::sync::Arc;

use gateway_core::{ClientId, Commit, Protocol, QoS, QueueId, SharedMessage, Timestamp};

/// A session without its subscriptions.
#[derive(Debug, Clone)]
pub struct StoredSession {
    /// Its number, also that of its queue.
    pub queue: QueueId,
    /// Client id.
    pub client_id: ClientId,
    /// Seconds to live after the connection ended; `u32::MAX` is for ever.
    pub expiry: u32,
    /// Time at which the connection ended; `None` while there is one. Deadlines count from here, or from the restart.
    pub since: Option<Timestamp>,
    /// Protocol level of the last connection.
    pub protocol: Protocol,
    /// Listener of the last connection.
    pub listener: Arc<String>,
    /// User name of the last connection.
    pub username: Option<Box<str>>,
    /// True if the user name was proved: then the session counts for the user, else for the client id. Known only where quotas of
    /// identities are configured.
    pub proved: bool,
    /// The tenant that it counts for, if that is not the listener's and has quotas.
    pub tenant: Option<Box<str>>,
    /// Will that is not published yet.
    pub will: Option<StoredWill>,
}

/// A will.
#[derive(Debug, Clone)]
pub struct StoredWill {
    /// The message.
    pub message: Arc<SharedMessage>,
    /// Message expiry interval in seconds, counted from publication.
    pub expiry: Option<u32>,
    /// Will Delay Interval in seconds.
    pub delay: u32,
    /// Author of the will, in the form written by the code that judges wills; `None` if wills are not judged.
    pub author: Option<Arc<String>>,
}

/// One subscription of a stored session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredSubscription {
    /// Full filter, with `$share/group/` if shared.
    pub filter: String,
    /// Granted QoS.
    pub qos: QoS,
    /// No Local.
    pub no_local: bool,
    /// Retain As Published.
    pub retain_as_published: bool,
    /// Subscription identifier.
    pub id: Option<u32>,
}

/// One change. A commit carries a part that the store ends once the change is durable.
#[derive(Debug)]
pub enum SessionOp {
    /// Adds or replaces a session's record; its subscriptions stay.
    Put(Box<StoredSession>, Option<Arc<Commit>>),
    /// Removes a session and its subscriptions.
    Remove(QueueId, Option<Arc<Commit>>),
    /// Adds or replaces a subscription.
    Subscribe(QueueId, StoredSubscription, Arc<Commit>),
    /// Removes a subscription.
    Unsubscribe(QueueId, String, Arc<Commit>),
    /// Gives the shared group of this full filter a queue.
    Group(QueueId, String),
    /// Removes a group's queue.
    RemoveGroup(QueueId),
}

/// Everything that was kept, as the start reads it.
pub trait Restore {
    /// A session with its subscriptions.
    fn session(&mut self, session: StoredSession, subscriptions: Vec<StoredSubscription>);
    /// A shared group's queue.
    fn group(&mut self, queue: QueueId, full_name: &str);
}
