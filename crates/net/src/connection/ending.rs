//! The end of a connection: the last bytes, the link, the broker.

use std::{sync::Arc, time::Duration};

use broker::{CloseReason, Closed, Session, SessionCleanup, Turn};
use codec::reason;
use gateway_core::{clock, info_of_peer, log_limits::LineKind};
use tracing::{Level, debug, enabled};

use super::Connection;
use super::lingering::Remains;
use crate::{counters::count, layers::layered::Io, local::flush_turn, wheel};
use device::{Flushing, Link, SocketWriter, flush, trace};

/// End of a connection, with its reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// The client's DISCONNECT.
    Disconnect { code: u8, expiry: Option<u32> },
    /// The client closed without DISCONNECT.
    PeerClosed,
    /// The socket or a layer failed.
    Failed,
    /// A malformed packet, protocol error or refusal that only closing can tell; v5 reason code.
    Protocol(u8),
    /// Another connection owns the session.
    Superseded,
    /// The gateway ends it.
    Close(CloseReason),
}

impl From<CloseReason> for End {
    fn from(reason: CloseReason) -> Self {
        Self::Close(reason)
    }
}

impl Connection {
    pub(crate) fn finish(&mut self, end: End) {
        if std::mem::replace(&mut self.finished, true) {
            return;
        }
        // A packet whose handling has panicked is not finished by anybody.
        self.device.core().set_handling(false);
        self.leave_unfinished();
        flush_turn();
        self.forget_partial();
        self.say_goodbye(end.code());
        wheel::ended();
        count(|c| c.connections_closed.add(1));
        if let End::Protocol(code) = end {
            count(|c| c.protocol_errors.add(1));
            self.log_fault(code);
        }
        let reason = end.as_str();
        if enabled!(Level::DEBUG) {
            let core = self.device.core();
            // None once the session is another's: the new connection has been logged with its own.
            let info = core.connection(self.epoch);
            let peer = info.as_ref().map(|info| tracing::field::display(info.peer));
            let listener = info.as_ref().map(|info| info.listener.as_str());
            let protocol = self.inbound.protocol();
            debug!(peer, client_id = %core.client_id(), listener, ?protocol, reason, "disconnected");
        }
        let session: Arc<dyn Session> = Arc::clone(&self.device) as Arc<dyn Session>;
        let (publish_will, expiry) = match end {
            End::Disconnect { code, expiry } => (code != reason::NORMAL_DISCONNECTION, expiry),
            _ => (true, None),
        };
        let mut turn = Turn::default();
        let closed = Closed { publish_will, expiry, reason };
        let broker = &self.device.broker();
        let cleanup = broker.closed(&session, self.epoch, closed, clock::now(), &mut turn);
        turn.flush();
        finish_alone(cleanup);
    }

    /// Returns the remains of the connection after [`Self::finish`], if its client was told why it ended.
    pub(crate) fn remains(&mut self, end: End) -> Option<Remains> {
        let io = std::mem::replace(&mut self.io, Io::Ended);
        let code = end.code()?;
        match io {
            Io::Plain(read) if !self.disconnect_bytes(code).is_empty() => Some(Remains::new(read)),
            Io::Layered(io) => Remains::of(io.socket),
            Io::Plain(_) | Io::Ended => None,
        }
    }

    /// Tells what the client did: a packet over a limit, malformed, or against the protocol.
    fn log_fault(&mut self, code: u8) {
        let core = self.device.core();
        let Some(info) = core.connection(self.epoch) else { return };
        let (peer, listener) = (info.peer, info.listener.as_str());
        let (reason, code) = (reason::words(code), format_args!("{code:#04x}"));
        let fault = self.rare.as_mut().and_then(|rare| rare.fault.take());
        let fault = fault.as_deref();
        let packet = fault.map(|fault| fault.packet);
        let (size, limit) = (fault.and_then(|fault| fault.size), fault.and_then(|fault| fault.limit));
        let (key, detail) =
            (fault.and_then(|fault| fault.key), fault.and_then(|fault| fault.detail.as_deref()));
        info_of_peer!(
            LineKind::Protocol, peer.ip(), %peer, client_id = %core.client_id(), listener, reason, %code,
            packet, size, limit, key, detail,
            "connection ended for what its client sent"
        );
    }

    /// Tells that a packet of the client was over a limit and was refused; the connection goes on.
    pub(crate) fn log_refusal(&self, packet: &str, code: u8) {
        let core = self.device.core();
        let Some(info) = core.connection(self.epoch) else { return };
        let (peer, listener) = (info.peer, info.listener.as_str());
        let (reason, code) = (reason::words(code), format_args!("{code:#04x}"));
        info_of_peer!(
            LineKind::Limit, peer.ip(), %peer, client_id = %core.client_id(), listener, packet, reason, %code,
            "packet over a limit refused"
        );
    }

    /// Sends the last bytes, if there is something to say.
    fn say_goodbye(&mut self, code: Option<u8>) {
        let last = code.map_or(&[][..], |code| self.disconnect_bytes(code));
        if let Io::Layered(io) = &mut self.io {
            let slot = self.device.lock_owned(self.epoch);
            let blocked = slot.and_then(|slot| slot.link.as_ref().map(|link| link.sending.is_left()));
            if blocked == Some(false)
                && let Some(mut slot) = self.device.lock_owned(self.epoch)
            {
                let rest = slot.out.take_out();
                drop(slot);
                let _ = io.layers.seal(&rest);
                trace::written(self.device.core().client_id().as_str(), &rest, self.inbound.protocol());
            }
            let _ = io.layers.seal(last);
            trace::written(self.device.core().client_id().as_str(), last, self.inbound.protocol());
            io.layers.close(code);
            io.socket.try_write(&io.layers.wire[io.layers.sent..]);
            io.socket.set_code(code.unwrap_or(reason::NORMAL_DISCONNECTION));
            self.device.detach(self.epoch);
            return;
        }
        let Some(link) = self.detach_flushed() else { return };
        let Link { writer: SocketWriter::Direct(Some(writer)), unsent, .. } = link else { return };
        flush::farewell(&writer, unsent.as_deref(), last);
        trace::written(self.device.core().client_id().as_str(), last, self.inbound.protocol());
    }

    /// Writes what waits and the socket takes, and detaches. The last bytes come after that, so that no message of
    /// another thread can follow them [MQTT-3.14.4-1]. A thread that is writing for this device has the socket: it is
    /// given the moment that a write without waiting takes, and a few milliseconds in case the system has preempted it in
    /// the middle of that.
    fn detach_flushed(&self) -> Option<Link> {
        const YIELDS: usize = 1_000;
        const NAPS: usize = 50;
        const NAP: Duration = Duration::from_micros(100);
        for attempt in 0..YIELDS + NAPS {
            flush::flush_owned(&self.device, self.epoch);
            match self.device.detach_idle(self.epoch) {
                Ok(link) => return link,
                Err(Flushing) if attempt < YIELDS => std::thread::yield_now(),
                Err(Flushing) => std::thread::sleep(NAP),
            }
        }
        self.device.detach(self.epoch)
    }
}

/// Goes on in turns, beside the connections of this thread.
pub(crate) fn finish_alone(cleanup: Option<Box<SessionCleanup>>) {
    let Some(cleanup) = cleanup else { return };
    // Without a runtime it is dropped, and with that done at once.
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        runtime.spawn(cleanup.settle());
    }
}

impl End {
    /// Returns the reason code that the client is told, if any.
    fn code(self) -> Option<u8> {
        Some(match self {
            Self::Protocol(code) => code,
            Self::Close(close) => match close {
                CloseReason::TakenOver => reason::SESSION_TAKEN_OVER,
                CloseReason::Administrative(code) => code,
                // 0x8A is for CONNACK only [MQTT-3.14.2-1].
                CloseReason::NotAuthorized | CloseReason::Banned => reason::NOT_AUTHORIZED,
                CloseReason::SlowConsumer | CloseReason::Memory => reason::QUOTA_EXCEEDED,
                CloseReason::PacketTimeout => reason::IMPLEMENTATION_SPECIFIC_ERROR,
                CloseReason::ServerShutdown => reason::SERVER_SHUTTING_DOWN,
                CloseReason::KeepAlive => reason::KEEP_ALIVE_TIMEOUT,
                CloseReason::WriteTimeout | CloseReason::SessionEnded | CloseReason::GivenUp => return None,
            },
            Self::Superseded => reason::SESSION_TAKEN_OVER,
            Self::Disconnect { .. } | Self::PeerClosed | Self::Failed => return None,
        })
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Disconnect { .. } => "disconnect",
            Self::PeerClosed => "peer_closed",
            Self::Failed => "io_error",
            Self::Protocol(_) => "protocol_error",
            Self::Superseded | Self::Close(CloseReason::TakenOver) => "taken_over",
            Self::Close(CloseReason::Administrative(_)) => "administrative",
            Self::Close(CloseReason::NotAuthorized) => "not_authorized",
            Self::Close(CloseReason::Banned) => "banned",
            Self::Close(CloseReason::SlowConsumer) => "slow_consumer",
            Self::Close(CloseReason::ServerShutdown) => "server_shutdown",
            Self::Close(CloseReason::KeepAlive) => "keep_alive_timeout",
            Self::Close(CloseReason::PacketTimeout) => "packet_timeout",
            Self::Close(CloseReason::Memory) => "memory",
            Self::Close(CloseReason::WriteTimeout) => "write_timeout",
            Self::Close(CloseReason::SessionEnded) => "session_ended",
            Self::Close(CloseReason::GivenUp) => "given_up",
        }
    }
}
