//! Durable queues: what waits for sessions and shared groups, and which QoS 2 messages came in.

use gateway_core::{QoS, QueueId, StoredEntry};

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

/// Decides about entries that expire, and hears of those that are gone. Called on a thread of the store, so it must not
/// wait for the store.
pub trait Expiry: Send + Sync {
    /// Returns whether an expired entry stays because its receiver may have begun to receive it. The session that has it in
    /// memory then removes it: the store does not ask again.
    fn keeps(&self, queue: QueueId, seq: u64, qos: QoS) -> bool;

    /// This many entries and bytes of a queue expired and were removed.
    fn expired(&self, queue: QueueId, messages: usize, bytes: u64);
}
