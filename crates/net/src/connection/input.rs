//! Bytes from the socket: through the layers, joined with the beginning of a packet, to the frames.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use broker::CloseReason;
use gateway_core::{Effort, clock};
use session::OUT_BUFFER;
use tokio::io::{AsyncRead, ReadBuf};

use super::{
    Connection,
    ending::End,
    frames::Handled,
    partial::{self, NoPacketRoom},
    started,
};
use crate::{
    counters::count,
    layers::{LayerError, layered::Io, websocket::WebSocketError},
    local::{PacketWork, ShardLocal},
    wheel,
};

impl Connection {
    /// Handles what there is: what was read before, then what the socket has. Pending when the socket has nothing.
    pub(super) fn poll_input(
        &mut self,
        local: &mut ShardLocal,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), End>> {
        if self.unread {
            return Poll::Ready(self.handle_unread(&mut local.work));
        }
        if let Some(end) = self.rare.as_mut().and_then(|rare| rare.ending.take()) {
            return Poll::Ready(Err(end));
        }
        self.poll_read(local, cx)
    }

    /// Goes on with the bytes that were read before.
    fn handle_unread(&mut self, work: &mut PacketWork) -> Result<(), End> {
        self.unread = false;
        // The client's bytes wait for the gateway: that is no silence.
        self.device.heard(self.epoch, wheel::now());
        self.process(&[], work)
    }

    fn poll_read(&mut self, local: &mut ShardLocal, cx: &mut Context<'_>) -> Poll<Result<(), End>> {
        let have = self.partial.len();
        let start = if have < local.read.len() / 2 { have } else { 0 };
        let mut buffer = ReadBuf::new(&mut local.read[start..]);
        let polled = match &mut self.io {
            Io::Plain(read) => Pin::new(read).poll_read(cx, &mut buffer),
            Io::Layered(io) => Pin::new(&mut io.socket).poll_read(cx, &mut buffer),
            Io::Ended => return Poll::Ready(Err(End::Failed)),
        };
        if ready!(polled).is_err() {
            return Poll::Ready(Err(End::Failed));
        }
        let read = buffer.filled().len();
        if read == 0 {
            return Poll::Ready(Err(End::PeerClosed));
        }
        count(|c| c.bytes_in.add(read as u64));
        self.device.heard(self.epoch, wheel::now());
        // The buffer has 64 KiB.
        local.work.turn.effort.spend(Effort::CALL + Effort::KIB * (read / 1024) as u32);
        Poll::Ready(self.process_read(have, read, local))
    }

    /// Handles `read` bytes that lie in the thread's buffer after `have` bytes of a started frame.
    fn process_read(&mut self, have: usize, read: usize, local: &mut ShardLocal) -> Result<(), End> {
        let ShardLocal { read: buffer, plain, work } = local;
        match &mut self.io {
            Io::Plain(_) if have < buffer.len() / 2 => {
                buffer[..have].copy_from_slice(self.partial.bytes());
                drop(self.partial.take());
                let bytes = &buffer[..have + read];
                let used = self.handle(bytes, work)?;
                let kept = self.partial.keep(&bytes[used..], self.device.broker().account());
                self.note_partial(kept, have > 0, used > 0)
            }
            Io::Plain(_) | Io::Ended => self.process(&buffer[..read], work),
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
                    Err(LayerError::WebSocket(WebSocketError::Closed)) => End::PeerClosed,
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
    fn process(&mut self, bytes: &[u8], work: &mut PacketWork) -> Result<(), End> {
        if self.partial.is_empty() {
            let used = self.handle(bytes, work)?;
            let kept = self.partial.keep(&bytes[used..], self.device.broker().account());
            return self.note_partial(kept, false, used > 0);
        }
        let mut joined = self.partial.take();
        partial::append(&mut joined, bytes);
        let used = self.handle(&joined, work)?;
        let kept = self.partial.put_back_from(used, joined, self.device.broker().account());
        self.note_partial(kept, true, used > 0)
    }

    /// Watches the time of a packet that has begun; `fresh` if it is another than before.
    fn note_partial(&self, kept: Result<(), NoPacketRoom>, had: bool, fresh: bool) -> Result<(), End> {
        if let Err(NoPacketRoom) = kept {
            broker::counters::count(|c| c.memory_partial.add(1));
            return Err(End::Close(CloseReason::Memory));
        }
        // A complete frame waits for the gateway and is no partial packet.
        if !self.partial.is_empty() && !self.unread {
            started::note(&self.device, self.epoch, self.partial.steps(), fresh);
        } else if had {
            started::forget(&self.device, self.epoch);
        }
        Ok(())
    }

    /// The connection ends: what it had begun is given back.
    pub(crate) fn forget_partial(&mut self) {
        self.partial.clear(self.device.broker().account());
        started::forget(&self.device, self.epoch);
    }

    fn handle(&mut self, bytes: &[u8], work: &mut PacketWork) -> Result<usize, End> {
        work.now = clock::now();
        work.answers.clear();
        let listed = work.turn.dirty.len();
        let Handled { used, messages, end } = self.handle_frames(bytes, work);
        if messages == 1 && !self.unread {
            // A message that came alone need not wait for the other sockets; messages that come in bulk go out in bulk.
            work.turn.flush_early(listed);
        }
        self.append_answers(work);
        if used >= OUT_BUFFER / 2 {
            // With another such read the output would not fit into one buffer.
            work.flush();
        }
        self.pause(messages, used);
        end.map_or(Ok(used), Err)
    }
}
