//! Durable queues: their tables, what is written of them, two threads that read.
//!
//! Tables and keys are explained in `tables`. The way of an operation: `inbox` (submitted), `batch` (chosen and merged),
//! `writer` (written, then told to whoever waits). A read takes the same way and is then handed to `load`.

pub(crate) mod audit;
mod batch;
mod inbox;
mod load;
#[cfg(test)]
mod model_tests;
mod start;
mod sweep;
mod tables;
#[cfg(test)]
pub(super) mod tests;
pub(crate) mod transfer;
mod uses;
mod writer;

use std::{
    sync::{Arc, OnceLock, atomic::Ordering::Relaxed},
    thread::JoinHandle,
};

use gateway_core::{Message, NoRoom, QueueId, QueueOp};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::{QueueGauges, StateOptions};
use crate::environment::Environment;
use inbox::InboxGauges;
use load::{PageRequest, QueueReader, QueueReaders};
use store::join;
use store::{BoxFuture, Expiry, Loaded, QueueSummary, StoreError};

pub(crate) use inbox::{QueueInbox, QueueJob};
pub(crate) use tables::QueueTables;
pub(crate) use writer::QueueWork;

const READERS: usize = 2;

/// The queues of an open environment, beside their writer.
pub(crate) struct Queues {
    environment: Arc<Environment>,
    tables: QueueTables,
    gauges: Arc<InboxGauges>,
    max_waiting_bytes: usize,
    begun: usize,
    expiry: Arc<OnceLock<Arc<dyn Expiry>>>,
    readers: Arc<QueueReaders>,
    threads: Vec<JoinHandle<()>>,
}

impl Queues {
    /// Starts the readers. Gives the work of the writer, too, and two empty inboxes.
    pub(super) fn open(
        environment: &Arc<Environment>,
        tables: QueueTables,
        options: &StateOptions,
    ) -> Result<(Self, QueueWork, [QueueInbox; 2]), StoreError> {
        let gauges = Arc::new(InboxGauges::new(options.max_waiting_bytes));
        let first_due = environment.reading(|txn| {
            gauges.depth.store(tables.entries.len(txn)?, Relaxed);
            sweep::first_due(&tables, txn)
        })?;
        let damaged = Arc::new(Mutex::new(Vec::new()));
        let mut queues = Self {
            environment: Arc::clone(environment),
            tables,
            gauges: Arc::clone(&gauges),
            max_waiting_bytes: options.max_waiting_bytes,
            begun: options.begun,
            expiry: Arc::default(),
            readers: Arc::default(),
            threads: Vec::new(),
        };
        for _ in 0..READERS {
            let (environment, damaged) = (Arc::clone(environment), Arc::clone(&damaged));
            let reader = QueueReader { environment, tables, damaged, clock: options.clock };
            queues.threads.push(queues.readers.start(reader)?);
        }
        let inbox = || QueueInbox::new(&gauges, options.max_waiting_bytes);
        let inboxes = [inbox(), inbox()];
        let (readers, expiry) = (Arc::clone(&queues.readers), Arc::clone(&queues.expiry));
        let work = QueueWork::new(tables, gauges, readers, damaged, options.clock, expiry, first_due);
        Ok((queues, work, inboxes))
    }

    /// For the start, before [`Self::summaries`]: moves QoS 1 entries of shared groups' members to the end of the group's queue.
    pub(super) fn regroup(&self) -> Result<usize, StoreError> {
        start::regroup(&self.environment, &self.tables)
    }

    pub(super) fn summaries(&self) -> Result<Vec<QueueSummary>, StoreError> {
        start::summaries(&self.environment, &self.tables, self.begun)
    }

    /// Removes what has expired from now on.
    pub(super) fn begin_expiry(&self, expiry: Arc<dyn Expiry>) {
        let _ = self.expiry.set(expiry);
    }

    pub(super) fn gauges(&self) -> QueueGauges {
        QueueGauges { waiting_bytes: self.gauges.shares.total(), depth: self.gauges.depth.load(Relaxed) }
    }

    /// Returns whether another message may wait in memory.
    pub(super) fn have_room(&self) -> bool {
        self.gauges.shares.total() <= self.max_waiting_bytes
    }

    /// As [`Self::have_room`], for this message of its sender.
    pub(super) fn admit(&self, message: &Message<'_>) -> Result<(), NoRoom> {
        self.gauges.shares.admit_message(message)
    }
}

impl Drop for Queues {
    /// Waits for the readers, but not for the current thread. The writer has ended.
    fn drop(&mut self) {
        self.readers.close();
        for thread in self.threads.drain(..) {
            join(thread);
        }
    }
}

/// Refuses an entry whose place the format cannot hold, which no session reaches. True if it was.
pub(super) fn is_beyond_format(op: &QueueOp) -> bool {
    let QueueOp::Append(entry) = op else { return false };
    if tables::entry_key(entry.queue, entry.seq).is_some() || entry.take().is_none() {
        return false;
    }
    gateway_core::error_limited!(
        queue = entry.queue.0,
        seq = entry.seq,
        "place is beyond the format and was refused"
    );
    if let Some(commit) = &entry.commit {
        commit.refuse();
    }
    true
}

/// A read, and its answer.
pub(super) fn load(
    queue: QueueId,
    from: u64,
    messages: usize,
    bytes: usize,
) -> (QueueJob, BoxFuture<'static, Result<Loaded, StoreError>>) {
    let (reply, answer) = oneshot::channel();
    let job = QueueJob::Load(PageRequest { queue, from, messages, bytes, reply });
    (job, Box::pin(async move { answer.await.map_err(|_| StoreError::closed())? }))
}
