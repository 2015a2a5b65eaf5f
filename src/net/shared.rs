//! What every connection of one gateway shares.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

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
    /// Response Information with `{client_id}` still in it; empty is none.
    pub response_information: String,
    /// Connections in all, handshakes included.
    pub connections: Arc<AtomicUsize>,
    /// Handshakes that may be under way.
    pub handshakes: Arc<Semaphore>,
}

impl Shared {
    /// For a new gateway.
    pub fn new(broker: Broker, auth: Arc<dyn Authenticator>, response_information: String) -> Arc<Self> {
        let limits = Arc::clone(broker.limits());
        let handshakes = Arc::new(Semaphore::new(limits.max_handshakes.clamp(1, Semaphore::MAX_PERMITS)));
        Arc::new(Self { broker, limits, auth, response_information, connections: Arc::default(), handshakes })
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

/// Takes one place of `used` out of `most`; gives it back on drop.
pub(super) struct Place {
    owner: Arc<AtomicUsize>,
}

impl Place {
    pub(super) fn take(owner: &Arc<AtomicUsize>, most: usize) -> Option<Self> {
        if owner.fetch_add(1, Relaxed) >= most {
            owner.fetch_sub(1, Relaxed);
            return None;
        }
        Some(Self { owner: Arc::clone(owner) })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.owner.fetch_sub(1, Relaxed);
    }
}
