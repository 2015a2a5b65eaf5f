//! Connections for tonic: accept, TLS handshake, bounds. A slow or silent peer never keeps others waiting.

use std::{io, net::SocketAddr, pin::pin, sync::Arc};

use arc_swap::ArcSwap;
use broker::Account;
use edge::{
    door::{Arrival, ConnectionPermit, Door, DoorBounds, DoorListener, DoorRefusal, PendingConnection},
    tls::{self, Revocations},
};
use gateway_core::{info_of_peer, log_limits::LineKind};
use parking_lot::Mutex;
use rustls::ServerConfig;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::mpsc,
    time::{Instant, timeout_at},
};
use tokio_rustls::TlsAcceptor;

use super::{
    caller_memory::{CallerMemory, MemoryReservation},
    connection::{GrpcSocket, MeteredSocket, ServedConnection, say_left, say_refused, say_timed_out},
    connection_calls::ConnectionCalls,
    unauthenticated::UnauthenticatedMemory,
};
use crate::bounds::{GrpcConfig, windows};
use crate::counters::count;
use auth::backends::CertificateNames;

/// Sockets that may wait for a handshake's place, as a multiple of the places.
const WAITING: usize = 16;
/// The fraction of the handshake timeout, as its divisor, after which a silent or unauthenticated peer leaves for one who waits.
/// Shorter than that of devices: there are as many places for handshakes, and far fewer for connections.
const PATIENCE: u32 = 20;
/// Memory that an idle connection is charged, and what TLS has besides. As many as there may be by default fit in the share of
/// unauthenticated ones at a budget of 192 MiB: else they would push each other out, without patience and for ever.
const CONNECTION: usize = 16 << 10;
const TLS: usize = 4 << 10;

/// Server certificates and settings, replaced as a whole when certificates are reloaded.
pub(crate) type SharedTls = Arc<ArcSwap<ServerConfig>>;

/// Settings and revocations for TLS.
#[derive(Clone)]
pub struct GrpcTls {
    /// For handshakes.
    pub settings: SharedTls,
    /// Certificates whose connections are closed.
    pub revocations: Option<Arc<Revocations>>,
}

/// The places of the server.
pub(crate) fn door(config: &GrpcConfig) -> Arc<Door> {
    Door::alone(DoorBounds {
        connections: config.max_connections,
        connections_per_address: config.max_connections_per_address,
        handshakes: config.max_handshakes,
        patience: config.handshake_timeout / PATIENCE,
        ..DoorBounds::default()
    })
}

/// Accepts until the receiver is gone.
pub(crate) async fn accept(
    listener: TcpListener,
    tls: Option<GrpcTls>,
    config: GrpcConfig,
    account: Arc<Account>,
    door: Arc<Door>,
    ready: mpsc::Sender<io::Result<ServedConnection>>,
) {
    let unauthenticated = UnauthenticatedMemory::new(&account);
    let revocations = tls.as_ref().and_then(|tls| tls.revocations.clone());
    let tls = tls.map(|tls| Arc::new(Http2Tls { shared: tls.settings, last: Mutex::new(None) }));
    let waiting = config.max_handshakes.saturating_mul(WAITING).min(config.max_connections);
    let mut arrivals = DoorListener::new(listener, door, waiting);
    loop {
        let arrival = tokio::select! {
            arrival = arrivals.next(|_| ()) => arrival,
            () = ready.closed() => return,
        };
        let (socket, peer, permit, pending) = match arrival {
            Arrival::Entered(socket, peer, permit, pending) => (socket, peer, permit, pending),
            Arrival::Refused(peer, refusal) => {
                refuse(peer, refusal);
                continue;
            }
            Arrival::TurnedAway => {
                count(|c| c.grpc_refused_waiting.add(1));
                continue;
            }
            Arrival::Failed(error) => {
                gateway_core::warn_limited!(%error, "grpc accept failed");
                continue;
            }
        };
        let tls = tls.as_ref().map(|tls| TlsAcceptor::from(tls.current()));
        let window = windows(&config, &account).0 as usize;
        let caller_memory = CallerMemory::unauthenticated(Arc::clone(&account), &unauthenticated);
        let (ready, revocations) = (ready.clone(), revocations.clone());
        tokio::spawn(async move {
            let deadline = Instant::now() + config.handshake_timeout;
            let opened = open(socket, peer, tls, (permit, pending), caller_memory, (deadline, window)).await;
            if let Some(mut connection) = opened {
                connection.heed(revocations);
                let _ = ready.send(Ok(connection)).await;
            }
        });
    }
}

fn refuse(peer: SocketAddr, refusal: DoorRefusal) {
    say_refused(peer, refusal.words());
    count(|c| match refusal {
        DoorRefusal::AddressConnections => c.grpc_refused_address_limit.add(1),
        _ => c.grpc_refused_limit.add(1),
    });
}

/// Brings TLS up; `None` if that fails, takes too long or another needs the place or the memory.
async fn open(
    socket: TcpStream,
    peer: SocketAddr,
    tls: Option<TlsAcceptor>,
    (permit, pending): (ConnectionPermit, PendingConnection),
    caller_memory: Arc<CallerMemory>,
    (deadline, window): (Instant, usize),
) -> Option<ServedConnection> {
    if let Err(error) = socket.set_nodelay(true) {
        tracing::debug!(%peer, %error, "grpc connection lost");
        return None;
    }
    let mut own = caller_memory.open();
    if !own.set(if tls.is_some() { CONNECTION + TLS } else { CONNECTION }) {
        count(|c| c.grpc_refused_memory.add(1));
        say_refused(peer, "memory is short");
        return None;
    }
    let io = match tls {
        None => GrpcSocket::Plain(MeteredSocket::new(socket, None)),
        Some(acceptor) => handshake(socket, peer, acceptor, &pending, caller_memory.open(), deadline).await?,
    };
    let certificate = io.certificate().map(|der| CertificateNames::read(der));
    let connection_calls = Arc::new(ConnectionCalls::new(peer, certificate, (permit, pending), own, window));
    Some(ServedConnection::new(io, connection_calls, caller_memory, deadline))
}

/// Brings TLS up, with `received` charged for what comes meanwhile.
async fn handshake(
    socket: TcpStream,
    peer: SocketAddr,
    acceptor: TlsAcceptor,
    pending: &PendingConnection,
    received: MemoryReservation,
    deadline: Instant,
) -> Option<GrpcSocket> {
    let caller_memory = Arc::clone(received.caller_memory());
    let accepted = acceptor.accept(MeteredSocket::new(socket, Some(received)));
    let accepted = pin!(async {
        tokio::select! {
            biased;
            () = caller_memory.closed() => None,
            accepted = timeout_at(deadline, accepted) => Some(accepted),
        }
    });
    let ended = pending.attend(accepted).await;
    if let Some(Some(Ok(Ok(mut stream)))) = ended {
        edge::counters::count(|c| c.handshake_tls_ok.add(1));
        stream.get_mut().0.stop_metering();
        return Some(GrpcSocket::Tls(Box::new(stream)));
    }
    edge::counters::count(|c| c.handshake_tls_failed.add(1));
    match ended {
        Some(Some(Ok(result))) => {
            let (listener, reason) = ("grpc", result.err().map(|error| tls::io_in_words(&error)));
            let reason = reason.as_deref();
            info_of_peer!(LineKind::Handshake, peer.ip(), %peer, listener, reason, "TLS handshake failed");
        }
        Some(Some(Err(_))) => say_timed_out(peer),
        Some(None) => {
            count(|c| c.grpc_refused_memory.add(1));
            say_refused(peer, "memory is short");
        }
        None => say_left(peer),
    }
    None
}

/// The TLS settings in force, always with ALPN `h2`.
struct Http2Tls {
    shared: SharedTls,
    /// The settings last seen, and what was made of them.
    last: Mutex<Option<(Arc<ServerConfig>, Arc<ServerConfig>)>>,
}

impl Http2Tls {
    fn current(&self) -> Arc<ServerConfig> {
        let source = self.shared.load_full();
        let mut last = self.last.lock();
        if let Some((seen, made)) = &*last
            && Arc::ptr_eq(seen, &source)
        {
            return Arc::clone(made);
        }
        let made = if source.alpn_protocols == [b"h2"] {
            Arc::clone(&source)
        } else {
            let mut config = ServerConfig::clone(&source);
            config.alpn_protocols = vec![b"h2".to_vec()];
            Arc::new(config)
        };
        *last = Some((source, Arc::clone(&made)));
        made
    }
}
