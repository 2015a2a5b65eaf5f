//! Latest values in LMDB: one writer thread with group commit, short reads on the blocking pool.
//!
//! Damage: a file that may be damaged is verified before it is opened, and set aside if it is; a damaged record
//! is skipped and reported when read, and mended by the device's next value. What LMDB meets later ends the use of the
//! store (`environment`).

mod changed;
mod copy;
mod read;
mod ship;
#[cfg(test)]
mod ship_tests;
mod tables;
#[cfg(test)]
pub(crate) mod tests;
mod write;

use std::{path::PathBuf, sync::Arc};

use store::{
    BoxFuture, DataDir, LatestPage, LatestQuery, LatestStore, LatestValue, Selection, SpillStore, StoreError,
};
use tokio::sync::{Semaphore, oneshot};

use heed::{RoTxn, WithoutTls};
use ship::LatestShipper;
use tables::{LatestTables, TABLES};
use write::{LatestInbox, LatestJob, LatestWork};

use crate::{
    committer::{Committer, Lazy},
    environment::{Environment, EnvironmentOptions},
    readers::ReadPermits,
};

pub(crate) use copy::LatestCopy;
pub use ship::{LatestLedger, LatestLedgerFigures};

/// Reads at once; more wait.
const READERS: usize = 16;

/// Batches waiting for the writer; more wait. Few, as each may hold megabytes while the disk hangs.
const JOBS: usize = 8;

/// Setup of [`EmbeddedLatest`].
#[derive(Debug, Clone)]
pub struct EmbeddedOptions {
    /// First size of the memory map, a multiple of the page size. It doubles when full; memory and disk are
    /// only used as data comes.
    pub map_size: usize,
    /// Topics kept per device; values of further topics are dropped and counted.
    pub topics_per_device: usize,
    /// A ledger to which what was written goes later.
    pub ledger: Option<LatestLedger>,
}

impl Default for EmbeddedOptions {
    fn default() -> Self {
        Self { map_size: 1 << 30, topics_per_device: 10_000, ledger: None }
    }
}

fn open_environment(directory: &Arc<DataDir>, map_size: usize) -> Result<Environment, StoreError> {
    let options = EnvironmentOptions {
        name: "latest",
        map_size,
        max_map_size: usize::MAX,
        tables: TABLES,
        hook: None,
        shipping: None,
    };
    Environment::open(directory, options)
}

/// A [`LatestStore`] in the data directory. Dropping it writes what was submitted.
pub struct EmbeddedLatest {
    environment: Arc<Environment>,
    tables: LatestTables,
    shipper: Option<LatestShipper>,
    committer: Committer<LatestWork>,
    places: Arc<Semaphore>,
    readers: ReadPermits,
}

impl EmbeddedLatest {
    /// Opens the store in the folder `latest` of the data directory. Blocks on the disk.
    pub fn open(directory: &Arc<DataDir>, options: &EmbeddedOptions) -> Result<Self, StoreError> {
        let environment = Arc::new(open_environment(directory, options.map_size)?);
        let tables = LatestTables::open(&environment, options.ledger.is_some())?;
        let work = LatestWork::new(tables, options.topics_per_device);
        let inboxes = [LatestInbox::default(), LatestInbox::default()];
        let committer =
            Committer::start("latest-writer", Arc::clone(&environment), work, inboxes, Lazy::default())?;
        let shipper = match (&options.ledger, tables.changed) {
            (Some(ledger), Some(changed)) => {
                Some(LatestShipper::start(Arc::clone(&environment), tables, changed, ledger.clone())?)
            }
            _ => None,
        };
        let (places, readers) = (Arc::new(Semaphore::new(JOBS)), ReadPermits::new(READERS));
        Ok(Self { environment, tables, shipper, committer, places, readers })
    }

    /// Gives the ledger, if there is one, what it does not have, and nothing after that; for a second at most, and a second more for
    /// an answer. To be called once all values are written.
    ///
    /// Cancel safety: what is under way goes on.
    pub async fn end_shipping(&self) {
        if let Some(shipper) = &self.shipper {
            shipper.finish().await;
        }
    }

    /// Figures of what goes to the ledger; `None` without one.
    pub fn ledger_figures(&self) -> Option<LatestLedgerFigures> {
        let (shipper, changed) = (self.shipper.as_ref()?, self.tables.changed?);
        let waiting = self.environment.reading(|txn| changed.len(txn)).unwrap_or(0);
        let lag = if waiting == 0 { Default::default() } else { shipper.lag() };
        Some(LatestLedgerFigures { waiting, lag })
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

    /// As [`EmbeddedState::give_up`](crate::EmbeddedState::give_up).
    pub fn give_up(&self) {
        self.committer.give_up();
    }

    /// Transactions so far.
    #[cfg(any(test, feature = "test-util"))]
    pub fn commits(&self) -> usize {
        self.environment.env.info().last_txn_id
    }

    async fn submit(&self, batch: Arc<[LatestValue]>, removal: bool) -> Result<(), StoreError> {
        let place = Arc::clone(&self.places).acquire_owned().await.map_err(|_| StoreError::closed())?;
        let (done, result) = oneshot::channel();
        self.committer.submit(LatestJob { batch, removal, done, place }, true);
        result.await.map_err(|_| StoreError::closed())?
    }

    /// Runs `read` on the blocking pool.
    async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&LatestTables, &RoTxn<'_, WithoutTls>) -> Result<T, heed::Error> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (environment, tables) = (Arc::clone(&self.environment), self.tables);
        self.readers.clone().run(move || environment.reading(|txn| read(&tables, txn))).await
    }
}

impl LatestStore for EmbeddedLatest {
    fn remove(&self, batch: Arc<[LatestValue]>) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(self.submit(batch, true))
    }

    fn upsert(&self, batch: Arc<[LatestValue]>) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(self.submit(batch, false))
    }

    fn get<'a>(
        &'a self,
        topic: &'a str,
        device: Option<&'a str>,
    ) -> BoxFuture<'a, Result<Option<LatestValue>, StoreError>> {
        let (topic, device) = (topic.to_owned(), device.map(str::to_owned));
        Box::pin(self.read(move |tables, txn| read::get(tables, txn, &topic, device.as_deref())))
    }

    fn list(&self, query: LatestQuery) -> BoxFuture<'_, Result<LatestPage, StoreError>> {
        Box::pin(async move {
            let selection = Selection::new(query)?;
            self.read(move |tables, txn| read::list(tables, txn, &selection)).await
        })
    }
}

impl SpillStore for EmbeddedLatest {
    fn count(&self) -> usize {
        let count = self.environment.reading(|txn| self.tables.latest.len(txn));
        count.map_or(0, |count| usize::try_from(count).unwrap_or(usize::MAX))
    }

    fn bytes(&self) -> u64 {
        self.environment.filled().unwrap_or(0)
    }
}
