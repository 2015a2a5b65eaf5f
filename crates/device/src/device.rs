//! A session as the broker and the connection see it: the outbound half and its link, behind one short lock.
//!
//! Invariants: the lock covers memory only. Bytes taken under epoch e go only to that epoch's socket. At most one
//! thread writes to a socket at a time, and some thread sees to all waiting bytes ([`SendState`](super::link::SendState)).

use std::{
    any::Any,
    num::NonZeroU32,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    task::Waker,
};

use broker::{
    Broker, CloseReason, Delivered, QueueInfo, QueueSummary, Queued, ReplayWork, Session, SessionCore, Target,
};
use codec::reason;
use gateway_core::{Commit, DropReason, Message, Offer, Outcome, QoS, QueueId, Timestamp, Yielded, clock};
use parking_lot::{Mutex, MutexGuard};
use session::{Disk, Env, Gate, LinkParams, Outbound, StoredQueue};

use super::{
    flush,
    link::{FlushDuty, Link},
    replay_work::PendingReplayWork,
};

/// Instead of a tick, while the gateway itself pauses the reader: that time counts for nobody.
pub const PAUSED: u32 = u32::MAX;

/// The bits of a tick that a device keeps.
pub const HEARD: u32 = PAUSED >> 8;

/// State that all devices of a gateway share: the broker, and the requests of backends to connections.
pub struct DeviceContext {
    /// Routing.
    pub broker: Broker,
    pub(super) waiting_work: PendingReplayWork,
}

impl DeviceContext {
    /// For the devices of a new gateway.
    pub fn new(broker: Broker) -> Arc<Self> {
        Arc::new(Self { broker, waiting_work: PendingReplayWork::default() })
    }

    /// Returns the environment of a session at `now`; `queue` is its durable queue, if it has one.
    pub(super) fn env(&self, queue: QueueId, now: Timestamp) -> Env<'_> {
        let stores = self.broker.stores().filter(|_| queue != QueueId::NONE);
        let disk = stores.map(|stores| Disk { journal: &*stores.state, queue });
        Env { limits: self.broker.limits(), now, budget: &**self.broker.account(), disk }
    }
}

/// Builds session objects, for the broker to restore sessions of an earlier process.
pub fn session_maker(context: &Arc<DeviceContext>) -> impl Fn(SessionCore) -> Arc<dyn Session> + use<> {
    let context = Arc::clone(context);
    move |core| Arc::new(Device::new(core, Arc::clone(&context))) as Arc<dyn Session>
}

/// The session object; one allocation holds the broker's part and ours.
pub struct Device {
    core: SessionCore,
    context: Arc<DeviceContext>,
    slot: Mutex<DeviceSlot>,
    /// The end of the epoch of the connection that was heard last, and above it the end of the tick. In one word: a
    /// connection that was taken over may still run on another shard, and its notes must not count for its successor.
    heard: AtomicU32,
    /// Set when a connection is asked to close before it has attached its link. Written under the lock of `slot`, but kept
    /// outside it, where padding makes it free.
    asked: AtomicU32,
}

/// Limits of a connection's client: its delivery gate, and the bytes that may wait in the out-buffer.
#[derive(Debug, Default)]
pub struct Reception {
    pub gate: Option<Box<dyn Gate>>,
    pub room: Option<NonZeroU32>,
}

/// Another thread is writing.
pub struct Flushing;

/// State of a device behind its lock.
pub struct DeviceSlot {
    pub out: Outbound,
    pub link: Option<Link>,
}

impl Device {
    pub fn new(core: SessionCore, context: Arc<DeviceContext>) -> Self {
        let slot = Mutex::new(DeviceSlot { out: Outbound::new(), link: None });
        Self { core, context, slot, heard: AtomicU32::new(0), asked: AtomicU32::new(0) }
    }

    /// The broker that the session is with.
    pub fn broker(&self) -> &Broker {
        &self.context.broker
    }

    /// Returns the environment of the session at `now`.
    pub fn env(&self, now: Timestamp) -> Env<'_> {
        self.context.env(self.core.queue(), now)
    }

    /// Waits for the writes that must be on disk before a new connection is answered: `commit`, and steps of QoS 2
    /// handshakes that go again at once. Returns false if the store refuses the commit; the steps are not refused.
    ///
    /// The connection before may be in the middle of a message on another thread. Only when that is routed does the session
    /// know what the answer to the same PUBLISH, sent again, must wait for, or that it was refused. It begins no other: it has
    /// been asked to close.
    pub async fn is_written(&self, commit: Option<Arc<Commit>>) -> bool {
        while self.core.is_handling() {
            tokio::task::yield_now().await;
        }
        if let Some(commit) = commit
            && commit.wait().await.is_err()
        {
            return false;
        }
        for commit in self.unsafe_releases() {
            let _ = commit.wait().await;
        }
        true
    }

    fn unsafe_releases(&self) -> Vec<Arc<Commit>> {
        if !self.is_durable() {
            return Vec::new();
        }
        self.slot.lock().out.unsafe_releases()
    }

    pub fn lock(&self) -> MutexGuard<'_, DeviceSlot> {
        self.slot.lock()
    }

    /// The slot, if the connection of `epoch` still owns the session.
    #[inline]
    pub fn lock_owned(&self, epoch: u32) -> Option<MutexGuard<'_, DeviceSlot>> {
        let slot = self.slot.lock();
        slot.link.as_ref().is_some_and(|link| link.epoch == epoch).then_some(slot)
    }

    /// Swaps in a new connection, and with it what its client may get. `Err` gives the link back when a later connection
    /// owns the session already, or has ended it by its Clean Start: that one's rights stay. `Ok` gives the link that it
    /// replaced, for the farewell.
    pub fn attach(
        &self,
        mut link: Link,
        params: LinkParams,
        reception: Reception,
        connack: &[u8],
        now: Timestamp,
    ) -> Result<Option<Link>, Link> {
        let mut slot = self.slot.lock();
        if slot.out.is_ended() || slot.link.as_ref().is_some_and(|old| old.epoch > link.epoch) {
            return Err(link);
        }
        if let Some(reason) = asked_to_close(self.asked.load(Relaxed), link.epoch) {
            link.close = Some(reason);
        }
        let mut old = slot.link.replace(link);
        if let Some(old) = &old {
            let _ = self.take_all_replay_work(old.epoch);
        }
        let lost = old.as_mut().map_or(0, |old| old.take_unsent(&mut slot.out));
        let env = self.env(now);
        slot.out.detach(&env);
        slot.out.note_lost(lost);
        self.context.broker.note_dropped(self.core.client_id(), DropReason::ConnectionLost, lost);
        slot.out.set_gate(reception.gate);
        slot.out.set_room(reception.room);
        slot.out.attach(params, connack, &env);
        Ok(old)
    }

    /// Takes the replay work asked of the connection of `epoch` since the last call. A connection that has left the link is
    /// asked for none.
    pub fn take_all_replay_work(&self, epoch: u32) -> Vec<ReplayWork> {
        self.context.waiting_work.take((self.core.slot(), epoch))
    }

    /// The connection of `epoch` is gone. Returns its link if it still owned the session.
    pub fn detach(&self, epoch: u32) -> Option<Link> {
        let mut slot = self.slot.lock();
        if slot.link.as_ref()?.epoch != epoch {
            return None;
        }
        self.take_link(&mut slot)
    }

    /// As [`Self::detach`], but not while another thread writes: `Err` then, and nothing has changed.
    pub fn detach_idle(&self, epoch: u32) -> Result<Option<Link>, Flushing> {
        let mut slot = self.slot.lock();
        match &slot.link {
            Some(link) if link.epoch == epoch && link.sending.is_writing() => Err(Flushing),
            Some(link) if link.epoch == epoch => Ok(self.take_link(&mut slot)),
            _ => Ok(None),
        }
    }

    fn take_link(&self, slot: &mut DeviceSlot) -> Option<Link> {
        let mut link = slot.link.take()?;
        let _ = self.take_all_replay_work(link.epoch);
        let lost = link.take_unsent(&mut slot.out);
        slot.out.detach(&self.env(clock::now()));
        slot.out.note_lost(lost);
        self.context.broker.note_dropped(self.core.client_id(), DropReason::ConnectionLost, lost);
        Some(link)
    }
}

impl DeviceSlot {
    /// Bytes that the socket has taken on this connection.
    pub fn written(&self) -> u64 {
        let unsent = self.link.as_ref().and_then(|link| link.unsent.as_ref());
        // The session's end forgets what was taken.
        self.out.taken().saturating_sub(unsent.map_or(0, |unsent| unsent.rest().len() as u64))
    }

    /// Waker of the task that reads more from disk.
    pub fn loader(&self) -> Option<Waker> {
        let link = self.link.as_ref().filter(|_| self.out.wants_load())?;
        Some(link.waker.clone())
    }

    /// Puts the device on the caller's flush list, unless another thread will flush it anyway.
    #[inline]
    pub fn mark_dirty(&mut self) -> bool {
        let Some(link) = &mut self.link else { return false };
        let waits = self.out.buffered();
        if waits == 0 {
            return false;
        }
        match link.sending.list() {
            FlushDuty::Listed => true,
            FlushDuty::Left => {
                link.settle_unsent(waits);
                false
            }
            FlushDuty::SeenTo => false,
        }
    }
}

impl Target for Device {
    fn deliver(&self, message: &Message<'_>, offer: Offer<'_>) -> Delivered {
        if offer.qos.min(message.qos) != QoS::AtMostOnce {
            // The message will be kept until it is acknowledged: shared here, it keeps nobody waiting for the lock.
            message.share();
        }
        let mut slot = self.slot.lock();
        let before = slot.out.dropped();
        let outcome = slot.out.offer(message, offer, &self.env(message.now));
        let lost = slot.out.dropped() - before;
        // Messages that a shared group offers to one member after the other are lost with none of them.
        if lost > 0 || (matches!(outcome, Outcome::Dropped(_)) && offer.group == 0) {
            // Room for a message that was taken was made by pushing another out of the queue.
            let reason = if let Outcome::Dropped(reason) = outcome { reason } else { DropReason::QueueFull };
            self.context.broker.note_dropped(self.core.client_id(), reason, lost.max(1));
        }
        if lost > 0 && slot.out.take_overflow() {
            let waker = slot.link.as_mut().map(|link| {
                link.close = Some(CloseReason::SlowConsumer);
                link.waker.clone()
            });
            drop(slot);
            if let Some(waker) = waker {
                waker.wake();
            }
            return Delivered { outcome, flush: false };
        }
        let flush = slot.mark_dirty();
        let loader = slot.loader();
        drop(slot);
        if let Some(loader) = loader {
            loader.wake();
        }
        Delivered { outcome, flush }
    }

    fn flush(self: Arc<Self>) {
        flush::flush(&self);
    }

    fn flush_early(&self) {
        flush::flush_early(self);
    }

    fn is_online(&self) -> bool {
        self.slot.lock().link.is_some()
    }

    fn into_session(self: Arc<Self>) -> Option<Arc<dyn Session>> {
        Some(self)
    }

    fn is_durable(&self) -> bool {
        self.core.queue() != QueueId::NONE
    }

    fn nudge(&self) {
        let waker = {
            let mut slot = self.slot.lock();
            slot.link.as_mut().map(|link| {
                link.elsewhere = true;
                link.waker.clone()
            })
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn load(&self) -> usize {
        let (inflight, pending, ..) = self.slot.lock().out.sizes();
        inflight + pending
    }
}

impl Session for Device {
    fn core(&self) -> &SessionCore {
        &self.core
    }

    fn close(&self, epoch: u32, reason: CloseReason) -> bool {
        let (before, waker) = {
            let mut slot = self.slot.lock();
            let mut before = false;
            if slot.link.as_ref().is_none_or(|link| link.epoch < epoch) {
                let asked = self.asked.swap(ask_to_close(epoch, reason), Relaxed);
                before = asked_to_close(asked, epoch).is_some();
            }
            let waker = match &mut slot.link {
                Some(link) if link.epoch <= epoch && link.close.is_none() => {
                    link.close = Some(reason);
                    Some(link.waker.clone())
                }
                Some(link) => {
                    before |= link.epoch >= epoch;
                    None
                }
                None => None,
            };
            (before, waker)
        };
        if let Some(waker) = waker {
            waker.wake();
        }
        !before
    }

    fn end(&self) -> Vec<Yielded> {
        let (left, waker) = {
            let mut slot = self.slot.lock();
            let left = slot.out.end(&self.env(clock::now()));
            // The connection was asked to close before, unless it came in between.
            let link = slot.link.as_mut().filter(|link| link.close.is_none());
            let waker = link.map(|link| {
                link.close = Some(CloseReason::SessionEnded);
                link.waker.clone()
            });
            (left, waker)
        };
        if let Some(waker) = waker {
            waker.wake();
        }
        left
    }

    fn yield_shared(&self) -> Vec<Yielded> {
        let mut slot = self.slot.lock();
        // A connection that has come since gets the waiting messages.
        if slot.link.is_some() {
            return Vec::new();
        }
        slot.out.yield_shared(&self.env(clock::now()))
    }

    fn restore(&self, stored: &QueueSummary) {
        let &QueueSummary { messages, bytes, first, next, exact, begun, ref received, .. } = stored;
        let left = StoredQueue { first, next, exact, begun, messages, bytes, received };
        self.slot.lock().out.restore(&left);
    }

    fn note_sent(&self) {
        if !self.is_durable() {
            return;
        }
        let mut slot = self.slot.lock();
        if slot.link.is_none() {
            slot.out.note_sent(&self.env(clock::now()));
        }
    }

    fn may_have_sent(&self, place: u64, qos: QoS) -> bool {
        self.slot.lock().out.may_have_sent(place, qos)
    }

    fn note_expired(&self, messages: usize, bytes: u64) {
        self.slot.lock().out.note_expired(messages, bytes, clock::now());
    }

    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }

    fn held(&self) -> usize {
        let slot = self.slot.lock();
        let unsent = slot.link.as_ref().and_then(|link| link.unsent.as_ref());
        slot.out.held() + unsent.map_or(0, |unsent| unsent.charged())
    }

    fn give_back(&self) {
        let mut slot = self.slot.lock();
        let before = slot.out.dropped();
        let gave = slot.out.give_back(&self.env(clock::now()));
        let lost = slot.out.dropped() - before;
        self.context.broker.note_dropped(self.core.client_id(), DropReason::Memory, lost);
        if let Some(link) = slot.link.as_mut().filter(|link| !gave && link.close.is_none()) {
            broker::counters::count(|c| c.memory_queued.add(1));
            link.close = Some(CloseReason::Memory);
            link.waker.wake_by_ref();
        }
    }

    fn tell_expired(&self) {
        self.slot.lock().out.tell_expired(clock::now());
    }

    fn queued(&self, from: usize, most: usize) -> Queued {
        let (messages, tail) = self.slot.lock().out.queued(from, most);
        Queued { messages, tail }
    }

    fn purge(&self) -> usize {
        let (purged, loader) = {
            let mut slot = self.slot.lock();
            let purged = slot.out.purge(&self.env(clock::now()));
            (purged, slot.loader())
        };
        self.context.broker.note_dropped(self.core.client_id(), DropReason::Purged, purged as u64);
        if let Some(loader) = loader {
            loader.wake();
        }
        purged
    }

    fn take_replay_work(&self, replay_work: ReplayWork) -> Result<(), ReplayWork> {
        let waker = {
            let mut slot = self.slot.lock();
            let Some(link) = slot.link.as_mut().filter(|link| link.close.is_none()) else {
                return Err(replay_work);
            };
            // Under the lock: who takes the link forgets what is there by then.
            self.context.waiting_work.add((self.core.slot(), link.epoch), replay_work)?;
            link.elsewhere = true;
            link.waker.clone()
        };
        waker.wake();
        Ok(())
    }

    fn grant(&self, filter: &str) -> Option<bool> {
        let mut slot = self.slot.lock();
        slot.out.gate().map_or(Some(false), |gate| gate.grant(filter).ok())
    }

    fn withdraw(&self, filter: &str) {
        if let Some(gate) = self.slot.lock().out.gate() {
            gate.withdraw(filter);
        }
    }

    fn queue(&self) -> QueueInfo {
        let (inflight, pending, pending_bytes, dropped) = self.slot.lock().out.sizes();
        QueueInfo { inflight, pending, pending_bytes, dropped }
    }
}

/// A request to close the connection of `epoch` in four bytes: half of the epoch, a mark, the reason code.
fn ask_to_close(epoch: u32, reason: CloseReason) -> u32 {
    let code = match reason {
        CloseReason::Administrative(code) => code,
        CloseReason::NotAuthorized => reason::NOT_AUTHORIZED,
        CloseReason::Banned => reason::BANNED,
        CloseReason::ServerShutdown => reason::SERVER_SHUTTING_DOWN,
        _ => reason::SESSION_TAKEN_OVER,
    };
    epoch << 16 | 0x100 | u32::from(code)
}

/// Returns the reason for which the connection of `epoch` was asked to close, if it was.
fn asked_to_close(asked: u32, epoch: u32) -> Option<CloseReason> {
    if asked & !0xFF != epoch << 16 | 0x100 {
        return None;
    }
    Some(match asked as u8 {
        reason::SERVER_SHUTTING_DOWN => CloseReason::ServerShutdown,
        reason::SESSION_TAKEN_OVER => CloseReason::TakenOver,
        reason::NOT_AUTHORIZED => CloseReason::NotAuthorized,
        reason::BANNED => CloseReason::Banned,
        code => CloseReason::Administrative(code),
    })
}

impl Device {
    /// Returns the reason for which the connection of `epoch` was asked to close before it attached, if it was.
    #[cfg(any(test, feature = "test-util"))]
    pub fn asked_to_close(&self, epoch: u32) -> Option<CloseReason> {
        asked_to_close(self.asked.load(Relaxed), epoch)
    }

    /// Notes that the peer of the connection of `epoch` was heard at this tick of its shard's clock, or [`PAUSED`].
    pub fn heard(&self, epoch: u32, tick: u32) {
        self.heard.store(tick << 8 | epoch & 0xFF, Relaxed);
    }

    /// Returns the tick, up to `now`, at which the peer of the connection of `epoch` was heard last; `None` if an
    /// earlier connection has overwritten it. Of the tick 24 bits are kept: no keep alive allows three weeks of
    /// silence.
    pub fn last_heard(&self, epoch: u32, now: u32) -> Option<u32> {
        let heard = self.heard.load(Relaxed);
        if (heard ^ epoch) & 0xFF != 0 {
            return None;
        }
        let paused = heard >> 8 == HEARD;
        Some(if paused { PAUSED } else { now - (now.wrapping_sub(heard >> 8) & HEARD).min(now) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_and_its_reference_counts_fit_256_bytes() {
        assert!(size_of::<Device>() + 2 * size_of::<usize>() <= 256, "{}", size_of::<Device>());
    }
}
