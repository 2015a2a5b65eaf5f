//! State that all devices of a gateway share.

use std::sync::Arc;

use broker::{Broker, Session, SessionCore};
use gateway_core::{QueueId, Timestamp};
use session::{Disk, Env};

use super::{device::Device, replay_work::PendingReplayWork};

/// The broker, and the requests of backends to connections.
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
