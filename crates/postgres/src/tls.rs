//! TLS of a connection, by rustls.

use std::{
    future::Future,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use rustls::{ClientConfig, pki_types::ServerName};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::{
    Socket,
    tls::{ChannelBinding, MakeTlsConnect, TlsConnect},
};
use tokio_rustls::{TlsConnector, client};

/// Makes connections TLS. The server is verified by the roots of its configuration, so a login is not bound to the channel as well.
#[derive(Clone)]
pub(super) struct MakeTls(pub(super) Arc<ClientConfig>);

/// TLS to one host.
pub(super) struct HostTls {
    connector: TlsConnector,
    name: ServerName<'static>,
}

/// A connection with TLS.
pub(super) struct TlsSocket(Box<client::TlsStream<Socket>>);

impl MakeTlsConnect<Socket> for MakeTls {
    type Stream = TlsSocket;
    type TlsConnect = HostTls;
    type Error = rustls::pki_types::InvalidDnsNameError;

    fn make_tls_connect(&mut self, host: &str) -> Result<HostTls, Self::Error> {
        let name = ServerName::try_from(host)?.to_owned();
        Ok(HostTls { connector: TlsConnector::from(Arc::clone(&self.0)), name })
    }
}

impl TlsConnect<Socket> for HostTls {
    type Stream = TlsSocket;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<TlsSocket>> + Send>>;

    fn connect(self, socket: Socket) -> Self::Future {
        Box::pin(async move { Ok(TlsSocket(Box::new(self.connector.connect(self.name, socket).await?))) })
    }
}

impl tokio_postgres::tls::TlsStream for TlsSocket {
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

impl AsyncRead for TlsSocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for TlsSocket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0).poll_shutdown(cx)
    }
}
