//! Connections for tonic: accept, TLS handshake, bounds. A slow or silent peer never keeps others waiting.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use rustls::ServerConfig;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::{sleep, timeout},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tonic::transport::server::Connected;

use super::GrpcConfig;
use crate::telemetry::count;

/// Pause after a failed accept (usually: no file descriptors left).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Server certificates and settings, replaced as a whole when certificates are reloaded.
pub type SharedTls = Arc<ArcSwap<ServerConfig>>;

/// A connection that tonic can serve.
pub(super) struct Connection {
    io: Io,
    peer: Option<SocketAddr>,
    _permit: OwnedSemaphorePermit,
}

enum Io {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// What services may know of a connection.
#[derive(Debug, Clone)]
pub(super) struct PeerInfo {
    /// Remote address.
    #[expect(dead_code, reason = "for logs of calls, once they come")]
    pub(super) addr: Option<SocketAddr>,
}

/// Accepts until the receiver is gone.
pub(super) async fn accept(
    listener: TcpListener,
    tls: Option<SharedTls>,
    config: GrpcConfig,
    ready: mpsc::Sender<io::Result<Connection>>,
) {
    let connections = Arc::new(Semaphore::new(config.max_connections));
    let handshakes = Arc::new(Semaphore::new(config.max_handshakes));
    let tls = tls.map(|shared| Arc::new(Http2Tls { shared, last: Mutex::new(None) }));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = ready.closed() => return,
        };
        let (socket, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "grpc accept failed");
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(permit) = Arc::clone(&connections).try_acquire_owned() else {
            count(|c| c.refused_connections_limit.add(1));
            tracing::debug!(%peer, "grpc connection refused: too many");
            continue;
        };
        if let Err(error) = socket.set_nodelay(true) {
            tracing::debug!(%peer, %error, "grpc connection lost");
            continue;
        }
        let Some(tls) = &tls else {
            let connection = Connection { io: Io::Plain(socket), peer: Some(peer), _permit: permit };
            if ready.send(Ok(connection)).await.is_err() {
                return;
            }
            continue;
        };
        let Ok(handshake) = Arc::clone(&handshakes).try_acquire_owned() else {
            count(|c| c.refused_handshakes.add(1));
            continue;
        };
        let acceptor = TlsAcceptor::from(tls.current());
        let ready = ready.clone();
        tokio::spawn(async move {
            let _handshake = handshake;
            match timeout(config.handshake_timeout, acceptor.accept(socket)).await {
                Ok(Ok(stream)) => {
                    count(|c| c.handshake_tls_ok.add(1));
                    let io = Io::Tls(Box::new(stream));
                    let _ = ready.send(Ok(Connection { io, peer: Some(peer), _permit: permit })).await;
                }
                Ok(Err(error)) => {
                    count(|c| c.handshake_tls_failed.add(1));
                    tracing::debug!(%peer, %error, "grpc tls handshake failed");
                }
                Err(_) => {
                    count(|c| c.handshake_tls_failed.add(1));
                    tracing::debug!(%peer, "grpc tls handshake timed out");
                }
            }
        });
    }
}

/// The TLS settings in force, with ALPN `h2` whoever made them.
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

impl Connected for Connection {
    type ConnectInfo = PeerInfo;

    fn connect_info(&self) -> PeerInfo {
        PeerInfo { addr: self.peer }
    }
}

impl AsyncRead for Connection {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().io {
            Io::Plain(socket) => Pin::new(socket).poll_read(cx, buf),
            Io::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().io {
            Io::Plain(socket) => Pin::new(socket).poll_write(cx, buf),
            Io::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().io {
            Io::Plain(socket) => Pin::new(socket).poll_write_vectored(cx, bufs),
            Io::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
        }
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
