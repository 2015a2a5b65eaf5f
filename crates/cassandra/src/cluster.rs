//! The driver session of the process, its statements, and what both do when the database is away or not as it was.
//!
//! The first call that needs the session makes it, in a task of its own, so that callers may give up waiting. From then
//! on the driver keeps its connections by itself. Statements belong to a schema that was checked; when the database
//! answers that it has changed, they are prepared again, and missing tables are made.

use std::{sync::Arc, time::Duration};

use gateway_core::database::Consistency;
use parking_lot::Mutex;
use scylla::{
    client::{
        execution_profile::ExecutionProfile, session::Session, session::TlsContext,
        session_builder::SessionBuilder,
    },
    errors::ExecutionError,
    policies::{
        load_balancing::{DefaultPolicy, LoadBalancingPolicy},
        speculative_execution::SimpleSpeculativeExecutionPolicy,
    },
    statement::{Statement, prepared::PreparedStatement},
};
use tokio::{
    sync::Mutex as AsyncMutex,
    task::JoinHandle,
    time::{Instant, timeout},
};

use super::{
    ScyllaOptions, StoreError,
    errors::{self, ErrorKind},
    history::HistoryStatements,
    limit::{Limit, RequestPermit},
    options, row,
    schema::{self, TableIds},
    shadows,
    topics::KnownTopics,
    write::unhurried,
};

/// Rows of one answer of the database, unless a statement is given another number.
const ROWS: i32 = 100;

/// Pause after a cluster did not let us in: meanwhile calls fail at once.
const PAUSE: Duration = Duration::from_secs(1);

/// A session not established within this time is begun anew. Nodes that accept connections and say nothing have no
/// other limit in the driver.
const CONNECT_LIMIT: Duration = Duration::from_secs(60);

/// A node that is silent for this long is pinged, and its connection is closed if it does not answer.
const KEEPALIVE: Duration = Duration::from_secs(10);

/// The task that makes a connection.
type Opening = JoinHandle<Result<Arc<ClusterSession>, StoreError>>;

/// The cluster as this process sees it.
pub(super) struct Cluster {
    pub(super) options: Arc<ScyllaOptions>,
    /// Topics of each device, as far as they are known.
    pub(super) known: KnownTopics,
    pub(super) writes: Limit,
    reads: Limit,
    state: Mutex<Contact>,
    opening: AsyncMutex<Option<Opening>>,
}

#[derive(Default)]
struct Contact {
    /// Outlives the connections.
    session: Option<Arc<Session>>,
    connection: Option<Arc<ClusterSession>>,
    /// Of the newest connection.
    tables: TableIds,
    failed: Option<(Instant, StoreError)>,
}

/// A session with statements for a schema that was found right.
pub(super) struct ClusterSession {
    pub(super) session: Arc<Session>,
    /// Ids of the tables that were there when the statements were made.
    pub(super) tables: TableIds,
    pub(super) put_by_device: PreparedStatement,
    pub(super) put_by_topic: PreparedStatement,
    pub(super) drop_by_device: PreparedStatement,
    pub(super) drop_by_topic: PreparedStatement,
    pub(super) get_by_device: PreparedStatement,
    pub(super) get_by_topic: PreparedStatement,
    pub(super) list: PreparedStatement,
    pub(super) topics: PreparedStatement,
    pub(super) history: HistoryStatements,
    pub(super) shadows: shadows::ShadowStatements,
}

impl Cluster {
    pub(super) fn new(options: ScyllaOptions) -> Arc<Self> {
        Arc::new(Self {
            known: KnownTopics::new(options.topics_per_device),
            writes: Limit::new(options.concurrency),
            reads: Limit::new(options.concurrency),
            options: Arc::new(options),
            state: Mutex::default(),
            opening: AsyncMutex::default(),
        })
    }

    /// The connection, made if it is not there. Cancel safe: it is made even if nobody waits for it.
    pub(super) async fn connection(self: &Arc<Self>) -> Result<Arc<ClusterSession>, StoreError> {
        if let Some(known) = self.known_state() {
            return known;
        }
        let mut opening = self.opening.lock().await;
        if let Some(known) = self.known_state() {
            return known;
        }
        let task = opening.get_or_insert_with(|| tokio::spawn(Arc::clone(self).open()));
        let opened = task.await;
        *opening = None;
        opened.unwrap_or_else(|e| Err(StoreError::Unavailable(format!("connect: {e}"))))
    }

    /// Returns the connection, or the error of a recent attempt, if known without asking the database.
    fn known_state(&self) -> Option<Result<Arc<ClusterSession>, StoreError>> {
        let state = self.state.lock();
        if let Some(connection) = &state.connection {
            return Some(Ok(Arc::clone(connection)));
        }
        let (at, error) = state.failed.as_ref()?;
        (at.elapsed() < PAUSE).then(|| Err(error.clone()))
    }

    /// `connection` met a schema that is not what its statements expect, or may be: the next call looks at it.
    fn suspect(&self, connection: &Arc<ClusterSession>) {
        let mut state = self.state.lock();
        if state.connection.as_ref().is_some_and(|current| Arc::ptr_eq(current, connection)) {
            state.connection = None;
        }
    }

    /// Returns whether the next call looks at the schema, or one did since `connection` was made.
    pub(super) fn is_suspected(&self, connection: &Arc<ClusterSession>) -> bool {
        !self.state.lock().connection.as_ref().is_some_and(|current| Arc::ptr_eq(current, connection))
    }

    /// Asks the database: one of the reads under way. `doing` is verb and object, for the error.
    pub(super) async fn ask<T>(
        &self,
        connection: &Arc<ClusterSession>,
        doing: &str,
        request: impl Future<Output = Result<T, ExecutionError>>,
    ) -> Result<T, StoreError> {
        let permit = self.reads.permit().await;
        let answer = request.await;
        self.answered(connection, permit, &answer);
        answer.map_err(|e| errors::failed(doing, &e, &self.options))
    }

    /// Notes the news of an answer about load and schema.
    pub(super) fn answered<T>(
        &self,
        connection: &Arc<ClusterSession>,
        permit: RequestPermit<'_>,
        answer: &Result<T, ExecutionError>,
    ) {
        match answer.as_ref().err().map(errors::kind) {
            None => permit.good(),
            Some(ErrorKind::Overloaded) => permit.overloaded(),
            Some(ErrorKind::Schema | ErrorKind::Rejected) => self.suspect(connection),
            Some(ErrorKind::Away | ErrorKind::Denied | ErrorKind::Clock) => {}
        }
    }

    async fn open(self: Arc<Self>) -> Result<Arc<ClusterSession>, StoreError> {
        let opened = self.try_open().await;
        let mut state = self.state.lock();
        match &opened {
            Ok(connection) => (state.connection, state.failed) = (Some(Arc::clone(connection)), None),
            Err(e) => state.failed = Some((Instant::now(), e.clone())),
        }
        drop(state);
        opened
    }

    async fn try_open(&self) -> Result<Arc<ClusterSession>, StoreError> {
        let options = &*self.options;
        let kept = self.state.lock().session.clone();
        let session = match kept {
            Some(session) => session,
            None => {
                let session = Arc::new(connect(options).await?);
                self.state.lock().session = Some(Arc::clone(&session));
                session
            }
        };
        let tables = schema::ready(&session, options).await?;
        let before = std::mem::replace(&mut self.state.lock().tables, tables.clone());
        if before != tables {
            // The tables may be empty now.
            self.known.clear();
        }
        Ok(Arc::new(ClusterSession::prepare(session, tables, options).await?))
    }
}

/// Nodes for a request: of the datacenter that is asked, those that have the row first.
pub(super) fn balancing(options: &ScyllaOptions) -> Arc<dyn LoadBalancingPolicy> {
    let mut balancing = DefaultPolicy::builder();
    if !options.datacenter.is_empty() {
        balancing = balancing.prefer_datacenter(options.datacenter.clone());
    }
    balancing.build()
}

/// A session with the cluster.
pub(super) async fn connect(options: &ScyllaOptions) -> Result<Session, StoreError> {
    let speculation = options.speculative_delay.map(|retry_interval| {
        let max_retry_count = options.speculative_attempts;
        Arc::new(SimpleSpeculativeExecutionPolicy { max_retry_count, retry_interval }) as Arc<_>
    });
    let profile = ExecutionProfile::builder()
        .request_timeout(Some(options.request_timeout))
        .load_balancing_policy(balancing(options))
        .speculative_execution_policy(speculation)
        .build();
    let mut builder = SessionBuilder::new()
        .known_nodes(&options.contact_points)
        .connection_timeout(options.connect_timeout)
        .keepalive_interval(KEEPALIVE)
        .keepalive_timeout(KEEPALIVE)
        .compression(options::algorithm(options.compression))
        .tls_context(options.tls.as_ref().map(|tls| TlsContext::Rustls023(Arc::clone(tls))))
        .default_execution_profile_handle(profile.into_handle());
    if !options.username.is_empty() {
        builder = builder.user(&options.username, &options.password);
    }
    match timeout(CONNECT_LIMIT, builder.build()).await {
        Ok(built) => built.map_err(|e| errors::not_connected(&e, options)),
        Err(_) => {
            errors::counted(ErrorKind::Away);
            let nodes = options.contact_points.join(",");
            Err(StoreError::Unavailable(format!("connect to {nodes}: no answer in {CONNECT_LIMIT:?}")))
        }
    }
}

impl ClusterSession {
    async fn prepare(
        session: Arc<Session>,
        tables: TableIds,
        options: &ScyllaOptions,
    ) -> Result<Self, StoreError> {
        let keyspace = &options.keyspace;
        let (columns, marks) = (row::COLUMNS, row::MARKS);
        let (write, read) = (options.write_consistency, options.read_consistency);
        let put = async |table: &str| {
            let text = format!(
                "INSERT INTO {keyspace}.{table} ({columns}) VALUES ({marks}) USING TIMESTAMP ? AND TTL ?"
            );
            prepare(&session, text, write).await.map(|statement| unhurried(&session, statement))
        };
        let select = |what: &str, table: &str, which: &str| {
            format!("SELECT {what} FROM {keyspace}.{table} WHERE {which}")
        };
        let drop = |table: &str, which: &str| {
            format!("DELETE FROM {keyspace}.{table} USING TIMESTAMP ? WHERE {which}")
        };
        let one = drop("latest_by_device", "device = ? AND topic = ?");
        let of_device = |what: &str, which: &str| select(what, "latest_by_device", which);
        Ok(Self {
            put_by_device: put("latest_by_device").await?,
            put_by_topic: put("latest_by_topic").await?,
            drop_by_device: prepare(&session, one, write).await?,
            drop_by_topic: prepare(&session, drop("latest_by_topic", "topic = ?"), write).await?,
            get_by_device: prepare(&session, of_device(columns, "device = ? AND topic = ?"), read).await?,
            get_by_topic: prepare(&session, select(columns, "latest_by_topic", "topic = ?"), read).await?,
            list: prepare(&session, of_device(columns, "device = ? AND topic > ?"), read).await?,
            topics: prepare(&session, of_device("topic, version, server", "device = ? LIMIT ?"), read)
                .await?,
            history: HistoryStatements::prepare(&session, options).await?,
            shadows: shadows::ShadowStatements::prepare(&session, options).await?,
            session,
            tables,
        })
    }
}

/// An idempotent statement.
pub(super) async fn prepare(
    session: &Session,
    text: String,
    level: Consistency,
) -> Result<PreparedStatement, StoreError> {
    let prepared = session.prepare(Statement::new(text)).await;
    let mut statement = prepared.map_err(|e| errors::not_prepared(&e))?;
    statement.set_is_idempotent(true);
    statement.set_consistency(options::level(level));
    statement.set_page_size(ROWS);
    Ok(statement)
}
