//! What waits for a group while no member takes it.
//!
//! Without a store all of it is in memory. With one all of it is on disk, and memory has two ends of it: the oldest
//! messages, as they are given to members (`window`), and the newest that came while a member was connected (`fresh`).
//! What is between them is on disk only (`tail`) and becomes the window page by page. So a queue that nobody takes from
//! costs no memory, and one that has caught up needs no reading.
//!
//! Invariant: places in the window are below the tail's, those below the fresh ones'. Each place is in one of them, or
//! in the hands of somebody who gives it to a member.

use std::{collections::VecDeque, sync::Arc};

use gateway_core::{SharedMessage, Timestamp, limits::Limits};

/// Below so many messages of the window more are read.
const LOW: usize = 128;
/// Messages and bytes that are kept in memory as they come.
const FRESH: usize = 512;
const FRESH_BYTES: usize = 512 << 10;

/// Bounds of a group's queue.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Most {
    messages: usize,
    bytes: usize,
    /// Milliseconds from the arrival of a message; 0 is no limit.
    age: u64,
}

impl Most {
    pub(crate) fn new(limits: &Limits) -> Self {
        Self {
            messages: limits.group_queue_messages,
            bytes: limits.group_queue_bytes.0,
            age: limits.offline_age.millis(),
        }
    }

    /// When a message that came at `received` and expires at `expires` may wait no longer.
    pub(super) fn until(&self, received: Timestamp, expires: Option<Timestamp>) -> Option<Timestamp> {
        let aged = (self.age > 0).then(|| received.plus_millis(self.age));
        aged.into_iter().chain(expires).min()
    }
}

/// The queue, in order.
#[derive(Default)]
pub(super) struct Queue {
    window: Stretch,
    fresh: Stretch,
    /// The first place that is on disk only; that of the next message if there is none.
    from: u64,
    /// Messages and bytes of the tail; not exact while messages expire there or are refused by the disk, exact again when
    /// all is read.
    messages: usize,
    bytes: u64,
    /// Place of the next message.
    next: u64,
    /// Places below may be in somebody's hands.
    handed: u64,
    /// While more is being read: `next` of when that began.
    loading: Option<u64>,
    /// The group is gone: nothing may be added.
    pub(super) closed: bool,
}

/// A message with its place.
pub(crate) struct Waiting {
    pub(crate) message: Arc<SharedMessage>,
    pub(crate) place: u64,
}

/// Messages in memory.
#[derive(Default)]
struct Stretch {
    messages: VecDeque<Waiting>,
    /// What they cost.
    bytes: usize,
}

impl Stretch {
    fn push(&mut self, waiting: Waiting) {
        self.bytes += waiting.message.cost();
        self.messages.push_back(waiting);
    }

    fn pop(&mut self) -> Option<Waiting> {
        let waiting = self.messages.pop_front()?;
        self.bytes -= waiting.message.cost();
        if self.messages.is_empty() {
            self.messages = VecDeque::new();
        }
        Some(waiting)
    }

    fn append(&mut self, mut other: Self) {
        self.bytes += other.bytes;
        self.messages.append(&mut other.messages);
    }

    /// Takes out what begins with this index.
    fn split_off(&mut self, index: usize) -> Self {
        let messages = self.messages.split_off(index);
        let bytes = messages.iter().map(|waiting| waiting.message.cost()).sum();
        self.bytes -= bytes;
        Self { messages, bytes }
    }
}

impl Queue {
    /// Messages that wait, wherever they are.
    pub(super) fn len(&self) -> usize {
        self.window.messages.len() + self.fresh.messages.len() + self.messages
    }

    /// Whether nothing waits. [`Self::len`] may be wrong about the tail.
    pub(super) fn is_empty(&self) -> bool {
        self.window.messages.is_empty() && self.fresh.messages.is_empty() && !self.has_tail()
    }

    /// Whether something can be given away at once.
    pub(super) fn is_at_hand(&self) -> bool {
        !self.window.messages.is_empty()
    }

    /// Bytes in memory.
    pub(super) fn in_memory(&self) -> usize {
        self.window.bytes + self.fresh.bytes
    }

    /// Whether a message of this cost is too much.
    pub(super) fn is_full(&self, cost: usize, most: &Most) -> bool {
        let bytes = self.window.bytes as u64 + self.fresh.bytes as u64 + self.bytes;
        self.len() >= most.messages || bytes + cost as u64 > most.bytes as u64
    }

    /// Whether memory may have one more that is on disk too.
    pub(super) fn may_keep(&self, cost: usize) -> bool {
        let kept = if self.has_tail() { &self.fresh } else { &self.window };
        kept.messages.len() < FRESH && kept.bytes + cost <= FRESH_BYTES
    }

    /// Adds a message that is in memory, and on disk if there is a store; its place.
    pub(super) fn keep(&mut self, message: Arc<SharedMessage>) -> u64 {
        let place = self.next;
        let has_tail = self.has_tail();
        self.next += 1;
        if has_tail {
            self.fresh.push(Waiting { message, place });
        } else {
            self.from = self.next;
            self.window.push(Waiting { message, place });
        }
        place
    }

    /// Adds a message that is on disk only: its place, and the bytes of memory that are free now.
    pub(super) fn leave(&mut self, cost: usize) -> (u64, usize) {
        let freed = self.leave_fresh();
        let place = self.next;
        self.next += 1;
        self.messages += 1;
        self.bytes += cost as u64;
        (place, freed)
    }

    /// Takes out the first message, if it is in memory.
    pub(super) fn pop(&mut self) -> Option<Waiting> {
        let waiting = self.window.pop()?;
        self.handed = self.handed.max(waiting.place + 1);
        Some(waiting)
    }

    /// Takes back what was popped.
    pub(super) fn put_back(&mut self, waiting: Waiting) {
        let index = self.window.messages.partition_point(|other| other.place < waiting.place);
        self.window.bytes += waiting.message.cost();
        self.window.messages.insert(index, waiting);
    }

    /// Where more is to be read, if there is room and it is not being read already. The caller reads and then calls
    /// [`Self::loaded`] or [`Self::load_failed`].
    pub(super) fn begin_load(&mut self) -> Option<u64> {
        if self.loading.is_some() || !self.has_tail() || self.window.messages.len() >= LOW {
            return None;
        }
        self.loading = Some(self.next);
        Some(self.from)
    }

    /// What was read, where to read on and whether nothing more was there; how many bytes of memory it takes.
    pub(super) fn loaded(&mut self, page: Vec<Waiting>, next: u64, end: bool) -> usize {
        let Some(mark) = self.loading.take() else { return 0 };
        let limit = self.tail_end();
        self.from = if end { next.max(mark) } else { next }.min(limit);
        let before = self.window.bytes;
        // What came meanwhile may be in the page and is in memory already.
        for waiting in page.into_iter().filter(|waiting| waiting.place < limit) {
            self.note_gone(1, waiting.message.cost() as u64);
            self.window.push(waiting);
        }
        let charged = self.window.bytes - before;
        if !self.has_tail() {
            (self.messages, self.bytes) = (0, 0);
            self.window.append(std::mem::take(&mut self.fresh));
            self.from = self.next;
        }
        charged
    }

    /// Reading failed, or nobody wants it any more.
    pub(super) fn load_failed(&mut self) {
        self.loading = None;
    }

    /// Nobody is there to take anything: what is on disk too leaves memory; how many bytes. What has been in somebody's
    /// hands stays: it may still come back from there, and must not be read as well.
    pub(super) fn park(&mut self) -> usize {
        if self.loading.is_some() {
            return 0;
        }
        let mut freed = self.leave_fresh();
        let index = self.window.messages.partition_point(|waiting| waiting.place < self.handed);
        let left = self.window.split_off(index);
        if let Some(first) = left.messages.front() {
            self.from = first.place;
            self.messages += left.messages.len();
            self.bytes += left.bytes as u64;
            freed += left.bytes;
        }
        freed
    }

    /// Messages of the tail have gone from the disk.
    pub(super) fn note_gone(&mut self, messages: usize, bytes: u64) {
        self.messages = self.messages.saturating_sub(messages);
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    /// What an earlier process left on disk: places `first` to `next`.
    pub(super) fn restore(&mut self, first: u64, next: u64, messages: usize, bytes: u64) {
        (self.from, self.next, self.messages, self.bytes) = (first, next, messages, bytes);
    }

    /// Closes it: how many messages waited, and what they cost in memory.
    pub(super) fn close(&mut self) -> (usize, usize) {
        let gone = (self.len(), self.window.bytes + self.fresh.bytes);
        *self = Self { closed: true, ..Self::default() };
        gone
    }

    /// One more than the last place that is on disk only.
    fn tail_end(&self) -> u64 {
        self.fresh.messages.front().map_or(self.next, |waiting| waiting.place)
    }

    fn has_tail(&self) -> bool {
        self.from < self.tail_end()
    }

    fn leave_fresh(&mut self) -> usize {
        let left = std::mem::take(&mut self.fresh);
        self.messages += left.messages.len();
        self.bytes += left.bytes as u64;
        left.bytes
    }
}

#[cfg(test)]
mod tests {
    use gateway_core::{Message, Origin};

    use super::*;

    fn message() -> Arc<SharedMessage> {
        Arc::clone(Message::new("t", b"p", Timestamp(0), Origin::SERVER).share())
    }

    /// It would come twice: from whoever has it, and from the disk.
    #[test]
    fn a_message_in_somebodys_hands_is_not_read_as_well() {
        let mut queue = Queue::default();
        for place in 0..4 {
            assert_eq!(queue.keep(message()), place);
        }
        let (first, second) = (queue.pop().unwrap(), queue.pop().unwrap());
        queue.put_back(first);
        assert_eq!(queue.park(), 2 * message().cost());
        assert_eq!(queue.begin_load(), Some(2));
        // The store refused the other, too; both are given away before what is read.
        queue.put_back(second);
        let page = (2..4).map(|place| Waiting { message: message(), place }).collect();
        assert_eq!(queue.loaded(page, 4, true), 2 * message().cost());
        let places: Vec<u64> = std::iter::from_fn(|| queue.pop()).map(|waiting| waiting.place).collect();
        assert_eq!(places, [0, 1, 2, 3]);
        assert!(queue.is_empty());
        assert_eq!(queue.len(), 0);
    }
}
