//! Content that a stream holds for its reader: batches, losses, conflated values.

use std::{collections::VecDeque, sync::Arc, task::Waker};

use ahash::RandomState;

use gateway_core::{DropReason, Outcome, Timestamp};
use hashbrown::HashMap;

use crate::counters::count;
use crate::proto::gateway::v1::GapReason;
use grpc_messages::{
    convert::SlowPolicy,
    encode::{self, StreamForm},
    status::Error,
};

/// Bytes counted for each conflated value besides the value itself.
pub(super) const VALUE_OVERHEAD: usize = 128;
/// Bytes counted for each full batch besides its messages.
pub(super) const BATCH_OVERHEAD: usize = 2 * size_of::<EncodedBatch>();

/// Fixed properties of a stream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StreamOptions {
    pub form: StreamForm,
    pub(crate) policy: SlowPolicy,
    /// Cap of the buffer in bytes.
    pub(crate) buffer: usize,
    /// A batch is closed when it has this many bytes.
    pub batch: usize,
}

/// Backlog of a reader.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct StreamBacklog {
    /// Messages that wait for it, and their bytes.
    pub waiting: u64,
    pub bytes: u64,
    /// Time since which the oldest of them has waited.
    pub oldest: Option<Timestamp>,
    /// Handed to it, lost, and replaced by newer ones since the stream was opened.
    pub sent: u64,
    pub dropped: u64,
    pub(crate) conflated: u64,
}

#[derive(Debug, Default)]
pub(super) struct StreamBuffer {
    /// Full batches, oldest first.
    pub(super) sealed: VecDeque<EncodedBatch>,
    /// The batch being filled.
    pub(super) open: EncodedBatch,
    /// Lost after everything in the buffer.
    pub(super) lost: Losses,
    /// Unread values, when conflating.
    pub(super) values: BufferedValues,
    /// Bytes in all of the above.
    pub(super) bytes: usize,
    /// Bytes charged to the process-wide memory budget; at least `bytes`.
    pub(super) charged: usize,
    /// Size of the last batch taken: the next one's first capacity.
    pub(super) last: usize,
    pub(super) waker: Option<Waker>,
    /// The reader waits for a full batch only.
    pub(super) full_only: bool,
    /// In a publisher's flush list.
    pub(super) dirty: bool,
    pub(super) closed: Option<Error>,
    /// Messages that the reader took, and that were lost, since the beginning.
    pub(super) sent: u64,
    pub(super) dropped: u64,
    pub(super) conflated: u64,
}

/// Encoded messages.
#[derive(Debug, Default)]
pub(super) struct EncodedBatch {
    /// Losses in front of the batch.
    pub(super) lost: Losses,
    /// Losses that its bytes report.
    pub(super) inside: Losses,
    pub(super) bytes: Vec<u8>,
    pub(super) messages: u32,
    /// Time at which the first of the messages was received.
    pub(super) since: Timestamp,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Losses {
    pub(super) full: u64,
    pub(super) memory: u64,
    pub(super) too_large: u64,
    pub(super) conflated: u64,
}

/// Why there is no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BufferShortage {
    /// The stream's own buffer is full.
    Buffer,
    /// The memory budget of the process is used up.
    Memory,
}

impl Losses {
    /// Notes the loss of `count` messages.
    pub(super) fn note(&mut self, shortage: BufferShortage, count: u64) {
        match shortage {
            BufferShortage::Buffer => self.full += count,
            BufferShortage::Memory => self.memory += count,
        }
    }

    pub(super) fn is_empty(self) -> bool {
        self == Self::default()
    }

    pub(super) fn add(&mut self, other: Self) {
        self.full += other.full;
        self.memory += other.memory;
        self.too_large += other.too_large;
        self.conflated += other.conflated;
    }

    pub(super) fn encode(self, out: &mut Vec<u8>) {
        let gaps = [
            (self.full, GapReason::BufferFull),
            (self.memory, GapReason::Memory),
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
pub(super) struct BufferedValues {
    pub(super) queue: VecDeque<BufferedValue>,
    /// Key to serial number; the front of the queue has serial `first`.
    pub(super) index: HashMap<Arc<[u8]>, u64, RandomState>,
    pub(super) first: u64,
    pub(super) key: Vec<u8>,
}

#[derive(Debug)]
pub(super) struct BufferedValue {
    pub(super) key: Arc<[u8]>,
    pub(super) bytes: Vec<u8>,
    /// Time at which the oldest unread change was received.
    pub(super) since: Timestamp,
}

impl BufferShortage {
    pub(super) fn outcome(self) -> Outcome {
        Outcome::Dropped(match self {
            Self::Buffer => DropReason::QueueFull,
            Self::Memory => DropReason::Memory,
        })
    }

    /// Returns the error with which the shortage ends a stream.
    pub(super) fn error(self) -> Error {
        match self {
            Self::Buffer => Error::SlowConsumer,
            Self::Memory => Error::MemoryBudget,
        }
    }

    pub(super) fn count(self, messages: u64) {
        count(|c| match self {
            Self::Buffer => c.grpc_stream_dropped_full.add(messages),
            Self::Memory => c.grpc_stream_dropped_memory.add(messages),
        });
    }
}

impl StreamBuffer {
    pub(super) fn is_empty(&self) -> bool {
        self.sealed.is_empty()
            && self.open.messages == 0
            && self.lost.is_empty()
            && self.open.lost.is_empty()
            && self.values.queue.is_empty()
    }

    /// Returns the number of messages that wait for the reader.
    pub(super) fn waiting(&self) -> usize {
        let sealed: usize = self.sealed.iter().map(|batch| batch.messages as usize).sum();
        sealed + self.open.messages as usize + self.values.queue.len()
    }

    /// Returns the time at which the oldest of the waiting messages was received.
    pub(super) fn oldest(&self) -> Option<Timestamp> {
        let open = (self.open.messages > 0).then_some(self.open.since);
        let batch = self.sealed.front().map(|batch| batch.since).or(open);
        batch.or_else(|| self.values.queue.front().map(|value| value.since))
    }

    pub(super) fn is_full(&self, batch: usize) -> bool {
        !self.sealed.is_empty() || self.bytes >= batch
    }

    pub(super) fn seal(&mut self) {
        self.last = self.open.bytes.len();
        let mut batch = std::mem::take(&mut self.open);
        // A sealed batch may wait for long, and nothing is added to it.
        if batch.bytes.capacity() - batch.bytes.len() > batch.bytes.len() / 8 {
            batch.bytes.shrink_to_fit();
        }
        self.sealed.push_back(batch);
        self.bytes += BATCH_OVERHEAD;
    }

    /// The oldest full batch.
    fn pop_sealed(&mut self) -> Option<EncodedBatch> {
        let batch = self.sealed.pop_front()?;
        self.bytes -= BATCH_OVERHEAD;
        Some(batch)
    }

    /// Drops the oldest batches until `target` bytes are left, leaving their losses to what follows.
    pub(super) fn make_room(&mut self, target: usize, shortage: BufferShortage) {
        while self.bytes > target {
            let oldest = match self.pop_sealed() {
                Some(batch) => batch,
                None if self.open.messages > 0 => std::mem::take(&mut self.open),
                None => return,
            };
            self.bytes -= oldest.bytes.len();
            shortage.count(u64::from(oldest.messages));
            self.dropped += u64::from(oldest.messages);
            let next = self.sealed.front_mut().unwrap_or(&mut self.open);
            next.lost.add(oldest.lost);
            next.lost.add(oldest.inside);
            next.lost.note(shortage, u64::from(oldest.messages));
        }
    }

    pub(super) fn pop(&mut self, options: &StreamOptions, full_only: bool) -> Option<EncodedBatch> {
        if full_only && !self.is_full(options.batch) {
            return None;
        }
        if options.policy == SlowPolicy::Conflate {
            return self.pop_values(options.batch, options.form == StreamForm::Item);
        }
        let batch = match self.pop_sealed() {
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
                EncodedBatch { lost, ..EncodedBatch::default() }
            }
        };
        self.bytes -= batch.bytes.len();
        Some(batch)
    }

    pub(super) fn pop_values(&mut self, limit: usize, reports_conflation: bool) -> Option<EncodedBatch> {
        let mut batch = EncodedBatch { lost: std::mem::take(&mut self.lost), ..EncodedBatch::default() };
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
