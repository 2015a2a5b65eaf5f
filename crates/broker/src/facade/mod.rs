//! The broker as its users see it: a message, a subscription or a connection goes from one part to the next here.

mod answers;
mod api;
mod cleanup;
mod parts;
mod replay;
mod reserved;
mod restore;
mod spread;
mod streams;

use std::{
    any::Any,
    sync::{Arc, atomic::Ordering::Relaxed},
};

use gateway_core::{
    ClientId, Commit, DropReason, Durability, Effort, GroupId, JournalPage, LeaseGate, Message, OriginKind,
    QoS, QueueId, SharedMessage, Timestamp, limits::Limits,
};
use store::{Expiry, PartitionedLog, StoreError};
use tokio::sync::broadcast;

use crate::{
    Account, CloseReason, Closed, DeviceFilter, DeviceInfo, DevicePage, DirectOutcome, Event, EventKind,
    EventPlace, EventReader, GroupFilter, MemoryKind, Offline, OpenRequest, Published, QueueInfo,
    QuotaExceeded, QuotaHolder, QuotaHolders, RetainError, RetainedPage, Session, SessionCore, Shortage,
    Stores, SubscribeError, SubscribeRequest, Subscribed, Target, Turn,
    counters::count,
    durable::Durable,
    log::LogTarget,
    routing::{SpreadProgress, deliver_direct, refusal},
    sessions::{SessionOpening, SessionTotals},
    shared::DeliveryContext,
};

use answers::QueueExpiry;

pub use api::{BrokerConfig, Gauges, OpenedSession, WillAuthorizer};
pub use cleanup::SessionCleanup;
pub(crate) use parts::BrokerInner;
pub use reserved::{Reserved, ReservedOutcome};
pub use restore::Restored;
pub use spread::{Routing, Spread};
pub use streams::StreamHandle;

/// Up to this many receivers are served in one go, since to continue later costs a copy of the message.
const MANY: usize = 1024;

/// Timers run per tick at most.
const TIMERS_PER_TICK: usize = 10_000;

/// Most messages of one group's queue that a member gets in one call.
const DRAIN_PER_CALL: usize = 256;

/// The routing core; cheap to clone, callable from any thread.
#[derive(Clone)]
pub struct Broker {
    pub(crate) inner: Arc<BrokerInner>,
}

/// Start, bounds and accounts.
impl Broker {
    /// An empty broker.
    pub fn new(config: BrokerConfig) -> Self {
        Self { inner: BrokerInner::new(config) }
    }

    /// Restores what earlier processes left, before anybody connects. `make` builds session objects; `sessions_lost`
    /// says that the sessions themselves were set aside as damaged. Blocks on the disk.
    pub fn restore(
        &self,
        make: impl Fn(SessionCore) -> Arc<dyn Session>,
        sessions_lost: bool,
        now: Timestamp,
    ) -> Result<Restored, StoreError> {
        restore::restore(self, make, sessions_lost, now)
    }

    /// Ends the restored sessions that later ones had replaced before the process ended, and publishes their wills. Call
    /// once whatever may receive a will is there, and before anybody connects: a client that comes back could otherwise
    /// leave its next will before this one is published.
    pub fn end_superseded(&self, now: Timestamp, turn: &mut Turn) {
        restore::end_superseded(self, now, turn);
    }

    /// The memory account of the process.
    pub fn account(&self) -> &Arc<Account> {
        &self.inner.account
    }

    /// Decides whether anything may be acknowledged, and anybody admitted.
    pub fn lease(&self) -> &LeaseGate {
        &self.inner.lease
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

/// A message on its way to its receivers.
impl Broker {
    /// Routes one message by MQTT rules: retained store, latest value and history (devices only), subscribers. What a device
    /// says to a topic that a part of the gateway owns goes to that part alone ([`crate::Reserved`]).
    ///
    /// The caller has validated topic and properties. Refused as a whole only when a QoS 1 or 2 message finds the
    /// memory budget used up; QoS 0 is left to each target. The result counts each delivery as its target took it; what
    /// becomes of it later the target reports to the message's receipt.
    pub fn publish(&self, message: &Message<'_>, turn: &mut Turn) -> Published {
        match self.publish_some(message, turn) {
            Routing::Done(published) => published,
            Routing::More(mut spread) => loop {
                turn.effort.renew();
                if let Some(published) = spread.go_on(turn) {
                    return published;
                }
            },
        }
    }

    /// As [`Self::publish`], but serves only as many receivers as the turn's effort affords. The caller continues with
    /// the rest after it has let the other tasks of its thread run.
    pub fn publish_some(&self, message: &Message<'_>, turn: &mut Turn) -> Routing {
        self.publish_of(message, None, turn)
    }

    /// As [`Self::publish_some`]; if retained, it counts for `quota_holders`. `None` are those of the session in whose name it
    /// is.
    #[inline(always)]
    fn publish_of(
        &self,
        message: &Message<'_>,
        quota_holders: Option<QuotaHolders>,
        turn: &mut Turn,
    ) -> Routing {
        let reserved = self.inner.reserved.as_ref();
        if let Some(taken) = reserved.and_then(|parts| parts.take(message, self, turn)) {
            return Routing::Done(taken);
        }
        match self.admit(message, quota_holders, turn) {
            Ok(withheld) => self.route_some(message, withheld, turn),
            Err(refusal) => Routing::Done(Published { refused: Some(refusal), ..Published::default() }),
        }
    }

    /// Everything before the receivers. Returns whether only streams get the message, or why it is refused.
    #[inline(always)]
    fn admit(
        &self,
        message: &Message<'_>,
        quota_holders: Option<QuotaHolders>,
        turn: &mut Turn,
    ) -> Result<bool, Shortage> {
        let inner = &*self.inner;
        if message.qos != QoS::AtMostOnce
            && let Some(refusal) = refusal(message, &inner.account, || inner.admit(message, turn))
        {
            return Err(refusal);
        }
        let from_device = message.origin.kind == OriginKind::Device;
        let withheld = inner.non_broker && from_device;
        if message.retain && !withheld {
            turn.effort.spend(Effort::RETAINED);
            let quota_holders = quota_holders.unwrap_or_else(|| inner.holders_of(message));
            inner.retained.keep(message, &quota_holders);
        }
        if from_device && let Some(latest) = &inner.latest {
            latest.record(message, &mut turn.effort);
        }
        if from_device && let Some(history) = &inner.history {
            history.record(message, &mut turn.effort);
        }
        Ok(withheld)
    }

    /// Delivers the message to all receivers, or to as many as the effort affords.
    #[inline(always)]
    fn route_some(&self, message: &Message<'_>, only_streams: bool, turn: &mut Turn) -> Routing {
        let inner = &*self.inner;
        let Turn { dirty, matches, effort } = turn;
        // With more than one node, this is the one place to ask which others want the message.
        let list = matches.find(&inner.index, &inner.sessions.slots, message.topic, effort);
        if list.len() > MANY {
            return self.begin(message, only_streams, turn);
        }
        let published = inner.deliverer().hand_out(list, message, only_streams, dirty, effort);
        Routing::Done(self.conclude(message, published))
    }

    /// As [`Self::route_some`], for very many receivers.
    #[cold]
    fn begin(&self, message: &Message<'_>, only_streams: bool, turn: &mut Turn) -> Routing {
        let inner = &*self.inner;
        let Turn { dirty, matches, effort } = turn;
        let list = Arc::clone(matches.find(&inner.index, &inner.sessions.slots, message.topic, effort));
        let mut progress = SpreadProgress { only_streams, ..SpreadProgress::default() };
        inner.deliverer().hand_out_some(&list, message, &mut progress, dirty, effort);
        if progress.served == list.len() {
            return Routing::Done(self.conclude(message, progress.published));
        }
        Routing::More(Box::new(Spread::new(self, list, progress, message)))
    }

    /// Every receiver has the message.
    #[inline(always)]
    fn conclude(&self, message: &Message<'_>, published: Published) -> Published {
        if let Some(durable) = &self.inner.durable {
            durable.hurry(message);
        }
        if published.matched == 0 {
            count(|c| c.no_match.add(1));
        }
        published
    }

    /// Hands one message to one device, subscribed or not. It never sets a retained message.
    pub fn publish_to_device(
        &self,
        device: &str,
        message: &Message<'_>,
        offline: Offline,
        turn: &mut Turn,
    ) -> DirectOutcome {
        let BrokerInner { sessions, durable, account, .. } = &*self.inner;
        let Some(session) = sessions.find(device) else { return DirectOutcome::UnknownDevice };
        if offline == Offline::Fail && !session.is_online() {
            return DirectOutcome::DeviceOffline;
        }
        let admit = || {
            let durable = durable.as_ref().filter(|_| session.is_durable());
            durable.map_or(Ok(()), |durable| durable.state().admit(message))
        };
        if message.qos != QoS::AtMostOnce
            && let Some(refusal) = refusal(message, account, admit)
        {
            return DirectOutcome::Refused(refusal);
        }
        let outcome = deliver_direct(session, message, offline, &mut turn.dirty);
        if let Some(durable) = durable {
            durable.hurry(message);
        }
        outcome
    }

    /// Tells whoever waits for messages to a device that have expired in memory: they are dropped when it is their turn.
    pub fn tell_expired(&self, device: &str) {
        if let Some(session) = self.session(device) {
            session.tell_expired();
        }
    }

    /// Returns whether a device may not publish to this topic, whatever its rules say, since it is reserved for another.
    #[inline]
    pub fn is_foreign(&self, client_id: &str, topic: &str) -> bool {
        self.inner.reserved_topics().is_some_and(|topics| topics.is_foreign(client_id, topic))
    }

    /// Returns the promise that the acknowledgement of a message to `topic` makes, if `listener` sets this one for its clients'
    /// messages.
    pub fn durability(&self, topic: &str, listener: Option<Durability>) -> Durability {
        self.inner.durability.of(topic, listener)
    }
}

/// Subscriptions of sessions and streams.
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

    /// Restores a subscription of an earlier process: no event, no retained messages, nothing written.
    fn resubscribe(
        &self,
        session: &Arc<dyn Session>,
        request: &SubscribeRequest<'_>,
    ) -> Result<(), SubscribeError> {
        self.try_subscribe(session, request, Timestamp(0), true).map(drop)
    }

    fn try_subscribe(
        &self,
        session: &Arc<dyn Session>,
        request: &SubscribeRequest<'_>,
        now: Timestamp,
        restored: bool,
    ) -> Result<Subscribed, SubscribeError> {
        let BrokerInner { rules, index, retained, events, .. } = &*self.inner;
        let core = session.core();
        let shared = rules.check(core.client_id().as_str(), request, self.inner.reserved_topics())?;
        let added = rules.subscribe(index, self.inner.storage(), session, request, shared, restored)?;
        let qos = added.qos;
        events.emit_with(now, core, || EventKind::Subscribed { filter: request.filter.to_owned(), qos });
        let replay = rules.replay(core, request, &added, retained, now);
        let group = index.groups_of(&[added.reference]).pop();
        let group_queue = group.as_ref().is_some_and(|group| group.has_queued());
        let members = group.map_or(0, |group| group.len());
        Ok(Subscribed { qos, existed: added.existed, replay, group_queue, members })
    }

    /// Removes one subscription; false if there was none (0x11). `commit` gets a part that is done when that is on disk.
    pub fn unsubscribe(
        &self,
        session: &Arc<dyn Session>,
        filter: &str,
        now: Timestamp,
        commit: Option<&Arc<Commit>>,
    ) -> bool {
        let BrokerInner { rules, index, events, .. } = &*self.inner;
        let core = session.core();
        let removed = rules.unsubscribe(index, self.inner.storage(), core, filter, commit);
        if removed {
            events.emit_with(now, core, || EventKind::Unsubscribed { filter: filter.to_owned() });
        }
        removed
    }

    /// Registers a gRPC stream for MQTT filters (already valid; `#` includes no `$` topics). Never shared.
    pub fn attach_stream(&self, target: Arc<dyn Target>, filters: &[String]) -> StreamHandle {
        StreamHandle::attach(self, target, filters)
    }
}

/// Life of a session, from its first connection to its end.
impl Broker {
    /// Returns whether the session of this client id exists or the memory account has room for it.
    pub fn has_room_for(&self, client_id: &ClientId, username: Option<&str>) -> bool {
        self.inner.sessions.has_room_for(client_id, username, &self.inner.account)
    }

    /// Returns whether a session of this client id that outlives its connection can be opened now: it exists on disk, or the
    /// store accepts another one.
    pub fn can_keep(&self, client_id: &str) -> bool {
        let Some(durable) = &self.inner.durable else { return true };
        self.inner.sessions.is_kept(client_id) || durable.state().accepts_sessions()
    }

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
        let BrokerInner { sessions, events, .. } = &*self.inner;
        let now = request.now;
        let _change = sessions.change();
        let (opening, former) = sessions.open(request, make, self.inner.storage())?;
        let SessionOpening { session, present, commit, epoch } = opening;
        let took_over = former.connection.is_some();
        let mut cleanup = SessionCleanup::new(self, now);
        if let Some(epoch) = former.connection {
            let old = former.ended.as_ref().map_or(&session, |ended| &ended.session);
            old.close(epoch, CloseReason::TakenOver);
            count(|c| c.takeovers.add(1));
            events.emit_with(now, old.core(), || EventKind::TakenOver);
        }
        if let Some(will) = former.will {
            cleanup.publish(&session, will);
        }
        if let Some(ended) = former.ended {
            cleanup.clear(ended, "clean_start", commit.as_ref());
        }
        let cleanup = cleanup.begin(turn);
        if let Some(commit) = &commit {
            commit.done();
        }
        events.emit_with(now, session.core(), || {
            let info = Box::new(session.core().state.lock().info());
            EventKind::Connected { info, session_present: present }
        });
        Ok(OpenedSession { session, present, commit, cleanup, took_over, epoch })
    }

    /// Called after a session got its new connection: gives it messages from its groups' queues, but no more than is
    /// sure to fit into an empty mailbox, whose overflow would drop messages or end the connection. Returns true if
    /// more is waiting: the caller must call again when there is room, since nobody else will.
    pub fn online(&self, session: &Arc<dyn Session>, now: Timestamp, turn: &mut Turn) -> bool {
        let inner = &*self.inner;
        let core = session.core();
        if let Some(parts) = &inner.reserved {
            parts.connected(core.client_id());
        }
        let limit = (inner.limits.mailbox_messages / 2).clamp(1, DRAIN_PER_CALL);
        let mut left = false;
        for group in inner.index.groups_of_session(core) {
            let mut context = DeliveryContext::new(inner.storage(), &mut turn.dirty, now);
            left |= group.drain_to(core.slot(), limit, &mut context);
        }
        left
    }

    /// A connection has authenticated again: replaces its identity, and, where wills are judged, the author of its will by
    /// what `author` makes of the former one. False if another has taken the session over.
    pub fn reauthenticated(
        &self,
        core: &SessionCore,
        epoch: u32,
        identity: Option<Arc<dyn Any + Send + Sync>>,
        author: impl FnOnce(&str) -> String,
    ) -> bool {
        core.reauthenticate(epoch, identity, author, self.inner.storage())
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
        let BrokerInner { sessions, events, given_up, .. } = &*self.inner;
        if given_up.load(Relaxed) {
            return None;
        }
        let _change = sessions.change();
        // Before the record, which says that there is no connection.
        session.note_sent();
        let (will, ended) = sessions.close(session, epoch, closed, now, self.inner.storage())?;
        events.emit_with(now, session.core(), || EventKind::Disconnected { reason: closed.reason });
        let mut cleanup = SessionCleanup::new(self, now);
        match ended {
            Some(ended) => cleanup.clear(ended, "expired", None),
            None => self.went_offline(session, now, &mut cleanup, turn),
        }
        if let Some(will) = will {
            cleanup.publish(session, will);
        }
        cleanup.begin(turn)
    }

    /// A session goes on without a connection: its groups get back what was not sent, and another session may have to end.
    fn went_offline(
        &self,
        session: &Arc<dyn Session>,
        now: Timestamp,
        cleanup: &mut SessionCleanup,
        turn: &mut Turn,
    ) {
        let BrokerInner { index, sessions, account, limits, .. } = &*self.inner;
        let core = session.core();
        self.inner.redelivery(now).redeliver(session.yield_shared(), core.queue(), &mut turn.dirty);
        for group in index.groups_of_session(core) {
            group.park(account);
        }
        if let Some(ended) = sessions.end_surplus(session, limits.max_offline_sessions, account) {
            cleanup.clear(ended, "expired", None);
        }
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
        let BrokerInner { sessions, account, .. } = &*self.inner;
        let _change = sessions.change();
        let (session, epoch, ended) = sessions.disconnect(client_id, discard, account)?;
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
        self.inner.sessions.shed(&self.inner.account);
        self.inner.redelivery(now).retry(&mut turn.dirty);
        self.inner.events.tick(now);
        left
    }

    /// Publishes every will that sessions still hold, with and without a connection. For graceful shutdown,
    /// after the last connection was asked to end; wills leave their sessions, so none is published twice. Returns what is
    /// left, if that is too much for one turn.
    pub fn shutdown_wills(&self, now: Timestamp, turn: &mut Turn) -> Option<Box<SessionCleanup>> {
        let mut wills = SessionCleanup::new(self, now);
        self.inner.sessions.take_wills(|session, will| wills.publish(session, will));
        wills.begin(turn)
    }

    /// Returns whether no session has a connection and everything that follows from ends so far is done, above all their wills.
    pub fn is_quiet(&self) -> bool {
        self.inner.sessions.is_quiet()
    }

    /// The home is another gateway's: connections end, in steps, without a word, a will, an event or a change of what is stored.
    pub async fn give_up(&self) {
        self.inner.given_up.store(true, Relaxed);
        let mut next = Some(1);
        while let Some(from) = next {
            next = self.online_step(from, |session, epoch| _ = session.close(epoch, CloseReason::GivenUp));
            tokio::task::yield_now().await;
        }
    }

    /// Lets go of all sessions in memory, which hold the broker and its stores: for the very end, when nothing is routed any more.
    pub fn release_sessions(&self) {
        self.inner.sessions.timers.clear();
        for group in self.inner.index.groups() {
            group.release_members();
        }
        self.inner.sessions.slots.clear();
        self.inner.index.end();
    }
}

/// Sessions as operators see them, and sizes.
impl Broker {
    /// The session of a device.
    pub fn session(&self, client_id: &str) -> Option<Arc<dyn Session>> {
        self.inner.sessions.find(client_id)
    }

    /// One device.
    pub fn device(&self, client_id: &str) -> Option<DeviceInfo> {
        self.inner.sessions.device(client_id)
    }

    /// Full filter and granted QoS of at most `most` subscriptions of a device, in no particular order; `None` if it
    /// has no session. Costs as much as it lists.
    pub fn subscriptions(&self, client_id: &str, most: usize) -> Option<Vec<(String, QoS)>> {
        let session = self.session(client_id)?;
        Some(self.inner.index.list_of_session(session.core(), most))
    }

    /// At most `limit` devices from `start`, 0 at first. A page visits at most 8,192 slots, and tells `which.info` of at most 2,048
    /// devices, so that it may be short, or even empty, before the end.
    ///
    /// The order is that of the sessions' slots: it has no meaning, but is fixed as long as a session lives. A session
    /// that lives from the first page to the last is shown exactly once. One that begins meanwhile may be missing; a
    /// device whose session ends and begins again meanwhile may be missing or shown twice.
    pub fn devices(&self, start: u32, limit: usize, which: &DeviceFilter<'_>) -> DevicePage {
        self.inner.sessions.devices(start, limit, which)
    }

    /// Every session with a connection, and the connection's epoch, so that shutdown can close them at its pace.
    pub fn online_sessions(&self) -> Vec<(Arc<dyn Session>, u32)> {
        self.inner.sessions.online_sessions()
    }

    /// Calls `visit` for the sessions with a connection and the connection's epoch, under no lock and in steps: at most 256
    /// from `start`, 1 at first. Returns where to go on, `None` at the end. A session that is opened after the walk began
    /// may be missing.
    pub fn online_step(&self, start: u32, visit: impl FnMut(Arc<dyn Session>, u32)) -> Option<u32> {
        self.inner.sessions.online_step(start, visit)
    }

    /// Calls `visit` with the client id of each session, under no lock and in steps: at most 256 from `start`, 1 at first.
    /// Returns where to go on, `None` at the end. A session that is opened after the walk began may be missing.
    pub fn ids_step(&self, start: u32, visit: impl FnMut(&str)) -> Option<u32> {
        self.inner.sessions.ids_step(start, visit)
    }

    /// Calls `visit` with the client id, the state and the queue of each session, as [`Self::ids_step`] does with ids; the queue
    /// is only looked at if it is asked for.
    pub fn queues_step(
        &self,
        start: u32,
        visit: impl FnMut(&str, bool, &dyn Fn() -> QueueInfo),
    ) -> Option<u32> {
        self.inner.sessions.queues_step(start, visit)
    }

    /// Sums up the queues of all sessions. Visits every session.
    pub fn queues(&self) -> QueueInfo {
        self.inner.sessions.queues()
    }

    /// Gauges for metrics and `$SYS`.
    pub fn gauges(&self) -> Gauges {
        let BrokerInner { index, sessions, retained, account, streams, .. } = &*self.inner;
        let (subscriptions, shared_groups) = index.counts();
        let SessionTotals { sessions, online, online_peak } = sessions.totals();
        Gauges {
            online,
            sessions,
            online_peak,
            subscriptions,
            shared_groups,
            retained: retained.len(),
            retained_bytes: retained.bytes(),
            queued_bytes: account.held(MemoryKind::Queued) + account.held(MemoryKind::GrpcStreams),
            streams: streams.load(Relaxed),
        }
    }
}

/// Retained messages.
impl Broker {
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

/// Stores.
impl Broker {
    /// The stores in use, if what sessions hold outlives the process.
    pub fn stores(&self) -> Option<&Stores> {
        self.inner.durable.as_ref().map(Durable::stores)
    }

    /// Reads a session's queue from place `from` on: about `bytes` of it, but at least one message. Cancel safe.
    pub async fn read_queue(
        &self,
        client_id: &ClientId,
        queue: QueueId,
        from: u64,
        bytes: usize,
    ) -> Result<JournalPage, StoreError> {
        let durable = self.inner.durable.as_ref();
        let durable = durable.ok_or_else(|| StoreError::Unavailable("there is no store".to_owned()))?;
        durable.read_session(client_id, queue, from, bytes).await
    }

    /// Answers the store's questions about messages that expire on disk.
    pub fn queue_expiry(&self) -> Arc<dyn Expiry> {
        Arc::new(QueueExpiry(Arc::downgrade(&self.inner)))
    }
}

/// Consumer groups.
impl Broker {
    /// The log that messages for consumer groups are appended to, if there is one.
    pub fn log(&self) -> Option<&Arc<dyn PartitionedLog>> {
        self.inner.log.as_ref().map(|target| target.log())
    }

    /// From now on messages that match `filter` are appended for the group.
    ///
    /// # Panics
    /// Without a log.
    pub fn keep_for(&self, group: GroupId, filter: Arc<GroupFilter>) {
        self.log_target().keep_for(group, filter, self.inner.group_surroundings());
    }

    /// The same in the place of the group `old`, for which nothing is appended from now on: a message is appended for one of
    /// the two at most, and all that is appended for the old group is submitted to the log when this returns.
    ///
    /// # Panics
    /// Without a log.
    pub fn replace_group(&self, old: GroupId, new: GroupId, filter: Arc<GroupFilter>) {
        self.log_target().replace(old, new, filter, self.inner.group_surroundings());
    }

    /// From now on nothing is appended for the group. False if nothing was before.
    ///
    /// # Panics
    /// Without a log.
    pub fn keep_no_more_for(&self, group: GroupId) -> bool {
        self.log_target().keep_no_more_for(group, self.inner.group_surroundings())
    }

    /// Sets whether the group is full and refuses: QoS 1 and 2 messages that it wants are refused before any receiver has them,
    /// those of QoS 0 are not appended for it.
    ///
    /// # Panics
    /// Without a log.
    pub fn set_full(&self, group: GroupId, full: bool) {
        self.log_target().set_full(group, full);
    }

    /// Skips the group for now, or no longer: messages that it wants are not appended for it, and none is refused for that.
    ///
    /// # Panics
    /// Without a log.
    pub fn set_skipped(&self, group: GroupId, skipped: bool) {
        self.log_target().set_skipped(group, skipped);
    }

    /// Appends events for the groups that want them, as `encode` writes them; for ever. Without a group that wants events none
    /// is made. An event is not waited for: what the log does not take, or comes faster than it is appended, is counted.
    ///
    /// # Panics
    /// Without a log.
    pub async fn append_events(&self, encode: impl Fn(Event) -> Vec<u8> + Send) {
        Arc::clone(self.log_target()).append_events(encode).await;
    }

    fn log_target(&self) -> &Arc<LogTarget> {
        self.inner.log.as_ref().expect("groups are made only where there is a log")
    }
}

/// Events.
impl Broker {
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
}
