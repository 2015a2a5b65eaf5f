//! The ways to a listener: TCP, TLS, WebSocket and WebSocket over TLS, as one kind of stream.

use std::{
    io::{self, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::Path,
    sync::Arc,
};

use rcgen::{BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName},
};
use socket2::{Domain, Socket, Type};
use tungstenite::{Message, WebSocket, client::IntoClientRequest as _, http::HeaderValue};

use crate::client::WAIT;
use crate::support::local;

/// A kind of listener, as the configuration names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Tcp,
    Ws,
    Tls,
    Wss,
}

impl Way {
    pub(crate) const ALL: [Self; 4] = [Self::Tcp, Self::Ws, Self::Tls, Self::Wss];

    pub(crate) fn kind(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Ws => "ws",
            Self::Tls => "tls",
            Self::Wss => "wss",
        }
    }

    pub(crate) fn is_tls(self) -> bool {
        matches!(self, Self::Tls | Self::Wss)
    }

    /// A stream to `port` from the loopback address `from`, with TLS if it is one of those with `tls`. The port that it
    /// comes from is told beside it.
    ///
    /// # Errors
    /// A handshake fails.
    pub(crate) fn open(
        self,
        from: Ipv4Addr,
        port: u16,
        tls: &Arc<ClientConfig>,
    ) -> io::Result<(Stream, SocketAddr)> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.bind(&SocketAddr::from((from, 0)).into())?;
        socket.connect(&local(port).into())?;
        let socket = TcpStream::from(socket);
        socket.set_read_timeout(Some(WAIT))?;
        socket.set_write_timeout(Some(WAIT))?;
        let own = socket.local_addr()?;
        let below: Stream = if self.is_tls() {
            let name = ServerName::try_from("localhost").map_err(io::Error::other)?;
            let client = ClientConnection::new(Arc::clone(tls), name).map_err(io::Error::other)?;
            let mut stream = StreamOwned::new(client, socket);
            while stream.conn.is_handshaking() {
                stream.conn.complete_io(&mut stream.sock)?;
            }
            Box::new(stream)
        } else {
            Box::new(socket)
        };
        let stream = match self {
            Self::Tcp | Self::Tls => below,
            Self::Ws | Self::Wss => Box::new(Framed::over(below)?),
        };
        Ok((stream, own))
    }
}

/// Bytes in both directions.
pub(crate) trait Duplex: Read + Write {}

impl<T: Read + Write> Duplex for T {}

pub(crate) type Stream = Box<dyn Duplex>;

/// The bytes in the messages of a WebSocket.
struct Framed {
    socket: WebSocket<Stream>,
    rest: io::Cursor<Vec<u8>>,
}

impl Framed {
    fn over(stream: Stream) -> io::Result<Self> {
        let mut request = "ws://localhost/mqtt".into_client_request().map_err(io::Error::other)?;
        request.headers_mut().insert("Sec-WebSocket-Protocol", HeaderValue::from_static("mqtt"));
        let (socket, _) =
            tungstenite::client(request, stream).map_err(|error| io::Error::other(error.to_string()))?;
        Ok(Self { socket, rest: io::Cursor::default() })
    }
}

impl Read for Framed {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.rest.read(into)? {
                0 => {}
                read => return Ok(read),
            }
            match self.socket.read() {
                Ok(Message::Binary(bytes)) => self.rest = io::Cursor::new(bytes.to_vec()),
                Ok(Message::Close(_)) => return Ok(0),
                Ok(_) => {}
                Err(tungstenite::Error::Io(error)) => return Err(error),
                Err(_) => return Ok(0),
            }
        }
    }
}

impl Write for Framed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.socket.write(Message::binary(bytes.to_vec())).map_err(io::Error::other)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.socket.flush().map_err(io::Error::other)
    }
}

/// An authority for devices.
pub(crate) struct Devices {
    issuer: Issuer<'static, KeyPair>,
    pub(crate) pem: String,
}

impl Devices {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "devices of the matrix");
        let key = KeyPair::generate().expect("generate a key");
        let pem = params.self_signed(&key).expect("sign the authority").pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    /// Returns the TLS settings of a device: the authority in the file `ca` that it trusts, and a certificate with this
    /// common name that it shows; none if the name is empty.
    pub(crate) fn config(&self, ca: &Path, common_name: Option<&str>) -> Arc<ClientConfig> {
        let pem = std::fs::read(ca).expect("read the authority");
        let mut roots = RootCertStore::empty();
        for root in rustls_pemfile::certs(&mut pem.as_slice()) {
            roots.add(root.expect("a certificate")).expect("an authority");
        }
        let builder =
            ClientConfig::builder_with_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
                .with_safe_default_protocol_versions()
                .expect("versions")
                .with_root_certificates(roots);
        let Some(common_name) = common_name else { return Arc::new(builder.with_no_client_auth()) };
        let (chain, key) = self.certificate(common_name);
        Arc::new(builder.with_client_auth_cert(chain, key).expect("a pair"))
    }

    fn certificate(&self, common_name: &str) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
        let key = KeyPair::generate().expect("generate a key");
        let mut params = CertificateParams::new(["device.example".to_owned()]).expect("name the device");
        params.distinguished_name = DistinguishedName::new();
        if !common_name.is_empty() {
            params.distinguished_name.push(DnType::CommonName, common_name);
        }
        let cert = params.signed_by(&key, &self.issuer).expect("sign the device");
        (vec![cert.der().clone()], PrivatePkcs8KeyDer::from(key.serialize_der()).into())
    }
}
