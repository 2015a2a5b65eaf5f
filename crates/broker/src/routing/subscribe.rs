//! SUBSCRIBE and UNSUBSCRIBE of one filter.

use std::{collections::BTreeMap, sync::Arc};

use ahash::RandomState;
use gateway_core::{
    Commit, QoS, ReservedTopics, Timestamp, TopicFilter, has_wildcard, level_count,
    limits::{Limits, SharedStrategy},
    parse_shared,
};
use store::{SessionOp, StoredSubscription};

use super::{Index, index::Added};
use crate::{
    MemoryKind, QuotaExceeded, RetainedCursor, Session, SessionCore,
    counters::count,
    durable::{Durable, Storage},
    memory::Account,
    retained::RetainedMessages,
    sessions::SessionState,
    shared::{Most, SharedGroup, SharedMember},
    subscriber::{Options, Subscriber},
};

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
    /// Gets a part that is done when the subscription is on disk, if the session is persistent.
    pub commit: Option<&'a Arc<Commit>>,
}

/// A subscription that was made.
pub struct Subscribed {
    /// Granted QoS.
    pub qos: QoS,
    /// True if the subscription replaces one of the same filter.
    pub existed: bool,
    /// Retained messages to replay after the SUBACK, paced by the connection.
    pub replay: Option<RetainedCursor>,
    /// Messages are waiting in the queue of the group that was joined: call [`crate::Broker::online`] to get them.
    pub group_queue: bool,
    /// Members of the shared group that were visited.
    pub members: usize,
}

/// Why a filter was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SubscribeError {
    /// Not a valid filter (0x8F).
    Invalid,
    /// Shared subscription without group or with No Local (protocol error) [MQTT-3.8.3-4].
    NoLocalShared,
    /// The session has too many subscriptions (0x97).
    Quota,
    /// Not authorized, or outside the device's namespace in non-broker mode (0x87).
    NotAuthorized,
    /// Switched off (0xA2).
    WildcardUnavailable,
    /// Switched off (0x9E).
    SharedUnavailable,
    /// Switched off (0xA1).
    IdUnavailable,
}

/// Bytes of one subscription on the memory account: its text, its records and, if it has wildcards, its nodes in the
/// index.
fn cost(filter: &str) -> u32 {
    const ENTRY: usize = 96;
    const LEVEL: usize = 48;
    const GROUP: usize = 512;
    let way = if has_wildcard(filter) { filter.len() + LEVEL * level_count(filter) } else { 0 };
    let group = if filter.starts_with("$share/") { GROUP } else { 0 };
    u32::try_from(ENTRY + filter.len() + way + group).unwrap_or(u32::MAX)
}

/// Rules by which filters are allowed and counted.
pub(crate) struct SubscriptionRules {
    limits: Arc<Limits>,
    /// Pattern of a device's own namespace; `None` in broker mode.
    pub(super) namespace: Option<String>,
    listener_strategies: BTreeMap<String, SharedStrategy>,
    hasher: RandomState,
}

/// A subscription that is in the index.
pub(crate) struct IndexedSubscription {
    pub(crate) qos: QoS,
    options: Options,
    is_shared: bool,
    /// True if the subscription replaces one of the same filter.
    pub(crate) existed: bool,
    /// The filter or the group, as the index numbers it.
    pub(crate) reference: u32,
}

/// The shared group that a session has left with a subscription, if it was shared.
struct LeftGroups {
    /// The group, if it has no members now.
    empty: Option<Arc<SharedGroup>>,
    /// The group, if it goes on.
    remaining: Vec<Arc<SharedGroup>>,
}

impl SubscriptionRules {
    /// The rules of these limits; with a `namespace` devices subscribe only inside theirs.
    pub(crate) fn new(
        limits: Arc<Limits>,
        namespace: Option<String>,
        listener_strategies: BTreeMap<String, SharedStrategy>,
        hasher: RandomState,
    ) -> Self {
        Self { limits, namespace, listener_strategies, hasher }
    }

    /// Checks everything a filter may be refused for; returns group name and inner filter if it is shared.
    pub(crate) fn check<'a>(
        &self,
        client_id: &str,
        request: &SubscribeRequest<'a>,
        reserved: Option<&ReservedTopics>,
    ) -> Result<Option<(&'a str, &'a str)>, SubscribeError> {
        let limits = &self.limits;
        let shared = parse_shared(request.filter).map_err(|_| SubscribeError::Invalid)?;
        let filter = shared.map_or(request.filter, |(_, filter)| filter);
        TopicFilter::check(filter).map_err(|_| SubscribeError::Invalid)?;
        let too_long = request.filter.len() > limits.max_topic_bytes;
        if too_long || level_count(filter) > limits.max_topic_levels {
            return Err(SubscribeError::Invalid);
        }
        if shared.is_some() && !limits.shared_available {
            return Err(SubscribeError::SharedUnavailable);
        }
        // [MQTT-3.8.3-4]
        if shared.is_some() && request.no_local {
            return Err(SubscribeError::NoLocalShared);
        }
        if !limits.wildcard_available && has_wildcard(filter) {
            return Err(SubscribeError::WildcardUnavailable);
        }
        if !limits.subscription_id_available && request.id.is_some() {
            return Err(SubscribeError::IdUnavailable);
        }
        if !self.namespace_allows(client_id, request.filter, reserved) {
            return Err(SubscribeError::NotAuthorized);
        }
        Ok(shared)
    }

    /// Adds or replaces a subscription that was checked. `shared` has its group's name and the inner filter; one that is
    /// `restored` is not refused for what it costs.
    pub(crate) fn subscribe(
        &self,
        index: &Index,
        storage: Storage<'_>,
        session: &Arc<dyn Session>,
        request: &SubscribeRequest<'_>,
        shared: Option<(&str, &str)>,
        restored: bool,
    ) -> Result<IndexedSubscription, SubscribeError> {
        let limits = &self.limits;
        let core = session.core();
        let qos = request.qos.min(QoS::from_bits(limits.max_qos).unwrap_or(QoS::ExactlyOnce));
        let options = Options::new(qos, request.retain_as_published, request.no_local);
        let entry = Subscriber { slot: core.slot(), id: request.id.unwrap_or(0), options };
        let mut state = core.state.lock();
        if state.ended {
            return Err(SubscribeError::NotAuthorized);
        }
        let shape = self.shape(request.filter);
        let claim = self.claim(&mut state, request.filter, storage.account, restored);
        let may_add = claim.is_granted()
            && state.subscriptions.len() < limits.max_subscriptions
            && state.subscriptions.may_have(shape, limits.max_filter_shapes);
        let added = match shared {
            Some((name, filter)) => {
                let target = Arc::clone(session) as Arc<dyn crate::Target>;
                let Subscriber { slot, id, options } = entry;
                let member = SharedMember { target, slot, id, options };
                let strategy = self.strategy(name, &state.listener);
                self.join(index, request.filter, strategy, filter, member, may_add)
            }
            None => index.subscribe(request.filter, entry, may_add),
        };
        if added.as_ref().is_none_or(|added| added.existed) {
            claim.give_back(&mut state, storage.account);
        }
        let Some(Added { reference, existed }) = added else {
            claim.count_refusal();
            return Err(SubscribeError::Quota);
        };
        if !existed {
            state.subscriptions.push(reference, shape, claim.charge);
        }
        if let (Some(durable), Some(commit)) = (storage.durable_for(core.queue()), request.commit) {
            // Before the subscription is removed, so that no message is acknowledged in a queue that nobody will
            // read.
            for group in index.groups_of(&[reference]) {
                group.keep_on_disk(durable);
            }
            request.store(core, qos, durable, commit);
        }
        Ok(IndexedSubscription { qos, options, is_shared: shared.is_some(), existed, reference })
    }

    /// Removes a subscription; false if there was none. `commit` gets a part that is done when that is on disk.
    pub(crate) fn unsubscribe(
        &self,
        index: &Index,
        storage: Storage<'_>,
        core: &SessionCore,
        filter: &str,
        commit: Option<&Arc<Commit>>,
    ) -> bool {
        let Some(LeftGroups { empty, remaining }) = self.remove(index, storage, core, filter, commit) else {
            return false;
        };
        if let Some(group) = empty {
            group.close(storage);
        }
        for group in remaining {
            group.park(storage.account);
        }
        true
    }

    /// The part of [`Self::unsubscribe`] under the session's lock; `None` if there was no subscription.
    fn remove(
        &self,
        index: &Index,
        storage: Storage<'_>,
        core: &SessionCore,
        filter: &str,
        commit: Option<&Arc<Commit>>,
    ) -> Option<LeftGroups> {
        let is_shared = matches!(parse_shared(filter), Ok(Some(_)));
        let mut state = core.state.lock();
        if state.ended {
            return None;
        }
        let (reference, gone) = if is_shared {
            index.unsubscribe_shared(filter, core.slot())?
        } else {
            (index.unsubscribe(filter, core.slot())?, None)
        };
        let cost = cost(filter);
        state.subscriptions.remove(reference, self.shape(filter), cost);
        storage.account.release(MemoryKind::Filters, cost as usize);
        if let Some(quota_use) = state.quota_use() {
            quota_use.unsubscribe();
        }
        let left = if is_shared { index.groups_of(&[reference]) } else { Vec::new() };
        if let (Some(durable), Some(commit)) = (storage.durable_for(core.queue()), commit) {
            let op = SessionOp::Unsubscribe(core.queue(), filter.to_owned(), commit.part());
            durable.state().submit_session(op);
        }
        Some(LeftGroups { empty: gone, remaining: left })
    }

    /// The retained messages that follow a subscription, if any may.
    pub(crate) fn replay(
        &self,
        core: &SessionCore,
        request: &SubscribeRequest<'_>,
        subscription: &IndexedSubscription,
        retained: &RetainedMessages,
        now: Timestamp,
    ) -> Option<RetainedCursor> {
        let IndexedSubscription { options, is_shared, existed, .. } = *subscription;
        // Shared subscriptions get no retained messages [MQTT-4.8.2-1].
        let replays = !is_shared
            && self.limits.retain_available
            && retained.may_match(request.filter, now)
            && match request.retain_handling {
                0 => true,
                // Only if the subscription did not exist [MQTT-3.3.1-10].
                1 => !existed,
                _ => false,
            };
        let (id, limit) = (request.id.unwrap_or(0), self.limits.retained_per_subscribe);
        replays.then(|| RetainedCursor::new(request.filter, options, core.client_id(), id, limit))
    }

    /// Returns the set of wildcard levels of a filter, if it has any. The cost of a match grows with the number of different
    /// shapes among all sessions; nearly all sessions need only a few.
    fn shape(&self, filter: &str) -> Option<u64> {
        if !has_wildcard(filter) {
            return None;
        }
        let filter = parse_shared(filter).ok().flatten().map_or(filter, |(_, filter)| filter);
        let levels: Vec<u8> = filter
            .split('/')
            .map(|level| match level {
                "+" => b'+',
                "#" => b'#',
                _ => b'/',
            })
            .collect();
        Some(self.hasher.hash_one(levels))
    }

    /// Claims memory and quotas for another filter, before it is known whether it is new.
    fn claim(
        &self,
        state: &mut SessionState,
        filter: &str,
        account: &Account,
        restored: bool,
    ) -> FilterClaim {
        let charge = cost(filter);
        let charged = self.charge(state, charge, account, restored);
        let quotas = state.quota_use().map_or(Ok(()), |quota_use| quota_use.subscribe(restored));
        FilterClaim { charge, charged, quotas }
    }

    /// Charges another filter to the session and to the account; a restored one is not refused.
    fn charge(&self, state: &SessionState, charge: u32, account: &Account, restored: bool) -> bool {
        if restored {
            account.force(MemoryKind::Filters, charge as usize);
            return true;
        }
        let held = state.subscriptions.bytes() as usize;
        let fits = held + charge as usize <= self.limits.subscription_bytes.0
            && account.charge(MemoryKind::Filters, held, charge as usize);
        count(|c| c.memory_filters.add(u64::from(!fits)));
        fits
    }

    /// The strategy of a group of this name, should a client of this listener create it: the group's own, else
    /// the listener's, else the default. It stays until the group's last member has left.
    fn strategy(&self, group: &str, listener: &str) -> SharedStrategy {
        let by_group = self.limits.shared_groups.get(group);
        let chosen = by_group.or_else(|| self.listener_strategies.get(listener));
        chosen.copied().unwrap_or(self.limits.shared_strategy)
    }

    fn join(
        &self,
        index: &Index,
        full: &str,
        strategy: SharedStrategy,
        filter: &str,
        member: SharedMember,
        may_add: bool,
    ) -> Option<Added> {
        let most = Most::new(&self.limits);
        let make = |id| SharedGroup::new(id, full, strategy, self.hasher.clone(), most);
        index.subscribe_shared(full, filter, member, may_add, make)
    }
}

/// Memory and quotas that another subscription takes of its session's.
struct FilterClaim {
    /// Bytes on the memory account.
    charge: u32,
    /// True if the account has granted them.
    charged: bool,
    quotas: Result<(), QuotaExceeded>,
}

impl FilterClaim {
    fn is_granted(&self) -> bool {
        self.charged && self.quotas.is_ok()
    }

    /// Gives back what was granted: there is no new subscription.
    fn give_back(&self, state: &mut SessionState, account: &Account) {
        if self.charged {
            account.release(MemoryKind::Filters, self.charge as usize);
        }
        if let (Ok(()), Some(quota_use)) = (&self.quotas, state.quota_use()) {
            quota_use.unsubscribe();
        }
    }

    /// Counts the refusal, if it was for a quota.
    fn count_refusal(self) {
        if let Err(exceeded) = self.quotas {
            exceeded.counted();
        }
    }
}

impl SubscribeRequest<'_> {
    /// Writes the subscription of a session that is kept on disk.
    fn store(&self, core: &SessionCore, qos: QoS, durable: &Durable, commit: &Arc<Commit>) {
        let subscription = StoredSubscription {
            filter: self.filter.to_owned(),
            qos,
            no_local: self.no_local,
            retain_as_published: self.retain_as_published,
            id: self.id,
        };
        durable.state().submit_session(SessionOp::Subscribe(core.queue(), subscription, commit.part()));
    }
}
