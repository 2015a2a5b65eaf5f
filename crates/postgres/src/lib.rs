//! The ledger of a cluster in PostgreSQL.
//!
//! Inserting and fencing are one statement: it locks the row of its home, in which the owner stands, and inserts. So an insert is
//! answered with `Owned` or `Fenced`, after one round trip. What holds this together:
//!
//! - **A lock is the fence.** A plain read of the owner takes its snapshot before a takeover and inserts after it.
//! - **Every answer that counts is that of a write**, and so waits for the synchronous standby: inserts, repeats of them, the owners,
//!   the view, signs of life. A primary that was cut off from its standby answers none of them. Rows are read plainly: a taker reads
//!   them after its change of the view, and writes the last record of each stream again.
//! - **Nothing is cancelled.** Statements run in tasks of the engine, whoever waits for them. A commit whose wait for the standby was
//!   cancelled by others ends with a warning; then the answer is unknown.
//! - **Servers of an older timeline are not used** once a newer one was seen.
//!
//! Three sessions: one inserts, in batches; one keeps the lease (signs of life and owners), which must not wait behind 16 MiB of
//! rows; one does the rest.

mod appends;
mod findings;
mod keeper;
mod session;
mod sql;
#[cfg(test)]
mod tests;
mod tls;

use std::{
    error::Error,
    fmt,
    sync::{Arc, atomic::AtomicU32},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use ledger::{
    Beat, BoxFuture, Finding, Inserted, Ledger, Owner, Row, Rows, Segment, StoredView, Swapped, Unknown,
};
use rustls::ClientConfig;
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, to_sql_checked};

use appends::{Appends, Data};
use keeper::KeptSession;
use session::{Param, StatementError, Verdict};
use sql::Query;

/// Bytes of a small row: a read looks at as many rows as would be needed of these, within [`READ_ROWS`].
const SMALL_ROW: usize = 256;

/// Fewest and most rows that one read looks at.
const READ_ROWS: (usize, usize) = (64, 4096);

/// Address of the database, and the login.
#[derive(Clone)]
pub struct PostgresSettings {
    /// Servers, primary and standbys in any order, `host` or `host:port`; port 5432 if it is not said.
    pub hosts: Vec<String>,
    /// User name.
    pub user: String,
    /// Password; empty if the server asks for none.
    pub password: String,
    /// Database.
    pub database: String,
    /// Schema of the tables: lower-case letters, digits and `_`.
    pub schema: Arc<str>,
    /// TLS to the servers, which are verified by their names; without it connections are plain.
    pub tls: Option<Arc<ClientConfig>>,
    /// Connect only with TLS; otherwise plainly to a server that has none.
    pub tls_required: bool,
    /// Name of the cluster, the key of its rows.
    pub cluster: Arc<str>,
    /// A session that does not answer in this time is replaced.
    pub answer_limit: Duration,
}

impl Default for PostgresSettings {
    fn default() -> Self {
        Self {
            hosts: vec!["localhost".into()],
            user: String::new(),
            password: String::new(),
            database: String::new(),
            schema: "mqtt_server".into(),
            tls: None,
            tls_required: true,
            cluster: "default".into(),
            answer_limit: Duration::from_secs(5),
        }
    }
}

impl fmt::Debug for PostgresSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresSettings")
            .field("hosts", &self.hosts)
            .field("user", &self.user)
            .field("database", &self.database)
            .field("schema", &self.schema)
            .field("tls", &self.tls.is_some())
            .field("tls_required", &self.tls_required)
            .field("cluster", &self.cluster)
            .field("answer_limit", &self.answer_limit)
            .finish_non_exhaustive()
    }
}

/// The ledger in PostgreSQL. Its sessions are opened at once and replaced for ever; calls wait for them as long as for an answer.
pub struct PostgresLedger {
    settings: Arc<PostgresSettings>,
    appends: Appends,
    lease: KeptSession,
    rest: KeptSession,
}

impl PostgresLedger {
    /// Starts its tasks, in the runtime of the caller. They end when it is dropped and what was asked is answered.
    pub fn start(settings: PostgresSettings) -> Self {
        debug_assert!(
            settings.schema.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_'),
            "a schema that needs no quotes"
        );
        let settings = Arc::new(settings);
        let newest = Arc::new(AtomicU32::new(0));
        let kept = |name: &str| KeptSession::start(name, &settings, &newest);
        let cluster = Arc::clone(&settings.cluster);
        let appends = Appends::start(cluster, kept("appends"), settings.answer_limit);
        Self { appends, lease: kept("lease"), rest: kept("rest"), settings }
    }

    fn cluster(&self) -> Param {
        Box::new(self.settings.cluster.to_string())
    }

    /// Cluster and segment, as parameters.
    fn place(&self, segment: Segment) -> Vec<Param> {
        vec![
            self.cluster(),
            Box::new(i32::from(segment.stream.home)),
            Box::new(i16::from(segment.stream.number)),
            Box::new(segment.epoch.cast_signed()),
            Box::new(i64::from(segment.number)),
        ]
    }
}

/// An owner in the columns home, node, incarnation and epoch from `at` on, if there is one.
fn owner(row: &tokio_postgres::Row, at: usize) -> Result<Option<Owner>, Unknown> {
    let Some(home) = get::<Option<i32>>(row, at)? else { return Ok(None) };
    let home = u16::try_from(home).map_err(|_| Unknown(format!("PostgreSQL: there is no home {home}")))?;
    Ok(Some(Owner {
        home,
        node: get::<&str>(row, at + 1)?.into(),
        incarnation: get::<i64>(row, at + 2)?.cast_unsigned(),
        epoch: get::<i64>(row, at + 3)?.cast_unsigned(),
    }))
}

fn owners(rows: &[tokio_postgres::Row], at: usize) -> Result<Vec<Owner>, Unknown> {
    rows.iter().filter_map(|row| owner(row, at).transpose()).collect()
}

/// Value of a column. Another type than expected is that of a table that somebody else has made.
fn get<'a, T: FromSql<'a>>(row: &'a tokio_postgres::Row, column: usize) -> Result<T, Unknown> {
    row.try_get(column).map_err(|e| Unknown(format!("PostgreSQL: a table is not as it was made: {e}")))
}

impl Ledger for PostgresLedger {
    fn insert(&self, owner: &Owner, rows: Arc<[Row]>) -> BoxFuture<'_, Result<Inserted, Unknown>> {
        Box::pin(self.appends.insert(owner.clone(), rows))
    }

    fn owners(&self) -> BoxFuture<'_, Result<Vec<Owner>, Unknown>> {
        Box::pin(async move {
            let rows = self.lease.query(Query::Owners, vec![self.cluster()]).await?;
            owners(&rows, 0)
        })
    }

    fn read(
        &self,
        segment: Segment,
        (n, part): (u64, u16),
        bytes: usize,
    ) -> BoxFuture<'_, Result<Rows, Unknown>> {
        Box::pin(async move {
            let mut params = self.place(segment);
            params.push(Box::new(n.cast_signed()));
            params.push(Box::new(i16::try_from(part).unwrap_or(i16::MAX)));
            let bytes = bytes.max(1);
            params.push(Box::new(i64::try_from(bytes).unwrap_or(i64::MAX)));
            let most = (bytes / SMALL_ROW).clamp(READ_ROWS.0, READ_ROWS.1);
            params.push(Box::new(most as i64));
            let found = self.rest.query(Query::Read, params).await?;
            let mut read = Rows::default();
            let mut size = 0;
            for row in &found {
                let Some(n) = get::<Option<i64>>(row, 0)? else { break };
                let data = Bytes::copy_from_slice(get(row, 3)?);
                size += data.len();
                read.rows.push(Row {
                    segment,
                    n: n.cast_unsigned(),
                    part: get::<i16>(row, 1)?.cast_unsigned(),
                    parts: get::<i16>(row, 2)?.cast_unsigned(),
                    data,
                });
            }
            read.more = size >= bytes || read.rows.len() >= most;
            Ok(read)
        })
    }

    fn delete(&self, segment: Segment) -> BoxFuture<'_, Result<(), Unknown>> {
        Box::pin(async move {
            self.rest.query(Query::Delete, self.place(segment)).await?;
            Ok(())
        })
    }

    fn view(&self) -> BoxFuture<'_, Result<Option<StoredView>, Unknown>> {
        Box::pin(async move {
            let rows = match self.rest.query(Query::View, vec![self.cluster()]).await {
                Err(StatementError { verdict: Verdict::NoTables, .. }) => return Ok(None),
                rows => rows?,
            };
            let Some(first) = rows.first() else { return Ok(None) };
            let Some(ClusterId(cluster)) = get(first, 0)? else { return Ok(None) };
            Ok(Some(StoredView {
                cluster,
                version: get::<i64>(first, 1)?.cast_unsigned(),
                document: Bytes::copy_from_slice(get(first, 2)?),
                owners: owners(&rows, 3)?,
            }))
        })
    }

    fn swap(&self, new: &StoredView) -> BoxFuture<'_, Result<Swapped, Unknown>> {
        let owners = &new.owners;
        let params: Vec<Param> = vec![
            self.cluster(),
            Box::new(ClusterId(new.cluster)),
            Box::new(new.version.cast_signed()),
            Box::new(Data(new.document.clone())),
            Box::new(owners.iter().map(|owner| i32::from(owner.home)).collect::<Vec<_>>()),
            Box::new(owners.iter().map(|owner| owner.node.to_string()).collect::<Vec<_>>()),
            Box::new(owners.iter().map(|owner| owner.incarnation.cast_signed()).collect::<Vec<_>>()),
            Box::new(owners.iter().map(|owner| owner.epoch.cast_signed()).collect::<Vec<_>>()),
        ];
        Box::pin(async move {
            let rows = self.rest.query(Query::Swap, params).await?;
            let is_applied = rows.first().map_or(Ok(false), |row| get(row, 0))?;
            Ok(if is_applied { Swapped::Applied } else { Swapped::Conflict })
        })
    }

    fn beat(&self, beat: &Beat) -> BoxFuture<'_, Result<Vec<Owner>, Unknown>> {
        let params: Vec<Param> = vec![
            self.cluster(),
            Box::new(beat.node.to_string()),
            Box::new(beat.incarnation.cast_signed()),
            Box::new(beat.number.cast_signed()),
            Box::new(Data(beat.about.clone())),
        ];
        Box::pin(async move {
            let rows = self.lease.query(Query::Beat, params).await?;
            owners(&rows, 0)
        })
    }

    fn beats(&self) -> BoxFuture<'_, Result<Vec<Beat>, Unknown>> {
        Box::pin(async move {
            let rows = self.lease.query(Query::Beats, vec![self.cluster()]).await?;
            let mut beats = Vec::new();
            for row in &rows {
                let Some(node) = get::<Option<&str>>(row, 0)? else { break };
                beats.push(Beat {
                    node: node.into(),
                    incarnation: get::<i64>(row, 1)?.cast_unsigned(),
                    number: get::<i64>(row, 2)?.cast_unsigned(),
                    about: Bytes::copy_from_slice(get(row, 3)?),
                });
            }
            Ok(beats)
        })
    }

    fn create(&self) -> BoxFuture<'_, Result<(), Unknown>> {
        Box::pin(async move { Ok(self.rest.make_tables().await?) })
    }

    fn findings(&self) -> BoxFuture<'_, Result<Vec<Finding>, Unknown>> {
        Box::pin(async move {
            let rows = match self.rest.query(Query::Findings, Vec::new()).await {
                Err(StatementError { verdict: Verdict::Unfit, text }) => {
                    return Ok(vec![Finding { is_fatal: true, text }]);
                }
                rows => rows?,
            };
            Ok(rows.first().map_or_else(Vec::new, |row| findings::findings(row, &self.settings)))
        })
    }
}

/// Id of a cluster, a UUID in the database.
#[derive(Debug, Clone, Copy)]
struct ClusterId(u128);

impl ToSql for ClusterId {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        out.extend_from_slice(&self.0.to_be_bytes());
        Ok(IsNull::No)
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::UUID
    }

    to_sql_checked!();
}

impl FromSql<'_> for ClusterId {
    fn from_sql(_: &Type, raw: &[u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        Ok(Self(u128::from_be_bytes(raw.try_into()?)))
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::UUID
    }
}
