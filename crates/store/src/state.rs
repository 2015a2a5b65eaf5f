//! Everything durable that sessions need: their records, their queues and retained messages.

use std::sync::Arc;

use gateway_core::{Commit, Journal, Message, NoRoom, QueueId, SharedMessage};

use super::{BoxFuture, Loaded, QueueSummary, Restore, SessionOp, StoreError};

/// Retained messages that were asked for.
pub type LoadedRetained = Vec<Option<Arc<SharedMessage>>>;

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

/// Keeps sessions, shared groups, queues, packet identifiers of QoS 2 and retained messages.
///
/// Changes are submitted without blocking, and what was submitted meanwhile becomes one transaction. Changes of a session, of a
/// topic and of a queue are written in the order of the calls. Those of sessions and retained messages are written with the next
/// transaction; of queues a part may be left for a later one. So what is submitted after a change of a session is never written
/// before it.
pub trait StateStore: Journal {
    /// Submits a change of a session or shared group.
    fn submit_session(&self, op: SessionOp);

    /// Sets the retained message of its topic. A later change of the topic replaces one not yet written, whose part of a
    /// [`Commit`] then ends with the later one. Whoever waits asks the store to [hurry](Journal::hurry). With a unit's commit it
    /// is written with the unit, unless the topic has a later one by then.
    fn set_retained(&self, message: Arc<SharedMessage>, commit: Option<Arc<Commit>>);

    /// Removes the retained message of a topic, as [`Self::set_retained`].
    fn clear_retained(&self, topic: Arc<str>, commit: Option<Arc<Commit>>);

    /// Reads entries of a queue from place `from` on, after every change of queues that was submitted before this call: at most
    /// `messages` and, beyond the first entry, `bytes`. Cancel safe.
    fn load(
        &self,
        queue: QueueId,
        from: u64,
        messages: usize,
        bytes: usize,
    ) -> BoxFuture<'static, Result<Loaded, StoreError>>;

    /// Reads the retained messages of these topics as they are on disk, in their order; `None` where there is none. Changes
    /// that are not written yet are not seen. Cancel safe.
    fn load_retained(&self, topics: Vec<Arc<str>>) -> BoxFuture<'static, Result<LoadedRetained, StoreError>>;

    /// Reads all sessions and shared groups, in order of number. For the start: blocks on the disk. If two records have one
    /// client id, the one with the lower number is removed and not given, unless it has a will, which may not be published yet:
    /// then it is given without its subscriptions.
    fn restore_sessions(&self, into: &mut dyn Restore) -> Result<(), StoreError>;

    /// All queues with entries or received identifiers, in order. For the start: blocks on the disk, reads no message.
    fn summaries(&self) -> Result<Vec<QueueSummary>, StoreError>;

    /// Reads all retained messages, in order of topic. For the start: blocks on the disk.
    fn restore_retained(&self, into: &mut dyn FnMut(Arc<SharedMessage>)) -> Result<(), StoreError>;

    /// Returns whether the store takes another session, as far as is known. While it does not, beginning a session and refusing
    /// it would leave behind a removal that waits for the disk.
    fn accepts_sessions(&self) -> bool;

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
