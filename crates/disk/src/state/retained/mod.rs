//! Retained messages: the table in `tables`, what waits to be written in `changes`.
//!
//! Damage: a file that is no database or was cut short is set aside at open; a damaged record is reported, counted and
//! removed when everything is read at the start.

mod changes;
mod load;
mod tables;
#[cfg(test)]
pub(super) mod tests;

use std::sync::Arc;

use gateway_core::{SharedMessage, clock};

use super::work::WithInboxes;
use crate::{
    environment::Environment,
    waiting::{WaitingChanges, WaitingWork},
};
use store::StoreError;

pub(crate) use changes::{RetainedChanges, RetainedOp};
pub(crate) use load::RetainedReader;
pub(crate) use tables::RetainedTables;

/// The work of the writer; more than `limit` bytes do not wait.
pub(super) fn work(tables: RetainedTables, limit: usize) -> WithInboxes<WaitingWork<RetainedChanges>> {
    let (batch, inboxes) = WaitingChanges::three(limit);
    (WaitingWork::new(tables, batch), inboxes)
}

/// Reads everything, and removes what has expired or is damaged.
pub(super) fn restore(
    environment: &Environment,
    tables: &RetainedTables,
    into: &mut dyn FnMut(Arc<SharedMessage>),
) -> Result<(), StoreError> {
    let now = clock::now();
    let useless =
        environment.reading(|txn| tables.restore(txn, now, &mut |message| into(Arc::new(message))))?;
    if !useless.is_empty() {
        let removed = environment.writing(|txn| useless.iter().try_for_each(|key| tables.delete(txn, key)));
        if let Err(error) = removed {
            // Such messages do no harm, and are met again at the next start.
            tracing::warn!(%error, "cannot remove expired and damaged retained messages");
        }
    }
    Ok(())
}
