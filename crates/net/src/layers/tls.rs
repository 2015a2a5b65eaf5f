//! TLS of one connection: the only file here that drives rustls.
//!
//! An idle connection keeps rustls' state and nothing else: bytes are decrypted where they were read, an incomplete
//! record is kept in a buffer of its size until the rest is there, and records to send go straight to the caller.

use std::{mem, sync::Arc};

use rustls::{
    Error, ServerConfig,
    pki_types::CertificateDer,
    server::{ServerConnectionData, UnbufferedServerConnection},
    unbuffered::{
        ConnectionState, EncodeError, EncodeTlsData, EncryptError, InsufficientSizeError, UnbufferedStatus,
        WriteTraffic,
    },
};

/// Most bytes kept of a record, or of a handshake message in several records, that is not complete. rustls bounds the
/// length that a message claims (64 KB) but not the records it comes in, which stay until the message is complete.
const KEPT_MAX: usize = (64 << 10) + RECORD_MAX;
/// Longest record: header, plaintext, and the bytes that TLS 1.2 lets encryption add.
const RECORD_MAX: usize = 5 + PLAIN_MAX + 2048;
/// Plaintext in one record.
const PLAIN_MAX: usize = 16 << 10;
/// Bytes that a record takes beyond its plaintext, with any of the ciphers.
const RECORD_OVERHEAD: usize = 32;

/// The server's side of one TLS connection, between its bytes and the socket's.
///
/// After an error from [`Self::open`] the connection is over: an alert for the peer, if there is one, has been put into
/// `wire`, and nothing can be sent after it.
pub(crate) struct TlsLayer {
    rustls: UnbufferedServerConnection,
    /// The start of a record or handshake message: what rustls has not asked to discard.
    kept: Vec<u8>,
    /// Records opened since [`Self::take_count`].
    count: usize,
    peer_closed: bool,
    failed: bool,
}

impl TlsLayer {
    /// A connection that waits for its ClientHello.
    ///
    /// # Errors
    /// rustls finds `config` inconsistent.
    pub(crate) fn new(config: Arc<ServerConfig>) -> Result<Self, Error> {
        let rustls = UnbufferedServerConnection::new(config)?;
        Ok(Self { rustls, kept: Vec::new(), count: 0, peer_closed: false, failed: false })
    }

    /// Returns whether the handshake is not complete.
    pub(crate) fn is_handshaking(&self) -> bool {
        self.rustls.is_handshaking()
    }

    /// Returns the number of records opened since the last call.
    pub(crate) fn take_count(&mut self) -> usize {
        mem::take(&mut self.count)
    }

    /// Returns the bytes kept of an incomplete record.
    pub(crate) fn held(&self) -> usize {
        self.kept.capacity()
    }

    /// The peer's certificate chain, its own first; `None` if it has shown none.
    pub(crate) fn peer_certificates(&self) -> Option<&[CertificateDer<'static>]> {
        self.rustls.peer_certificates()
    }

    /// Returns whether the peer has ended its side properly (close_notify). Later bytes are ignored.
    pub(crate) fn peer_closed(&self) -> bool {
        self.peer_closed
    }

    /// Decrypts `bytes` from the socket, in place where possible: plaintext is appended to `plain`, what must be sent
    /// in answer (handshake, alert) to `wire`.
    ///
    /// # Errors
    /// TLS fails; the plaintext of the records before the failure is in `plain`.
    pub(crate) fn open(
        &mut self,
        bytes: &mut [u8],
        plain: &mut Vec<u8>,
        wire: &mut Vec<u8>,
    ) -> Result<(), Error> {
        if self.failed {
            return Err(after_failure());
        }
        if self.kept.is_empty() {
            let used = self.process(bytes, plain, wire)?;
            self.kept = bytes[used..].to_vec();
        } else {
            let mut joined = mem::take(&mut self.kept);
            joined.reserve_exact(bytes.len());
            joined.extend_from_slice(bytes);
            let used = self.process(&mut joined, plain, wire)?;
            self.kept = if used == 0 { joined } else { joined[used..].to_vec() };
        }
        if self.kept.len() > KEPT_MAX {
            self.kept = Vec::new();
            self.failed = true;
            return Err(Error::General("handshake message in too many records".to_owned()));
        }
        Ok(())
    }

    /// Gives rustls all of `incoming` that is complete; returns how many bytes of it are done with.
    fn process(
        &mut self,
        incoming: &mut [u8],
        plain: &mut Vec<u8>,
        wire: &mut Vec<u8>,
    ) -> Result<usize, Error> {
        let mut used = 0;
        loop {
            let UnbufferedStatus { mut discard, state } =
                self.rustls.process_tls_records(&mut incoming[used..]);
            let step = state.and_then(|state| match state {
                ConnectionState::ReadTraffic(mut traffic) => {
                    while let Some(record) = traffic.next_record() {
                        let record = record?;
                        plain.extend_from_slice(record.payload);
                        discard += record.discard;
                        self.count += 1;
                    }
                    Ok(TlsStep::Go)
                }
                ConnectionState::PeerClosed => Ok(TlsStep::PeerClosed),
                ConnectionState::EncodeTlsData(data) => encode(data, wire).map(|()| TlsStep::Go),
                ConnectionState::TransmitTlsData(data) => {
                    data.done();
                    Ok(TlsStep::Go)
                }
                ConnectionState::WriteTraffic(_)
                | ConnectionState::BlockedHandshake
                | ConnectionState::Closed => Ok(TlsStep::Blocked),
                // Early data, which no configuration of ours allows.
                _ => Err(Error::General("unexpected state of TLS".to_owned())),
            });
            used += discard;
            match step {
                Ok(TlsStep::Go) => {}
                Ok(TlsStep::PeerClosed) => self.peer_closed = true,
                Ok(TlsStep::Blocked) if self.peer_closed => return Ok(incoming.len()),
                Ok(TlsStep::Blocked) => return Ok(used),
                Err(error) => {
                    self.failed = true;
                    self.drain(wire);
                    return Err(error);
                }
            }
        }
    }

    /// Moves what rustls wants to send after a failure, an alert, to `wire`.
    fn drain(&mut self, wire: &mut Vec<u8>) {
        // As long as something is to be sent, rustls does not look at its input, which is lost here.
        while self.rustls.wants_write() {
            match self.rustls.process_tls_records(&mut []).state {
                Ok(ConnectionState::EncodeTlsData(data)) => {
                    let _ = encode(data, wire);
                }
                _ => return,
            }
        }
    }

    /// Encrypts `plain` in as many records as it takes, appended to `wire`.
    ///
    /// # Errors
    /// The handshake is not complete, TLS has failed, or its keys are used up.
    pub(crate) fn seal(&mut self, plain: &[u8], wire: &mut Vec<u8>) -> Result<(), Error> {
        if plain.is_empty() {
            return Ok(());
        }
        let room = plain.len() + (plain.len() / PLAIN_MAX + 1) * RECORD_OVERHEAD;
        self.write(wire, room, |traffic, out| traffic.encrypt(plain, out))
    }

    /// Appends close_notify to `wire`, once. Nothing may be sealed after it.
    ///
    /// # Errors
    /// The handshake is not complete or TLS has failed.
    pub(crate) fn close(&mut self, wire: &mut Vec<u8>) -> Result<(), Error> {
        self.write(wire, 2 + RECORD_OVERHEAD, |traffic, out| traffic.queue_close_notify(out))
    }

    /// Lets `put` append to `wire`, where `room` bytes are likely to be enough.
    fn write(
        &mut self,
        wire: &mut Vec<u8>,
        room: usize,
        mut put: impl FnMut(&mut Traffic<'_>, &mut [u8]) -> Result<usize, EncryptError>,
    ) -> Result<(), Error> {
        if self.failed {
            return Err(after_failure());
        }
        loop {
            // Nothing in `kept` is complete, so nothing is discarded; but rustls knows where in it it stopped.
            match self.rustls.process_tls_records(&mut self.kept).state? {
                ConnectionState::EncodeTlsData(data) => encode(data, wire)?,
                ConnectionState::TransmitTlsData(data) => data.done(),
                ConnectionState::WriteTraffic(mut traffic) => {
                    return append(wire, room, |out| put(&mut traffic, out));
                }
                // Both sides have said goodbye.
                ConnectionState::Closed => return Ok(()),
                _ => return Err(Error::HandshakeNotComplete),
            }
        }
    }
}

type Traffic<'c> = WriteTraffic<'c, ServerConnectionData>;

enum TlsStep {
    Go,
    PeerClosed,
    Blocked,
}

fn after_failure() -> Error {
    Error::General("tls has failed before".to_owned())
}

/// Appends a record that rustls has made.
fn encode(mut data: EncodeTlsData<'_, ServerConnectionData>, wire: &mut Vec<u8>) -> Result<(), Error> {
    let encoded = append_sized(wire, 0, |out| match data.encode(out) {
        Ok(len) => Ok(len),
        Err(EncodeError::InsufficientSize(size)) => Err(Some(size)),
        Err(EncodeError::AlreadyEncoded) => Err(None),
    });
    encoded.ok_or_else(|| Error::General("record encoded twice".to_owned()))
}

fn append(
    wire: &mut Vec<u8>,
    room: usize,
    mut put: impl FnMut(&mut [u8]) -> Result<usize, EncryptError>,
) -> Result<(), Error> {
    let written = append_sized(wire, room, |out| match put(out) {
        Ok(len) => Ok(len),
        Err(EncryptError::InsufficientSize(size)) => Err(Some(size)),
        Err(EncryptError::EncryptExhausted) => Err(None),
    });
    written.ok_or(Error::EncryptError)
}

/// Appends to `wire` the bytes that `put` writes into the room given, which grows as `put` asks; `None` if it fails.
fn append_sized(
    wire: &mut Vec<u8>,
    mut room: usize,
    mut put: impl FnMut(&mut [u8]) -> Result<usize, Option<InsufficientSizeError>>,
) -> Option<()> {
    let start = wire.len();
    loop {
        wire.resize(start + room, 0);
        match put(&mut wire[start..]) {
            Ok(len) => {
                wire.truncate(start + len);
                return Some(());
            }
            Err(Some(size)) if size.required_size > room => room = size.required_size,
            Err(_) => {
                wire.truncate(start);
                return None;
            }
        }
    }
}

#[cfg(test)]
mod tests;
