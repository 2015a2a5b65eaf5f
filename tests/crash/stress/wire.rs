//! MQTT over TCP, TLS, WebSocket and both, with a short read timeout: one thread per client does all it needs.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    sync::Arc,
    time::{Duration, Instant},
};

use codec::{Connect, Packet};
use gateway_core::Protocol;
use rustls::pki_types::{CertificateDer, ServerName, pem::PemObject as _};
use tungstenite::{Message, WebSocket};

use crate::support::{Server, local};

/// Time that one read waits for bytes.
const READ: Duration = Duration::from_millis(2);
const CONNACK: Duration = Duration::from_secs(30);

/// Bytes of MQTT in both directions.
trait Wire: Send {
    /// Appends what has come; false if nothing has yet.
    fn read(&mut self, into: &mut Vec<u8>) -> io::Result<bool>;
    fn write(&mut self, bytes: &[u8]) -> io::Result<()>;
}

struct Bytes<S>(S);

impl<S: Read + Write + Send> Wire for Bytes<S> {
    fn read(&mut self, into: &mut Vec<u8>) -> io::Result<bool> {
        let mut chunk = [0; 16_384];
        match self.0.read(&mut chunk) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => {
                into.extend_from_slice(&chunk[..n]);
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all(bytes)?;
        self.0.flush()
    }
}

struct Frames<S>(WebSocket<S>);

impl<S: Read + Write + Send> Wire for Frames<S> {
    fn read(&mut self, into: &mut Vec<u8>) -> io::Result<bool> {
        match self.0.read() {
            Ok(Message::Binary(bytes)) => {
                into.extend_from_slice(&bytes);
                Ok(true)
            }
            Ok(_) => Ok(true),
            Err(tungstenite::Error::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(io::Error::other(error)),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.send(Message::binary(bytes.to_vec())).map_err(io::Error::other)
    }
}

/// One connection.
pub(crate) struct Connection {
    wire: Box<dyn Wire>,
    protocol: Protocol,
    buffer: Vec<u8>,
    at: usize,
}

impl Connection {
    /// Connects over the transport of this number. Returns whether the session was there; an error if the connection
    /// was taken over at once.
    pub(crate) fn open(server: &Server, transport: u64, connect: Connect) -> io::Result<(Self, bool)> {
        let ports = server.ports;
        let secure = transport % 4 == 1 || transport % 4 == 3;
        let port = [ports.tcp, ports.tls, ports.ws, ports.wss][(transport % 4) as usize];
        let stream = TcpStream::connect(local(port))?;
        stream.set_nodelay(true)?;
        // Whole handshakes first: not every library goes on after a timeout in one.
        stream.set_read_timeout(Some(CONNACK))?;
        let timed = stream.try_clone()?;
        let wire: Box<dyn Wire> = match (secure, transport % 4 >= 2) {
            (false, false) => Box::new(Bytes(stream)),
            (true, false) => Box::new(Bytes(tls(server, stream)?)),
            (false, true) => Box::new(Frames(websocket(stream)?)),
            (true, true) => Box::new(Frames(websocket(tls(server, stream)?)?)),
        };
        timed.set_read_timeout(Some(READ))?;
        let protocol = connect.protocol;
        let mut connection = Self { wire, protocol, buffer: Vec::new(), at: 0 };
        connection.send(&[Packet::Connect(Box::new(connect))])?;
        let began = Instant::now();
        loop {
            let mut present = None;
            connection.receive_one(|packet| match packet {
                Packet::ConnAck(ack) => present = Some((ack.code, ack.session_present)),
                other => panic!("{other:?} before CONNACK"),
            })?;
            if let Some((code, present)) = present {
                assert_eq!(code, 0, "CONNECT refused");
                return Ok((connection, present));
            }
            assert!(began.elapsed() < CONNACK, "no CONNACK");
        }
    }

    pub(crate) fn send(&mut self, packets: &[Packet<'_>]) -> io::Result<()> {
        let mut bytes = Vec::new();
        for packet in packets {
            codec::encode(packet, self.protocol, &mut bytes);
        }
        if bytes.is_empty() { Ok(()) } else { self.wire.write(&bytes) }
    }

    /// Reads once and hands on every complete packet; false if nothing came.
    pub(crate) fn receive(&mut self, mut each: impl FnMut(Packet<'_>)) -> io::Result<bool> {
        let mut any = false;
        while self.receive_buffered(&mut each) {
            any = true;
        }
        if any {
            return Ok(true);
        }
        let came = self.wire.read(&mut self.buffer)?;
        while self.receive_buffered(&mut each) {}
        Ok(came)
    }

    fn receive_one(&mut self, mut each: impl FnMut(Packet<'_>)) -> io::Result<()> {
        if !self.receive_buffered(&mut each) {
            self.wire.read(&mut self.buffer)?;
            self.receive_buffered(&mut each);
        }
        Ok(())
    }

    fn receive_buffered(&mut self, each: &mut impl FnMut(Packet<'_>)) -> bool {
        let rest = &self.buffer[self.at..];
        let len = codec::frame_len(rest).expect("a frame from the server");
        let Some(len) = len.filter(|len| *len <= rest.len()) else {
            self.buffer.drain(..std::mem::take(&mut self.at));
            return false;
        };
        let frame = codec::frame(&rest[..len], usize::MAX).expect("a frame").expect("whole");
        each(codec::decode(&frame, self.protocol).expect("a packet from the server"));
        self.at += len;
        true
    }
}

fn tls(
    server: &Server,
    stream: TcpStream,
) -> io::Result<rustls::StreamOwned<rustls::ClientConnection, TcpStream>> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(server.ca()).expect("the CA")).expect("a CA");
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").expect("a name");
    let client = rustls::ClientConnection::new(Arc::new(config), name).expect("a client");
    let mut stream = rustls::StreamOwned::new(client, stream);
    stream.conn.complete_io(&mut stream.sock)?;
    Ok(stream)
}

fn websocket<S: Read + Write>(stream: S) -> io::Result<WebSocket<S>> {
    let mut request = tungstenite::client::IntoClientRequest::into_client_request("ws://localhost/mqtt")
        .expect("a request");
    let mqtt = tungstenite::http::HeaderValue::from_static("mqtt");
    request.headers_mut().insert("Sec-WebSocket-Protocol", mqtt);
    tungstenite::client(request, stream)
        .map(|(socket, _)| socket)
        .map_err(|error| io::Error::other(error.to_string()))
}
