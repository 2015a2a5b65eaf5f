//! History in Cassandra or Scylla, over the driver session of [`ScyllaLatest`].
//!
//! A (device, topic) has one partition for every bucket of six hours that has messages, newest first in it. The key of a
//! row has the message's version, and its write timestamp is that version: a row that is written again is the same row.

use std::{ops::ControlFlow, sync::Arc};

use scylla::{
    client::session::Session,
    errors::{ExecutionError, SerializationError},
    response::{PagingState, PagingStateResponse, query_result::QueryRowsResult},
    serialize::{
        row::{RowSerializationContext, SerializeRow},
        writers::RowWriter,
    },
    statement::prepared::PreparedStatement,
};

use super::{
    ScyllaLatest, ScyllaOptions,
    cluster::{Cluster, ClusterSession, prepare},
    errors::damaged,
    options::life,
    read::{self, next_rows},
    row::{self, LatestRow},
    write::{self, BATCH_BYTES, Plan, WriteKind},
};
use store::{BoxFuture, HistoryEntry, HistoryPage, HistoryQuery, HistoryRemoval, HistoryStore, StoreError};
use store::{BucketPart, Walk, bucket};

/// A [`HistoryStore`] in a Cassandra or Scylla cluster.
pub struct ScyllaHistory {
    cluster: Arc<Cluster>,
}

impl ScyllaHistory {
    /// In the database of `latest`, through the same connections.
    pub fn new(latest: &ScyllaLatest) -> Self {
        Self { cluster: Arc::clone(&latest.cluster) }
    }

    async fn write(&self, batch: Arc<[HistoryEntry]>) -> Result<(), StoreError> {
        let connection = self.cluster.connection().await?;
        let mut plan = Plan::new(batch.len());
        by_partition(&batch, BATCH_BYTES).iter().for_each(|numbers| plan.add((), numbers));
        let entries = Entries { batch, options: Arc::clone(&self.cluster.options) };
        write::all(&self.cluster, &connection, Arc::new(entries), plan).await
    }

    async fn read(&self, query: HistoryQuery) -> Result<HistoryPage, StoreError> {
        let mut walk = Walk::new(&query)?;
        let connection = self.cluster.connection().await?;
        let mut rows = read::ROWS.0;
        while let Some(part) = walk.next_part() {
            let mut state = PagingState::start();
            loop {
                let most = rows.min(walk.room());
                let (found, next) = self.ask(&connection, &query, part, most, state).await?;
                let (mut seen, mut bytes) = (0, 0);
                for row in found.rows::<LatestRow>().map_err(damaged)? {
                    if walk.is_full() {
                        return Ok(walk.page());
                    }
                    let value = row.map_err(damaged)?.into_value(&self.cluster.options.server_id)?;
                    (seen, bytes) = (seen + 1, bytes + row::size(&value));
                    walk.push(value);
                }
                if seen > 0 {
                    rows = next_rows(seen, bytes);
                }
                match next.into_paging_control_flow() {
                    ControlFlow::Break(()) => break,
                    ControlFlow::Continue(_) if walk.is_full() => break,
                    ControlFlow::Continue(next) => state = next,
                }
            }
        }
        Ok(walk.page())
    }

    /// The next messages of `part`: at most `rows`, and no LIMIT, since Cassandra begins anew where one is not above the
    /// size of an answer.
    async fn ask(
        &self,
        connection: &Arc<ClusterSession>,
        query: &HistoryQuery,
        part: BucketPart,
        rows: usize,
        state: PagingState,
    ) -> Result<(QueryRowsResult, PagingStateResponse), StoreError> {
        let BucketPart { bucket, low, high } = part;
        let HistoryStatements { newest_first, oldest_first, .. } = &connection.history;
        let mut statement = if query.oldest_first { oldest_first.clone() } else { newest_first.clone() };
        statement.set_page_size(i32::try_from(rows).unwrap_or(i32::MAX));
        let [bucket, from, from_version, to, to_version] =
            [bucket, low.received, low.version, high.received, high.version].map(u64::cast_signed);
        let (device, topic) = (&*query.device, &*query.topic);
        let bound = (device, topic, bucket, from, from_version, to, to_version);
        let request = connection.session.execute_single_page(&statement, bound, state);
        let (answer, next) = self.cluster.ask(connection, "read history", request).await?;
        Ok((answer.into_rows_result().map_err(damaged)?, next))
    }
}

impl HistoryStore for ScyllaHistory {
    fn append(&self, batch: Arc<[HistoryEntry]>) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(self.write(batch))
    }

    fn page(&self, query: HistoryQuery) -> BoxFuture<'_, Result<HistoryPage, StoreError>> {
        Box::pin(self.read(query))
    }

    fn remove(&self, removal: HistoryRemoval) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            let connection = self.cluster.connection().await?;
            let partitions: Vec<_> =
                removal.partitions().map(|(topic, bucket)| (Arc::clone(topic), bucket)).collect();
            let mut plan = Plan::new(partitions.len());
            (0..partitions.len()).for_each(|number| plan.add((), &[number]));
            let HistoryRemoval { device, version, .. } = removal;
            let options = Arc::clone(&self.cluster.options);
            let partitions = Arc::new(Partitions { device, partitions, version, options });
            write::all(&self.cluster, &connection, partitions, plan).await
        })
    }
}

/// Partitions to delete, with the timestamp of a version: what is newer stays, and what is older does not come back.
struct Partitions {
    device: String,
    partitions: Vec<(Arc<str>, u64)>,
    version: u64,
    options: Arc<ScyllaOptions>,
}

impl WriteKind for Partitions {
    type Table = ();

    async fn put(
        &self,
        connection: &ClusterSession,
        (): (),
        numbers: &[usize],
    ) -> Result<(), ExecutionError> {
        let rows: Vec<_> = numbers
            .iter()
            .map(|number| {
                let (topic, bucket) = &self.partitions[*number];
                (self.version.cast_signed(), &*self.device, &**topic, bucket.cast_signed())
            })
            .collect();
        write::put(&connection.session, &connection.history.remove, &self.options, &rows).await
    }

    fn refused(&self, number: usize, error: &str) {
        write::warn_refused(&self.device, &self.partitions[number].0, error);
    }
}

/// Prepared statements of the history.
pub(super) struct HistoryStatements {
    append: PreparedStatement,
    remove: PreparedStatement,
    newest_first: PreparedStatement,
    oldest_first: PreparedStatement,
}

impl HistoryStatements {
    pub(super) async fn prepare(session: &Session, options: &ScyllaOptions) -> Result<Self, StoreError> {
        let keyspace = &options.keyspace;
        let (columns, marks) = (row::COLUMNS, row::MARKS);
        let append = format!(
            "INSERT INTO {keyspace}.history (bucket, {columns}) VALUES (?, {marks}) USING TIMESTAMP ? AND TTL ?"
        );
        let remove = format!(
            "DELETE FROM {keyspace}.history USING TIMESTAMP ? WHERE device = ? AND topic = ? AND bucket = ?"
        );
        let select = |order: &str| {
            format!(
                "SELECT {columns} FROM {keyspace}.history WHERE device = ? AND topic = ? AND bucket = ? AND \
                 (received, version) >= (?, ?) AND (received, version) < (?, ?) \
                 ORDER BY received {order}, version {order}"
            )
        };
        Ok(Self {
            append: write::unhurried(session, prepare(session, append, options.write_consistency).await?),
            remove: write::unhurried(session, prepare(session, remove, options.write_consistency).await?),
            newest_first: prepare(session, select("DESC"), options.read_consistency).await?,
            oldest_first: prepare(session, select("ASC"), options.read_consistency).await?,
        })
    }
}

struct Entries {
    batch: Arc<[HistoryEntry]>,
    options: Arc<ScyllaOptions>,
}

impl WriteKind for Entries {
    type Table = ();

    async fn put(
        &self,
        connection: &ClusterSession,
        (): (),
        numbers: &[usize],
    ) -> Result<(), ExecutionError> {
        let server = &self.options.server_id;
        let rows: Vec<_> = numbers.iter().map(|number| bind(&self.batch[*number], server)).collect();
        write::put(&connection.session, &connection.history.append, &self.options, &rows).await
    }

    fn refused(&self, number: usize, error: &str) {
        store::counters::count(|c| c.history_dropped_rejected.add(1));
        let value = &self.batch[number].value;
        write::warn_refused(value.device.as_str(), &value.topic, error);
    }
}

/// The bucket, then what a row of latest values is written from.
struct BoundEntry<'a>(i64, row::BoundRow<'a>);

fn bind<'a>(entry: &'a HistoryEntry, server: &'a str) -> BoundEntry<'a> {
    let ttl = life(entry.ttl.into(), entry.value.received);
    let bucket = bucket(entry.value.received.0).cast_signed();
    BoundEntry(bucket, row::bind(&entry.value, server, ttl))
}

impl SerializeRow for BoundEntry<'_> {
    fn serialize(
        &self,
        context: &RowSerializationContext<'_>,
        writer: &mut RowWriter<'_>,
    ) -> Result<(), SerializationError> {
        let (first, rest) = context.columns().split_at_checked(1).unwrap_or_default();
        (self.0,).serialize(&RowSerializationContext::from_specs(first), writer)?;
        self.1.serialize(&RowSerializationContext::from_specs(rest), writer)
    }

    fn is_empty(&self) -> bool {
        false
    }
}

/// The entries' numbers in groups of one partition each, of fewer than `bytes` unless one is larger alone.
fn by_partition(batch: &[HistoryEntry], bytes: usize) -> Vec<Vec<usize>> {
    let rows = batch.iter().enumerate().map(|(number, HistoryEntry { value, .. })| {
        let partition = (value.device.as_str(), &*value.topic, bucket(value.received.0));
        (number, partition, row::size(value))
    });
    row::groups(rows, bytes)
}

#[cfg(test)]
mod tests {
    use gateway_core::Timestamp;

    use super::*;
    use store::suite::latest::value;

    #[test]
    fn a_batch_of_history_holds_one_partition() {
        let entry = |n: u64| {
            let mut value = value(&format!("d{}", n % 2), &format!("t{}", n % 3), n);
            value.received = Timestamp(n % 5 * 24 * 60 * 60 * 1_000);
            HistoryEntry { value, ttl: 1 }
        };
        let entries: Vec<_> = (0..100).map(entry).collect();
        let groups = by_partition(&entries, BATCH_BYTES);
        assert_eq!(groups.iter().map(Vec::len).sum::<usize>(), 100);
        assert_eq!(groups.len(), 2 * 3 * 5);
        for group in groups {
            let partition = |n: usize| (n % 2, n % 3, n % 5);
            assert!(group.iter().all(|n| partition(*n) == partition(group[0])), "{group:?}");
        }
    }
}
