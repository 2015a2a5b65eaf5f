//! Listening sockets: bind, accept, hand over to the shard with the fewest connections.

use std::{future::Future, io, net::SocketAddr, path::Path, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
#[cfg(feature = "quic")]
use config::Quic;
use config::{Address, FileMode, Limits};
use edge::{
    door::{self, AcceptQueue, Door, DoorBounds, DoorRefusal, Origins},
    tls::TlsHandle,
};
use gateway_core::{Durability, Peer, info_of_peer, log_limits::LineKind, metrics::count, warn_limited};
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::{
    net::{TcpListener, UnixListener},
    sync::watch,
};
use tracing::debug;

use super::{
    barred,
    unix::{self, SocketFile},
};
#[cfg(feature = "quic")]
use crate::quic;
use crate::{
    NetShared, ShardHandle,
    shard::{Arrived, IncomingSocket},
};

const BACKLOG: i32 = 4096;
/// Sockets that may wait for a handshake's place, as a multiple of the places.
const LOBBY: usize = 16;
/// Probes without an answer after which a silent peer is gone.
const PROBES: u32 = 4;
/// The part of `connect_timeout` after which a silent handshake leaves for one who waits.
const PATIENCE: u32 = 10;

/// Settings and state that the connections of one listener need.
pub(crate) struct ListenerContext {
    pub name: Arc<String>,
    pub tls: Option<Arc<ArcSwap<rustls::ServerConfig>>>,
    /// Path and origins by which a WebSocket is opened, if the listener speaks WebSocket.
    pub websocket: Option<WebSocketEntry>,
    pub proxy_protocol: bool,
    max_connections: usize,
    /// Promise of the acknowledgements of its clients' messages, unless a rule says otherwise.
    pub durability: Option<Durability>,
}

/// Requests that open a WebSocket.
pub(crate) struct WebSocketEntry {
    pub path: String,
    pub origins: Origins,
    /// On a loopback address: only requests for this machine are meant for it.
    loopback: bool,
}

impl ListenerContext {
    /// Tells whether a request that names another host is refused: its name may have been pointed here, so that a page
    /// of that host seems to be one of this machine. Names of pages, or a proxy that speaks first, rule that out by
    /// themselves.
    pub(crate) fn is_for_this_machine(&self) -> bool {
        let lists_none = |entry: &WebSocketEntry| entry.loopback && entry.origins.0.is_empty();
        !self.proxy_protocol && self.websocket.as_ref().is_some_and(lists_none)
    }
}

enum Bound {
    Tcp(std::net::TcpListener),
    Unix(SocketFile, std::os::unix::net::UnixListener),
    #[cfg(feature = "quic")]
    Quic(std::net::UdpSocket, Quic),
}

/// Binds `address`; `[::]` takes connections over IPv4 too, unless the listener is for IPv6 only. The system's default
/// does not matter, so that an address means the same for every listener.
///
/// # Errors
/// Any error of the operating system.
pub fn listen(address: SocketAddr, ipv6_only: bool) -> io::Result<std::net::TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    if address.is_ipv6() {
        socket.set_only_v6(ipv6_only)?;
    }
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// A listener that has its socket.
pub struct BoundListener {
    socket: Bound,
    address: Address,
    listener: Arc<ListenerContext>,
}

/// Has the system probe the peers of all sockets accepted from now on that have been silent for `idle`; zero is never.
/// Accepted sockets inherit it from the listening one, so that no connection costs a call.
///
/// # Errors
/// Any error of the operating system.
pub fn probe_silent_peers(socket: &std::net::TcpListener, idle: Duration) -> io::Result<()> {
    if idle.is_zero() {
        return SockRef::from(socket).set_keepalive(false);
    }
    let interval = (idle / 4).clamp(Duration::from_secs(1), Duration::from_secs(75));
    let probes = TcpKeepalive::new().with_time(idle).with_interval(interval).with_retries(PROBES);
    SockRef::from(socket).set_tcp_keepalive(&probes)
}

impl BoundListener {
    /// Binds as [`listen`] does.
    ///
    /// # Errors
    /// Any error of the operating system.
    pub fn bind(name: &str, address: SocketAddr, ipv6_only: bool) -> io::Result<Self> {
        Self::from_std(name, listen(address, ipv6_only)?)
    }

    /// As [`probe_silent_peers`], where this is a socket of TCP.
    ///
    /// # Errors
    /// Any error of the operating system.
    pub fn with_tcp_keepalive(self, idle: Duration) -> io::Result<Self> {
        if let Bound::Tcp(socket) = &self.socket {
            probe_silent_peers(socket, idle)?;
        }
        Ok(self)
    }

    /// Uses a socket that already listens.
    ///
    /// # Errors
    /// Any error of the operating system.
    pub fn from_std(name: &str, socket: std::net::TcpListener) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        let address = Address::Ip(socket.local_addr()?);
        Ok(Self::new(name, Bound::Tcp(socket), address))
    }

    /// Binds a Unix socket at `path`. Its file is removed when the listener ends; one that a process without the
    /// chance to do so left behind is replaced.
    ///
    /// # Errors
    /// `AddrInUse` if somebody listens there or the file is not a socket, and any error of the operating system.
    pub fn bind_unix(name: &str, path: &Path, mode: FileMode) -> io::Result<Self> {
        let (file, socket) = unix::bind(path, mode.0, BACKLOG)?;
        Ok(Self::new(name, Bound::Unix(file, socket), Address::Unix(path.to_owned())))
    }

    /// Binds a socket for QUIC as [`listen`] does one of TCP; [`Self::with_tls`] has to follow.
    ///
    /// # Errors
    /// Any error of the operating system.
    #[cfg(feature = "quic")]
    pub fn bind_quic(name: &str, address: SocketAddr, ipv6_only: bool, settings: Quic) -> io::Result<Self> {
        let socket = quic::bind(address, ipv6_only)?;
        let address = Address::Ip(socket.local_addr()?);
        Ok(Self::new(name, Bound::Quic(socket, settings), address))
    }

    fn new(name: &str, socket: Bound, address: Address) -> Self {
        let listener = Arc::new(ListenerContext {
            name: Arc::new(name.to_owned()),
            tls: None,
            websocket: None,
            proxy_protocol: false,
            max_connections: usize::MAX,
            durability: None,
        });
        Self { socket, address, listener }
    }

    /// Returns the address on which the listener listens.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.listener.name
    }

    /// Serves TLS with a configuration that may be swapped at any time.
    #[must_use]
    pub fn with_tls(mut self, tls: Arc<ArcSwap<rustls::ServerConfig>>) -> Self {
        self.change(|listener| listener.tls = Some(tls));
        self
    }

    /// Serves WebSocket at `path`, to pages of `origins`: see [`Origins`]. On a loopback address it is for this machine only,
    /// unless `origins` names pages or a proxy tells of its clients.
    #[must_use]
    pub fn with_websocket(mut self, path: &str, origins: Vec<String>) -> Self {
        let loopback = match &self.socket {
            Bound::Tcp(socket) => socket.local_addr().is_ok_and(|at| at.ip().to_canonical().is_loopback()),
            _ => false,
        };
        let entry = WebSocketEntry { path: path.to_owned(), origins: Origins(origins), loopback };
        self.change(|listener| listener.websocket = Some(entry));
        self
    }

    /// Expects a PROXY protocol header (v1 or v2) on each connection.
    #[must_use]
    pub fn with_proxy_protocol(mut self) -> Self {
        self.change(|listener| listener.proxy_protocol = true);
        self
    }

    /// Promises this to its clients, unless a rule says otherwise.
    #[must_use]
    pub fn with_durability(mut self, durability: Durability) -> Self {
        self.change(|listener| listener.durability = Some(durability));
        self
    }

    /// Refuses connections beyond `most`.
    #[must_use]
    pub fn with_max_connections(mut self, most: usize) -> Self {
        self.change(|listener| listener.max_connections = most);
        self
    }

    fn change(&mut self, change: impl FnOnce(&mut ListenerContext)) {
        if let Some(listener) = Arc::get_mut(&mut self.listener) {
            change(listener);
        }
    }
}

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
    let waiting = shared.limits.max_handshakes.saturating_mul(LOBBY);
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

impl ListenerContext {
    fn bounds(&self, limits: &Limits) -> DoorBounds {
        let unless_zero = |most: usize| if most == 0 { usize::MAX } else { most };
        DoorBounds {
            connections: self.max_connections,
            connections_per_address: unless_zero(limits.max_connections_per_address),
            handshakes: limits.max_handshakes,
            handshakes_per_address: unless_zero(limits.max_handshakes_per_address),
            rate_per_address: limits.accept_rate_per_address,
            patience: limits.connect_timeout.0 / PATIENCE,
        }
    }

    /// Returns the address that limits per address count. A proxy's clients are told apart once it has named them.
    pub(super) fn address_of(&self, peer: Peer) -> Option<door::SourceAddress> {
        (peer != Peer::UNIX && !self.proxy_protocol).then(|| SocketAddr::from(peer).into())
    }
}

/// Counts one who is not let in, and tells.
fn refused(refusal: DoorRefusal, peer: Peer, listener: &ListenerContext) {
    count_refusal(refusal);
    let listener = listener.name.as_str();
    info_of_peer!(LineKind::Door, peer.ip(), %peer, listener, reason = refusal.words(), "connection refused");
}

/// Counts one who is not let in.
pub(crate) fn count_refusal(refusal: DoorRefusal) {
    count(|c| match refusal {
        DoorRefusal::ConnectionLimit => c.refused_connections_limit.add(1),
        DoorRefusal::Connections => c.refused_listener_limit.add(1),
        DoorRefusal::AddressConnections => c.refused_address_limit.add(1),
        DoorRefusal::AddressHandshakes => c.refused_address_handshakes.add(1),
        DoorRefusal::Rate => c.refused_address_rate.add(1),
        DoorRefusal::Banned => c.refused_address_banned.add(1),
        DoorRefusal::FailedLogins => c.refused_failed_logins.add(1),
    });
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
