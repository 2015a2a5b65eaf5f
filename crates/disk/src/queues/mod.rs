//! Durable queues in LMDB: one writer thread with group commit, two reader threads.
//!
//! Tables and keys are explained in `tables`. The way of an operation: `inbox` (submitted), `batch` (chosen and merged),
//! `writer` (written, then told to whoever waits). A read takes the same way and is then handed to `load`.

pub(super) mod audit;
mod batch;
mod inbox;
mod load;
#[cfg(test)]
mod model_tests;
mod start;
mod sweep;
mod tables;
#[cfg(test)]
mod tests;
pub(super) mod transfer;
mod uses;
mod writer;

use std::{
    path::PathBuf,
    sync::{Arc, OnceLock, atomic::Ordering::Relaxed},
    thread::JoinHandle,
    time::Duration,
};

use gateway_core::{Journal, Message, NoRoom, QueueId, QueueOp, Timestamp, clock};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::{
    CommitHook,
    committer::{Committer, Lazy, join},
    environment::{Environment, EnvironmentOptions},
};
use inbox::{InboxGauges, QueueInbox, QueueJob};
use load::{PageRequest, QueueReader, QueueReaders};
use store::{BoxFuture, DataDir, Expiry, Loaded, QueueStore, QueueSummary, StoreError, StoreHealth};
use tables::QueueTables;
use writer::QueueWork;

const READERS: usize = 2;

/// Setup of [`EmbeddedQueues`].
#[derive(Clone)]
pub struct QueueOptions {
    /// First size of the memory map, a multiple of the page size. It doubles when full; memory and disk are only used as
    /// data comes.
    pub map_size: usize,
    /// The map does not grow beyond this; a commit that needs more fails.
    pub max_map_size: usize,
    /// Bytes of messages that may wait to be written, which those that send them share; above it [`QueueStore::accepts`] is
    /// false.
    pub max_waiting_bytes: usize,
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
}

impl Default for QueueOptions {
    fn default() -> Self {
        let lazy = Lazy::default();
        Self {
            map_size: 1 << 30,
            max_map_size: usize::MAX,
            max_waiting_bytes: 256 << 20,
            lazy_interval: lazy.interval,
            lazy_count: lazy.count,
            unmap_interval: lazy.unmap,
            clock: clock::now,
            begun: 4096,
            hook: None,
        }
    }
}

/// Figures of a queue store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueGauges {
    /// Bytes of messages submitted and not yet written.
    pub waiting_bytes: usize,
    /// Entries in all queues, as of the last commit.
    pub depth: u64,
}

/// A [`QueueStore`] in the data directory. Dropping it writes what was submitted.
pub struct EmbeddedQueues {
    environment: Arc<Environment>,
    tables: QueueTables,
    gauges: Arc<InboxGauges>,
    max_waiting_bytes: usize,
    begun: usize,
    expiry: Arc<OnceLock<Arc<dyn Expiry>>>,
    committer: Option<Committer<QueueWork>>,
    readers: Arc<QueueReaders>,
    threads: Vec<JoinHandle<()>>,
}

impl EmbeddedQueues {
    /// Opens the store in the folder `queues` of the data directory. Blocks on the disk. A damaged store is set aside;
    /// one of a newer format is refused and left as it is.
    pub fn open(directory: &Arc<DataDir>, options: &QueueOptions) -> Result<Self, StoreError> {
        let settings = EnvironmentOptions {
            name: "queues",
            map_size: options.map_size,
            max_map_size: options.max_map_size,
            tables: tables::COUNT,
            hook: options.hook.clone(),
        };
        let environment = Arc::new(Environment::open(directory, settings)?);
        let tables = QueueTables::open(&environment)?;
        let gauges = Arc::new(InboxGauges::new(options.max_waiting_bytes));
        let first_due = environment.reading(|txn| {
            gauges.depth.store(tables.entries.len(txn)?, Relaxed);
            sweep::first_due(&tables, txn)
        })?;
        let damaged = Arc::new(Mutex::new(Vec::new()));
        let expiry = Arc::default();
        let readers = Arc::new(QueueReaders::default());
        let writer = QueueWork::new(
            tables,
            Arc::clone(&gauges),
            Arc::clone(&readers),
            Arc::clone(&damaged),
            options.clock,
            Arc::clone(&expiry),
            first_due,
        );
        let inbox = || QueueInbox::new(&gauges, options.max_waiting_bytes);
        let lazy = Lazy {
            interval: options.lazy_interval,
            count: options.lazy_count,
            unmap: options.unmap_interval,
        };
        let inboxes = [inbox(), inbox()];
        let committer = Committer::start("queue-writer", Arc::clone(&environment), writer, inboxes, lazy)?;
        let mut store = Self {
            environment: Arc::clone(&environment),
            tables,
            gauges,
            max_waiting_bytes: options.max_waiting_bytes,
            begun: options.begun,
            expiry,
            committer: Some(committer),
            readers,
            threads: Vec::new(),
        };
        for _ in 0..READERS {
            let (environment, damaged) = (Arc::clone(&environment), Arc::clone(&damaged));
            let reader = QueueReader { environment, tables, damaged, clock: options.clock };
            store.threads.push(store.readers.start(reader)?);
        }
        Ok(store)
    }

    /// Returns the path to which a damaged file was moved at open, if there was one.
    pub fn set_aside(&self) -> Option<&PathBuf> {
        self.environment.set_aside()
    }

    /// Notes on disk that nothing is written from now on, so that the next start need not verify a large file. Dropping
    /// the last handle does the same.
    pub fn note_closed(&self) {
        self.environment.note_closed();
    }

    /// For the start, before [`QueueStore::summaries`]: moves QoS 1 entries of shared groups' members to the end of the
    /// group's queue, in the order of their messages, and returns how many. Their connections have ended
    /// [MQTT-4.8.2-5]. Blocks on the disk.
    pub fn regroup(&self) -> Result<usize, StoreError> {
        start::regroup(&self.environment, &self.tables)
    }

    /// Removes what has expired from now on; before this call nobody knows which entries may have been sent. To be
    /// called once.
    pub fn begin_expiry(&self, expiry: Arc<dyn Expiry>) {
        let _ = self.expiry.set(expiry);
        self.hurry();
    }

    /// Figures.
    pub fn gauges(&self) -> QueueGauges {
        QueueGauges { waiting_bytes: self.gauges.shares.total(), depth: self.gauges.depth.load(Relaxed) }
    }

    fn push(&self, job: QueueJob) {
        if let Some(committer) = &self.committer {
            let urgent = job.is_urgent();
            committer.submit(job, urgent);
        }
    }
}

impl Journal for EmbeddedQueues {
    fn submit(&self, op: QueueOp) {
        if let QueueOp::Append(entry) = &op
            && tables::entry_key(entry.queue, entry.seq).is_none()
            && entry.take().is_some()
        {
            gateway_core::error_limited!(
                queue = entry.queue.0,
                seq = entry.seq,
                "place is beyond the format and was refused"
            );
            if let Some(commit) = &entry.commit {
                commit.refuse();
            }
            return;
        }
        self.push(QueueJob::Op(op));
    }

    fn hurry(&self) {
        if let Some(committer) = &self.committer {
            committer.hurry();
        }
    }
}

impl QueueStore for EmbeddedQueues {
    fn load(
        &self,
        queue: QueueId,
        from: u64,
        messages: usize,
        bytes: usize,
    ) -> BoxFuture<'static, Result<Loaded, StoreError>> {
        let (reply, answer) = oneshot::channel();
        self.push(QueueJob::Load(PageRequest { queue, from, messages, bytes, reply }));
        Box::pin(async move { answer.await.map_err(|_| super::closed())? })
    }

    fn summaries(&self) -> Result<Vec<QueueSummary>, StoreError> {
        start::summaries(&self.environment, &self.tables, self.begun)
    }

    fn accepts(&self) -> bool {
        self.gauges.shares.total() <= self.max_waiting_bytes
            && self.committer.as_ref().is_some_and(Committer::admits)
    }

    fn admit(&self, message: &Message<'_>) -> Result<(), NoRoom> {
        self.gauges.shares.admit_message(message)?;
        match self.committer.as_ref().is_some_and(Committer::admits) {
            true => Ok(()),
            false => Err(NoRoom::Full),
        }
    }

    fn health(&self) -> StoreHealth {
        self.committer.as_ref().map_or(StoreHealth::Failing, Committer::health)
    }
}

impl Drop for EmbeddedQueues {
    /// Waits for the writer to finish what it was given and for the readers, but not for the current thread.
    fn drop(&mut self) {
        self.committer = None;
        self.readers.close();
        for thread in self.threads.drain(..) {
            join(thread);
        }
    }
}
