//! The writer of queues: chooses, writes, and tells those who wait.

use std::{
    collections::VecDeque,
    sync::{Arc, OnceLock, atomic::Ordering::Relaxed},
    time::Duration,
};

use gateway_core::{QueueId, QueueOp, Timestamp};
use hashbrown::HashSet;
use parking_lot::Mutex;

use super::{
    batch::{BatchLimit, EntryAction, QueueBatch, QueueCut},
    inbox::{InboxGauges, QueueInbox, QueueJob},
    load::QueueReaders,
    sweep::{self, Sweep},
    tables::{self, EntryHead, QueueTables},
    uses::Uses,
};
use crate::{committer::EnvironmentWriter, counters::count, table::WriteTxn};
use store::Expiry;
use store::encoding::message;

/// Operations in one transaction, unless a unit has more.
const MAX_JOBS: usize = 20_000;

/// Places that empty lists keep for the next operations.
const MAX_KEPT: usize = 1 << 16;

/// Entries that one transaction removes for sweeps and expiry.
const MAX_SWEPT: usize = 10_000;

/// State of the queues' writer thread.
pub(crate) struct QueueWork {
    pub(super) tables: QueueTables,
    pub(super) gauges: Arc<InboxGauges>,
    pub(super) readers: Arc<QueueReaders>,
    /// Places of damaged entries that readers met.
    pub(super) damaged: Arc<Mutex<Vec<(QueueId, u64)>>>,
    pub(super) clock: fn() -> Timestamp,
    /// Nothing is removed until this is set.
    expiry: Arc<OnceLock<Arc<dyn Expiry>>>,
    waiting: VecDeque<QueueJob>,
    /// `waiting` can be written once the batch is.
    ready: bool,
    batch: QueueBatch,
    /// Unfinished removals of earlier transactions.
    sweeps: Vec<Sweep>,
    /// Number of the next message; looked up when not known.
    next_number: Option<u64>,
    /// Second of the next expiry.
    first_due: Option<u64>,
    /// The last second in which expired messages were removed, unless some were left.
    swept: Option<u64>,
    /// This transaction removes what expired until this second.
    expire_until: Option<u64>,
    effects: Effects,
    /// The most operations and swept entries in the next transaction: fewer after a failure, since removing needs free
    /// pages too.
    limit: usize,
    /// The last commit failed.
    failed: bool,
    /// This transaction has sweeps only.
    alone: bool,
    buffer: Vec<u8>,
}

/// Changes of state that come true once the transaction is committed.
#[derive(Default)]
struct Effects {
    next_number: u64,
    sweeps: Vec<Sweep>,
    first_due: Option<u64>,
    more_expired: bool,
    expired: Vec<(QueueId, usize, u64)>,
    written: u64,
    removed: u64,
    depth: u64,
}

impl QueueWork {
    pub(super) fn new(
        tables: QueueTables,
        gauges: Arc<InboxGauges>,
        readers: Arc<QueueReaders>,
        damaged: Arc<Mutex<Vec<(QueueId, u64)>>>,
        clock: fn() -> Timestamp,
        expiry: Arc<OnceLock<Arc<dyn Expiry>>>,
        first_due: Option<u64>,
    ) -> Self {
        Self {
            tables,
            gauges,
            readers,
            damaged,
            clock,
            expiry,
            waiting: VecDeque::new(),
            ready: false,
            batch: QueueBatch::default(),
            sweeps: Vec::new(),
            next_number: None,
            first_due,
            swept: None,
            expire_until: None,
            effects: Effects::default(),
            limit: MAX_JOBS,
            failed: false,
            alone: false,
            buffer: Vec::new(),
        }
    }

    /// Returns whether nothing else may be in the planned transaction. Soon after a failure a sweep may need more pages than
    /// are free; nothing is to be refused with it.
    pub(crate) fn sweeps_alone(&self) -> bool {
        self.alone
    }

    /// The units of the planned transaction.
    pub(crate) fn closed_units(&self) -> impl Iterator<Item = usize> {
        let closing = |job: &&QueueJob| !matches!(job, QueueJob::Op(QueueOp::Append(_)));
        self.batch.jobs.iter().filter(closing).filter_map(QueueJob::unit)
    }

    fn second(&self) -> u64 {
        (self.clock)().0 / 1000
    }

    fn bodies(&mut self, txn: &mut WriteTxn<'_>) -> Result<Vec<u64>, heed::Error> {
        let mut next = match self.next_number {
            Some(next) => next,
            None => self.tables.next_number(txn)?,
        };
        let mut numbers = Vec::with_capacity(self.batch.bodies.len());
        for body in &self.batch.bodies {
            numbers.push(next);
            if body.refs == 0 {
                continue;
            }
            message::encode(&body.message, &mut self.buffer);
            self.tables.add_body(txn, next, &self.buffer, body.refs)?;
            next += 1;
        }
        self.effects.next_number = next;
        Ok(numbers)
    }

    fn write(&mut self, txn: &mut WriteTxn<'_>, index: usize, numbers: &[u64]) -> Result<(), heed::Error> {
        let write = &self.batch.writes[index];
        let Some(key) = tables::entry_key(write.queue, write.seq) else {
            return Ok(());
        };
        if write.remove {
            self.effects.removed += u64::from(self.tables.remove(txn, &key)?.is_some());
        }
        match write.then {
            EntryAction::Nothing => {}
            EntryAction::Release => self.tables.release(txn, &key, &mut self.buffer)?,
            EntryAction::Put { job, body } => {
                let QueueJob::Op(QueueOp::Append(entry)) = &self.batch.jobs[job] else { return Ok(()) };
                let (number, body) = (numbers[body], &self.batch.bodies[body]);
                let expiry = EntryHead::encode_new(entry, number, body.refs == 1, &mut self.buffer);
                self.tables.entries.put(txn, &key, &self.buffer)?;
                if let Some(second) = expiry {
                    self.tables.expiry.put(txn, &tables::expiry_key(second, &key), &[])?;
                }
                self.effects.written += 1;
            }
        }
        Ok(())
    }

    fn segments(&mut self, txn: &mut WriteTxn<'_>, room: &mut usize, uses: &Uses) -> Result<(), heed::Error> {
        let numbers = self.bodies(txn)?;
        for index in 0..self.batch.segments.len() {
            let segment = &self.batch.segments[index];
            let (writes, received, then) = (segment.writes.clone(), segment.received.clone(), segment.then);
            for write in writes {
                self.write(txn, write, &numbers)?;
            }
            for &(queue, packet_id, received) in &self.batch.received[received] {
                self.tables.set_received(txn, queue, packet_id, received)?;
            }
            let Some(cut) = then else { continue };
            match cut {
                QueueCut::Purge { queue } => self.tables.forget_received(txn, queue)?,
                QueueCut::NoteSent { queue, below } => self.tables.note_all_sent(txn, queue, below)?,
                QueueCut::Trim { .. } => {}
            }
            if let Some(mut sweep) = Sweep::new(&self.tables, txn, cut)? {
                let limit = if uses.reads_or_adds(sweep.queue) { usize::MAX } else { *room };
                let (removed, finished) = sweep.run(&self.tables, txn, limit)?;
                self.swept(room, removed);
                if !finished {
                    self.effects.sweeps.push(sweep);
                }
            }
        }
        Ok(())
    }

    fn swept(&mut self, room: &mut usize, removed: usize) {
        *room = room.saturating_sub(removed);
        self.effects.removed += removed as u64;
    }

    fn release_bytes(&self, job: &QueueJob) {
        if let QueueJob::Op(QueueOp::Append(entry)) = job {
            self.gauges.release(entry);
        }
    }

    fn refuse(&self, job: &QueueJob) {
        self.release_bytes(job);
        if let Some(commit) = job.commit() {
            commit.refuse();
        }
    }
}

impl EnvironmentWriter for QueueWork {
    type Inbox = QueueInbox;

    fn accept(&mut self, inbox: &mut QueueInbox) {
        self.waiting.extend(inbox.drain());
        inbox.jobs.shrink_to(MAX_KEPT);
    }

    fn plan(&mut self, redo: usize) -> bool {
        {
            let mut damaged = self.damaged.lock();
            let remove = |(queue, seq)| QueueJob::Op(QueueOp::Remove { queue, seq, unit: None });
            self.waiting.extend(damaged.drain(..).map(remove));
        }
        if self.waiting.is_empty() {
            self.waiting.shrink_to(MAX_KEPT);
        }
        self.alone = !self.failed && self.limit < MAX_JOBS && !self.sweeps.is_empty();
        self.ready = if self.alone {
            !self.waiting.is_empty()
        } else {
            self.batch.take(&mut self.waiting, BatchLimit { jobs: self.limit, redo }, &self.gauges)
        };
        let now = self.second();
        let due = self.is_due() && self.swept != Some(now);
        self.expire_until = due.then_some(now);
        if !self.batch.is_empty() || !self.sweeps.is_empty() || due {
            return true;
        }
        // Nothing but reads, or entries that need not be written.
        count(|c| c.store_entries_settled.add(self.batch.merged));
        self.committed_jobs();
        false
    }

    fn apply(&mut self, txn: &mut WriteTxn<'_>) -> Result<(), heed::Error> {
        self.effects = Effects::default();
        let mut room = self.limit.min(MAX_SWEPT);
        let mut sweeps = self.sweeps.clone();
        let sweeps_or_cuts =
            !sweeps.is_empty() || self.batch.segments.iter().any(|segment| segment.then.is_some());
        // Few batches sweep: the others need not be looked through.
        let uses = if sweeps_or_cuts { Uses::of(&self.batch.jobs) } else { Uses::default() };
        for sweep in &mut sweeps {
            let limit = if uses.meets(sweep) { usize::MAX } else { room };
            let (removed, finished) = sweep.run(&self.tables, txn, limit)?;
            self.swept(&mut room, removed);
            if !finished {
                self.effects.sweeps.push(sweep.clone());
            }
        }
        self.segments(txn, &mut room, &uses)?;
        if let (Some(now), Some(expiry)) = (self.expire_until, self.expiry.get()) {
            let expired = &mut self.effects.expired;
            self.effects.more_expired =
                sweep::expire(&self.tables, txn, now, room.max(1), &**expiry, expired)?;
        }
        self.effects.first_due = sweep::first_due(&self.tables, txn)?;
        self.effects.depth = self.tables.entries.len(txn)?;
        Ok(())
    }

    fn adds(&self) -> bool {
        !self.batch.bodies.is_empty()
    }

    fn committed(&mut self) {
        let effects = std::mem::take(&mut self.effects);
        self.limit = (self.limit * 2).min(MAX_JOBS);
        self.failed = false;
        self.next_number = Some(effects.next_number);
        self.sweeps = effects.sweeps;
        self.first_due = effects.first_due;
        if let Some(now) = self.expire_until {
            self.swept = (!effects.more_expired).then_some(now);
        }
        self.gauges.depth.store(effects.depth, Relaxed);
        let expired: usize = effects.expired.iter().map(|(_, messages, _)| messages).sum();
        count(|c| {
            c.store_entries_written.add(effects.written);
            c.store_entries_removed.add(effects.removed);
            c.store_entries_expired.add(expired as u64);
            c.store_entries_settled.add(self.batch.merged);
        });
        if let Some(expiry) = self.expiry.get() {
            for (queue, messages, bytes) in effects.expired {
                expiry.expired(queue, messages, bytes);
            }
        }
        self.committed_jobs();
    }

    fn failed(&mut self) {
        // The last commit may have reached the disk after all.
        self.next_number = None;
        self.limit = (self.limit / 8).max(1);
        self.failed = true;
        let mut kept = VecDeque::new();
        let mut refused = 0;
        let mut touched: HashSet<QueueId, ahash::RandomState> =
            self.sweeps.iter().map(|sweep| sweep.queue).collect();
        for job in std::mem::take(&mut self.batch.jobs) {
            match &job {
                QueueJob::Op(QueueOp::Append(_)) => {
                    refused += 1;
                    self.refuse(&job);
                }
                QueueJob::Op(QueueOp::Receive { .. } | QueueOp::Remove { unit: Some(_), .. }) => {
                    self.refuse(&job)
                }
                QueueJob::Op(
                    QueueOp::Remove { queue, .. }
                    | QueueOp::Release { queue, .. }
                    | QueueOp::Forget { queue, .. }
                    | QueueOp::NoteSent { queue, .. }
                    | QueueOp::Trim { queue, .. }
                    | QueueOp::Purge { queue },
                ) => {
                    touched.insert(*queue);
                    kept.push_back(job);
                }
                QueueJob::Load(request) => {
                    if touched.contains(&request.queue) {
                        kept.push_back(job);
                    } else if let QueueJob::Load(request) = job {
                        self.readers.submit(request);
                    }
                }
            }
        }
        self.batch.clear();
        count(|c| c.store_entries_refused.add(refused));
        kept.append(&mut self.waiting);
        self.waiting = kept;
        self.ready = !self.waiting.is_empty();
    }

    fn more(&self) -> bool {
        self.ready || !self.sweeps.is_empty() || (self.swept.is_none() && self.is_due())
    }

    fn tick(&self) -> Option<Duration> {
        let second = self.first_due?;
        let now = (self.clock)().0;
        Some(Duration::from_millis((second * 1000).saturating_sub(now).clamp(1000, 60_000)))
    }

    fn close(&mut self) {
        for job in std::mem::take(&mut self.waiting) {
            if let QueueJob::Op(QueueOp::Append(entry)) = &job
                && entry.take().is_none()
            {
                continue;
            }
            self.refuse(&job);
        }
    }
}

impl QueueWork {
    fn is_due(&self) -> bool {
        self.expiry.get().is_some() && self.first_due.is_some_and(|second| second <= self.second())
    }

    /// Ends the jobs of the batch, which are durable.
    fn committed_jobs(&mut self) {
        self.batch.clear();
        let mut jobs = std::mem::take(&mut self.batch.jobs);
        for job in jobs.drain(..) {
            self.release_bytes(&job);
            if let Some(commit) = job.commit() {
                commit.done();
            }
            if let QueueJob::Load(request) = job {
                self.readers.submit(request);
            }
        }
        self.batch.jobs = jobs;
    }
}
