//! Retained messages in LMDB: the table in `tables`, what waits to be written in `changes`.
//!
//! Damage: a file that is no database or was cut short is set aside at open; a damaged record is reported, counted and
//! removed when everything is read at the start.

mod changes;
mod load;
mod tables;
#[cfg(test)]
mod tests;

use std::{path::PathBuf, sync::Arc};

use gateway_core::{Commit, SharedMessage, clock};

use super::{
    DurableOptions,
    committer::{Committer, Lazy},
    environment::Environment,
    waiting::{WaitingChanges, WaitingWork},
};
use changes::{RetainedChanges, RetainedOp};
use load::RetainedReader;
use store::{BoxFuture, DataDir, LoadedRetained, RetainedStore, StoreError, StoreHealth};
use tables::RetainedTables;

/// A [`RetainedStore`] in the data directory.
pub struct EmbeddedRetained {
    environment: Arc<Environment>,
    tables: RetainedTables,
    committer: Committer<WaitingWork<RetainedChanges>>,
    reader: RetainedReader,
}

impl EmbeddedRetained {
    /// Opens the store in the folder `retained` of the data directory. Blocks on the disk.
    ///
    /// # Errors
    /// [`StoreError::Format`] if a newer version has written it; nothing is changed then.
    pub fn open(directory: &Arc<DataDir>, options: &DurableOptions) -> Result<Self, StoreError> {
        let environment = Arc::new(Environment::open(directory, options.environment("retained", 1))?);
        let tables = RetainedTables::open(&environment)?;
        let (batch, inboxes) = WaitingChanges::three(options.max_waiting_bytes);
        let committer = Committer::start(
            "retained-writer",
            Arc::clone(&environment),
            WaitingWork::new(tables, batch),
            inboxes,
            Lazy::default(),
        )?;
        let reader = RetainedReader::start(Arc::clone(&environment), tables)?;
        Ok(Self { environment, tables, committer, reader })
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

    fn submit(&self, op: RetainedOp) {
        let urgent = op.commit.is_some();
        self.committer.submit(op, urgent);
    }
}

impl RetainedStore for EmbeddedRetained {
    fn set(&self, message: Arc<SharedMessage>, commit: Option<Arc<Commit>>) {
        self.submit(RetainedOp { topic: Arc::clone(&message.topic), message: Some(message), commit });
    }

    fn clear(&self, topic: Arc<str>, commit: Option<Arc<Commit>>) {
        self.submit(RetainedOp { topic, message: None, commit });
    }

    fn load(&self, topics: Vec<Arc<str>>) -> BoxFuture<'static, Result<LoadedRetained, StoreError>> {
        self.reader.load(topics)
    }

    fn restore(&self, into: &mut dyn FnMut(Arc<SharedMessage>)) -> Result<(), StoreError> {
        let now = clock::now();
        let useless = self
            .environment
            .reading(|txn| self.tables.restore(txn, now, &mut |message| into(Arc::new(message))))?;
        if !useless.is_empty() {
            let removed = self
                .environment
                .writing(|txn| useless.iter().try_for_each(|key| self.tables.delete(txn, key)));
            if let Err(error) = removed {
                // Such messages do no harm, and are met again at the next start.
                tracing::warn!(%error, "cannot remove expired and damaged retained messages");
            }
        }
        Ok(())
    }

    fn health(&self) -> StoreHealth {
        self.committer.health()
    }
}
