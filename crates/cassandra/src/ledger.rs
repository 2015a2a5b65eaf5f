//! The ledger of a cluster in Cassandra or Scylla.
//!
//! Rows are plain inserts at QUORUM, written once; conditional writes are made for the view alone. Whether a writer was still the
//! owner when its rows became durable is told by a QUORUM read of the owners that begins afterwards ([`Ledger::owners`]).
//! No clock decides over what is stored: rows have timestamp 1, removals 2, and signs of life count on from the newest one there. A row that comes late to a segment that was removed is hidden as long as the database keeps
//! the mark of the removal (`gc_grace_seconds`), and stays after that as garbage that nobody reads.
//!
//! ```text
//! coordinators      which node is asked first
//! schema            tables and statements
//! findings          how the database is set up
//! ```
//!
//! An answer that is missing, late or an error is [`Unknown`]: the caller asks again.

mod coordinators;
mod findings;
mod schema;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    fmt,
    ops::ControlFlow,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use ledger::{
    Beat, BoxFuture, Finding, Inserted, Ledger, MAX_ROW, Owner, Row, Rows, Segment, StoredView, Stream,
    Swapped, Unknown,
};
use parking_lot::Mutex;
use rustls::ClientConfig;
use scylla::{
    client::session::Session,
    errors::{ExecutionError, PrepareError},
    response::{PagingState, query_result::QueryResult},
    serialize::row::SerializeRow,
    statement::prepared::PreparedStatement,
    value::{CqlValue, Row as AnswerRow},
};
use tokio::{
    sync::{Mutex as AsyncMutex, OnceCell},
    task::{JoinHandle, JoinSet},
};
use uuid::Uuid;

use self::{
    coordinators::{Coordinators, SILENCE},
    schema::{Statements, TABLES},
};
use super::{
    ScyllaOptions, StoreError, cluster,
    errors::{self, ErrorKind},
    read::{ROWS, next_rows},
    schema as store_schema,
};

/// Pause after the cluster did not let us in.
const PAUSE: Duration = Duration::from_secs(1);

/// Other nodes that a request may be sent to, one after each [`SILENCE`].
const OTHER_NODES: usize = 2;

/// Rows of a record under way at once: 1 MiB.
const ROWS_AT_ONCE: usize = 8;

/// Settings of [`CassandraLedger`].
#[derive(Clone)]
pub struct LedgerOptions {
    /// Nodes to begin with, `host` or `host:port`; port 9042 if it is not said.
    pub contact_points: Vec<String>,
    /// Datacenter whose nodes are asked; empty is any. The quorum is that of all replicas in any case.
    pub datacenter: String,
    /// User name; empty logs in without.
    pub username: String,
    /// Password.
    pub password: String,
    /// TLS to the nodes; without it connections are plain.
    pub tls: Option<Arc<ClientConfig>>,
    /// Keyspace of the tables, for one cluster alone: letters, digits and `_`.
    pub keyspace: String,
    /// CQL map of the keyspace's replication, used when it is made.
    pub replication: String,
    /// Time to connect to one node.
    pub connect_timeout: Duration,
    /// Time for one request, after which its answer is [`Unknown`].
    pub request_timeout: Duration,
}

impl Default for LedgerOptions {
    fn default() -> Self {
        Self {
            contact_points: vec!["127.0.0.1:9042".to_owned()],
            datacenter: String::new(),
            username: String::new(),
            password: String::new(),
            tls: None,
            keyspace: "mqtt_cluster".to_owned(),
            replication: "{'class': 'NetworkTopologyStrategy', 'replication_factor': 3}".to_owned(),
            connect_timeout: Duration::from_secs(5),
            request_timeout: Duration::from_secs(2),
        }
    }
}

impl fmt::Debug for LedgerOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LedgerOptions")
            .field("contact_points", &self.contact_points)
            .field("datacenter", &self.datacenter)
            .field("username", &self.username)
            .field("tls", &self.tls.is_some())
            .field("keyspace", &self.keyspace)
            .field("replication", &self.replication)
            .finish_non_exhaustive()
    }
}

impl LedgerOptions {
    /// Options of the session.
    fn session(self) -> ScyllaOptions {
        ScyllaOptions {
            contact_points: self.contact_points,
            datacenter: self.datacenter,
            username: self.username,
            password: self.password,
            tls: self.tls,
            keyspace: self.keyspace,
            replication: self.replication,
            connect_timeout: self.connect_timeout,
            request_timeout: self.request_timeout,
            speculative_delay: Some(SILENCE),
            speculative_attempts: OTHER_NODES,
            ..ScyllaOptions::default()
        }
    }
}

/// A [`Ledger`] in a Cassandra or Scylla cluster. It has connections of its own: values and history do not stand before an append.
pub struct CassandraLedger {
    database: Arc<LedgerDatabase>,
    /// Timestamp of the last sign of life, above all that were there before the first.
    last_beat: OnceCell<AtomicI64>,
}

/// The database as this process sees it.
struct LedgerDatabase {
    options: ScyllaOptions,
    session: AsyncMutex<Option<Arc<Session>>>,
    ready: Mutex<Option<Arc<LedgerConnection>>>,
    opening: AsyncMutex<Option<LedgerOpening>>,
    /// Id of the cluster whose rows this process writes and reads: the first that it met.
    cluster: OnceLock<Uuid>,
}

/// The task that makes a connection.
type LedgerOpening = JoinHandle<Result<Arc<LedgerConnection>, NotReady>>;

/// A session, and statements on tables that are there.
struct LedgerConnection {
    session: Arc<Session>,
    statements: Statements,
    coordinators: Arc<Coordinators>,
}

/// No connection.
#[derive(Debug, Clone)]
enum NotReady {
    /// Tables or keyspace are missing.
    NotCreated(String),
    Unknown(String),
}

impl From<NotReady> for Unknown {
    fn from(not_ready: NotReady) -> Self {
        match not_ready {
            NotReady::NotCreated(text) | NotReady::Unknown(text) => Self(text),
        }
    }
}

impl From<StoreError> for NotReady {
    fn from(error: StoreError) -> Self {
        Self::Unknown(error.to_string())
    }
}

/// Returns the error for a row that no gateway can have written.
fn damaged(error: impl fmt::Display) -> Unknown {
    Unknown(format!("a row of the ledger's tables is not one of this version: {error}"))
}

impl LedgerDatabase {
    /// The session, made if it is not there.
    async fn session(&self) -> Result<Arc<Session>, StoreError> {
        let mut kept = self.session.lock().await;
        if let Some(session) = &*kept {
            return Ok(Arc::clone(session));
        }
        let session = Arc::new(cluster::connect(&self.options).await?);
        Ok(Arc::clone(kept.insert(session)))
    }

    /// The connection, made if it is not there. Cancel safe: it is made even if nobody waits for it.
    async fn connection(self: &Arc<Self>) -> Result<Arc<LedgerConnection>, NotReady> {
        let ready = || self.ready.lock().clone();
        if let Some(connection) = ready() {
            return Ok(connection);
        }
        let mut opening = self.opening.lock().await;
        if let Some(connection) = ready() {
            return Ok(connection);
        }
        let task = opening.get_or_insert_with(|| tokio::spawn(Arc::clone(self).open()));
        let opened = task.await;
        *opening = None;
        opened.unwrap_or_else(|e| Err(NotReady::Unknown(format!("connect: {e}"))))
    }

    async fn open(self: Arc<Self>) -> Result<Arc<LedgerConnection>, NotReady> {
        let opened = self.try_open().await;
        match &opened {
            Ok(connection) => *self.ready.lock() = Some(Arc::clone(connection)),
            Err(NotReady::NotCreated(_)) => {}
            Err(NotReady::Unknown(_)) => tokio::time::sleep(PAUSE).await,
        }
        opened
    }

    async fn try_open(&self) -> Result<Arc<LedgerConnection>, NotReady> {
        let session = self.session().await?;
        let keyspace = &self.options.keyspace;
        let statements = match Statements::prepare(&session, keyspace).await {
            Ok(statements) => statements,
            Err(error) => return Err(self.not_prepared(&error)),
        };
        let coordinators = Coordinators::new(cluster::balancing(&self.options), &session);
        Ok(Arc::new(LedgerConnection { session, statements, coordinators }))
    }

    fn not_prepared(&self, error: &PrepareError) -> NotReady {
        let text = errors::not_prepared(error).to_string();
        if errors::preparing(error) != ErrorKind::Schema {
            return NotReady::Unknown(text);
        }
        let keyspace = &self.options.keyspace;
        NotReady::NotCreated(format!(
            "keyspace {keyspace} lacks tables of the ledger: run `mqtt-server cluster create` once ({text})"
        ))
    }

    /// Runs a statement; `doing` is verb and object, for the error.
    async fn ask(
        &self,
        connection: &Arc<LedgerConnection>,
        doing: &str,
        statement: &PreparedStatement,
        values: impl SerializeRow,
    ) -> Result<QueryResult, Unknown> {
        let statement = connection.coordinators.watched(statement);
        let answer = connection.session.execute_unpaged(&statement, values).await;
        answer.map_err(|error| self.failed(connection, doing, &error))
    }

    /// The error of a request. Statements of tables that are not what they were are made again.
    fn failed(&self, connection: &Arc<LedgerConnection>, doing: &str, error: &ExecutionError) -> Unknown {
        if errors::kind(error) == ErrorKind::Schema {
            let mut ready = self.ready.lock();
            if ready.as_ref().is_some_and(|current| Arc::ptr_eq(current, connection)) {
                *ready = None;
            }
        }
        Unknown(errors::failed(doing, error, &self.options).to_string())
    }

    /// Id of the cluster, read if it is not known. Rows are written under it for the life of the process: one that outlives its
    /// cluster does not write into the next.
    async fn cluster(&self, connection: &Arc<LedgerConnection>) -> Result<Uuid, Unknown> {
        if let Some(id) = self.cluster.get() {
            return Ok(*id);
        }
        let _ = self.owners(connection).await?;
        let missing =
            || Unknown("the cluster was not created: run `mqtt-server cluster create` once".to_owned());
        self.cluster.get().copied().ok_or_else(missing)
    }

    async fn owners(&self, connection: &Arc<LedgerConnection>) -> Result<Vec<Owner>, Unknown> {
        let answer = self.ask(connection, "read the owners", &connection.statements.owners, ()).await?;
        let rows = answer.into_rows_result().map_err(damaged)?;
        let found = rows.maybe_first_row::<(Uuid, Vec<StoredOwner>)>().map_err(damaged)?;
        let Some((id, owners)) = found else { return Ok(Vec::new()) };
        self.cluster.get_or_init(|| id);
        owners.into_iter().map(owner).collect()
    }

    async fn insert(
        &self,
        connection: &Arc<LedgerConnection>,
        cluster: Uuid,
        row: &Row,
    ) -> Result<(), Unknown> {
        let (home, stream, epoch, segment) = partition(row.segment)?;
        let (n, part, parts) = (row.n.cast_signed(), i32::from(row.part), i32::from(row.parts));
        let values = (cluster, home, stream, epoch, segment, n, part, parts, &row.data);
        self.ask(connection, "insert a record", &connection.statements.insert, values).await.map(drop)
    }
}

/// An owner in the column: home, node, incarnation, epoch.
type StoredOwner = (i32, String, i64, i64);

fn owner((home, node, incarnation, epoch): StoredOwner) -> Result<Owner, Unknown> {
    let home = u16::try_from(home).map_err(damaged)?;
    let (incarnation, epoch) = (incarnation.cast_unsigned(), epoch.cast_unsigned());
    Ok(Owner { home, node: Arc::from(node), incarnation, epoch })
}

/// Home, stream, epoch and number of a segment as columns.
fn partition(segment: Segment) -> Result<(i32, i32, i64, i32), Unknown> {
    let Stream { home, number } = segment.stream;
    let segment_number = i32::try_from(segment.number)
        .map_err(|_| Unknown("an epoch has at most 2147483647 segments".to_owned()))?;
    Ok((i32::from(home), i32::from(number), segment.epoch.cast_signed(), segment_number))
}

impl CassandraLedger {
    /// Connects when first used, inside a Tokio runtime.
    ///
    /// # Errors
    /// [`StoreError::Format`] if the keyspace is not a name.
    pub fn new(options: LedgerOptions) -> Result<Self, StoreError> {
        store_schema::check_keyspace(&options.keyspace)?;
        let database = LedgerDatabase {
            options: options.session(),
            session: AsyncMutex::default(),
            ready: Mutex::default(),
            opening: AsyncMutex::default(),
            cluster: OnceLock::new(),
        };
        Ok(Self { database: Arc::new(database), last_beat: OnceCell::new() })
    }

    async fn insert_rows(&self, rows: Arc<[Row]>) -> Result<Inserted, Unknown> {
        let connection = self.database.connection().await?;
        let cluster = self.database.cluster(&connection).await?;
        if let [row] = &*rows {
            self.database.insert(&connection, cluster, row).await?;
            return Ok(Inserted::Stored);
        }
        let mut under_way = JoinSet::new();
        let mut failed = None;
        for number in 0..rows.len() {
            if under_way.len() == ROWS_AT_ONCE {
                failed = failed.or(ended(under_way.join_next().await));
            }
            if failed.is_some() {
                break;
            }
            let (database, connection, rows) =
                (Arc::clone(&self.database), Arc::clone(&connection), Arc::clone(&rows));
            under_way.spawn(async move { database.insert(&connection, cluster, &rows[number]).await });
        }
        while let Some(inserted) = under_way.join_next().await {
            failed = failed.or(ended(Some(inserted)));
        }
        failed.map_or(Ok(Inserted::Stored), Err)
    }

    async fn read_owners(&self) -> Result<Vec<Owner>, Unknown> {
        let connection = self.database.connection().await?;
        self.database.owners(&connection).await
    }

    /// Pages until `bytes` are there or the row with which they are: the database ends a page where it likes, also one without rows.
    async fn read_rows(&self, segment: Segment, from: (u64, u16), bytes: usize) -> Result<Rows, Unknown> {
        let connection = self.database.connection().await?;
        let cluster = self.database.cluster(&connection).await?;
        let (home, stream, epoch, number) = partition(segment)?;
        let values = (cluster, home, stream, epoch, number, from.0.cast_signed(), i32::from(from.1));
        let mut found = Rows::default();
        let first = (bytes / MAX_ROW).clamp(1, ROWS.0);
        let (mut size, mut page_rows, mut state) = (0, first, PagingState::start());
        loop {
            let mut statement = connection.coordinators.watched(&connection.statements.read);
            statement.set_page_size(i32::try_from(page_rows).unwrap_or(i32::MAX));
            let answer = connection.session.execute_single_page(&statement, values, state).await;
            let (page, next) = answer.map_err(|e| self.database.failed(&connection, "read a segment", &e))?;
            let page = page.into_rows_result().map_err(damaged)?;
            for row in page.rows::<(i64, i32, i32, Bytes)>().map_err(damaged)? {
                let (n, part, parts, data) = row.map_err(damaged)?;
                if size >= bytes && !found.rows.is_empty() {
                    found.more = true;
                    return Ok(found);
                }
                let [part, parts] = [part, parts].map(u16::try_from);
                let (part, parts) = (part.map_err(damaged)?, parts.map_err(damaged)?);
                size += data.len();
                // The page would stay as long as any of its rows.
                let data = Bytes::copy_from_slice(&data);
                found.rows.push(Row { segment, n: n.cast_unsigned(), part, parts, data });
            }
            let ControlFlow::Continue(next) = next.into_paging_control_flow() else { return Ok(found) };
            if size >= bytes && !found.rows.is_empty() {
                found.more = true;
                return Ok(found);
            }
            page_rows = next_rows(found.rows.len(), size);
            state = next;
        }
    }

    async fn delete_rows(&self, segment: Segment) -> Result<(), Unknown> {
        let connection = self.database.connection().await?;
        let cluster = self.database.cluster(&connection).await?;
        let (home, stream, epoch, number) = partition(segment)?;
        let values = (cluster, home, stream, epoch, number);
        self.database.ask(&connection, "delete a segment", &connection.statements.delete, values).await?;
        Ok(())
    }

    async fn read_view(&self) -> Result<Option<StoredView>, Unknown> {
        let connection = match self.database.connection().await {
            Ok(connection) => connection,
            Err(NotReady::NotCreated(_)) => return Ok(None),
            Err(not_ready) => return Err(not_ready.into()),
        };
        let answer = self.database.ask(&connection, "read the view", &connection.statements.view, ()).await?;
        let rows = answer.into_rows_result().map_err(damaged)?;
        let found = rows.maybe_first_row::<(Uuid, i64, Bytes, Vec<StoredOwner>)>().map_err(damaged)?;
        let Some((id, version, document, owners)) = found else { return Ok(None) };
        self.database.cluster.get_or_init(|| id);
        let owners = owners.into_iter().map(owner).collect::<Result<_, _>>()?;
        Ok(Some(StoredView { cluster: id.as_u128(), version: version.cast_unsigned(), document, owners }))
    }

    async fn swap_view(&self, new: &StoredView) -> Result<Swapped, Unknown> {
        let connection = self.database.connection().await?;
        let statements = &connection.statements;
        let id = Uuid::from_u128(new.cluster);
        let owners: Vec<_> = new
            .owners
            .iter()
            .map(|o| (i32::from(o.home), &*o.node, o.incarnation.cast_signed(), o.epoch.cast_signed()))
            .collect();
        let (version, document) = (new.version.cast_signed(), &new.document);
        let before = new.version.wrapping_sub(1).cast_signed();
        let doing = "replace the view";
        let answer = if before == 0 {
            let values = (id, version, document, owners);
            self.database.ask(&connection, doing, &statements.create_view, values).await?
        } else {
            let values = (version, document, owners, before, id);
            self.database.ask(&connection, doing, &statements.swap_view, values).await?
        };
        let swapped = is_applied(answer)?;
        if swapped == Swapped::Applied {
            self.database.cluster.get_or_init(|| id);
        }
        Ok(swapped)
    }

    async fn write_beat(&self, beat: &Beat) -> Result<Vec<Owner>, Unknown> {
        let connection = self.database.connection().await?;
        let last = self.last_beat.get_or_try_init(|| self.newest_beat(&connection)).await?;
        let timestamp = last.fetch_add(1, Ordering::Relaxed) + 1;
        let (incarnation, number) = (beat.incarnation.cast_signed(), beat.number.cast_signed());
        let values = (&*beat.node, incarnation, number, &beat.about, timestamp);
        self.database.ask(&connection, "store a sign of life", &connection.statements.beat, values).await?;
        self.database.owners(&connection).await
    }

    /// The highest timestamp of a sign of life: a process that counts on from there writes over those before it, whatever its clock.
    async fn newest_beat(&self, connection: &Arc<LedgerConnection>) -> Result<AtomicI64, Unknown> {
        let statement = &connection.statements.newest_beats;
        let answer = self.database.ask(connection, "read the signs of life", statement, ()).await?;
        let rows = answer.into_rows_result().map_err(damaged)?;
        let mut newest = 0;
        for row in rows.rows::<(Option<i64>,)>().map_err(damaged)? {
            newest = row.map_err(damaged)?.0.unwrap_or_default().max(newest);
        }
        Ok(AtomicI64::new(newest))
    }

    async fn read_beats(&self) -> Result<Vec<Beat>, Unknown> {
        let connection = self.database.connection().await?;
        let statement = &connection.statements.beats;
        let answer = self.database.ask(&connection, "read the signs of life", statement, ()).await?;
        let rows = answer.into_rows_result().map_err(damaged)?;
        let mut beats = BTreeMap::new();
        for row in rows.rows::<(String, i64, i64, Bytes)>().map_err(damaged)? {
            let (node, incarnation, number, about) = row.map_err(damaged)?;
            let node: Arc<str> = Arc::from(node);
            let about = Bytes::copy_from_slice(&about);
            let (incarnation, number) = (incarnation.cast_unsigned(), number.cast_unsigned());
            beats.insert(Arc::clone(&node), Beat { node, incarnation, number, about });
        }
        Ok(beats.into_values().collect())
    }

    async fn create_tables(&self) -> Result<(), Unknown> {
        let options = &self.database.options;
        let session = self.database.session().await.map_err(|e| Unknown(e.to_string()))?;
        let (keyspace, replication) = (&options.keyspace, &options.replication);
        let made = format!("CREATE KEYSPACE IF NOT EXISTS {keyspace} WITH replication = {replication}");
        let tables = TABLES.iter().map(|(_, text)| text.replace("{}", keyspace));
        for text in std::iter::once(made).chain(tables) {
            store_schema::change(&session, options, text).await.map_err(|e| Unknown(e.to_string()))?;
        }
        Ok(())
    }
}

/// The error of a row's task.
fn ended(inserted: Option<Result<Result<(), Unknown>, tokio::task::JoinError>>) -> Option<Unknown> {
    match inserted? {
        Ok(inserted) => inserted.err(),
        Err(e) => Some(Unknown(format!("insert a record: {e}"))),
    }
}

/// The first column of the answer tells; which others there are depends on the database and on the answer.
fn is_applied(answer: QueryResult) -> Result<Swapped, Unknown> {
    let rows = answer.into_rows_result().map_err(damaged)?;
    let row = rows.first_row::<AnswerRow>().map_err(damaged)?;
    match row.columns.first() {
        Some(Some(CqlValue::Boolean(true))) => Ok(Swapped::Applied),
        Some(Some(CqlValue::Boolean(false))) => Ok(Swapped::Conflict),
        _ => Err(damaged("the answer to a conditional write does not begin with a boolean")),
    }
}

impl Ledger for CassandraLedger {
    fn insert(&self, _owner: &Owner, rows: Arc<[Row]>) -> BoxFuture<'_, Result<Inserted, Unknown>> {
        Box::pin(self.insert_rows(rows))
    }

    fn owners(&self) -> BoxFuture<'_, Result<Vec<Owner>, Unknown>> {
        Box::pin(self.read_owners())
    }

    fn read(&self, segment: Segment, from: (u64, u16), bytes: usize) -> BoxFuture<'_, Result<Rows, Unknown>> {
        Box::pin(self.read_rows(segment, from, bytes))
    }

    fn delete(&self, segment: Segment) -> BoxFuture<'_, Result<(), Unknown>> {
        Box::pin(self.delete_rows(segment))
    }

    fn view(&self) -> BoxFuture<'_, Result<Option<StoredView>, Unknown>> {
        Box::pin(self.read_view())
    }

    fn swap(&self, new: &StoredView) -> BoxFuture<'_, Result<Swapped, Unknown>> {
        let new = new.clone();
        Box::pin(async move { self.swap_view(&new).await })
    }

    fn beat(&self, beat: &Beat) -> BoxFuture<'_, Result<Vec<Owner>, Unknown>> {
        let beat = beat.clone();
        Box::pin(async move { self.write_beat(&beat).await })
    }

    fn beats(&self) -> BoxFuture<'_, Result<Vec<Beat>, Unknown>> {
        Box::pin(self.read_beats())
    }

    fn create(&self) -> BoxFuture<'_, Result<(), Unknown>> {
        Box::pin(self.create_tables())
    }

    fn findings(&self) -> BoxFuture<'_, Result<Vec<Finding>, Unknown>> {
        Box::pin(findings::read(&self.database))
    }
}
