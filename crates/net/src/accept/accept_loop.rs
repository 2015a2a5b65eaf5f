//! The loop that accepts: who is let in waits for a place among the handshakes, and goes to the shard with the fewest
//! connections.

use std::{future::Future, io, sync::Arc, time::Duration};

use edge::{
    door::{AcceptQueue, Door, DoorRefusal},
    tls::TlsHandle,
};
use gateway_core::{Peer, info_of_peer, log_limits::LineKind, warn_limited};
use tokio::{
    net::{TcpListener, UnixListener},
    sync::watch,
};
use tracing::debug;

use super::{
    barred,
    listener::{Arrived, Bound, BoundListener, IncomingSocket, ListenerContext, count_refusal},
    unix::{self, SocketFile},
};
#[cfg(feature = "quic")]
use crate::quic;
use crate::{NetShared, counters::count, shard::ShardHandle};

/// Sockets that may wait for a handshake's place, as a multiple of the places.
const WAITING: usize = 16;

/// Accepts until `shutdown` says so. Runs on the service runtime. A listener of QUIC then goes on until its connections have
/// ended, since all of them have its socket.
pub async fn accept_loop(
    bound: BoundListener,
    shared: Arc<NetShared>,
    shards: Vec<ShardHandle>,
    mut shutdown: watch::Receiver<bool>,
) -> io::Result<()> {
    let mut socket = Acceptor::new(bound.socket, bound.listener.tls.as_ref())?;
    let listener = bound.listener;
    let door = Door::new(listener.bounds(&shared.limits), &shared.connection_limit);
    let waiting = shared.limits.max_handshakes.saturating_mul(WAITING);
    let mut accept_queue = AcceptQueue::new(waiting.min(shared.limits.max_connections));
    let mut pace = AcceptRate::new(shared.limits.accept_rate);
    loop {
        let accepted = tokio::select! {
            accepted = pace.wait_for(socket.accept()) => Some(accepted),
            () = door.changed(), if !accept_queue.is_empty() => None,
            _ = shutdown.wait_for(|stop| *stop) => break,
        };
        match accepted {
            Some(Ok((stream, peer))) => {
                let Some(stream) = stream.unless_doubtful(|| !accept_queue.is_empty() || door.is_half_full())
                else {
                    continue;
                };
                count(|c| c.connections_accepted.add(1));
                let address = listener.address_of(peer).filter(|_| stream.has_proved_address());
                let barred = address.and_then(|_| barred::at_door(peer, &shared));
                match barred.map_or_else(|| door.arrive(address), Err) {
                    Ok(()) => {
                        let turned_away = accept_queue.push(address, (stream, peer));
                        count(|c| c.refused_waiting.add(turned_away.iter().count() as u64));
                    }
                    Err(refusal) => refused(refusal, peer, &listener),
                }
            }
            Some(Err(error)) => {
                // Out of file descriptors, or the peer is gone already: wait a little, never end.
                warn_limited!(listener = listener.name.as_str(), %error, "accept failed");
                door.shed();
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            None => {}
        }
        while let Some(((stream, peer), entered)) = accept_queue.next(|address| door.enter(address)) {
            let Some(shard) = shards.iter().min_by_key(|shard| shard.load()) else { return Ok(()) };
            let (permit, pending) = match entered {
                Ok(places) => places,
                Err(refusal) => {
                    refused(refusal, peer, &listener);
                    continue;
                }
            };
            match socket.prepare(stream) {
                Ok(stream) => {
                    let listener = Arc::clone(&listener);
                    shard.send(IncomingSocket { stream, peer, listener, permit, pending }).await;
                }
                Err(error) => {
                    debug!(%peer, listener = listener.name.as_str(), %error, "connection lost before its handshake");
                }
            }
        }
    }
    drop(accept_queue);
    socket.drain().await;
    Ok(())
}

/// Counts one who is not let in, and tells.
fn refused(refusal: DoorRefusal, peer: Peer, listener: &ListenerContext) {
    count_refusal(refusal);
    let listener = listener.name.as_str();
    info_of_peer!(LineKind::Door, peer.ip(), %peer, listener, reason = refusal.words(), "connection refused");
}

enum Acceptor {
    Tcp(TcpListener),
    /// The file is removed with the listener.
    Unix(#[expect(dead_code, reason = "held for its drop")] SocketFile, UnixListener),
    #[cfg(feature = "quic")]
    Quic(Box<quic::Entrance>),
}

enum AcceptedSocket {
    Tcp(tokio::net::TcpStream),
    Unix(tokio::net::UnixStream),
    #[cfg(feature = "quic")]
    Quic(Box<quinn::Incoming>),
}

impl Acceptor {
    fn new(bound: Bound, tls: Option<&TlsHandle>) -> io::Result<Self> {
        #[cfg(not(feature = "quic"))]
        let _ = tls;
        Ok(match bound {
            Bound::Tcp(socket) => Self::Tcp(TcpListener::from_std(socket)?),
            Bound::Unix(file, socket) => Self::Unix(file, UnixListener::from_std(socket)?),
            #[cfg(feature = "quic")]
            Bound::Quic(socket, settings) => {
                let tls = tls.ok_or_else(|| io::Error::other("QUIC without a certificate"))?;
                Self::Quic(Box::new(quic::Entrance::open(socket, Arc::clone(tls), settings)?))
            }
        })
    }

    /// Cancel safe, as the sockets' own accept is.
    async fn accept(&self) -> io::Result<(AcceptedSocket, Peer)> {
        match self {
            Self::Tcp(socket) => {
                let (stream, peer) = socket.accept().await?;
                Ok((AcceptedSocket::Tcp(stream), peer.into()))
            }
            Self::Unix(_, socket) => Ok((AcceptedSocket::Unix(socket.accept().await?.0), Peer::UNIX)),
            #[cfg(feature = "quic")]
            Self::Quic(endpoint) => {
                let (incoming, peer) = endpoint.accept().await?;
                Ok((AcceptedSocket::Quic(Box::new(incoming)), peer.into()))
            }
        }
    }

    /// The stream without its runtime: it belongs to another thread's from now on.
    fn prepare(&mut self, accepted: AcceptedSocket) -> io::Result<Arrived> {
        match accepted {
            AcceptedSocket::Tcp(stream) => {
                stream.set_nodelay(true)?;
                stream.into_std().map(Arrived::Stream)
            }
            AcceptedSocket::Unix(stream) => Ok(Arrived::Stream(unix::as_tcp(stream.into_std()?))),
            #[cfg(feature = "quic")]
            AcceptedSocket::Quic(incoming) => match self {
                Self::Quic(endpoint) => Ok(Arrived::Quic(Box::new(endpoint.take(*incoming)?))),
                _ => Err(io::ErrorKind::Unsupported.into()),
            },
        }
    }

    /// Waits for the last bytes of its connections, if they are sent by this socket.
    async fn drain(self) {
        #[cfg(feature = "quic")]
        if let Self::Quic(endpoint) = self {
            endpoint.drain().await;
        }
    }
}

impl AcceptedSocket {
    /// Returns whether the peer has shown that its packets come from the address they name.
    fn has_proved_address(&self) -> bool {
        match self {
            Self::Tcp(_) | Self::Unix(_) => true,
            #[cfg(feature = "quic")]
            Self::Quic(incoming) => incoming.remote_address_validated(),
        }
    }

    /// None if the peer was asked to come again with proof of its address, which is done while there are `many`.
    fn unless_doubtful(self, many: impl FnOnce() -> bool) -> Option<Self> {
        match self {
            #[cfg(feature = "quic")]
            Self::Quic(incoming) if !incoming.remote_address_validated() && many() => {
                count(|c| c.quic_retries.add(1));
                // A client that has already proved its address is not asked.
                let _ = incoming.retry();
                None
            }
            accepted => {
                let _ = many;
                Some(accepted)
            }
        }
    }
}

/// Spaces accepts evenly when a rate is set.
struct AcceptRate {
    interval: Option<tokio::time::Interval>,
}

impl AcceptRate {
    fn new(rate: u32) -> Self {
        let interval = (rate > 0).then(|| {
            let mut interval = tokio::time::interval(Duration::from_secs(1) / rate);
            interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            interval
        });
        Self { interval }
    }

    async fn wait_for<T>(&mut self, accepted: impl Future<Output = T>) -> T {
        if let Some(interval) = &mut self.interval {
            interval.tick().await;
        }
        accepted.await
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use super::*;

    /// In virtual time.
    #[tokio::test(start_paused = true)]
    async fn accepts_are_spaced_by_the_rate_and_none_is_refused() {
        let start = tokio::time::Instant::now();
        let mut pace = AcceptRate::new(5);
        for _ in 0..11 {
            pace.wait_for(ready(())).await;
        }
        assert_eq!(start.elapsed().as_millis(), 2_000, "11 accepts at 5 a second, the first at once");
        let start = tokio::time::Instant::now();
        let mut free = AcceptRate::new(0);
        for _ in 0..1_000 {
            free.wait_for(ready(())).await;
        }
        assert_eq!(start.elapsed(), Duration::ZERO, "no rate, no pause");
    }
}
