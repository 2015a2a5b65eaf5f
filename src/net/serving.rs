//! One socket's whole life as a future: the handshake, boxed since it is large and short, then the connection.
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

use super::{Shared, connection::Connection, handshake, listener::Listener, shard::Incoming};

/// The future of one socket. Dropping it ends the connection as lost.
pub(super) struct Serving {
    stage: Stage,
    _seat: Seat,
}

enum Stage {
    Handshake(Pin<Box<dyn Future<Output = Option<Connection>> + Send>>),
    Connected(Connection),
}

impl Serving {
    pub(super) fn new(incoming: Incoming, shared: &Arc<Shared>) -> Self {
        let Incoming { stream, peer, seat, permit } = incoming;
        let handshake = handshake::run(stream, peer, Arc::clone(&seat.listener), permit, Arc::clone(shared));
        Self { stage: Stage::Handshake(Box::pin(handshake)), _seat: seat }
    }
}

impl Future for Serving {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if let Stage::Handshake(handshake) = &mut self.stage {
            let Some(connection) = ready!(handshake.as_mut().poll(cx)) else { return Poll::Ready(()) };
            self.stage = Stage::Connected(connection);
        }
        if let Stage::Connected(connection) = &mut self.stage {
            let end = ready!(connection.poll(cx));
            connection.finish(end);
        }
        Poll::Ready(())
    }
}

/// A connection's place among all, those of its listener and those of its shard; given back on drop.
pub(super) struct Seat {
    shared: Arc<Shared>,
    listener: Arc<Listener>,
    shard: Arc<AtomicUsize>,
}

/// Which limit leaves no seat.
pub(super) enum Full {
    All,
    Listener,
}

impl Seat {
    /// Takes a seat within `max_connections` of the gateway and of the listener.
    pub(super) fn take(
        shared: &Arc<Shared>,
        listener: &Arc<Listener>,
        shard: &Arc<AtomicUsize>,
    ) -> Result<Self, Full> {
        if !enter(&shared.connections, shared.limits.max_connections) {
            return Err(Full::All);
        }
        if !enter(&listener.connections, listener.max_connections) {
            shared.connections.fetch_sub(1, Relaxed);
            return Err(Full::Listener);
        }
        shard.fetch_add(1, Relaxed);
        Ok(Self { shared: Arc::clone(shared), listener: Arc::clone(listener), shard: Arc::clone(shard) })
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.shared.connections.fetch_sub(1, Relaxed);
        self.listener.connections.fetch_sub(1, Relaxed);
        self.shard.fetch_sub(1, Relaxed);
    }
}

fn enter(taken: &AtomicUsize, most: usize) -> bool {
    let entered = taken.fetch_add(1, Relaxed) < most;
    if !entered {
        taken.fetch_sub(1, Relaxed);
    }
    entered
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handshake_is_not_large() {
        fn size<A, B, C, D, E, F: Future>(_: impl Fn(A, B, C, D, E) -> F) -> usize {
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
