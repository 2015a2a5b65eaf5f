//! Shadows in Cassandra or Scylla, over the driver session of [`ScyllaLatest`].
//!
//! A device is a partition, a shadow a row. Rows are only written by lightweight transactions (`IF version = ?`), so that of two
//! gateways which change the same shadow at the same time one is told that the version is another now. They are not
//! repeated: the answer to a second one would not say whether the first was made.

use std::sync::Arc;

use bytes::Bytes;
use gateway_core::{ClientId, Timestamp, database::Consistency};
use scylla::{
    client::session::Session,
    errors::ExecutionError,
    response::{PagingState, query_result::QueryResult},
    serialize::row::SerializeRow,
    statement::{Consistency as Level, SerialConsistency, prepared::PreparedStatement},
    value::{CqlValue, Row},
};

use super::{
    ScyllaLatest, ScyllaOptions,
    cluster::{Cluster, ClusterSession, prepare},
    errors::{self, damaged},
};
use store::{
    BoxFuture, MAX_SHADOW_DEVICE, MAX_SHADOW_NAME, ShadowPut, ShadowRecord, ShadowStore, StoreError,
};

/// Rows of one answer with documents, and without.
const ROWS: (i32, i32) = (20, 1_000);

/// A [`ShadowStore`] in a Cassandra or Scylla cluster.
pub struct ScyllaShadows {
    cluster: Arc<Cluster>,
}

/// Prepared statements of the shadows.
pub(super) struct ShadowStatements {
    insert: PreparedStatement,
    update: PreparedStatement,
    forget: PreparedStatement,
    get: PreparedStatement,
    /// With and without documents; of each all names, and those after one.
    list: [[PreparedStatement; 2]; 2],
}

impl ShadowStatements {
    pub(super) async fn prepare(session: &Session, options: &ScyllaOptions) -> Result<Self, StoreError> {
        let keyspace = &options.keyspace;
        let (write, read) = (options.write_consistency, options.read_consistency);
        // All replicas agree on a version, or only the near datacenter's if writes are for it alone.
        let (serial, level) = match write {
            Consistency::LocalOne | Consistency::LocalQuorum => {
                (SerialConsistency::LocalSerial, Level::LocalSerial)
            }
            _ => (SerialConsistency::Serial, Level::Serial),
        };
        let change = async |text: String| {
            let mut statement = prepare(session, text, write).await?;
            statement.set_is_idempotent(false);
            statement.set_serial_consistency(Some(serial));
            Ok::<_, StoreError>(statement)
        };
        let mut get = prepare(
            session,
            format!(
                "SELECT name, version, changed, deleted, document FROM {keyspace}.shadows WHERE device = ? AND name = ?"
            ),
            read,
        )
        .await?;
        // Sees also a write whose answer was lost, or makes it fail.
        get.set_consistency(level);
        let list = async |columns: &str, which: &str, rows: i32| {
            let text = format!(
                "SELECT name, version, changed, deleted{columns} FROM {keyspace}.shadows WHERE device = ?{which} LIMIT ?"
            );
            let mut statement = prepare(session, text, read).await?;
            statement.set_page_size(rows);
            Ok::<_, StoreError>(statement)
        };
        let behind = " AND name > ?";
        Ok(Self {
            insert: change(format!(
                "INSERT INTO {keyspace}.shadows (version, changed, deleted, document, device, name) \
                 VALUES (?, ?, ?, ?, ?, ?) IF NOT EXISTS"
            ))
            .await?,
            update: change(format!(
                "UPDATE {keyspace}.shadows SET version = ?, changed = ?, deleted = ?, document = ? \
                 WHERE device = ? AND name = ? IF version = ?"
            ))
            .await?,
            forget: change(format!(
                "DELETE FROM {keyspace}.shadows WHERE device = ? AND name = ? IF version = ? AND deleted = true"
            ))
            .await?,
            get,
            list: [
                [list(", document", "", ROWS.0).await?, list(", document", behind, ROWS.0).await?],
                [list("", "", ROWS.1).await?, list("", behind, ROWS.1).await?],
            ],
        })
    }
}

type ShadowRow = (String, i64, i64, bool, Option<Vec<u8>>);

impl ScyllaShadows {
    /// In the database of `latest`, through the same connections.
    pub fn new(latest: &ScyllaLatest) -> Self {
        Self { cluster: Arc::clone(&latest.cluster) }
    }

    /// Makes a change if its condition holds.
    async fn change(
        &self,
        connection: &Arc<ClusterSession>,
        statement: &PreparedStatement,
        values: impl SerializeRow,
    ) -> Result<ShadowPut, StoreError> {
        let permit = self.cluster.writes.permit().await;
        let answer = connection.session.execute_unpaged(statement, values).await;
        self.cluster.answered(connection, permit, &answer);
        let options = &self.cluster.options;
        is_applied(answer.map_err(|e: ExecutionError| errors::failed("change a shadow", &e, options))?)
    }

    async fn put_record(&self, record: ShadowRecord, expected: u64) -> Result<ShadowPut, StoreError> {
        let ShadowRecord { device, name, version, changed, document } = &record;
        if !is_key(device.as_str(), name) {
            return Err(StoreError::Unavailable(
                "the name of a shadow or of its device is too long".to_owned(),
            ));
        }
        let connection = self.cluster.connection().await?;
        let [version, changed, expected] = [*version, changed.0, expected].map(u64::cast_signed);
        let (is_deleted, document) = (document.is_none(), document.as_deref().unwrap_or_default());
        let (device, name) = (device.as_str(), &**name);
        let values = (version, changed, is_deleted, document, device, name);
        if expected == 0 {
            return self.change(&connection, &connection.shadows.insert, values).await;
        }
        let values = (version, changed, is_deleted, document, device, name, expected);
        self.change(&connection, &connection.shadows.update, values).await
    }

    async fn get_record(&self, device: &str, name: &str) -> Result<Option<ShadowRecord>, StoreError> {
        if !is_key(device, name) {
            return Ok(None);
        }
        let connection = self.cluster.connection().await?;
        let request = connection.session.execute_unpaged(&connection.shadows.get, (device, name));
        let answer = self.cluster.ask(&connection, "read a shadow", request).await?;
        let rows = answer.into_rows_result().map_err(damaged)?;
        let found = rows.maybe_first_row::<ShadowRow>().map_err(damaged)?;
        Ok(found.map(|found| record(device, found)))
    }

    async fn list_records(
        &self,
        device: &str,
        after: Option<&str>,
        limit: usize,
        documents: bool,
    ) -> Result<Vec<ShadowRecord>, StoreError> {
        if !is_key(device, "") || limit == 0 {
            return Ok(Vec::new());
        }
        let connection = self.cluster.connection().await?;
        let [all, behind] = &connection.shadows.list[usize::from(!documents)];
        let limit = i32::try_from(limit).unwrap_or(i32::MAX);
        let (session, start) = (&connection.session, PagingState::start());
        let doing = "list shadows";
        let (answer, _) = match after {
            None => {
                let request = session.execute_single_page(all, (device, limit), start);
                self.cluster.ask(&connection, doing, request).await?
            }
            Some(after) => {
                let request = session.execute_single_page(behind, (device, after, limit), start);
                self.cluster.ask(&connection, doing, request).await?
            }
        };
        let rows = answer.into_rows_result().map_err(damaged)?;
        if documents {
            let found = rows.rows::<ShadowRow>().map_err(damaged)?;
            return found.map(|row| row.map(|row| record(device, row)).map_err(damaged)).collect();
        }
        let found = rows.rows::<(String, i64, i64, bool)>().map_err(damaged)?;
        let heads = found.map(|row| {
            let (name, version, changed, deleted) = row.map_err(damaged)?;
            Ok(record(device, (name, version, changed, deleted, None)))
        });
        heads.collect()
    }
}

impl ShadowStore for ScyllaShadows {
    fn get<'a>(
        &'a self,
        device: &'a str,
        name: &'a str,
    ) -> BoxFuture<'a, Result<Option<ShadowRecord>, StoreError>> {
        Box::pin(self.get_record(device, name))
    }

    fn put(&self, record: ShadowRecord, expected: u64) -> BoxFuture<'_, Result<ShadowPut, StoreError>> {
        Box::pin(self.put_record(record, expected))
    }

    fn forget<'a>(
        &'a self,
        device: &'a str,
        name: &'a str,
        version: u64,
    ) -> BoxFuture<'a, Result<ShadowPut, StoreError>> {
        Box::pin(async move {
            if !is_key(device, name) {
                return Ok(ShadowPut::Conflict);
            }
            let connection = self.cluster.connection().await?;
            let values = (device, name, version.cast_signed());
            self.change(&connection, &connection.shadows.forget, values).await
        })
    }

    fn list<'a>(
        &'a self,
        device: &'a str,
        after: Option<&'a str>,
        limit: usize,
        documents: bool,
    ) -> BoxFuture<'a, Result<Vec<ShadowRecord>, StoreError>> {
        Box::pin(self.list_records(device, after, limit, documents))
    }
}

fn is_key(device: &str, name: &str) -> bool {
    (1..=MAX_SHADOW_DEVICE).contains(&device.len()) && name.len() <= MAX_SHADOW_NAME
}

fn record(device: &str, (name, version, changed, deleted, document): ShadowRow) -> ShadowRecord {
    ShadowRecord {
        device: ClientId::new(device),
        name: Arc::from(name),
        version: version.cast_unsigned(),
        changed: Timestamp(changed.cast_unsigned()),
        document: (!deleted).then(|| Bytes::from(document.unwrap_or_default())),
    }
}

/// The first column of the answer tells; which others there are depends on the database and on the answer.
fn is_applied(answer: QueryResult) -> Result<ShadowPut, StoreError> {
    let rows = answer.into_rows_result().map_err(damaged)?;
    let row = rows.first_row::<Row>().map_err(damaged)?;
    match row.columns.first() {
        Some(Some(CqlValue::Boolean(true))) => Ok(ShadowPut::Written),
        Some(Some(CqlValue::Boolean(false))) => Ok(ShadowPut::Conflict),
        _ => Err(damaged("the answer to a conditional write does not begin with a boolean")),
    }
}
