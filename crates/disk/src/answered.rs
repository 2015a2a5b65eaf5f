//! The writer's side of stores whose operations are made in order, each with an answer of its own: a bounded inbox, and
//! batches of what fits into one transaction.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use heed::RwTxn;

use super::committer::{EnvironmentWriter, Inbox};
use store::StoreError;

/// Bytes that one transaction changes, about: a commit must not take long.
const BATCH_BYTES: usize = 8 << 20;

/// An operation, which knows who waits for its answer.
pub(super) trait AnsweredOperation: Send + 'static {
    /// Result of an operation that is made.
    type Done: Send;
    /// Name of the things that it changes, for errors.
    const CHANGES: &'static str;
    /// Bytes that it counts for while it waits.
    fn bytes(&self) -> usize;
    /// Tells what became of it.
    fn answer(self, done: Self::Done);
    /// Tells that it was not made.
    fn fail(self, error: StoreError);
    /// Counts one that found no room.
    fn count_refused();
}

/// Makes operations.
pub(super) trait Maker: Send + 'static {
    /// Operation that it makes.
    type Op: AnsweredOperation;
    /// A transaction begins: nothing of one before it that was not [committed](Self::committed) is there.
    fn begun(&mut self) {}
    /// All that was made since the last [`Self::begun`] is durable.
    fn committed(&mut self) {}
    /// Makes one in a transaction, on what those before it leave.
    fn make(
        &mut self,
        txn: &mut RwTxn<'_>,
        op: &Self::Op,
    ) -> Result<<Self::Op as AnsweredOperation>::Done, heed::Error>;
    /// Returns whether these add to the stored records, see [`EnvironmentWriter::adds`]. `bytes` is their weight.
    fn adds<'a>(ops: impl Iterator<Item = &'a Self::Op>, bytes: usize) -> bool;
}

/// An operation that waits, and what it counts for.
struct WaitingOperation<O> {
    op: O,
    bytes: usize,
}

/// Operations that wait. Beyond a limit they are refused.
pub(super) struct AnsweredInbox<O> {
    ops: Vec<WaitingOperation<O>>,
    bytes: usize,
    in_hand: Arc<AtomicUsize>,
    limit: usize,
}

/// The writer's.
pub(super) struct AnsweredWork<M: Maker> {
    maker: M,
    ops: VecDeque<WaitingOperation<M::Op>>,
    /// Number of `ops` in the transaction, and the result of each.
    planned: usize,
    done: Vec<<M::Op as AnsweredOperation>::Done>,
    in_hand: Arc<AtomicUsize>,
}

impl<O: AnsweredOperation> Inbox for AnsweredInbox<O> {
    type Op = O;

    fn push(&mut self, op: O) {
        if self.bytes + self.in_hand.load(Relaxed) > self.limit {
            O::count_refused();
            return op.fail(StoreError::Unavailable(format!("too many {} wait for the disk", O::CHANGES)));
        }
        let bytes = op.bytes();
        self.bytes += bytes;
        self.ops.push(WaitingOperation { op, bytes });
    }

    fn len(&self) -> usize {
        self.ops.len()
    }
}

impl<M: Maker> AnsweredWork<M> {
    /// The writer's side, and two inboxes that take `limit` bytes together with it.
    pub(super) fn new(maker: M, limit: usize) -> (Self, [AnsweredInbox<M::Op>; 2]) {
        let in_hand = Arc::new(AtomicUsize::new(0));
        let inbox = || AnsweredInbox { ops: Vec::new(), bytes: 0, in_hand: Arc::clone(&in_hand), limit };
        let inboxes = [inbox(), inbox()];
        (Self { maker, ops: VecDeque::new(), planned: 0, done: Vec::new(), in_hand }, inboxes)
    }

    fn planned(&self) -> impl Iterator<Item = &WaitingOperation<M::Op>> {
        self.ops.iter().take(self.planned)
    }

    fn take_planned(&mut self) -> Vec<M::Op> {
        let bytes = self.planned().map(|waiting| waiting.bytes).sum();
        self.in_hand.fetch_sub(bytes, Relaxed);
        let planned = std::mem::take(&mut self.planned);
        self.ops.drain(..planned).map(|waiting| waiting.op).collect()
    }
}

impl<M: Maker> EnvironmentWriter for AnsweredWork<M> {
    type Inbox = AnsweredInbox<M::Op>;

    fn accept(&mut self, inbox: &mut Self::Inbox) {
        self.in_hand.fetch_add(inbox.bytes, Relaxed);
        inbox.bytes = 0;
        self.ops.extend(inbox.ops.drain(..));
    }

    fn plan(&mut self) -> bool {
        let mut bytes = 0;
        let fits = |waiting: &&WaitingOperation<M::Op>| {
            bytes += waiting.bytes;
            bytes <= BATCH_BYTES
        };
        self.planned = self.ops.iter().take_while(fits).count().max(1).min(self.ops.len());
        self.planned > 0
    }

    fn apply(&mut self, txn: &mut RwTxn<'_>) -> Result<(), heed::Error> {
        let Self { maker, ops, planned, done, .. } = self;
        done.clear();
        maker.begun();
        for waiting in ops.iter().take(*planned) {
            done.push(maker.make(txn, &waiting.op)?);
        }
        Ok(())
    }

    fn adds(&self) -> bool {
        let bytes = self.planned().map(|waiting| waiting.bytes).sum();
        M::adds(self.planned().map(|waiting| &waiting.op), bytes)
    }

    fn committed(&mut self) {
        self.maker.committed();
        let done = std::mem::take(&mut self.done);
        for (op, done) in self.take_planned().into_iter().zip(done) {
            op.answer(done);
        }
    }

    fn failed(&mut self) {
        self.done.clear();
        for op in self.take_planned() {
            op.fail(StoreError::Unavailable(format!("the disk does not take {}", M::Op::CHANGES)));
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
