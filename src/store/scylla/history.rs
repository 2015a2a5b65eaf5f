//! History in Cassandra or Scylla, over the driver session of [`ScyllaLatest`].
//!
//! A (device, topic) has one partition for every bucket of six hours that has messages, newest first in it. The key of a
//! row has the message's version, and its write timestamp is that version: a row that is written again is the same row.

use std::{ops::ControlFlow, sync::Arc};

use scylla::{
    client::session::Session,
    errors::SerializationError,
    response::PagingState,
    serialize::{
        row::{RowSerializationContext, SerializeRow},
        writers::RowWriter,
    },
    statement::prepared::PreparedStatement,
};
use tokio::{sync::OnceCell, task::JoinSet};

use super::{
    BATCH_BYTES, ScyllaLatest, damaged, finish, prepare, put, room,
    row::{self, Row},
    unavailable,
};
use crate::store::{
    BoxFuture, HistoryEntry, HistoryPage, HistoryQuery, HistoryStore, StoreError,
    history::{Walk, bucket},
};

/// A [`HistoryStore`] in a Cassandra or Scylla cluster.
pub struct ScyllaHistory {
    latest: Arc<ScyllaLatest>,
    statements: OnceCell<Statements>,
}

struct Statements {
    append: PreparedStatement,
    newest_first: PreparedStatement,
    oldest_first: PreparedStatement,
}

impl ScyllaHistory {
    /// Shares the connection of `latest`, whoever needs it first.
    pub fn new(latest: Arc<ScyllaLatest>) -> Self {
        Self { latest, statements: OnceCell::new() }
    }

    async fn ready(&self) -> Result<(&Arc<Session>, &Statements), StoreError> {
        let session = &self.latest.connection().await?.session;
        let options = &self.latest.options;
        let statements = self.statements.get_or_try_init(async || {
            let keyspace = &options.keyspace;
            let (columns, marks) = (row::COLUMNS, row::MARKS);
            let append = format!(
                "INSERT INTO {keyspace}.history (bucket, {columns}) VALUES (?, {marks}) USING TIMESTAMP ? AND TTL ?"
            );
            let select = |order: &str| {
                format!(
                    "SELECT {columns} FROM {keyspace}.history WHERE device = ? AND topic = ? AND bucket = ? AND \
                     (received, version) >= (?, ?) AND (received, version) < (?, ?) \
                     ORDER BY received {order}, version {order} LIMIT ?"
                )
            };
            Ok(Statements {
                append: prepare(session, append, options.write_consistency).await?,
                newest_first: prepare(session, select("DESC"), options.read_consistency).await?,
                oldest_first: prepare(session, select("ASC"), options.read_consistency).await?,
            })
        });
        Ok((session, statements.await?))
    }

    async fn write(&self, batch: Arc<[HistoryEntry]>) -> Result<(), StoreError> {
        let (session, statements) = self.ready().await?;
        let mut writes = JoinSet::new();
        for group in by_partition(&batch, BATCH_BYTES) {
            let options = &self.latest.options;
            room(&mut writes, options.concurrency).await?;
            let (batch, session, options) = (Arc::clone(&batch), Arc::clone(session), Arc::clone(options));
            let statement = statements.append.clone();
            writes.spawn(async move {
                let rows = group.iter().map(|number| bind(&batch[*number], &options.server_id)).collect();
                put(&session, &statement, options.write_consistency, rows).await
            });
        }
        finish(writes).await
    }

    async fn read(&self, query: HistoryQuery) -> Result<HistoryPage, StoreError> {
        let mut walk = Walk::new(&query)?;
        let (session, statements) = self.ready().await?;
        let statement = if query.oldest_first { &statements.oldest_first } else { &statements.newest_first };
        while let Some(part) = walk.next_part() {
            let numbers =
                [part.bucket, part.low.received, part.low.version, part.high.received, part.high.version]
                    .map(u64::cast_signed);
            let limit = i32::try_from(walk.room()).unwrap_or(i32::MAX);
            let mut state = PagingState::start();
            loop {
                let [bucket, low, low_version, high, high_version] = numbers;
                let names = (query.device.as_str(), query.topic.as_str());
                let bound = (names.0, names.1, bucket, low, low_version, high, high_version, limit);
                let answer = session.execute_single_page(statement, bound, state).await;
                let (rows, next) = answer.map_err(unavailable)?;
                let rows = rows.into_rows_result().map_err(unavailable)?;
                for row in rows.rows::<Row>().map_err(damaged)? {
                    if walk.is_full() {
                        return Ok(walk.page());
                    }
                    walk.push(row.map_err(damaged)?.into_value(&self.latest.options.server_id)?);
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
}

impl HistoryStore for ScyllaHistory {
    fn append(&self, batch: Arc<[HistoryEntry]>) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(self.write(batch))
    }

    fn page(&self, query: HistoryQuery) -> BoxFuture<'_, Result<HistoryPage, StoreError>> {
        Box::pin(self.read(query))
    }
}

/// The bucket, then what a row of latest values is written from.
struct Bound<'a>(i64, row::Bound<'a>);

fn bind<'a>(entry: &'a HistoryEntry, server: &'a str) -> Bound<'a> {
    let ttl = i32::try_from(entry.ttl).unwrap_or(i32::MAX);
    let bucket = bucket(entry.value.received.0).cast_signed();
    Bound(bucket, row::bind(&entry.value, server, ttl))
}

impl SerializeRow for Bound<'_> {
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
    use super::*;
    use crate::{store::suite::value, types::Timestamp};

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
