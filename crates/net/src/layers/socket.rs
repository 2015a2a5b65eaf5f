//! The transport below the layers: a socket, or a stream of QUIC that reads and writes like one.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use links::RelayStream;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
};

#[cfg(feature = "quic")]
use crate::quic::Duplex;

/// Source and destination of a connection's bytes.
pub(crate) enum Socket {
    /// A socket of TCP or of the Unix family.
    Stream(OwnedReadHalf, OwnedWriteHalf),
    #[cfg(feature = "quic")]
    Quic(Box<Duplex>),
    /// A client that another gateway relays.
    Relayed(Box<RelayStream>),
}

impl From<TcpStream> for Socket {
    fn from(stream: TcpStream) -> Self {
        let (read, write) = stream.into_split();
        Self::Stream(read, write)
    }
}

impl Socket {
    /// Returns whether the transport below already encrypts.
    pub(crate) fn has_own_tls(&self) -> bool {
        !matches!(self, Self::Stream(..))
    }

    /// DER of the client's certificate, if it was shown here and not in a layer.
    pub(crate) fn certificate(&self) -> Option<Vec<u8>> {
        match self {
            Self::Stream(..) | Self::Relayed(_) => None,
            #[cfg(feature = "quic")]
            Self::Quic(stream) => stream.certificate(),
        }
    }

    /// Says with which reason code of MQTT the connection ends, where that can be said beside the stream.
    pub(crate) fn set_code(&mut self, code: u8) {
        #[cfg(feature = "quic")]
        if let Self::Quic(stream) = self {
            stream.set_code(code);
        }
        #[cfg(not(feature = "quic"))]
        let _ = (self, code);
    }

    /// Writes what is taken at once; the task is not woken for the rest.
    pub(crate) fn try_write(&mut self, bytes: &[u8]) {
        let _ = match self {
            Self::Stream(_, write) => write.try_write(bytes).map(drop),
            #[cfg(feature = "quic")]
            Self::Quic(stream) => {
                let cx = &mut Context::from_waker(std::task::Waker::noop());
                drop(Pin::new(&mut **stream).poll_write(cx, bytes));
                Ok(())
            }
            Self::Relayed(stream) => {
                let cx = &mut Context::from_waker(std::task::Waker::noop());
                drop(Pin::new(&mut **stream).poll_write(cx, bytes));
                Ok(())
            }
        };
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Stream(read, _) => Pin::new(read).poll_read(cx, buffer),
            #[cfg(feature = "quic")]
            Self::Quic(stream) => Pin::new(&mut **stream).poll_read(cx, buffer),
            Self::Relayed(stream) => Pin::new(&mut **stream).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Stream(_, write) => Pin::new(write).poll_write(cx, bytes),
            #[cfg(feature = "quic")]
            Self::Quic(stream) => Pin::new(&mut **stream).poll_write(cx, bytes),
            Self::Relayed(stream) => Pin::new(&mut **stream).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Stream(_, write) => Pin::new(write).poll_flush(cx),
            #[cfg(feature = "quic")]
            Self::Quic(stream) => Pin::new(&mut **stream).poll_flush(cx),
            Self::Relayed(stream) => Pin::new(&mut **stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Stream(_, write) => Pin::new(write).poll_shutdown(cx),
            #[cfg(feature = "quic")]
            Self::Quic(stream) => Pin::new(&mut **stream).poll_shutdown(cx),
            Self::Relayed(stream) => Pin::new(&mut **stream).poll_shutdown(cx),
        }
    }
}
