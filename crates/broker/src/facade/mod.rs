//! The broker as its users see it: a message, a subscription or a connection goes from one part to the next here.

mod answers;
mod parts;
mod replay;
mod reserved;
mod restore;

use std::sync::Arc;

use gateway_core::{
    ClientId, DropReason, Durability, GroupId, JournalPage, Message, QueueId, SharedMessage, Timestamp,
    limits::Limits,
};
use store::{Expiry, PartitionedLog, StoreError};
use tokio::sync::broadcast;

use crate::{
    Account, BrokerConfig, Event, EventPlace, EventReader, GroupFilter, MemoryKind, QuotaHolder,
    QuotaHolders, RetainError, RetainedPage, Stores, Turn,
    durable::{Durable, Stalled},
    log::LogTarget,
};

use answers::QueueExpiry;

pub(crate) use parts::BrokerInner;
pub use reserved::{Reserved, ReservedOutcome};
pub use restore::Restored;

/// The routing core; cheap to clone, callable from any thread.
#[derive(Clone)]
pub struct Broker {
    pub(crate) inner: Arc<BrokerInner>,
}

impl Broker {
    /// An empty broker.
    pub fn new(config: BrokerConfig) -> Self {
        Self { inner: BrokerInner::new(config) }
    }

    /// The memory account of the process.
    pub fn account(&self) -> &Arc<Account> {
        &self.inner.account
    }

    /// The quota holders of a device with this user name, if it was proved, this client id and this tenant.
    pub fn quota_holders(&self, user: Option<&str>, client_id: &str, tenant: &str) -> QuotaHolders {
        self.inner.quota_holders.of(user, client_id, tenant)
    }

    /// The tenants that are configured by name.
    pub fn tenants(&self) -> impl Iterator<Item = &Arc<QuotaHolder>> {
        self.inner.quota_holders.tenants()
    }

    /// Bounds in force.
    pub fn limits(&self) -> &Arc<Limits> {
        &self.inner.limits
    }

    /// Returns whether devices talk to backends only.
    pub fn is_non_broker(&self) -> bool {
        self.inner.non_broker
    }

    /// Events from now on; a slow receiver loses the oldest and is told (broadcast lag).
    pub fn events(&self) -> broadcast::Receiver<Event> {
        self.inner.events.subscribe()
    }

    /// Events from now on, or from `from` on, with as many of the last as are kept. `None` if nobody remembers that place: it
    /// is of another process, or nobody has watched for some minutes since.
    pub fn watch_events(&self, from: Option<EventPlace>) -> Option<EventReader> {
        self.inner.events.watch(from)
    }

    /// Sends an event to watchers.
    pub fn emit(&self, event: Event) {
        self.inner.events.emit(event);
    }

    /// Notes messages dropped for a session, for the next tick's event. Does nothing unless somebody watches. A target
    /// may call it: its lock is short and covers nothing else.
    pub fn note_dropped(&self, client_id: &ClientId, reason: DropReason, messages: u64) {
        self.inner.events.note_dropped(client_id, reason, messages);
    }

    /// Sets (non-empty payload) or clears (empty) a retained message without routing it. True if one was there.
    pub fn set_retained(&self, message: &Message<'_>) -> Result<bool, RetainError> {
        self.inner.retained.set(message, &QuotaHolders::default())
    }

    /// Time of the last retained message that was refused for a limit, and the key of that limit; `None` if none was.
    pub fn retained_refused(&self) -> Option<(Timestamp, &'static str)> {
        self.inner.retained.refused()
    }

    /// A retained message, if set and not expired. Cancel safe.
    pub async fn retained(
        &self,
        topic: &str,
        now: Timestamp,
    ) -> Result<Option<Arc<SharedMessage>>, StoreError> {
        self.inner.retained.message(topic, now).await
    }

    /// Topics that match `filter` and have a retained message, after topic `after`, at most `limit`.
    pub fn retained_topics(
        &self,
        filter: &str,
        after: Option<&str>,
        limit: usize,
        now: Timestamp,
    ) -> Vec<Arc<str>> {
        self.inner.retained.topics(filter, after, limit, now)
    }

    /// Retained messages that match `filter`, after topic `after`, at most `limit` and about `bytes`. Cancel safe.
    pub async fn list_retained(
        &self,
        filter: &str,
        after: Option<&str>,
        limit: usize,
        bytes: usize,
        now: Timestamp,
    ) -> Result<RetainedPage, StoreError> {
        self.inner.retained.list(filter, after, limit, bytes, now).await
    }

    /// The stores in use, if what sessions hold outlives the process.
    pub fn stores(&self) -> Option<&Stores> {
        self.inner.durable.as_ref().map(Durable::stores)
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
        durable.read_session(client_id, queue, from, bytes).await
    }

    /// Answers the store's questions about messages that expire on disk.
    pub fn queue_expiry(&self) -> Arc<dyn Expiry> {
        Arc::new(QueueExpiry(Arc::downgrade(&self.inner)))
    }

    /// Offers again what the store refused.
    pub(crate) fn retry_stalled(&self, now: Timestamp, turn: &mut Turn) {
        let inner = &*self.inner;
        let Some(durable) = &inner.durable else { return };
        let Stalled { mut groups, unread, yielded } = durable.take_stalled();
        for (yielded, from) in yielded {
            inner.account.release(MemoryKind::Queued, yielded.message.cost());
            // The message is still on disk where it was, but a session never rereads a message that it gave away.
            self.redeliver(vec![yielded], from, now, turn);
        }
        for group in &unread {
            if let Some(group) = inner.index.group(*group) {
                group.load_failed(&inner.account);
            }
        }
        groups.extend(unread);
        for group in groups {
            if let Some(group) = inner.index.group(group) {
                group.nudge();
            }
        }
    }

    /// The log that messages for consumer groups are appended to, if there is one.
    pub fn log(&self) -> Option<&Arc<dyn PartitionedLog>> {
        self.inner.log.as_ref().map(|target| target.log())
    }

    /// From now on messages that match `filter` are appended for the group, in the place of what it had before. A message
    /// that is published after this has returned is judged by the new filter, and all that was judged by the old one is
    /// submitted to the log.
    ///
    /// # Panics
    /// Without a log.
    pub fn keep_for(&self, group: GroupId, filter: Arc<GroupFilter>) {
        self.log_target().keep_for(group, filter, self.inner.group_surroundings());
    }

    /// From now on nothing is appended for the group. False if nothing was before.
    ///
    /// # Panics
    /// Without a log.
    pub fn keep_no_more_for(&self, group: GroupId) -> bool {
        self.log_target().keep_no_more_for(group, self.inner.group_surroundings())
    }

    /// Sets whether the group is full and refuses: QoS 1 and 2 messages that it wants are refused before any receiver has them,
    /// those of QoS 0 are not appended for it.
    ///
    /// # Panics
    /// Without a log.
    pub fn set_full(&self, group: GroupId, full: bool) {
        self.log_target().set_full(group, full);
    }

    /// Skips the group for now, or no longer: messages that it wants are not appended for it, and none is refused for that.
    ///
    /// # Panics
    /// Without a log.
    pub fn set_skipped(&self, group: GroupId, skipped: bool) {
        self.log_target().set_skipped(group, skipped);
    }

    /// Appends events for the groups that want them, as `encode` writes them; for ever. Without a group that wants events none
    /// is made. An event is not waited for: what the log does not take, or comes faster than it is appended, is counted.
    ///
    /// # Panics
    /// Without a log.
    pub async fn append_events(&self, encode: impl Fn(Event) -> Vec<u8> + Send) {
        Arc::clone(self.log_target()).append_events(encode).await;
    }

    fn log_target(&self) -> &Arc<LogTarget> {
        self.inner.log.as_ref().expect("groups are made only where there is a log")
    }

    /// Returns whether a device may not publish to this topic, whatever its rules say, since it is reserved for another.
    #[inline]
    pub fn is_foreign(&self, client_id: &str, topic: &str) -> bool {
        self.inner.reserved_topics().is_some_and(|topics| topics.is_foreign(client_id, topic))
    }
}
