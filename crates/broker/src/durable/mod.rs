//! State that outlives the process: the stores and their contents ([`Durable`]), reads of queues ([`paging`]) and messages that
//! go from one queue to another ([`moves`]). [`Durable`] has a list of moves that the store refused, so that it and [`moves`] use
//! each other.

mod moves;
mod owners;
mod paging;

use std::sync::{
    Arc, Weak,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use ahash::RandomState;
use gateway_core::{
    Commit, CommitRefused, Durability, Message, QueueId, QueueOp, SharedMessage, Yielded, matches,
};
use hashbrown::HashMap;
use parking_lot::Mutex;
use store::{Loaded, SessionOp, StateStore, StoreError, StoredSession};
use tokio::runtime::Handle;

use self::owners::Owners;
use crate::memory::Account;

pub(crate) use moves::Stalled;

/// Messages read from one queue at once.
const READ_MESSAGES: usize = 512;

/// The store of what outlives the process.
#[derive(Clone)]
pub struct Stores {
    /// Sessions, messages that wait, and retained messages.
    pub state: Arc<dyn StateStore>,
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

/// The stores, and the owners of the queues.
pub(crate) struct Durable {
    stores: Stores,
    last: AtomicU64,
    /// Owners of the queues: the session of each.
    owners: Mutex<Owners>,
    /// Shared groups by their queues.
    groups: Mutex<HashMap<QueueId, u32, RandomState>>,
    /// Moves that the store refused.
    stalled: Mutex<Stalled>,
    /// Messages of devices are not delivered.
    non_broker: bool,
    answers: Weak<dyn StoreAnswers>,
}

/// Receiver of the store's later answers: it knows the groups, which this module does not.
pub(crate) trait StoreAnswers: Send + Sync {
    /// A page of a group's queue was read, or could not be.
    fn take_read(&self, group: u32, queue: QueueId, read: Result<Loaded, StoreError>);

    /// A message could not be moved from a group's queue, where it has this place, to that of a member.
    fn take_refused(&self, group: u32, message: Arc<SharedMessage>, place: u64);

    /// A message that a member gave back could not be moved out of its queue `from`.
    fn take_refused_yielded(&self, yielded: Yielded, from: QueueId);
}

/// Memory and disk, where parts of the broker keep what they hold.
#[derive(Clone, Copy)]
pub(crate) struct Storage<'a> {
    pub(crate) account: &'a Account,
    /// `None` if nothing outlives the process.
    pub(crate) durable: Option<&'a Durable>,
}

impl<'a> Storage<'a> {
    /// The stores, if they keep the session of this queue.
    pub(crate) fn durable_for(&self, queue: QueueId) -> Option<&'a Durable> {
        self.durable.filter(|_| queue != QueueId::NONE)
    }
}

impl Stores {
    /// Waits until everything submitted before is on disk, or was refused. Cancel safe.
    pub async fn flush(&self) {
        self.flush_queues().await;
        // A will leaves its session's record only once it is safe elsewhere, which may have been just now.
        let _ = self.flush_retained().await;
    }

    /// Waits until all changes of queues are on disk, or were refused. Cancel safe.
    pub async fn flush_queues(&self) {
        // A read is answered after everything submitted before it, even of a queue that does not exist.
        let _ = self.state.load(QueueId::NONE, 0, 1, 1).await;
    }

    /// Waits until all changes of sessions and retained messages are on disk. Cancel safe.
    pub async fn flush_retained(&self) -> Result<(), CommitRefused> {
        let commit = Commit::new();
        // No topic is empty [MQTT-4.7.3-1], so this clears nothing.
        self.state.clear_retained(Arc::from(""), Some(Arc::clone(&commit)));
        self.state.hurry();
        commit.wait().await
    }
}

impl Durable {
    pub(crate) fn new(stores: Stores, non_broker: bool, answers: Weak<dyn StoreAnswers>) -> Self {
        Self {
            stores,
            last: AtomicU64::new(QueueId::of(QueueId::HOME, 0).0),
            owners: Mutex::default(),
            groups: Mutex::default(),
            stalled: Mutex::default(),
            non_broker,
            answers,
        }
    }

    pub(crate) fn state(&self) -> &dyn StateStore {
        &*self.stores.state
    }

    /// Asks the store to hurry now that a message is routed, if its sender waits for the disk. A unit hurries when it
    /// is closed.
    pub(crate) fn hurry(&self, message: &Message<'_>) {
        if message.issued().is_some_and(|commit| !commit.is_unit()) {
            self.state().hurry();
        }
    }

    /// A queue number that was never used.
    pub(crate) fn next_queue(&self) -> QueueId {
        QueueId(self.last.fetch_add(1, Relaxed) + 1)
    }

    /// The stores themselves.
    pub(crate) fn stores(&self) -> &Stores {
        &self.stores
    }

    /// No queue up to this one is given to anybody again.
    pub(crate) fn set_last_queue(&self, last: u64) {
        self.last.store(last, Relaxed);
    }

    /// Notes the slot of the session that owns the queue.
    pub(crate) fn note_slot(&self, queue: QueueId, slot: u32) {
        self.owners.lock().insert(queue, slot);
    }

    /// Slots of the sessions of which one may own the queue.
    pub(crate) fn slots_of(&self, queue: QueueId) -> Vec<u32> {
        self.owners.lock().candidates(queue)
    }

    /// Notes the group that owns the queue.
    pub(crate) fn note_group(&self, queue: QueueId, group: u32) {
        self.groups.lock().insert(queue, group);
    }

    /// The group that owns the queue.
    pub(crate) fn group_of(&self, queue: QueueId) -> Option<u32> {
        self.groups.lock().get(&queue).copied()
    }

    /// A shared group is gone, and so is its queue.
    pub(crate) fn forget_group(&self, queue: QueueId) {
        self.groups.lock().remove(&queue);
        self.state().submit_session(SessionOp::RemoveGroup(queue));
        self.state().submit(QueueOp::Purge { queue });
    }

    /// Writes a session's record.
    pub(crate) fn put_session(&self, session: StoredSession, commit: Option<&Arc<Commit>>) {
        self.state().submit_session(SessionOp::Put(Box::new(session), commit.map(Commit::part)));
    }

    /// Removes an ended session's record and queue from disk.
    pub(crate) fn remove_session(&self, queue: QueueId, slot: u32, commit: Option<&Arc<Commit>>) {
        self.owners.lock().remove(queue, slot);
        self.state().submit_session(SessionOp::Remove(queue, commit.map(Commit::part)));
        self.state().submit(QueueOp::Purge { queue });
    }
}
