//! A client whose session is at another gateway: its bytes go there, and come from there, through the layers of its socket.
//!
//! Bytes that a side does not take are bounded: of the client nothing is read while its gateway does not take what came before, and the other
//! way round. Without traffic it holds no buffer.

use std::{
    future::Future,
    io,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use broker::{Charge, MemoryKind};
use gateway_core::Effort;
use links::{RelayStream, STREAM_WINDOW};
use tokio::{
    io::{AsyncRead as _, AsyncWrite as _, ReadBuf},
    time::Sleep,
};

use super::lingering::Remains;
use crate::{
    NetShared,
    counters::count,
    layers::{Layers, layered::BACKLOG, socket::Socket},
    local::{ShardLocal, go_on_after_others},
    timers,
};

/// Bytes that it may hold uncharged.
const FREE: usize = 1 << 10;

/// Bytes both ways until either side ends.
pub(crate) struct Relaying {
    open: Option<OpenRelay>,
}

struct OpenRelay {
    socket: Socket,
    layers: Layers,
    home: RelayStream,
    /// Bytes of the client that its home has not taken.
    to_home: Vec<u8>,
    /// The home sends no more.
    home_ended: bool,
    charge: Charge,
    /// Fires when the client has taken nothing for too long.
    stalled: Option<Pin<Box<Sleep>>>,
    write_timeout: Duration,
}

/// The relay is over.
struct RelayEnd;

impl From<io::Error> for RelayEnd {
    fn from(_: io::Error) -> Self {
        Self
    }
}

impl Relaying {
    /// Relays a client; `first` are bytes for its home.
    pub(crate) fn new(
        socket: Socket,
        layers: Layers,
        home: RelayStream,
        first: Vec<u8>,
        shared: &NetShared,
    ) -> Self {
        let open = OpenRelay {
            socket,
            layers,
            home,
            to_home: first,
            home_ended: false,
            charge: Charge::new(shared.broker.account(), MemoryKind::Replies),
            stalled: None,
            write_timeout: shared.limits.write_timeout.0,
        };
        Self { open: Some(open) }
    }
}

impl Drop for Relaying {
    fn drop(&mut self) {
        count(|c| c.relays_ended.add(1));
    }
}

impl Future for Relaying {
    /// The remains of the socket, if its client was told something last.
    type Output = Option<Remains>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Remains>> {
        let Some(open) = &mut self.open else { return Poll::Ready(None) };
        let Err(RelayEnd) = open.poll_both(cx) else { return Poll::Pending };
        let ended_by_home = open.home_ended;
        let open = self.open.take().filter(|_| ended_by_home);
        Poll::Ready(open.and_then(|open| Remains::of(open.socket)))
    }
}

impl OpenRelay {
    fn poll_both(&mut self, cx: &mut Context<'_>) -> Result<(), RelayEnd> {
        let mut effort = Effort::default();
        while !effort.is_spent() {
            let is_read = self.poll_client(&mut effort, cx)?;
            let is_written = self.poll_home(&mut effort, cx)?;
            if !is_read && !is_written {
                return self.settle();
            }
        }
        go_on_after_others(cx);
        self.settle()
    }

    /// Charges what it holds. While a side does not take what is there for it, the window of its stream fills, too.
    fn settle(&mut self) -> Result<(), RelayEnd> {
        self.layers.compact();
        let is_held_up = !self.to_home.is_empty() || self.layers.unsent() > 0;
        let window = if is_held_up { STREAM_WINDOW as usize } else { 0 };
        let held = self.to_home.capacity() + self.layers.held() + window;
        if self.charge.set(if held <= FREE { 0 } else { held }) {
            return Ok(());
        }
        broker::counters::count(|c| c.memory_replies.add(1));
        Err(RelayEnd)
    }

    /// From the client to its home. Returns whether something was read.
    fn poll_client(&mut self, effort: &mut Effort, cx: &mut Context<'_>) -> Result<bool, RelayEnd> {
        // A client that asks for answers of its layers and takes none is not read from.
        if !self.poll_send_home(cx)? || self.layers.unsent() >= BACKLOG {
            return Ok(false);
        }
        let mut local = ShardLocal::take();
        let mut buffer = ReadBuf::new(&mut local.read);
        let polled = Pin::new(&mut self.socket).poll_read(cx, &mut buffer);
        let bytes = buffer.filled_mut();
        let read = bytes.len();
        let opened = if read > 0 { self.layers.open(bytes, &mut self.to_home) } else { Ok(()) };
        local.put_back();
        match polled {
            Poll::Pending => return Ok(false),
            Poll::Ready(result) => result?,
        }
        count(|c| c.bytes_in.add(read as u64));
        effort.spend(Effort::CALL);
        effort.spend_each(Effort::KIB, read / 1024);
        self.layers.charge(effort);
        // Bytes from before a fault are the home's, which then sees the end.
        self.poll_send_home(cx)?;
        if read == 0 || opened.is_err() || self.layers.peer_closed() {
            return Err(RelayEnd);
        }
        Ok(true)
    }

    /// Sends what waits for the home. Returns whether all is sent.
    fn poll_send_home(&mut self, cx: &mut Context<'_>) -> Result<bool, RelayEnd> {
        while !self.to_home.is_empty() {
            match Pin::new(&mut self.home).poll_write(cx, &self.to_home) {
                Poll::Ready(taken) => drop(self.to_home.drain(..taken?)),
                Poll::Pending => return Ok(false),
            }
        }
        self.to_home = Vec::new();
        Ok(true)
    }

    /// From the home to the client. Returns whether something was read.
    fn poll_home(&mut self, effort: &mut Effort, cx: &mut Context<'_>) -> Result<bool, RelayEnd> {
        if !self.poll_send_client(cx)? {
            return Ok(false);
        }
        if self.home_ended {
            // Its last bytes are sent.
            return Err(RelayEnd);
        }
        let mut local = ShardLocal::take();
        let mut buffer = ReadBuf::new(&mut local.read);
        let polled = Pin::new(&mut self.home).poll_read(cx, &mut buffer);
        let bytes = buffer.filled();
        let read = bytes.len();
        let sealed = self.layers.seal(bytes);
        local.put_back();
        if polled.is_pending() {
            return Ok(false);
        }
        effort.spend(Effort::CALL);
        effort.spend_each(Effort::KIB, read / 1024);
        self.home_ended = read == 0;
        if self.home_ended {
            self.layers.close(None);
        }
        if sealed.is_err() {
            return Err(RelayEnd);
        }
        Ok(true)
    }

    /// Sends what waits for the client. Returns whether all is sent.
    fn poll_send_client(&mut self, cx: &mut Context<'_>) -> Result<bool, RelayEnd> {
        while self.layers.unsent() > 0 {
            match Pin::new(&mut self.socket).poll_write(cx, &self.layers.wire[self.layers.sent..]) {
                Poll::Ready(Ok(0)) => return Err(RelayEnd),
                Poll::Ready(written) => {
                    let written = written?;
                    device::counters::count(|c| c.bytes_out.add(written as u64));
                    self.layers.sent += written;
                    self.stalled = None;
                }
                Poll::Pending => {
                    let limit = self.write_timeout;
                    let stalled = self.stalled.get_or_insert_with(|| Box::pin(timers::sleep(limit)));
                    if stalled.as_mut().poll(cx).is_ready() {
                        count(|c| c.write_timeouts.add(1));
                        return Err(RelayEnd);
                    }
                    return Ok(false);
                }
            }
        }
        self.stalled = None;
        self.layers.wire = Vec::new();
        self.layers.sent = 0;
        Ok(true)
    }
}
