//! Life of sessions: open, takeover, close, expiry, administrative end.

use std::sync::{
    Arc,
    atomic::{
        AtomicUsize,
        Ordering::{Acquire, Relaxed, Release},
    },
};

use gateway_core::{ClientId, Commit, QueueId, Timestamp, metrics::count};

use super::core::{References, SessionState, cost};
use crate::{
    Broker, CloseReason, Closed, EventKind, MemoryKind, OpenRequest, OpenedSession, QuotaExceeded, Session,
    SessionCleanup, SessionCore, Target, Turn, Will,
    durable::Durable,
    quota_holders::SessionQuotaUse,
    shared::{DeliveryContext, SharedGroup},
};

/// Timers run per tick at most.
const TIMERS_PER_TICK: usize = 10_000;

/// Most messages of one group's queue that a member gets in one call.
const DRAIN_PER_CALL: usize = 256;

/// A session that was marked as ended and removed from the registry, not yet cleared away.
pub(crate) struct EndedSession {
    pub(crate) session: Arc<dyn Session>,
    pub(crate) subscriptions: References,
    pub(crate) will: Option<Will>,
}

/// Remains of the session or connection that an open replaces.
#[derive(Default)]
struct ReplacedSession {
    /// A connection to end.
    connection: Option<u32>,
    /// A will that is due although the session goes on.
    will: Option<Will>,
    ended: Option<EndedSession>,
}

/// Held while an end is under way, for [`Broker::is_quiet`].
struct ChangeGuard<'a>(&'a AtomicUsize);

impl Drop for ChangeGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Release);
    }
}

/// The life of a session.
impl Broker {
    /// Opens the session of a client id: discards, resumes or creates it, and asks the old connection to end.
    /// `make` builds the session object for a new session; it runs under a registry lock and must not call the
    /// broker. Asynchronous for clustered registries.
    ///
    /// The old connection's will is published if its delay is 0 or the session ends with it, and dropped if
    /// the session is resumed within the delay [MQTT-3.1.3-9].
    ///
    /// # Errors
    /// A quota of the device's quota holders does not allow it. Nothing has changed then, and it is counted.
    pub async fn open(
        &self,
        request: OpenRequest,
        make: impl FnOnce(SessionCore) -> Arc<dyn Session>,
        turn: &mut Turn,
    ) -> Result<OpenedSession, QuotaExceeded> {
        let now = request.now;
        let _change = self.change();
        let (mut opened, former) = self.open_locked(request, make)?;
        opened.took_over = former.connection.is_some();
        let OpenedSession { session, present, commit, .. } = &opened;
        let mut cleanup = SessionCleanup::new(self, now);
        if let Some(epoch) = former.connection {
            let old = former.ended.as_ref().map_or(session, |ended| &ended.session);
            old.close(epoch, CloseReason::TakenOver);
            count(|c| c.takeovers.add(1));
            self.inner.events.emit_with(now, old.core(), || EventKind::TakenOver);
        }
        if let Some(will) = former.will {
            cleanup.publish(session, will);
        }
        if let Some(ended) = former.ended {
            cleanup.clear(ended, "clean_start", commit.as_ref());
        }
        let cleanup = cleanup.begin(turn);
        if let Some(commit) = commit {
            commit.done();
        }
        self.inner.events.emit_with(now, session.core(), || {
            let info = Box::new(session.core().state.lock().info());
            EventKind::Connected { info, session_present: *present }
        });
        opened.cleanup = cleanup;
        Ok(opened)
    }

    /// Returns whether the session of this client id exists or the memory account has room for it.
    pub fn has_room_for(&self, client_id: &ClientId, username: Option<&str>) -> bool {
        let fits = self.inner.account.takes(MemoryKind::Sessions, cost(client_id, username))
            || self.inner.session(client_id.as_str()).is_some();
        count(|c| c.memory_sessions.add(u64::from(!fits)));
        fits
    }

    /// Returns whether a session of this client id that outlives its connection can be opened now: it exists on disk, or the
    /// store accepts another one.
    pub fn can_keep(&self, client_id: &str) -> bool {
        let Some(durable) = &self.inner.durable else { return true };
        let found = self.inner.lock_client(client_id).find(client_id);
        found.is_some_and(|session| session.core().queue() != QueueId::NONE) || durable.sessions().accepts()
    }

    /// The connection of `epoch` has ended; ignored if there is a later one. Publishes or schedules the will, and ends
    /// the session if its expiry is 0. The session must no longer be online as a target. Returns what is left to do, if
    /// that is too much for one turn.
    pub fn closed(
        &self,
        session: &Arc<dyn Session>,
        epoch: u32,
        closed: Closed,
        now: Timestamp,
        turn: &mut Turn,
    ) -> Option<Box<SessionCleanup>> {
        let inner = &*self.inner;
        let core = session.core();
        let _change = self.change();
        // The record may say that there is no connection only once the queue says what was sent.
        let noted = session.note_sent();
        let (will, ended) = {
            let mut lock = inner.lock_client(core.client_id().as_str());
            let mut state = core.state.lock();
            if state.ended || state.epoch != epoch || !state.online {
                return None;
            }
            inner.online.fetch_sub(1, Release);
            let due = inner.timers.update(session, &mut state, |state| {
                state.online = false;
                state.since = now;
                if let Some(membership) = state.membership() {
                    membership.disconnected();
                }
                state.expiry = closed.expiry.unwrap_or(state.expiry);
                if !closed.publish_will {
                    // [MQTT-3.1.2-10]
                    state.forget_will();
                }
                state.expiry == 0 || state.will_at().is_some_and(|at| at <= now)
            });
            if state.expiry == 0 {
                lock.remove(session);
                (None, Some(self.mark_ended(session, &mut state)))
            } else if due {
                (inner.timers.update(session, &mut state, |state| state.give_will(core.queue())), None)
            } else {
                if noted.is_none() {
                    inner.keep(core, &mut state, None);
                }
                (None, None)
            }
        };
        if let Some(noted) = noted {
            self.keep_after(session, &noted);
        }
        self.inner.events.emit_with(now, core, || EventKind::Disconnected { reason: closed.reason });
        let mut cleanup = SessionCleanup::new(self, now);
        match ended {
            Some(ended) => cleanup.clear(ended, "expired", None),
            None => {
                let left = session.yield_shared();
                self.redeliver(left, core.queue(), now, turn);
                let groups = inner.index.groups_of(core.state.lock().subscriptions.as_slice());
                self.park(&groups);
                self.limit_offline(session, &mut cleanup);
            }
        }
        if let Some(will) = will {
            cleanup.publish(session, will);
        }
        cleanup.begin(turn)
    }

    /// Returns whether no session has a connection and everything that follows from ends so far is done, above all their wills.
    pub fn is_quiet(&self) -> bool {
        // In this order: an end is counted as under way before its session stops being online.
        self.inner.online.load(Acquire) == 0 && self.inner.changes.load(Acquire) == 0
    }

    /// Lets go of all sessions, in memory only. They hold the broker as it holds them, and with it stores and the lock on
    /// their directory. For the very end, when nothing more is routed and the stores are flushed.
    pub fn release_sessions(&self) {
        self.inner.timers.clear();
        for group in self.inner.index.groups() {
            group.release_members();
        }
        self.inner.slots.clear();
    }

    /// Until the guard is dropped, a session or connection may be ending, with a will to publish.
    fn change(&self) -> ChangeGuard<'_> {
        self.inner.changes.fetch_add(1, Relaxed);
        ChangeGuard(&self.inner.changes)
    }

    /// Called after a session got its new connection: gives it messages from its groups' queues, but no more than is
    /// sure to fit into an empty mailbox, whose overflow would drop messages or end the connection. Returns true if
    /// more is waiting: the caller must call again when there is room, since nobody else will.
    pub fn online(&self, session: &Arc<dyn Session>, now: Timestamp, turn: &mut Turn) -> bool {
        let mut left = false;
        let core = session.core();
        if let Some(parts) = &self.inner.reserved {
            parts.connected(core.client_id());
        }
        let limit = (self.inner.limits.mailbox_messages / 2).clamp(1, DRAIN_PER_CALL);
        let groups = self.inner.index.groups_of(core.state.lock().subscriptions.as_slice());
        for group in groups {
            let mut context = DeliveryContext::new(self.inner.storage(), &mut turn.dirty, now);
            left |= group.drain_to(core.slot(), limit, &mut context);
        }
        left
    }

    /// Ends a device's connection and, with `discard`, its session. Returns what is left to do, perhaps nothing; `None` if
    /// there is no such session.
    pub fn disconnect(
        &self,
        client_id: &str,
        code: u8,
        discard: bool,
        now: Timestamp,
        turn: &mut Turn,
    ) -> Option<Box<SessionCleanup>> {
        let _change = self.change();
        let (session, epoch, ended) = {
            let mut lock = self.inner.lock_client(client_id);
            let session = lock.find(client_id)?;
            let mut state = session.core().state.lock();
            let epoch = state.epoch;
            let ended = discard.then(|| {
                lock.remove(&session);
                self.mark_ended(&session, &mut state)
            });
            drop(state);
            (session, epoch, ended)
        };
        session.close(epoch, CloseReason::Administrative(code));
        let mut cleanup = SessionCleanup::new(self, now);
        if let Some(ended) = ended {
            cleanup.clear(ended, "administrative", None);
        }
        cleanup.go_on(turn);
        Some(Box::new(cleanup))
    }

    /// Runs what is due: session expiry, delayed wills, retained expiry. Call about once a second. Returns what is left of
    /// what sessions waited for, if that is too much for one turn.
    pub fn tick(&self, now: Timestamp, turn: &mut Turn) -> Option<Box<SessionCleanup>> {
        let mut cleanup = SessionCleanup::new(self, now);
        cleanup.due(now, TIMERS_PER_TICK);
        let left = cleanup.begin(turn);
        self.inner.retained.sweep(now);
        self.inner.evict_retained(now);
        self.inner.shedding.shed(&self.inner.slots, &self.inner.account);
        self.retry_stalled(now, turn);
        self.inner.events.tick(now);
        left
    }

    /// The deadline `at` of a session has come: takes its will or, if it expires, ends it. Nothing, if it was resumed
    /// meanwhile, which removed its timer.
    pub(crate) fn take_due(
        &self,
        session: &Arc<dyn Session>,
        at: Timestamp,
        now: Timestamp,
    ) -> (Option<Will>, Option<EndedSession>) {
        let inner = &*self.inner;
        let core = session.core();
        let mut lock = inner.lock_client(core.client_id().as_str());
        let mut state = core.state.lock();
        if state.deadline() != Some(at) {
            return (None, None);
        }
        if state.expires_at().is_some_and(|at| at <= now) {
            lock.remove(session);
            count(|c| c.sessions_expired.add(1));
            return (None, Some(self.mark_ended(session, &mut state)));
        }
        (inner.timers.update(session, &mut state, |state| state.give_will(core.queue())), None)
    }

    /// The part of an open that needs the registry's lock.
    fn open_locked(
        &self,
        request: OpenRequest,
        make: impl FnOnce(SessionCore) -> Arc<dyn Session>,
    ) -> Result<(OpenedSession, ReplacedSession), QuotaExceeded> {
        let inner = &*self.inner;
        let client_id = request.client_id.clone();
        let mut lock = inner.lock_client(client_id.as_str());
        let mut former = ReplacedSession::default();
        let mut membership;
        let old = lock.find(client_id.as_str());
        if let Some(old) = &old {
            let mut state = old.core().state.lock();
            former.connection = state.online.then_some(state.epoch);
            let expired = state.expires_at().is_some_and(|at| at <= request.now);
            // A session with expiry 0 ends with its connection [MQTT-3.1.2-6] [MQTT-3.1.2-23].
            let resumes = !(request.clean_start || expired || state.online && state.expiry == 0);
            let kept = if resumes { state.subscriptions.len() } else { 0 };
            membership = SessionQuotaUse::enter(&request.quota_holders, state.membership(), kept)?;
            if resumes {
                let was_online = state.online;
                // CONNACK confirms changes that must be on disk first: a changed will, another expiry, and after a takeover the
                // session itself, which the earlier connection may still be waiting for.
                let changes = was_online
                    || request.will.is_some()
                    || state.will().is_some()
                    || state.leaving().is_some()
                    || state.expiry != request.expiry;
                let commit =
                    (changes && inner.storage().durable_for(old.core().queue()).is_some()).then(Commit::new);
                let due = state.will_at().is_some_and(|at| at <= request.now)
                    || was_online && state.will().is_some_and(|will| will.delay == 0);
                inner.account.force(MemoryKind::Sessions, cost(&client_id, request.info.username.as_deref()));
                inner.account.release(MemoryKind::Sessions, state.cost(&client_id));
                former.will = inner.timers.update(old, &mut state, |state| {
                    let will = due.then(|| state.give_will(old.core().queue())).flatten();
                    state.reconnect(request, membership.take());
                    will
                });
                let epoch = state.epoch;
                inner.keep(old.core(), &mut state, commit.as_ref());
                drop(state);
                if !was_online {
                    self.count_online();
                }
                return Ok((
                    OpenedSession {
                        session: Arc::clone(old),
                        present: true,
                        commit,
                        cleanup: None,
                        took_over: false,
                        epoch,
                    },
                    former,
                ));
            }
            former.ended = Some(self.mark_ended(old, &mut state));
        } else {
            membership = SessionQuotaUse::enter(&request.quota_holders, None, 0)?;
        }
        let slot = inner.slots.reserve();
        let durable = inner.durable.as_ref().filter(|_| request.expiry > 0);
        let queue = durable.map_or(QueueId::NONE, Durable::next_queue);
        let discards =
            former.ended.as_ref().is_some_and(|ended| ended.session.core().queue() != QueueId::NONE);
        let commit = (durable.is_some() || discards).then(Commit::new);
        let session = make(SessionCore::new(request, membership, slot, queue));
        if let Some(durable) = durable {
            durable.note_slot(queue, slot);
            inner.keep(session.core(), &mut session.core().state.lock(), commit.as_ref());
        }
        inner.account.force(MemoryKind::Sessions, session.core().state.lock().cost(&client_id));
        inner.slots.set(slot, Arc::clone(&session) as Arc<dyn Target>);
        lock.replace(old.as_ref(), &session);
        inner.sessions.fetch_add(1, Relaxed);
        self.count_online();
        Ok((
            OpenedSession { session, present: false, commit, cleanup: None, took_over: false, epoch: 1 },
            former,
        ))
    }

    /// Marks a session as ended under its locks; the caller removes it from the registry.
    fn mark_ended(&self, session: &Arc<dyn Session>, state: &mut SessionState) -> EndedSession {
        let inner = &*self.inner;
        let was_online = state.online;
        let will = inner.timers.update(session, state, |state| {
            state.ended = true;
            state.online = false;
            state.leave_parties();
            state.give_will(session.core().queue())
        });
        if let Some(leaving) = state.leaving() {
            // Until [`SessionCleanup`] gets to the removal.
            leaving.hold();
        }
        if was_online {
            inner.online.fetch_sub(1, Release);
        }
        inner.sessions.fetch_sub(1, Relaxed);
        let subscriptions = std::mem::take(&mut state.subscriptions);
        inner.account.release(MemoryKind::Filters, subscriptions.bytes() as usize);
        inner.account.release(MemoryKind::Sessions, state.cost(session.core().client_id()));
        EndedSession { session: Arc::clone(session), subscriptions, will }
    }

    /// Ends the session nearest to its deadline if there are too many without a connection.
    fn limit_offline(&self, session: &Arc<dyn Session>, cleanup: &mut SessionCleanup) {
        let inner = &*self.inner;
        let offline = inner.sessions.load(Relaxed).saturating_sub(inner.online.load(Relaxed));
        if offline <= inner.limits.max_offline_sessions {
            return;
        }
        // Sessions that never expire have no timer; if there are no others, the one that has just closed ends.
        let victim = inner.timers.first().unwrap_or_else(|| Arc::clone(session));
        let ended = {
            let core = victim.core();
            let mut lock = inner.lock_client(core.client_id().as_str());
            let mut state = core.state.lock();
            if state.online || state.ended {
                return;
            }
            lock.remove(&victim);
            self.mark_ended(&victim, &mut state)
        };
        count(|c| c.sessions_expired.add(1));
        cleanup.clear(ended, "expired", None);
    }

    /// A member of these groups has gone.
    pub(crate) fn park(&self, groups: &[Arc<SharedGroup>]) {
        for group in groups {
            group.park(&self.inner.account);
        }
    }

    fn count_online(&self) {
        let online = self.inner.online.fetch_add(1, Relaxed) + 1;
        self.inner.online_peak.fetch_max(online, Relaxed);
    }
}
