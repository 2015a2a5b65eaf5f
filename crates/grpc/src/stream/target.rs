//! [`StreamTarget`] is what the broker knows of a stream: it takes messages in by the slow policy.

use std::{sync::Arc, task::Context};

use broker::{Delivered, Selector, Target};
use bytes::Bytes;
use gateway_core::{DropReason, Message, Offer, Outcome, Timestamp, clock, matches};
use parking_lot::Mutex;

use super::buffer::{
    BATCH_OVERHEAD, BufferShortage, BufferedValue, EncodedBatch, StreamBacklog, StreamBuffer, StreamOptions,
    VALUE_OVERHEAD,
};

use crate::{counters::count, server::caller_memory::CallerMemory};
use grpc_messages::{
    convert::SlowPolicy,
    encode::{self, StreamForm},
    status::Error,
};

/// The memory budget is charged in steps of this size, so that not every message touches what all threads share.
const CHARGE_STEP: usize = 16 << 10;

/// A stream's buffer.
pub(crate) struct StreamTarget {
    caller_memory: Arc<CallerMemory>,
    selector: Selector,
    options: StreamOptions,
    /// Filters of the topics whose deletions are passed on; empty except for a watch of latest values.
    watched: Vec<String>,
    state: Mutex<StreamBuffer>,
}

impl std::fmt::Debug for StreamTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StreamTarget").field("options", &self.options).finish_non_exhaustive()
    }
}

/// Result of [`StreamTarget::take`].
#[derive(Debug)]
pub(crate) enum StreamTake {
    /// A batch with this many messages in it.
    Batch { bytes: Bytes, messages: u32 },
    /// Nothing (or not enough); the waker is registered.
    Nothing,
    /// Everything was taken, and the stream is over.
    Closed(Error),
}

impl StreamTarget {
    /// An empty buffer, charged to `caller_memory` as it fills.
    pub(crate) fn new(caller_memory: Arc<CallerMemory>, selector: Selector, options: StreamOptions) -> Self {
        // Several batches must fit, or dropping the oldest would drop all.
        let batch = options.batch.min(options.buffer / 4);
        let options = StreamOptions { batch, ..options };
        Self { caller_memory, selector, options, watched: Vec::new(), state: Mutex::default() }
    }

    /// Passes on deletions on topics that match one of `filters`.
    pub(crate) fn watching(mut self, filters: Vec<String>) -> Self {
        self.watched = filters;
        self
    }

    /// Passes the deletion of values on to a watcher, after what came before and in place of what is unread.
    pub(crate) fn removed(&self, device: &str, topics: &[Arc<str>]) {
        if self.watched.is_empty() || !self.selector.wants_device(Some(device)) {
            return;
        }
        let now = clock::now();
        let waker = {
            let mut state = self.state.lock();
            if state.closed.is_some() {
                return;
            }
            for topic in topics.iter().filter(|topic| self.watched.iter().any(|f| matches(f, topic))) {
                let encode = |out: &mut Vec<u8>| encode::removed(out, device, topic);
                let need = encode::removed_bound(device, topic);
                let of = (device, &**topic, now);
                if let Outcome::Dropped(reason) = self.conflate(&mut state, of, need, encode) {
                    state.dropped += 1;
                    count_drop(reason);
                }
            }
            let ready = !state.full_only || state.is_full(self.options.batch);
            state.waker.take_if(|_| ready)
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// The reader is gone: drops what is buffered, gives its memory back and takes nothing more.
    pub(super) fn discard(&self) {
        let old = {
            let mut state = self.state.lock();
            let closed = Some(state.closed.take().unwrap_or(Error::ShuttingDown));
            std::mem::replace(&mut *state, StreamBuffer { closed, ..StreamBuffer::default() })
        };
        self.caller_memory.release(old.charged);
    }

    /// Ends the stream after what is buffered and wakes its reader.
    pub(super) fn close(&self, error: Error) {
        let waker = {
            let mut state = self.state.lock();
            state.closed.get_or_insert(error);
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Fixed properties.
    pub(crate) fn options(&self) -> &StreamOptions {
        &self.options
    }

    /// Returns the current backlog.
    pub(crate) fn backlog(&self) -> StreamBacklog {
        let state = self.state.lock();
        StreamBacklog {
            waiting: state.waiting() as u64,
            bytes: (state.bytes - state.sealed.len() * BATCH_OVERHEAD) as u64,
            oldest: state.oldest(),
            sent: state.sent,
            dropped: state.dropped,
            conflated: state.conflated,
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.state.lock().closed.is_some()
    }

    /// Tells whether anything waits for the reader.
    pub(super) fn has_data(&self) -> bool {
        !self.state.lock().is_empty()
    }

    #[cfg(test)]
    pub(super) fn state_bytes(&self) -> usize {
        self.state.lock().bytes
    }

    /// Bytes that values have, used or not.
    #[cfg(test)]
    pub(super) fn room_of_values(&self) -> usize {
        self.state.lock().values.queue.iter().map(|value| value.bytes.capacity()).sum()
    }

    /// Tells whether batches are made of packets with their lengths.
    pub(super) fn is_packets(&self) -> bool {
        self.options.form == StreamForm::Packet
    }

    /// The next batch; with `full_only` only a full one, unless the stream is over.
    pub(super) fn take(&self, cx: &Context<'_>, full_only: bool) -> StreamTake {
        let mut state = self.state.lock();
        let full_only = full_only && state.closed.is_none();
        if let Some(batch) = state.pop(&self.options, full_only) {
            self.settle(&mut state);
            state.sent += u64::from(batch.messages);
            drop(state);
            return self.finish(batch);
        }
        if let Some(error) = &state.closed
            && state.is_empty()
        {
            return StreamTake::Closed(error.clone());
        }
        state.full_only = full_only;
        match &mut state.waker {
            Some(waker) => waker.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
        StreamTake::Nothing
    }

    /// Puts the gaps in front. Outside of the lock: a copy of the batch, but rare.
    fn finish(&self, batch: EncodedBatch) -> StreamTake {
        let EncodedBatch { lost, mut bytes, messages, .. } = batch;
        if !lost.is_empty() && !self.is_packets() {
            let mut whole = Vec::with_capacity(bytes.len() + encode::GAPS_BOUND);
            lost.encode(&mut whole);
            whole.append(&mut bytes);
            bytes = whole;
        }
        StreamTake::Batch { bytes: bytes.into(), messages }
    }

    /// Adds one message, or says why not.
    fn add(&self, state: &mut StreamBuffer, message: &Message<'_>) -> Outcome {
        if state.closed.is_some() {
            return Outcome::Dropped(DropReason::SessionEnded);
        }
        let need = encode::size_bound(message);
        if need + BATCH_OVERHEAD > self.options.buffer {
            state.lost.too_large += 1;
            return Outcome::Dropped(DropReason::TooLarge);
        }
        match self.options.policy {
            SlowPolicy::Conflate => {
                let device = message.origin.client_id.map_or("", |id| id.as_str());
                let form = self.options.form;
                let encode = |out: &mut Vec<u8>| encode::message(out, form, message);
                self.conflate(state, (device, message.topic, message.received), need, encode)
            }
            _ => self.append(state, message, need),
        }
    }

    fn append(&self, state: &mut StreamBuffer, message: &Message<'_>, size: usize) -> Outcome {
        let is_full = state.open.messages > 0 && state.open.bytes.len() + size > self.options.batch;
        let need = if is_full { size + BATCH_OVERHEAD } else { size };
        if let Some(shortage) = self.shortage(&mut state.charged, state.bytes, need) {
            let dropped_oldest =
                self.options.policy == SlowPolicy::DropOldest && self.drop_oldest(state, need, shortage);
            if !dropped_oldest {
                if self.options.policy == SlowPolicy::Close {
                    state.closed = Some(shortage.error());
                } else {
                    state.lost.note(shortage, 1);
                }
                return shortage.outcome();
            }
        }
        if state.open.messages > 0 && state.open.bytes.len() + size > self.options.batch {
            state.seal();
        }
        if state.open.bytes.capacity() == 0 {
            let usual = (state.last + state.last / 4).min(self.options.batch);
            // Reserved memory is charged as used memory is.
            if self.shortage(&mut state.charged, state.bytes, usual).is_none() {
                state.open.bytes.reserve(usual);
            }
        }
        let form = self.options.form;
        let open = &mut state.open;
        let before = open.bytes.len();
        if !state.lost.is_empty() {
            let lost = std::mem::take(&mut state.lost);
            if form != StreamForm::Packet {
                lost.encode(&mut open.bytes);
            }
            open.inside.add(lost);
        }
        encode::message(&mut open.bytes, form, message);
        if open.messages == 0 {
            open.since = message.received;
        }
        open.messages += 1;
        state.bytes += open.bytes.len() - before;
        Outcome::Sent
    }

    /// Why there is no room for `need` bytes more than `bytes`; charges them if there is.
    fn shortage(&self, charged: &mut usize, bytes: usize, need: usize) -> Option<BufferShortage> {
        let total = bytes + need;
        if total > self.options.buffer {
            return Some(BufferShortage::Buffer);
        }
        let missing = total.saturating_sub(*charged);
        if missing == 0 {
            return None;
        }
        for step in [missing.next_multiple_of(CHARGE_STEP), missing] {
            if self.caller_memory.charge(step) {
                *charged += step;
                return None;
            }
        }
        Some(BufferShortage::Memory)
    }

    /// Makes room for `need` bytes by dropping the oldest batches; false if that would not be enough.
    fn drop_oldest(&self, state: &mut StreamBuffer, need: usize, shortage: BufferShortage) -> bool {
        if shortage == BufferShortage::Buffer {
            state.make_room(self.options.buffer - need, shortage);
            if self.shortage(&mut state.charged, state.bytes, need).is_none() {
                return true;
            }
        }
        // Others use the budget up: only what this stream has charged already can make room.
        if state.charged < need {
            return false;
        }
        state.make_room(state.charged - need, BufferShortage::Memory);
        true
    }

    /// Gives back what is charged beyond need.
    fn settle(&self, state: &mut StreamBuffer) {
        let set_aside = state.open.bytes.capacity() - state.open.bytes.len();
        let needed = (state.bytes + set_aside).next_multiple_of(CHARGE_STEP);
        if state.charged > needed {
            self.caller_memory.release(state.charged - needed);
            state.charged = needed;
        }
    }

    /// Puts what `encode` writes, at most `need` bytes, in place of what is unread of that device and topic.
    fn conflate(
        &self,
        state: &mut StreamBuffer,
        (device, topic, at): (&str, &str, Timestamp),
        need: usize,
        encode: impl FnOnce(&mut Vec<u8>),
    ) -> Outcome {
        let StreamBuffer { values, bytes, lost, charged, conflated, .. } = state;
        values.key.clear();
        values.key.extend_from_slice(device.as_bytes());
        values.key.push(0); // in no client id and no topic
        values.key.extend_from_slice(topic.as_bytes());

        if let Some(&serial) = values.index.get(values.key.as_slice()) {
            let place = usize::try_from(serial - values.first).ok();
            let Some(value) = place.and_then(|place| values.queue.get_mut(place)) else {
                debug_assert!(false, "the index names an unread value");
                return Outcome::Dropped(DropReason::QueueFull);
            };
            *bytes -= value.bytes.len();
            if !value.bytes.is_empty() {
                lost.conflated += 1;
                *conflated += 1;
            }
            value.bytes.clear();
            if let Some(shortage) = self.shortage(charged, *bytes, need) {
                // An old value must not pass for the last one: it goes too.
                value.bytes = Vec::new();
                lost.note(shortage, 1);
                return shortage.outcome();
            }
            if value.bytes.capacity() > 2 * need {
                // One that was large would be held on for a small one.
                value.bytes = Vec::new();
            }
            encode(&mut value.bytes);
            *bytes += value.bytes.len();
            return Outcome::Sent;
        }
        let overhead = values.key.len() + VALUE_OVERHEAD;
        if let Some(shortage) = self.shortage(charged, *bytes, need + overhead) {
            lost.note(shortage, 1);
            return shortage.outcome();
        }
        let mut encoded = Vec::new();
        encode(&mut encoded);
        *bytes += encoded.len() + overhead;
        let key: Arc<[u8]> = values.key.as_slice().into();
        values.index.insert(Arc::clone(&key), values.first + values.queue.len() as u64);
        values.queue.push_back(BufferedValue { key, bytes: encoded, since: at });
        Outcome::Sent
    }
}

/// Counts a message that was not taken.
fn count_drop(reason: DropReason) {
    count(|c| match reason {
        DropReason::Memory => c.grpc_stream_dropped_memory.add(1),
        DropReason::TooLarge => c.grpc_stream_dropped_too_large.add(1),
        DropReason::SessionEnded => c.grpc_stream_dropped_closed.add(1),
        _ => c.grpc_stream_dropped_full.add(1),
    });
}

impl Drop for StreamTarget {
    fn drop(&mut self) {
        self.caller_memory.release(self.state.get_mut().charged);
    }
}

impl Target for StreamTarget {
    fn deliver(&self, message: &Message<'_>, _offer: Offer<'_>) -> Delivered {
        let mut flush = false;
        let outcome = if self.selector.wants(message) {
            let mut state = self.state.lock();
            let outcome = self.add(&mut state, message);
            state.dropped += u64::from(matches!(outcome, Outcome::Dropped(_)));
            let ready = !state.full_only || state.is_full(self.options.batch) || state.closed.is_some();
            if state.waker.is_some() && !state.dirty && ready {
                state.dirty = true;
                flush = true;
            }
            outcome
        } else {
            Outcome::Ignored
        };
        if let Outcome::Dropped(reason) = outcome {
            count_drop(reason);
        }
        if outcome == Outcome::Sent
            && let Some(receipt) = message.receipt
        {
            // A stream delivers at most once, so its buffer is as far as a receipt goes.
            receipt.update(|state| {
                state.sent += 1;
                state.acked += 1;
            });
        }
        Delivered { outcome, flush }
    }

    fn flush(self: Arc<Self>) {
        let waker = {
            let mut state = self.state.lock();
            state.dirty = false;
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn is_online(&self) -> bool {
        !self.is_closed()
    }

    fn load(&self) -> usize {
        self.state.lock().waiting()
    }
}
