//! The errors by which a socket does not become a connection, and the details of them that are worth a line in the log.

use std::io;

use codec::{DecodeError, reason};
use edge::{door::DoorRefusal, tls};
use gateway_core::{Peer, info_of_peer, log_limits::LineKind};
use thiserror::Error;
use tracing::debug;

use crate::layers::{LayerError, websocket::WebSocketError};
#[cfg(feature = "quic")]
use crate::quic::CallError;

/// Error that left a socket without a connection.
#[derive(Debug, Error)]
pub(crate) enum HandshakeError {
    #[error("i/o: {0}")]
    Io(#[from] io::Error),
    #[error(transparent)]
    Layer(#[from] LayerError),
    #[error("peer closed during the handshake")]
    Closed,
    #[error("not a PROXY protocol header")]
    Proxy,
    #[error("the address that the proxy names: {}", .0.words())]
    Address(DoorRefusal),
    #[error("not a WebSocket upgrade for MQTT")]
    Upgrade,
    #[error("first packet is not a valid CONNECT: {0}")]
    Decode(#[from] DecodeError),
    #[error("CONNECT of {size} bytes is larger than {key}, which is {limit}")]
    TooLarge { size: usize, limit: usize, key: &'static str },
    #[error("first packet is not CONNECT")]
    NotConnect,
    #[error("too much is held for those who have not authenticated")]
    Crowded,
    #[error("{}", reason::words(*.code))]
    Refused { code: u8, client_id: Box<str> },
    #[cfg(feature = "quic")]
    #[error("quic: {0}")]
    Quic(#[from] CallError),
    #[error("another connection took the session over")]
    Superseded,
}

impl HandshakeError {
    /// Returns the MQTT 5 reason code for the bytes that the peer sent in place of a CONNECT, if it sent any.
    pub(super) fn reason_code(&self) -> Option<u8> {
        match self {
            Self::Decode(error) => Some(error.reason_code()),
            Self::TooLarge { .. } => Some(reason::PACKET_TOO_LARGE),
            Self::NotConnect => Some(reason::PROTOCOL_ERROR),
            _ => None,
        }
    }

    /// Logs the fault of the peer in one line. A peer that left, or whose own next connection came first, is no news.
    pub(crate) fn log(&self, peer: Peer, listener: &str) {
        let ip = peer.ip();
        match self {
            Self::Io(_)
            | Self::Closed
            | Self::Superseded
            | Self::Layer(LayerError::WebSocket(WebSocketError::Closed)) => {
                debug!(%peer, listener, error = %self, "handshake failed")
            }
            #[cfg(feature = "quic")]
            Self::Quic(error) if error.is_farewell() => {
                debug!(%peer, listener, error = %self, "handshake failed")
            }
            Self::Refused { code, client_id } => {
                let code = format_args!("{code:#04x}");
                info_of_peer!(LineKind::Refused, ip, %peer, client_id, listener, reason = %self, %code, "CONNECT refused");
            }
            Self::Layer(LayerError::Tls(error)) => {
                let reason = tls::in_words(error);
                info_of_peer!(LineKind::Handshake, ip, %peer, listener, reason = %reason, "TLS handshake failed");
            }
            _ => info_of_peer!(LineKind::Handshake, ip, %peer, listener, reason = %self, "handshake failed"),
        }
    }
}
