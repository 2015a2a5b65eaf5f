//! The layers between the socket's bytes and MQTT: TLS, WebSocket, both or neither.

mod closing;
pub(super) mod layered;
pub(super) mod socket;
pub(super) mod tls;
pub(super) mod websocket;

use std::io;

use gateway_core::Effort;
use thiserror::Error;

use self::{
    closing::CloseStatus,
    tls::TlsLayer,
    websocket::{Frames, WebSocketError, binary_header},
};

/// Error with which the layers end a connection.
#[derive(Debug, Error)]
pub(crate) enum LayerError {
    /// TLS failed.
    #[error("tls: {0}")]
    Tls(#[from] rustls::Error),
    /// WebSocket failed or closed.
    #[error(transparent)]
    WebSocket(#[from] WebSocketError),
    /// The socket failed.
    #[error("i/o: {0}")]
    Io(#[from] io::Error),
}

/// Sent bytes that are forgotten at once.
const COMPACT: usize = 64 << 10;

/// The state of both layers of one connection.
#[derive(Default)]
pub(crate) struct Layers {
    pub tls: Option<Box<TlsLayer>>,
    pub websocket: Option<Box<Frames>>,
    /// Bytes for the socket.
    pub wire: Vec<u8>,
    pub sent: usize,
}

impl Layers {
    /// Returns whether there is neither layer: any thread may then write MQTT bytes to a socket.
    pub(crate) fn is_plain(&self) -> bool {
        self.tls.is_none() && self.websocket.is_none()
    }

    /// DER of the client's certificate, if TLS has one.
    pub(crate) fn certificate(&self) -> Option<Vec<u8>> {
        Some(self.tls.as_ref()?.peer_certificates()?.first()?.to_vec())
    }

    /// Bytes held here, in both directions.
    pub(crate) fn held(&self) -> usize {
        self.wire.capacity() + self.tls.as_ref().map_or(0, |tls| tls.held())
    }

    /// Returns whether a record has begun that is not complete.
    pub(crate) fn is_started(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.held() > 0)
    }

    /// Forgets what has been sent of bytes to which others are added before all are: a peer that always leaves some would
    /// make them grow.
    pub(crate) fn compact(&mut self) {
        if self.sent >= COMPACT {
            self.wire.drain(..self.sent);
            self.sent = 0;
        }
    }

    /// Charges the frames and records that were opened since the last call.
    pub(crate) fn charge(&mut self, effort: &mut Effort) {
        let records = self.tls.as_mut().map_or(0, |tls| tls.take_count());
        let frames = self.websocket.as_mut().map_or(0, |frames| frames.take_count());
        effort.spend_each(Effort::RECORD, records);
        effort.spend_each(Effort::FRAME, frames);
    }

    /// Bytes that wait for the socket.
    pub(crate) fn unsent(&self) -> usize {
        self.wire.len() - self.sent
    }

    /// Returns whether the peer has ended TLS properly.
    pub(crate) fn peer_closed(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.peer_closed())
    }

    /// Turns bytes from the socket into what lies above TLS, appended to `plain`. `bytes` are of no use afterwards.
    pub(crate) fn open_tls(&mut self, bytes: &mut [u8], plain: &mut Vec<u8>) -> Result<(), LayerError> {
        match &mut self.tls {
            Some(tls) => tls.open(bytes, plain, &mut self.wire)?,
            None => plain.extend_from_slice(bytes),
        }
        Ok(())
    }

    /// Turns bytes from the socket into MQTT bytes, appended to `plain`. `bytes` are of no use afterwards.
    pub(crate) fn open(&mut self, bytes: &mut [u8], plain: &mut Vec<u8>) -> Result<(), LayerError> {
        let Some(mut frames) = self.websocket.take() else { return self.open_tls(bytes, plain) };
        let mut replies = Vec::new();
        let result = if self.tls.is_some() {
            let mut below = Vec::with_capacity(bytes.len());
            self.open_tls(bytes, &mut below).and_then(|()| Ok(frames.open(&below, plain, &mut replies)?))
        } else {
            frames.open(bytes, plain, &mut replies).map_err(LayerError::from)
        };
        self.websocket = Some(frames);
        if !replies.is_empty() {
            self.seal_raw(&[&replies])?;
        }
        result
    }

    /// Wraps MQTT bytes for the socket.
    pub(crate) fn seal(&mut self, mqtt: &[u8]) -> Result<(), LayerError> {
        if mqtt.is_empty() {
            return Ok(());
        }
        if self.websocket.is_some() {
            let (header, len) = binary_header(mqtt.len());
            return self.seal_raw(&[&header[..len], mqtt]);
        }
        self.seal_raw(&[mqtt])
    }

    /// Wraps bytes above TLS for the socket.
    pub(crate) fn seal_raw(&mut self, pieces: &[&[u8]]) -> Result<(), LayerError> {
        for piece in pieces {
            match &mut self.tls {
                Some(tls) => tls.seal(piece, &mut self.wire)?,
                None => self.wire.extend_from_slice(piece),
            }
        }
        Ok(())
    }

    /// Says goodbye: in a WebSocket by a Close frame, the answer to the peer's or with the status for `code`, the MQTT reason;
    /// then in TLS.
    pub(crate) fn close(&mut self, code: Option<u8>) {
        let last =
            self.websocket.as_mut().and_then(|frames| frames.closing.last_frame(CloseStatus::of(code)));
        if let Some(last) = last {
            let _ = self.seal_raw(&[&last]);
        }
        if let Some(tls) = &mut self.tls {
            // Nobody to tell if TLS has failed.
            let _ = tls.close(&mut self.wire);
        }
    }
}
