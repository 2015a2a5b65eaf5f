//! Sessions: tables in `tables`, records in `record`, what waits to be written in `changes`.
//!
//! Damage: a file that is no database or was cut short is set aside at open; a damaged record is reported, counted and
//! removed when everything is read at the start.

mod changes;
mod record;
mod restore;
mod tables;
#[cfg(test)]
pub(super) mod tests;

use std::sync::{Arc, atomic::AtomicU64};

use gateway_core::QueueId;

use super::{queues::QueueTables, work::WithInboxes};
use crate::{
    environment::Environment,
    waiting::{WaitingChanges, WaitingWork},
};
use changes::CountedTables;
use restore::UnusableRecords;
use store::{Restore, StoreError, StoredSession, StoredSubscription};

pub(crate) use changes::{SessionChange, SessionChanges};
pub(crate) use tables::SessionTables;
#[cfg(test)]
pub(crate) use tables::key;

/// The work of the writer. `stored` is kept at the number of sessions; more than `limit` bytes do not wait.
pub(super) fn work(
    tables: SessionTables,
    queues: QueueTables,
    stored: &Arc<AtomicU64>,
    limit: usize,
) -> WithInboxes<WaitingWork<SessionChanges>> {
    let (batch, inboxes) = WaitingChanges::three(limit);
    (WaitingWork::new(CountedTables::new(tables, queues, Arc::clone(stored)), batch), inboxes)
}

/// Reads everything, and removes what is of no use.
pub(super) fn restore(
    environment: &Environment,
    tables: &SessionTables,
    into: &mut dyn Restore,
) -> Result<(), StoreError> {
    let unusable = environment.reading(|txn| restore::restore(tables, txn, into))?;
    if !unusable.is_empty()
        && let Err(error) = remove(environment, tables, &unusable)
    {
        // Such records do no harm, and are met again at the next start.
        tracing::warn!(%error, "cannot remove what is of no use from stored sessions");
    }
    Ok(())
}

fn remove(
    environment: &Environment,
    tables: &SessionTables,
    unusable: &UnusableRecords,
) -> Result<(), heed::Error> {
    environment.writing(|txn| {
        for &queue in &unusable.sessions {
            tables.remove(txn, queue)?;
        }
        for key in &unusable.subscriptions {
            tables.subscriptions.delete(txn, key)?;
        }
        for key in &unusable.groups {
            tables.groups.delete(txn, key)?;
        }
        Ok(())
    })
}

/// The session of this record, if it is sound; for the tools, as those below.
pub(crate) fn session(key: &[u8], value: &[u8]) -> Option<StoredSession> {
    record::decode_session(tables::number(key)?, value, &mut Arc::default())
}

/// The subscription, and whose it is.
pub(crate) fn subscription(key: &[u8], value: &[u8]) -> Option<(QueueId, StoredSubscription)> {
    Some((tables::number(key)?, record::decode_subscription(value)?))
}

/// The number and full name of the shared group.
pub(crate) fn group<'a>(key: &[u8], value: &'a [u8]) -> Option<(QueueId, &'a str)> {
    Some((tables::number(key)?, record::decode_group(value)?))
}
