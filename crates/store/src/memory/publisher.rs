//! Records of the Publisher that end with the process.

use std::sync::Arc;

use bytes::Bytes;
use gateway_core::Commit;

use crate::{PublisherChange, PublisherStore, PublisherTable, StoreError, StoreHealth};

/// A [`PublisherStore`] that keeps nothing, and so has nothing to wait for: its users hold their records in memory anyway, and
/// read them at the start only.
#[derive(Debug, Default, Clone, Copy)]
pub struct MemoryPublisher;

impl PublisherStore for MemoryPublisher {
    fn submit(&self, _changes: Vec<PublisherChange>, commit: Option<Arc<Commit>>) {
        if let Some(part) = commit {
            part.done();
        }
    }

    fn restore(&self, _table: PublisherTable, _into: &mut dyn FnMut(Bytes, Bytes)) -> Result<(), StoreError> {
        Ok(())
    }

    fn accepts(&self) -> bool {
        true
    }

    fn health(&self) -> StoreHealth {
        StoreHealth::Sound
    }
}
