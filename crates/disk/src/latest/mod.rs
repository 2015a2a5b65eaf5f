//! Latest values in LMDB: one writer thread with group commit, short reads on the blocking pool.
//!
//! Damage: a file that may be damaged is verified before it is opened, and set aside if it is (`check`); a damaged record
//! is skipped and reported when read, and mended by the device's next value. What LMDB meets later ends the use of the
//! store (`environment`).

mod read;
mod tables;
#[cfg(test)]
pub(crate) mod tests;
mod write;

use std::{path::PathBuf, sync::Arc, thread::JoinHandle};

use store::{
    BoxFuture, DataDir, LatestPage, LatestQuery, LatestStore, LatestValue, Selection, SpillStore, StoreError,
};
use tokio::sync::{mpsc, oneshot};

use tables::LatestTables;

use crate::{closed, readers::ReadPermits};

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
}

impl Default for EmbeddedOptions {
    fn default() -> Self {
        Self { map_size: 1 << 30, topics_per_device: 10_000 }
    }
}

/// A [`LatestStore`] in the data directory.
pub struct EmbeddedLatest {
    shared: Arc<LatestTables>,
    jobs: Option<mpsc::Sender<write::LatestJob>>,
    writer: Option<JoinHandle<()>>,
    readers: ReadPermits,
}

impl EmbeddedLatest {
    /// Opens the store in the folder `latest` of the data directory. Blocks on the disk.
    pub fn open(directory: &Arc<DataDir>, options: &EmbeddedOptions) -> Result<Self, StoreError> {
        let shared = Arc::new(LatestTables::open(directory, options.map_size)?);
        let (jobs, inbox) = mpsc::channel(JOBS);
        let writer = write::LatestWriter::new(Arc::clone(&shared), options.topics_per_device);
        let writer = std::thread::Builder::new()
            .name("latest-writer".to_owned())
            .spawn(move || writer.run(inbox))
            .map_err(|e| StoreError::Unavailable(format!("cannot start the writer thread: {e}")))?;
        Ok(Self { shared, jobs: Some(jobs), writer: Some(writer), readers: ReadPermits::new(READERS) })
    }

    /// Returns the path to which a damaged file was moved at open, if there was one.
    pub fn set_aside(&self) -> Option<&PathBuf> {
        self.shared.environment.set_aside()
    }

    /// Notes on disk that nothing is written from now on, so that the next start need not verify a large file. Dropping
    /// the last handle does the same.
    pub fn note_closed(&self) {
        self.shared.environment.note_closed();
    }

    /// Transactions so far.
    #[cfg(any(test, feature = "test-util"))]
    pub fn commits(&self) -> usize {
        self.shared.environment.env.info().last_txn_id
    }

    async fn submit(&self, batch: Arc<[LatestValue]>, removal: bool) -> Result<(), StoreError> {
        let (done, result) = oneshot::channel();
        let jobs = self.jobs.as_ref().ok_or_else(closed)?;
        jobs.send(write::LatestJob { batch, removal, done }).await.map_err(|_| closed())?;
        result.await.map_err(|_| closed())?
    }

    /// Runs `read` on the blocking pool.
    async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&LatestTables) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let shared = Arc::clone(&self.shared);
        self.readers.clone().run(move || read(&shared)).await
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
        Box::pin(self.read(move |shared| {
            shared.environment.reading(|txn| read::get(shared, txn, &topic, device.as_deref()))
        }))
    }

    fn list(&self, query: LatestQuery) -> BoxFuture<'_, Result<LatestPage, StoreError>> {
        Box::pin(async move {
            let selection = Selection::new(query)?;
            self.read(move |shared| shared.environment.reading(|txn| read::list(shared, txn, &selection)))
                .await
        })
    }
}

impl SpillStore for EmbeddedLatest {
    fn count(&self) -> usize {
        let count = self.shared.environment.reading(|txn| self.shared.latest.len(txn));
        count.map_or(0, |count| usize::try_from(count).unwrap_or(usize::MAX))
    }

    fn bytes(&self) -> u64 {
        self.shared.environment.filled().unwrap_or(0)
    }
}

impl Drop for EmbeddedLatest {
    /// Waits for the writer to finish what it was given.
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}
