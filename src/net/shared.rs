//! What every connection of one gateway shares.

use std::sync::{Arc, atomic::AtomicUsize};

use tokio::sync::Semaphore;

use crate::{
    auth::Authenticator,
    broker::Broker,
    config::Limits,
    session::{Budget, Env},
    types::Timestamp,
};

/// Shared state of all listeners and shards.
pub struct Shared {
    /// Routing.
    pub broker: Broker,
    /// Bounds.
    pub limits: Arc<Limits>,
    /// Who may connect.
    pub auth: Arc<dyn Authenticator>,
    /// Connections in all, handshakes included.
    pub connections: AtomicUsize,
    /// Handshakes that may be under way.
    pub handshakes: Arc<Semaphore>,
}

impl Shared {
    /// For a new gateway.
    pub fn new(broker: Broker, auth: Arc<dyn Authenticator>) -> Arc<Self> {
        let limits = Arc::clone(broker.limits());
        let handshakes = Arc::new(Semaphore::new(limits.max_handshakes.clamp(1, Semaphore::MAX_PERMITS)));
        Arc::new(Self { broker, limits, auth, connections: AtomicUsize::new(0), handshakes })
    }

    /// What the session needs from outside at `now`.
    pub(super) fn env(&self, now: Timestamp) -> Env<'_> {
        Env { limits: &self.limits, now, budget: &self.broker }
    }
}

impl Budget for Broker {
    fn charge(&self, bytes: usize) -> bool {
        Self::charge(self, bytes)
    }

    fn release(&self, bytes: usize) {
        Self::release(self, bytes);
    }
}
