//! Records that end with the process.

use std::sync::Arc;

use bytes::Bytes;
use gateway_core::Commit;

use crate::{
    BoxFuture, Record, RecordChange, RecordKind, RecordOutcome, RecordRange, RecordStore, RecordWrite,
    StoreError, StoreHealth,
};

/// A [`RecordStore`] that keeps nothing, and so has nothing to wait for: for users that hold their records in memory anyway, and
/// read them at the start only.
#[derive(Debug, Default, Clone, Copy)]
pub struct NoRecords;

impl RecordStore for NoRecords {
    fn submit(&self, _changes: Vec<RecordChange>, commit: Option<Arc<Commit>>) {
        if let Some(part) = commit {
            part.done();
        }
    }

    fn write(&self, _write: RecordWrite) -> BoxFuture<'static, Result<RecordOutcome, StoreError>> {
        Box::pin(async { Ok(RecordOutcome::Done) })
    }

    fn read(&self, _range: RecordRange) -> BoxFuture<'static, Result<Vec<Record>, StoreError>> {
        Box::pin(async { Ok(Vec::new()) })
    }

    fn restore(&self, _kind: RecordKind, _into: &mut dyn FnMut(Bytes, Bytes)) -> Result<(), StoreError> {
        Ok(())
    }

    fn accepts(&self) -> bool {
        true
    }

    fn health(&self) -> StoreHealth {
        StoreHealth::Sound
    }
}
