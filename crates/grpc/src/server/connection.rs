//! A connection that tonic can serve, and its end: at its deadline, for another that needs its place or its memory, with its
//! certificate, and for more calls at once than one without credentials may make.

use std::{
    future::Future,
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use edge::tls::{CertificateId, Revocations};
use gateway_core::{info_of_peer, log_limits::LineKind};
use rustls::pki_types::CertificateDer;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::{Instant, Sleep, sleep, sleep_until},
};
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;

use super::{
    caller_memory::{CallerMemory, MemoryReservation},
    connection_calls::ConnectionCalls,
    frame_gate::{CHUNK, FrameGate, Step},
};
use crate::counters::count;

/// Bytes that TLS may keep for a socket that does not take them: before there are credentials, and after that, which is what
/// rustls has by default.
const TLS_BUFFER: usize = 16 << 10;
const AUTHENTICATED_TLS_BUFFER: usize = 64 << 10;
/// Bytes of a TLS handshake that are not charged.
const FREE_HANDSHAKE: usize = 8 << 10;
/// Longest wait for calls to be looked at. HTTP/2 may have refused them by itself; then no other calls are read for as
/// long.
const LOOK: Duration = Duration::from_secs(1);
/// Reads after GOAWAY, of [`CHUNK`] bytes each, so that it isn't lost to a reset for bytes that were not read.
const LAST_READS: usize = 16;

/// A connection that tonic can serve.
pub(crate) struct ServedConnection {
    io: GrpcSocket,
    peer: SocketAddr,
    connection_calls: Arc<ConnectionCalls>,
    /// Until the client has said what HTTP/2 begins with.
    deadline: Option<Pin<Box<Sleep>>>,
    /// Until it has shown credentials.
    newcomer: Option<Newcomer>,
    /// The socket took nothing of the last write.
    is_stalled: bool,
    /// HTTP/2 has something to look at before it reads on.
    is_pausing: bool,
    /// Ends once the client's certificate is revoked.
    revoked: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

/// State of a connection that has yet to show credentials.
struct Newcomer {
    gate: Box<FrameGate>,
    /// For what the gate keeps back.
    holding: MemoryReservation,
    /// Ends the wait for calls to be looked at.
    wait: Option<Pin<Box<Sleep>>>,
    /// Ends once others need the memory.
    closed: Pin<Box<dyn Future<Output = ()> + Send>>,
}

pub(super) enum GrpcSocket {
    Plain(MeteredSocket),
    Tls(Box<TlsStream<MeteredSocket>>),
}

/// A socket, with a charge for what comes from it during a handshake.
pub(super) struct MeteredSocket {
    socket: TcpStream,
    meter: Option<(MemoryReservation, usize)>,
}

impl MeteredSocket {
    pub(super) fn new(socket: TcpStream, holding: Option<MemoryReservation>) -> Self {
        Self { socket, meter: holding.map(|holding| (holding, 0)) }
    }

    /// The handshake is over.
    pub(super) fn stop_metering(&mut self) {
        self.meter = None;
    }
}

impl GrpcSocket {
    /// The client's certificate.
    pub(super) fn certificate(&self) -> Option<&CertificateDer<'static>> {
        match self {
            Self::Tls(stream) => stream.get_ref().1.peer_certificates()?.first(),
            Self::Plain(_) => None,
        }
    }

    fn limit_buffer(&mut self, bytes: usize) {
        if let Self::Tls(stream) = self {
            stream.get_mut().1.set_buffer_limit(Some(bytes));
        }
    }
}

pub(super) fn say_refused(peer: SocketAddr, reason: &str) {
    info_of_peer!(LineKind::Door, peer.ip(), %peer, listener = "grpc", reason, "connection refused");
}

pub(super) fn say_timed_out(peer: SocketAddr) {
    count(|c| c.grpc_refused_timeout.add(1));
    info_of_peer!(LineKind::Handshake, peer.ip(), %peer, listener = "grpc", "handshake timed out");
}

pub(super) fn say_left(peer: SocketAddr) {
    count(|c| c.grpc_refused_silent.add(1));
    tracing::debug!(%peer, "silent grpc connection closed for another");
}

impl ServedConnection {
    /// One whose client has until `deadline` to say what HTTP/2 begins with.
    pub(super) fn new(
        mut io: GrpcSocket,
        connection_calls: Arc<ConnectionCalls>,
        caller_memory: Arc<CallerMemory>,
        deadline: Instant,
    ) -> Self {
        io.limit_buffer(TLS_BUFFER);
        let newcomer = Newcomer {
            gate: Box::default(),
            holding: caller_memory.open(),
            wait: None,
            closed: Box::pin(async move { caller_memory.closed().await }),
        };
        Self {
            io,
            peer: connection_calls.peer(),
            connection_calls,
            deadline: Some(Box::pin(sleep_until(deadline))),
            newcomer: Some(newcomer),
            is_stalled: false,
            is_pausing: false,
            revoked: None,
        }
    }

    /// Ends it once its client's certificate is revoked.
    pub(super) fn heed(&mut self, revocations: Option<Arc<Revocations>>) {
        let (Some(revocations), Some(own)) = (revocations, self.io.certificate()) else { return };
        if let Some(certificate) = CertificateId::of(own) {
            self.revoked = Some(Box::pin(async move { revocations.until_revoked(&certificate).await }));
        }
    }

    /// An error once the connection has to end before more is read, however much there is.
    fn poll_cut(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        if let Some(revoked) = &mut self.revoked
            && revoked.as_mut().poll(cx).is_ready()
        {
            // After this the connection is neither read nor polled again.
            self.revoked = None;
            count(|c| c.grpc_evicted_revoked.add(1));
            let (peer, reason) = (self.peer, "its certificate is revoked");
            info_of_peer!(
                LineKind::Evicted, peer.ip(), %peer, listener = "grpc", reason,
                "connection ended, it may no longer be"
            );
            return Poll::Ready(io::ErrorKind::ConnectionAborted.into());
        }
        if let Some(newcomer) = &mut self.newcomer
            && !self.connection_calls.is_authenticated()
            && newcomer.closed.as_mut().poll(cx).is_ready()
        {
            self.newcomer = None;
            return Poll::Ready(self.out_of_memory());
        }
        if self.is_stalled && self.connection_calls.leaves_refusals_unread() {
            count(|c| c.grpc_refused_calls.add(1));
            say_refused(self.peer, "it does not read why its calls are refused");
            return Poll::Ready(io::ErrorKind::ConnectionAborted.into());
        }
        Poll::Pending
    }

    fn out_of_memory(&self) -> io::Error {
        count(|c| c.grpc_refused_memory.add(1));
        say_refused(self.peer, "memory is short");
        io::ErrorKind::OutOfMemory.into()
    }

    /// An error once the connection has to end: in favour of another, at shutdown, or at its deadline.
    fn poll_ended(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        if self.connection_calls.pending().poll_told(cx).is_ready() {
            say_left(self.peer);
            return Poll::Ready(io::ErrorKind::ConnectionAborted.into());
        }
        if let Some(deadline) = &mut self.deadline
            && deadline.as_mut().poll(cx).is_ready()
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

    /// The next bytes for HTTP/2, through the gate as long as there is one.
    fn poll_through_gate(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            let Some(newcomer) = &mut self.newcomer else { return Pin::new(&mut self.io).poll_read(cx, buf) };
            if self.connection_calls.is_authenticated() {
                if newcomer.gate.release() {
                    self.newcomer = None;
                    self.io.limit_buffer(AUTHENTICATED_TLS_BUFFER);
                    continue;
                }
                newcomer.gate.deliver(buf);
                return Poll::Ready(Ok(()));
            }
            let looked_at = self.connection_calls.looked_at(cx);
            let step = newcomer.gate.step(looked_at);
            if step != Step::Wait {
                newcomer.wait = None;
            }
            match step {
                Step::Deliver => {
                    newcomer.gate.deliver(buf);
                    return Poll::Ready(Ok(()));
                }
                Step::Wait => {
                    let wait = newcomer.wait.get_or_insert_with(|| Box::pin(sleep(LOOK)));
                    if wait.as_mut().poll(cx).is_pending() {
                        self.is_pausing = true;
                        return Poll::Pending;
                    }
                    newcomer.gate.forgive(looked_at);
                    continue;
                }
                Step::Pause => {
                    self.is_pausing = true;
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Step::Excess => return Poll::Ready(Err(self.go_away(cx))),
                Step::Read => {}
            }
            if ready!(self.poll_gate(cx))? == 0 {
                return Poll::Ready(Ok(()));
            }
        }
    }

    /// Reads a little for the gate, and says how much.
    fn poll_gate(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let Some(newcomer) = &mut self.newcomer else { return Poll::Ready(Ok(0)) };
        let mut chunk = [0; CHUNK];
        let mut read = ReadBuf::new(&mut chunk);
        ready!(Pin::new(&mut self.io).poll_read(cx, &mut read))?;
        newcomer.gate.receive(read.filled());
        if !newcomer.holding.set(newcomer.gate.charge()) {
            return Poll::Ready(Err(self.out_of_memory()));
        }
        if self.deadline.is_some() {
            if !read.filled().is_empty() {
                self.connection_calls.pending().spoke();
            }
            if newcomer.gate.has_begun() {
                self.deadline = None;
                self.connection_calls.pending().idle();
            }
        }
        Poll::Ready(Ok(read.filled().len()))
    }

    /// Tells the client to be calmer, as far as its socket takes it at once, and says with which error the connection ends.
    fn go_away(&mut self, cx: &mut Context<'_>) -> io::Error {
        count(|c| c.grpc_refused_calls.add(1));
        say_refused(self.peer, "too many calls at once without credentials");
        let io = &mut self.io;
        if let Some(frame) = self.newcomer.as_ref().and_then(|newcomer| newcomer.gate.go_away()) {
            let _ = Pin::new(&mut *io).poll_write(cx, &frame);
            let _ = Pin::new(&mut *io).poll_flush(cx);
        }
        let _ = Pin::new(&mut *io).poll_shutdown(cx);
        let mut chunk = [0; CHUNK];
        for _ in 0..LAST_READS {
            let mut read = ReadBuf::new(&mut chunk);
            let polled = Pin::new(&mut *io).poll_read(cx, &mut read);
            if !matches!(polled, Poll::Ready(Ok(()))) || read.filled().is_empty() {
                break;
            }
        }
        io::ErrorKind::ConnectionAborted.into()
    }

    /// `polled` of a write, after what it means for the connection. `note` tells the gate what was written.
    fn written(
        &mut self,
        polled: Poll<io::Result<usize>>,
        note: impl FnOnce(&mut FrameGate, usize),
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        self.is_stalled = polled.is_pending();
        if let (Some(newcomer), Poll::Ready(Ok(len))) = (&mut self.newcomer, &polled) {
            note(&mut newcomer.gate, *len);
        }
        self.or_ended(polled, cx)
    }
}

impl Connected for ServedConnection {
    type ConnectInfo = Arc<ConnectionCalls>;

    fn connect_info(&self) -> Arc<ConnectionCalls> {
        Arc::clone(&self.connection_calls)
    }
}

impl AsyncRead for ServedConnection {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if let Poll::Ready(error) = this.poll_cut(cx) {
            return Poll::Ready(Err(error));
        }
        let polled = this.poll_through_gate(cx, buf);
        if std::mem::take(&mut this.is_pausing) {
            return polled;
        }
        this.or_ended(polled, cx)
    }
}

impl AsyncWrite for ServedConnection {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.io).poll_write(cx, buf);
        this.written(polled, |gate, len| gate.wrote(&buf[..len]), cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.io).poll_write_vectored(cx, bufs);
        this.written(polled, |gate, len| gate.wrote_vectored(bufs, len), cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(cx)
    }
}

/// Calls a method of the socket or of its TLS.
macro_rules! either {
    ($io:expr, $inner:ident => $call:expr) => {
        match $io {
            GrpcSocket::Plain($inner) => $call,
            GrpcSocket::Tls($inner) => $call,
        }
    };
}

impl AsyncRead for GrpcSocket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        either!(self.get_mut(), io => Pin::new(io).poll_read(cx, buf))
    }
}

impl AsyncWrite for GrpcSocket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        either!(self.get_mut(), io => Pin::new(io).poll_write(cx, buf))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(self.get_mut(), io => Pin::new(io).poll_write_vectored(cx, bufs))
    }

    fn is_write_vectored(&self) -> bool {
        either!(self, io => io.is_write_vectored())
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self.get_mut(), io => Pin::new(io).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self.get_mut(), io => Pin::new(io).poll_shutdown(cx))
    }
}

impl AsyncRead for MeteredSocket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        ready!(Pin::new(&mut this.socket).poll_read(cx, buf))?;
        if let Some((holding, received)) = &mut this.meter {
            *received += buf.filled().len() - before;
            if !holding.set(received.saturating_sub(FREE_HANDSHAKE)) {
                return Poll::Ready(Err(io::ErrorKind::OutOfMemory.into()));
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for MeteredSocket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().socket).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().socket).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_shutdown(cx)
    }
}
