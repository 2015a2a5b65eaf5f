//! Changes that sessions ask to be kept on disk. The store writes the changes of each queue in order, and many at once.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use super::{Commit, Feeder, QoS, SharedMessage, Timestamp, commit::Unwritten};

/// A durable queue: that of one session or of one shared group. Never used twice in a data directory. The upper 16 bits are the
/// number of its home, so that queues of several homes never have the same name.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QueueId(pub u64);

impl QueueId {
    /// No queue.
    pub const NONE: Self = Self(0);

    /// The number of the one home that there is.
    pub const HOME: u16 = 0;

    /// The queue with this number, which has 48 bits, in this home.
    pub const fn of(home: u16, number: u64) -> Self {
        Self((home as u64) << 48 | number)
    }
}

/// One delivery on its way to the disk, shared by the store and by the session, whose client may acknowledge it first.
#[derive(Debug)]
pub struct QueueEntry {
    /// The queue.
    pub queue: QueueId,
    /// Its place in the queue: entries are delivered in this order, and their packet identifiers follow from it.
    pub seq: u64,
    /// QoS of the delivery.
    pub qos: QoS,
    /// RETAIN flag of the delivery.
    pub retain: bool,
    /// The queue of the shared group that chose this session, or none.
    pub group: QueueId,
    /// Subscription identifiers.
    pub ids: Option<Box<[u32]>>,
    /// Time from which the entry may be dropped unsent: the expiry of its message, or an earlier one.
    pub expires: Option<Timestamp>,
    /// The commit that waits for it; without one it is written at leisure.
    pub commit: Option<Arc<Commit>>,
    /// Bytes that its message counts for, as [`SharedMessage::cost`]; kept so that it is known when the message is
    /// gone.
    cost: u32,
    /// Sender of its message, kept for the same reason.
    feeder: Feeder,
    sent: AtomicBool,
    message: Unwritten<Arc<SharedMessage>>,
}

impl QueueEntry {
    /// A waiting entry with its part of the commit; it expires with its message. The caller sets `ids` and `group`.
    pub fn new(
        queue: QueueId,
        seq: u64,
        message: Arc<SharedMessage>,
        qos: QoS,
        commit: Option<Arc<Commit>>,
    ) -> Self {
        if let Some(commit) = &commit {
            commit.add();
        }
        Self {
            queue,
            seq,
            qos,
            retain: false,
            group: QueueId::NONE,
            ids: None,
            expires: message.expires,
            commit,
            cost: u32::try_from(message.cost()).unwrap_or(u32::MAX),
            feeder: Feeder::from(&*message),
            sent: AtomicBool::new(false),
            message: Unwritten::new(message),
        }
    }

    /// Bytes that its message counts for.
    pub fn cost(&self) -> u32 {
        self.cost
    }

    /// The sender of its message.
    pub fn feeder(&self) -> Feeder {
        self.feeder
    }

    /// Notes that it may be sent before it is read back, which then sets DUP [MQTT-3.3.1-1]. An entry that was written before
    /// is for [`QueueOp::NoteSent`].
    pub fn note_sent(&self) {
        self.sent.store(true, Relaxed);
    }

    /// Returns whether it may be sent before it is read back.
    pub fn may_be_sent(&self) -> bool {
        self.sent.load(Relaxed)
    }

    /// The store begins to write it. Returns its message, or `None` if it no longer needs to be written.
    pub fn take(&self) -> Option<Arc<SharedMessage>> {
        self.message.take()
    }

    /// The address of its message; `None` once there is nothing left to write. Entries that wait have the same one if, and only if,
    /// they have the same message.
    pub fn message_address(&self) -> Option<usize> {
        self.message.look(|message| Arc::as_ptr(message).addr())
    }

    /// The receiver has acknowledged it. True if it was not written and never will be: nothing is left to remove.
    pub fn settle(&self) -> bool {
        let settled = self.message.settle();
        if settled && let Some(commit) = &self.commit {
            commit.done();
        }
        settled
    }

    /// Returns whether the entry was settled before it was written.
    pub fn is_settled(&self) -> bool {
        self.message.is_settled()
    }
}

/// An entry as it is read back from disk. `G` names the shared group that chose its session: a store has the group's
/// queue, a session the broker's number of the group.
#[derive(Debug, Clone)]
pub struct StoredEntry<G = QueueId> {
    /// Its place in the queue.
    pub seq: u64,
    /// QoS of the delivery.
    pub qos: QoS,
    /// RETAIN flag of the delivery.
    pub retain: bool,
    /// True if an earlier process may have sent the entry.
    pub sent: bool,
    /// The shared group; [`QueueId::NONE`] or 0 for none.
    pub group: G,
    /// Subscription identifiers.
    pub ids: Option<Box<[u32]>>,
    /// The message; `None` if only PUBCOMP is still awaited.
    pub message: Option<Arc<SharedMessage>>,
}

impl<G> StoredEntry<G> {
    /// The same with another name for its group.
    pub fn with_group<H>(self, name: impl FnOnce(G) -> H) -> StoredEntry<H> {
        let Self { seq, qos, retain, sent, group, ids, message } = self;
        StoredEntry { seq, qos, retain, sent, group: name(group), ids, message }
    }
}

/// Entries read from a durable queue.
#[derive(Debug, Default)]
pub struct JournalPage {
    /// In order.
    pub entries: Vec<StoredEntry<u32>>,
    /// First place of the next page.
    pub next: u64,
    /// This was the last page.
    pub end: bool,
}

impl JournalPage {
    /// Bytes of messages in one page, unless a single message is larger.
    pub const BYTES: usize = 512 << 10;
}

/// One change of a queue. A commit in it carries a part, which the store ends with `done` once the change is durable,
/// or else with `refuse`.
#[derive(Debug)]
pub enum QueueOp {
    /// Adds an entry.
    Append(Arc<QueueEntry>),
    /// Removes an entry at leisure; or, with a unit's commit, closes the unit and is written with it.
    Remove {
        /// The queue.
        queue: QueueId,
        /// The entry's place.
        seq: u64,
        /// The unit that this closes.
        unit: Option<Arc<Commit>>,
    },
    /// The client has the QoS 2 message of an entry (PUBREC): its content is removed, its place stays until PUBCOMP.
    Release {
        /// The queue.
        queue: QueueId,
        /// The entry's place.
        seq: u64,
        /// The commit that waits.
        commit: Arc<Commit>,
    },
    /// A QoS 2 message with this packet identifier was received from the client. Closes the unit of its entries.
    Receive {
        /// The publishing session.
        queue: QueueId,
        /// Packet identifier.
        packet_id: u16,
        /// The unit, which also waits.
        commit: Arc<Commit>,
    },
    /// The packet identifier is free again (PUBREL).
    Forget {
        /// The publishing session.
        queue: QueueId,
        /// Packet identifier.
        packet_id: u16,
        /// The commit that waits.
        commit: Arc<Commit>,
    },
    /// The client may have begun to receive what is below this place: the next process sends it again, with DUP. Entries that
    /// are not written yet [say so themselves](QueueEntry::note_sent), so this need not wait for those before it: it is written
    /// before the record of its session that is submitted next, or with it, and before the queue is read again.
    NoteSent {
        /// The queue.
        queue: QueueId,
        /// One more than the last such place.
        below: u64,
    },
    /// Removes the `count` oldest entries whose place is `from` or later.
    Trim {
        /// The queue.
        queue: QueueId,
        /// First place.
        from: u64,
        /// Number of places.
        count: usize,
    },
    /// Removes the queue and all that was received for it.
    Purge {
        /// The entry's place.
        queue: QueueId,
    },
}

/// Takes changes of queues without blocking.
pub trait Journal: Send + Sync {
    /// Submits a change. Changes of one queue are written in the order of the calls.
    fn submit(&self, op: QueueOp);

    /// Somebody waits for entries that were submitted. Called once a message is routed, not for each of its entries, so
    /// that they are written together and the message only once.
    fn hurry(&self) {}
}
