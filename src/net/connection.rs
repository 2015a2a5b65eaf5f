//! The connection task: reads, hands packets on, writes when only it may, and ends.

use std::{
    collections::VecDeque,
    future::Future,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::tcp::{OwnedReadHalf, OwnedWriteHalf},
    time::Sleep,
};

use super::{
    clock,
    device::{Device, Writer},
    ending::End,
    flush,
    layers::{LayerError, Layers},
    limiter::Limiter,
    packets::Handled,
    shard::{flush_turn, with_local},
    wheel,
};
use crate::{
    auth::Identity,
    broker::{CloseReason, RetainedCursor, Target},
    session::{Inbound, OUT_BUFFER, recycle},
    telemetry::count,
};

/// Reads per poll before other tasks get a turn.
const READS_PER_POLL: usize = 4;
/// A peer that does not read its answers is not read from beyond this.
const BACKLOG: usize = 4 * OUT_BUFFER;
/// Retained messages delivered per poll.
const REPLAYS_PER_POLL: usize = 256;

/// The socket's reading side and, with layers, all of it.
pub(super) enum Io {
    Plain(OwnedReadHalf),
    Layered(Box<Layered>),
}

pub(super) struct Layered {
    read: OwnedReadHalf,
    pub(super) write: OwnedWriteHalf,
    pub(super) layers: Layers,
    /// Bytes written to the socket.
    total: u64,
}

impl Io {
    pub(super) fn layered(read: OwnedReadHalf, write: OwnedWriteHalf, layers: Layers) -> Self {
        Self::Layered(Box::new(Layered { read, write, layers, total: 0 }))
    }
}

/// What few connections need.
#[derive(Default)]
pub(super) struct Rare {
    pub(super) replays: VecDeque<RetainedCursor>,
    limiter: Option<Box<Limiter>>,
    pause: Option<Pin<Box<Sleep>>>,
    stalled: Option<Pin<Box<Sleep>>>,
}

impl Rare {
    fn is_unused(&self) -> bool {
        self.replays.is_empty() && self.limiter.is_none() && self.pause.is_none() && self.stalled.is_none()
    }
}

/// One connection that owns a session.
pub(super) struct Connection {
    pub(super) device: Arc<Device>,
    pub(super) epoch: u32,
    pub(super) inbound: Inbound,
    pub(super) identity: Arc<dyn Identity>,
    /// Session expiry granted at CONNECT.
    pub(super) expiry: u32,
    pub(super) io: Io,
    /// A frame that is not complete yet.
    partial: Vec<u8>,
    rare: Option<Box<Rare>>,
    /// `partial` holds bytes that came with the CONNECT and were not looked at.
    early: bool,
    pub(super) finished: bool,
}

impl Connection {
    #[expect(clippy::too_many_arguments, reason = "one call site, all different types")]
    pub(super) fn new(
        device: Arc<Device>,
        epoch: u32,
        io: Io,
        inbound: Inbound,
        identity: Arc<dyn Identity>,
        expiry: u32,
        early: Vec<u8>,
        limiter: Option<Box<Limiter>>,
    ) -> Self {
        let rare = limiter.map(|limiter| Box::new(Rare { limiter: Some(limiter), ..Rare::default() }));
        Self {
            device,
            epoch,
            inbound,
            identity,
            expiry,
            io,
            partial: early,
            rare,
            early: true,
            finished: false,
        }
    }

    pub(super) fn rare(&mut self) -> &mut Rare {
        self.rare.get_or_insert_with(Box::default)
    }

    /// A v5 DISCONNECT with `code`; nothing in v3.
    pub(super) fn disconnect_bytes(&self, code: u8) -> &'static [u8] {
        // 0xE0 0x01 code: one static table keeps this free of allocation.
        static TABLE: [[u8; 3]; 256] = {
            let mut table = [[0xE0, 0x01, 0]; 256];
            let mut code = 0;
            while code < 256 {
                table[code][2] = code as u8;
                code += 1;
            }
            table
        };
        if self.inbound.protocol().is_v5() { &TABLE[usize::from(code)] } else { &[] }
    }

    /// Goes on until the connection ends; the caller then calls [`Self::finish`].
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<End> {
        if std::mem::take(&mut self.early)
            && let Err(end) = self.process(&[])
        {
            return Poll::Ready(end);
        }
        for _ in 0..READS_PER_POLL {
            if let Some(end) = self.poll_link(cx) {
                return Poll::Ready(end);
            }
            if self.poll_paused(cx) {
                return Poll::Pending;
            }
            self.replay(cx);
            if self.is_backlogged() {
                return Poll::Pending;
            }
            match self.poll_read(cx) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(end)) => return Poll::Ready(end),
                Poll::Pending => return Poll::Pending,
            }
        }
        flush_turn();
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Looks at the link: is it still ours, must it end, is there something that only we can write?
    fn poll_link(&mut self, cx: &mut Context<'_>) -> Option<End> {
        let (want_write, direct) = {
            let Some(mut slot) = self.device.lock_owned(self.epoch) else { return Some(End::Superseded) };
            let Some(link) = slot.link.as_mut() else { return Some(End::Superseded) };
            if let Some(close) = link.close {
                return Some(if close == CloseReason::SessionEnded {
                    End::Failed
                } else {
                    End::Close(close)
                });
            }
            (link.want_write, matches!(link.writer, Writer::Direct(_)))
        };
        let before = self.written();
        let blocked = if direct {
            if !want_write {
                return None;
            }
            match flush::poll_flush(&self.device, cx) {
                Poll::Ready(Ok(())) => false,
                Poll::Ready(Err(_)) => return Some(End::Failed),
                Poll::Pending => true,
            }
        } else {
            match self.poll_write_layers(cx) {
                Poll::Ready(Ok(())) => false,
                Poll::Ready(Err(_)) => return Some(End::Failed),
                Poll::Pending => true,
            }
        };
        self.watch_stall(cx, blocked, self.written() != before)
    }

    /// Grows whenever the socket takes bytes.
    fn written(&self) -> u64 {
        match &self.io {
            Io::Plain(_) => self.device.lock().written(),
            Io::Layered(io) => io.total,
        }
    }

    fn watch_stall(&mut self, cx: &mut Context<'_>, blocked: bool, progress: bool) -> Option<End> {
        if !blocked {
            if let Some(rare) = &mut self.rare {
                rare.stalled = None;
            }
            return None;
        }
        let limit = self.device.shared.limits.write_timeout.0;
        let rare = self.rare();
        if progress || rare.stalled.is_none() {
            rare.stalled = Some(Box::pin(tokio::time::sleep(limit)));
        }
        let expired = rare.stalled.as_mut().is_some_and(|sleep| sleep.as_mut().poll(cx).is_ready());
        if expired {
            count(|c| c.write_timeouts.add(1));
            return Some(End::Close(CloseReason::WriteTimeout));
        }
        None
    }

    /// TLS and WebSocket: takes the out-buffer, wraps it, writes it.
    fn poll_write_layers(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), LayerError>> {
        let Io::Layered(io) = &mut self.io else { return Poll::Ready(Ok(())) };
        loop {
            while io.layers.sent < io.layers.wire.len() {
                match Pin::new(&mut io.write).poll_write(cx, &io.layers.wire[io.layers.sent..]) {
                    Poll::Ready(Ok(0)) => {
                        return Poll::Ready(Err(io::Error::from(io::ErrorKind::WriteZero).into()));
                    }
                    Poll::Ready(Ok(n)) => {
                        count(|c| c.bytes_out.add(n as u64));
                        io.layers.sent += n;
                        io.total += n as u64;
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
            let bytes = {
                let Some(mut slot) = self.device.lock_owned(self.epoch) else { return Poll::Ready(Ok(())) };
                if slot.out.buffered() == 0 {
                    slot.out.pump(&self.device.shared.env(clock::now()));
                }
                let bytes = slot.out.take_out();
                slot.out.note_written(0);
                if let Some(link) = &mut slot.link {
                    link.dirty = false;
                    link.want_write = false;
                }
                bytes
            };
            if bytes.is_empty() {
                return Poll::Ready(Ok(()));
            }
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
            link.want_write = want;
        }
    }

    /// Whether reading is paused by the client's rate limit.
    fn poll_paused(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(pause) = self.rare.as_mut().and_then(|rare| rare.pause.as_mut()) else { return false };
        if pause.as_mut().poll(cx).is_pending() {
            return true;
        }
        self.rare().pause = None;
        self.device.heard(wheel::second());
        false
    }

    fn pause(&mut self, messages: u32, bytes: usize) {
        let Some(rare) = &mut self.rare else { return };
        let Some(limiter) = &mut rare.limiter else { return };
        if let Some(pause) = limiter.take(messages, bytes, clock::now()) {
            count(|c| c.rate_limited.add(1));
            rare.pause = Some(Box::pin(tokio::time::sleep(pause.max(Duration::from_millis(1)))));
            self.device.heard(wheel::PAUSED);
        }
    }

    /// Delivers retained messages of new subscriptions as long as there is room.
    fn replay(&mut self, cx: &mut Context<'_>) {
        let Some(rare) = &mut self.rare else { return };
        if rare.replays.is_empty() {
            return;
        }
        let now = clock::now();
        let device = &self.device;
        let mut budget = REPLAYS_PER_POLL;
        while let Some(cursor) = rare.replays.front_mut() {
            if budget == 0 {
                cx.waker().wake_by_ref();
                break;
            }
            let room = {
                let mut slot = device.lock();
                let room = slot.out.has_room();
                if let Some(link) = &mut slot.link {
                    link.notify_room = !room;
                }
                room
            };
            if !room {
                break;
            }
            budget -= 1;
            match cursor.next(&device.shared.broker, now) {
                None => {
                    rare.replays.pop_front();
                }
                Some(None) => {}
                Some(Some(message)) => {
                    let delivered = device.deliver(&message.borrow(), cursor.options());
                    if delivered.flush {
                        join_turn(device);
                    }
                }
            }
        }
        if rare.replays.is_empty() {
            rare.replays = VecDeque::new();
            self.rare.take_if(|rare| rare.is_unused());
        }
    }

    fn is_backlogged(&self) -> bool {
        let Some(slot) = self.device.lock_owned(self.epoch) else { return false };
        if slot.out.buffered() < BACKLOG {
            return false;
        }
        drop(slot);
        flush_turn();
        let Some(mut slot) = self.device.lock_owned(self.epoch) else { return false };
        let still = slot.out.buffered() >= BACKLOG;
        if let Some(link) = &mut slot.link {
            link.notify_room = still;
        }
        still
    }

    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), End>> {
        let have = self.partial.len();
        let polled = with_local(|local| {
            let start = if have < local.read.len() / 2 { have } else { 0 };
            let mut buffer = ReadBuf::new(&mut local.read[start..]);
            let read = match &mut self.io {
                Io::Plain(read) => read,
                Io::Layered(io) => &mut io.read,
            };
            Pin::new(read).poll_read(cx, &mut buffer).map_ok(|()| buffer.filled().len())
        });
        let read = match polled {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Err(_)) => return Poll::Ready(Err(End::Failed)),
            Poll::Ready(Ok(0)) => return Poll::Ready(Err(End::PeerClosed)),
            Poll::Ready(Ok(read)) => read,
        };
        count(|c| c.bytes_in.add(read as u64));
        self.device.heard(wheel::second());
        Poll::Ready(self.process_read(have, read))
    }

    /// Handles `read` bytes that lie in the thread's buffer behind `have` bytes of a started frame.
    fn process_read(&mut self, have: usize, read: usize) -> Result<(), End> {
        let mut buffer = with_local(|local| std::mem::take(&mut local.read));
        let result = match &mut self.io {
            Io::Plain(_) if have < buffer.len() / 2 => {
                buffer[..have].copy_from_slice(&self.partial);
                self.partial = Vec::new();
                self.handle(&buffer[..have + read]).map(|used| {
                    self.partial = buffer[used..have + read].to_vec();
                })
            }
            Io::Plain(_) => {
                self.partial.extend_from_slice(&buffer[..read]);
                self.process(&[])
            }
            Io::Layered(io) => {
                let start = if have < buffer.len() / 2 { have } else { 0 };
                let mut plain = with_local(|local| std::mem::take(&mut local.plain));
                plain.clear();
                let opened = io.layers.open(&buffer[start..start + read], &mut plain);
                let closed = io.layers.closed;
                let result = self.process(&plain);
                with_local(|local| local.plain = plain);
                match opened {
                    _ if result.is_err() => result,
                    Ok(()) if closed => Err(End::PeerClosed),
                    Ok(()) => Ok(()),
                    Err(LayerError::WebSocket(super::websocket::WebSocketError::Closed)) => {
                        Err(End::PeerClosed)
                    }
                    Err(_) => Err(End::Failed),
                }
            }
        };
        with_local(|local| local.read = buffer);
        result
    }

    /// Handles the frames in `partial` followed by `bytes`; keeps what is incomplete.
    fn process(&mut self, bytes: &[u8]) -> Result<(), End> {
        if self.partial.is_empty() {
            let used = self.handle(bytes)?;
            self.partial = bytes[used..].to_vec();
            return Ok(());
        }
        let mut joined = std::mem::take(&mut self.partial);
        joined.extend_from_slice(bytes);
        let used = self.handle(&joined)?;
        if used == joined.len() {
            return Ok(());
        }
        joined.drain(..used);
        self.partial = joined;
        Ok(())
    }

    fn handle(&mut self, bytes: &[u8]) -> Result<usize, End> {
        let (mut turn, mut answers) =
            with_local(|local| (std::mem::take(&mut local.turn), std::mem::take(&mut local.answers)));
        answers.clear();
        let handled = self.handle_frames(bytes, &mut turn, &mut answers);
        if !answers.is_empty() && self.device.append(self.epoch, &answers) {
            turn.dirty.push(Arc::clone(&self.device) as Arc<dyn Target>);
        }
        with_local(|local| {
            local.turn = turn;
            local.answers = answers;
        });
        let Handled { used, messages, end } = handled;
        self.pause(messages, used);
        end.map_or(Ok(used), Err)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.finish(End::Failed);
    }
}

fn join_turn(device: &Arc<Device>) {
    with_local(|local| local.turn.dirty.push(Arc::clone(device) as Arc<dyn Target>));
}
