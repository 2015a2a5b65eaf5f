//! Content of one transaction: a stretch of the submitted operations, merged per entry.

use std::{collections::VecDeque, ops::Range, sync::Arc};

use gateway_core::{QueueId, QueueOp, SharedMessage};
use hashbrown::{HashMap, HashSet};

use super::inbox::{InboxGauges, QueueJob};
use crate::counters::count;

/// Bytes of messages after which a transaction is closed, at the next place where no unit is open.
const MAX_BYTES: usize = 64 << 20;

/// Bytes that a change of an entry has in a redo besides its message, about: of all tables that it changes, keys and values.
const CHANGE: usize = 80;

/// Passes over the jobs to find what an open unit holds up. After the last, only what comes before the first doubtful
/// job may overtake the unit.
const LOOKS: usize = 4;

/// Bounds on a transaction, beyond which it goes on only as long as a unit is open.
#[derive(Debug, Clone, Copy)]
pub(super) struct BatchLimit {
    /// Number of operations.
    pub(super) jobs: usize,
    /// Bytes of their redo, about.
    pub(super) redo: usize,
}

/// Operations from the first on that make a transaction.
#[derive(Debug, Clone, Copy, Default)]
struct Stretch {
    jobs: usize,
    redo: usize,
    /// A bound was reached.
    is_full: bool,
}

/// Size of a redo while operations are added.
#[derive(Default)]
struct RedoSize {
    bytes: usize,
    /// Address of the last message: the entries of one come one after the other, and the message is written once.
    message: Option<usize>,
}

impl RedoSize {
    fn add(&mut self, job: &QueueJob) {
        self.bytes += CHANGE;
        let QueueJob::Op(QueueOp::Append(entry)) = job else { return };
        let message = entry.message_address();
        if message.is_some() && message != self.message {
            self.message = message;
            self.bytes += entry.cost() as usize;
        }
    }
}

/// Change of one entry.
pub(super) struct QueueWrite {
    pub(super) queue: QueueId,
    pub(super) seq: u64,
    /// True if the entry in the table goes first.
    pub(super) remove: bool,
    pub(super) then: EntryAction,
}

pub(super) enum EntryAction {
    Nothing,
    /// The entry of this job, with this body.
    Put {
        job: usize,
        body: usize,
    },
    /// Only its place stays.
    Release,
}

/// A change of a stretch of a queue.
#[derive(Debug, Clone, Copy)]
pub(super) enum QueueCut {
    Trim { queue: QueueId, from: u64, count: usize },
    Purge { queue: QueueId },
    NoteSent { queue: QueueId, below: u64 },
}

/// Changes of single entries and packet identifiers, as ranges of the batch's lists, then perhaps one of a stretch.
pub(super) struct BatchSegment {
    pub(super) writes: Range<usize>,
    pub(super) received: Range<usize>,
    pub(super) then: Option<QueueCut>,
}

/// A message and how many entries of the batch have it.
pub(super) struct BatchBody {
    pub(super) message: Arc<SharedMessage>,
    pub(super) refs: u32,
}

/// The chosen operations. Kept from one transaction to the next for its buffers.
#[derive(Default)]
pub(super) struct QueueBatch {
    /// The operations themselves, without entries that were settled.
    pub(super) jobs: Vec<QueueJob>,
    pub(super) bodies: Vec<BatchBody>,
    pub(super) writes: Vec<QueueWrite>,
    /// Packet identifiers that came in (true) or are free again.
    pub(super) received: Vec<(QueueId, u16, bool)>,
    pub(super) segments: Vec<BatchSegment>,
    /// Entries that were added and removed in this batch.
    pub(super) merged: u64,
    items: Vec<BatchItem>,
    /// Bodies by the address of their message, which the body keeps from being used again.
    known: HashMap<usize, usize, ahash::RandomState>,
    open: HashSet<usize, ahash::RandomState>,
}

struct BatchItem {
    queue: QueueId,
    seq: u64,
    /// Index of its job.
    job: usize,
    what: EntryChange,
}

#[derive(Clone, Copy)]
enum EntryChange {
    Append { body: usize },
    Remove,
    Release,
}

impl QueueBatch {
    /// Takes operations from `waiting`, about as many as `limit` allows, in the order of each queue. True if the rest can go once
    /// this is written, false if it waits for a unit to be closed.
    pub(super) fn take(
        &mut self,
        waiting: &mut VecDeque<QueueJob>,
        limit: BatchLimit,
        gauges: &InboxGauges,
    ) -> bool {
        let Stretch { jobs: length, redo, is_full } = self.stretch(waiting.iter().enumerate(), limit);
        let (passing, more) = if !is_full && length < waiting.len() {
            let behind = waiting.split_off(length);
            self.pass(behind, waiting, BatchLimit { redo: limit.redo.saturating_sub(redo), ..limit })
        } else {
            (Vec::new(), length < waiting.len())
        };
        let (mut writes, mut received) = (0, 0);
        let mut settled = 0;
        for job in waiting.drain(..length).chain(passing) {
            let order = self.jobs.len();
            let mut item = |queue, seq, what| self.items.push(BatchItem { queue, seq, job: order, what });
            let mut cut = None;
            match &job {
                QueueJob::Op(QueueOp::Append(entry)) => {
                    let Some(message) = entry.take() else {
                        settled += 1;
                        gauges.release(entry);
                        continue;
                    };
                    let (queue, seq) = (entry.queue, entry.seq);
                    let body = Self::body(&mut self.bodies, &mut self.known, message);
                    item(queue, seq, EntryChange::Append { body });
                }
                &QueueJob::Op(QueueOp::Remove { queue, seq, .. }) => item(queue, seq, EntryChange::Remove),
                &QueueJob::Op(QueueOp::Release { queue, seq, .. }) => item(queue, seq, EntryChange::Release),
                &QueueJob::Op(QueueOp::Receive { queue, packet_id, .. }) => {
                    self.received.push((queue, packet_id, true));
                }
                &QueueJob::Op(QueueOp::Forget { queue, packet_id, .. }) => {
                    self.received.push((queue, packet_id, false));
                }
                &QueueJob::Op(QueueOp::Trim { queue, from, count }) => {
                    cut = Some(QueueCut::Trim { queue, from, count })
                }
                &QueueJob::Op(QueueOp::Purge { queue }) => cut = Some(QueueCut::Purge { queue }),
                &QueueJob::Op(QueueOp::NoteSent { queue, below }) => {
                    cut = Some(QueueCut::NoteSent { queue, below });
                }
                QueueJob::Load(_) => {}
            }
            self.jobs.push(job);
            if cut.is_some() {
                self.merge();
                self.segments.push(BatchSegment {
                    writes: writes..self.writes.len(),
                    received: received..self.received.len(),
                    then: cut,
                });
                (writes, received) = (self.writes.len(), self.received.len());
            }
        }
        self.merge();
        if writes < self.writes.len() || received < self.received.len() {
            self.segments.push(BatchSegment {
                writes: writes..self.writes.len(),
                received: received..self.received.len(),
                then: None,
            });
        }
        if settled > 0 {
            count(|c| c.store_entries_settled.add(settled));
        }
        for write in &self.writes {
            if let EntryAction::Put { body, .. } = write.then {
                self.bodies[body].refs += 1;
            }
        }
        more
    }

    /// Finds the operations to take. No unit is split: every unit that begins before the cut is closed before it.
    fn stretch<'a>(
        &mut self,
        jobs: impl Iterator<Item = (usize, &'a QueueJob)>,
        limit: BatchLimit,
    ) -> Stretch {
        self.open.clear();
        let (mut stretch, mut redo) = (Stretch::default(), RedoSize::default());
        let (mut taken, mut bytes) = (0, 0);
        for (index, job) in jobs {
            taken += 1;
            bytes += job.bytes();
            if limit.redo < usize::MAX {
                redo.add(job);
            }
            if let Some(unit) = job.unit() {
                if let QueueJob::Op(QueueOp::Append(_)) = job {
                    self.open.insert(unit);
                } else {
                    self.open.remove(&unit);
                }
            }
            if self.open.is_empty() {
                let has_enough = redo.bytes >= limit.redo;
                let is_full = has_enough || taken >= limit.jobs || bytes >= MAX_BYTES;
                stretch = Stretch { jobs: index + 1, redo: redo.bytes, is_full };
                if is_full {
                    count(|c| c.store_full_state.add(has_enough.into()));
                    return stretch;
                }
            }
        }
        stretch
    }

    /// `behind` begins with a unit that is still open, such as a message that waits for another store or goes to
    /// very many receivers. It holds up only the queues that it concerns: takes what may overtake it and gives the rest
    /// back to `waiting`. True if more may overtake it once this is written.
    fn pass(
        &mut self,
        behind: VecDeque<QueueJob>,
        waiting: &mut VecDeque<QueueJob>,
        limit: BatchLimit,
    ) -> (Vec<QueueJob>, bool) {
        let held = self.held(&behind);
        // Units that only the last pass found to be held up must not be split.
        let late = |(job, held): (&QueueJob, &bool)| {
            !held && job.unit().is_some_and(|unit| self.open.contains(&unit))
        };
        let known = behind.iter().zip(&held).position(late).unwrap_or(behind.len());
        let free = behind.iter().enumerate().take(known).filter(|(index, _)| !held[*index]);
        let Stretch { jobs: length, is_full, .. } = self.stretch(free, limit);
        let more = is_full || (known < behind.len() && length > 0);
        let mut passing = Vec::new();
        for (index, job) in behind.into_iter().enumerate() {
            if index < length && !held[index] {
                passing.push(job);
            } else {
                waiting.push_back(job);
            }
        }
        (passing, more)
    }

    /// Tells for each operation whether it belongs to an open unit or comes after one in a queue. A closed unit is held up as a
    /// whole if one of its parts is, so this takes several passes; afterwards `open` has those units too.
    fn held(&mut self, jobs: &VecDeque<QueueJob>) -> Vec<bool> {
        let mut held = vec![false; jobs.len()];
        let mut queues = HashSet::<QueueId, ahash::RandomState>::default();
        for _ in 0..LOOKS {
            let units = self.open.len();
            queues.clear();
            for (job, held) in jobs.iter().zip(&mut held) {
                let (unit, queue) = (job.unit(), job.queue());
                *held = unit.is_some_and(|unit| self.open.contains(&unit))
                    || queue.is_some_and(|queue| queues.contains(&queue));
                if *held {
                    self.open.extend(unit);
                    queues.extend(queue);
                }
            }
            if self.open.len() == units {
                break;
            }
        }
        held
    }

    fn body(
        bodies: &mut Vec<BatchBody>,
        known: &mut HashMap<usize, usize, ahash::RandomState>,
        message: Arc<SharedMessage>,
    ) -> usize {
        *known.entry(Arc::as_ptr(&message).addr()).or_insert_with(|| {
            bodies.push(BatchBody { message, refs: 0 });
            bodies.len() - 1
        })
    }

    /// Turns the items into writes, in the order of the table, one for each entry.
    fn merge(&mut self) {
        self.items.sort_unstable_by_key(|item| (item.queue, item.seq, item.job));
        for run in self.items.chunk_by(|a, b| (a.queue, a.seq) == (b.queue, b.seq)) {
            let first = &run[0];
            let new = matches!(first.what, EntryChange::Append { .. });
            let mut write =
                QueueWrite { queue: first.queue, seq: first.seq, remove: false, then: EntryAction::Nothing };
            for item in run {
                match item.what {
                    EntryChange::Append { body } => write.then = EntryAction::Put { job: item.job, body },
                    EntryChange::Remove => {
                        write.remove = !new;
                        write.then = EntryAction::Nothing;
                    }
                    EntryChange::Release => write.then = EntryAction::Release,
                }
            }
            if new && matches!(write.then, EntryAction::Nothing) {
                self.merged += 1;
            } else {
                self.writes.push(write);
            }
        }
        self.items.clear();
    }

    /// Returns whether there is nothing to write.
    pub(super) fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Empties it but for `jobs`.
    pub(super) fn clear(&mut self) {
        self.bodies.clear();
        self.writes.clear();
        self.received.clear();
        self.segments.clear();
        self.known.clear();
        self.merged = 0;
    }
}
