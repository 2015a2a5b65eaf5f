//! The parts of the broker, and how they are made.

use std::sync::{
    Arc, Weak,
    atomic::{AtomicBool, AtomicUsize},
};

use ahash::RandomState;
use gateway_core::{LeaseGate, Message, NoRoom, ReservedTopics, Timestamp, limits::Limits};
use store::Recorder;

use super::reserved::ReservedParts;
use crate::{
    Account, BrokerConfig, DurabilityRules, QuotaHolders, Turn, WillAuthorizer,
    durable::{Durable, Storage},
    events::Events,
    log::{GroupSurroundings, LogTarget},
    quota_holders::QuotaRegistry,
    retained::RetainedMessages,
    routing::{Deliverer, Index, Redelivery, SubscriptionRules, admit_to_store},
    sessions::{Sessions, Slots},
};

/// All parts of the broker.
pub(crate) struct BrokerInner {
    pub(crate) limits: Arc<Limits>,
    pub(crate) non_broker: bool,
    pub(crate) rules: SubscriptionRules,
    pub(crate) latest: Option<Arc<dyn Recorder>>,
    pub(crate) history: Option<Arc<dyn Recorder>>,
    pub(crate) durable: Option<Durable>,
    pub(crate) durability: DurabilityRules,
    pub(crate) authorize_will: Option<Arc<WillAuthorizer>>,
    pub(crate) index: Index,
    /// The receiver of what consumer groups want.
    pub(crate) log: Option<Arc<LogTarget>>,
    /// Parts of the gateway that own topics.
    pub(crate) reserved: Option<ReservedParts>,
    pub(crate) retained: RetainedMessages,
    pub(crate) account: Arc<Account>,
    /// Decides whether anything may be acknowledged, and anybody admitted.
    pub(crate) lease: LeaseGate,
    pub(crate) quota_holders: QuotaRegistry,
    pub(crate) events: Events,
    pub(crate) sessions: Sessions,
    pub(crate) streams: AtomicUsize,
    /// Sessions and all else are another gateway's now.
    pub(crate) given_up: AtomicBool,
}

impl BrokerInner {
    /// Makes the parts of an empty broker.
    pub(super) fn new(config: BrokerConfig) -> Arc<Self> {
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
            authorize_will,
            tenants,
        } = config;
        let quota_holders = QuotaRegistry::new(&limits.identity, &tenants);
        // Keyed at random, so that peers cannot construct collisions.
        let hasher = RandomState::new();
        let namespace = non_broker.then_some(namespace);
        let rules =
            SubscriptionRules::new(Arc::clone(&limits), namespace, listener_strategies, hasher.clone());
        let store = stores.as_ref().map(|stores| Arc::clone(&stores.state));
        let account = account(&limits, stores.is_some(), latest.is_some(), history.is_some());
        let retained = RetainedMessages::new(
            limits.retained_messages,
            limits.retained_bytes.0,
            limits.retain_available,
            &account,
            store,
        );
        let slots = Slots::default();
        let log = log.map(|log| LogTarget::register(log, &slots));
        Arc::new_cyclic(|inner| Self {
            non_broker,
            rules,
            latest,
            history,
            durable: stores.map(|stores| {
                let answers = Weak::<Self>::clone(inner);
                Durable::new(stores, non_broker, answers)
            }),
            durability,
            authorize_will,
            index: Index::new(hasher.clone()),
            log,
            reserved: ReservedParts::new(reserved),
            sessions: Sessions::new(hasher, slots),
            retained,
            events: Events::new(&account),
            account,
            lease: LeaseGate::default(),
            quota_holders,
            streams: AtomicUsize::new(0),
            given_up: AtomicBool::new(false),
            limits,
        })
    }

    /// The account and the stores, for parts that keep something.
    pub(crate) fn storage(&self) -> Storage<'_> {
        Storage { account: &self.account, durable: self.durable.as_ref() }
    }

    /// Topics that parts of the gateway own.
    pub(crate) fn reserved_topics(&self) -> Option<&ReservedTopics> {
        self.reserved.as_ref().map(ReservedParts::topics)
    }

    /// The parts that a change of the consumer groups concerns.
    pub(crate) fn group_surroundings(&self) -> GroupSurroundings<'_> {
        GroupSurroundings { index: &self.index, account: &self.account, events: &self.events }
    }

    /// Drops retained messages from memory that have been there for long and are on disk.
    pub(crate) fn evict_retained(self: &Arc<Self>, now: Timestamp) {
        let Some(durable) = &self.durable else { return };
        let topics = self.retained.leaving(now);
        if topics.is_empty() {
            return;
        }
        let inner = Arc::downgrade(self);
        let answer = self.retained.load(topics.clone());
        durable.run(async move {
            let loaded = answer.await.unwrap_or_default();
            if let Some(inner) = inner.upgrade() {
                inner.retained.evict(topics, loaded);
            }
        });
    }

    /// The parts that deliveries need.
    #[inline(always)]
    pub(super) fn deliverer(&self) -> Deliverer<'_> {
        Deliverer { limits: &self.limits, account: &self.account, durable: &self.durable }
    }

    /// The parts that messages given back by members of shared groups need.
    pub(crate) fn redelivery(&self, now: Timestamp) -> Redelivery<'_> {
        Redelivery { index: &self.index, storage: self.storage(), now }
    }

    /// Asks the stores and the log whether they take a message, if it matches one whose receiver keeps it there.
    #[inline]
    pub(super) fn admit(&self, message: &Message<'_>, turn: &mut Turn) -> Result<(), NoRoom> {
        let slots = &self.sessions.slots;
        if let Some(durable) = &self.durable {
            admit_to_store(message, durable, &self.index, slots, turn)?;
        }
        self.log.as_ref().map_or(Ok(()), |log| log.admit_matched(message, &self.index, slots, turn))
    }

    /// The quota holders that a retained message counts for: those of the session in whose name it is.
    pub(super) fn holders_of(&self, message: &Message<'_>) -> QuotaHolders {
        match self.quota_holders.counts_retained() {
            true => self.sessions.quota_holders_of(message.origin.slot),
            false => QuotaHolders::default(),
        }
    }
}

/// The memory account, without what is set aside for the queues of writes, which bound themselves.
fn account(limits: &Limits, has_stores: bool, has_latest: bool, has_history: bool) -> Arc<Account> {
    let for_disk = if has_stores { limits.waiting_for_disk().0 } else { 0 };
    let for_latest = if has_latest { limits.waiting_values().0 } else { 0 };
    let for_history = if has_history { limits.waiting_history().0 } else { 0 };
    let set_aside = for_disk + for_latest + for_history;
    Arc::new(Account::new(limits.budget().0 - set_aside))
}
