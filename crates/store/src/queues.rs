//! Durable queues: what waits for sessions and shared groups, and which QoS 2 messages came in.

use gateway_core::{Journal, Message, NoRoom, QoS, QueueId, StoredEntry};

use super::{BoxFuture, StoreError};

/// Facts known of one queue without reading its messages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QueueSummary {
    /// Queue that is summed up.
    pub queue: QueueId,
    /// Entries.
    pub messages: usize,
    /// Their cost, as [`SharedMessage::cost`](gateway_core::SharedMessage::cost) counts it.
    pub bytes: u64,
    /// The first place in use; equal to `next` if there is none.
    pub first: u64,
    /// One more than the last place in use.
    pub next: u64,
    /// One more than the last place of a QoS 2 entry that an earlier process may have begun to send; 0 if there is none.
    pub exact: u64,
    /// One more than the last place that an earlier process may have begun to send without the entry saying so. Entries
    /// do say so once the session's connection has ended.
    pub begun: u64,
    /// Packet identifiers of QoS 2 messages that came in and are not released.
    pub received: Vec<u16>,
}

/// A stretch of a queue.
#[derive(Debug, Clone, Default)]
pub struct Loaded {
    /// Entries in order. Damaged ones are left out, counted and logged.
    pub entries: Vec<StoredEntry>,
    /// Place to read on from.
    pub next: u64,
    /// Nothing more was there.
    pub end: bool,
    /// Entries that were left out because they are damaged.
    pub damaged: usize,
}

/// The health of a store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum StoreHealth {
    /// Takes and keeps what it is given.
    #[default]
    Sound,
    /// The last commit failed (disk full, I/O error); it tries again with every commit.
    Failing,
    /// Its file is damaged: it takes and gives nothing until the next start, which sets the file aside.
    Damaged,
}

/// Decides about entries that expire, and hears of those that are gone. Called on a thread of the store, so it must not
/// wait for the store.
pub trait Expiry: Send + Sync {
    /// Returns whether an expired entry stays because its receiver may have begun to receive it. The session that has it in
    /// memory then removes it: the store does not ask again.
    fn keeps(&self, queue: QueueId, seq: u64, qos: QoS) -> bool;

    /// This many entries and bytes of a queue expired and were removed.
    fn expired(&self, queue: QueueId, messages: usize, bytes: u64);
}

/// Keeps queues.
pub trait QueueStore: Journal {
    /// Reads entries from place `from` on, after everything submitted before this call: at most `messages` and, beyond
    /// the first entry, `bytes`. Cancel safe.
    fn load(
        &self,
        queue: QueueId,
        from: u64,
        messages: usize,
        bytes: usize,
    ) -> BoxFuture<'static, Result<Loaded, StoreError>>;

    /// All queues with entries or received identifiers, in order. For the start: blocks on the disk, reads no message.
    fn summaries(&self) -> Result<Vec<QueueSummary>, StoreError>;

    /// Returns whether there is room for another message, in memory and, as far as known, on disk.
    fn accepts(&self) -> bool;

    /// As [`Self::accepts`], for this message: while room is short, its sender may hold no more than its share.
    ///
    /// # Errors
    /// The reason why not.
    fn admit(&self, message: &Message<'_>) -> Result<(), NoRoom>;

    /// Its health.
    fn health(&self) -> StoreHealth;
}
