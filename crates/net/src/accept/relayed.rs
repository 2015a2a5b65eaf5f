//! Clients that another gateway has admitted and relays: they come over a link in place of a listener's socket.

use std::{collections::HashMap, sync::Arc};

use edge::door::{ConnectionPermit, Door, NotNow, PendingConnection};
use gateway_core::Durability;
use links::{RelayStream, RelayedDevice};
use tokio::{sync::Semaphore, time::timeout};

use super::listener::{Arrived, IncomingSocket, ListenerContext, count_refusal};
use crate::{NetShared, shard::ShardHandle};

/// Clients that may wait for a handshake's place, as a multiple of the places.
const WAITING: usize = 16;

/// A relayed client that has not sent its CONNECT.
pub(crate) struct RelayedArrival {
    pub(crate) device: RelayedDevice,
    pub(crate) stream: RelayStream,
}

/// Takes relayed clients in, which count among all connections as those of listeners do.
pub struct RelayDoor {
    shared: Arc<NetShared>,
    shards: Vec<ShardHandle>,
    door: Arc<Door>,
    waiting: Arc<Semaphore>,
    /// By name.
    listeners: HashMap<String, Arc<ListenerContext>>,
}

impl RelayDoor {
    /// A door to these shards. `listeners` are those of this gateway, with the promises of their acknowledgements: a client of a
    /// listener that is not among them is refused.
    pub fn new(
        shared: &Arc<NetShared>,
        shards: &[ShardHandle],
        listeners: impl IntoIterator<Item = (String, Option<Durability>)>,
    ) -> Self {
        let bounds = ListenerContext::plain(String::new(), None).bounds(&shared.limits);
        let context = |(name, durability): (String, _)| {
            (name.clone(), Arc::new(ListenerContext::plain(name, durability)))
        };
        Self {
            shared: Arc::clone(shared),
            shards: shards.to_vec(),
            door: Door::new(bounds, &shared.connection_limit),
            waiting: Arc::new(Semaphore::new(
                shared.limits.max_handshakes.saturating_mul(WAITING).min(shared.limits.max_connections),
            )),
            listeners: listeners.into_iter().map(context).collect(),
        }
    }

    /// Takes a client in, which may wait for a handshake's place as those of listeners do. False if too many wait, or there is no listener
    /// as that from which it came. In a Tokio runtime.
    pub fn enter(&self, device: RelayedDevice, stream: RelayStream) -> bool {
        let (Some(peer), Some(listener)) = (device.peer(), self.listeners.get(&device.listener)) else {
            gateway_core::warn_limited!(
                listener = device.listener,
                "a relayed client is of no listener here"
            );
            return false;
        };
        let Ok(waiting) = Arc::clone(&self.waiting).try_acquire_owned() else { return false };
        let Some(shard) = self.shards.iter().min_by_key(|shard| shard.load()).cloned() else { return false };
        let (door, listener) = (Arc::clone(&self.door), Arc::clone(listener));
        let patience = self.shared.limits.connect_timeout.0;
        tokio::spawn(async move {
            let Ok(Some((permit, pending))) = timeout(patience, place(&door)).await else { return };
            drop(waiting);
            pending.spoke();
            let stream = Arrived::Relayed(Box::new(RelayedArrival { device, stream }));
            shard.send(IncomingSocket { stream, peer, listener, permit, pending }).await;
        });
        true
    }

    /// Returns whether clients may still connect.
    pub fn is_open(&self) -> bool {
        !self.shared.is_shut()
    }
}

/// A place behind the door, once there is one; `None` if there will be none.
async fn place(door: &Arc<Door>) -> Option<(ConnectionPermit, PendingConnection)> {
    loop {
        match door.enter(None) {
            Ok(places) => return Some(places),
            Err(NotNow::Refused(refusal)) => {
                count_refusal(refusal);
                return None;
            }
            Err(NotNow::Wait) => door.changed().await,
        }
    }
}
