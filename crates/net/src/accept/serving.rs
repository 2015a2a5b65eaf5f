//! One socket's whole life as a future: the handshake, boxed since it is large and short, then the connection, then
//! what is left of it.
//!
//! There is one task per connection, so its size counts: with Tokio's own part it fits 256 bytes.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
};

use edge::door::ConnectionPermit;

use super::{
    handshake::{self, EstablishedClient},
    listener::IncomingSocket,
};
use crate::{
    NetShared,
    connection::{
        Connection,
        lingering::{LONGEST, Remains},
        relaying::Relaying,
    },
};

/// The future of one socket. Dropping it ends the connection as lost.
pub(crate) struct Serving {
    stage: ServingStage,
    _load: ShardLoad,
}

/// A client and its place.
type AdmittedConnection = (EstablishedClient, ConnectionPermit);

enum ServingStage {
    Handshake(Pin<Box<dyn Future<Output = Option<AdmittedConnection>> + Send>>),
    Connected(Connection, ConnectionPermit),
    /// Its session is at another gateway.
    Relaying(Box<Relaying>, ConnectionPermit),
    /// In the same place.
    Lingering(
        Pin<Box<dyn Future<Output = ()> + Send>>,
        #[expect(dead_code, reason = "held for its drop")] ConnectionPermit,
    ),
    Over,
}

impl Serving {
    pub(crate) fn new(incoming: IncomingSocket, load: ShardLoad, shared: &Arc<NetShared>) -> Self {
        let handshake = handshake::run(incoming, Arc::clone(shared));
        Self { stage: ServingStage::Handshake(Box::pin(handshake)), _load: load }
    }
}

impl Future for Serving {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if let ServingStage::Handshake(handshake) = &mut self.stage {
            let Some((client, permit)) = ready!(handshake.as_mut().poll(cx)) else {
                return Poll::Ready(());
            };
            self.stage = match client {
                EstablishedClient::Here(connection) => ServingStage::Connected(connection, permit),
                EstablishedClient::Elsewhere(relaying) => ServingStage::Relaying(relaying, permit),
            };
        }
        if let ServingStage::Connected(connection, _) = &mut self.stage {
            let end = ready!(connection.poll(cx));
            connection.finish(end);
            let remains = connection.remains(end);
            self.stage.end(remains);
        }
        if let ServingStage::Relaying(relaying, _) = &mut self.stage {
            let remains = ready!(Pin::new(relaying).poll(cx));
            self.stage.end(remains);
        }
        if let ServingStage::Lingering(lingering, _) = &mut self.stage {
            ready!(lingering.as_mut().poll(cx));
        }
        Poll::Ready(())
    }
}

impl ServingStage {
    /// The connection has ended, and only its place stays, with its remains.
    fn end(&mut self, remains: Option<Remains>) {
        let before = std::mem::replace(self, Self::Over);
        if let (Self::Connected(_, permit) | Self::Relaying(_, permit), Some(remains)) = (before, remains) {
            *self = Self::Lingering(Box::pin(remains.linger(LONGEST)), permit);
        }
    }
}

/// One socket more that a shard serves, until it is dropped.
pub(crate) struct ShardLoad(Arc<AtomicUsize>);

impl ShardLoad {
    pub(crate) fn on(shard: &Arc<AtomicUsize>) -> Self {
        shard.fetch_add(1, Relaxed);
        Self(Arc::clone(shard))
    }
}

impl Drop for ShardLoad {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handshake_is_not_large() {
        fn size<A, B, F: Future>(_: impl Fn(A, B) -> F) -> usize {
            size_of::<F>()
        }
        assert!(size(handshake::run) <= 1024, "{}", size(handshake::run));
    }

    #[test]
    fn a_connections_task_is_small() {
        // Tokio adds about 100 bytes and rounds up to 128.
        assert!(size_of::<Serving>() <= 144, "{}", size_of::<Serving>());
    }
}
