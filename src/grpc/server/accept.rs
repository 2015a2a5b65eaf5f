//! Connections for tonic: accept, TLS handshake, bounds. A slow or silent peer never keeps others waiting.

use std::{
    future::Future,
    io,
    net::SocketAddr,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use arc_swap::ArcSwap;
use broker::Account;
use gateway_core::{info_of_peer, log_limits::LineKind, metrics::count};
use parking_lot::Mutex;
use rustls::ServerConfig;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    time::{Instant, Sleep, sleep, sleep_until, timeout_at},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tonic::transport::server::Connected;

use super::{calls::Standing, purse::Purse};
use crate::{
    backends::CertificateNames,
    door::{Door, DoorBounds, DoorRefusal, Guest, Lobby, Seat},
    grpc::GrpcConfig,
    tls::{CertificateId, Revocations},
};

/// Pause after a failed accept (usually: no file descriptors left).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Sockets that may wait for a handshake's place, as a multiple of the places.
const LOBBY: usize = 16;
/// The fraction of the handshake timeout, as its divisor, after which a silent peer leaves for one who waits.
const PATIENCE: u32 = 10;
/// What a client sends first: the preface, and the head of its SETTINGS.
const PREFACE: usize = 24;
const FRAME_HEAD: usize = 9;

/// Server certificates and settings, replaced as a whole when certificates are reloaded.
pub(crate) type SharedTls = Arc<ArcSwap<ServerConfig>>;

/// What TLS needs.
pub(crate) struct GrpcTls {
    /// For handshakes.
    pub(crate) settings: SharedTls,
    /// Certificates whose connections are closed.
    pub(crate) revocations: Option<Arc<Revocations>>,
}

/// A connection that tonic can serve.
pub(in crate::grpc) struct ServedConnection {
    io: Io,
    peer: SocketAddr,
    standing: Arc<Standing>,
    /// Until the client has said what HTTP/2 begins with.
    opening: Option<Box<Opening>>,
    /// Ends once the client's certificate is revoked.
    revoked: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

enum Io {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// The places of the server.
pub(in crate::grpc) fn door(config: &GrpcConfig) -> Arc<Door> {
    Door::alone(DoorBounds {
        connections: config.max_connections,
        connections_per_address: config.max_connections_per_address,
        handshakes: config.max_handshakes,
        patience: config.handshake_timeout / PATIENCE,
        ..DoorBounds::default()
    })
}

/// Accepts until the receiver is gone.
pub(in crate::grpc) async fn accept(
    listener: TcpListener,
    tls: Option<GrpcTls>,
    config: GrpcConfig,
    account: Arc<Account>,
    door: Arc<Door>,
    ready: mpsc::Sender<io::Result<ServedConnection>>,
) {
    let revocations = tls.as_ref().and_then(|tls| tls.revocations.clone());
    let tls = tls.map(|tls| Arc::new(Http2Tls { shared: tls.settings, last: Mutex::new(None) }));
    let mut lobby = Lobby::new(config.max_handshakes.saturating_mul(LOBBY).min(config.max_connections));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => Some(accepted),
            () = door.changed(), if !lobby.is_empty() => None,
            () = ready.closed() => return,
        };
        match accepted {
            // Without a rate nobody comes too often.
            Some(Ok((socket, peer))) => {
                let turned_away = lobby.push(Some(peer.into()), (socket, peer));
                count(|c| c.grpc_refused_waiting.add(turned_away.iter().count() as u64));
            }
            Some(Err(error)) => {
                gateway_core::warn_limited!(%error, "grpc accept failed");
                door.shed();
                sleep(ACCEPT_PAUSE).await;
            }
            None => {}
        }
        while let Some(((socket, peer), entered)) = lobby.next(|address| door.enter(address)) {
            let (seat, guest) = match entered {
                Ok(places) => places,
                Err(refusal) => {
                    refuse(peer, refusal);
                    continue;
                }
            };
            let tls = tls.as_ref().map(|tls| TlsAcceptor::from(tls.current()));
            let (ready, account) = (ready.clone(), Arc::clone(&account));
            let revocations = revocations.clone();
            tokio::spawn(async move {
                let opened = open(socket, peer, tls, seat, guest, &config, account).await;
                if let Some(mut connection) = opened {
                    connection.heed(revocations);
                    let _ = ready.send(Ok(connection)).await;
                }
            });
        }
    }
}

fn refuse(peer: SocketAddr, refusal: DoorRefusal) {
    say_refused(peer, refusal.words());
    count(|c| match refusal {
        DoorRefusal::AddressConnections => c.grpc_refused_address_limit.add(1),
        _ => c.grpc_refused_limit.add(1),
    });
}

/// Brings TLS up; `None` if that fails, takes too long or another needs the place.
async fn open(
    socket: TcpStream,
    peer: SocketAddr,
    tls: Option<TlsAcceptor>,
    seat: Seat,
    guest: Guest,
    config: &GrpcConfig,
    account: Arc<Account>,
) -> Option<ServedConnection> {
    let deadline = Instant::now() + config.handshake_timeout;
    if let Err(error) = socket.set_nodelay(true) {
        tracing::debug!(%peer, %error, "grpc connection lost");
        return None;
    }
    let io = match tls {
        None => Io::Plain(socket),
        Some(acceptor) => {
            let handshake = pin!(timeout_at(deadline, acceptor.accept(socket)));
            match guest.attend(handshake).await {
                Some(Ok(Ok(stream))) => {
                    count(|c| c.handshake_tls_ok.add(1));
                    Io::Tls(Box::new(stream))
                }
                ended => {
                    count(|c| c.handshake_tls_failed.add(1));
                    match ended {
                        Some(Ok(result)) => {
                            let (listener, reason) = ("grpc", result.err().map(tracing::field::display));
                            info_of_peer!(LineKind::Handshake, peer.ip(), %peer, listener, reason, "TLS handshake failed");
                        }
                        Some(Err(_)) => say_timed_out(peer),
                        None => say_left(peer),
                    }
                    return None;
                }
            }
        }
    };
    let window = crate::grpc::windows(config, &account).0 as usize;
    let purse = Purse::new(account);
    let mut holding = purse.open();
    if !holding.set(window) {
        count(|c| c.grpc_refused_memory.add(1));
        say_refused(peer, "memory is short");
        return None;
    }
    let opening = Some(Box::new(Opening::until(deadline)));
    let certificate = match &io {
        Io::Tls(stream) => stream.get_ref().1.peer_certificates().and_then(<[_]>::first),
        Io::Plain(_) => None,
    };
    let certificate = certificate.map(|der| CertificateNames::read(der));
    let standing = Arc::new(Standing::new(peer, certificate, seat, guest, purse, holding));
    Some(ServedConnection { io, peer, standing, opening, revoked: None })
}

fn say_refused(peer: SocketAddr, reason: &str) {
    info_of_peer!(LineKind::Door, peer.ip(), %peer, listener = "grpc", reason, "connection refused");
}

fn say_timed_out(peer: SocketAddr) {
    count(|c| c.grpc_refused_timeout.add(1));
    info_of_peer!(LineKind::Handshake, peer.ip(), %peer, listener = "grpc", "handshake timed out");
}

fn say_left(peer: SocketAddr) {
    count(|c| c.grpc_refused_silent.add(1));
    tracing::debug!(%peer, "silent grpc connection closed for another");
}

/// The client's preface and SETTINGS, as far as they have come.
struct Opening {
    deadline: Pin<Box<Sleep>>,
    head: [u8; PREFACE + FRAME_HEAD],
    received: usize,
}

impl Opening {
    fn until(deadline: Instant) -> Self {
        let deadline = Box::pin(sleep_until(deadline));
        Self { deadline, head: [0; PREFACE + FRAME_HEAD], received: 0 }
    }

    /// Whether all is there with `bytes`. What they say is HTTP/2's business.
    fn is_complete_with(&mut self, bytes: &[u8]) -> bool {
        let room = self.head.get_mut(self.received..).unwrap_or_default();
        let len = room.len().min(bytes.len());
        room[..len].copy_from_slice(&bytes[..len]);
        self.received += bytes.len();
        let [high, middle, low] = [PREFACE, PREFACE + 1, PREFACE + 2].map(|at| usize::from(self.head[at]));
        self.received >= self.head.len() + (high << 16 | middle << 8 | low)
    }
}

impl ServedConnection {
    /// Ends it once its client's certificate is revoked.
    fn heed(&mut self, revocations: Option<Arc<Revocations>>) {
        let (Some(revocations), Io::Tls(stream)) = (revocations, &self.io) else { return };
        let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
        if let Some(certificate) = chain.first().and_then(|own| CertificateId::of(own)) {
            self.revoked = Some(Box::pin(async move { revocations.until_revoked(&certificate).await }));
        }
    }

    /// An error once the client's certificate is revoked: before more is read, however much there is.
    fn poll_revoked(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        let Some(revoked) = &mut self.revoked else { return Poll::Pending };
        std::task::ready!(revoked.as_mut().poll(cx));
        // It is read no more after this, nor polled again.
        self.revoked = None;
        count(|c| c.grpc_evicted_revoked.add(1));
        let (peer, reason) = (self.peer, "its certificate is revoked");
        info_of_peer!(
            LineKind::Evicted, peer.ip(), %peer, listener = "grpc", reason,
            "connection ended, it may no longer be"
        );
        Poll::Ready(io::ErrorKind::ConnectionAborted.into())
    }

    /// An error once the connection has to end: in favour of another, at shutdown, or at its deadline.
    fn poll_ended(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        if self.standing.guest().poll_told(cx).is_ready() {
            say_left(self.peer);
            return Poll::Ready(io::ErrorKind::ConnectionAborted.into());
        }
        if let Some(opening) = &mut self.opening
            && opening.deadline.as_mut().poll(cx).is_ready()
        {
            say_timed_out(self.peer);
            return Poll::Ready(io::ErrorKind::TimedOut.into());
        }
        Poll::Pending
    }

    /// `polled`, or the connection's end if that is due and nothing can be done now.
    fn or_ended<T>(&mut self, polled: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        match polled {
            Poll::Pending => self.poll_ended(cx).map(Err),
            ready => ready,
        }
    }
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

impl Connected for ServedConnection {
    type ConnectInfo = Arc<Standing>;

    fn connect_info(&self) -> Arc<Standing> {
        Arc::clone(&self.standing)
    }
}

impl AsyncRead for ServedConnection {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if let Poll::Ready(error) = this.poll_revoked(cx) {
            return Poll::Ready(Err(error));
        }
        let before = buf.filled().len();
        let polled = match &mut this.io {
            Io::Plain(socket) => Pin::new(socket).poll_read(cx, buf),
            Io::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        };
        if let Some(opening) = &mut this.opening {
            let new = &buf.filled()[before..];
            if !new.is_empty() {
                this.standing.guest().spoke();
            }
            if opening.is_complete_with(new) {
                this.opening = None;
                this.standing.guest().idle();
            }
        }
        this.or_ended(polled, cx)
    }
}

impl AsyncWrite for ServedConnection {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = match &mut this.io {
            Io::Plain(socket) => Pin::new(socket).poll_write(cx, buf),
            Io::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
        };
        this.or_ended(polled, cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = match &mut this.io {
            Io::Plain(socket) => Pin::new(socket).poll_write_vectored(cx, bufs),
            Io::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
        };
        this.or_ended(polled, cx)
    }

    fn is_write_vectored(&self) -> bool {
        match &self.io {
            Io::Plain(socket) => socket.is_write_vectored(),
            Io::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().io {
            Io::Plain(socket) => Pin::new(socket).poll_flush(cx),
            Io::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().io {
            Io::Plain(socket) => Pin::new(socket).poll_shutdown(cx),
            Io::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_opening_ends_with_the_first_settings_however_it_is_cut() {
        let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        bytes.extend_from_slice(&[0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 9]);
        for step in [1, 7, 24, 33, 100] {
            let mut opening = Opening::until(Instant::now());
            let chunks = bytes[..bytes.len() - 1].chunks(step);
            assert!(chunks.into_iter().all(|chunk| !opening.is_complete_with(chunk)), "{step}");
            assert!(opening.is_complete_with(&bytes[bytes.len() - 1..]), "{step}");
        }
    }
}
