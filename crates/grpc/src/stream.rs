//! Receivers of messages on the gRPC side: a bounded buffer filled by whoever publishes and drained by the
//! task that serves the stream.
//!
//! Messages are encoded once, under the buffer's lock, straight into the batch that goes out. Invariants: a
//! stream never blocks or slows a publisher; its buffer never exceeds its cap in bytes and is charged, with what
//! the stream was asked for, to the process-wide memory budget; every message it loses is counted and, in the stream, a `Gap`
//! stands where it would have been.

mod buffer;
mod open;
mod queue;
mod target;

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use broker::{Broker, StreamHandle};
use bytes::{Buf, BufMut, Bytes};
use gateway_core::clock::now;
use prost::encoding::{DecodeContext, WireType};
use tokio::time::{Instant, Sleep, sleep_until};
use tokio_stream::Stream;
use tonic::Status;

use grpc_messages::{convert::Linger, encode, status::Error};

pub(super) use buffer::{StreamBacklog, StreamOptions};
pub(super) use open::{OpenStream, OpenStreams, StreamSlot, size_of_filters, size_of_names};
pub(super) use queue::{ResponseQueue, ResponseSender, StreamEnd, responses};
pub(super) use target::{StreamTake, StreamTarget};

use crate::counters::count;

/// A response that is encoded already, or is not to be decoded; takes the place of the generated type.
#[derive(Debug, Clone, Default)]
pub struct RawMessage(pub Bytes);

impl prost::Message for RawMessage {
    fn encode_raw(&self, buf: &mut impl BufMut) {
        buf.put_slice(&self.0);
    }

    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buf: &mut impl Buf,
        ctx: DecodeContext,
    ) -> Result<(), prost::DecodeError> {
        // Never asked for: a message is taken as a whole.
        prost::encoding::skip_field(wire_type, tag, buf, ctx)
    }

    fn merge(&mut self, mut buf: impl Buf) -> Result<(), prost::DecodeError> {
        self.0 = buf.copy_to_bytes(buf.remaining());
        Ok(())
    }

    fn encoded_len(&self) -> usize {
        self.0.len()
    }

    fn clear(&mut self) {
        self.0 = Bytes::new();
    }
}

/// State of a stream of responses.
pub(super) struct Subscription {
    target: Arc<StreamTarget>,
    /// The rest of a batch of packets, each a response of its own.
    packets: Bytes,
    gathering: Option<Gathering>,
    heartbeat: Option<(Duration, Pin<Box<Sleep>>)>,
    ended: bool,
    handle: Option<StreamHandle>,
    _slot: StreamSlot,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        // In this order: no more deliveries, then the memory is given back (a publisher's match cache may keep
        // the target itself for a while), then the place is free.
        self.handle = None;
        self.target.discard();
    }
}

/// Pause between batches that are not full, where the caller did not choose.
const ADAPTIVE: Duration = Duration::from_millis(5);

/// The wait for further messages.
struct Gathering {
    linger: Linger,
    /// Made when first needed.
    timer: Option<Pin<Box<Sleep>>>,
    /// The timer counts for the next batch.
    running: bool,
    /// Time at which the last batch went.
    last: Option<Instant>,
}

impl Gathering {
    /// Tells whether only a full batch may go now; if so, the task is woken when that changes.
    fn holds(&mut self, target: &StreamTarget, cx: &mut Context<'_>) -> bool {
        if !self.running && target.has_data() {
            let now = Instant::now();
            let until = match self.linger {
                Linger::Fixed(span) => now + span,
                Linger::Adaptive => self.last.map_or(now, |last| last + ADAPTIVE),
            };
            if until <= now {
                return false;
            }
            self.start(until);
        }
        self.running && self.timer.as_mut().is_some_and(|timer| timer.as_mut().poll(cx).is_pending())
    }

    fn start(&mut self, until: Instant) {
        self.running = true;
        match &mut self.timer {
            Some(timer) => timer.as_mut().reset(until),
            none => *none = Some(Box::pin(sleep_until(until))),
        }
    }

    /// A batch of this many messages was handed out.
    fn went(&mut self, messages: u32) {
        self.running = false;
        if self.linger == Linger::Adaptive {
            let now = Instant::now();
            self.last = Some(now);
            // More will come: their first one need not wake the reader.
            if messages > 1 {
                self.start(now + ADAPTIVE);
            }
        }
    }
}

/// Timers of a [`Subscription`].
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct StreamTimers {
    pub(super) linger: Linger,
    /// Interval of heartbeats.
    pub(super) heartbeat: Option<Duration>,
}

impl Subscription {
    /// Registers `target` with the broker for `filters`, in the place of `slot`.
    pub(super) fn attach(
        broker: &Broker,
        slot: StreamSlot,
        target: Arc<StreamTarget>,
        filters: &[String],
        pace: StreamTimers,
    ) -> Self {
        slot.feeds(&target, filters);
        let handle = broker.attach_stream(target.clone(), filters);
        Self::new(target, Some(handle), slot, pace)
    }

    fn new(
        target: Arc<StreamTarget>,
        handle: Option<StreamHandle>,
        slot: StreamSlot,
        pace: StreamTimers,
    ) -> Self {
        let timer = |span: Duration| (span, Box::pin(sleep_until(Instant::now() + span)));
        Self {
            target,
            packets: Bytes::new(),
            gathering: (pace.linger != Linger::Fixed(Duration::ZERO)).then(|| Gathering {
                linger: pace.linger,
                timer: None,
                running: false,
                last: None,
            }),
            heartbeat: pace.heartbeat.map(timer),
            ended: false,
            handle,
            _slot: slot,
        }
    }

    /// Ends the stream without sending anything more.
    pub(super) fn end(&mut self) {
        self.ended = true;
        self.packets.clear();
    }

    /// Tells whether the gateway ended the stream.
    pub(super) fn is_closed(&self) -> bool {
        self.target.is_closed()
    }

    fn next_packet(&mut self) -> Option<RawMessage> {
        if self.packets.len() < 4 {
            return None;
        }
        let length = self.packets.get_u32_le() as usize;
        Some(RawMessage(self.packets.split_to(length.min(self.packets.len()))))
    }

    fn poll_response(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<RawMessage, Error>>> {
        if let Some(response) = self.next_packet() {
            return Poll::Ready(Some(Ok(response)));
        }
        if self.ended {
            return Poll::Ready(None);
        }
        let full_only = self.gathering.as_mut().is_some_and(|gathering| gathering.holds(&self.target, cx));
        loop {
            match self.target.take(cx, full_only) {
                StreamTake::Batch { bytes, messages } => {
                    if let Some(gathering) = &mut self.gathering {
                        gathering.went(messages);
                    }
                    count(|c| c.grpc_delivered.add(u64::from(messages)));
                    if !self.target.is_packets() {
                        return Poll::Ready(Some(Ok(RawMessage(bytes))));
                    }
                    self.packets = bytes;
                    if let Some(packet) = self.next_packet() {
                        return Poll::Ready(Some(Ok(packet)));
                    }
                    // Only losses, which the packet form cannot express.
                }
                StreamTake::Closed(error) => {
                    self.ended = true;
                    return Poll::Ready(Some(Err(error)));
                }
                StreamTake::Nothing => return self.poll_heartbeat(cx),
            }
        }
    }

    fn poll_heartbeat(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<RawMessage, Error>>> {
        let Some((_, sleep)) = &mut self.heartbeat else { return Poll::Pending };
        if sleep.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        let mut bytes = Vec::new();
        encode::heartbeat(&mut bytes, now());
        Poll::Ready(Some(Ok(RawMessage(bytes.into()))))
    }
}

impl Stream for Subscription {
    type Item = Result<RawMessage, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let polled = self.poll_response(cx);
        if polled.is_ready()
            && let Some((span, sleep)) = &mut self.heartbeat
        {
            let next = Instant::now() + *span;
            // Moving the timer costs a lock: not for every batch of a busy stream.
            if next.duration_since(sleep.deadline()) > *span / 8 {
                sleep.as_mut().reset(next);
            }
        }
        polled.map(|response| response.map(|result| result.map_err(Status::from)))
    }
}

#[cfg(test)]
mod tests;
