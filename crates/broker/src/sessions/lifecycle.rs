//! Life of sessions: open, takeover, close, expiry, administrative end.

use std::sync::{
    Arc,
    atomic::{
        AtomicUsize,
        Ordering::{Acquire, Relaxed, Release},
    },
};

use gateway_core::{ClientId, Commit, QueueId, Timestamp};
use parking_lot::MutexGuard;

use super::{
    core::{OpenRequest, References, SessionState, cost},
    registry::{ClientLock, SessionRegistry},
    shed::Shedding,
    slots::Slots,
    timers::SessionTimers,
};
use crate::{
    MemoryKind, QuotaExceeded, QuotaHolders, Session, SessionCore, Target, Will,
    counters::count,
    durable::{Durable, Storage},
    memory::Account,
    quota_holders::SessionQuotaUse,
};

/// All sessions: found by client id, slot and deadline, and counted.
pub(crate) struct Sessions {
    pub(crate) slots: Slots,
    pub(super) registry: SessionRegistry,
    pub(crate) timers: SessionTimers,
    pub(super) shedding: Shedding,
    pub(super) counts: SessionCounts,
}

/// Numbers of sessions.
#[derive(Default)]
pub(super) struct SessionCounts {
    pub(super) all: AtomicUsize,
    /// With a connection.
    pub(super) online: AtomicUsize,
    pub(super) online_peak: AtomicUsize,
    /// Changes under way, see [`Sessions::is_quiet`].
    changes: AtomicUsize,
}

/// End of a connection, for [`crate::Broker::closed`].
#[derive(Debug, Clone, Copy)]
pub struct Closed {
    /// Publish the will (false after DISCONNECT 0x00 [MQTT-3.14.4-3]).
    pub publish_will: bool,
    /// New session expiry from a v5 DISCONNECT.
    pub expiry: Option<u32>,
    /// Reason for the event and log.
    pub reason: &'static str,
}

/// A session that was marked as ended and removed from the registry, not yet cleared away.
pub(crate) struct EndedSession {
    pub(crate) session: Arc<dyn Session>,
    pub(crate) subscriptions: References,
    pub(crate) will: Option<Will>,
}

/// Result of [`Sessions::open`].
pub(crate) struct SessionOpening {
    pub(crate) session: Arc<dyn Session>,
    /// State was resumed.
    pub(crate) present: bool,
    pub(crate) commit: Option<Arc<Commit>>,
    pub(crate) epoch: u32,
}

/// Remains of the session or connection that an open replaces.
#[derive(Default)]
pub(crate) struct ReplacedSession {
    /// A connection to end.
    pub(crate) connection: Option<u32>,
    /// A will that is due although the session goes on.
    pub(crate) will: Option<Will>,
    pub(crate) ended: Option<EndedSession>,
}

/// Held while an end is under way, for [`Sessions::is_quiet`].
pub(crate) struct ChangeGuard<'a>(&'a Sessions);

impl Drop for ChangeGuard<'_> {
    fn drop(&mut self) {
        self.0.end_change();
    }
}

impl SessionCounts {
    fn add_online(&self) {
        let online = self.online.fetch_add(1, Relaxed) + 1;
        self.online_peak.fetch_max(online, Relaxed);
    }
}

impl Sessions {
    /// No sessions, which are found by this hash.
    pub(crate) fn new(hasher: ahash::RandomState, slots: Slots) -> Self {
        Self {
            slots,
            registry: SessionRegistry::new(hasher),
            timers: SessionTimers::default(),
            shedding: Shedding::default(),
            counts: SessionCounts::default(),
        }
    }

    /// Locks a client id.
    fn lock(&self, client_id: &str) -> ClientLock<'_> {
        self.registry.lock(client_id, &self.slots)
    }

    /// The session of a client id.
    pub(crate) fn find(&self, client_id: &str) -> Option<Arc<dyn Session>> {
        self.lock(client_id).find(client_id)
    }

    /// The quota holders of the session in whose name a message is, which is the one of this slot.
    #[cold]
    pub(crate) fn quota_holders_of(&self, slot: u32) -> QuotaHolders {
        let session = match slot {
            0 => None,
            slot => self.slots.session(slot),
        };
        session.map(|session| session.core().quota_holders()).unwrap_or_default()
    }

    /// Returns whether the session of this client id exists or the memory account has room for it.
    pub(crate) fn has_room_for(
        &self,
        client_id: &ClientId,
        username: Option<&str>,
        account: &Account,
    ) -> bool {
        let fits = account.takes(MemoryKind::Sessions, cost(client_id, username))
            || self.find(client_id.as_str()).is_some();
        count(|c| c.memory_sessions.add(u64::from(!fits)));
        fits
    }

    /// Returns whether a session of this client id exists on disk.
    pub(crate) fn is_kept(&self, client_id: &str) -> bool {
        self.find(client_id).is_some_and(|session| session.core().queue() != QueueId::NONE)
    }

    /// Resumes, replaces or creates the session of a client id, under the registry's lock.
    pub(crate) fn open(
        &self,
        request: OpenRequest,
        make: impl FnOnce(SessionCore) -> Arc<dyn Session>,
        storage: Storage<'_>,
    ) -> Result<(SessionOpening, ReplacedSession), QuotaExceeded> {
        let client_id = request.client_id.clone();
        let mut lock = self.lock(client_id.as_str());
        let mut former = ReplacedSession::default();
        let old = lock.find(client_id.as_str());
        let quota_use = if let Some(old) = &old {
            let mut state = old.core().state.lock();
            former.connection = state.online.then_some(state.epoch);
            let expired = state.expires_at().is_some_and(|at| at <= request.now);
            // A session with expiry 0 ends with its connection [MQTT-3.1.2-6] [MQTT-3.1.2-23].
            let resumes = !(request.clean_start || expired || state.online && state.expiry == 0);
            let kept = if resumes { state.subscriptions.len() } else { 0 };
            let quota_use = SessionQuotaUse::enter(&request.quota_holders, state.quota_use(), kept)?;
            if resumes {
                return Ok(self.resume(old, state, request, quota_use, former, storage));
            }
            former.ended = Some(self.mark_ended(old, &mut state, storage.account));
            quota_use
        } else {
            SessionQuotaUse::enter(&request.quota_holders, None, 0)?
        };
        let discards =
            former.ended.as_ref().is_some_and(|ended| ended.session.core().queue() != QueueId::NONE);
        let opening = self.create(request, quota_use, discards, make, storage);
        let session = &opening.session;
        self.slots.set(session.core().slot(), Arc::clone(session) as Arc<dyn Target>);
        lock.replace(old.as_ref(), session);
        self.counts.all.fetch_add(1, Relaxed);
        self.counts.add_online();
        Ok((opening, former))
    }

    /// Gives a session to a new connection.
    fn resume(
        &self,
        session: &Arc<dyn Session>,
        mut state: MutexGuard<'_, SessionState>,
        request: OpenRequest,
        mut quota_use: Option<Box<SessionQuotaUse>>,
        mut former: ReplacedSession,
        storage: Storage<'_>,
    ) -> (SessionOpening, ReplacedSession) {
        let core = session.core();
        let was_online = state.online;
        // CONNACK confirms changes that must be on disk first: a changed will, another expiry, and after a takeover the
        // session itself, which the earlier connection may still be waiting for.
        let changes = was_online
            || request.will.is_some()
            || state.will().is_some()
            || state.leaving().is_some()
            || state.expiry != request.expiry;
        let commit = (changes && storage.durable_for(core.queue()).is_some()).then(Commit::new);
        let due = state.will_at().is_some_and(|at| at <= request.now)
            || was_online && state.will().is_some_and(|will| will.delay == 0);
        let client_id = core.client_id();
        let new_cost = cost(client_id, request.info.username.as_deref());
        storage.account.force(MemoryKind::Sessions, new_cost);
        storage.account.release(MemoryKind::Sessions, state.cost(client_id));
        former.will = self.timers.update(session, &mut state, |state| {
            let will = due.then(|| state.give_will(core.queue())).flatten();
            state.reconnect(request, quota_use.take());
            will
        });
        let epoch = state.epoch;
        state.keep(core, storage, commit.as_ref());
        drop(state);
        if !was_online {
            self.counts.add_online();
        }
        (SessionOpening { session: Arc::clone(session), present: true, commit, epoch }, former)
    }

    /// Makes a session, which is not found yet. `discards` says that it replaces one that is on disk.
    fn create(
        &self,
        request: OpenRequest,
        quota_use: Option<Box<SessionQuotaUse>>,
        discards: bool,
        make: impl FnOnce(SessionCore) -> Arc<dyn Session>,
        storage: Storage<'_>,
    ) -> SessionOpening {
        let slot = self.slots.reserve();
        let durable = storage.durable.filter(|_| request.expiry > 0);
        let queue = durable.map_or(QueueId::NONE, Durable::next_queue);
        let commit = (durable.is_some() || discards).then(Commit::new);
        let session = make(SessionCore::new(request, quota_use, slot, queue));
        let core = session.core();
        if let Some(durable) = durable {
            durable.note_slot(queue, slot);
            core.state.lock().keep(core, storage, commit.as_ref());
        }
        storage.account.force(MemoryKind::Sessions, core.state.lock().cost(core.client_id()));
        SessionOpening { session, present: false, commit, epoch: 1 }
    }

    /// The connection of `epoch` has ended: the session goes on with a will that is due, or it ends. `None` if there is a later
    /// connection. The queue has been told which messages were sent.
    pub(crate) fn close(
        &self,
        session: &Arc<dyn Session>,
        epoch: u32,
        closed: Closed,
        now: Timestamp,
        storage: Storage<'_>,
    ) -> Option<(Option<Will>, Option<EndedSession>)> {
        let core = session.core();
        let mut lock = self.lock(core.client_id().as_str());
        let mut state = core.state.lock();
        if state.ended || state.epoch != epoch || !state.online {
            return None;
        }
        self.counts.online.fetch_sub(1, Release);
        let due = self.timers.update(session, &mut state, |state| {
            state.online = false;
            state.since = now;
            if let Some(quota_use) = state.quota_use() {
                quota_use.disconnected();
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
            return Some((None, Some(self.mark_ended(session, &mut state, storage.account))));
        }
        if due {
            return Some((
                self.timers.update(session, &mut state, |state| state.give_will(core.queue())),
                None,
            ));
        }
        state.keep(core, storage, None);
        Some((None, None))
    }

    /// The session of a client id and the epoch of its connection; with `discard`, the session ends.
    pub(crate) fn disconnect(
        &self,
        client_id: &str,
        discard: bool,
        account: &Account,
    ) -> Option<(Arc<dyn Session>, u32, Option<EndedSession>)> {
        let mut lock = self.lock(client_id);
        let session = lock.find(client_id)?;
        let mut state = session.core().state.lock();
        let epoch = state.epoch;
        let ended = discard.then(|| {
            lock.remove(&session);
            self.mark_ended(&session, &mut state, account)
        });
        drop(state);
        Some((session, epoch, ended))
    }

    /// The deadline `at` of a session has come: takes its will or, if it expires, ends it. Nothing, if it was resumed
    /// meanwhile, which removed its timer.
    pub(crate) fn take_due(
        &self,
        session: &Arc<dyn Session>,
        at: Timestamp,
        now: Timestamp,
        account: &Account,
    ) -> (Option<Will>, Option<EndedSession>) {
        let core = session.core();
        let mut lock = self.lock(core.client_id().as_str());
        let mut state = core.state.lock();
        if state.deadline() != Some(at) {
            return (None, None);
        }
        if state.expires_at().is_some_and(|at| at <= now) {
            lock.remove(session);
            count(|c| c.sessions_expired.add(1));
            return (None, Some(self.mark_ended(session, &mut state, account)));
        }
        (self.timers.update(session, &mut state, |state| state.give_will(core.queue())), None)
    }

    /// Ends the session nearest to its deadline if more than `most` have no connection, among them `session`.
    pub(crate) fn end_surplus(
        &self,
        session: &Arc<dyn Session>,
        most: usize,
        account: &Account,
    ) -> Option<EndedSession> {
        let SessionCounts { all, online, .. } = &self.counts;
        let offline = all.load(Relaxed).saturating_sub(online.load(Relaxed));
        if offline <= most {
            return None;
        }
        // Sessions that never expire have no timer; if there are no others, the one that has just closed ends.
        let victim = self.timers.first().unwrap_or_else(|| Arc::clone(session));
        let ended = {
            let core = victim.core();
            let mut lock = self.lock(core.client_id().as_str());
            let mut state = core.state.lock();
            if state.online || state.ended {
                return None;
            }
            lock.remove(&victim);
            self.mark_ended(&victim, &mut state, account)
        };
        count(|c| c.sessions_expired.add(1));
        Some(ended)
    }

    /// Marks a session as ended under its locks; the caller removes it from the registry.
    fn mark_ended(
        &self,
        session: &Arc<dyn Session>,
        state: &mut SessionState,
        account: &Account,
    ) -> EndedSession {
        let was_online = state.online;
        let will = self.timers.update(session, state, |state| {
            state.ended = true;
            state.online = false;
            state.leave_quota_holders();
            state.give_will(session.core().queue())
        });
        if let Some(leaving) = state.leaving() {
            // Until the session's removal comes to its turn.
            leaving.hold();
        }
        if was_online {
            self.counts.online.fetch_sub(1, Release);
        }
        self.counts.all.fetch_sub(1, Relaxed);
        let subscriptions = std::mem::take(&mut state.subscriptions);
        account.release(MemoryKind::Filters, subscriptions.bytes() as usize);
        account.release(MemoryKind::Sessions, state.cost(session.core().client_id()));
        EndedSession { session: Arc::clone(session), subscriptions, will }
    }

    /// Takes the wills of all sessions, with and without a connection.
    pub(crate) fn take_wills(&self, mut publish: impl FnMut(&Arc<dyn Session>, Will)) {
        self.slots.for_each_session(|session| {
            let will = {
                let mut state = session.core().state.lock();
                let queue = session.core().queue();
                self.timers.update(&session, &mut state, |state| state.give_will(queue))
            };
            if let Some(will) = will {
                publish(&session, will);
            }
        });
    }

    /// Adds a session of an earlier process, which `make` builds for the slot that it gets. It replaces no other.
    pub(crate) fn restore(
        &self,
        client_id: &ClientId,
        storage: Storage<'_>,
        make: impl FnOnce(u32) -> Arc<dyn Session>,
    ) -> Arc<dyn Session> {
        let mut lock = self.lock(client_id.as_str());
        let slot = self.slots.reserve();
        let session = make(slot);
        let core = session.core();
        storage.account.force(MemoryKind::Sessions, core.state.lock().cost(core.client_id()));
        self.slots.set(slot, Arc::clone(&session) as Arc<dyn Target>);
        lock.replace(None, &session);
        if let Some(durable) = storage.durable {
            durable.note_slot(core.queue(), slot);
        }
        drop(lock);
        self.counts.all.fetch_add(1, Relaxed);
        self.timers.schedule(&session, &core.state.lock());
        session
    }

    /// A restored session has a later one of the same client id: no longer finds it, and has it expire at `due`.
    pub(crate) fn supersede(&self, client_id: &ClientId, due: Timestamp) {
        let mut lock = self.lock(client_id.as_str());
        let Some(earlier) = lock.find(client_id.as_str()) else { return };
        lock.remove(&earlier);
        let mut state = earlier.core().state.lock();
        self.timers.update(&earlier, &mut state, |state| {
            state.expiry = 0;
            state.since = due;
        });
    }

    /// Asks the largest holders of memory to give some back, if memory is short.
    pub(crate) fn shed(&self, account: &Account) {
        self.shedding.shed(&self.slots, account);
    }

    /// Until the guard is dropped, a session or connection may be ending, with a will to publish.
    pub(crate) fn change(&self) -> ChangeGuard<'_> {
        self.begin_change();
        ChangeGuard(self)
    }

    /// Begins a change; [`Self::end_change`] ends it.
    pub(crate) fn begin_change(&self) {
        self.counts.changes.fetch_add(1, Relaxed);
    }

    /// Ends a change.
    pub(crate) fn end_change(&self) {
        self.counts.changes.fetch_sub(1, Release);
    }

    /// Returns whether no session has a connection and no change is under way.
    pub(crate) fn is_quiet(&self) -> bool {
        // In this order: an end is counted as under way before its session stops being online.
        self.counts.online.load(Acquire) == 0 && self.counts.changes.load(Acquire) == 0
    }
}
