//! A connection with layers: its socket, the bytes that wait there, and its writing, which only its own task does.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use broker::{Charge, CloseReason, Session};
use gateway_core::{Effort, clock, metrics::count};
use session::recycle;
use tokio::{io::AsyncWrite, net::tcp::OwnedReadHalf};

use super::{LayerError, Layers, socket::Socket};
use crate::{
    connection::{BACKLOG, Connection, ending::End},
    shard::go_on_after_others,
};
use device::{Unsent, flush, trace};

/// Bytes that the layers of a connection may hold uncharged.
const FREE: usize = 1 << 10;

/// The socket's reading side and, where only the connection's own task writes, all of it.
pub(crate) enum Io {
    Plain(OwnedReadHalf),
    Layered(Box<Layered>),
    /// The connection has ended, and its remains are elsewhere.
    Ended,
}

pub(crate) struct Layered {
    pub socket: Socket,
    pub layers: Layers,
    /// Bytes written to the socket.
    pub total: u64,
    charge: Charge,
}

impl Io {
    pub(crate) fn layered(socket: Socket, layers: Layers, charge: Charge) -> Self {
        Self::Layered(Box::new(Layered { socket, layers, total: 0, charge }))
    }

    /// Returns whether the peer leaves the bytes of the layers unread.
    pub(crate) fn is_backlogged(&self) -> bool {
        match self {
            Self::Plain(_) | Self::Ended => false,
            Self::Layered(io) => io.layers.unsent() >= BACKLOG,
        }
    }

    /// Charges what the layers hold now.
    pub(crate) fn settle(&mut self) -> Result<(), End> {
        match self {
            Self::Plain(_) | Self::Ended => Ok(()),
            Self::Layered(io) => io.settle(),
        }
    }
}

impl Layered {
    /// Charges what the layers hold now.
    pub(crate) fn settle(&mut self) -> Result<(), End> {
        self.layers.compact();
        let held = self.layers.held();
        if self.charge.set(if held <= FREE { 0 } else { held }) {
            return Ok(());
        }
        count(|c| c.memory_replies.add(1));
        Err(End::Close(CloseReason::Memory))
    }
}

impl Connection {
    /// TLS, WebSocket and QUIC, and where sending has a rate: takes the out-buffer, wraps it, writes it.
    pub(crate) fn poll_write_layers(
        &mut self,
        effort: &mut Effort,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), LayerError>> {
        let Io::Layered(io) = &mut self.io else { return Poll::Ready(Ok(())) };
        loop {
            while io.layers.sent < io.layers.wire.len() {
                match Pin::new(&mut io.socket).poll_write(cx, &io.layers.wire[io.layers.sent..]) {
                    Poll::Ready(Ok(0)) => {
                        return Poll::Ready(Err(io::Error::from(io::ErrorKind::WriteZero).into()));
                    }
                    Poll::Ready(Ok(n)) => {
                        count(|c| c.bytes_out.add(n as u64));
                        io.layers.sent += n;
                        io.total += n as u64;
                        effort.spend(Effort::CALL);
                        effort.spend_each(Effort::KIB, n / 1024);
                    }
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(error.into())),
                    Poll::Pending => {
                        self.set_want_write(true);
                        return Poll::Pending;
                    }
                }
            }
            recycle(std::mem::take(&mut io.layers.wire));
            io.layers.sent = 0;
            if Self::poll_sending_paused(&mut self.rare, cx) {
                // Nobody needs to wake us before.
                self.set_want_write(true);
                return Poll::Ready(Ok(()));
            }
            if effort.is_spent() {
                // The next poll begins here.
                go_on_after_others(cx);
                return Poll::Ready(Ok(()));
            }
            let bytes = {
                let Some(mut slot) = self.device.lock_owned(self.epoch) else { return Poll::Ready(Ok(())) };
                if slot.out.buffered() == 0 {
                    slot.out.pump(&self.device.env(clock::now()));
                }
                // The bytes taken before have gone to the socket; the bytes taken now have not.
                slot.out.note_written(0);
                let bytes = slot.out.take_out();
                if let Some(link) = &mut slot.link {
                    link.sending.take_all();
                    link.unsent = None;
                }
                bytes
            };
            if bytes.is_empty() {
                return Poll::Ready(Ok(()));
            }
            trace::written(self.device.core().client_id().as_str(), &bytes, self.inbound.protocol());
            Self::note_sending(&mut self.rare, &bytes);
            io.layers.wire = flush::scratch();
            let sealed = io.layers.seal(&bytes);
            recycle(bytes);
            if let Err(error) = sealed {
                return Poll::Ready(Err(error));
            }
        }
    }

    fn set_want_write(&self, want: bool) {
        if let Some(mut slot) = self.device.lock_owned(self.epoch)
            && let Some(link) = &mut slot.link
        {
            link.sending.leave(want);
            // Bytes that wait behind the layers are charged here.
            let standing = || Box::new(Unsent::standing(self.device.broker().account()));
            link.unsent = want.then(|| link.unsent.take().unwrap_or_else(standing));
        }
    }
}
