//! What is shown of sessions and of the broker's sizes.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use super::{Broker, DeviceInfo, Gauges, Session};

impl Broker {
    /// One device.
    pub fn device(&self, client_id: &str) -> Option<DeviceInfo> {
        let session = self.inner.registry.get(client_id)?;
        Some(self.describe(&session))
    }

    /// Devices in order of client id, after `after`, at most `limit`. Looks at every session.
    pub fn devices(&self, after: Option<&str>, limit: usize, online_only: bool) -> Vec<DeviceInfo> {
        let wanted = |core: &super::SessionCore| !online_only || core.state.lock().online;
        let page = self.inner.registry.page(after, limit, wanted);
        page.iter().map(|session| self.describe(session)).collect()
    }

    /// Every session with a connection, for shutdown pacing.
    pub fn online_sessions(&self) -> Vec<Arc<dyn Session>> {
        let mut online = Vec::with_capacity(self.inner.online.load(Relaxed));
        self.inner.registry.for_each(|session| {
            if session.core().state.lock().online {
                online.push(Arc::clone(session));
            }
        });
        online
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
            queued_bytes: inner.budget.used(),
            streams: inner.streams.load(Relaxed),
        }
    }

    fn describe(&self, session: &Arc<dyn Session>) -> DeviceInfo {
        let core = session.core();
        let queue = session.queue();
        let state = core.state.lock();
        let listed = self.inner.index.list(state.subscriptions.as_slice(), core.slot());
        DeviceInfo {
            client_id: core.client_id().clone(),
            online: state.online,
            connection: state.info(),
            since: state.since,
            expiry: state.expiry,
            subscriptions: listed.into_iter().map(|entry| (entry.filter, entry.options.qos())).collect(),
            queue,
        }
    }
}
