//! State of sessions in one environment: their records, queues with packet identifiers, and retained messages. One thread
//! writes all of it, so that a commit is one transaction.
//!
//! Each part has its tables, its changes that wait and its way to read them back. `work` puts the parts into one transaction.
//!
//! Damage: a file that is no database or was cut short is set aside at open; a damaged record is reported, counted and
//! removed when it is met.

pub(crate) mod queues;
mod retained;
pub(crate) mod sessions;
#[cfg(test)]
mod tests;
mod work;

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use gateway_core::{Commit, Journal, Message, NoRoom, QueueId, QueueOp, SharedMessage, Timestamp, clock};

use super::{
    CommitHook,
    committer::{Committer, Lazy},
    earlier,
    environment::{Environment, EnvironmentOptions},
    format::STATE_TABLES,
};
use crate::table::WriteTxn;
use ledger::Shipping;
use queues::{QueueTables, Queues, transfer::QueueRecord};
use retained::{RetainedOp, RetainedReader, RetainedTables};
use sessions::SessionTables;
use store::{
    BoxFuture, DataDir, Expiry, Loaded, LoadedRetained, QueueSummary, Restore, SessionOp, StateStore,
    StoreError, StoreHealth,
};
use work::{StateOp, StateWork};

/// Setup of [`EmbeddedState`].
#[derive(Clone)]
pub struct StateOptions {
    /// First size of the memory map, a multiple of the page size. It doubles when full; memory and disk are only used as
    /// data comes.
    pub map_size: usize,
    /// The map does not grow beyond this; a commit that needs more fails.
    pub max_map_size: usize,
    /// Bytes of messages that may wait to be written, which those that send them share; above it [`StateStore::accepts`] is
    /// false.
    pub max_waiting_bytes: usize,
    /// While more bytes than this of changed sessions wait for the disk, what would add to them is refused; the same of retained
    /// messages.
    pub max_waiting_changes: usize,
    /// Longest delay of a change that nobody waits for.
    pub lazy_interval: Duration,
    /// Most such changes that may wait.
    pub lazy_count: usize,
    /// Time after a commit until a large file that is mostly free leaves the process's memory.
    pub unmap_interval: Duration,
    /// The time, by which messages expire.
    pub clock: fn() -> Timestamp,
    /// Most entries at a queue's front that an earlier process may have sent.
    pub begun: usize,
    /// Called before each commit; for tests.
    pub hook: Option<CommitHook>,
    /// A ledger that has each transaction before it is committed.
    pub shipping: Option<Arc<dyn Shipping>>,
}

impl Default for StateOptions {
    fn default() -> Self {
        let lazy = Lazy::default();
        Self {
            map_size: 1 << 30,
            max_map_size: usize::MAX,
            max_waiting_bytes: 256 << 20,
            max_waiting_changes: 64 << 20,
            lazy_interval: lazy.interval,
            lazy_count: lazy.count,
            unmap_interval: lazy.unmap,
            clock: clock::now,
            begun: 4096,
            hook: None,
            shipping: None,
        }
    }
}

/// Figures of the queues.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueGauges {
    /// Bytes of messages submitted and not yet written.
    pub waiting_bytes: usize,
    /// Entries in all queues, as of the last commit.
    pub depth: u64,
}

/// The open tables.
#[derive(Clone, Copy)]
pub(super) struct StateTables {
    pub(super) queues: QueueTables,
    pub(super) sessions: SessionTables,
    pub(super) retained: RetainedTables,
}

impl StateTables {
    fn create(environment: &Environment, txn: &mut WriteTxn<'_>) -> Result<Self, heed::Error> {
        Ok(Self {
            queues: QueueTables::create(environment, txn)?,
            sessions: SessionTables::create(environment, txn)?,
            retained: RetainedTables::create(environment, txn)?,
        })
    }
}

/// A [`StateStore`] in the data directory. Dropping it writes what was submitted.
pub struct EmbeddedState {
    environment: Arc<Environment>,
    tables: StateTables,
    stored: Arc<AtomicU64>,
    /// Before the readers, which answer what the writer leaves.
    committer: Committer<StateWork>,
    queues: Queues,
    retained: RetainedReader,
}

impl EmbeddedState {
    /// Opens the store in the folder `state` of the data directory. Blocks on the disk. A damaged store is set aside.
    ///
    /// # Errors
    /// [`StoreError::Format`] if a newer version has written it; nothing is changed then.
    pub fn open(directory: &Arc<DataDir>, options: &StateOptions) -> Result<Self, StoreError> {
        earlier::check(directory.path())?;
        let settings = EnvironmentOptions {
            name: "state",
            map_size: options.map_size,
            max_map_size: options.max_map_size,
            tables: STATE_TABLES.len() as u32,
            hook: options.hook.clone(),
            shipping: options.shipping.clone(),
        };
        let environment = Arc::new(Environment::open(directory, settings)?);
        let tables = environment.open_tables(|txn| StateTables::create(&environment, txn))?;
        if let Err(error) = earlier::refuse(directory.path()) {
            // On a full disk, say: the next start tries it again.
            tracing::warn!(%error, "an earlier version would not see that it must not use this directory");
        }
        let limit = options.max_waiting_changes;
        let stored = Arc::new(AtomicU64::new(environment.reading(|txn| tables.sessions.count(txn))?));
        let (queues, work, inboxes) = Queues::open(&environment, tables.queues, options)?;
        let sessions = sessions::work(tables.sessions, tables.queues, &stored, limit);
        let retained = retained::work(tables.retained, limit);
        let (work, inboxes) = StateWork::new((work, inboxes), sessions, retained);
        let lazy = Lazy {
            interval: options.lazy_interval,
            count: options.lazy_count,
            unmap: options.unmap_interval,
        };
        let committer = Committer::start("state-writer", Arc::clone(&environment), work, inboxes, lazy)?;
        let retained = RetainedReader::start(Arc::clone(&environment), tables.retained)?;
        Ok(Self { environment, tables, stored, committer, queues, retained })
    }

    /// Returns the path to which a damaged file was moved at open, if there was one.
    pub fn set_aside(&self) -> Option<&PathBuf> {
        self.environment.set_aside()
    }

    /// Returns whether the sessions themselves were lost to damage that was found at open.
    pub fn has_lost_sessions(&self) -> bool {
        self.environment.has_lost("sessions")
    }

    /// Notes on disk that nothing is written from now on, so that the next start need not verify a large file. Dropping
    /// the last handle does the same.
    pub fn note_closed(&self) {
        self.environment.note_closed();
    }

    /// The home is another gateway's, and whoever could be told of an answer is gone: what waits is refused, and so is all that comes.
    pub fn give_up(&self) {
        self.committer.give_up();
    }

    /// For the start, before [`StateStore::summaries`]: moves QoS 1 entries of shared groups' members to the end of the
    /// group's queue, in the order of their messages, and returns how many. Their connections have ended
    /// [MQTT-4.8.2-5]. Blocks on the disk.
    pub fn regroup(&self) -> Result<usize, StoreError> {
        self.queues.regroup()
    }

    /// Removes what has expired from now on; before this call nobody knows which entries may have been sent. To be
    /// called once.
    pub fn begin_expiry(&self, expiry: Arc<dyn Expiry>) {
        self.queues.begin_expiry(expiry);
        self.hurry();
    }

    /// Sessions in the store, as of the last commit.
    pub fn stored(&self) -> u64 {
        self.stored.load(Relaxed)
    }

    /// Figures of the queues.
    pub fn gauges(&self) -> QueueGauges {
        self.queues.gauges()
    }

    /// Writes records of queues that are new; durable after it.
    pub(super) fn import(&self, records: &[QueueRecord]) -> Result<(), StoreError> {
        queues::transfer::import(&self.environment, &self.tables.queues, records)
    }

    /// Returns whether all imported records fit together.
    pub(super) fn is_whole(&self) -> Result<bool, StoreError> {
        queues::transfer::is_whole(&self.environment, &self.tables.queues)
    }

    fn retain(&self, topic: Arc<str>, message: Option<Arc<SharedMessage>>, commit: Option<Arc<Commit>>) {
        self.committer.submit(StateOp::Retained(RetainedOp { topic, message, commit }), false);
    }
}

impl Journal for EmbeddedState {
    fn submit(&self, op: QueueOp) {
        if queues::is_beyond_format(&op) {
            return;
        }
        let op = StateOp::from(op);
        let urgent = op.is_urgent();
        self.committer.submit(op, urgent);
    }

    fn hurry(&self) {
        self.committer.hurry();
    }
}

impl StateStore for EmbeddedState {
    fn submit_session(&self, op: SessionOp) {
        let op = StateOp::from(op);
        let urgent = op.is_urgent();
        self.committer.submit(op, urgent);
    }

    fn set_retained(&self, message: Arc<SharedMessage>, commit: Option<Arc<Commit>>) {
        self.retain(Arc::clone(&message.topic), Some(message), commit);
    }

    fn clear_retained(&self, topic: Arc<str>, commit: Option<Arc<Commit>>) {
        self.retain(topic, None, commit);
    }

    fn load(
        &self,
        queue: QueueId,
        from: u64,
        messages: usize,
        bytes: usize,
    ) -> BoxFuture<'static, Result<Loaded, StoreError>> {
        let (job, answer) = queues::load(queue, from, messages, bytes);
        self.committer.submit(StateOp::Queue(job), true);
        answer
    }

    fn load_retained(&self, topics: Vec<Arc<str>>) -> BoxFuture<'static, Result<LoadedRetained, StoreError>> {
        self.retained.load(topics)
    }

    fn restore_sessions(&self, into: &mut dyn Restore) -> Result<(), StoreError> {
        sessions::restore(&self.environment, &self.tables.sessions, into)
    }

    fn summaries(&self) -> Result<Vec<QueueSummary>, StoreError> {
        self.queues.summaries()
    }

    fn restore_retained(&self, into: &mut dyn FnMut(Arc<SharedMessage>)) -> Result<(), StoreError> {
        retained::restore(&self.environment, &self.tables.retained, into)
    }

    fn accepts_sessions(&self) -> bool {
        self.committer.admits()
    }

    fn accepts(&self) -> bool {
        self.queues.have_room() && self.committer.admits()
    }

    fn admit(&self, message: &Message<'_>) -> Result<(), NoRoom> {
        self.queues.admit(message)?;
        match self.committer.admits() {
            true => Ok(()),
            false => Err(NoRoom::Full),
        }
    }

    fn health(&self) -> StoreHealth {
        self.committer.health()
    }
}
