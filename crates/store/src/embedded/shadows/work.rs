//! The writer's side: checks and makes what was submitted, in order.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use gateway_core::metrics::count;
use heed::RwTxn;
use tokio::sync::oneshot;

use super::{record, report_damage};
use crate::{
    ShadowPut, StoreError,
    embedded::{
        committer::{Inbox, Work},
        environment::Table,
    },
};

/// Bytes counted for an operation besides key and value.
const OVERHEAD: usize = 200;

/// Bytes that one transaction changes, about: a commit must not take long.
const BATCH_BYTES: usize = 8 << 20;

type Reply = oneshot::Sender<Result<ShadowPut, StoreError>>;

/// What is submitted.
pub(super) enum Op {
    Put { key: Vec<u8>, value: Vec<u8>, expected: u64, is_removal: bool, reply: Reply },
    Forget { key: Vec<u8>, version: u64, reply: Reply },
}

/// An operation, and what it counts for.
pub(super) struct Submitted {
    op: Op,
    bytes: usize,
}

/// Operations that wait. Beyond a limit they are refused.
pub(super) struct ShadowInbox {
    ops: Vec<Submitted>,
    bytes: usize,
    in_hand: Arc<AtomicUsize>,
    limit: usize,
}

/// The writer's.
pub(super) struct ShadowWork {
    table: Table,
    ops: VecDeque<Submitted>,
    /// How many of them are in the transaction, and what became of each.
    planned: usize,
    done: Vec<ShadowPut>,
    in_hand: Arc<AtomicUsize>,
}

impl Submitted {
    pub(super) fn new(op: Op) -> Self {
        let bytes = match &op {
            Op::Put { key, value, .. } => key.len() + value.len(),
            Op::Forget { key, .. } => key.len(),
        };
        Self { op, bytes: bytes + OVERHEAD }
    }

    fn answer(self, result: Result<ShadowPut, StoreError>) {
        let (Op::Put { reply, .. } | Op::Forget { reply, .. }) = self.op;
        // Whoever is gone wants no answer.
        let _ = reply.send(result);
    }
}

impl Inbox for ShadowInbox {
    type Op = Submitted;

    fn push(&mut self, op: Submitted) {
        if self.bytes + self.in_hand.load(Relaxed) > self.limit {
            count(|c| c.store_refused_shadows.add(1));
            let error = StoreError::Unavailable("too many changes of shadows wait for the disk".to_owned());
            return op.answer(Err(error));
        }
        self.bytes += op.bytes;
        self.ops.push(op);
    }

    fn len(&self) -> usize {
        self.ops.len()
    }
}

impl ShadowWork {
    /// The writer's side, and two inboxes that take `limit` bytes together with it.
    pub(super) fn new(table: Table, limit: usize) -> (Self, [ShadowInbox; 2]) {
        let in_hand = Arc::new(AtomicUsize::new(0));
        let inbox = || ShadowInbox { ops: Vec::new(), bytes: 0, in_hand: Arc::clone(&in_hand), limit };
        let inboxes = [inbox(), inbox()];
        (Self { table, ops: VecDeque::new(), planned: 0, done: Vec::new(), in_hand }, inboxes)
    }

    fn take_planned(&mut self) -> Vec<Submitted> {
        let planned = std::mem::take(&mut self.planned);
        let taken: Vec<Submitted> = self.ops.drain(..planned).collect();
        self.in_hand.fetch_sub(taken.iter().map(|op| op.bytes).sum(), Relaxed);
        taken
    }

    fn make(&self, txn: &mut RwTxn<'_>, op: &Op) -> Result<ShadowPut, heed::Error> {
        let (Op::Put { key, .. } | Op::Forget { key, .. }) = op;
        let there = match self.table.get(txn, key)? {
            None => None,
            Some(value) => match record::head(value) {
                // Nobody has read it, so nobody's version fits.
                None => {
                    report_damage(key);
                    return Ok(ShadowPut::Conflict);
                }
                found => found,
            },
        };
        match op {
            Op::Put { value, expected, .. } => {
                if there.map_or(0, |(version, _)| version) != *expected {
                    return Ok(ShadowPut::Conflict);
                }
                self.table.put(txn, key, value)?;
            }
            Op::Forget { version, .. } => {
                if there != Some((*version, true)) {
                    return Ok(ShadowPut::Conflict);
                }
                self.table.delete(txn, key)?;
            }
        }
        Ok(ShadowPut::Written)
    }
}

impl Work for ShadowWork {
    type Inbox = ShadowInbox;

    fn accept(&mut self, inbox: &mut ShadowInbox) {
        self.in_hand.fetch_add(inbox.bytes, Relaxed);
        inbox.bytes = 0;
        self.ops.extend(inbox.ops.drain(..));
    }

    fn plan(&mut self) -> bool {
        let mut bytes = 0;
        let fits = |op: &&Submitted| {
            bytes += op.bytes;
            bytes <= BATCH_BYTES
        };
        self.planned = self.ops.iter().take_while(fits).count().max(1).min(self.ops.len());
        self.planned > 0
    }

    fn apply(&mut self, txn: &mut RwTxn<'_>) -> Result<(), heed::Error> {
        let made = self.ops.iter().take(self.planned).map(|submitted| self.make(txn, &submitted.op));
        let done: Result<Vec<ShadowPut>, _> = made.collect();
        self.done = done?;
        Ok(())
    }

    fn adds(&self) -> bool {
        let adds = |submitted: &Submitted| matches!(submitted.op, Op::Put { is_removal: false, .. });
        self.ops.iter().take(self.planned).any(adds)
    }

    fn committed(&mut self) {
        let done = std::mem::take(&mut self.done);
        for (op, done) in self.take_planned().into_iter().zip(done) {
            op.answer(Ok(done));
        }
    }

    fn failed(&mut self) {
        self.done.clear();
        for op in self.take_planned() {
            op.answer(Err(StoreError::Unavailable("the disk does not take changes of shadows".to_owned())));
        }
    }

    fn more(&self) -> bool {
        !self.ops.is_empty()
    }

    fn close(&mut self) {
        self.planned = self.ops.len();
        self.failed();
    }
}
