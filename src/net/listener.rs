//! Listening sockets: bind, accept, hand over to the shard with the fewest connections.

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, atomic::AtomicUsize},
    time::Duration,
};

use arc_swap::ArcSwap;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::{net::TcpListener, sync::watch};
use tracing::{debug, warn};

use super::{
    ShardHandle, Shared,
    serving::{Full, Seat},
    shard::Incoming,
};
use crate::telemetry::count;

const BACKLOG: i32 = 4096;

/// What the connections of one listener need to know.
pub(super) struct Listener {
    pub(super) name: Arc<String>,
    pub(super) tls: Option<Arc<ArcSwap<rustls::ServerConfig>>>,
    /// Path of the WebSocket, if it is one.
    pub(super) websocket: Option<String>,
    pub(super) proxy_protocol: bool,
    pub(super) max_connections: usize,
    pub(super) connections: AtomicUsize,
}

/// A listener that has its socket.
pub struct BoundListener {
    socket: std::net::TcpListener,
    address: SocketAddr,
    listener: Arc<Listener>,
}

impl BoundListener {
    /// Binds `address`. IPv6 sockets take IPv6 only, so that both families can be listed.
    ///
    /// # Errors
    /// Any error of the operating system.
    pub fn bind(name: &str, address: SocketAddr) -> io::Result<Self> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        if address.is_ipv6() {
            socket.set_only_v6(true)?;
        }
        socket.set_reuse_address(true)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        Self::from_std(name, socket.into())
    }

    /// Uses a socket that already listens.
    ///
    /// # Errors
    /// Any error of the operating system.
    pub fn from_std(name: &str, socket: std::net::TcpListener) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        let address = socket.local_addr()?;
        let listener = Arc::new(Listener {
            name: Arc::new(name.to_owned()),
            tls: None,
            websocket: None,
            proxy_protocol: false,
            max_connections: usize::MAX,
            connections: AtomicUsize::new(0),
        });
        Ok(Self { socket, address, listener })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
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

    /// Serves WebSocket at `path`.
    #[must_use]
    pub fn with_websocket(mut self, path: &str) -> Self {
        self.change(|listener| listener.websocket = Some(path.to_owned()));
        self
    }

    /// Expects a PROXY protocol header (v1 or v2) on each connection.
    #[must_use]
    pub fn with_proxy_protocol(mut self) -> Self {
        self.change(|listener| listener.proxy_protocol = true);
        self
    }

    /// Holds at most so many connections.
    #[must_use]
    pub fn with_max_connections(mut self, most: usize) -> Self {
        self.change(|listener| listener.max_connections = most);
        self
    }

    fn change(&mut self, change: impl FnOnce(&mut Listener)) {
        if let Some(listener) = Arc::get_mut(&mut self.listener) {
            change(listener);
        }
    }
}

/// Accepts until `shutdown` says so. Runs on the service runtime.
pub async fn accept_loop(
    bound: BoundListener,
    shared: Arc<Shared>,
    shards: Vec<ShardHandle>,
    mut shutdown: watch::Receiver<bool>,
) -> io::Result<()> {
    let socket = TcpListener::from_std(bound.socket)?;
    let listener = bound.listener;
    let mut pace = Pace::new(shared.limits.accept_rate);
    loop {
        let permit = tokio::select! {
            permit = Arc::clone(&shared.handshakes).acquire_owned() => permit,
            _ = shutdown.wait_for(|stop| *stop) => return Ok(()),
        };
        let Ok(permit) = permit else { return Ok(()) };
        pace.wait().await;
        let accepted = tokio::select! {
            accepted = socket.accept() => accepted,
            _ = shutdown.wait_for(|stop| *stop) => return Ok(()),
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of file descriptors, or the peer is gone already: wait a little, never end.
                warn!(listener = &*listener.name, %error, "accept failed");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        count(|c| c.connections_accepted.add(1));
        let Some(shard) = shards.iter().min_by_key(|shard| shard.load()) else { return Ok(()) };
        let seat = match Seat::take(&shared, &listener, &shard.connections) {
            Ok(seat) => seat,
            Err(Full::All) => {
                count(|c| c.refused_connections_limit.add(1));
                continue;
            }
            Err(Full::Listener) => {
                count(|c| c.refused_listener_limit.add(1));
                continue;
            }
        };
        match prepare(stream) {
            Ok(stream) => shard.send(Incoming { stream, peer, seat, permit }).await,
            Err(error) => debug!(%peer, %error, "connection lost before its handshake"),
        }
    }
}

fn prepare(stream: tokio::net::TcpStream) -> io::Result<std::net::TcpStream> {
    stream.set_nodelay(true)?;
    stream.into_std()
}

/// Spaces accepts evenly when a rate is set.
struct Pace {
    interval: Option<tokio::time::Interval>,
}

impl Pace {
    fn new(rate: u32) -> Self {
        let interval = (rate > 0).then(|| {
            let mut interval = tokio::time::interval(Duration::from_secs(1) / rate);
            interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            interval
        });
        Self { interval }
    }

    async fn wait(&mut self) {
        if let Some(interval) = &mut self.interval {
            interval.tick().await;
        }
    }
}
