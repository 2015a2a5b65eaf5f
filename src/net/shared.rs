//! What every connection of one gateway shares.

use std::sync::{Arc, atomic::AtomicUsize};

use tokio::sync::Semaphore;

use crate::{
    auth::Authenticator,
    broker::Broker,
    config::Limits,
    session::{Budget, Disk, Env},
    types::{QueueId, Timestamp},
};

/// Shared state of all listeners and shards.
pub struct Shared {
    /// Routing.
    pub broker: Broker,
    /// Bounds.
    pub limits: Arc<Limits>,
    /// Who may connect.
    pub auth: Arc<dyn Authenticator>,
    /// Response Information with `{client_id}` still in it; empty is none.
    pub response_information: String,
    /// Connections in all, handshakes included.
    pub connections: AtomicUsize,
    /// Handshakes that may be under way.
    pub handshakes: Arc<Semaphore>,
}

impl Shared {
    /// For a new gateway.
    pub fn new(broker: Broker, auth: Arc<dyn Authenticator>, response_information: String) -> Arc<Self> {
        let limits = Arc::clone(broker.limits());
        let handshakes = Arc::new(Semaphore::new(limits.max_handshakes.clamp(1, Semaphore::MAX_PERMITS)));
        let connections = AtomicUsize::new(0);
        Arc::new(Self { broker, limits, auth, response_information, connections, handshakes })
    }

    /// What a session needs from outside at `now`; `queue` is its durable queue, if it has one.
    pub(super) fn env(&self, queue: QueueId, now: Timestamp) -> Env<'_> {
        let stores = self.broker.stores().filter(|_| queue != QueueId::NONE);
        let disk = stores.map(|stores| Disk { journal: &*stores.queues, queue });
        Env { limits: &self.limits, now, budget: &self.broker, disk }
    }
}

impl Budget for Broker {
    fn charge(&self, bytes: usize) -> bool {
        Self::charge(self, bytes)
    }

    fn force(&self, bytes: usize) {
        Self::force(self, bytes);
    }

    fn release(&self, bytes: usize) {
        Self::release(self, bytes);
    }
}
