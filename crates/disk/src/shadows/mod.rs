//! Shadows in LMDB: one writer thread with group commit, reads on the blocking pool.
//!
//! Table `shadows`: device, NUL, name -> the record (see `record`). Neither has a NUL, so a device's records are neighbours,
//! in the order of their names.
//!
//! Every write of a commit is checked against what the writes before it leave; one whose version is not there changes nothing
//! and holds up no other.

mod record;
mod room;
#[cfg(test)]
mod tests;
mod work;

use std::{
    ops::Bound,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use tokio::sync::oneshot;

use super::{
    DurableOptions,
    answered::AnsweredWork,
    committer::{Committer, Lazy},
    environment::{Environment, Table},
    keys,
    readers::ReadPermits,
};
pub(super) use record::is_sound;
use record::report_damage;
use room::ShadowRoom;
use store::{
    BoxFuture, DataDir, MAX_SHADOW_DEVICE, MAX_SHADOW_NAME, ShadowPut, ShadowRecord, ShadowStore, StoreError,
    StoreHealth,
};
use work::{ShadowMaker, ShadowOp};

/// Reads at once; more wait.
const READERS: usize = 4;

/// A read ends after so many bytes of documents.
const MAX_READ: usize = 4 << 20;

/// A [`ShadowStore`] in the data directory.
pub struct EmbeddedShadows {
    environment: Arc<Environment>,
    table: Table,
    committer: Committer<AnsweredWork<ShadowMaker>>,
    readers: ReadPermits,
    stored: Arc<AtomicU64>,
}

impl EmbeddedShadows {
    /// Opens the store in the folder `shadows` of the data directory, for shadows of `max_bytes` together. Blocks on the disk.
    ///
    /// # Errors
    /// [`StoreError::Format`] if a newer version has written it; nothing is changed then.
    pub fn open(
        directory: &Arc<DataDir>,
        options: &DurableOptions,
        max_bytes: u64,
    ) -> Result<Self, StoreError> {
        let environment = Arc::new(Environment::open(directory, options.environment("shadows", 1))?);
        let table = environment.open_tables(|txn| environment.env.create_database(txn, Some("shadows")))?;
        let filled = environment.reading(|txn| room::filled(table, txn))?;
        let stored = Arc::new(AtomicU64::new(filled));
        let maker = ShadowMaker { table, room: ShadowRoom::new(max_bytes, Arc::clone(&stored)) };
        let (work, inboxes) = AnsweredWork::new(maker, options.max_waiting_bytes);
        let committer =
            Committer::start("shadows-writer", Arc::clone(&environment), work, inboxes, Lazy::default())?;
        Ok(Self { environment, table, committer, readers: ReadPermits::new(READERS), stored })
    }

    /// Bytes that all shadows count for, as of the last change.
    pub fn stored_bytes(&self) -> u64 {
        self.stored.load(Relaxed)
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

    /// Writes records that are not there yet; durable when it returns.
    pub(super) async fn import(&self, records: Vec<ShadowRecord>) -> Result<(), StoreError> {
        let submitted = records.into_iter().map(|record| {
            let key = key(record.device.as_str(), &record.name).ok_or_else(too_long)?;
            let mut value = Vec::new();
            record::encode(&record, &mut value);
            let (reply, answer) = oneshot::channel();
            let op = ShadowOp::Put { key, value, expected: 0, is_removal: false, reply };
            self.committer.submit(op, true);
            Ok::<_, StoreError>(answer)
        });
        for answer in submitted.collect::<Result<Vec<_>, _>>()? {
            match answer.await.map_err(|_| super::closed())?? {
                ShadowPut::Written => {}
                ShadowPut::Conflict => {
                    return Err(StoreError::Damaged("a shadow comes twice".to_owned()));
                }
                ShadowPut::Full => return Err(StoreError::Unavailable("too many shadows".to_owned())),
            }
        }
        Ok(())
    }

    /// Its health.
    pub fn health(&self) -> StoreHealth {
        self.committer.health()
    }

    async fn write(
        &self,
        op: impl FnOnce(oneshot::Sender<Result<ShadowPut, StoreError>>) -> ShadowOp,
    ) -> Result<ShadowPut, StoreError> {
        let (reply, answer) = oneshot::channel();
        self.committer.submit(op(reply), true);
        answer.await.map_err(|_| super::closed())?
    }

    async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&heed::RoTxn<'_, heed::WithoutTls>) -> Result<T, heed::Error> + Send + 'static,
    ) -> Result<T, StoreError> {
        let environment = Arc::clone(&self.environment);
        self.readers.clone().run(move || environment.reading(read)).await
    }
}

impl ShadowStore for EmbeddedShadows {
    fn get<'a>(
        &'a self,
        device: &'a str,
        name: &'a str,
    ) -> BoxFuture<'a, Result<Option<ShadowRecord>, StoreError>> {
        let (table, key) = (self.table, key(device, name));
        Box::pin(async move {
            let Some(key) = key else { return Ok(None) };
            let found = self.read(move |txn| {
                Ok(table.get(txn, &key)?.map(|value| (record::decode(&key, value, true), key.clone())))
            });
            match found.await? {
                None => Ok(None),
                Some((Some(record), _)) => Ok(Some(record)),
                // To be told apart from one that is not there: it would begin at version 1 again.
                Some((None, key)) => {
                    report_damage(&key);
                    Err(StoreError::Damaged("the record of a shadow".to_owned()))
                }
            }
        })
    }

    fn put(&self, record: ShadowRecord, expected: u64) -> BoxFuture<'_, Result<ShadowPut, StoreError>> {
        Box::pin(async move {
            let Some(key) = key(record.device.as_str(), &record.name) else { return Err(too_long()) };
            let mut value = Vec::new();
            record::encode(&record, &mut value);
            let is_removal = record.document.is_none();
            self.write(|reply| ShadowOp::Put { key, value, expected, is_removal, reply }).await
        })
    }

    fn forget<'a>(
        &'a self,
        device: &'a str,
        name: &'a str,
        version: u64,
    ) -> BoxFuture<'a, Result<ShadowPut, StoreError>> {
        Box::pin(async move {
            let Some(key) = key(device, name) else { return Ok(ShadowPut::Conflict) };
            self.write(|reply| ShadowOp::Forget { key, version, reply }).await
        })
    }

    fn list<'a>(
        &'a self,
        device: &'a str,
        after: Option<&'a str>,
        limit: usize,
        documents: bool,
    ) -> BoxFuture<'a, Result<Vec<ShadowRecord>, StoreError>> {
        let table = self.table;
        let (prefix, after) = (keys::name(device, ""), after.map(|after| keys::name(device, after)));
        Box::pin(self.read(move |txn| {
            let begin = match &after {
                Some(after) => Bound::Excluded(&after[..]),
                None => Bound::Included(&prefix[..]),
            };
            let (mut records, mut bytes) = (Vec::new(), 0);
            for entry in table.range(txn, &(begin, Bound::Unbounded))? {
                let (key, value) = entry?;
                if !key.starts_with(&prefix) || records.len() >= limit || bytes > MAX_READ {
                    break;
                }
                match record::decode(key, value, documents) {
                    Some(record) => {
                        bytes += if documents { value.len() } else { 0 };
                        records.push(record);
                    }
                    None => report_damage(key),
                }
            }
            Ok(records)
        }))
    }
}

/// A record as the tools read it; `None` if damaged.
pub(super) fn record(key: &[u8], value: &[u8]) -> Option<ShadowRecord> {
    record::decode(key, value, true)
}

/// `None` if a name is too long to be one, or empty.
fn key(device: &str, name: &str) -> Option<Vec<u8>> {
    let fits = (1..=MAX_SHADOW_DEVICE).contains(&device.len()) && name.len() <= MAX_SHADOW_NAME;
    fits.then(|| keys::name(device, name))
}

fn too_long() -> StoreError {
    StoreError::Unavailable("the name of a shadow or of its device is too long".to_owned())
}
