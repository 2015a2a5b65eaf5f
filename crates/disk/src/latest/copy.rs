//! Latest values that are kept by the records of another process.
//!
//! A directory of a gateway that has served may hold values that the ledger does not have. They stay until a record changes
//! their keys: the newest value that any gateway has seen is the right one, and the next owner of the directory ships them.

use std::{io, sync::Arc};

use ledger::Position;
use store::{DataDir, StoreError};

use super::tables::LatestTables;
use crate::{environment::Environment, table};

/// First size of the memory map.
const MAP: usize = 1 << 30;

/// See the module. Blocks on the disk.
pub(crate) struct LatestCopy {
    environment: Environment,
    tables: LatestTables,
}

impl LatestCopy {
    pub(crate) fn open(directory: &Arc<DataDir>) -> Result<Self, StoreError> {
        let environment = super::open_environment(directory, MAP)?;
        let tables = LatestTables::open(&environment, true)?;
        Ok(Self { environment, tables })
    }

    /// The last record that is in it; `None` also if its file was damaged and nothing was applied since.
    pub(crate) fn position(&self) -> Option<Position> {
        self.environment.position().ok().flatten()
    }

    /// Makes a record's changes. False if they are not of latest values: nothing is changed then.
    pub(crate) fn apply(&self, position: Position, changes: &[u8]) -> Result<bool, StoreError> {
        let LatestTables { latest, changed, .. } = self.tables;
        let mut is_sound = true;
        let applied = self.environment.writing(|txn| {
            is_sound = self.environment.apply(txn, changes, position)?;
            if !is_sound {
                return Err(heed::Error::Io(io::ErrorKind::InvalidData.into()));
            }
            if let Some(changed) = changed
                && !changed.is_empty(txn)?
            {
                // The ledger decides about a key, whatever was there.
                table::keys(changes, latest).try_for_each(|key| changed.delete(txn, key).map(drop))?;
            }
            Ok(())
        });
        match applied {
            Err(_) if !is_sound => Ok(false),
            applied => applied.map(|()| true).map_err(|error| self.environment.failed(&error)),
        }
    }

    /// Removes all values, and the position.
    pub(crate) fn clear(&self) -> Result<(), StoreError> {
        self.forget_changes()?;
        self.environment.empty()
    }

    /// Returns whether there is a value; true also if that cannot be read.
    pub(crate) fn has_entries(&self) -> bool {
        self.environment.has_entries().unwrap_or(true)
    }

    /// Forgets that the values were of a cluster.
    pub(crate) fn forget(&self) -> Result<(), StoreError> {
        self.forget_changes()?;
        self.environment.forget_position()
    }

    fn forget_changes(&self) -> Result<(), StoreError> {
        let Some(changed) = self.tables.changed else { return Ok(()) };
        let forgotten = self.environment.writing(|txn| changed.clear(txn.bare()));
        forgotten.map_err(|error| self.environment.failed(&error))
    }

    /// Gives `ship` all values, and notes the position of the last record.
    pub(crate) fn export(
        &self,
        ship: &mut dyn FnMut(&[u8]) -> io::Result<Position>,
    ) -> Result<(), StoreError> {
        self.environment.export_to(ship)
    }
}
