//! Makes what was submitted: checks it against what is there, and writes it.

use heed::RwTxn;
use tokio::sync::oneshot;

use super::{
    record::{self, report_damage},
    room::{self, ShadowRoom},
};
use crate::{
    answered::{AnsweredOperation, Maker},
    counters::count,
    environment::Table,
};
use store::{ShadowPut, StoreError};

/// Bytes counted for an operation besides key and value.
const OVERHEAD: usize = 200;

type ShadowReply = oneshot::Sender<Result<ShadowPut, StoreError>>;

/// Operation that is submitted.
pub(super) enum ShadowOp {
    Put { key: Vec<u8>, value: Vec<u8>, expected: u64, is_removal: bool, reply: ShadowReply },
    Forget { key: Vec<u8>, version: u64, reply: ShadowReply },
}

impl ShadowOp {
    fn tell(self, result: Result<ShadowPut, StoreError>) {
        let (Self::Put { reply, .. } | Self::Forget { reply, .. }) = self;
        // A caller that is gone wants no answer.
        let _ = reply.send(result);
    }
}

impl AnsweredOperation for ShadowOp {
    type Done = ShadowPut;
    const CHANGES: &'static str = "changes of shadows";

    fn bytes(&self) -> usize {
        OVERHEAD
            + match self {
                Self::Put { key, value, .. } => key.len() + value.len(),
                Self::Forget { key, .. } => key.len(),
            }
    }

    fn answer(self, done: ShadowPut) {
        self.tell(Ok(done));
    }

    fn fail(self, error: StoreError) {
        self.tell(Err(error));
    }

    fn count_refused() {
        count(|c| c.store_refused_shadows.add(1));
    }
}

/// The writer's.
pub(super) struct ShadowMaker {
    pub(super) table: Table,
    pub(super) room: ShadowRoom,
}

impl Maker for ShadowMaker {
    type Op = ShadowOp;

    fn begun(&mut self) {
        self.room.begun();
    }

    fn committed(&mut self) {
        self.room.committed();
    }

    fn make(&mut self, txn: &mut RwTxn<'_>, op: &ShadowOp) -> Result<ShadowPut, heed::Error> {
        let (ShadowOp::Put { key, .. } | ShadowOp::Forget { key, .. }) = op;
        let mut known = 0;
        let there = match self.table.get(txn, key)? {
            None => None,
            Some(value) => match record::head(value) {
                // Nobody has read it, so nobody's version fits.
                None => {
                    report_damage(key);
                    return Ok(ShadowPut::Conflict);
                }
                found => {
                    known = room::size(key, value);
                    found
                }
            },
        };
        match op {
            ShadowOp::Put { value, expected, .. } => {
                if there.map_or(0, |(version, _)| version) != *expected {
                    return Ok(ShadowPut::Conflict);
                }
                let now = room::size(key, value);
                if now > known && !self.room.admits(self.table, txn, key, now - known)? {
                    return Ok(ShadowPut::Full);
                }
                self.table.put(txn, key, value)?;
                self.room.note(known, now);
            }
            ShadowOp::Forget { version, .. } => {
                if there != Some((*version, true)) {
                    return Ok(ShadowPut::Conflict);
                }
                self.table.delete(txn, key)?;
                self.room.note(known, 0);
            }
        }
        Ok(ShadowPut::Written)
    }

    fn adds<'a>(mut ops: impl Iterator<Item = &'a ShadowOp>, _bytes: usize) -> bool {
        ops.any(|op| matches!(op, ShadowOp::Put { is_removal: false, .. }))
    }
}
