//! The start from what earlier processes left on disk.

use std::sync::Arc;

use gateway_core::{OriginKind, QueueId, QueueOp, SharedMessage, Timestamp};
use store::{QueueSummary, Restore, SessionOp, StoreError, StoredSession, StoredSubscription};

use super::{Broker, BrokerInner, SessionCleanup};
use crate::{
    QuotaHolders, Session, SessionCore, SubscribeRequest, Turn, counters::count, durable::Durable,
    quota_holders::SessionQuotaUse, routing::Index,
};

/// Due time of a restored session that a later session of its client has replaced: before all sessions that wait for a time.
const SUPERSEDED: Timestamp = Timestamp(0);

/// Counts of the sessions and messages restored at the start.
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

/// Restores what earlier processes left, see [`Broker::restore`].
pub(super) fn restore(
    broker: &Broker,
    make: impl Fn(SessionCore) -> Arc<dyn Session>,
    sessions_lost: bool,
    now: Timestamp,
) -> Result<Restored, StoreError> {
    let Some(durable) = &broker.inner.durable else { return Ok(Restored::default()) };
    let queues = durable.state().summaries()?;
    let mut restoring = Restoring {
        broker,
        durable,
        make,
        now,
        queues: queues.iter(),
        orphans: Vec::new(),
        groups: Vec::new(),
        last: queues.last().map_or(0, |summary| summary.queue.0),
        restored: Restored::default(),
    };
    durable.state().restore_sessions(&mut restoring)?;
    restoring.orphans.extend(restoring.queues.clone().map(|summary| summary.queue));
    let Restoring { orphans, groups, last, mut restored, .. } = restoring;
    durable.set_last_queue(last);
    restore_groups(&broker.inner.index, durable, groups, &queues, &mut restored);
    // If the sessions are lost, their queues are kept in case somebody puts the file back.
    let orphans = if sessions_lost { Vec::new() } else { orphans };
    for queue in orphans.into_iter().filter(|queue| durable.group_of(*queue).is_none()) {
        durable.state().submit(QueueOp::Purge { queue });
    }
    restore_retained(&broker.inner, durable, now, &mut restored)?;
    Ok(restored)
}

/// Ends the sessions that later ones had replaced, see [`Broker::end_superseded`].
pub(super) fn end_superseded(broker: &Broker, now: Timestamp, turn: &mut Turn) {
    let mut cleanup = SessionCleanup::new(broker, now);
    cleanup.due(SUPERSEDED, usize::MAX);
    cleanup.finish(turn);
    turn.flush();
}

/// Gives shared groups the queues that they left.
fn restore_groups(
    index: &Index,
    durable: &Durable,
    groups: Vec<(QueueId, String)>,
    queues: &[QueueSummary],
    restored: &mut Restored,
) {
    for (queue, full_name) in groups {
        if let Some(group) = index.group_named(&full_name) {
            let summary = queues.binary_search_by_key(&queue, |summary| summary.queue).ok();
            let summary = summary.map(|at| &queues[at]);
            restored.messages += summary.map_or(0, |summary| summary.messages);
            durable.note_group(queue, group.id());
            group.restore(queue, summary);
        } else {
            durable.state().submit_session(SessionOp::RemoveGroup(queue));
            durable.state().submit(QueueOp::Purge { queue });
        }
    }
    // Every restored member is persistent, so its group needs a queue; only an earlier version left groups without
    // one.
    for group in index.groups() {
        group.keep_on_disk(durable);
    }
}

fn restore_retained(
    inner: &BrokerInner,
    durable: &Durable,
    now: Timestamp,
    restored: &mut Restored,
) -> Result<(), StoreError> {
    let mut gone = Vec::new();
    durable.state().restore_retained(&mut |message| {
        if inner.non_broker && message.kind == OriginKind::Device {
            restored.refused_retained += 1;
            gone.push(Arc::clone(&message.topic));
        } else if message.is_expired(now) {
            gone.push(Arc::clone(&message.topic));
        } else if !inner.retained.restore(&message, &holders_of(inner, &message)) {
            // Beyond today's limits: not served, but not deleted either, in case the limits are raised again.
            restored.left_retained += 1;
        } else {
            restored.retained += 1;
        }
    })?;
    for topic in gone {
        durable.state().clear_retained(topic, None);
    }
    Ok(())
}

/// Returns the quota holders for which a restored message counts: those of its publisher's session.
fn holders_of(inner: &BrokerInner, message: &SharedMessage) -> QuotaHolders {
    let publisher = message.client_id.as_ref().filter(|_| inner.quota_holders.counts_retained());
    let session = publisher.and_then(|client_id| inner.sessions.find(client_id.as_str()));
    session.map(|session| session.core().quota_holders()).unwrap_or_default()
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

    /// Restores a subscription, or counts that it is no longer allowed.
    fn resubscribe(&mut self, session: &Arc<dyn Session>, subscription: &StoredSubscription) {
        let StoredSubscription { filter, qos, no_local, retain_as_published, id } = subscription;
        let request = SubscribeRequest {
            filter,
            qos: *qos,
            no_local: *no_local,
            retain_as_published: *retain_as_published,
            retain_handling: 2,
            id: *id,
            commit: None,
        };
        match self.broker.resubscribe(session, &request) {
            Ok(()) => self.restored.subscriptions += 1,
            Err(_) => self.restored.refused_subscriptions += 1,
        }
    }
}

/// Returns whether a session ended with its last connection, or has expired since.
fn is_over(stored: &StoredSession, now: Timestamp) -> bool {
    let has_expired = |since: Timestamp| since.plus_secs(stored.expiry) <= now;
    stored.expiry == 0 || stored.expiry != u32::MAX && stored.since.is_some_and(has_expired)
}

impl<M: Fn(SessionCore) -> Arc<dyn Session>> Restore for Restoring<'_, M> {
    fn session(&mut self, stored: StoredSession, subscriptions: Vec<StoredSubscription>) {
        let queue = stored.queue;
        self.last = self.last.max(queue.0);
        let now = self.now;
        let inner = &*self.broker.inner;
        let mut summary = self.summary(queue).cloned();
        let was_offline = stored.since.is_some();
        // The client id has a later session: an earlier one is still on disk only because its will was not safe yet. It is
        // due before everything else, see [`Broker::end_superseded`].
        inner.sessions.supersede(&stored.client_id, SUPERSEDED);
        if is_over(&stored, now) && stored.will.is_none() {
            self.restored.expired += 1;
            count(|c| c.sessions_expired.add(1));
            self.durable.state().submit_session(SessionOp::Remove(queue, None));
            self.durable.state().submit(QueueOp::Purge { queue });
            return;
        }
        let client_id = stored.client_id.clone();
        let session = inner.sessions.restore(&client_id, inner.storage(), |slot| {
            let quota_use = {
                let user = stored.username.as_deref().filter(|_| stored.proved);
                let tenant = stored.tenant.as_deref().unwrap_or(&stored.listener);
                SessionQuotaUse::restored(&inner.quota_holders.of(user, client_id.as_str(), tenant))
            };
            let session = (self.make)(SessionCore::restored(stored, quota_use, slot, now, &inner.account));
            if let Some(summary) = &mut summary {
                if was_offline {
                    // The session had no connection: the entries of sent messages were marked when its last connection ended.
                    summary.begun = 0;
                }
                session.restore(summary);
                self.restored.messages += summary.messages;
            }
            session
        });
        self.restored.sessions += 1;
        for subscription in &subscriptions {
            self.resubscribe(&session, subscription);
        }
    }

    fn group(&mut self, queue: QueueId, full_name: &str) {
        self.last = self.last.max(queue.0);
        self.groups.push((queue, full_name.to_owned()));
    }
}
