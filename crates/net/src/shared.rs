//! State that all connections of one gateway share.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{
            AtomicUsize,
            Ordering::{AcqRel, Acquire},
        },
    },
    time::Duration,
};

use broker::{Broker, Event, Session, SessionCore};
use config::Limits;
use device::DeviceContext;
use edge::door::ConnectionLimit;
use tokio::sync::watch;

use links::RelayedDevice;

use super::{
    accept::unauthenticated::Unauthenticated,
    evict::ConnectionChecks,
    homes::{DeviceHomes, HomeWay},
};
use auth::{Authenticator, Authority, abuse::AbuseGuard};

/// Shared state of all listeners and shards.
pub struct NetShared {
    /// Routing.
    pub broker: Broker,
    /// Bounds.
    pub limits: Arc<Limits>,
    /// Decides who may connect.
    pub auth: Arc<dyn Authenticator>,
    /// Decides what devices may do; `None` if no rules are configured.
    pub authority: Option<Arc<Authority>>,
    /// Turns peers away before they are authenticated: bans and back-off after failed logins.
    pub guard: AbuseGuard,
    /// Response Information with `{client_id}` still in it; empty is none.
    pub response_information: String,
    /// The mark of this gateway, for bridges of other gateways.
    pub bridge_mark: String,
    /// Connections in all, handshakes included.
    pub connection_limit: Arc<ConnectionLimit>,
    /// Shared by the devices.
    pub(super) devices: Arc<DeviceContext>,
    /// Checks that decide whether a connection may stay.
    pub(super) connection_checks: ConnectionChecks,
    /// Homes of the devices, if this broker is not the one that has them all.
    homes: OnceLock<Arc<dyn DeviceHomes>>,
    /// Clients that have not authenticated.
    pub(super) unauthenticated: Arc<Unauthenticated>,
    /// CONNECTs between their acceptance and their connection, and [`SHUT`]: one number, so that nobody is accepted
    /// after the last look.
    door: AtomicUsize,
    /// True from when [`SHUT`] is set, for those who are inside and wait.
    shut: watch::Sender<bool>,
    /// True once the shards end, even if clients are still connected.
    ended: watch::Sender<bool>,
}

/// From now on no CONNECT is accepted.
const SHUT: usize = 1 << (usize::BITS - 1);

/// A CONNECT that is being accepted. It counts until it is dropped.
pub(super) struct Entering<'a>(&'a AtomicUsize);

impl Drop for Entering<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, AcqRel);
    }
}

impl NetShared {
    /// For a new gateway.
    pub fn new(
        broker: Broker,
        auth: Arc<dyn Authenticator>,
        authority: Option<Arc<Authority>>,
        guard: AbuseGuard,
        response_information: String,
        bridge_mark: String,
    ) -> Arc<Self> {
        let limits = Arc::clone(broker.limits());
        let connection_limit = ConnectionLimit::new(limits.max_connections);
        let door = AtomicUsize::new(0);
        let (shut, ended) = (watch::Sender::new(false), watch::Sender::new(false));
        let unauthenticated = Unauthenticated::new(broker.account());
        Arc::new(Self {
            devices: DeviceContext::new(broker.clone()),
            broker,
            limits,
            auth,
            authority,
            guard,
            response_information,
            bridge_mark,
            connection_limit,
            connection_checks: ConnectionChecks::default(),
            homes: OnceLock::new(),
            unauthenticated,
            door,
            shut,
            ended,
        })
    }

    /// From now on every device that is admitted goes to its home, which `homes` knows. Once.
    pub fn lead_to(&self, homes: Arc<dyn DeviceHomes>) {
        let _ = self.homes.set(homes);
    }

    /// The way of an admitted device, which another gateway may have relayed to a home of this one: it is never relayed again.
    pub(super) fn way(self: &Arc<Self>, client_id: &str, relayed: Option<&RelayedDevice>) -> HomeWay {
        match (self.homes.get(), relayed) {
            (None, _) => HomeWay::Here(Arc::clone(self)),
            (Some(homes), None) => homes.way(client_id),
            (Some(homes), Some(device)) => homes.here(device.home).map_or(HomeWay::Nobody, HomeWay::Here),
        }
    }

    /// Tells an event of a client that has no session to the watchers of its home, if that is here.
    pub(super) fn emit(&self, event: Event) {
        let way = self.homes.get().map(|homes| homes.way(event.client_id.as_str()));
        match way {
            Some(HomeWay::Here(home)) => home.broker.emit(event),
            _ => self.broker.emit(event),
        }
    }

    /// To be held from before a session is opened until it has its connection; `None` if the gateway is stopping.
    pub(super) fn enter(&self) -> Option<Entering<'_>> {
        let entering = Entering(&self.door);
        let before = self.door.fetch_add(1, AcqRel);
        (before & SHUT == 0).then_some(entering)
    }

    /// Returns whether no CONNECT is accepted any more.
    pub(super) fn is_shut(&self) -> bool {
        self.door.load(Acquire) & SHUT != 0
    }

    /// Waits until the gateway stops. Cancel safe.
    pub(super) async fn until_shut(&self) {
        // The sender is ours: it is not gone before.
        let _ = self.shut.subscribe().wait_for(|shut| *shut).await;
    }

    /// Refuses every CONNECT from now on, also those that wait for the disk, and waits until the other accepted ones
    /// have their connection, which takes neither a peer's help nor the disk's. No session comes online after that.
    /// Cancel safe.
    pub async fn refuse_connects(&self) {
        self.door.fetch_or(SHUT, AcqRel);
        self.shut.send_replace(true);
        while self.door.load(Acquire) != SHUT {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Ends the shards, and with them every connection and handshake that is left.
    pub fn end(&self) {
        self.ended.send_replace(true);
    }

    /// Waits for [`Self::end`]. Cancel safe.
    pub(super) async fn until_ended(&self) {
        // The sender is ours: it is not gone before.
        let _ = self.ended.subscribe().wait_for(|ended| *ended).await;
    }

    /// Builds session objects, for the broker to restore sessions of an earlier process.
    pub fn session_maker(&self) -> impl Fn(SessionCore) -> Arc<dyn Session> + use<> {
        device::session_maker(&self.devices)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_util::shared;

    /// In virtual time.
    #[tokio::test(start_paused = true)]
    async fn a_stop_waits_for_who_is_being_accepted_and_lets_nobody_in_after() {
        let shared = shared(Limits::default());
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
