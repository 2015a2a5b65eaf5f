//! Other gateways of the cluster: devices that they relay here, and calls that they pass on.

use std::{future::Future, net::TcpListener, pin::Pin, sync::Arc};

use config::Config;
use edge::tls::TlsHandle;
use grpc::LocalService;
use links::{
    LinkAnswer, LinkHandler, LinkListener, LinkRequest, Members, PassedCaller, RelayStream, RelayedDevice,
};
use net::{NetShared, RelayDoor, ShardHandle};
use tokio::sync::watch;

use super::StartError;

/// The socket of links, and the settings of its TLS.
pub(super) struct BoundLinks {
    pub(super) socket: TcpListener,
    pub(super) tls: TlsHandle,
}

/// Takes what other gateways bring, until this one drains.
struct LinkService {
    door: RelayDoor,
    api: LocalService,
    drain: watch::Receiver<bool>,
}

impl LinkHandler for LinkService {
    fn relay(&self, device: RelayedDevice, stream: RelayStream) -> bool {
        self.door.is_open() && self.door.enter(device, stream)
    }

    fn call(
        &self,
        caller: PassedCaller,
        request: LinkRequest,
    ) -> Option<Pin<Box<dyn Future<Output = LinkAnswer> + Send>>> {
        if *self.drain.borrow() {
            return None;
        }
        let answer = self.api.passed(&caller, request)?;
        Some(Box::pin(async move {
            match answer.await {
                Ok(answer) => answer,
                Err(never) => match never {},
            }
        }))
    }
}

/// Serves other gateways; dropping the future ends their links.
pub(super) fn serve(
    BoundLinks { socket, tls }: BoundLinks,
    config: &Config,
    members: Arc<dyn Members>,
    (shared, shards): (&Arc<NetShared>, &[ShardHandle]),
    api: LocalService,
    drain: watch::Receiver<bool>,
) -> Result<impl Future<Output = ()> + use<>, StartError> {
    let listeners = config.effective_listeners().into_iter();
    let listeners = listeners.map(|(_, listener)| (listener.name, listener.durability.map(Into::into)));
    let door = RelayDoor::new(shared, shards, listeners);
    let handler = Arc::new(LinkService { door, api, drain });
    Ok(LinkListener::new(socket, tls, members, handler)?.run())
}
