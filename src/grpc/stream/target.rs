//! The buffer itself: [`StreamTarget`] is what the broker knows of a stream.

use std::{
    collections::VecDeque,
    sync::Arc,
    task::{Context, Waker},
};

use ahash::RandomState;
use bytes::Bytes;
use hashbrown::HashMap;
use parking_lot::Mutex;

use super::{
    super::{
        encode::{self, Form},
        proto::gateway::v1::GapReason,
        status::Error,
    },
    Selector,
};
use crate::{
    broker::{Delivered, Frames, MatchOptions, Outcome, Target},
    telemetry::count,
    types::{DropReason, Message},
};

/// Kept beside each conflated value, in bytes counted.
const VALUE_OVERHEAD: usize = 128;

/// What to do when the buffer is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::grpc) enum SlowPolicy {
    DropOldest,
    DropNewest,
    Conflate,
    Close,
}

/// Fixed properties of a stream.
#[derive(Debug, Clone, Copy)]
pub(in crate::grpc) struct Options {
    pub(in crate::grpc) form: Form,
    pub(in crate::grpc) policy: SlowPolicy,
    /// Cap of the buffer in bytes.
    pub(in crate::grpc) buffer: usize,
    /// A batch is closed when it has so many bytes.
    pub(in crate::grpc) batch: usize,
}

/// A stream's buffer.
#[derive(Debug)]
pub(in crate::grpc) struct StreamTarget {
    selector: Selector,
    options: Options,
    state: Mutex<State>,
}

/// What [`StreamTarget::take`] found.
#[derive(Debug)]
pub(in crate::grpc) enum Taken {
    /// A batch with so many messages in it.
    Batch { bytes: Bytes, messages: u32 },
    /// Nothing (or not enough); the waker is registered.
    Nothing,
    /// Everything was taken, and the stream is over.
    Closed(Error),
}

#[derive(Debug, Default)]
struct State {
    /// Full batches, oldest first.
    sealed: VecDeque<Batch>,
    /// The batch being filled.
    open: Batch,
    /// Lost after everything in the buffer.
    lost: Losses,
    /// Unread values, when conflating.
    values: Values,
    /// Bytes in all of the above.
    bytes: usize,
    /// Size of the last batch taken: the next one's first capacity.
    last: usize,
    waker: Option<Waker>,
    /// The reader waits for a full batch only.
    full_only: bool,
    /// In a publisher's flush list.
    dirty: bool,
    closed: Option<Error>,
}

/// Encoded messages.
#[derive(Debug, Default)]
struct Batch {
    /// What is missing in front of it.
    lost: Losses,
    /// What its bytes say is missing.
    inside: Losses,
    bytes: Vec<u8>,
    messages: u32,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Losses {
    full: u64,
    too_large: u64,
    conflated: u64,
}

impl Losses {
    fn is_empty(self) -> bool {
        self == Self::default()
    }

    fn add(&mut self, other: Self) {
        self.full += other.full;
        self.too_large += other.too_large;
        self.conflated += other.conflated;
    }

    fn encode(self, out: &mut Vec<u8>) {
        let gaps = [
            (self.full, GapReason::BufferFull),
            (self.too_large, GapReason::TooLarge),
            (self.conflated, GapReason::Conflated),
        ];
        for (count, reason) in gaps.into_iter().filter(|gap| gap.0 > 0) {
            encode::gap(out, count, reason);
        }
    }
}

/// The last message of each (device, topic), in order of the oldest unread change.
#[derive(Debug, Default)]
struct Values {
    queue: VecDeque<Value>,
    /// Key to serial number; the front of the queue has serial `first`.
    index: HashMap<Arc<[u8]>, u64, RandomState>,
    first: u64,
    key: Vec<u8>,
}

#[derive(Debug)]
struct Value {
    key: Arc<[u8]>,
    bytes: Vec<u8>,
}

impl StreamTarget {
    pub(in crate::grpc) fn new(selector: Selector, options: Options) -> Self {
        // Several batches must fit, or dropping the oldest would drop all.
        let batch = options.batch.min(options.buffer / 4);
        Self { selector, options: Options { batch, ..options }, state: Mutex::default() }
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

    pub(super) fn is_closed(&self) -> bool {
        self.state.lock().closed.is_some()
    }

    /// Whether anything waits for the reader.
    pub(super) fn has_data(&self) -> bool {
        !self.state.lock().is_empty()
    }

    /// Whether batches are made of packets with their lengths.
    pub(super) fn is_packets(&self) -> bool {
        self.options.form == Form::Packet
    }

    /// The next batch; with `full_only` only a full one, unless the stream is over.
    pub(super) fn take(&self, cx: &Context<'_>, full_only: bool) -> Taken {
        let mut state = self.state.lock();
        let full_only = full_only && state.closed.is_none();
        if let Some(batch) = state.pop(&self.options, full_only) {
            drop(state);
            return self.finish(batch);
        }
        if let Some(error) = &state.closed
            && state.is_empty()
        {
            return Taken::Closed(error.clone());
        }
        state.full_only = full_only;
        match &mut state.waker {
            Some(waker) => waker.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
        Taken::Nothing
    }

    /// Puts the gaps in front. Outside of the lock: a copy of the batch, but rare.
    fn finish(&self, batch: Batch) -> Taken {
        let Batch { lost, mut bytes, messages, .. } = batch;
        if !lost.is_empty() && !self.is_packets() {
            let mut whole = Vec::with_capacity(bytes.len() + encode::GAPS_BOUND);
            lost.encode(&mut whole);
            whole.append(&mut bytes);
            bytes = whole;
        }
        Taken::Batch { bytes: bytes.into(), messages }
    }

    /// Adds one message, or says why not.
    fn add(&self, state: &mut State, message: &Message<'_>) -> Outcome {
        if state.closed.is_some() {
            return Outcome::Dropped(DropReason::SessionEnded);
        }
        let need = encode::size_bound(message);
        if need > self.options.buffer {
            state.lost.too_large += 1;
            return Outcome::Dropped(DropReason::TooLarge);
        }
        match self.options.policy {
            SlowPolicy::Conflate => self.conflate(state, message),
            _ => self.append(state, message, need),
        }
    }

    fn append(&self, state: &mut State, message: &Message<'_>, need: usize) -> Outcome {
        if state.bytes + need > self.options.buffer {
            match self.options.policy {
                SlowPolicy::DropOldest => state.make_room(self.options.buffer - need),
                SlowPolicy::Close => {
                    state.closed = Some(Error::SlowConsumer);
                    return Outcome::Dropped(DropReason::QueueFull);
                }
                SlowPolicy::DropNewest | SlowPolicy::Conflate => {
                    state.lost.full += 1;
                    return Outcome::Dropped(DropReason::QueueFull);
                }
            }
        }
        if state.open.messages > 0 && state.open.bytes.len() + need > self.options.batch {
            state.seal();
        }
        let (form, last) = (self.options.form, state.last);
        let open = &mut state.open;
        if open.bytes.capacity() == 0 {
            open.bytes.reserve((last + last / 4).min(self.options.batch));
        }
        let before = open.bytes.len();
        if !state.lost.is_empty() {
            let lost = std::mem::take(&mut state.lost);
            if form != Form::Packet {
                lost.encode(&mut open.bytes);
            }
            open.inside.add(lost);
        }
        encode::message(&mut open.bytes, form, message);
        open.messages += 1;
        state.bytes += open.bytes.len() - before;
        Outcome::Sent
    }

    fn conflate(&self, state: &mut State, message: &Message<'_>) -> Outcome {
        let State { values, bytes, lost, .. } = state;
        values.key.clear();
        if let Some(device) = message.origin.client_id {
            values.key.extend_from_slice(device.as_str().as_bytes());
        }
        values.key.push(0); // in no client id and no topic
        values.key.extend_from_slice(message.topic.as_bytes());
        let need = encode::size_bound(message);

        if let Some(&serial) = values.index.get(values.key.as_slice()) {
            let place = usize::try_from(serial - values.first).ok();
            let Some(value) = place.and_then(|place| values.queue.get_mut(place)) else {
                debug_assert!(false, "the index names an unread value");
                return Outcome::Dropped(DropReason::QueueFull);
            };
            *bytes -= value.bytes.len();
            if !value.bytes.is_empty() {
                lost.conflated += 1;
            }
            value.bytes.clear();
            if *bytes + need > self.options.buffer {
                // An old value must not pass for the last one: it goes too.
                value.bytes = Vec::new();
                lost.full += 1;
                return Outcome::Dropped(DropReason::QueueFull);
            }
            encode::message(&mut value.bytes, self.options.form, message);
            *bytes += value.bytes.len();
            return Outcome::Sent;
        }
        if *bytes + need + values.key.len() + VALUE_OVERHEAD > self.options.buffer {
            lost.full += 1;
            return Outcome::Dropped(DropReason::QueueFull);
        }
        let mut encoded = Vec::new();
        encode::message(&mut encoded, self.options.form, message);
        *bytes += encoded.len() + values.key.len() + VALUE_OVERHEAD;
        let key: Arc<[u8]> = values.key.as_slice().into();
        values.index.insert(Arc::clone(&key), values.first + values.queue.len() as u64);
        values.queue.push_back(Value { key, bytes: encoded });
        Outcome::Sent
    }
}

impl State {
    fn is_empty(&self) -> bool {
        self.sealed.is_empty()
            && self.open.messages == 0
            && self.lost.is_empty()
            && self.open.lost.is_empty()
            && self.values.queue.is_empty()
    }

    fn is_full(&self, batch: usize) -> bool {
        !self.sealed.is_empty() || self.bytes >= batch
    }

    fn seal(&mut self) {
        self.last = self.open.bytes.len();
        self.sealed.push_back(std::mem::take(&mut self.open));
    }

    /// Drops the oldest batches until `target` bytes are left, leaving their losses to what follows.
    fn make_room(&mut self, target: usize) {
        while self.bytes > target {
            let oldest = match self.sealed.pop_front() {
                Some(batch) => batch,
                None if self.open.messages > 0 => std::mem::take(&mut self.open),
                None => return,
            };
            self.bytes -= oldest.bytes.len();
            count(|c| c.grpc_stream_dropped.add(u64::from(oldest.messages)));
            let next = self.sealed.front_mut().unwrap_or(&mut self.open);
            next.lost.add(oldest.lost);
            next.lost.add(oldest.inside);
            next.lost.full += u64::from(oldest.messages);
        }
    }

    fn pop(&mut self, options: &Options, full_only: bool) -> Option<Batch> {
        if full_only && !self.is_full(options.batch) {
            return None;
        }
        if options.policy == SlowPolicy::Conflate {
            return self.pop_values(options.batch, options.form == Form::Item);
        }
        let batch = match self.sealed.pop_front() {
            Some(batch) => batch,
            None if self.open.messages > 0 => {
                self.last = self.open.bytes.len();
                std::mem::take(&mut self.open)
            }
            None => {
                let mut lost = std::mem::take(&mut self.lost);
                lost.add(std::mem::take(&mut self.open.lost));
                if lost.is_empty() {
                    return None;
                }
                Batch { lost, ..Batch::default() }
            }
        };
        self.bytes -= batch.bytes.len();
        Some(batch)
    }

    fn pop_values(&mut self, limit: usize, reports_conflation: bool) -> Option<Batch> {
        let mut batch = Batch { lost: std::mem::take(&mut self.lost), ..Batch::default() };
        if !reports_conflation {
            batch.lost.conflated = 0;
        }
        while batch.bytes.len() < limit
            && let Some(value) = self.values.queue.pop_front()
        {
            self.values.first += 1;
            self.values.index.remove(&value.key);
            self.bytes -= value.bytes.len() + value.key.len() + VALUE_OVERHEAD;
            batch.messages += u32::from(!value.bytes.is_empty());
            if batch.bytes.is_empty() {
                batch.bytes = value.bytes;
            } else {
                batch.bytes.extend_from_slice(&value.bytes);
            }
        }
        (batch.messages > 0 || !batch.lost.is_empty()).then_some(batch)
    }
}

impl Target for StreamTarget {
    fn deliver(&self, message: &Message<'_>, _options: MatchOptions<'_>, _turn: &mut Frames) -> Delivered {
        let mut flush = false;
        let outcome = if self.selector.wants(message) {
            let mut state = self.state.lock();
            let outcome = self.add(&mut state, message);
            let ready = !state.full_only || state.is_full(self.options.batch) || state.closed.is_some();
            if state.waker.is_some() && !state.dirty && ready {
                state.dirty = true;
                flush = true;
            }
            outcome
        } else {
            Outcome::Ignored
        };
        if outcome == Outcome::Sent
            && let Some(receipt) = message.receipt
        {
            // A stream is at most once: in its buffer is as far as it goes.
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
        let state = self.state.lock();
        let sealed: usize = state.sealed.iter().map(|batch| batch.messages as usize).sum();
        sealed + state.open.messages as usize + state.values.queue.len()
    }
}
