//! Latest values in Cassandra or Scylla.
//!
//! One driver session per process, made when it is first needed: the gateway starts while the database is away, and
//! every write tries again. Writes are idempotent upserts of every column with the value's version as write
//! timestamp, so the database itself keeps the newest, whatever is repeated or comes late.

mod options;
mod row;
mod schema;
#[cfg(test)]
mod tests;
mod topics;

use std::{ops::ControlFlow, sync::Arc};

use scylla::{
    client::{execution_profile::ExecutionProfile, session::Session, session_builder::SessionBuilder},
    policies::{load_balancing::DefaultPolicy, speculative_execution::SimpleSpeculativeExecutionPolicy},
    response::PagingState,
    statement::{
        Statement,
        batch::{Batch, BatchType},
        prepared::PreparedStatement,
    },
};
use tokio::{sync::OnceCell, task::JoinSet};

pub use self::options::{Compression, Consistency, ScyllaOptions, TtlRule};
use self::{row::Row, topics::KnownTopics};
use super::{
    BoxFuture, LatestPage, LatestQuery, LatestStore, LatestValue, PageBuilder, PageToken, Selection,
    StoreError,
};
use crate::telemetry::count;

/// An unlogged batch stays under this, in bytes: where Cassandra begins to warn.
const BATCH_BYTES: usize = 5 << 10;

/// Larger values are refused and counted: Cassandra takes no mutation above half a commit log segment (16 MiB by
/// default), and one that it never takes would hold up all others.
const MAX_VALUE_BYTES: usize = 4 << 20;

/// Rows of one answer of the database.
const ROWS: i32 = 100;

/// A page ends after so many rows or devices looked at.
const PAGE_WORK: usize = 20_000;

/// A [`LatestStore`] in a Cassandra or Scylla cluster.
///
/// [`LatestStore::list`] needs device ids, else it fails with [`StoreError::NeedsDevices`]: devices are spread over the cluster by hash, so listing all of them in
/// order would read every row of every node.
pub struct ScyllaLatest {
    options: Arc<ScyllaOptions>,
    connection: OnceCell<Connection>,
    known: KnownTopics,
}

struct Connection {
    session: Arc<Session>,
    put_by_device: PreparedStatement,
    put_by_topic: PreparedStatement,
    get_by_device: PreparedStatement,
    get_by_topic: PreparedStatement,
    list: PreparedStatement,
    topics: PreparedStatement,
}

impl ScyllaLatest {
    /// Connects when first used.
    ///
    /// # Errors
    /// [`StoreError::Format`] if the keyspace is not a name.
    pub fn new(options: ScyllaOptions) -> Result<Self, StoreError> {
        schema::check_keyspace(&options.keyspace)?;
        let known = KnownTopics::new(options.topics_per_device);
        Ok(Self { options: Arc::new(options), connection: OnceCell::new(), known })
    }

    /// The connection, made and its schema checked if it is not there. Dropped half way, the next call begins anew.
    async fn connection(&self) -> Result<&Connection, StoreError> {
        self.connection.get_or_try_init(|| Connection::open(&self.options)).await
    }

    /// Which of `batch` are written: all but those of topics beyond the bound and those that are too large.
    async fn admitted(
        &self,
        connection: &Connection,
        batch: &[LatestValue],
    ) -> Result<Vec<usize>, StoreError> {
        let mut admitted = Vec::with_capacity(batch.len());
        for (number, value) in batch.iter().enumerate() {
            if row::size(value) > MAX_VALUE_BYTES {
                count(|c| c.latest_dropped_bytes.add(1));
                continue;
            }
            let (device, topic) = (value.device.as_str(), &*value.topic);
            if device.is_empty() || topic.is_empty() {
                // No key of Cassandra's, and no name of MQTT's.
                continue;
            }
            if !self.known.is_loaded(device) {
                self.known.load(device, &connection.topics_of(device, self.options.topics_per_device).await?);
            }
            if self.known.admit(device, topic) {
                admitted.push(number);
            } else {
                count(|c| c.latest_dropped_topics.add(1));
            }
        }
        Ok(admitted)
    }

    async fn write(&self, batch: Arc<[LatestValue]>) -> Result<(), StoreError> {
        let connection = self.connection().await?;
        let admitted = self.admitted(connection, &batch).await?;
        let mut writes = JoinSet::new();
        for group in row::by_device(&batch, &admitted, BATCH_BYTES) {
            room(&mut writes, self.options.concurrency).await?;
            let (batch, session) = (Arc::clone(&batch), Arc::clone(&connection.session));
            let options = Arc::clone(&self.options);
            let statement = connection.put_by_device.clone();
            writes.spawn(async move { put(&session, &statement, &batch, &group, &options).await });
        }
        for number in row::newest_by_topic(&batch, &admitted) {
            room(&mut writes, self.options.concurrency).await?;
            let (batch, session) = (Arc::clone(&batch), Arc::clone(&connection.session));
            let options = Arc::clone(&self.options);
            let statement = connection.put_by_topic.clone();
            writes.spawn(async move { put(&session, &statement, &batch, &[number], &options).await });
        }
        while let Some(done) = writes.join_next().await {
            done.map_err(unavailable)??;
        }
        Ok(())
    }

    async fn read(&self, topic: &str, device: Option<&str>) -> Result<Option<LatestValue>, StoreError> {
        if topic.is_empty() || device.is_some_and(str::is_empty) {
            return Ok(None);
        }
        let connection = self.connection().await?;
        let session = &connection.session;
        let answer = match device {
            Some(device) => session.execute_unpaged(&connection.get_by_device, (device, topic)).await,
            None => session.execute_unpaged(&connection.get_by_topic, (topic,)).await,
        };
        let rows = answer.map_err(unavailable)?.into_rows_result().map_err(unavailable)?;
        rows.maybe_first_row::<Row>()
            .map_err(damaged)?
            .map(|row| row.into_value(&self.options.server_id))
            .transpose()
    }

    async fn scan(&self, query: LatestQuery) -> Result<LatestPage, StoreError> {
        let selection = Selection::new(query)?;
        if selection.devices.is_empty() {
            return Err(StoreError::NeedsDevices);
        }
        let connection = self.connection().await?;
        let mut page = PageBuilder::new(selection.limit);
        let mut work = 0;
        for device in selection.devices.iter().filter(|device| !device.is_empty()) {
            let after = match &selection.after {
                Some(after) if after.device > *device => continue,
                Some(after) if after.device == *device => &*after.topic,
                _ => "",
            };
            // Covers everything before this device: no topic is empty.
            if work >= PAGE_WORK {
                return Ok(page.searched_to(Some(PageToken::new(device, ""))));
            }
            work += 1;
            let mut state = PagingState::start();
            loop {
                let bound = (device.as_str(), after);
                let answer = connection.session.execute_single_page(&connection.list, bound, state).await;
                let (rows, next) = answer.map_err(unavailable)?;
                let rows = rows.into_rows_result().map_err(unavailable)?;
                let mut last = None;
                for row in rows.rows::<Row>().map_err(damaged)? {
                    if page.is_full() {
                        return Ok(page.cut());
                    }
                    let value = row.map_err(damaged)?.into_value(&self.options.server_id)?;
                    work += 1;
                    last = Some(PageToken::new(device, &value.topic));
                    if selection.selects(device, &value.topic) {
                        page.push(value);
                    }
                }
                match next.into_paging_control_flow() {
                    ControlFlow::Break(()) => break,
                    ControlFlow::Continue(next) => state = next,
                }
                if work >= PAGE_WORK && last.is_some() {
                    return Ok(page.searched_to(last));
                }
            }
        }
        Ok(page.searched_to(None))
    }
}

impl LatestStore for ScyllaLatest {
    fn upsert(&self, batch: Arc<[LatestValue]>) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(self.write(batch))
    }

    fn get<'a>(
        &'a self,
        topic: &'a str,
        device: Option<&'a str>,
    ) -> BoxFuture<'a, Result<Option<LatestValue>, StoreError>> {
        Box::pin(self.read(topic, device))
    }

    fn list(&self, query: LatestQuery) -> BoxFuture<'_, Result<LatestPage, StoreError>> {
        Box::pin(self.scan(query))
    }

    fn lists_all(&self) -> bool {
        false
    }
}

impl Connection {
    async fn open(options: &ScyllaOptions) -> Result<Self, StoreError> {
        let mut balancing = DefaultPolicy::builder();
        if !options.datacenter.is_empty() {
            balancing = balancing.prefer_datacenter(options.datacenter.clone());
        }
        let speculation = options.speculative_delay.map(|retry_interval| {
            let max_retry_count = options.speculative_attempts;
            Arc::new(SimpleSpeculativeExecutionPolicy { max_retry_count, retry_interval }) as Arc<_>
        });
        let profile = ExecutionProfile::builder()
            .request_timeout(Some(options.request_timeout))
            .load_balancing_policy(balancing.build())
            .speculative_execution_policy(speculation)
            .build();
        let mut builder = SessionBuilder::new()
            .known_nodes(&options.contact_points)
            .connection_timeout(options.connect_timeout)
            .compression(options.compression.algorithm())
            .default_execution_profile_handle(profile.into_handle());
        if !options.username.is_empty() {
            builder = builder.user(&options.username, &options.password);
        }
        let session = builder.build().await.map_err(unavailable)?;
        schema::ready(&session, options).await?;
        let keyspace = &options.keyspace;
        let (columns, marks) = (row::COLUMNS, row::MARKS);
        let (write, read) = (options.write_consistency, options.read_consistency);
        let put = |table: &str| {
            format!("INSERT INTO {keyspace}.{table} ({columns}) VALUES ({marks}) USING TIMESTAMP ? AND TTL ?")
        };
        let select = |what: &str, table: &str, which: &str| {
            format!("SELECT {what} FROM {keyspace}.{table} WHERE {which}")
        };
        Ok(Self {
            put_by_device: prepare(&session, put("latest_by_device"), write).await?,
            put_by_topic: prepare(&session, put("latest_by_topic"), write).await?,
            get_by_device: prepare(
                &session,
                select(columns, "latest_by_device", "device = ? AND topic = ?"),
                read,
            )
            .await?,
            get_by_topic: prepare(&session, select(columns, "latest_by_topic", "topic = ?"), read).await?,
            list: prepare(&session, select(columns, "latest_by_device", "device = ? AND topic > ?"), read)
                .await?,
            topics: prepare(&session, select("topic", "latest_by_device", "device = ? LIMIT ?"), read)
                .await?,
            session: Arc::new(session),
        })
    }

    /// The first `limit` topics of a device.
    async fn topics_of(&self, device: &str, limit: usize) -> Result<Vec<String>, StoreError> {
        let limit = i32::try_from(limit).unwrap_or(i32::MAX);
        let answer =
            self.session.execute_unpaged(&self.topics, (device, limit)).await.map_err(unavailable)?;
        let rows = answer.into_rows_result().map_err(unavailable)?;
        let topics: Result<Vec<(String,)>, _> = rows.rows().map_err(damaged)?.collect();
        Ok(topics.map_err(damaged)?.into_iter().map(|(topic,)| topic).collect())
    }
}

async fn prepare(
    session: &Session,
    text: String,
    level: Consistency,
) -> Result<PreparedStatement, StoreError> {
    let mut statement = session.prepare(Statement::new(text)).await.map_err(unavailable)?;
    statement.set_is_idempotent(true);
    statement.set_consistency(level.level());
    statement.set_page_size(ROWS);
    Ok(statement)
}

/// Writes values of one partition with `statement`.
async fn put(
    session: &Session,
    statement: &PreparedStatement,
    values: &[LatestValue],
    numbers: &[usize],
    options: &ScyllaOptions,
) -> Result<(), StoreError> {
    if let [number] = numbers {
        let row = options.row(&values[*number]);
        return session.execute_unpaged(statement, row).await.map(drop).map_err(unavailable);
    }
    let mut batch = Batch::new(BatchType::Unlogged);
    batch.set_is_idempotent(true);
    batch.set_consistency(options.write_consistency.level());
    for _ in numbers {
        batch.append_statement(statement.clone());
    }
    let rows: Vec<_> = numbers.iter().map(|number| options.row(&values[*number])).collect();
    session.batch(&batch, rows).await.map(drop).map_err(unavailable)
}

/// Waits until one more write may start.
async fn room(writes: &mut JoinSet<Result<(), StoreError>>, most: usize) -> Result<(), StoreError> {
    while writes.len() >= most.max(1) {
        if let Some(done) = writes.join_next().await {
            done.map_err(unavailable)??;
        }
    }
    Ok(())
}

fn unavailable(error: impl std::fmt::Display) -> StoreError {
    StoreError::Unavailable(error.to_string())
}

fn damaged(error: impl std::fmt::Display) -> StoreError {
    StoreError::Damaged(error.to_string())
}
