//! What every connection of one gateway shares.

use std::{
    sync::{
        Arc,
        atomic::{
            AtomicUsize,
            Ordering::{AcqRel, Acquire},
        },
    },
    time::Duration,
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
    pub connections: AtomicUsize,
    /// Handshakes that may be under way.
    pub handshakes: Arc<Semaphore>,
    /// CONNECTs between their acceptance and their connection, and [`SHUT`]: one number, so that nobody is accepted
    /// after the last look.
    door: AtomicUsize,
}

/// No CONNECT is accepted any more.
const SHUT: usize = 1 << (usize::BITS - 1);

/// A CONNECT that is being accepted. It counts until it is dropped.
pub(super) struct Entering<'a>(&'a AtomicUsize);

impl Drop for Entering<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, AcqRel);
    }
}

impl Shared {
    /// For a new gateway.
    pub fn new(broker: Broker, auth: Arc<dyn Authenticator>, response_information: String) -> Arc<Self> {
        let limits = Arc::clone(broker.limits());
        let handshakes = Arc::new(Semaphore::new(limits.max_handshakes.clamp(1, Semaphore::MAX_PERMITS)));
        let connections = AtomicUsize::new(0);
        let door = AtomicUsize::new(0);
        Arc::new(Self { broker, limits, auth, response_information, connections, handshakes, door })
    }

    /// To be held from before a session is opened until it has its connection; `None` if the gateway is stopping.
    pub(super) fn enter(&self) -> Option<Entering<'_>> {
        let entering = Entering(&self.door);
        let before = self.door.fetch_add(1, AcqRel);
        (before & SHUT == 0).then_some(entering)
    }

    /// Refuses every CONNECT from now on, and waits until those that were accepted have their connection, which takes
    /// no peer's help. The sessions that are online after that are all that there will be. Cancel safe.
    pub async fn refuse_connects(&self) {
        self.door.fetch_or(SHUT, AcqRel);
        while self.door.load(Acquire) != SHUT {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{auth::AllowAll, broker::BrokerConfig};

    /// In virtual time.
    #[tokio::test(start_paused = true)]
    async fn who_is_being_accepted_when_the_gateway_stops_is_waited_for_and_nobody_comes_after() {
        let broker = Broker::new(BrokerConfig {
            limits: Arc::default(),
            non_broker: false,
            namespace: String::new(),
            listener_strategies: Default::default(),
            latest: None,
        });
        let shared = Shared::new(broker, Arc::new(AllowAll), String::new());
        drop(shared.enter().expect("an open door"));
        let entering = shared.enter().expect("an open door");
        let long = Duration::from_millis(100);
        assert!(tokio::time::timeout(long, shared.refuse_connects()).await.is_err(), "one is on its way");
        assert!(shared.enter().is_none());
        drop(entering);
        assert!(tokio::time::timeout(long, shared.refuse_connects()).await.is_ok());
        assert!(shared.enter().is_none());
    }
}
