//! Output of this task to the socket: bytes that only this task may write, and the time that a peer may take to read
//! them.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use broker::{CloseReason, Session, Target};
use gateway_core::{Effort, clock};
use session::recycle;
use tokio::io::AsyncWrite;

use super::{Connection, ending::End};
use crate::{
    counters::count,
    layers::{
        LayerError,
        layered::{BACKLOG, Io},
    },
    local::{PacketWork, go_on_after_others},
    timers, wheel,
};
use device::{SocketWriter, Unsent, flush, trace};

impl Connection {
    /// Looks at the link: is it still ours, must it end, is there something that only we can write?
    pub(super) fn poll_link(&mut self, effort: &mut Effort, cx: &mut Context<'_>) -> Result<(), End> {
        let (want_write, direct, elsewhere) = {
            let Some(mut slot) = self.device.lock_owned(self.epoch) else { return Err(End::Superseded) };
            let backlogged = slot.out.buffered() >= BACKLOG || self.io.is_backlogged();
            if std::mem::replace(&mut self.backlogged, backlogged) && !backlogged {
                self.device.heard(self.epoch, wheel::now());
            }
            let Some(link) = slot.link.as_mut() else { return Err(End::Superseded) };
            if let Some(close) = link.close {
                let failed = close == CloseReason::SessionEnded;
                return Err(if failed { End::Failed } else { End::Close(close) });
            }
            // If it is needed, this poll asks for it again.
            link.notify_room = false;
            let elsewhere = std::mem::take(&mut link.elsewhere);
            (link.sending.is_left(), matches!(link.writer, SocketWriter::Direct(_)), elsewhere)
        };
        if elsewhere {
            self.rare().group_queues = true;
            self.do_replay_work();
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
            Io::Plain(_) | Io::Ended => self.device.lock().written(),
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
        let limit = self.device.broker().limits().write_timeout.0;
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

    /// Returns whether the peer still does not read its answers after a flush.
    pub(super) fn is_backlogged(&mut self, work: &mut PacketWork) -> bool {
        work.flush();
        let Some(mut slot) = self.device.lock_owned(self.epoch) else { return false };
        self.backlogged = slot.out.buffered() >= BACKLOG || self.io.is_backlogged();
        if let Some(link) = &mut slot.link {
            link.notify_room |= self.backlogged;
        }
        self.backlogged
    }

    /// Puts the answers into the out-buffer.
    pub(crate) fn append_answers(&mut self, work: &mut PacketWork) {
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

    /// TLS, WebSocket and QUIC, and where sending has a rate: takes the out-buffer, wraps it, writes it.
    fn poll_write_layers(
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
                        device::counters::count(|c| c.bytes_out.add(n as u64));
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
