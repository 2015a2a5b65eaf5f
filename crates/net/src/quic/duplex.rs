//! The one stream of a QUIC connection, in the place of a socket.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use quinn::{ConnectionError, ReadError, VarInt};
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{EntranceShared, KeptForConnection};

/// Time that a client may take to acknowledge the last bytes.
const LINGER: Duration = Duration::from_secs(2);

/// Reads and writes like a socket, from any thread. Dropped, it closes the connection, once the client has all written
/// bytes, or after a moment.
pub(crate) struct Duplex(Option<OpenDuplex>);

struct OpenDuplex {
    send: quinn::SendStream,
    recv: quinn::RecvStream,
    connection: quinn::Connection,
    shared: Arc<EntranceShared>,
    kept: KeptForConnection,
    /// MQTT reason code with which the connection is closed.
    code: u8,
    /// Nothing more is written: the stream is finished.
    shut: bool,
}

impl Duplex {
    pub(super) fn new(
        send: quinn::SendStream,
        recv: quinn::RecvStream,
        connection: quinn::Connection,
        shared: Arc<EntranceShared>,
        kept: KeptForConnection,
    ) -> Self {
        Self(Some(OpenDuplex { send, recv, connection, shared, kept, code: 0, shut: false }))
    }

    /// The reason code of MQTT with which the connection will be closed; 0 unless it is set.
    pub(crate) fn set_code(&mut self, code: u8) {
        if let Some(open) = &mut self.0 {
            open.code = code;
        }
    }

    /// DER of the client's certificate, if it has shown one.
    pub(crate) fn certificate(&self) -> Option<Vec<u8>> {
        let identity = self.0.as_ref()?.connection.peer_identity()?;
        let chain = identity.downcast::<Vec<CertificateDer<'static>>>().ok()?;
        Some(chain.first()?.to_vec())
    }
}

impl Drop for Duplex {
    fn drop(&mut self) {
        let Some(OpenDuplex { mut send, recv, connection, shared, kept, code, shut }) = self.0.take() else {
            return;
        };
        drop(recv);
        // An error: the client wants no more, or is gone. A stream can be finished once.
        let finished = (shut || send.finish().is_ok()) && connection.close_reason().is_none();
        let lingers = finished.then(|| Arc::clone(&shared.lingering).try_acquire_owned().ok()).flatten();
        let code = VarInt::from_u32(code.into());
        let Some(permit) = lingers else {
            connection.close(code, b"");
            return;
        };
        shared.runtime.spawn(async move {
            // The connection ends, whether the client acknowledged or not.
            let _ = tokio::time::timeout(LINGER, send.stopped()).await;
            connection.close(code, b"");
            drop((permit, kept));
        });
    }
}

impl AsyncRead for Duplex {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Some(open) = &mut self.0 else { return Poll::Ready(Ok(())) };
        open.recv.poll_read_buf(cx, buffer).map(|read| match read {
            // Clients leave so: they close the connection and not the stream.
            Err(ReadError::ConnectionLost(ConnectionError::ApplicationClosed(_))) => Ok(()),
            read => Ok(read?),
        })
    }
}

impl AsyncWrite for Duplex {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let Some(open) = &mut self.0 else { return Poll::Ready(Err(io::ErrorKind::NotConnected.into())) };
        Pin::new(&mut open.send).poll_write(cx, bytes).map_err(io::Error::from)
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(open) = &mut self.0 {
            open.shut |= open.send.finish().is_ok();
        }
        Poll::Ready(Ok(()))
    }
}
