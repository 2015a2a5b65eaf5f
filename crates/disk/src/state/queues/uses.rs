//! Uses of each queue by the operations of a batch, so that thousands of queues that end at once do not each look through the
//! whole batch.

use gateway_core::{QueueId, QueueOp};
use hashbrown::HashMap;

use super::{inbox::QueueJob, sweep::Sweep};

/// By queue; queues that are not read, added to or cut are absent.
#[derive(Default)]
pub(super) struct Uses(HashMap<QueueId, QueueUse, ahash::RandomState>);

#[derive(Default)]
struct QueueUse {
    /// The lowest place that is added.
    adds: Option<u64>,
    reads: bool,
    cuts: bool,
}

impl Uses {
    /// Looks through `jobs` once.
    pub(super) fn of(jobs: &[QueueJob]) -> Self {
        let mut uses = Self::default();
        for job in jobs {
            match job {
                QueueJob::Op(QueueOp::Append(entry)) => {
                    let adds = &mut uses.of_queue(entry.queue).adds;
                    *adds = Some(adds.map_or(entry.seq, |lowest| lowest.min(entry.seq)));
                }
                QueueJob::Op(QueueOp::Trim { queue, .. } | QueueOp::Purge { queue }) => {
                    uses.of_queue(*queue).cuts = true;
                }
                QueueJob::Load(request) => uses.of_queue(request.queue).reads = true,
                QueueJob::Op(_) => {}
            }
        }
        uses
    }

    fn of_queue(&mut self, queue: QueueId) -> &mut QueueUse {
        self.0.entry(queue).or_default()
    }

    /// Returns whether the batch reads, cuts or adds where `sweep` has not been yet.
    pub(super) fn meets(&self, sweep: &Sweep) -> bool {
        self.0.get(&sweep.queue).is_some_and(|used| {
            used.reads || used.cuts || used.adds.is_some_and(|lowest| sweep.covers(lowest))
        })
    }

    /// Returns whether the batch reads or adds to `queue`.
    pub(super) fn reads_or_adds(&self, queue: QueueId) -> bool {
        self.0.get(&queue).is_some_and(|used| used.reads || used.adds.is_some())
    }
}
