//! The connection task: reads, hands packets on, writes when only it may, and ends.

use std::{
    collections::VecDeque,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use broker::{Charge, CloseReason, Target};
use gateway_core::{Durability, Effort, metrics::count};
use session::{Inbound, OUT_BUFFER};
use tokio::{
    io::{AsyncRead, ReadBuf},
    time::Sleep,
};

use super::{
    clock,
    device::{Device, Writer},
    durable::{Held, Reading},
    ending::End,
    flush,
    layered::Io,
    layers::LayerError,
    limiter::Limiter,
    packets::Handled,
    partial::{self, NoRoom, Partial},
    replay::Replays,
    shard::{Local, Work},
    started, timers,
    unfinished::Unfinished,
    wheel,
};
use crate::auth::Identity;

/// Reads per poll before other tasks get a turn.
const READS_PER_POLL: usize = 4;
/// A peer that does not read its answers is not read from beyond this.
pub(super) const BACKLOG: usize = 4 * OUT_BUFFER;

/// What few connections need.
#[derive(Default)]
pub(super) struct Rare {
    pub(super) replays: Option<Box<Replays>>,
    /// What is left of a packet that was too much for one poll.
    pub(super) unfinished: Option<Box<Unfinished>>,
    /// How the connection ends once everything that was read is handled.
    ending: Option<End>,
    /// Queues of shared groups held more than there was room for.
    pub(super) group_queues: bool,
    /// Answers that wait for the disk.
    pub(super) held: VecDeque<Held>,
    /// More of the session's queue, on its way from the disk.
    pub(super) reading: Option<Reading>,
    /// What the client's topic aliases have of the memory account.
    pub(super) aliases: Option<Charge>,
    limiter: Option<Box<Limiter>>,
    pause: Option<Pin<Box<Sleep>>>,
    stalled: Option<Pin<Box<Sleep>>>,
}

impl Rare {
    pub(super) fn is_unused(&self) -> bool {
        self.replays.is_none()
            && self.unfinished.is_none()
            && self.ending.is_none()
            && self.held.is_empty()
            && self.reading.is_none()
            && !self.group_queues
            && self.aliases.is_none()
            && self.limiter.is_none()
            && self.pause.is_none()
            && self.stalled.is_none()
    }
}

/// One connection that owns a session.
pub(super) struct Connection {
    pub(super) device: Arc<Device>,
    pub(super) epoch: u32,
    pub(super) inbound: Inbound,
    pub(super) identity: Arc<dyn Identity>,
    /// What the listener promises.
    pub(super) durability: Option<Durability>,
    pub(super) io: Io,
    /// A packet that is not complete yet.
    partial: Partial,
    pub(super) rare: Option<Box<Rare>>,
    /// There is something to handle before more is read: `partial` may hold complete frames, or a packet is unfinished.
    pub(super) unread: bool,
    /// The peer may not read its answers: look before reading on.
    backlogged: bool,
    /// So many answers wait for the disk that reading pauses.
    choked: bool,
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
        durability: Option<Durability>,
        early: Vec<u8>,
        limiter: Option<Box<Limiter>>,
    ) -> Self {
        let rare = limiter.map(|limiter| Box::new(Rare { limiter: Some(limiter), ..Rare::default() }));
        Self {
            device,
            epoch,
            inbound,
            identity,
            durability,
            io,
            partial: Partial::of(early),
            rare,
            unread: true,
            backlogged: false,
            choked: false,
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
        let mut local = Local::take();
        let polled = self.poll_with(&mut local, cx);
        local.work.end_poll();
        local.put_back();
        match polled {
            Ok(()) => Poll::Pending,
            Err(end) => Poll::Ready(end),
        }
    }

    /// Does what there is to do; `Ok` when something will wake the task for more.
    fn poll_with(&mut self, local: &mut Local, cx: &mut Context<'_>) -> Result<(), End> {
        local.work.turn.effort.renew();
        self.poll_link(&mut local.work.turn.effort, cx)?;
        for _ in 0..READS_PER_POLL {
            if local.work.turn.effort.is_spent() {
                break;
            }
            self.poll_load(&mut local.work, cx);
            let choked = self.poll_held(&mut local.work, cx)?;
            self.replay(&mut local.work, cx);
            if self.poll_paused(cx) {
                return Ok(());
            }
            if choked {
                self.choked = true;
                self.device.heard(self.epoch, wheel::PAUSED);
                return Ok(());
            }
            if std::mem::take(&mut self.choked) {
                self.device.heard(self.epoch, wheel::second());
            }
            if self.backlogged {
                let paused = self.is_backlogged(&mut local.work);
                self.device.heard(self.epoch, if paused { wheel::PAUSED } else { wheel::second() });
                if paused {
                    return Ok(());
                }
            }
            if self.unread {
                self.handle_unread(&mut local.work)?;
            } else if let Some(end) = self.rare.as_mut().and_then(|rare| rare.ending.take()) {
                return Err(end);
            } else {
                match self.poll_read(local, cx) {
                    Poll::Ready(read) => read?,
                    Poll::Pending => return Ok(()),
                }
            }
            if matches!(self.io, Io::Layered(_)) {
                // Only we can write the answers.
                self.poll_link(&mut local.work.turn.effort, cx)?;
            }
        }
        if local.work.turn.effort.is_spent() {
            count(|c| c.yields.add(1));
        } else {
            local.work.flush();
        }
        local.work.go_on(cx);
        Ok(())
    }

    /// Goes on with what was read before.
    fn handle_unread(&mut self, work: &mut Work) -> Result<(), End> {
        self.unread = false;
        // What it sent waits for us: that is no silence.
        self.device.heard(self.epoch, wheel::second());
        self.process(&[], work)
    }

    /// Looks at the link: is it still ours, must it end, is there something that only we can write?
    fn poll_link(&mut self, effort: &mut Effort, cx: &mut Context<'_>) -> Result<(), End> {
        let (want_write, direct, group_queues) = {
            let Some(mut slot) = self.device.lock_owned(self.epoch) else { return Err(End::Superseded) };
            let backlogged = slot.out.buffered() >= BACKLOG || self.io.is_backlogged();
            if std::mem::replace(&mut self.backlogged, backlogged) && !backlogged {
                self.device.heard(self.epoch, wheel::second());
            }
            let Some(link) = slot.link.as_mut() else { return Err(End::Superseded) };
            if let Some(close) = link.close {
                let failed = close == CloseReason::SessionEnded;
                return Err(if failed { End::Failed } else { End::Close(close) });
            }
            // Whoever needs it asks again in this poll.
            link.notify_room = false;
            let group_queues = std::mem::take(&mut link.group_queues);
            (link.want_write, matches!(link.writer, Writer::Direct(_)), group_queues)
        };
        if group_queues {
            self.rare().group_queues = true;
        }
        if direct && !want_write {
            return Ok(());
        }
        let before = self.written();
        let polled = if direct {
            flush::poll_flush(&self.device, self.epoch, cx).map_err(LayerError::from)
        } else {
            let polled = self.poll_write_layers(effort, cx);
            self.io.settle()?;
            polled
        };
        let blocked = match polled {
            Poll::Ready(Ok(())) => false,
            Poll::Ready(Err(_)) => return Err(End::Failed),
            Poll::Pending => true,
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

    fn watch_stall(&mut self, cx: &mut Context<'_>, blocked: bool, progress: bool) -> Result<(), End> {
        if !blocked {
            if let Some(rare) = &mut self.rare {
                rare.stalled = None;
            }
            return Ok(());
        }
        let limit = self.device.shared.limits.write_timeout.0;
        let rare = self.rare();
        if progress || rare.stalled.is_none() {
            rare.stalled = Some(Box::pin(timers::sleep(limit)));
        }
        let expired = rare.stalled.as_mut().is_some_and(|sleep| sleep.as_mut().poll(cx).is_ready());
        if expired {
            count(|c| c.write_timeouts.add(1));
            return Err(End::Close(CloseReason::WriteTimeout));
        }
        Ok(())
    }

    /// Whether reading is paused by the client's rate limit.
    fn poll_paused(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(pause) = self.rare.as_mut().and_then(|rare| rare.pause.as_mut()) else { return false };
        if pause.as_mut().poll(cx).is_pending() {
            return true;
        }
        self.rare().pause = None;
        self.device.heard(self.epoch, wheel::second());
        false
    }

    fn pause(&mut self, messages: u32, bytes: usize) {
        let Some(rare) = &mut self.rare else { return };
        let Some(limiter) = &mut rare.limiter else { return };
        if let Some(pause) = limiter.take(messages, bytes, clock::now()) {
            count(|c| c.rate_limited.add(1));
            rare.pause = Some(Box::pin(timers::sleep(pause.max(Duration::from_millis(1)))));
            self.device.heard(self.epoch, wheel::PAUSED);
        }
    }

    /// Whether the peer still does not read its answers after a flush.
    fn is_backlogged(&mut self, work: &mut Work) -> bool {
        work.flush();
        let Some(mut slot) = self.device.lock_owned(self.epoch) else { return false };
        self.backlogged = slot.out.buffered() >= BACKLOG || self.io.is_backlogged();
        if let Some(link) = &mut slot.link {
            link.notify_room |= self.backlogged;
        }
        self.backlogged
    }

    fn poll_read(&mut self, local: &mut Local, cx: &mut Context<'_>) -> Poll<Result<(), End>> {
        let have = self.partial.len();
        let start = if have < local.read.len() / 2 { have } else { 0 };
        let mut buffer = ReadBuf::new(&mut local.read[start..]);
        let socket = match &mut self.io {
            Io::Plain(read) => read,
            Io::Layered(io) => &mut io.read,
        };
        if ready!(Pin::new(socket).poll_read(cx, &mut buffer)).is_err() {
            return Poll::Ready(Err(End::Failed));
        }
        let read = buffer.filled().len();
        if read == 0 {
            return Poll::Ready(Err(End::PeerClosed));
        }
        count(|c| c.bytes_in.add(read as u64));
        self.device.heard(self.epoch, wheel::second());
        // The buffer has 64 KiB.
        local.work.turn.effort.spend(Effort::CALL + Effort::KIB * (read / 1024) as u32);
        Poll::Ready(self.process_read(have, read, local))
    }

    /// Handles `read` bytes that lie in the thread's buffer behind `have` bytes of a started frame.
    fn process_read(&mut self, have: usize, read: usize, local: &mut Local) -> Result<(), End> {
        let Local { read: buffer, plain, work } = local;
        match &mut self.io {
            Io::Plain(_) if have < buffer.len() / 2 => {
                buffer[..have].copy_from_slice(self.partial.bytes());
                drop(self.partial.take());
                let bytes = &buffer[..have + read];
                let used = self.handle(bytes, work)?;
                let kept = self.partial.keep(&bytes[used..], self.device.shared.broker.account());
                self.note_partial(kept, have > 0, used > 0)
            }
            Io::Plain(_) => self.process(&buffer[..read], work),
            Io::Layered(io) => {
                let start = if have < buffer.len() / 2 { have } else { 0 };
                plain.clear();
                let was_started = io.layers.is_started();
                let opened = io.layers.open(&mut buffer[start..start + read], plain);
                io.layers.charge(&mut work.turn.effort);
                let closed = io.layers.peer_closed();
                let is_started = io.layers.is_started();
                io.settle()?;
                self.process(plain, work)?;
                if self.partial.is_empty() && is_started {
                    // A record is a packet, too, as far as its time goes.
                    started::note(&self.device, self.epoch, 0, !plain.is_empty());
                } else if self.partial.is_empty() && was_started {
                    started::forget(&self.device, self.epoch);
                }
                let end = match opened {
                    Ok(()) if closed => End::PeerClosed,
                    Ok(()) => return Ok(()),
                    Err(LayerError::WebSocket(super::websocket::WebSocketError::Closed)) => End::PeerClosed,
                    Err(_) => End::Failed,
                };
                if self.unread {
                    self.rare().ending = Some(end);
                    return Ok(());
                }
                Err(end)
            }
        }
    }

    /// Handles the frames in `partial` followed by `bytes`; keeps what is incomplete.
    fn process(&mut self, bytes: &[u8], work: &mut Work) -> Result<(), End> {
        if self.partial.is_empty() {
            let used = self.handle(bytes, work)?;
            let kept = self.partial.keep(&bytes[used..], self.device.shared.broker.account());
            return self.note_partial(kept, false, used > 0);
        }
        let mut joined = self.partial.take();
        partial::append(&mut joined, bytes);
        let used = self.handle(&joined, work)?;
        let kept = self.partial.put_back_from(used, joined, self.device.shared.broker.account());
        self.note_partial(kept, true, used > 0)
    }

    /// Watches the time of a packet that has begun; `fresh` if it is another than before.
    fn note_partial(&self, kept: Result<(), NoRoom>, had: bool, fresh: bool) -> Result<(), End> {
        if let Err(NoRoom) = kept {
            count(|c| c.memory_partial.add(1));
            return Err(End::Close(CloseReason::Memory));
        }
        // What is there as a whole waits for us.
        if !self.partial.is_empty() && !self.unread {
            started::note(&self.device, self.epoch, self.partial.steps(), fresh);
        } else if had {
            started::forget(&self.device, self.epoch);
        }
        Ok(())
    }

    /// The connection ends: what it had begun is given back.
    pub(super) fn forget_partial(&mut self) {
        self.partial.clear(self.device.shared.broker.account());
        started::forget(&self.device, self.epoch);
    }

    /// Puts the answers into the out-buffer.
    pub(super) fn append_answers(&mut self, work: &mut Work) {
        if work.answers.is_empty() {
            return;
        }
        let Some(mut slot) = self.device.lock_owned(self.epoch) else { return };
        slot.out.append(&work.answers);
        self.backlogged = slot.out.buffered() >= BACKLOG || self.io.is_backlogged();
        if slot.mark_dirty() {
            drop(slot);
            work.turn.dirty.push(Arc::clone(&self.device) as Arc<dyn Target>);
        }
    }

    fn handle(&mut self, bytes: &[u8], work: &mut Work) -> Result<usize, End> {
        work.now = clock::now();
        work.answers.clear();
        let listed = work.turn.dirty.len();
        let Handled { used, messages, end } = self.handle_frames(bytes, work);
        if messages == 1 && !self.unread {
            // It came alone and need not wait for the other sockets; what comes in bulk goes out in bulk.
            work.turn.flush_early(listed);
        }
        self.append_answers(work);
        if used >= OUT_BUFFER / 2 {
            // Another such read, and what goes out would not fit into one buffer.
            work.flush();
        }
        self.pause(messages, used);
        end.map_or(Ok(used), Err)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.finish(End::Failed);
    }
}
