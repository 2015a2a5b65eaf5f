//! Records of the Publisher in LMDB: three tables of small records, one writer with group commit.
//!
//! Damage: a file that is no database or was cut short is set aside at open; a damaged record is reported, counted and
//! removed when everything is read at the start.

mod changes;
mod tables;
#[cfg(test)]
mod tests;

use std::{path::PathBuf, sync::Arc};

use bytes::Bytes;
use gateway_core::Commit;

use super::{
    DurableOptions,
    committer::{Committer, Lazy},
    environment::Environment,
    waiting::{WaitingChanges, WaitingWork},
};
use changes::{PublisherChanges, PublisherOp};
use store::{DataDir, PublisherChange, PublisherStore, PublisherTable, StoreError, StoreHealth};
use tables::PublisherTables;
pub(super) use tables::is_sound;

/// A [`PublisherStore`] in the data directory.
pub struct EmbeddedPublisher {
    environment: Arc<Environment>,
    tables: PublisherTables,
    committer: Committer<WaitingWork<PublisherChanges>>,
}

impl EmbeddedPublisher {
    /// Opens the store in the folder `publisher` of the data directory. Blocks on the disk.
    ///
    /// # Errors
    /// [`StoreError::Format`] if a newer version has written it; nothing is changed then.
    pub fn open(directory: &Arc<DataDir>, options: &DurableOptions) -> Result<Self, StoreError> {
        let environment = Arc::new(Environment::open(directory, options.environment("publisher", 3))?);
        let tables = PublisherTables::open(&environment)?;
        let (batch, inboxes) = WaitingChanges::three(options.max_waiting_bytes);
        let committer = Committer::start(
            "publisher-writer",
            Arc::clone(&environment),
            WaitingWork::new(tables, batch),
            inboxes,
            Lazy::default(),
        )?;
        Ok(Self { environment, tables, committer })
    }

    /// Returns the path to which a damaged file was moved at open, if there was one.
    pub fn set_aside(&self) -> Option<&PathBuf> {
        self.environment.set_aside()
    }

    /// Notes on disk that nothing is written from now on, so that the next start need not verify a large file. Dropping
    /// the last handle does the same.
    pub fn note_closed(&self) {
        self.environment.note_closed();
    }
}

impl PublisherStore for EmbeddedPublisher {
    fn submit(&self, changes: Vec<PublisherChange>, commit: Option<Arc<Commit>>) {
        let urgent = commit.is_some();
        self.committer.submit(PublisherOp { changes, commit }, urgent);
    }

    fn restore(&self, table: PublisherTable, into: &mut dyn FnMut(Bytes, Bytes)) -> Result<(), StoreError> {
        let damaged = self.environment.reading(|txn| self.tables.read(txn, table, into))?;
        if !damaged.is_empty() {
            let removed = self
                .environment
                .writing(|txn| damaged.iter().try_for_each(|key| self.tables.remove(txn, table, key)));
            if let Err(error) = removed {
                // Damaged records do no harm, and are met again at the next start.
                tracing::warn!(%error, "cannot remove damaged records of the publisher");
            }
        }
        Ok(())
    }

    fn accepts(&self) -> bool {
        self.committer.admits()
    }

    fn health(&self) -> StoreHealth {
        self.committer.health()
    }
}
