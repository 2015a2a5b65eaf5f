//! Sessions in LMDB: tables in `tables`, records in `record`, what waits to be written in `changes`.
//!
//! Damage: a file that is no database or was cut short is set aside at open; a damaged record is reported, counted and
//! removed when everything is read at the start.

mod changes;
mod record;
mod restore;
mod tables;
#[cfg(test)]
mod tests;

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use gateway_core::QueueId;

use super::{
    DurableOptions,
    committer::{Committer, Lazy},
    environment::Environment,
    waiting::{WaitingChanges, WaitingWork},
};
use changes::{CountedTables, SessionChanges};
use restore::UnusableRecords;
use store::{
    DataDir, Restore, SessionOp, SessionStore, StoreError, StoreHealth, StoredSession, StoredSubscription,
};
use tables::SessionTables;

/// A [`SessionStore`] in the data directory.
pub struct EmbeddedSessions {
    environment: Arc<Environment>,
    tables: SessionTables,
    committer: Committer<WaitingWork<SessionChanges>>,
    stored: Arc<AtomicU64>,
}

impl EmbeddedSessions {
    /// Opens the store in the folder `sessions` of the data directory. Blocks on the disk.
    ///
    /// # Errors
    /// [`StoreError::Format`] if a newer version has written it; nothing is changed then.
    pub fn open(directory: &Arc<DataDir>, options: &DurableOptions) -> Result<Self, StoreError> {
        let environment = Arc::new(Environment::open(directory, options.environment("sessions", 3))?);
        let tables = SessionTables::open(&environment)?;
        let stored = Arc::new(AtomicU64::new(environment.reading(|txn| tables.sessions.len(txn))?));
        let (batch, inboxes) = WaitingChanges::three(options.max_waiting_bytes);
        let committer = Committer::start(
            "sessions-writer",
            Arc::clone(&environment),
            WaitingWork::new(CountedTables::new(tables, Arc::clone(&stored)), batch),
            inboxes,
            Lazy::default(),
        )?;
        Ok(Self { environment, tables, committer, stored })
    }

    /// Returns the path to which a damaged file was moved at open, if there was one.
    pub fn set_aside(&self) -> Option<&PathBuf> {
        self.environment.set_aside()
    }

    /// Returns whether the sessions themselves were lost to damage that was found at open.
    pub fn is_lost(&self) -> bool {
        self.environment.has_lost("sessions")
    }

    /// Notes on disk that nothing is written from now on, so that the next start need not verify a large file. Dropping
    /// the last handle does the same.
    pub fn note_closed(&self) {
        self.environment.note_closed();
    }

    /// Sessions in the store, as of the last commit.
    pub fn stored(&self) -> u64 {
        self.stored.load(Relaxed)
    }

    fn remove(&self, unusable: &UnusableRecords) -> Result<(), heed::Error> {
        self.environment.writing(|txn| {
            for &queue in &unusable.sessions {
                self.tables.remove(txn, queue)?;
            }
            for key in &unusable.subscriptions {
                self.tables.subscriptions.delete(txn, key)?;
            }
            for key in &unusable.groups {
                self.tables.groups.delete(txn, key)?;
            }
            Ok(())
        })
    }
}

impl SessionStore for EmbeddedSessions {
    fn submit(&self, op: SessionOp) {
        let urgent = match &op {
            SessionOp::Put(_, commit) | SessionOp::Remove(_, commit) => commit.is_some(),
            SessionOp::Subscribe(..) | SessionOp::Unsubscribe(..) => true,
            SessionOp::Group(..) | SessionOp::RemoveGroup(_) => false,
        };
        self.committer.submit(op, urgent);
    }

    fn restore(&self, into: &mut dyn Restore) -> Result<(), StoreError> {
        let unusable = self.environment.reading(|txn| restore::restore(&self.tables, txn, into))?;
        if !unusable.is_empty()
            && let Err(error) = self.remove(&unusable)
        {
            // Such records do no harm, and are met again at the next start.
            tracing::warn!(%error, "cannot remove what is of no use from stored sessions");
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

/// The session of this record, if it is sound; for the tools, as those below.
pub(super) fn session(key: &[u8], value: &[u8]) -> Option<StoredSession> {
    record::decode_session(tables::number(key)?, value, &mut Arc::default())
}

/// The subscription, and whose it is.
pub(super) fn subscription(key: &[u8], value: &[u8]) -> Option<(QueueId, StoredSubscription)> {
    Some((tables::number(key)?, record::decode_subscription(value)?))
}

/// The number and full name of the shared group.
pub(super) fn group<'a>(key: &[u8], value: &'a [u8]) -> Option<(QueueId, &'a str)> {
    Some((tables::number(key)?, record::decode_group(value)?))
}
