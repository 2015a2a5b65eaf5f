//! The broker as its users see it: a message, a subscription or a connection goes from one part to the next here.

mod parts;
mod replay;

use std::sync::Arc;

use gateway_core::{ClientId, DropReason, Message, SharedMessage, Timestamp, limits::Limits};
use store::StoreError;
use tokio::sync::broadcast;

use crate::{
    Account, BrokerConfig, Event, EventPlace, EventReader, QuotaHolder, QuotaHolders, RetainError,
    RetainedPage,
};

pub(crate) use parts::BrokerInner;

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
}
