//! Sessions as operators see them.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use gateway_core::{ClientId, Timestamp};

use super::{lifecycle::Sessions, slots::TURN};
use crate::{ConnectionInfo, QueueInfo, Session};

/// Slots that one page of devices visits.
const PAGE_SLOTS: u32 = 8 * 1024;
/// Devices that one page describes, whether it has them or not.
const PAGE_DESCRIBED: u32 = 2 * 1024;

/// A device as `Devices` shows it.
#[derive(Debug, Clone)]
pub struct DeviceInfo {
    /// Client id.
    pub client_id: ClientId,
    /// Connected now.
    pub online: bool,
    /// Details of the current or last connection.
    pub connection: ConnectionInfo,
    /// True if the device has not connected in this process: only the stored facts about its last connection are known.
    pub restored: bool,
    /// Time at which the current state (connected or not) began.
    pub since: Timestamp,
    /// Session expiry in seconds.
    pub expiry: u32,
    /// Number of the session's subscriptions; [`crate::Broker::subscriptions`] lists them.
    pub subscription_count: usize,
    /// Queue figures.
    pub queue: QueueInfo,
}

/// Selects the devices of a page.
#[derive(Clone, Copy)]
pub struct DeviceFilter<'a> {
    /// Only those with a connection.
    pub online_only: bool,
    /// Only those with such a client id. Asked first, since it costs least.
    pub name: &'a dyn Fn(&str) -> bool,
    /// Only those of which that is so.
    pub info: Option<&'a dyn Fn(&DeviceInfo) -> bool>,
}

impl DeviceFilter<'_> {
    /// All of them.
    pub const ALL: Self = Self { online_only: false, name: &|_| true, info: None };
}

/// One page of [`crate::Broker::devices`].
#[derive(Debug, Default)]
pub struct DevicePage {
    /// The devices, each with the start of a page that continues after it.
    pub devices: Vec<(u32, DeviceInfo)>,
    /// Start of the next page; `None` at the end.
    pub next: Option<u32>,
}

/// Numbers of sessions.
pub(crate) struct SessionTotals {
    pub(crate) sessions: usize,
    /// With a connection.
    pub(crate) online: usize,
    pub(crate) online_peak: usize,
}

/// Sessions as operators see them.
impl Sessions {
    /// One device.
    pub(crate) fn device(&self, client_id: &str) -> Option<DeviceInfo> {
        let session = self.find(client_id)?;
        Some(describe(&session))
    }

    /// At most `limit` devices from `start`, 0 at first. A page visits at most 8,192 slots, and tells `which.info` of at most 2,048
    /// devices, so that it may be short, or even empty, before the end.
    ///
    /// The order is that of the sessions' slots: it has no meaning, but is fixed as long as a session lives. A session
    /// that lives from the first page to the last is shown exactly once. One that begins meanwhile may be missing; a
    /// device whose session ends and begins again meanwhile may be missing or shown twice.
    pub(crate) fn devices(&self, start: u32, limit: usize, which: &DeviceFilter<'_>) -> DevicePage {
        let mut page = DevicePage::default();
        let mut from = start.max(1);
        let (mut looked_at, mut described) = (0, 0);
        while looked_at < PAGE_SLOTS {
            let (sessions, end) = {
                let slots = self.slots.read();
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
                let info = describe(&session);
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
    pub(crate) fn online_sessions(&self) -> Vec<(Arc<dyn Session>, u32)> {
        let mut online = Vec::with_capacity(self.counts.online.load(Relaxed));
        self.slots.for_each_session(|session| {
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
    pub(crate) fn online_step(
        &self,
        start: u32,
        mut visit: impl FnMut(Arc<dyn Session>, u32),
    ) -> Option<u32> {
        let (sessions, end) = {
            let slots = self.slots.read();
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
    pub(crate) fn ids_step(&self, start: u32, mut visit: impl FnMut(&str)) -> Option<u32> {
        let (sessions, end) = {
            let slots = self.slots.read();
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
    pub(crate) fn queues_step(
        &self,
        start: u32,
        mut visit: impl FnMut(&str, bool, &dyn Fn() -> QueueInfo),
    ) -> Option<u32> {
        let (sessions, end) = {
            let slots = self.slots.read();
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

    /// Numbers of sessions now.
    pub(crate) fn totals(&self) -> SessionTotals {
        SessionTotals {
            sessions: self.counts.all.load(Relaxed),
            online: self.counts.online.load(Relaxed),
            online_peak: self.counts.online_peak.load(Relaxed),
        }
    }

    /// Sums up the queues of all sessions. Visits every session.
    pub(crate) fn queues(&self) -> QueueInfo {
        let mut sum = QueueInfo::default();
        self.slots.for_each_session(|session| {
            let queue = session.queue();
            sum.inflight += queue.inflight;
            sum.pending += queue.pending;
            sum.pending_bytes += queue.pending_bytes;
            sum.dropped += queue.dropped;
        });
        sum
    }
}

fn describe(session: &Arc<dyn Session>) -> DeviceInfo {
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
