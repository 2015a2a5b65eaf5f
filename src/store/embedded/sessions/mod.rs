//! Sessions in LMDB: tables in `tables`, records in `record`, what waits to be written in `waiting`.
//!
//! Damage: a file that is no database or was cut short is set aside at open; a damaged record is reported, counted and
//! removed when everything is read at the start.

mod record;
mod restore;
mod tables;
#[cfg(test)]
mod tests;
mod waiting;

use std::sync::{Arc, atomic::AtomicUsize};

use super::{
    DurableOptions,
    committer::{Committer, Lazy},
    environment::Environment,
};
use crate::store::{DataDir, Restore, SessionOp, SessionStore, StoreError, StoreHealth};
use restore::Useless;
use tables::Tables;
use waiting::{Waiting, Writer};

/// A [`SessionStore`] in the data directory.
pub struct EmbeddedSessions {
    environment: Arc<Environment>,
    tables: Tables,
    committer: Committer<Writer>,
}

impl EmbeddedSessions {
    /// Opens the store in the folder `sessions` of the data directory. Blocks on the disk.
    ///
    /// # Errors
    /// [`StoreError::Format`] if a newer version has written it; nothing is changed then.
    pub fn open(directory: &Arc<DataDir>, options: &DurableOptions) -> Result<Self, StoreError> {
        let environment = Arc::new(Environment::open(directory, options.environment("sessions", 3))?);
        let tables = Tables::open(&environment)?;
        let in_hand = Arc::new(AtomicUsize::new(0));
        let waiting = || Waiting::new(options.max_waiting_bytes, Arc::clone(&in_hand));
        let committer = Committer::start(
            "sessions-writer",
            Arc::clone(&environment),
            Writer::new(tables, waiting()),
            [waiting(), waiting()],
            Lazy::default(),
        )?;
        Ok(Self { environment, tables, committer })
    }

    fn remove(&self, useless: &Useless) -> Result<(), heed::Error> {
        self.environment.writing(|txn| {
            for &queue in &useless.sessions {
                self.tables.remove(txn, queue)?;
            }
            for key in &useless.subscriptions {
                self.tables.subscriptions.delete(txn, key)?;
            }
            for key in &useless.groups {
                self.tables.groups.delete(txn, key)?;
            }
            Ok(())
        })
    }
}

impl SessionStore for EmbeddedSessions {
    fn submit(&self, op: SessionOp) {
        let urgent = match &op {
            SessionOp::Put(_, ticket) | SessionOp::Remove(_, ticket) => ticket.is_some(),
            SessionOp::Subscribe(..) | SessionOp::Unsubscribe(..) => true,
            SessionOp::Group(..) | SessionOp::RemoveGroup(_) => false,
        };
        self.committer.submit(op, urgent);
    }

    fn restore(&self, into: &mut dyn Restore) -> Result<(), StoreError> {
        let useless = self.environment.reading(|txn| restore::restore(&self.tables, txn, into))?;
        if !useless.is_empty()
            && let Err(error) = self.remove(&useless)
        {
            // They do no harm, and are met again at the next start.
            tracing::warn!(%error, "cannot remove what is of no use from stored sessions");
        }
        Ok(())
    }

    fn health(&self) -> StoreHealth {
        self.committer.health()
    }
}

/// Whether this is a sound session; for checks, as those below.
pub(super) fn is_session(key: &[u8], value: &[u8]) -> bool {
    let queue = tables::number(key);
    queue.is_some_and(|queue| record::decode_session(queue, value, &mut Arc::default()).is_some())
}

/// Whether this is a sound subscription.
pub(super) fn is_subscription(key: &[u8], value: &[u8]) -> bool {
    tables::number(key).is_some() && record::decode_subscription(value).is_some()
}

/// Whether this is a sound group.
pub(super) fn is_group(key: &[u8], value: &[u8]) -> bool {
    tables::number(key).is_some() && record::decode_group(value).is_some()
}
