//! The socket of a connection with its layers, and the bytes that wait there.

use broker::{Charge, CloseReason};
use session::OUT_BUFFER;
use tokio::net::tcp::OwnedReadHalf;

use super::{Layers, socket::Socket};

/// A peer that does not read its answers is not read from beyond this.
pub(crate) const BACKLOG: usize = 4 * OUT_BUFFER;

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
    pub(crate) fn settle(&mut self) -> Result<(), CloseReason> {
        match self {
            Self::Plain(_) | Self::Ended => Ok(()),
            Self::Layered(io) => io.settle(),
        }
    }
}

impl Layered {
    /// Charges what the layers hold now.
    pub(crate) fn settle(&mut self) -> Result<(), CloseReason> {
        self.layers.compact();
        let held = self.layers.held();
        if self.charge.set(if held <= FREE { 0 } else { held }) {
            return Ok(());
        }
        broker::counters::count(|c| c.memory_replies.add(1));
        Err(CloseReason::Memory)
    }
}
