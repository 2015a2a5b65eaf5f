//! SUBSCRIBE and UNSUBSCRIBE of one filter.

use std::sync::Arc;

use gateway_core::{
    Commit, QoS, Timestamp, TopicFilter, has_wildcard, level_count, limits::SharedStrategy, metrics::count,
    parse_shared,
};
use store::{SessionOp, StoredSubscription};

use super::index::Added;
use crate::{
    Broker, BrokerInner, EventKind, MemoryKind, RetainedCursor, Session, SubscribeError, SubscribeRequest,
    Subscribed,
    sessions::SessionState,
    shared::{Most, SharedGroup, SharedMember},
    subscriber::{Options, Subscriber},
};

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

/// Subscriptions.
impl Broker {
    /// Adds or replaces one subscription. Refusals are counted here.
    pub fn subscribe(
        &self,
        session: &Arc<dyn Session>,
        request: &SubscribeRequest<'_>,
        now: Timestamp,
    ) -> Result<Subscribed, SubscribeError> {
        let result = self.try_subscribe(session, request, now, false);
        if result.is_err() {
            count(|c| c.subscribe_refused.add(1));
        }
        result
    }

    /// Removes one subscription; false if there was none (0x11). `commit` gets a part that is done when that is on disk.
    pub fn unsubscribe(
        &self,
        session: &Arc<dyn Session>,
        filter: &str,
        now: Timestamp,
        commit: Option<&Arc<Commit>>,
    ) -> bool {
        let inner = &*self.inner;
        let core = session.core();
        let is_shared = matches!(parse_shared(filter), Ok(Some(_)));
        let mut gone = None;
        let mut left = Vec::new();
        {
            let mut state = core.state.lock();
            if state.ended {
                return false;
            }
            let reference = if is_shared {
                inner.index.unsubscribe_shared(filter, core.slot()).map(|(reference, group)| {
                    gone = group;
                    reference
                })
            } else {
                inner.index.unsubscribe(filter, core.slot())
            };
            let Some(reference) = reference else { return false };
            let cost = cost(filter);
            state.subscriptions.remove(reference, self.shape(filter), cost);
            inner.account.release(MemoryKind::Filters, cost as usize);
            if let Some(membership) = state.membership() {
                membership.unsubscribe();
            }
            if is_shared {
                left = inner.index.groups_of(&[reference]);
            }
            if let (Some(durable), Some(commit)) = (inner.storage().durable_for(core.queue()), commit) {
                let op = SessionOp::Unsubscribe(core.queue(), filter.to_owned(), commit.part());
                durable.sessions().submit(op);
            }
        }
        if let Some(group) = gone {
            group.close(inner.storage());
        }
        for group in left {
            group.park(&inner.account);
        }
        self.inner.events.emit_with(now, core, || EventKind::Unsubscribed { filter: filter.to_owned() });
        true
    }

    fn try_subscribe(
        &self,
        session: &Arc<dyn Session>,
        request: &SubscribeRequest<'_>,
        now: Timestamp,
        restored: bool,
    ) -> Result<Subscribed, SubscribeError> {
        let inner = &*self.inner;
        let limits = &inner.limits;
        let core = session.core();
        let shared = self.check(core.client_id().as_str(), request)?;
        let granted = QoS::from_bits(limits.max_qos).unwrap_or(QoS::ExactlyOnce);
        let qos = request.qos.min(granted);
        let options = Options::new(qos, request.retain_as_published, request.no_local);
        let (slot, id) = (core.slot(), request.id.unwrap_or(0));
        let (reference, existed) = {
            let mut state = core.state.lock();
            if state.ended {
                return Err(SubscribeError::NotAuthorized);
            }
            let shape = self.shape(request.filter);
            let charge = cost(request.filter);
            let charged = self.charge_filter(&state, charge, restored);
            let claimed = state.membership().map_or(Ok(()), |membership| membership.subscribe(restored));
            let may_add = charged
                && claimed.is_ok()
                && state.subscriptions.len() < limits.max_subscriptions
                && state.subscriptions.may_have(shape, limits.max_filter_shapes);
            let added = match shared {
                Some((name, filter)) => {
                    let target = Arc::clone(session) as Arc<dyn crate::Target>;
                    let member = SharedMember { target, slot, id, options };
                    let strategy = self.strategy(name, &state.listener);
                    self.join(request.filter, strategy, filter, member, may_add)
                }
                None => inner.index.subscribe(request.filter, Subscriber { slot, id, options }, may_add),
            };
            if added.as_ref().is_none_or(|added| added.existed) {
                if charged {
                    inner.account.release(MemoryKind::Filters, charge as usize);
                }
                if let (Ok(()), Some(membership)) = (&claimed, state.membership()) {
                    membership.unsubscribe();
                }
            }
            if let (None, Err(exceeded)) = (&added, claimed) {
                exceeded.counted();
            }
            let Added { reference, existed } = added.ok_or(SubscribeError::Quota)?;
            if !existed {
                state.subscriptions.push(reference, shape, charge);
            }
            if let (Some(durable), Some(commit)) = (inner.storage().durable_for(core.queue()), request.commit)
            {
                // Before the subscription is removed, so that no message is acknowledged in a queue that nobody will
                // read.
                for group in inner.index.groups_of(&[reference]) {
                    group.keep_on_disk(durable);
                }
                let subscription = StoredSubscription {
                    filter: request.filter.to_owned(),
                    qos,
                    no_local: request.no_local,
                    retain_as_published: request.retain_as_published,
                    id: request.id,
                };
                let op = SessionOp::Subscribe(core.queue(), subscription, commit.part());
                durable.sessions().submit(op);
            }
            (reference, existed)
        };
        self.inner
            .events
            .emit_with(now, core, || EventKind::Subscribed { filter: request.filter.to_owned(), qos });
        // Shared subscriptions get no retained messages [MQTT-4.8.2-1].
        let replays = shared.is_none()
            && limits.retain_available
            && inner.retained.may_match(request.filter, now)
            && match request.retain_handling {
                0 => true,
                // Only if the subscription did not exist [MQTT-3.3.1-10].
                1 => !existed,
                _ => false,
            };
        let limit = limits.retained_per_subscribe;
        let replay =
            replays.then(|| RetainedCursor::new(request.filter, options, core.client_id(), id, limit));
        let group = inner.index.groups_of(&[reference]).pop();
        let group_queue = group.as_ref().is_some_and(|group| group.has_queued());
        Ok(Subscribed { qos, existed, replay, group_queue, members: group.map_or(0, |group| group.len()) })
    }

    /// Restores a subscription of an earlier process: no event, no retained messages, nothing written.
    pub(crate) fn resubscribe(
        &self,
        session: &Arc<dyn Session>,
        request: &SubscribeRequest<'_>,
    ) -> Result<(), SubscribeError> {
        self.try_subscribe(session, request, Timestamp(0), true).map(drop)
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
        Some(self.inner.hasher.hash_one(levels))
    }

    /// Charges another filter to the session and to the account; a restored one is not refused.
    fn charge_filter(&self, state: &SessionState, charge: u32, restored: bool) -> bool {
        let BrokerInner { account, limits, .. } = &*self.inner;
        if restored {
            account.force(MemoryKind::Filters, charge as usize);
            return true;
        }
        let held = state.subscriptions.bytes() as usize;
        let fits = held + charge as usize <= limits.subscription_bytes.0
            && account.charge(MemoryKind::Filters, held, charge as usize);
        count(|c| c.memory_filters.add(u64::from(!fits)));
        fits
    }

    /// Checks everything a filter may be refused for; returns group name and inner filter if it is shared.
    fn check<'a>(
        &self,
        client_id: &str,
        request: &SubscribeRequest<'a>,
    ) -> Result<Option<(&'a str, &'a str)>, SubscribeError> {
        let limits = &self.inner.limits;
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
        if !self.namespace_allows(client_id, request.filter) {
            return Err(SubscribeError::NotAuthorized);
        }
        Ok(shared)
    }

    /// The strategy of a group of this name, should a client of this listener create it: the group's own, else
    /// the listener's, else the default. It stays until the group's last member has left.
    fn strategy(&self, group: &str, listener: &str) -> SharedStrategy {
        let inner = &*self.inner;
        let by_group = inner.limits.shared_groups.get(group);
        let chosen = by_group.or_else(|| inner.listener_strategies.get(listener));
        chosen.copied().unwrap_or(inner.limits.shared_strategy)
    }

    fn join(
        &self,
        full: &str,
        strategy: SharedStrategy,
        filter: &str,
        member: SharedMember,
        may_add: bool,
    ) -> Option<Added> {
        let inner = &*self.inner;
        let most = Most::new(&inner.limits);
        let make = |id| SharedGroup::new(id, full, strategy, inner.hasher.clone(), most);
        inner.index.subscribe_shared(full, filter, member, may_add, make)
    }
}
