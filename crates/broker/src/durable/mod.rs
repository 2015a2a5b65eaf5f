//! State that outlives the process: the stores and their contents ([`Durable`]), restoring it at the start ([`restore`]), reads
//! of groups' queues ([`paging`]) and messages that go from one queue to another ([`moves`]). [`Durable`] has a list of moves
//! that the store refused, so that it and [`moves`] use each other.

mod moves;
mod paging;
mod restore;

use std::sync::{
    Arc, Weak,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use ahash::RandomState;
use gateway_core::{
    ClientId, Commit, CommitRefused, Durability, JournalPage, OriginKind, QoS, QueueId, QueueOp, StoredEntry,
    matches, metrics::count,
};
use hashbrown::HashMap;
use parking_lot::Mutex;
use store::{Expiry, Loaded, QueueStore, RetainedStore, SessionOp, SessionStore, StoreError, StoredSession};
use tokio::runtime::Handle;

use self::moves::Stalled;
use crate::{Broker, BrokerInner, Session, SessionCore, sessions::Owners};

pub use restore::Restored;

/// Messages read from one queue at once.
pub(crate) const READ_MESSAGES: usize = 512;

/// The stores of what outlives the process.
#[derive(Clone)]
pub struct Stores {
    /// Sessions and subscriptions.
    pub sessions: Arc<dyn SessionStore>,
    /// Messages that wait.
    pub queues: Arc<dyn QueueStore>,
    /// Retained messages.
    pub retained: Arc<dyn RetainedStore>,
    /// Runs what is read for no task in particular; nothing once it has ended.
    pub runtime: Handle,
}

/// Rules for the moment at which a message is acknowledged.
#[derive(Debug, Clone, Default)]
pub struct DurabilityRules {
    /// By topic filter; the first that matches counts.
    pub topics: Vec<(String, Durability)>,
    /// For the rest.
    pub default: Durability,
}

impl DurabilityRules {
    /// The mode of a message to `topic` from a listener of this mode.
    pub(crate) fn of(&self, topic: &str, listener: Option<Durability>) -> Durability {
        let rule = self.topics.iter().find(|(filter, _)| matches(filter, topic));
        rule.map(|(_, durability)| *durability).or(listener).unwrap_or(self.default)
    }
}

/// The stores, and who has which queue.
pub(crate) struct Durable {
    stores: Stores,
    last: AtomicU64,
    /// Owners of the queues: the session of each.
    owners: Mutex<Owners>,
    /// Shared groups by their queues.
    groups: Mutex<HashMap<QueueId, u32, RandomState>>,
    /// Moves that the store refused.
    pub(crate) stalled: Mutex<Stalled>,
    /// Receiver of the store's later answers.
    pub(crate) inner: Weak<BrokerInner>,
}

impl Stores {
    /// Waits until everything submitted before is on disk, or was refused. Cancel safe.
    pub async fn flush(&self) {
        // Sessions come last: a will leaves its session's record only once it is safe elsewhere.
        self.flush_queues().await;
        let sessions = Commit::new();
        self.sessions.submit(SessionOp::Remove(QueueId::NONE, Some(Arc::clone(&sessions))));
        let _ = self.flush_retained().await;
        let _ = sessions.wait().await;
    }

    /// Waits until all changes of queues are on disk, or were refused. Cancel safe.
    pub async fn flush_queues(&self) {
        // A read is answered after everything submitted before it, even of a queue that does not exist.
        let _ = self.queues.load(QueueId::NONE, 0, 1, 1).await;
    }

    /// Waits until all changes of retained messages are on disk. Cancel safe.
    pub async fn flush_retained(&self) -> Result<(), CommitRefused> {
        let commit = Commit::new();
        // No topic is empty [MQTT-4.7.3-1], so this clears nothing.
        self.retained.clear(Arc::from(""), Some(Arc::clone(&commit)));
        commit.wait().await
    }
}

impl Durable {
    pub(crate) fn new(stores: Stores, inner: Weak<BrokerInner>) -> Self {
        Self {
            stores,
            last: AtomicU64::new(0),
            owners: Mutex::default(),
            groups: Mutex::default(),
            stalled: Mutex::default(),
            inner,
        }
    }

    pub(crate) fn queues(&self) -> &dyn QueueStore {
        &*self.stores.queues
    }

    pub(crate) fn sessions(&self) -> &dyn SessionStore {
        &*self.stores.sessions
    }

    pub(crate) fn retained(&self) -> &Arc<dyn RetainedStore> {
        &self.stores.retained
    }

    /// A queue number that was never used.
    pub(crate) fn next_queue(&self) -> QueueId {
        QueueId(self.last.fetch_add(1, Relaxed) + 1)
    }

    /// Notes the slot of the session that owns the queue.
    pub(crate) fn note_slot(&self, core: &SessionCore) {
        self.owners.lock().insert(core);
    }

    /// Notes the group that owns the queue.
    pub(crate) fn note_group(&self, queue: QueueId, group: u32) {
        self.groups.lock().insert(queue, group);
    }

    /// A shared group is gone, and so is its queue.
    pub(crate) fn forget_group(&self, queue: QueueId) {
        self.groups.lock().remove(&queue);
        self.sessions().submit(SessionOp::RemoveGroup(queue));
        self.queues().submit(QueueOp::Purge { queue });
    }

    /// Writes a session's record.
    pub(crate) fn put_session(&self, session: StoredSession, commit: Option<&Arc<Commit>>) {
        self.sessions().submit(SessionOp::Put(Box::new(session), commit.map(Commit::part)));
    }

    /// Removes an ended session's record and queue from disk.
    pub(crate) fn remove_session(&self, core: &SessionCore, commit: Option<&Arc<Commit>>) {
        self.owners.lock().remove(core);
        self.sessions().submit(SessionOp::Remove(core.queue(), commit.map(Commit::part)));
        self.queues().submit(QueueOp::Purge { queue: core.queue() });
    }
}

/// State that outlives the process.
impl Broker {
    /// The stores in use, if what sessions hold outlives the process.
    pub fn stores(&self) -> Option<&Stores> {
        self.inner.durable.as_ref().map(|durable| &durable.stores)
    }

    /// Returns the promise that the acknowledgement of a message to `topic` makes, if `listener` sets this one for its clients'
    /// messages.
    pub fn durability(&self, topic: &str, listener: Option<Durability>) -> Durability {
        self.inner.durability.of(topic, listener)
    }

    /// Reads a session's queue from place `from` on: about `bytes` of it, but at least one message. Cancel safe.
    pub async fn read_queue(
        &self,
        client_id: &ClientId,
        queue: QueueId,
        from: u64,
        bytes: usize,
    ) -> Result<JournalPage, StoreError> {
        let durable = self.inner.durable.as_ref();
        let durable = durable.ok_or_else(|| StoreError::Unavailable("there is no store".to_owned()))?;
        let Loaded { entries, next, end, damaged } =
            durable.queues().load(queue, from, READ_MESSAGES, bytes).await?;
        if damaged > 0 {
            tracing::error!(%client_id, queue = queue.0, damaged, "messages of this session are damaged and were skipped");
        }
        let entries = self.inner.allowed(durable, queue, entries);
        let entries = entries.into_iter().map(|entry| self.inner.read_back(entry)).collect();
        Ok(JournalPage { entries, next, end })
    }

    /// Answers the store's questions about messages that expire on disk. Holds the broker weakly, since the broker's
    /// stores hold this.
    pub fn queue_expiry(&self) -> Arc<dyn Expiry> {
        Arc::new(QueueExpiry(Arc::downgrade(&self.inner)))
    }
}

struct QueueExpiry(Weak<BrokerInner>);

impl Expiry for QueueExpiry {
    fn keeps(&self, queue: QueueId, seq: u64, qos: QoS) -> bool {
        let inner = self.0.upgrade();
        inner.and_then(|inner| inner.session_of(queue)).is_some_and(|session| session.may_have_sent(seq, qos))
    }

    fn expired(&self, queue: QueueId, messages: usize, bytes: u64) {
        let Some(inner) = self.0.upgrade() else { return };
        if let Some(session) = inner.session_of(queue) {
            return session.note_expired(messages, bytes);
        }
        let Some(durable) = &inner.durable else { return };
        let group = durable.groups.lock().get(&queue).copied();
        if let Some(group) = group.and_then(|group| inner.index.group(group)) {
            group.note_expired(messages, bytes);
        }
    }
}

impl BrokerInner {
    /// The stores, if they keep this session.
    pub(crate) fn durable_for(&self, core: &SessionCore) -> Option<&Durable> {
        self.durable.as_ref().filter(|_| core.queue() != QueueId::NONE)
    }

    /// The session of a durable queue.
    pub(crate) fn session_of(&self, queue: QueueId) -> Option<Arc<dyn Session>> {
        let slots = self.durable.as_ref()?.owners.lock().candidates(queue);
        let mut sessions = slots.into_iter().filter_map(|slot| self.slots.session(slot));
        sessions.find(|session| session.core().queue() == queue)
    }

    /// Keeps what may be delivered of what was read from a queue and removes the rest: in non-broker mode, what devices
    /// had sent.
    pub(crate) fn allowed(
        &self,
        durable: &Durable,
        queue: QueueId,
        mut entries: Vec<StoredEntry>,
    ) -> Vec<StoredEntry> {
        if self.non_broker {
            entries.retain(|entry| {
                let blocked =
                    entry.message.as_ref().is_some_and(|message| message.kind == OriginKind::Device);
                if blocked {
                    count(|c| c.non_broker_blocked.add(1));
                    durable.queues().submit(QueueOp::Remove { queue, seq: entry.seq, unit: None });
                }
                !blocked
            });
        }
        entries
    }

    fn read_back(&self, entry: StoredEntry) -> StoredEntry<u32> {
        entry.with_group(|group| {
            let durable = self.durable.as_ref().filter(|_| group != QueueId::NONE);
            durable.and_then(|durable| durable.groups.lock().get(&group).copied()).unwrap_or(0)
        })
    }
}
