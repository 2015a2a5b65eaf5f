//! What outlives the process: which store holds what, and how it is restored at the start.

mod moves;
mod paging;

use std::sync::{
    Arc, Weak,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use ahash::RandomState;
use gateway_core::{
    ClientId, Commit, Durability, OriginKind, Page, QoS, QueueId, QueueOp, Refused, StoredEntry, Timestamp,
    matches, metrics::count,
};
use hashbrown::HashMap;
use parking_lot::Mutex;
use store::{
    Expiry, Loaded, QueueStore, QueueSummary, Restore, RetainedStore, SessionOp, SessionStore, StoreError,
    StoredSession, StoredSubscription,
};
use tokio::runtime::Handle;

use crate::{
    Broker, Inner, MemoryKind, Session, SessionCore, SubscribeRequest, Target, durable::moves::Stalled,
    sessions::Owners,
};

pub(crate) use moves::Moved;

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

/// Which messages are acknowledged when.
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
    /// Which session has which queue.
    owners: Mutex<Owners>,
    /// Shared groups by their queues.
    groups: Mutex<HashMap<QueueId, u32, RandomState>>,
    /// What the store did not take.
    pub(crate) stalled: Mutex<Stalled>,
    /// Where the store's later answers go.
    pub(crate) inner: Weak<Inner>,
}

/// What was restored at the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Restored {
    /// Sessions that continue.
    pub sessions: usize,
    /// Sessions that had expired.
    pub expired: usize,
    /// Subscriptions.
    pub subscriptions: usize,
    /// Subscriptions that are no longer allowed (non-broker mode, limits).
    pub refused_subscriptions: usize,
    /// Messages waiting on disk.
    pub messages: usize,
    /// Retained messages.
    pub retained: usize,
    /// Retained messages of devices, dropped in non-broker mode.
    pub refused_retained: usize,
    /// Retained messages beyond the limits: they stay on disk and are not served.
    pub left_retained: usize,
}

impl Stores {
    /// Waits until everything submitted before is on disk, or was refused. Cancel safe.
    pub async fn flush(&self) {
        // A read is answered after everything submitted before it, even of a queue that does not exist. Sessions come
        // last: a will leaves its session's record only once it is safe elsewhere.
        let _ = self.queues.load(QueueId::NONE, 0, 1, 1).await;
        let sessions = Commit::new();
        self.sessions.submit(SessionOp::Remove(QueueId::NONE, Some(Arc::clone(&sessions))));
        let _ = self.flush_retained().await;
        let _ = sessions.wait().await;
    }

    /// Waits until all changes of retained messages are on disk. Cancel safe.
    pub async fn flush_retained(&self) -> Result<(), Refused> {
        let commit = Commit::new();
        // No topic is empty [MQTT-4.7.3-1], so this clears nothing.
        self.retained.clear(Arc::from(""), Some(Arc::clone(&commit)));
        commit.wait().await
    }
}

impl Durable {
    pub(crate) fn new(stores: Stores, inner: Weak<Inner>) -> Self {
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
        self.sessions().submit(SessionOp::Put(Box::new(session), part(commit)));
    }

    /// Removes an ended session's record and queue from disk.
    pub(crate) fn remove_session(&self, core: &SessionCore, commit: Option<&Arc<Commit>>) {
        self.owners.lock().remove(core);
        self.sessions().submit(SessionOp::Remove(core.queue(), part(commit)));
        self.queues().submit(QueueOp::Purge { queue: core.queue() });
    }
}

/// One more part of a commit.
fn part(commit: Option<&Arc<Commit>>) -> Option<Arc<Commit>> {
    let commit = commit?;
    commit.add();
    Some(Arc::clone(commit))
}

/// What outlives the process.
impl Broker {
    /// The stores in use, if what sessions hold outlives the process.
    pub fn stores(&self) -> Option<&Stores> {
        self.inner.durable.as_ref().map(|durable| &durable.stores)
    }

    /// What the acknowledgement of a message to `topic` promises, if `listener` says this of its clients' messages.
    pub fn durability(&self, topic: &str, listener: Option<Durability>) -> Durability {
        self.inner.durability.of(topic, listener)
    }

    /// Reads a session's queue from place `from` on: about so many bytes, and one message at least. Cancel safe.
    pub async fn read_queue(
        &self,
        client_id: &ClientId,
        queue: QueueId,
        from: u64,
        bytes: usize,
    ) -> Result<Page, StoreError> {
        let durable = self.inner.durable.as_ref();
        let durable = durable.ok_or_else(|| StoreError::Unavailable("there is no store".to_owned()))?;
        let Loaded { entries, next, end, damaged } =
            durable.queues().load(queue, from, READ_MESSAGES, bytes).await?;
        if damaged > 0 {
            tracing::error!(%client_id, queue = queue.0, damaged, "messages of this session are damaged and were skipped");
        }
        let entries = self.inner.allowed(durable, queue, entries);
        let entries = entries.into_iter().map(|entry| self.inner.read_back(entry)).collect();
        Ok(Page { entries, next, end })
    }

    /// Answers the store's questions about messages that expire on disk. Holds the broker weakly, since the broker's
    /// stores hold this.
    pub fn queue_expiry(&self) -> Arc<dyn Expiry> {
        Arc::new(QueueExpiry(Arc::downgrade(&self.inner)))
    }

    /// Restores what earlier processes left, before anybody connects. `make` builds session objects; `sessions_lost`
    /// says that the sessions themselves were set aside as damaged. Blocks on the disk.
    pub fn restore(
        &self,
        make: impl Fn(SessionCore) -> Arc<dyn Session>,
        sessions_lost: bool,
        now: Timestamp,
    ) -> Result<Restored, StoreError> {
        let Some(durable) = &self.inner.durable else { return Ok(Restored::default()) };
        let queues = durable.queues().summaries()?;
        let mut restoring = Restoring {
            broker: self,
            durable,
            make,
            now,
            queues: queues.iter(),
            orphans: Vec::new(),
            groups: Vec::new(),
            last: queues.last().map_or(0, |summary| summary.queue.0),
            restored: Restored::default(),
        };
        durable.sessions().restore(&mut restoring)?;
        restoring.orphans.extend(restoring.queues.clone().map(|summary| summary.queue));
        let Restoring { orphans, groups, last, mut restored, .. } = restoring;
        durable.last.store(last, Relaxed);
        for (queue, full_name) in groups {
            if let Some(group) = self.inner.index.group_named(&full_name) {
                let summary = queues.binary_search_by_key(&queue, |summary| summary.queue).ok();
                let summary = summary.map(|at| &queues[at]);
                restored.messages += summary.map_or(0, |summary| summary.messages);
                durable.note_group(queue, group.id());
                group.restore(queue, summary);
            } else {
                durable.sessions().submit(SessionOp::RemoveGroup(queue));
                durable.queues().submit(QueueOp::Purge { queue });
            }
        }
        // Every restored member is persistent, so its group needs a queue; only an earlier version left groups without
        // one.
        for group in self.inner.index.groups() {
            group.keep_on_disk(durable);
        }
        // If the sessions are lost, their queues are kept in case somebody puts the file back.
        let orphans = if sessions_lost { Vec::new() } else { orphans };
        for queue in orphans.into_iter().filter(|queue| !durable.groups.lock().contains_key(queue)) {
            durable.queues().submit(QueueOp::Purge { queue });
        }
        self.restore_retained(durable, now, &mut restored)?;
        Ok(restored)
    }

    fn restore_retained(
        &self,
        durable: &Durable,
        now: Timestamp,
        restored: &mut Restored,
    ) -> Result<(), StoreError> {
        let inner = &*self.inner;
        let mut gone = Vec::new();
        durable.retained().restore(&mut |message| {
            if inner.non_broker && message.kind == OriginKind::Device {
                restored.refused_retained += 1;
                gone.push(Arc::clone(&message.topic));
            } else if message.is_expired(now) {
                gone.push(Arc::clone(&message.topic));
            } else if !inner.retained.restore(&message) {
                // Beyond today's limits: not served, but not deleted either, in case the limits are raised again.
                restored.left_retained += 1;
            } else {
                restored.retained += 1;
            }
        })?;
        for topic in gone {
            durable.retained().clear(topic, None);
        }
        Ok(())
    }
}

struct QueueExpiry(Weak<Inner>);

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

impl Inner {
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

/// Puts what the stores read into the broker.
struct Restoring<'a, M> {
    broker: &'a Broker,
    durable: &'a Durable,
    make: M,
    now: Timestamp,
    queues: std::slice::Iter<'a, QueueSummary>,
    /// Queues that belong to no session.
    orphans: Vec<QueueId>,
    groups: Vec<(QueueId, String)>,
    last: u64,
    restored: Restored,
}

impl<M> Restoring<'_, M> {
    /// The client id has a later session: an earlier one is still on disk only because its will was not safe yet. It
    /// ends with the next tick, which publishes the will.
    fn end_earlier(&self, client_id: &ClientId) {
        let inner = &*self.broker.inner;
        let mut lock = inner.lock_client(client_id.as_str());
        let Some(earlier) = lock.find(client_id.as_str()) else { return };
        lock.remove(&earlier);
        let mut state = earlier.core().state.lock();
        inner.timers.update(&earlier, &mut state, |state| state.expiry = 0);
    }

    /// The summary of a queue. Queues and summaries come in the same order.
    fn summary(&mut self, queue: QueueId) -> Option<&QueueSummary> {
        while self.queues.as_slice().first()?.queue <= queue {
            let summary = self.queues.next()?;
            if summary.queue == queue {
                return Some(summary);
            }
            self.orphans.push(summary.queue);
        }
        None
    }
}

impl<M: Fn(SessionCore) -> Arc<dyn Session>> Restore for Restoring<'_, M> {
    fn session(&mut self, stored: StoredSession, subscriptions: Vec<StoredSubscription>) {
        let queue = stored.queue;
        self.last = self.last.max(queue.0);
        let now = self.now;
        let inner = &*self.broker.inner;
        let mut summary = self.summary(queue).cloned();
        let was_offline = stored.since.is_some();
        self.end_earlier(&stored.client_id);
        let over = stored.expiry == 0
            || stored.expiry != u32::MAX
                && stored.since.is_some_and(|since| since.plus_secs(stored.expiry) <= now);
        if over && stored.will.is_none() {
            self.restored.expired += 1;
            count(|c| c.sessions_expired.add(1));
            self.durable.sessions().submit(SessionOp::Remove(queue, None));
            self.durable.queues().submit(QueueOp::Purge { queue });
            return;
        }
        let session = {
            let client_id = stored.client_id.clone();
            let mut lock = inner.lock_client(client_id.as_str());
            let slot = inner.slots.reserve();
            let session = (self.make)(SessionCore::restored(stored, slot, now, &inner.account));
            if let Some(summary) = &mut summary {
                if was_offline {
                    // It had no connection: what was sent was noted in the entries when the last one ended.
                    summary.begun = 0;
                }
                session.restore(summary);
                self.restored.messages += summary.messages;
            }
            inner
                .account
                .force(MemoryKind::Sessions, session.core().state.lock().cost(session.core().client_id()));
            inner.slots.set(slot, Arc::clone(&session) as Arc<dyn Target>);
            lock.replace(None, &session);
            self.durable.note_slot(session.core());
            session
        };
        inner.sessions.fetch_add(1, Relaxed);
        inner.timers.schedule(&session, &session.core().state.lock());
        self.restored.sessions += 1;
        for StoredSubscription { filter, qos, no_local, retain_as_published, id } in subscriptions {
            let request = SubscribeRequest {
                filter: &filter,
                qos,
                no_local,
                retain_as_published,
                retain_handling: 2,
                id,
                commit: None,
            };
            if self.broker.resubscribe(&session, &request).is_ok() {
                self.restored.subscriptions += 1;
            } else {
                self.restored.refused_subscriptions += 1;
            }
        }
    }

    fn group(&mut self, queue: QueueId, full_name: &str) {
        self.last = self.last.max(queue.0);
        self.groups.push((queue, full_name.to_owned()));
    }
}
