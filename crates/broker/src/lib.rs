//! Routing: who gets a message. Knows topics, subscriptions, retained messages, shared groups, wills and
//! the registry of sessions; knows receivers only as [`Target`]. Knows no wire format, socket or database.
//!
//! Each folder is one concept and has its part of [`Broker`]'s methods:
//!
//! ```text
//! routing    publish, subscribe, match, and hand a message to its receivers
//! sessions   open, close and end sessions; find, list and describe them; publish wills
//! shared     shared groups and what waits in them
//! log        which consumer groups want a message, and its append to their log
//! reserved   topics that a part of the gateway answers
//! levels     how operators write those after the client id
//! retained   the last message of each topic, and its replay to new subscriptions
//! durable    what outlives the process: restore it, and move messages between queues on disk
//! quota_holders  quotas that several connections share: those of identities and of tenants
//! memory     the account of what peers make the process hold, and shedding when it is short
//! ```
//!
//! The folders use each other through `BrokerInner`, which holds one part of each: a subscription concerns a session, a group,
//! the index and the disk at once. Inside a folder, files import what they need from beside them, and only `mod.rs` says
//! what others may use. `api` has the arguments and results of calls, `target` the receivers' side, `events` what
//! happens to devices, `drops` what was dropped of theirs.
//!
//! Invariant: no lock of this module is held while a target is called, and a target never calls back in.
//! (The accessor [`Session::core`] is no call in this sense.) Lock order: registry shard, session state, then
//! one of timers or index; slots last.

mod api;
mod drops;
mod durable;
mod events;
mod half_hash;
mod log;
mod memory;
mod quota_holders;
mod reserved;
mod retained;
mod routing;
mod sessions;
mod shared;
mod slab;
mod target;

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicUsize},
    },
};

use ahash::RandomState;
use gateway_core::{
    Timestamp,
    limits::{Limits, SharedStrategy},
};
use store::Recorder;
use tokio::sync::broadcast;

use drops::Drops;
use durable::Durable;
use events::EVENT_CAPACITY;
use retained::RetainedMessages;
use routing::Index;
use sessions::{ClientLock, SessionRegistry, SessionTimers, Slots};
pub use store::{QueueStore, QueueSummary};

pub use api::*;
pub use durable::{DurabilityRules, Restored, Stores};
pub use events::{Event, EventKind, EventOrGap, EventPlace, EventReader};
pub use log::{EventKinds, GroupFilter, InScope, Selector, is_event, is_event_message};
pub use memory::{Account, Charge, MemoryKind};
pub(crate) use quota_holders::QuotaHolderKind;
pub use quota_holders::{Counted, QuotaExceeded, QuotaHolder, QuotaHolders};
pub use reserved::{Reserved, ReservedOutcome};
pub use retained::{RetainedCursor, RetainedPage};
pub(crate) use routing::MatchCache;
pub use routing::{Routing, Spread, StreamHandle};
pub use sessions::{SessionCleanup, SessionCore};
pub use target::*;

/// The routing core; cheap to clone, callable from any thread.
#[derive(Clone)]
pub struct Broker {
    inner: Arc<BrokerInner>,
}

struct BrokerInner {
    limits: Arc<Limits>,
    non_broker: bool,
    namespace: String,
    listener_strategies: BTreeMap<String, SharedStrategy>,
    latest: Option<Arc<dyn Recorder>>,
    history: Option<Arc<dyn Recorder>>,
    durable: Option<Durable>,
    durability: DurabilityRules,
    judge_will: Option<Arc<JudgeWill>>,
    /// Keyed at random, so that peers cannot construct collisions.
    hasher: RandomState,
    index: Index,
    /// The receiver of what consumer groups want.
    log: Option<Arc<log::LogTarget>>,
    /// Parts of the gateway that own topics.
    reserved: Option<reserved::Parts>,
    slots: Slots,
    registry: SessionRegistry,
    /// The slot where the next look for large holders of memory begins.
    shed_from: AtomicU32,
    timers: SessionTimers,
    retained: RetainedMessages,
    account: Arc<Account>,
    quota_holders: quota_holders::QuotaRegistry,
    events: broadcast::Sender<Event>,
    recent: Arc<events::RecentEvents>,
    drops: Drops,
    online: AtomicUsize,
    online_peak: AtomicUsize,
    /// Changes of sessions under way, see [`Broker::is_quiet`].
    changes: AtomicUsize,
    sessions: AtomicUsize,
    streams: AtomicUsize,
}

impl BrokerInner {
    /// Locks a client id in the registry.
    fn lock_client(&self, client_id: &str) -> ClientLock<'_> {
        self.registry.lock(client_id, &self.slots)
    }

    /// Collects the references that deliveries of shared groups need.
    fn delivery_context<'a>(
        &'a self,
        dirty: &'a mut Vec<Arc<dyn Target>>,
        now: Timestamp,
    ) -> shared::DeliveryContext<'a> {
        shared::DeliveryContext {
            dirty,
            account: &self.account,
            durable: self.durable.as_ref(),
            now,
            visited: 0,
        }
    }

    /// The session of a client id.
    fn session(&self, client_id: &str) -> Option<Arc<dyn Session>> {
        self.lock_client(client_id).find(client_id)
    }
}

impl Broker {
    /// An empty broker.
    pub fn new(config: BrokerConfig) -> Self {
        let BrokerConfig {
            limits,
            non_broker,
            namespace,
            listener_strategies,
            latest,
            history,
            stores,
            log,
            reserved,
            durability,
            judge_will,
            tenants,
        } = config;
        let quota_holders = quota_holders::QuotaRegistry::new(&limits.identity, &tenants);
        let hasher = RandomState::new();
        let store = stores.as_ref().map(|stores| Arc::clone(&stores.retained));
        // Set aside for what waits to be written: the stores bound it themselves.
        let for_disk = if stores.is_some() { limits.waiting_for_disk().0 } else { 0 };
        let for_latest = if latest.is_some() { limits.waiting_values().0 } else { 0 };
        let for_history = if history.is_some() { limits.waiting_history().0 } else { 0 };
        let set_aside = for_disk + for_latest + for_history;
        let account = Arc::new(Account::new(limits.budget().0 - set_aside));
        let retained = RetainedMessages::new(
            limits.retained_messages,
            limits.retained_bytes.0,
            limits.retain_available,
            &account,
            store,
        );
        let slots = Slots::default();
        let log = log.map(|log| {
            let slot = slots.reserve();
            let target = Arc::new(log::LogTarget::new(log, slot));
            slots.set(slot, Arc::clone(&target) as Arc<dyn Target>);
            target
        });
        let inner = Arc::new_cyclic(|inner| BrokerInner {
            non_broker,
            namespace,
            listener_strategies,
            latest,
            history,
            durable: stores.map(|stores| Durable::new(stores, inner.clone())),
            durability,
            judge_will,
            index: Index::new(hasher.clone()),
            log,
            reserved: reserved::Parts::new(reserved),
            slots,
            registry: SessionRegistry::new(hasher.clone()),
            shed_from: AtomicU32::new(0),
            timers: SessionTimers::default(),
            retained,
            recent: events::RecentEvents::new(&account),
            account,
            quota_holders,
            events: broadcast::Sender::new(EVENT_CAPACITY),
            drops: Drops::default(),
            online: AtomicUsize::new(0),
            online_peak: AtomicUsize::new(0),
            changes: AtomicUsize::new(0),
            sessions: AtomicUsize::new(0),
            streams: AtomicUsize::new(0),
            limits,
            hasher,
        });
        Self { inner }
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
}

#[cfg(test)]
mod tests;
