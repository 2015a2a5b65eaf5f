//! One connection to one server, set up and watched.
//!
//! A session carries out one statement at a time. So a warning that comes with an answer belongs to that statement, and statements
//! behind one that waits for the standby wait anyway: a server works off what is pipelined to a session one by one, each with a wait
//! of its own.

use std::{
    collections::HashMap,
    future::poll_fn,
    hash::{BuildHasher, RandomState},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{task::JoinHandle, time::timeout};
use tokio_postgres::{
    AsyncMessage, Client, Config, Connection, NoTls, Row, Socket, Statement,
    config::SslMode,
    error::{Severity, SqlState},
    tls::TlsStream,
    types::{ToSql, Type},
};

use super::{
    PostgresSettings,
    sql::{self, Query},
    tls::MakeTls,
};

/// A parameter of a statement.
pub(super) type Param = Box<dyn ToSql + Send + Sync>;

/// Oldest version of the server: `plan_cache_mode`, and locks that are rechecked as the statements expect.
const OLDEST: i32 = 120_000;

/// Time for opening a session on one host.
const OPEN_LIMIT: Duration = Duration::from_secs(5);

/// A session that is set up.
pub(super) struct ServerSession {
    client: Client,
    /// The task that moves bytes.
    driver: JoinHandle<()>,
    /// Last warning that came.
    warning: Arc<Mutex<Option<String>>>,
    statements: HashMap<Query, Statement>,
    schema: Arc<str>,
    /// Value of a setting of this session alone.
    mark: String,
    limit: Duration,
    pub(super) host: String,
    /// 0 if the server does not tell.
    pub(super) timeline: u32,
}

/// A statement without a usable answer.
#[derive(Debug, Clone)]
pub(super) struct StatementError {
    pub(super) text: String,
    /// Use of the session afterwards.
    pub(super) verdict: Verdict,
}

/// Verdict of a failed statement on its session, or of a failed opening on the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The session goes on: the server has refused this statement.
    Sound,
    /// The tables are not there.
    NoTables,
    /// The session is lost, or this server cannot be used now.
    Broken,
    /// The session is silent: the statement may still be under way.
    Silent,
    /// The server can never be used as it is set up.
    Unfit,
}

impl StatementError {
    fn new(verdict: Verdict, text: impl Into<String>) -> Self {
        Self { text: text.into(), verdict }
    }

    /// Of the driver, at `doing`.
    fn of(doing: &str, error: &tokio_postgres::Error) -> Self {
        let Some(answer) = error.as_db_error() else {
            let source = std::error::Error::source(error).map(|source| format!(": {source}"));
            return Self::new(Verdict::Broken, format!("{doing}: {error}{}", source.unwrap_or_default()));
        };
        let text = format!("{doing}: {} ({})", answer.message(), answer.code().code());
        let code = answer.code();
        if [SqlState::UNDEFINED_TABLE, SqlState::INVALID_SCHEMA_NAME].contains(code) {
            return Self::new(
                Verdict::NoTables,
                format!("{text}: make the tables with `mqtt-server cluster create`"),
            );
        }
        if *code == SqlState::INVALID_SQL_STATEMENT_NAME {
            return Self::pooled();
        }
        let is_sound = ["22", "23", "40", "42", "53", "54", "55"].contains(&&code.code()[..2]);
        Self::new(if is_sound { Verdict::Sound } else { Verdict::Broken }, text)
    }

    fn pooled() -> Self {
        Self::new(
            Verdict::Unfit,
            "there is a pooler in transaction mode before PostgreSQL, which gives each statement another session: name the server \
             itself, or a pool in session mode",
        )
    }
}

impl ServerSession {
    /// Connects to a host, `name` or `name:port`, and sets the session up; `name` is its application name.
    pub(super) async fn open(
        host: String,
        name: String,
        settings: Arc<PostgresSettings>,
    ) -> Result<Self, StatementError> {
        let opened = timeout(OPEN_LIMIT, Self::try_open(&host, &name, &settings)).await;
        let silent = || StatementError::new(Verdict::Broken, format!("no answer in {OPEN_LIMIT:?}"));
        opened.unwrap_or_else(|_| Err(silent())).map_err(|failure| StatementError {
            text: format!("{host}: {}", failure.text),
            verdict: failure.verdict,
        })
    }

    async fn try_open(host: &str, name: &str, settings: &PostgresSettings) -> Result<Self, StatementError> {
        let (host_name, port) = split_port(host);
        let mut config = Config::new();
        config
            .host(host_name)
            .port(port)
            .user(&settings.user)
            .password(&settings.password)
            .dbname(&settings.database)
            .application_name(name)
            .connect_timeout(OPEN_LIMIT)
            .keepalives_idle(settings.answer_limit.max(Duration::from_secs(1)))
            .tcp_user_timeout(settings.answer_limit);
        let warning = Arc::new(Mutex::new(None));
        let refused = |e| StatementError::of("connect", &e);
        let (client, driver) = if let Some(tls) = &settings.tls {
            config.ssl_mode(if settings.tls_required { SslMode::Require } else { SslMode::Prefer });
            let (client, connection) = config.connect(MakeTls(Arc::clone(tls))).await.map_err(refused)?;
            (client, tokio::spawn(drive(connection, Arc::clone(&warning))))
        } else {
            config.ssl_mode(SslMode::Disable);
            let (client, connection) = config.connect(NoTls).await.map_err(refused)?;
            (client, tokio::spawn(drive(connection, Arc::clone(&warning))))
        };
        let mut session = Self {
            client,
            driver,
            warning,
            statements: HashMap::new(),
            schema: Arc::clone(&settings.schema),
            mark: format!("{:016x}", RandomState::new().hash_one(name)),
            limit: settings.answer_limit,
            host: host.to_owned(),
            timeline: 0,
        };
        session.set_up().await?;
        Ok(session)
    }

    async fn set_up(&mut self) -> Result<(), StatementError> {
        let asked = |e| StatementError::of("set up the session", &e);
        let greeting = self.client.query_typed(&sql::greeting(), &[]).await.map_err(asked)?;
        let Some(row) = greeting.first() else {
            return Err(StatementError::new(Verdict::Broken, "it answers nothing"));
        };
        let (is_read_only, version) = (row.get::<_, bool>(0), row.get::<_, i32>(1));
        if version < OLDEST {
            let text = format!("PostgreSQL {} is too old: version 12 or later is needed", version / 10_000);
            return Err(StatementError::new(Verdict::Unfit, text));
        }
        if is_read_only {
            return Err(StatementError::new(Verdict::Broken, "is a standby, or takes no writes"));
        }
        // A session that is new has none.
        if row.get::<_, Option<String>>(2).is_some_and(|mark| !mark.is_empty()) {
            return Err(StatementError::pooled());
        }
        let mark: &(dyn ToSql + Sync) = &self.mark;
        self.client.query_typed(sql::SETTINGS, &[(mark, Type::TEXT)]).await.map_err(asked)?;
        // Services that hide their log tell no timeline; they decide themselves who is the primary.
        if let Ok(rows) = self.client.query_typed(sql::TIMELINE, &[]).await {
            self.timeline = rows.first().map_or(0, |row| row.get::<_, i32>(0).cast_unsigned());
        }
        Ok(())
    }

    /// Carries out a statement. Not cancel safe: it is carried out or not.
    pub(super) async fn query(&mut self, query: Query, params: &[Param]) -> Result<Vec<Row>, StatementError> {
        let limit = self.limit;
        match timeout(limit, self.ask(query, params)).await {
            Ok(answer) => answer,
            Err(_) => Err(self.silent(limit)),
        }
    }

    async fn ask(&mut self, query: Query, params: &[Param]) -> Result<Vec<Row>, StatementError> {
        *self.warning.lock() = None;
        let failed = |e| StatementError::of("carry out a statement", &e);
        let statement = match self.statements.get(&query) {
            Some(statement) => statement,
            None => {
                let statement = self.client.prepare(&sql::text(&self.schema, query)).await.map_err(failed)?;
                self.statements.entry(query).or_insert(statement)
            }
        };
        let params: Vec<&(dyn ToSql + Sync)> =
            params.iter().map(|param| &**param as &(dyn ToSql + Sync)).collect();
        let rows = self.client.query(statement, &params).await.map_err(failed)?;
        if let Some(warning) = self.warning.lock().take() {
            return Err(StatementError::new(Verdict::Sound, format!("answered with a warning: {warning}")));
        }
        let is_marked = |row: &Row| {
            let mark = row.try_get::<_, Option<&str>>(row.len() - 1);
            mark.is_ok_and(|mark| mark == Some(&self.mark))
        };
        if rows.iter().all(is_marked) { Ok(rows) } else { Err(StatementError::pooled()) }
    }

    /// Makes the tables unless they are there.
    pub(super) async fn make_tables(&mut self) -> Result<(), StatementError> {
        let limit = self.limit;
        match timeout(limit, self.client.batch_execute(&sql::tables(&self.schema))).await {
            Ok(made) => made.map_err(|e| StatementError::of("make the tables", &e)),
            Err(_) => Err(self.silent(limit)),
        }
    }

    fn silent(&self, limit: Duration) -> StatementError {
        let text = format!(
            "{}: no answer in {limit:?}: it, its network or its synchronous standby is away",
            self.host
        );
        StatementError::new(Verdict::Silent, text)
    }

    /// Ends when the connection has ended; not to be called again then.
    pub(super) async fn closed(&mut self) {
        let _ = (&mut self.driver).await;
    }
}

impl Drop for ServerSession {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// Moves the bytes of a connection, and keeps its last warning. Messages come in the order in which the server sent them, so that a
/// warning is kept before the end of its statement is told.
async fn drive<T>(mut connection: Connection<Socket, T>, warning: Arc<Mutex<Option<String>>>)
where
    T: TlsStream + Unpin,
{
    while let Some(Ok(message)) = poll_fn(|cx| connection.poll_message(cx)).await {
        if let AsyncMessage::Notice(notice) = message
            && !matches!(
                notice.parsed_severity(),
                Some(Severity::Notice | Severity::Info | Severity::Log | Severity::Debug)
            )
        {
            *warning.lock() = Some(notice.message().to_owned());
        }
    }
}

/// Host and port; 5432 if it is not said. An address of IPv6 stands in brackets before a port.
pub(super) fn split_port(host: &str) -> (&str, u16) {
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if !name.contains(':') || name.ends_with(']') => (name, port.parse().ok()),
        _ => (host, None),
    };
    (name.trim_matches(['[', ']']), port.unwrap_or(5432))
}
