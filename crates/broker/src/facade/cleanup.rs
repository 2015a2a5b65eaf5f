//! Consequences of the end of a connection or a session: subscriptions to remove, wills to publish. The work is done in steps, so
//! that neither a session with very many filters, nor a will with very many receivers, nor very many sessions that are due at
//! once block their thread.

use std::{collections::VecDeque, sync::Arc};

use gateway_core::{Commit, Effort, Timestamp};

use super::{Broker, Routing, Spread};
use crate::{EventKind, Session, Turn, Will, counters::count, sessions::EndedSession};

/// Work left to do after such an end. All of it is done in any case: on drop, the rest is done at once.
pub struct SessionCleanup {
    broker: Broker,
    /// In order.
    steps: VecDeque<CleanupStep>,
    now: Timestamp,
}

enum CleanupStep {
    /// Sessions that are due by this time: so many at most.
    Due(Timestamp, usize),
    Clear(Clearing),
    /// A will and the slot of its session, 0 once the session is over.
    Publish(Arc<dyn Session>, Will, u32),
    /// The will of a session that some of its receivers do not have yet.
    HandOut(Arc<dyn Session>, Box<Spread>),
}

/// A session that has ended.
struct Clearing {
    ended: EndedSession,
    /// Number of the session's subscriptions removed so far.
    removed: usize,
    /// Gets a part that is done when nothing of the session is left on disk.
    commit: Option<Arc<Commit>>,
}

impl SessionCleanup {
    pub(crate) fn new(broker: &Broker, now: Timestamp) -> Self {
        broker.inner.sessions.begin_change();
        Self { broker: broker.clone(), steps: VecDeque::new(), now }
    }

    /// Adds the publication of a will that was taken out of its session.
    pub(crate) fn publish(&mut self, session: &Arc<dyn Session>, will: Will) {
        let slot = session.core().slot();
        self.steps.push_back(CleanupStep::Publish(Arc::clone(session), will, slot));
    }

    /// Adds the rest of a session's end, which needs no locks of the session: subscriptions, shared messages, slot,
    /// will. `commit` gets a part that is done when nothing of it is left on disk.
    pub(crate) fn clear(&mut self, ended: EndedSession, reason: &'static str, commit: Option<&Arc<Commit>>) {
        let clearing = self.clearing(ended, reason, commit);
        self.steps.push_back(clearing);
    }

    fn clearing(
        &self,
        ended: EndedSession,
        reason: &'static str,
        commit: Option<&Arc<Commit>>,
    ) -> CleanupStep {
        self.broker
            .inner
            .events
            .emit_with(self.now, ended.session.core(), || EventKind::SessionEnded { reason });
        CleanupStep::Clear(Clearing { ended, removed: 0, commit: commit.map(Commit::part) })
    }

    /// Adds what sessions have waited for until `by`, of the first `most` of them.
    pub(crate) fn due(&mut self, by: Timestamp, most: usize) {
        self.steps.push_back(CleanupStep::Due(by, most));
    }

    /// Does as much as the turn's effort affords; returns what is left.
    pub(crate) fn begin(mut self, turn: &mut Turn) -> Option<Box<Self>> {
        (!self.go_on(turn)).then(|| Box::new(self))
    }

    /// Does everything.
    pub(crate) fn finish(mut self, turn: &mut Turn) {
        self.finish_in(turn);
    }

    /// Does everything, and lets other tasks run between two turns. Cancelled, it does the rest at once.
    pub async fn settle(mut self: Box<Self>) {
        let mut turn = Turn::default();
        while !self.go_on(&mut turn) {
            turn.flush();
            turn.effort.renew();
            tokio::task::yield_now().await;
        }
        turn.flush();
    }

    /// Does as much more as the turn's effort affords; returns whether everything is done. Before the next call the
    /// caller flushes the turn, renews its effort and lets the other tasks of its thread run.
    pub fn go_on(&mut self, turn: &mut Turn) -> bool {
        while let Some(step) = self.steps.pop_front() {
            if let Some(rest) = self.run(step, turn) {
                self.steps.push_front(rest);
            }
            if turn.effort.is_spent() {
                break;
            }
        }
        self.steps.is_empty()
    }

    fn finish_in(&mut self, turn: &mut Turn) {
        while !self.go_on(turn) {
            turn.flush();
            turn.effort.renew();
        }
    }

    /// Returns the rest of the step, which is next; what it pushes to the front comes before everything else.
    fn run(&mut self, step: CleanupStep, turn: &mut Turn) -> Option<CleanupStep> {
        match step {
            CleanupStep::Due(by, most) => {
                let sessions = &self.broker.inner.sessions;
                let (at, session) = sessions.timers.first_due(by)?;
                turn.effort.spend(Effort::FILTER);
                if most > 1 {
                    self.steps.push_front(CleanupStep::Due(by, most - 1));
                }
                let (will, ended) = sessions.take_due(&session, at, self.now, &self.broker.inner.account);
                if let Some(ended) = ended {
                    let clearing = self.clearing(ended, "expired", None);
                    self.steps.push_front(clearing);
                }
                will.map(|will| CleanupStep::Publish(Arc::clone(&session), will, session.core().slot()))
            }
            CleanupStep::Clear(clearing) => self.clear_some(clearing, turn),
            CleanupStep::Publish(session, will, slot) => {
                let spread = self.publish_will(&session, &will, slot, turn)?;
                Some(CleanupStep::HandOut(session, spread))
            }
            CleanupStep::HandOut(session, mut spread) => {
                if spread.go_on(turn).is_none() {
                    return Some(CleanupStep::HandOut(session, spread));
                }
                conclude_will(&self.broker, &session, spread.commit().cloned());
                None
            }
        }
    }

    /// Publishes a will that its session gave [MQTT-3.1.2-8]. `slot` is 0 once the session is over, since its slot may be
    /// another's by then. A will that may not be published is forgotten. Returns the rest, if not all receivers have it yet.
    fn publish_will(
        &self,
        session: &Arc<dyn Session>,
        will: &Will,
        slot: u32,
        turn: &mut Turn,
    ) -> Option<Box<Spread>> {
        let inner = &*self.broker.inner;
        // As long as it waits, what its client may do can change.
        let authorize = inner.authorize_will.as_ref();
        if authorize.is_some_and(|authorize| !authorize(session.core().client_id(), will)) {
            count(|c| c.wills_withheld.add(1));
            conclude_will(&self.broker, session, None);
            return None;
        }
        let message = Arc::new(will.message_of(session.core(), slot, self.now));
        count(|c| c.wills_published.add(1));
        let message = message.borrow();
        let quota_holders = inner.quota_holders.counts_retained().then(|| session.core().quota_holders());
        if let Routing::More(spread) = self.broker.publish_of(&message, quota_holders, turn) {
            return Some(spread);
        }
        conclude_will(&self.broker, session, message.issued().cloned());
        None
    }

    fn clear_some(&self, mut clearing: Clearing, turn: &mut Turn) -> Option<CleanupStep> {
        let broker = &self.broker;
        let inner = &*broker.inner;
        let session = Arc::clone(&clearing.ended.session);
        let core = session.core();
        let references = clearing.ended.subscriptions.as_slice();
        let left = references.get(clearing.removed..).unwrap_or_default();
        let part = left.len().min(turn.effort.affords(Effort::FILTER));
        turn.effort.spend_each(Effort::FILTER, part);
        for group in inner.index.remove_some(&left[..part], core.slot()) {
            group.close(inner.storage());
        }
        clearing.removed += part;
        if clearing.removed < references.len() {
            return Some(CleanupStep::Clear(clearing));
        }
        inner.index.note_ended();
        inner.redelivery(self.now).redeliver(session.end(), core.queue(), &mut turn.dirty);
        for group in inner.index.groups_of(references) {
            group.park(&inner.account);
        }
        // After what goes to other members was submitted.
        core.remove_after_wills(inner.storage(), clearing.commit.as_ref());
        if let Some(commit) = clearing.commit {
            commit.done();
        }
        inner.sessions.slots.free(core.slot());
        // The end of the session ends the will's delay [MQTT-3.1.3-9].
        clearing.ended.will.map(|will| CleanupStep::Publish(session, will, 0))
    }
}

/// All receivers have the will. `commit` is what must be on disk before it leaves its session's record, if anything.
fn conclude_will(broker: &Broker, session: &Arc<dyn Session>, commit: Option<Arc<Commit>>) {
    let Some(commit) = commit else { return session.core().will_is_safe(broker.inner.storage()) };
    commit.done();
    let (broker, session) = (broker.clone(), Arc::clone(session));
    commit.then(move |_| session.core().will_is_safe(broker.inner.storage()));
}

impl Drop for SessionCleanup {
    fn drop(&mut self) {
        if !self.steps.is_empty() {
            self.finish_in(&mut Turn::default());
        }
        self.broker.inner.sessions.end_change();
    }
}
