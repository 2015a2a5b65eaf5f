//! Messages that wait for a group while no member takes them.
//!
//! Without a store all of it is in memory. With one all of it is on disk, and memory holds both ends: the oldest
//! messages, which are given to members next (`window`), and the newest ones that came while a member was connected
//! (`fresh`). What is between them is on disk only (`tail`) and is read into the window page by page. So a queue that
//! nobody takes from costs no memory, and one that has caught up needs no reading.
//!
//! Invariant: places in the window are below the tail's, those below the fresh ones'. Each place is in one of them, or
//! popped by somebody who is giving it to a member.
//!
//! A persistent session's queue has a [`Tail`] as well. The rest differs: what a session has in memory is always older
//! than its tail, and nobody else holds its messages; on the other hand it has packet identifiers, trims and waiting
//! publishers.

use std::{collections::VecDeque, sync::Arc};

use gateway_core::{SharedMessage, Tail, Timestamp, limits::Limits};

/// Messages and bytes that may stay in memory as they come.
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

    /// Until when a message that came at `received` and expires at `expires` may wait.
    pub(super) fn until(&self, received: Timestamp, expires: Option<Timestamp>) -> Option<Timestamp> {
        let aged = (self.age > 0).then(|| received.plus_millis(self.age));
        aged.into_iter().chain(expires).min()
    }
}

/// The queue, in order.
#[derive(Default)]
pub(super) struct SharedQueue {
    window: MessageRun,
    fresh: MessageRun,
    /// Its next place is that of the first fresh message.
    tail: Tail,
    /// Places below this may have been popped and may be put back.
    handed: u64,
    /// The group is gone: nothing may be added.
    pub(super) closed: bool,
}

/// A message with its place.
pub(crate) struct QueuedMessage {
    pub(crate) message: Arc<SharedMessage>,
    pub(crate) place: u64,
}

/// Messages in memory.
#[derive(Default)]
struct MessageRun {
    messages: VecDeque<QueuedMessage>,
    /// Cost of these messages.
    bytes: usize,
}

impl MessageRun {
    fn push(&mut self, waiting: QueuedMessage) {
        self.bytes += waiting.message.cost();
        self.messages.push_back(waiting);
    }

    fn pop(&mut self) -> Option<QueuedMessage> {
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

    /// Takes out everything from this index on.
    fn split_off(&mut self, index: usize) -> Self {
        let messages = self.messages.split_off(index);
        let bytes = messages.iter().map(|waiting| waiting.message.cost()).sum();
        self.bytes -= bytes;
        Self { messages, bytes }
    }
}

impl SharedQueue {
    /// Messages that wait, wherever they are.
    pub(super) fn len(&self) -> usize {
        self.window.messages.len() + self.fresh.messages.len() + self.tail.messages()
    }

    /// Returns whether nothing waits. [`Self::len`] may be wrong about the tail.
    pub(super) fn is_empty(&self) -> bool {
        self.window.messages.is_empty() && self.fresh.messages.is_empty() && self.tail.is_empty()
    }

    /// Returns whether a message can be given to a member without reading first.
    pub(super) fn is_at_hand(&self) -> bool {
        !self.window.messages.is_empty()
    }

    /// Bytes in memory.
    pub(super) fn in_memory(&self) -> usize {
        self.window.bytes + self.fresh.bytes
    }

    /// Returns whether a message of this cost is too much for the bounds.
    pub(super) fn is_full(&self, cost: usize, most: &Most) -> bool {
        let bytes = self.window.bytes as u64 + self.fresh.bytes as u64 + self.tail.bytes();
        self.len() >= most.messages || bytes + cost as u64 > most.bytes as u64
    }

    /// Returns whether one more message that is on disk may be kept in memory too.
    pub(super) fn may_keep(&self, cost: usize) -> bool {
        let kept = if self.tail.is_empty() { &self.window } else { &self.fresh };
        kept.messages.len() < FRESH && kept.bytes + cost <= FRESH_BYTES
    }

    /// Adds a message in memory, which is also on disk if there is a store. Returns its place.
    pub(super) fn keep(&mut self, message: Arc<SharedMessage>) -> u64 {
        let place = self.next();
        if self.tail.is_empty() {
            self.tail.pass(1);
            self.window.push(QueuedMessage { message, place });
        } else {
            self.fresh.push(QueuedMessage { message, place });
        }
        place
    }

    /// Adds a message that is on disk only. Returns its place, and the bytes of memory that this freed.
    pub(super) fn leave(&mut self, cost: usize) -> (u64, usize) {
        let freed = self.leave_fresh();
        (self.tail.append(1, cost as u64), freed)
    }

    /// Takes out the first message, if it is in memory.
    pub(super) fn pop(&mut self) -> Option<QueuedMessage> {
        let waiting = self.window.pop()?;
        self.handed = self.handed.max(waiting.place + 1);
        Some(waiting)
    }

    /// Takes back what was popped.
    pub(super) fn put_back(&mut self, waiting: QueuedMessage) {
        let index = self.window.messages.partition_point(|other| other.place < waiting.place);
        self.window.bytes += waiting.message.cost();
        self.window.messages.insert(index, waiting);
    }

    /// The place to read from, if there is room and no read is under way. The caller reads and then calls
    /// [`Self::loaded`] or [`Self::load_failed`].
    pub(super) fn begin_load(&mut self) -> Option<u64> {
        if self.tail.loading().is_some() || self.tail.is_empty() || self.window.messages.len() >= Tail::LOW {
            return None;
        }
        self.tail.begin_load(self.next());
        Some(self.tail.from())
    }

    /// Takes a page that was read, where the next begins, and whether it was the last. Returns how many bytes of memory
    /// it takes.
    pub(super) fn loaded(&mut self, page: Vec<QueuedMessage>, next: u64, end: bool) -> usize {
        // The page may have messages that came meanwhile and are in memory already.
        let limit = self.tail.next();
        let Some(read) = self.tail.loaded(next, end, limit) else { return 0 };
        let before = self.window.bytes;
        for waiting in page.into_iter().filter(|waiting| waiting.place < read.end) {
            self.note_gone(1, waiting.message.cost() as u64);
            self.window.push(waiting);
        }
        let charged = self.window.bytes - before;
        if self.tail.is_empty() {
            self.tail.pass(self.fresh.messages.len() as u64);
            self.window.append(std::mem::take(&mut self.fresh));
        }
        charged
    }

    /// The read failed, or its result is no longer wanted.
    pub(super) fn load_failed(&mut self) {
        self.tail.stop_loading();
    }

    /// No member is connected: drops from memory what is also on disk, and returns how many bytes that freed. What was
    /// popped and put back stays: others of that time may still be put back too, and must not be read as well.
    pub(super) fn park(&mut self) -> usize {
        if self.tail.loading().is_some() {
            return 0;
        }
        let mut freed = self.leave_fresh();
        let index = self.window.messages.partition_point(|waiting| waiting.place < self.handed);
        let left = self.window.split_off(index);
        if let Some(first) = left.messages.front() {
            self.tail.take_back(first.place, left.messages.len(), left.bytes as u64);
            freed += left.bytes;
        }
        freed
    }

    /// Messages of the tail have gone from the disk.
    pub(super) fn note_gone(&mut self, messages: usize, bytes: u64) {
        self.tail.note_gone(messages, bytes);
    }

    /// Takes over the messages that an earlier process left on disk: places `first` to `next`.
    pub(super) fn restore(&mut self, first: u64, next: u64, messages: usize, bytes: u64) {
        self.tail = Tail::restored(first..next, messages, bytes);
    }

    /// Closes the queue. Returns how many messages waited, and what they cost in memory.
    pub(super) fn close(&mut self) -> (usize, usize) {
        let gone = (self.len(), self.window.bytes + self.fresh.bytes);
        *self = Self { closed: true, ..Self::default() };
        gone
    }

    /// Place of the next message.
    fn next(&self) -> u64 {
        self.tail.next() + self.fresh.messages.len() as u64
    }

    fn leave_fresh(&mut self) -> usize {
        let left = std::mem::take(&mut self.fresh);
        self.tail.append(left.messages.len(), left.bytes as u64);
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

    /// The failure: the message is delivered twice, by whoever popped it and from the disk.
    #[test]
    fn a_message_in_somebodys_hands_is_not_read_as_well() {
        let mut queue = SharedQueue::default();
        for place in 0..4 {
            assert_eq!(queue.keep(message()), place);
        }
        let (first, second) = (queue.pop().unwrap(), queue.pop().unwrap());
        queue.put_back(first);
        assert_eq!(queue.park(), 2 * message().cost());
        assert_eq!(queue.begin_load(), Some(2));
        // The store refused the other, too; both are given away before what is read.
        queue.put_back(second);
        let page = (2..4).map(|place| QueuedMessage { message: message(), place }).collect();
        assert_eq!(queue.loaded(page, 4, true), 2 * message().cost());
        let places: Vec<u64> = std::iter::from_fn(|| queue.pop()).map(|waiting| waiting.place).collect();
        assert_eq!(places, [0, 1, 2, 3]);
        assert!(queue.is_empty());
        assert_eq!(queue.len(), 0);
    }
}
