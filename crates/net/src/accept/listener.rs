//! Listening sockets with their settings, and the sockets that they accept.

use std::{io, net::SocketAddr, path::Path, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
#[cfg(feature = "quic")]
use config::Quic;
use config::{Address, FileMode, Limits};
use edge::door::{self, ConnectionPermit, DoorBounds, DoorRefusal, Origins, PendingConnection};
use gateway_core::{Durability, Peer};
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

use super::{
    relayed::RelayedArrival,
    unix::{self, SocketFile},
};
use crate::counters::count;
#[cfg(feature = "quic")]
use crate::quic::{self, FirstPacket};

const BACKLOG: i32 = 4096;
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

pub(super) enum Bound {
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
    pub(super) socket: Bound,
    address: Address,
    pub(super) listener: Arc<ListenerContext>,
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
        let listener = Arc::new(ListenerContext::plain(name.to_owned(), None));
        Self { socket, address, listener }
    }

    /// The socket once more, if it is one of TCP: connections that wait to be accepted stay for whoever has it.
    ///
    /// # Errors
    /// Any error of the operating system.
    pub fn tcp_socket(&self) -> io::Result<Option<std::net::TcpListener>> {
        match &self.socket {
            Bound::Tcp(socket) => socket.try_clone().map(Some),
            _ => Ok(None),
        }
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

/// Connection that a listener accepted.
pub(crate) enum Arrived {
    /// A socket, of TCP or of the Unix family.
    Stream(std::net::TcpStream),
    #[cfg(feature = "quic")]
    Quic(Box<FirstPacket>),
    /// A client that another gateway has admitted.
    Relayed(Box<RelayedArrival>),
}

/// An accepted socket on its way to its shard.
pub(crate) struct IncomingSocket {
    pub(crate) stream: Arrived,
    pub(crate) peer: Peer,
    pub(crate) listener: Arc<ListenerContext>,
    pub(crate) permit: ConnectionPermit,
    pub(crate) pending: PendingConnection,
}

impl ListenerContext {
    /// A listener without layers or bounds.
    pub(super) fn plain(name: String, durability: Option<Durability>) -> Self {
        Self {
            name: Arc::new(name),
            tls: None,
            websocket: None,
            proxy_protocol: false,
            max_connections: usize::MAX,
            durability,
        }
    }

    pub(super) fn bounds(&self, limits: &Limits) -> DoorBounds {
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
