//! One LMDB environment: its memory map, the gate that guards growing it, and its format.

use std::{io, path::PathBuf, sync::Arc};

use heed::{Database, Env, MdbError, RoTxn, RwTxn, WithoutTls, types::Bytes};
use parking_lot::{Mutex, RwLock};

use super::open;
use crate::store::{DataDir, StoreError};

/// A table of an environment.
pub(super) type Table = Database<Bytes, Bytes>;

/// Called in the writing thread before every commit; an error fails that commit. For tests of failing and slow disks.
pub type CommitHook = Arc<dyn Fn() -> io::Result<()> + Send + Sync>;

const META: &str = "meta";
const FORMAT: &[u8] = b"format";

/// How an environment is opened.
pub(super) struct EnvironmentOptions {
    /// Folder in the data directory, also the name in messages.
    pub(super) name: &'static str,
    /// First size of the memory map.
    pub(super) map_size: usize,
    /// Largest size of the memory map; beyond it commits fail.
    pub(super) max_map_size: usize,
    /// Number of named tables; that of the format comes on top.
    pub(super) tables: u32,
    pub(super) hook: Option<CommitHook>,
}

/// An open environment.
pub(super) struct Environment {
    pub(super) env: Env<WithoutTls>,
    name: &'static str,
    max_map_size: usize,
    /// Every read transaction holds the read side; growing the map holds the write side.
    gate: RwLock<()>,
    /// Held by the one write transaction, from before it begins until the map was grown for it.
    writing: Mutex<()>,
    set_aside: Option<PathBuf>,
    hook: Option<CommitHook>,
    _directory: Arc<DataDir>,
}

impl Environment {
    /// Opens or creates it; sets a damaged file aside. Blocks on the disk.
    pub(super) fn open(directory: &Arc<DataDir>, options: EnvironmentOptions) -> Result<Self, StoreError> {
        let opened = open::open(directory, options.name, options.map_size, options.tables + 1)?;
        Ok(Self {
            env: opened.env,
            name: options.name,
            max_map_size: options.max_map_size,
            gate: RwLock::new(()),
            writing: Mutex::new(()),
            set_aside: opened.set_aside,
            hook: options.hook,
            _directory: Arc::clone(directory),
        })
    }

    /// Where a damaged file was moved at open, if there was one.
    pub(super) fn set_aside(&self) -> Option<&PathBuf> {
        self.set_aside.as_ref()
    }

    /// The format of what is there, `None` in a new environment. Refuses one above `known` and changes nothing then.
    pub(super) fn format(&self, known: u32) -> Result<Option<u32>, StoreError> {
        let read = |txn: &RoTxn<'_, WithoutTls>| -> Result<Option<u32>, heed::Error> {
            let Some(meta) = self.env.open_database::<Bytes, Bytes>(txn, Some(META))? else {
                return Ok(None);
            };
            let format = meta.get(txn, FORMAT)?;
            Ok(format.map(|bytes| bytes.try_into().map_or(u32::MAX, u32::from_le_bytes)))
        };
        let found = self.reading(read)?;
        match found {
            Some(found) if found > known => Err(StoreError::Format(format!(
                "{} have format {found}, this version reads up to {known}: use the version that wrote them",
                self.name
            ))),
            found => Ok(found),
        }
    }

    /// Notes the format of what is there.
    pub(super) fn set_format(&self, txn: &mut RwTxn<'_>, format: u32) -> Result<(), heed::Error> {
        let meta: Table = self.env.create_database(txn, Some(META))?;
        meta.put(txn, FORMAT, &format.to_le_bytes())
    }

    /// Runs `read` in a read transaction, with no growth of the map meanwhile. Keep it under 100 ms.
    pub(super) fn reading<T>(
        &self,
        read: impl FnOnce(&RoTxn<'_, WithoutTls>) -> Result<T, heed::Error>,
    ) -> Result<T, StoreError> {
        let _gate = self.gate.read();
        let txn = self.env.read_txn().map_err(|e| self.failed(&e))?;
        read(&txn).map_err(|e| self.failed(&e))
    }

    /// Runs `write` in a write transaction and commits it. `write` runs again, from the state before, when the map had
    /// to grow.
    pub(super) fn writing<T>(
        &self,
        mut write: impl FnMut(&mut RwTxn<'_>) -> Result<T, heed::Error>,
    ) -> Result<T, heed::Error> {
        let _one = self.writing.lock();
        loop {
            match self.attempt(&mut write) {
                Err(heed::Error::Mdb(MdbError::MapFull)) => self.grow()?,
                result => return result,
            }
        }
    }

    fn attempt<T>(
        &self,
        write: &mut impl FnMut(&mut RwTxn<'_>) -> Result<T, heed::Error>,
    ) -> Result<T, heed::Error> {
        let mut txn = self.env.write_txn()?;
        let value = write(&mut txn)?;
        if let Some(hook) = &self.hook {
            hook().map_err(heed::Error::Io)?;
        }
        txn.commit()?;
        Ok(value)
    }

    fn grow(&self) -> Result<(), heed::Error> {
        let size = self.env.info().map_size;
        if size.saturating_mul(2) > self.max_map_size {
            return Err(heed::Error::Mdb(MdbError::MapFull));
        }
        let _gate = self.gate.write();
        open::grow(&self.env)?;
        tracing::info!(store = self.name, bytes = self.env.info().map_size, "memory map grown");
        Ok(())
    }

    /// The error as callers of the store see it.
    pub(super) fn failed(&self, error: &heed::Error) -> StoreError {
        if open::is_damage(error) {
            StoreError::Damaged(format!("{}: {error}", self.name))
        } else {
            StoreError::Unavailable(format!("{}: {error}", self.name))
        }
    }
}
