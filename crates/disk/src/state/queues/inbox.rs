//! Operations submitted to the queues and not yet taken by their writer.

use std::sync::{Arc, atomic::AtomicU64};

use gateway_core::{Commit, QueueEntry, QueueId, QueueOp, Shares};

use super::load::PageRequest;
use crate::{committer, counters::count};

/// Shorter lists are not searched for settled entries.
const COMPACT_FROM: usize = 10_000;

/// Something for the writer, in order.
pub(crate) enum QueueJob {
    Op(QueueOp),
    /// A read, to be done once everything before it is written.
    Load(PageRequest),
}

impl QueueJob {
    /// Returns whether somebody waits for the job, so that the next commit must not be put off.
    pub(crate) fn is_urgent(&self) -> bool {
        match self {
            // The publisher's side calls `hurry` once all entries of the message are here, or closes the unit.
            Self::Op(QueueOp::Append(_)) => false,
            // Nobody waits for a move from queue to queue either; whoever wants the entry reads it.
            Self::Op(QueueOp::Remove { queue, unit, .. }) => unit.is_some() && *queue == QueueId::NONE,
            Self::Op(QueueOp::Release { .. } | QueueOp::Receive { .. } | QueueOp::Forget { .. }) => true,
            Self::Op(QueueOp::NoteSent { .. } | QueueOp::Trim { .. } | QueueOp::Purge { .. }) => false,
            Self::Load(_) => true,
        }
    }

    /// The part of a commit that it carries.
    pub(super) fn commit(&self) -> Option<&Arc<Commit>> {
        match self {
            Self::Op(QueueOp::Append(entry)) => entry.commit.as_ref(),
            Self::Op(QueueOp::Remove { unit, .. }) => unit.as_ref(),
            Self::Op(
                QueueOp::Release { commit, .. }
                | QueueOp::Receive { commit, .. }
                | QueueOp::Forget { commit, .. },
            ) => Some(commit),
            Self::Op(QueueOp::NoteSent { .. } | QueueOp::Trim { .. } | QueueOp::Purge { .. })
            | Self::Load(_) => None,
        }
    }

    /// The unit that it is a part of, or closes: the address of its commit.
    pub(super) fn unit(&self) -> Option<usize> {
        self.commit().filter(|commit| commit.is_unit()).map(|commit| Arc::as_ptr(commit).addr())
    }

    /// The queue whose order it keeps.
    pub(super) fn queue(&self) -> Option<QueueId> {
        let queue = match self {
            Self::Op(QueueOp::Append(entry)) => entry.queue,
            Self::Op(
                QueueOp::Remove { queue, .. }
                | QueueOp::Release { queue, .. }
                | QueueOp::Receive { queue, .. }
                | QueueOp::Forget { queue, .. }
                | QueueOp::NoteSent { queue, .. }
                | QueueOp::Trim { queue, .. }
                | QueueOp::Purge { queue },
            ) => *queue,
            Self::Load(request) => request.queue,
        };
        (queue != QueueId::NONE).then_some(queue)
    }

    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Op(QueueOp::Append(entry)) => entry.cost() as usize,
            _ => 0,
        }
    }
}

/// Figures that any thread may read.
#[derive(Debug)]
pub(super) struct InboxGauges {
    /// Bytes of messages in entries that are submitted and neither written, refused nor known to be settled, by sender.
    pub(super) shares: Shares,
    /// Entries in the table.
    pub(super) depth: AtomicU64,
}

impl InboxGauges {
    /// Of an empty store; `max_bytes` is when it takes no more messages.
    pub(super) fn new(max_bytes: usize) -> Self {
        Self { shares: Shares::new(max_bytes), depth: AtomicU64::new(0) }
    }

    /// The entry waits no more.
    pub(super) fn release(&self, entry: &QueueEntry) {
        self.shares.give_back(entry.feeder(), entry.cost() as usize);
    }
}

/// Operations in the order of their submission. Settled entries are thrown out whenever the list, or what it holds in
/// bytes, has grown by as much as it kept the last time, so that a disk that hangs costs memory only for what is not
/// acknowledged.
pub(crate) struct QueueInbox {
    pub(super) jobs: Vec<QueueJob>,
    gauges: Arc<InboxGauges>,
    bytes: usize,
    /// Numbers of jobs and of bytes, one of which must be reached before the next search for settled entries.
    compact_at: (usize, usize),
    /// The least growth in bytes between two searches.
    step: usize,
}

impl QueueInbox {
    /// An empty one; `max_bytes` is when the store takes no more messages.
    pub(super) fn new(gauges: &Arc<InboxGauges>, max_bytes: usize) -> Self {
        let step = max_bytes / 8;
        let gauges = Arc::clone(gauges);
        Self { jobs: Vec::new(), gauges, bytes: 0, compact_at: (COMPACT_FROM, step), step }
    }

    /// Gives all jobs away; their bytes still count as waiting.
    pub(super) fn drain(&mut self) -> std::vec::Drain<'_, QueueJob> {
        self.bytes = 0;
        self.compact_at = (COMPACT_FROM, self.step);
        self.jobs.drain(..)
    }

    fn compact(&mut self) {
        let jobs = self.jobs.len();
        let mut kept = 0;
        let gauges = &self.gauges;
        self.jobs.retain(|job| {
            if let QueueJob::Op(QueueOp::Append(entry)) = job
                && entry.is_settled()
            {
                gauges.release(entry);
                return false;
            }
            kept += job.bytes();
            true
        });
        let settled = (jobs - self.jobs.len()) as u64;
        count(|c| c.store_entries_settled.add(settled));
        self.bytes = kept;
        self.compact_at = ((2 * self.jobs.len()).max(COMPACT_FROM), kept + kept.max(self.step));
    }
}

impl committer::Inbox for QueueInbox {
    type Op = QueueJob;

    fn push(&mut self, job: QueueJob) {
        let bytes = job.bytes();
        if let QueueJob::Op(QueueOp::Append(entry)) = &job {
            self.bytes += bytes;
            self.gauges.shares.take(entry.feeder(), bytes);
        }
        self.jobs.push(job);
        if self.jobs.len() >= self.compact_at.0 || self.bytes >= self.compact_at.1 {
            self.compact();
        }
    }

    fn len(&self) -> usize {
        self.jobs.len()
    }
}
