//! MQTT over QUIC: one connection of QUIC with one bidirectional stream that the client opens, and on it plain MQTT.
//!
//! quinn has the protocol, and its tasks the packets, the encryption and the timers. The tasks run on the service
//! runtime, since a shard has no timers; a connection's own task stays on its shard and sees a stream of bytes
//! ([`Duplex`]) in the place of a socket. The client may do nothing beyond that: no second stream, no unidirectional
//! one, no datagrams, no 0-RTT.
//!
//! An address that has not proved itself (it may be forged) has no place in limits per address: it is named when the
//! handshake has shown that its owner answers, as that which a proxy tells. While handshakes are many it has to prove itself
//! first, by a Retry, for which nothing is kept. Until then it is sent at most three times what came from there
//! ([`amplification`]).

mod amplification;
mod duplex;

use std::{
    future::Future,
    io,
    net::{SocketAddr, UdpSocket},
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};

use broker::{Account, Charge, MemoryKind};
use config::Quic;
use edge::tls::TlsHandle;
use quinn::{
    AsyncTimer, AsyncUdpSocket, IdleTimeout, ServerConfig, TokioRuntime, TransportConfig, VarInt,
    crypto::rustls::QuicServerConfig,
};
use rustls::crypto::aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::{runtime::Handle, sync::Semaphore};

use self::amplification::{AmplificationLimit, LimitedSocket, ProvedAddress};
pub(crate) use self::duplex::Duplex;

/// Protocol that clients have to ask for by ALPN.
pub const ALPN: &[u8] = b"mqtt";
/// Bytes charged for a connection beside the data on the way, for quinn's state and rustls'.
const STATE: usize = 16 << 10;
/// Packets that wait for the listener to look at them; of others nothing is kept, and their clients send them again.
const MAX_INCOMING: usize = 1_024;
/// Bytes kept of the further packets of such a client, and of all such clients.
const INCOMING_BYTES: u64 = 8 << 10;
const ALL_INCOMING_BYTES: u64 = 2 << 20;
/// Packets come for all connections of a listener through one socket.
const SOCKET_BUFFER: usize = 2 << 20;
/// Connections at once whose last bytes are waited for.
const MOST_LINGERING: usize = 1_000;

/// Binds `address`; `[::]` takes packets over IPv4 too, unless it is for IPv6 only.
///
/// # Errors
/// Any error of the operating system.
pub(crate) fn bind(address: SocketAddr, ipv6_only: bool) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    if address.is_ipv6() {
        socket.set_only_v6(ipv6_only)?;
    }
    // The system gives what it allows.
    let _ = socket.set_recv_buffer_size(SOCKET_BUFFER);
    let _ = socket.set_send_buffer_size(SOCKET_BUFFER);
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}

/// A socket that QUIC connections come through.
pub(crate) struct Entrance {
    quinn: quinn::Endpoint,
    tls: TlsHandle,
    /// The newest certificates, and the QUIC settings made of them.
    current: (Arc<rustls::ServerConfig>, Arc<ServerConfig>),
    shared: Arc<EntranceShared>,
}

/// State that the connections of one entrance share.
struct EntranceShared {
    /// Runtime of their tasks.
    runtime: Handle,
    lingering: Arc<Semaphore>,
    limit: Arc<AmplificationLimit>,
    /// Bytes that each has of the memory account.
    cost: usize,
}

/// A client's first packet, with all that answering it takes.
pub(crate) struct FirstPacket {
    incoming: quinn::Incoming,
    config: Arc<ServerConfig>,
    shared: Arc<EntranceShared>,
}

impl Entrance {
    /// Serves QUIC on `socket`. Its tasks run in the current runtime.
    ///
    /// # Errors
    /// Any error of the operating system, or `tls` cannot be used for QUIC.
    pub(crate) fn open(socket: UdpSocket, tls: TlsHandle, settings: Quic) -> io::Result<Self> {
        let runtime = Handle::current();
        let loaded = tls.load_full();
        let mut config = ServerConfig::with_crypto(crypto(&loaded)?);
        config
            .transport_config(Arc::new(transport(settings)?))
            .migration(settings.migration)
            .max_incoming(MAX_INCOMING)
            .incoming_buffer_size(INCOMING_BYTES)
            .incoming_buffer_size_total(ALL_INCOMING_BYTES);
        let limit = Arc::default();
        let quinn = quinn::Endpoint::new(
            quinn::EndpointConfig::default(),
            Some(config.clone()),
            socket,
            Arc::new(OnHandle(runtime.clone(), Arc::clone(&limit))),
        )?;
        let shared = Arc::new(EntranceShared {
            runtime,
            lingering: Arc::new(Semaphore::new(MOST_LINGERING)),
            limit,
            cost: STATE + 2 * settings.window.0,
        });
        Ok(Self { quinn, tls, current: (loaded, Arc::new(config)), shared })
    }

    /// The next client that calls. Cancel safe.
    ///
    /// # Errors
    /// There will be none.
    pub(crate) async fn accept(&self) -> io::Result<(quinn::Incoming, SocketAddr)> {
        let incoming = self.quinn.accept().await.ok_or(io::ErrorKind::NotConnected)?;
        let peer = incoming.remote_address();
        Ok((incoming, peer))
    }

    /// With the newest certificates.
    ///
    /// # Errors
    /// The TLS settings cannot be used for QUIC.
    pub(crate) fn take(&mut self, incoming: quinn::Incoming) -> io::Result<FirstPacket> {
        let loaded = self.tls.load();
        if !Arc::ptr_eq(&loaded, &self.current.0) {
            let mut config = (*self.current.1).clone();
            config.crypto = crypto(&loaded)?;
            self.current = (Arc::clone(&loaded), Arc::new(config));
        }
        Ok(FirstPacket { incoming, config: Arc::clone(&self.current.1), shared: Arc::clone(&self.shared) })
    }

    /// Refuses calls from now on, and waits until the last packet of the last connection is sent. Cancel safe.
    pub(crate) async fn drain(self) {
        self.quinn.set_server_config(None);
        self.quinn.wait_idle().await;
    }
}

/// Error that left a call without a connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    /// The handshake, or what came before the stream.
    #[error(transparent)]
    Quic(#[from] quinn::ConnectionError),
    /// The memory account has no room.
    #[error("no memory for another QUIC connection")]
    Memory,
}

impl CallError {
    /// Returns whether the error only says that the peer left.
    pub(crate) fn is_farewell(&self) -> bool {
        use quinn::ConnectionError::{ApplicationClosed, LocallyClosed, Reset, TimedOut};
        matches!(self, Self::Quic(ApplicationClosed(_) | LocallyClosed | Reset | TimedOut))
    }
}

/// A connection whose client has proved that it is where its packets come from, and who it is, if it has a certificate.
pub(crate) struct Shaken {
    connection: quinn::Connection,
    shared: Arc<EntranceShared>,
    kept: KeptForConnection,
}

/// Holdings of a connection until its last packet.
struct KeptForConnection {
    _charge: Charge,
    _address: ProvedAddress,
}

impl FirstPacket {
    /// Returns whether the client has proved its address before.
    pub(crate) fn is_proved(&self) -> bool {
        self.incoming.remote_address_validated()
    }

    /// The handshake. Cancel safe: dropped, the connection is closed.
    ///
    /// # Errors
    /// See [`CallError`].
    pub(crate) async fn shake(self, account: &Arc<Account>) -> Result<Shaken, CallError> {
        let mut charge = Charge::new(account, MemoryKind::Quic);
        if !charge.set(self.shared.cost) {
            broker::counters::count(|c| c.memory_quic.add(1));
            return Err(CallError::Memory);
        }
        let connection = self.incoming.accept_with(self.config)?.await?;
        let address = self.shared.limit.prove(connection.remote_address());
        let kept = KeptForConnection { _charge: charge, _address: address };
        Ok(Shaken { connection, shared: self.shared, kept })
    }
}

impl Shaken {
    /// Waits for the client's stream. Cancel safe: dropped, the connection is closed.
    ///
    /// # Errors
    /// See [`CallError`].
    pub(crate) async fn stream(self) -> Result<Duplex, CallError> {
        let (send, recv) = self.connection.accept_bi().await?;
        Ok(Duplex::new(send, recv, self.connection, self.shared, self.kept))
    }
}

/// For QUIC: the settings of TLS with the suite of the first packets, whichever suites may come after them.
fn crypto(tls: &Arc<rustls::ServerConfig>) -> io::Result<Arc<QuicServerConfig>> {
    let suites = &tls.crypto_provider().cipher_suites;
    let first = TLS13_AES_128_GCM_SHA256.tls13().and_then(|suite| suite.quic_suite());
    let first = first.filter(|_| suites.iter().any(|suite| suite.tls13().is_some()));
    let first = first.ok_or_else(|| io::Error::other("QUIC needs a suite of TLS 1.3"))?;
    QuicServerConfig::with_initial(Arc::clone(tls), first).map(Arc::new).map_err(io::Error::other)
}

fn transport(settings: Quic) -> io::Result<TransportConfig> {
    let window = VarInt::try_from(settings.window.0 as u64).map_err(io::Error::other)?;
    let idle = settings.idle_timeout.0;
    let idle = (idle > Duration::ZERO).then(|| IdleTimeout::try_from(idle)).transpose();
    let mut transport = TransportConfig::default();
    transport
        .max_concurrent_bidi_streams(VarInt::from_u32(1))
        .max_concurrent_uni_streams(VarInt::from_u32(0))
        .datagram_receive_buffer_size(None)
        .stream_receive_window(window)
        .receive_window(window)
        .send_window(settings.window.0 as u64)
        // Its probes would go to addresses that are not proved, too, where connections may move.
        .mtu_discovery_config(None)
        .max_idle_timeout(idle.map_err(io::Error::other)?);
    Ok(transport)
}

/// Tokio with the tasks and timers of quinn in one runtime, whichever thread asks for them.
#[derive(Debug)]
struct OnHandle(Handle, Arc<AmplificationLimit>);

impl quinn::Runtime for OnHandle {
    fn new_timer(&self, at: Instant) -> Pin<Box<dyn AsyncTimer>> {
        let _entered = self.0.enter();
        TokioRuntime.new_timer(at)
    }

    fn spawn(&self, future: Pin<Box<dyn Future<Output = ()> + Send>>) {
        self.0.spawn(future);
    }

    fn wrap_udp_socket(&self, socket: UdpSocket) -> io::Result<Arc<dyn AsyncUdpSocket>> {
        let _entered = self.0.enter();
        let socket = TokioRuntime.wrap_udp_socket(socket)?;
        Ok(Arc::new(LimitedSocket::new(socket, Arc::clone(&self.1))))
    }
}
