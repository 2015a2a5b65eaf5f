//! The data directory as the protocol knows it.

use std::sync::Arc;

use cluster::HomeCopy;
use disk::{DirectoryCopy, ShippedStore};
use ledger::Position;
use store::{DataDir, StoreError};
use tokio::task::block_in_place;

use crate::STREAMS;

/// A [`DirectoryCopy`] whose stores are streams. Changes block, while the other tasks of a runtime with several threads go on.
pub(crate) struct WarmCopy(DirectoryCopy);

impl WarmCopy {
    pub(crate) fn open(directory: &Arc<DataDir>) -> Result<Self, StoreError> {
        DirectoryCopy::open(directory).map(Self)
    }

    pub(crate) fn directory(&self) -> &DirectoryCopy {
        &self.0
    }

    pub(crate) fn directory_mut(&mut self) -> &mut DirectoryCopy {
        &mut self.0
    }

    pub(crate) fn forget_ledger(self) -> Result<(), StoreError> {
        self.0.forget_ledger()
    }

    pub(crate) fn sync(&self) -> Result<(), String> {
        self.0.sync().map_err(|error| error.to_string())
    }
}

fn store(stream: u8) -> Option<ShippedStore> {
    ShippedStore::ALL.get(usize::from(stream)).copied()
}

/// A view of a newer version may have streams that this one does not know.
fn unknown() -> String {
    "this version does not know the stream: upgrade it".to_owned()
}

impl HomeCopy for WarmCopy {
    fn streams(&self) -> u8 {
        STREAMS
    }

    fn position(&self, stream: u8) -> Option<Position> {
        store(stream).and_then(|store| self.0.position(store))
    }

    fn apply(&mut self, stream: u8, position: Position, changes: &[u8]) -> Result<(), String> {
        let store = store(stream).ok_or_else(unknown)?;
        block_in_place(|| self.0.apply(store, position, changes)).map_err(|error| error.to_string())
    }

    fn clear(&mut self, stream: u8) -> Result<(), String> {
        let store = store(stream).ok_or_else(unknown)?;
        block_in_place(|| self.0.clear(store)).map_err(|error| error.to_string())
    }
}
