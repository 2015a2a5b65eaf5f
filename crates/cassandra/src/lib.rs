//! Latest values, history, shadows and the ledger of a cluster in Cassandra or Scylla.
//!
//! One driver session per process for the stores, made when it is first needed: the gateway starts while the database is away, and
//! every write tries again. Writes, but for those of shadows, are idempotent upserts of every column with the value's version as
//! write timestamp, so the database itself keeps the newest, whatever is repeated or comes late.
//!
//! ```text
//! options           settings
//! cluster schema    the session, its statements, keyspace and tables
//! errors limit      what an error means; how many requests are under way
//! row topics        a value as a row; which topics devices have
//! write latest      requests that write; which values of a batch go where
//! read              one value, pages of values
//! history           messages of a topic in order of time
//! shadows           device shadows, by lightweight transactions
//! ledger            the ledger of a cluster, with connections of its own
//! ```
//!
//! The store is one type by subject, so its files name each other.

mod cluster;
pub mod counters;
mod errors;
mod history;
mod latest;
pub mod ledger;
mod limit;
mod options;
mod read;
mod row;
mod schema;
mod shadows;
#[cfg(test)]
mod tests;
mod topics;
mod write;

use std::sync::Arc;

use self::cluster::Cluster;
pub use self::history::ScyllaHistory;
pub use self::options::{ScyllaOptions, ScyllaTtlRule};
pub use self::shadows::ScyllaShadows;
use store::{BoxFuture, LatestPage, LatestQuery, LatestStore, LatestValue, StoreError};

/// A [`LatestStore`] in a Cassandra or Scylla cluster.
///
/// [`LatestStore::list`] needs device ids, else it fails with [`StoreError::NeedsDevices`]: devices are spread over the
/// cluster by hash, so listing all of them in order would read every row of every node.
///
/// A value that no database takes, or that this one refuses with the schema as it should be, is dropped and counted.
pub struct ScyllaLatest {
    cluster: Arc<Cluster>,
}

impl ScyllaLatest {
    /// Connects when first used, inside a Tokio runtime.
    ///
    /// # Errors
    /// [`StoreError::Format`] if the keyspace is not a name.
    pub fn new(options: ScyllaOptions) -> Result<Self, StoreError> {
        schema::check_keyspace(&options.keyspace)?;
        Ok(Self { cluster: Cluster::new(options) })
    }
}

impl LatestStore for ScyllaLatest {
    fn upsert(&self, batch: Arc<[LatestValue]>) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(latest::upsert(&self.cluster, batch))
    }

    fn remove(&self, batch: Arc<[LatestValue]>) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(latest::remove(&self.cluster, batch))
    }

    fn get<'a>(
        &'a self,
        topic: &'a str,
        device: Option<&'a str>,
    ) -> BoxFuture<'a, Result<Option<LatestValue>, StoreError>> {
        Box::pin(read::get(&self.cluster, topic, device))
    }

    fn list(&self, query: LatestQuery) -> BoxFuture<'_, Result<LatestPage, StoreError>> {
        Box::pin(read::list(&self.cluster, query))
    }

    fn lists_all(&self) -> bool {
        false
    }
}
