//! Publication of wills.
//!
//! The will of a session that is kept on disk stays in the session's record until it is safe with its receivers, even
//! if a new connection or the session's end changes the record meanwhile. So no crash loses it; a crash just before
//! that may publish it twice.

use std::{any::Any, sync::Arc};

use gateway_core::{Commit, OriginKind, SharedMessage, Timestamp, metrics::count};

use super::core::SessionState;
use crate::{Broker, BrokerInner, Routing, Session, SessionCleanup, SessionCore, Spread, Turn, Will};

/// Wills.
impl Broker {
    /// Publishes every will that sessions still hold, with and without a connection. For graceful shutdown,
    /// after the last connection was asked to end; wills leave their sessions, so none is published twice. Returns what is
    /// left, if that is too much for one turn.
    pub fn shutdown_wills(&self, now: Timestamp, turn: &mut Turn) -> Option<Box<SessionCleanup>> {
        let mut wills = SessionCleanup::new(self, now);
        self.inner.slots.for_each_session(|session| {
            let will = {
                let mut state = session.core().state.lock();
                let queue = session.core().queue();
                self.inner.timers.update(&session, &mut state, |state| state.give_will(queue))
            };
            if let Some(will) = will {
                wills.publish(&session, will);
            }
        });
        wills.begin(turn)
    }

    /// Publishes a will that [`SessionState::give_will`] gave [MQTT-3.1.2-8]. `slot` is 0 once the session is over, since
    /// its slot may be another's by then. A will that may not be published is forgotten. If not all receivers have it yet,
    /// returns the rest: the caller hands that out, and then calls [`Self::conclude_will`].
    pub(crate) fn publish_will_some(
        &self,
        session: &Arc<dyn Session>,
        will: &Will,
        slot: u32,
        now: Timestamp,
        turn: &mut Turn,
    ) -> Option<Box<Spread>> {
        // As long as it waits, what its client may do can change.
        let judge = self.inner.judge_will.as_ref();
        if judge.is_some_and(|judge| !judge(session.core().client_id(), will)) {
            count(|c| c.wills_withheld.add(1));
            self.conclude_will(session, None);
            return None;
        }
        let message = Arc::new(published(will, session.core(), slot, now));
        count(|c| c.wills_published.add(1));
        let message = message.borrow();
        let quota_holders =
            self.inner.quota_holders.counts_retained().then(|| session.core().state.lock().quota_holders());
        if let Routing::More(spread) = self.publish_of(&message, quota_holders, turn) {
            return Some(spread);
        }
        self.conclude_will(session, message.issued().cloned());
        None
    }

    /// All receivers have the will. `commit` is what must be on disk before it leaves its session's record, if
    /// anything.
    pub(crate) fn conclude_will(&self, session: &Arc<dyn Session>, commit: Option<Arc<Commit>>) {
        let Some(commit) = commit else { return self.will_is_safe(session.core()) };
        commit.done();
        let (broker, session) = (self.clone(), Arc::clone(session));
        commit.then(move |_| broker.will_is_safe(session.core()));
    }

    /// Once the commit is done, writes the session's record in its state of that moment.
    pub(crate) fn keep_after(&self, session: &Arc<dyn Session>, commit: &Arc<Commit>) {
        let (broker, session) = (self.clone(), Arc::clone(session));
        commit.then(move |_| {
            let core = session.core();
            let mut state = core.state.lock();
            if !state.ended {
                broker.inner.keep(core, &mut state, None);
            }
        });
    }

    /// A will is safe, or what had to precede the session's removal is done. After the last of these the session is
    /// written as it is now, or removed.
    fn will_is_safe(&self, core: &SessionCore) {
        let mut state = core.state.lock();
        let Some(waiting) = state.will_is_safe() else { return };
        if !state.ended {
            self.inner.keep(core, &mut state, waiting.as_ref());
        } else if let Some(durable) = self.inner.storage().durable_for(core.queue()) {
            durable.remove_session(core.queue(), core.slot(), waiting.as_ref());
        }
        drop(state);
        if let Some(waiting) = waiting {
            waiting.done();
        }
    }

    /// Removes a session that has ended from disk, after its wills are safe.
    pub(crate) fn remove_after_wills(&self, core: &SessionCore, commit: Option<&Arc<Commit>>) {
        let Some(durable) = self.inner.storage().durable_for(core.queue()) else { return };
        let mut state = core.state.lock();
        let Some(leaving) = state.leaving() else {
            return durable.remove_session(core.queue(), core.slot(), commit);
        };
        if let Some(commit) = commit {
            leaving.wait(commit);
        }
        drop(state);
        self.will_is_safe(core);
    }
}

/// The message of a will, with its own QoS and retain flag [MQTT-3.1.2-14] [MQTT-3.1.2-15].
fn published(will: &Will, core: &SessionCore, slot: u32, now: Timestamp) -> SharedMessage {
    let stored = &will.message;
    SharedMessage {
        topic: Arc::clone(&stored.topic),
        payload: stored.payload.clone(),
        qos: stored.qos,
        retain: stored.retain,
        properties: stored.properties.clone(),
        expires: will.expiry.map(|seconds| now.plus_secs(seconds)),
        received: now,
        kind: OriginKind::Device,
        client_id: Some(core.client_id().clone()),
        slot,
        receipt: None,
        direct: false,
    }
}

impl Broker {
    /// A connection has authenticated again: replaces its identity, and, where wills are judged, the author of its will by
    /// what `author` makes of the former one. False if another has taken the session over.
    pub fn reauthenticated(
        &self,
        core: &SessionCore,
        epoch: u32,
        identity: Option<Arc<dyn Any + Send + Sync>>,
        author: impl FnOnce(&str) -> String,
    ) -> bool {
        let mut state = core.state.lock();
        if state.epoch != epoch {
            return false;
        }
        state.reauthenticate(identity, author);
        if state.will().is_some() {
            self.inner.keep(core, &mut state, None);
        }
        true
    }
}

impl BrokerInner {
    /// Writes a session's state, if it is kept on disk. The caller holds its lock, so that changes are written in
    /// order. While a will is being published the record keeps that will, and a commit that waits for the new state
    /// waits until the will is safe.
    pub(crate) fn keep(&self, core: &SessionCore, state: &mut SessionState, commit: Option<&Arc<Commit>>) {
        let Some(durable) = self.storage().durable_for(core.queue()) else { return };
        match (commit, state.leaving()) {
            (Some(commit), Some(leaving)) => leaving.wait(commit),
            _ => durable.put_session(state.stored(core), commit),
        }
    }
}
