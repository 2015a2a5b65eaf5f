//! Watch for failing reads of the database, so that callers are told at once instead of after `read_timeout` each.
//!
//! A read or a write that failed is a doubt. One task then asks, and as long as it gets no answer every read is refused; with the
//! first answer all go to the database again. A database that refuses writes only is so not taken for one that is away.

use std::{convert::Infallible, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{sync::Notify, time::sleep};

use super::{LatestCache, PROBED};
use store::StoreError;

/// Pause between two questions while the database is away.
const AGAIN: Duration = Duration::from_millis(250);

/// Knowledge about reads that latest values and history of one database share.
#[derive(Debug, Default)]
pub struct ReadWatch {
    /// Why they fail, while they do.
    away: Mutex<Option<Arc<str>>>,
    doubt: Notify,
}

impl ReadWatch {
    /// The error of a read that would fail.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] while the database is known to be away.
    pub fn check(&self) -> Result<(), StoreError> {
        match &*self.away.lock() {
            Some(reason) => Err(StoreError::Unavailable(reason.to_string())),
            None => Ok(()),
        }
    }

    /// Takes note of the result of a read: a failure is looked into.
    pub fn note<T>(&self, result: &Result<T, StoreError>) {
        if matches!(result, Err(StoreError::Unavailable(_))) {
            self.doubt.notify_one();
        }
    }

    fn set(&self, away: Option<Arc<str>>) {
        *self.away.lock() = away;
    }
}

impl LatestCache {
    /// Finds out whether reads fail, whenever there is a doubt. A store on this machine is never away.
    pub(super) async fn watch_reads(&self) -> Infallible {
        if self.options.probe.is_none() {
            return std::future::pending().await;
        }
        let reads = &self.options.reads;
        let mut condition = self.state.subscribe();
        loop {
            tokio::select! {
                () = reads.doubt.notified() => {}
                // Its sender is ours.
                _ = condition.changed() => if condition.borrow_and_update().trouble().is_none() { continue },
            }
            while let Err(StoreError::Unavailable(reason)) =
                self.read(self.store.get(PROBED, Some(PROBED))).await
            {
                reads.set(Some(reason.into()));
                sleep(AGAIN).await;
            }
            reads.set(None);
        }
    }
}
