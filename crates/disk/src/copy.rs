//! A data directory that is made of the records of a ledger: a standby's warm copy, and the directory with which a home opens.
//!
//! Its stores are not open for anything else meanwhile. Once it is dropped, the directory is as that of a process that was killed
//! after the last of the records.

use std::{io, path::Path, sync::Arc};

use ledger::Position;

use super::{
    environment::{Environment, EnvironmentOptions},
    files::{self, FilesCopy},
    format::{RECORD_TABLES, STATE_TABLES},
    latest::LatestCopy,
};
use segment_log::LogCopy;
use store::{DataDir, StoreError};

/// A store that has a stream of its own in the ledger. The numbers are those of the streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum ShippedStore {
    /// Sessions, queues, retained messages.
    State = 0,
    /// Small records.
    Records = 1,
    /// The log of consumer groups.
    Log = 2,
    /// Small files.
    Files = 3,
    /// Latest values, some time after they were written to the store. Clusters of earlier versions do not have it.
    Latest = 4,
}

impl ShippedStore {
    /// All of them, by number.
    pub const ALL: [Self; 5] = [Self::State, Self::Records, Self::Log, Self::Files, Self::Latest];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::State => "state",
            Self::Records => "records",
            Self::Log => "log",
            Self::Files => "files",
            Self::Latest => "latest",
        }
    }
}

/// Files that a directory has when it was not in a cluster.
const FILES: [&str; 4] = ["bans", "clock", "server_id", "versions"];

/// See the module.
pub struct DirectoryCopy {
    directory: Arc<DataDir>,
    state: Environment,
    records: Environment,
    log: LogCopy,
    files: FilesCopy,
    latest: LatestCopy,
}

fn open_environment(
    directory: &Arc<DataDir>,
    name: &'static str,
    tables: &[&str],
) -> Result<Environment, StoreError> {
    let options = EnvironmentOptions {
        name,
        map_size: 1 << 30,
        max_map_size: usize::MAX,
        tables: tables.len() as u32,
        hook: None,
        shipping: None,
    };
    let environment = Environment::open(directory, options)?;
    environment
        .open_tables(|txn| tables.iter().try_for_each(|table| environment.table(txn, table).map(drop)))?;
    Ok(environment)
}

impl DirectoryCopy {
    /// Opens the stores of a directory, empty or as they were left. A damaged store has no position. Blocks on the disk.
    ///
    /// # Errors
    /// [`StoreError::Format`] if a newer or an earlier version wrote it.
    pub fn open(directory: &Arc<DataDir>) -> Result<Self, StoreError> {
        super::earlier::check(directory.path())?;
        let copy = Self {
            state: open_environment(directory, "state", &STATE_TABLES)?,
            records: open_environment(directory, "records", &RECORD_TABLES)?,
            log: LogCopy::open(&directory.path().join("log")).map_err(failed)?,
            files: FilesCopy::open(directory.path()),
            latest: LatestCopy::open(directory)?,
            directory: Arc::clone(directory),
        };
        super::earlier::refuse(directory.path()).map_err(|error| copy.state.failed(&error))?;
        Ok(copy)
    }

    /// The directory.
    pub fn directory(&self) -> &Arc<DataDir> {
        &self.directory
    }

    /// The last record that is in a store; `None` if there is none, or nothing of the store is to be trusted.
    pub fn position(&self, store: ShippedStore) -> Option<Position> {
        // One that was damaged has none, until its first record.
        let of = |environment: &Environment| environment.position().ok().flatten();
        match store {
            ShippedStore::State => of(&self.state),
            ShippedStore::Records => of(&self.records),
            ShippedStore::Log => self.log.position(),
            ShippedStore::Files => self.files.position(),
            ShippedStore::Latest => self.latest.position(),
        }
    }

    /// Makes the changes of a record. Blocks on the disk.
    ///
    /// # Errors
    /// The disk, or changes that are not of this store.
    pub fn apply(
        &mut self,
        store: ShippedStore,
        position: Position,
        changes: &[u8],
    ) -> Result<(), StoreError> {
        let is_sound = match store {
            ShippedStore::State => self.state.apply_record(changes, position)?,
            ShippedStore::Records => self.records.apply_record(changes, position)?,
            ShippedStore::Log => self.log.apply(position, changes).map_err(failed)?,
            ShippedStore::Files => self.files.apply(position, changes)?,
            ShippedStore::Latest => self.latest.apply(position, changes)?,
        };
        match is_sound {
            true => Ok(()),
            false => Err(StoreError::Damaged(format!(
                "record {} of epoch {} is not of the store {store:?}",
                position.n, position.epoch
            ))),
        }
    }

    /// Empties a store. Blocks on the disk.
    pub fn clear(&mut self, store: ShippedStore) -> Result<(), StoreError> {
        match store {
            ShippedStore::State => self.state.empty(),
            ShippedStore::Records => self.records.empty(),
            ShippedStore::Log => self.log.clear().map_err(failed),
            ShippedStore::Files => self.files.clear().map_err(failed),
            ShippedStore::Latest => self.latest.clear(),
        }
    }

    /// Makes what was applied durable. Blocks on the disk.
    pub fn sync(&self) -> Result<(), StoreError> {
        self.log.sync().map_err(failed)
    }

    /// Returns whether anything is in it that no ledger has.
    pub fn has_own_content(&self) -> bool {
        let holds = |environment: &Environment| environment.has_entries().unwrap_or(true);
        let is_new = ShippedStore::ALL.iter().all(|store| self.position(*store).is_none());
        let path = self.directory.path();
        let has_log = segment_log::has_segments(&path.join("log"));
        is_new && (holds(&self.state) || holds(&self.records) || has_log || self.latest.has_entries())
    }

    /// Forgets that the directory was of a cluster: from now on it holds what no ledger has. Blocks on the disk.
    pub fn forget_ledger(self) -> Result<(), StoreError> {
        for environment in [&self.state, &self.records] {
            environment.forget_position()?;
        }
        self.latest.forget()?;
        self.log.forget().map_err(failed)?;
        files::forget(self.directory.path()).map_err(failed)
    }

    /// Gives `ship` everything that is in a directory, as records from which a copy can be made, and notes their positions;
    /// latest values only if the ledger `keeps_latest`.
    pub fn export(
        &mut self,
        keeps_latest: bool,
        ship: &mut dyn FnMut(ShippedStore, &[u8]) -> io::Result<Position>,
    ) -> Result<(), StoreError> {
        let path = self.directory.path().to_owned();
        self.state.export_to(&mut |changes| ship(ShippedStore::State, changes))?;
        self.records.export_to(&mut |changes| ship(ShippedStore::Records, changes))?;
        segment_log::export(&path.join("log"), |changes| ship(ShippedStore::Log, changes))?;
        files::export(&path, &FILES, |changes| ship(ShippedStore::Files, changes))?;
        if keeps_latest {
            self.latest.export(&mut |changes| ship(ShippedStore::Latest, changes))?;
        }
        self.log = LogCopy::open(&path.join("log")).map_err(failed)?;
        self.files = FilesCopy::open(&path);
        Ok(())
    }
}

fn failed(error: io::Error) -> StoreError {
    StoreError::Unavailable(error.to_string())
}

/// Removes the stores of a directory whose files cannot be opened as a copy. The lock stays.
///
/// # Errors
/// The disk.
pub fn empty_directory(directory: &Path) -> io::Result<()> {
    // The last is there so that earlier versions refuse the directory.
    for name in ["state", "records", "log", "latest", "sessions"] {
        match std::fs::remove_dir_all(directory.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    FilesCopy::open(directory).clear()
}
