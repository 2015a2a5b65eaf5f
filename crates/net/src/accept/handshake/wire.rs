//! The socket of a handshake with its layers: what is read there up to CONNECT, and what its peer is told if there will be no
//! connection.

use std::{future::poll_fn, io, net::SocketAddr, pin::Pin, sync::Arc};

use codec::{ConnAck, Connect, DecodeError, Packet, reason};
use edge::door::{ConnectionPermit, PendingConnection};
use gateway_core::{BRIDGE_MARK, limits::Limits};
use links::RelayedDevice;
use tokio::io::{AsyncRead as _, AsyncWriteExt as _, ReadBuf};

use super::{HandshakeFailure, form::ConnackForm, held_by, name};
use crate::{
    NetShared,
    accept::{
        error::HandshakeError,
        listener::ListenerContext,
        proxy,
        unauthenticated::{Crowded, UnauthenticatedPlace},
    },
    connection::lingering::Remains,
    counters::count,
    layers::{LayerError, Layers, socket::Socket, tls::TlsLayer},
    local::ShardLocal,
};
use device::trace;

/// A socket during its handshake.
pub(super) struct Wire<'a> {
    pub(super) socket: Socket,
    pub(super) pending: &'a PendingConnection,
    pub(super) layers: Layers,
    /// Bytes above the layers that are there so far.
    pub(super) plain: Vec<u8>,
    pub(super) place: &'a UnauthenticatedPlace,
    /// Facts about the client, if another gateway has admitted it.
    pub(super) relayed: Option<RelayedDevice>,
    /// Bytes of the CONNECT as it was decoded, and of the memory that a decision about it takes.
    pub(super) presented: usize,
    /// The peer was told why there will be no connection.
    pub(super) told: bool,
}

impl Wire<'_> {
    /// Puts the socket under the layers of the listener: PROXY header, TLS, WebSocket. Returns the address that a proxy
    /// forwarded.
    pub(super) async fn put_on_layers(
        &mut self,
        listener: &ListenerContext,
        permit: &mut ConnectionPermit,
        shared: &NetShared,
    ) -> Result<Option<SocketAddr>, HandshakeError> {
        if self.relayed.is_some() {
            return Ok(None);
        }
        let peer = if listener.proxy_protocol { self.read_proxy_header().await? } else { None };
        if let Some(peer) = peer {
            name(permit, self.pending, peer, shared)?;
            self.place.named(peer.into());
        }
        if let Some(config) = listener.tls.as_ref().filter(|_| !self.socket.has_own_tls()) {
            self.start_tls(config.load_full()).await?;
        }
        if let Some(entry) = &listener.websocket {
            self.upgrade(entry, listener.is_for_this_machine()).await?;
        }
        Ok(peer)
    }

    pub(super) async fn read_proxy_header(&mut self) -> Result<Option<SocketAddr>, HandshakeError> {
        loop {
            match proxy::parse(&self.plain) {
                proxy::ProxyHeader::Complete { len, peer } => {
                    self.plain.drain(..len);
                    return Ok(peer);
                }
                proxy::ProxyHeader::Partial => self.fill().await?,
                proxy::ProxyHeader::Invalid => return Err(HandshakeError::Proxy),
            }
        }
    }

    pub(super) async fn start_tls(
        &mut self,
        config: Arc<rustls::ServerConfig>,
    ) -> Result<(), HandshakeError> {
        self.layers.tls = Some(Box::new(TlsLayer::new(config).map_err(LayerError::from)?));
        let mut early = std::mem::take(&mut self.plain);
        let result = self.finish_tls(&mut early).await;
        edge::counters::count(|c| {
            if result.is_ok() { c.handshake_tls_ok.add(1) } else { c.handshake_tls_failed.add(1) }
        });
        result
    }

    pub(super) async fn finish_tls(&mut self, early: &mut [u8]) -> Result<(), HandshakeError> {
        let opened = self.layers.open_tls(early, &mut self.plain);
        self.flush().await?;
        opened?;
        while self.layers.tls.as_ref().is_some_and(|tls| tls.is_handshaking()) {
            self.fill().await?;
        }
        Ok(())
    }

    /// The error about a CONNECT that is too large, with its size and the limit that is meant.
    pub(super) fn with_size(&self, error: HandshakeError, limits: &Limits) -> HandshakeError {
        let HandshakeError::Decode(DecodeError::TooLarge) = error else { return error };
        let size = codec::frame_len(&self.plain).ok().flatten().unwrap_or_default();
        let (own, any) = (limits.max_connect_size.0, limits.max_packet_size.0);
        let (limit, key) =
            if own <= any { (own, "limits.max_connect_size") } else { (any, "limits.max_packet_size") };
        HandshakeError::TooLarge { size, limit, key }
    }

    pub(super) async fn read_connect(&mut self, max: usize) -> Result<Connect, HandshakeError> {
        loop {
            // Before its rest is waited for [MQTT-3.1.0-1].
            if self.plain.first().is_some_and(|first| *first >> 4 != 1) {
                return Err(HandshakeError::NotConnect);
            }
            let frame = match codec::frame(&self.plain, max) {
                Ok(frame) => frame,
                Err(error) => {
                    self.refuse_undecodable(error).await;
                    return Err(error.into());
                }
            };
            if let Some(frame) = frame {
                let len = frame.len;
                let mut connect = match codec::decode_connect(&frame) {
                    Ok(connect) => connect,
                    Err(error) => {
                        self.refuse_undecodable(error).await;
                        return Err(error.into());
                    }
                };
                self.plain.drain(..len);
                self.plain.shrink_to_fit();
                // Nobody asks for the others, and decoded they are many times as large.
                connect.user =
                    connect.user.into_iter().find(|(name, _)| name == BRIDGE_MARK).into_iter().collect();
                self.present(held_by(&connect))?;
                session::counters::count(|c| c.packets_in.add(1));
                trace::connect(&connect.client_id, len);
                return Ok(connect);
            }
            self.fill().await?;
        }
    }

    /// Answers a CONNECT that cannot be decoded, if its sender is known to understand the answer.
    pub(super) async fn refuse_undecodable(&mut self, error: DecodeError) {
        count(|c| c.protocol_errors.add(1));
        match ConnackForm::of(&self.plain, error) {
            // [MQTT-3.1.2-2]
            ConnackForm::Oldest => {
                let code = reason::V3_UNACCEPTABLE_PROTOCOL;
                self.say_last(&[0x20, 0x02, 0x00, code], code, error.reason_code()).await;
            }
            ConnackForm::V5 => {
                let code = error.reason_code();
                self.say_last(&[0x20, 0x03, 0x00, code, 0x00], code, code).await;
            }
            ConnackForm::Silence => {}
        }
    }

    pub(super) async fn refuse(mut self, connect: &Connect, code: Option<u8>) -> HandshakeFailure {
        let Some(code) = code else { return self.fail(HandshakeError::Closed) };
        let protocol = connect.protocol;
        let wire_code = if protocol.is_v5() { code } else { reason::v3_return_code(code) };
        let mut bytes = Vec::new();
        let packet = Packet::ConnAck(Box::new(ConnAck { code: wire_code, ..ConnAck::default() }));
        let max = usize::try_from(connect.maximum_packet_size.unwrap_or(u32::MAX)).unwrap_or(usize::MAX);
        // A refusal above the client's maximum is left out, the close is not.
        codec::encode_within(&packet, protocol, max, &mut bytes);
        trace::written(&connect.client_id, &bytes, protocol);
        self.say_last(&bytes, wire_code, code).await;
        self.fail(HandshakeError::Refused { code, client_id: connect.client_id.as_str().into() })
    }

    /// Sends the last bytes and ends what is sent: `code` is the one in them, `reason` that of version 5.
    pub(super) async fn say_last(&mut self, bytes: &[u8], code: u8, reason: u8) {
        if self.layers.seal(bytes).is_err() {
            return;
        }
        self.layers.close(Some(reason));
        let _ = self.flush().await;
        self.socket.set_code(code);
        let _ = self.socket.shutdown().await;
        self.told = true;
    }

    /// Returns the error with the remains of the socket, without its layers and buffers.
    pub(super) fn fail(self, error: HandshakeError) -> HandshakeFailure {
        let remains = if self.told { Remains::of(self.socket) } else { None };
        HandshakeFailure { error, remains }
    }

    /// Reads once and passes the bytes through the layers.
    pub(super) async fn fill(&mut self) -> Result<(), HandshakeError> {
        let Self { socket, layers, plain, pending, .. } = self;
        let (read, opened) = poll_fn(|cx| {
            let mut local = ShardLocal::take();
            let mut buffer = ReadBuf::new(&mut local.read);
            let polled = Pin::new(&mut *socket).poll_read(cx, &mut buffer);
            let bytes = buffer.filled_mut();
            let read = polled.map_ok(|()| (bytes.len(), layers.open(bytes, plain)));
            local.put_back();
            read
        })
        .await?;
        if read == 0 {
            return Err(HandshakeError::Closed);
        }
        pending.spoke();
        count(|c| c.bytes_in.add(read as u64));
        self.hold()?;
        self.flush().await?;
        Ok(opened?)
    }

    /// Charges so many bytes for the client's CONNECT from now on, with the copies and questions that are made of it.
    pub(super) fn present(&mut self, bytes: usize) -> Result<(), HandshakeError> {
        self.presented = bytes;
        self.hold()
    }

    pub(super) fn hold(&self) -> Result<(), HandshakeError> {
        let bytes = self.plain.capacity() + self.layers.held() + self.presented;
        self.place.hold(bytes).map_err(|Crowded| HandshakeError::Crowded)
    }

    pub(super) async fn flush(&mut self) -> io::Result<()> {
        if !self.layers.wire.is_empty() {
            self.socket.write_all(&self.layers.wire).await?;
            self.layers.wire = Vec::new();
        }
        Ok(())
    }

    pub(super) fn certificate(&self) -> Option<Vec<u8>> {
        self.layers.certificate().or_else(|| self.socket.certificate())
    }
}
