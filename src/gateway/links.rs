//! Other gateways of the cluster: devices that they relay here, and calls that they pass on.

use std::{future::Future, net::TcpListener, pin::Pin, sync::Arc};

use ::links::{
    LinkAnswer, LinkHandler, LinkListener, LinkRequest, Members, PassedCaller, RelayStream, RelayedDevice,
};
use edge::tls::TlsHandle;
use net::RelayDoor;
use tokio::sync::watch;

use super::{StartError, common::Common, doors::Doors, homes::Homes};

/// The socket of links, and the settings of its TLS.
pub(super) struct BoundLinks {
    pub(super) socket: TcpListener,
    pub(super) tls: TlsHandle,
}

/// Takes what other gateways bring for the homes that are served here, until this one drains.
struct LinkService {
    door: RelayDoor,
    homes: Arc<Homes>,
    drain: watch::Receiver<bool>,
}

impl LinkHandler for LinkService {
    fn relay(&self, device: RelayedDevice, stream: RelayStream) -> bool {
        let is_here = u16::try_from(device.home).is_ok_and(|home| self.homes.here(home).is_some());
        is_here && self.door.is_open() && self.door.enter(device, stream)
    }

    fn call(
        &self,
        home: u16,
        caller: PassedCaller,
        request: LinkRequest,
    ) -> Option<Pin<Box<dyn Future<Output = LinkAnswer> + Send>>> {
        if *self.drain.borrow() {
            return None;
        }
        let answer = self.homes.here(home)?.call(&caller, request)?;
        Some(Box::pin(async move { answer.await.unwrap_or_else(::links::not_here) }))
    }
}

/// Serves other gateways; dropping the future ends their links.
pub(super) fn serve(
    BoundLinks { socket, tls }: BoundLinks,
    common: &Common,
    doors: &Doors,
    members: Arc<dyn Members>,
    homes: Arc<Homes>,
    drain: watch::Receiver<bool>,
) -> Result<impl Future<Output = ()> + use<>, StartError> {
    let listeners = common.config.effective_listeners().into_iter();
    let listeners = listeners.map(|(_, listener)| (listener.name, listener.durability.map(Into::into)));
    let door = RelayDoor::new(&doors.shared, &doors.shards, listeners);
    let handler = Arc::new(LinkService { door, homes, drain });
    Ok(LinkListener::new(socket, tls, members, handler)?.run())
}
