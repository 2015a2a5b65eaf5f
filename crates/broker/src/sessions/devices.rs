//! Sessions as operators see them, and the broker's sizes.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use gateway_core::QoS;

use super::slots::TURN;
use crate::{Broker, DeviceFilter, DeviceInfo, DevicePage, Gauges, MemoryKind, QueueInfo, Session};

/// Slots that one page of devices visits.
const PAGE_SLOTS: u32 = 8 * 1024;
/// Devices that one page describes, whether it has them or not.
const PAGE_DESCRIBED: u32 = 2 * 1024;

/// Sessions as operators see them.
impl Broker {
    /// The session of a device.
    pub fn session(&self, client_id: &str) -> Option<Arc<dyn Session>> {
        self.inner.session(client_id)
    }

    /// One device.
    pub fn device(&self, client_id: &str) -> Option<DeviceInfo> {
        let session = self.inner.session(client_id)?;
        Some(self.describe(&session))
    }

    /// Full filter and granted QoS of at most `most` subscriptions of a device, in no particular order; `None` if it
    /// has no session. Costs as much as it lists.
    pub fn subscriptions(&self, client_id: &str, most: usize) -> Option<Vec<(String, QoS)>> {
        let session = self.inner.session(client_id)?;
        let core = session.core();
        let listed = {
            let state = core.state.lock();
            let references = state.subscriptions.as_slice();
            self.inner.index.list(&references[..references.len().min(most)], core.slot())
        };
        Some(listed.into_iter().map(|entry| (entry.filter, entry.options.qos())).collect())
    }

    /// At most `limit` devices from `start`, 0 at first. A page visits at most 8,192 slots, and tells `which.info` of at most 2,048
    /// devices, so that it may be short, or even empty, before the end.
    ///
    /// The order is that of the sessions' slots: it has no meaning, but is fixed as long as a session lives. A session
    /// that lives from the first page to the last is shown exactly once. One that begins meanwhile may be missing; a
    /// device whose session ends and begins again meanwhile may be missing or shown twice.
    pub fn devices(&self, start: u32, limit: usize, which: &DeviceFilter<'_>) -> DevicePage {
        let mut page = DevicePage::default();
        let mut from = start.max(1);
        let (mut looked_at, mut described) = (0, 0);
        while looked_at < PAGE_SLOTS {
            let (sessions, end) = {
                let slots = self.inner.slots.read();
                (slots.sessions(from, TURN), slots.end())
            };
            for (slot, session) in sessions {
                if page.devices.len() >= limit || described >= PAGE_DESCRIBED {
                    page.next = Some(slot);
                    return page;
                }
                let core = session.core();
                if !(which.name)(core.client_id().as_str()) {
                    continue;
                }
                let wanted = {
                    let state = core.state.lock();
                    !state.ended && (state.online || !which.online_only)
                };
                if !wanted {
                    continue;
                }
                described += 1;
                let info = self.describe(&session);
                if which.info.is_none_or(|is_wanted| is_wanted(&info)) {
                    page.devices.push((slot + 1, info));
                }
            }
            from = from.saturating_add(TURN);
            looked_at += TURN;
            if from >= end {
                return page;
            }
        }
        page.next = Some(from);
        page
    }

    /// Every session with a connection, and the connection's epoch, so that shutdown can close them at its pace.
    pub fn online_sessions(&self) -> Vec<(Arc<dyn Session>, u32)> {
        let mut online = Vec::with_capacity(self.inner.online.load(Relaxed));
        self.inner.slots.for_each_session(|session| {
            let connected = {
                let state = session.core().state.lock();
                state.online.then_some(state.epoch)
            };
            online.extend(connected.map(|epoch| (session, epoch)));
        });
        online
    }

    /// Calls `visit` for the sessions with a connection and the connection's epoch, under no lock and in steps: at most 256
    /// from `start`, 1 at first. Returns where to go on, `None` at the end. A session that is opened after the walk began
    /// may be missing.
    pub fn online_step(&self, start: u32, mut visit: impl FnMut(Arc<dyn Session>, u32)) -> Option<u32> {
        let (sessions, end) = {
            let slots = self.inner.slots.read();
            (slots.sessions(start, TURN), slots.end())
        };
        for (_, session) in sessions {
            let connected = {
                let state = session.core().state.lock();
                (state.online && !state.ended).then_some(state.epoch)
            };
            if let Some(epoch) = connected {
                visit(session, epoch);
            }
        }
        let next = start.saturating_add(TURN);
        (next < end).then_some(next)
    }

    /// Calls `visit` with the client id of each session, under no lock and in steps: at most 256 from `start`, 1 at first.
    /// Returns where to go on, `None` at the end. A session that is opened after the walk began may be missing.
    pub fn ids_step(&self, start: u32, mut visit: impl FnMut(&str)) -> Option<u32> {
        let (sessions, end) = {
            let slots = self.inner.slots.read();
            (slots.sessions(start, TURN), slots.end())
        };
        for (_, session) in sessions {
            let core = session.core();
            if !core.state.lock().ended {
                visit(core.client_id().as_str());
            }
        }
        let next = start.saturating_add(TURN);
        (next < end).then_some(next)
    }

    /// Calls `visit` with the client id, the state and the queue of each session, as [`Self::ids_step`] does with ids; the queue
    /// is only looked at if it is asked for.
    pub fn queues_step(
        &self,
        start: u32,
        mut visit: impl FnMut(&str, bool, &dyn Fn() -> QueueInfo),
    ) -> Option<u32> {
        let (sessions, end) = {
            let slots = self.inner.slots.read();
            (slots.sessions(start, TURN), slots.end())
        };
        for (_, session) in sessions {
            let core = session.core();
            let (ended, online) = {
                let state = core.state.lock();
                (state.ended, state.online)
            };
            if !ended {
                visit(core.client_id().as_str(), online, &|| session.queue());
            }
        }
        let next = start.saturating_add(TURN);
        (next < end).then_some(next)
    }

    /// Gauges for metrics and `$SYS`.
    pub fn gauges(&self) -> Gauges {
        let inner = &*self.inner;
        let (subscriptions, shared_groups) = inner.index.counts();
        Gauges {
            online: inner.online.load(Relaxed),
            sessions: inner.sessions.load(Relaxed),
            online_peak: inner.online_peak.load(Relaxed),
            subscriptions,
            shared_groups,
            retained: inner.retained.len(),
            retained_bytes: inner.retained.bytes(),
            queued_bytes: inner.account.held(MemoryKind::Queued)
                + inner.account.held(MemoryKind::GrpcStreams),
            streams: inner.streams.load(Relaxed),
        }
    }

    /// Sums up the queues of all sessions. Visits every session.
    pub fn queues(&self) -> QueueInfo {
        let mut sum = QueueInfo::default();
        self.inner.slots.for_each_session(|session| {
            let queue = session.queue();
            sum.inflight += queue.inflight;
            sum.pending += queue.pending;
            sum.pending_bytes += queue.pending_bytes;
            sum.dropped += queue.dropped;
        });
        sum
    }

    fn describe(&self, session: &Arc<dyn Session>) -> DeviceInfo {
        let core = session.core();
        let queue = session.queue();
        let state = core.state.lock();
        DeviceInfo {
            client_id: core.client_id().clone(),
            online: state.online,
            connection: state.info(),
            restored: state.epoch == 0,
            since: state.since,
            expiry: state.expiry,
            subscription_count: state.subscriptions.len(),
            queue,
        }
    }
}
