//! Enhanced authentication before CONNACK (MQTT 5.0, 4.12): AUTH packets back and forth, under the handshake's deadline.

use std::sync::Arc;

use bytes::Bytes;
use codec::{AuthPacket, Connect, Packet, reason};
use gateway_core::clock;
use session::{Enhanced, Violation};

use super::{HandshakeError, NotAdmitted, Wire};
use crate::{NetShared, timers};
use auth::{AuthProgress, Credentials, Denied, Principal};

/// Identity that a client has proved by the method of its CONNECT.
pub(super) struct Proved {
    pub(super) principal: Result<Arc<Principal>, Denied>,
    /// For the CONNACK.
    pub(super) data: Option<Bytes>,
    /// For the authentications that may follow.
    pub(super) enhanced: Enhanced,
}

impl Wire<'_> {
    /// Talks with the client until it has proved who it is, or has not.
    ///
    /// # Errors
    /// The client breaks the protocol, or has left.
    pub(super) async fn converse(
        &mut self,
        connect: &Connect,
        method: &str,
        credentials: Credentials,
        shared: &NetShared,
    ) -> Result<Proved, NotAdmitted> {
        let max = shared.limits.max_connect_size.0.min(shared.limits.max_packet_size.0);
        let Some(mut dialogue) = timers::within(|| shared.auth.begin(method, credentials)) else {
            return Err(NotAdmitted::refused(reason::BAD_AUTHENTICATION_METHOD)); // [MQTT-4.12.0-1]
        };
        let mut enhanced = Enhanced::connecting(method);
        let mut data = connect.auth_data.clone().unwrap_or_default();
        let presented = self.presented;
        let mut exchanged = 0;
        loop {
            exchanged += AuthProgress::FOOTPRINT * data.len();
            self.present(presented + exchanged)?;
            match timers::run_within(|| dialogue.answer(data)).await {
                Ok(AuthProgress::Challenge(challenge)) => {
                    self.ask(connect, &enhanced.ask(challenge)).await?;
                    let presented = enhanced.take(self.read_auth(connect, max).await?, clock::now());
                    data = presented.map_err(|Violation(code)| NotAdmitted::refused(code))?.data;
                }
                Ok(AuthProgress::Proved(principal, data)) => {
                    enhanced.conclude(None);
                    return Ok(Proved { principal: Ok(principal), data, enhanced });
                }
                Err(denied) => return Ok(Proved { principal: Err(denied), data: None, enhanced }),
            }
        }
    }

    async fn ask(&mut self, connect: &Connect, auth: &Packet<'_>) -> Result<(), NotAdmitted> {
        let max = usize::try_from(connect.maximum_packet_size.unwrap_or(u32::MAX)).unwrap_or(usize::MAX);
        let mut bytes = Vec::new();
        if !codec::encode_within(auth, connect.protocol, max, &mut bytes) {
            return Err(NotAdmitted::refused(reason::PACKET_TOO_LARGE));
        }
        self.layers.seal(&bytes).map_err(HandshakeError::from)?;
        self.flush().await.map_err(HandshakeError::from)?;
        session::counters::count(|c| c.packets_out.add(1));
        Ok(())
    }

    /// The client's AUTH: nothing else but DISCONNECT may come [MQTT-3.1.2-30].
    async fn read_auth(&mut self, connect: &Connect, max: usize) -> Result<AuthPacket, NotAdmitted> {
        loop {
            // Before its rest is waited for.
            if self.plain.first().is_some_and(|first| !matches!(*first >> 4, 14 | 15)) {
                return Err(NotAdmitted::refused(reason::PROTOCOL_ERROR));
            }
            let frame = codec::frame(&self.plain, max);
            let Some(frame) = frame.map_err(|error| NotAdmitted::refused(error.reason_code()))? else {
                self.fill().await?;
                continue;
            };
            let packet = codec::decode_from_client(&frame, connect.protocol);
            let packet = packet.map_err(|error| NotAdmitted::refused(error.reason_code()))?;
            let len = frame.len;
            session::counters::count(|c| c.packets_in.add(1));
            let Packet::Auth(auth) = packet else { return Err(HandshakeError::Closed.into()) };
            self.plain.drain(..len);
            return Ok(*auth);
        }
    }
}
