//! Keyspace and tables, made by numbered migrations.
//!
//! Only what Cassandra 4.1 and 5 and Scylla all understand: text, blob, numbers and frozen collections, no secondary
//! index, no materialized view, no counter; lightweight transactions for shadows alone. Replication is a `NetworkTopologyStrategy` map.
//! Scylla divides keyspaces of that strategy into tablets, where it supports them; nothing here is among what tablets do
//! not do, but there a replication factor cannot exceed the racks (nodes, if racks are not used) of a datacenter.
//!
//! Two gateways that make the same table at the same moment, on different nodes, can leave the nodes of Cassandra before
//! 5.1 with two versions of it. So nothing is made that is there, and each step waits until the nodes agree; where many
//! gateways start on an empty cluster, let one of them do it.

use std::{collections::HashMap, time::Duration};

use scylla::{
    client::session::Session, errors::ExecutionError, response::query_result::QueryResult,
    statement::Statement, value::CqlValue,
};

use super::{
    ScyllaOptions, StoreError,
    errors::{self, ErrorKind, damaged, failed},
};

/// Migration n is entry n - 1; `{}` is the keyspace. What was released is never changed, only added to, and can be run
/// again: tables that somebody dropped are made anew.
const MIGRATIONS: &[&[&str]] = &[
    &[
        "CREATE TABLE IF NOT EXISTS {}.latest_by_device (device text, topic text, payload blob, qos tinyint, \
     retained boolean, version bigint, received bigint, server text, present tinyint, payload_format tinyint, \
     content_type text, response_topic text, correlation_data blob, \
     user_properties frozen<list<frozen<tuple<text, text>>>>, PRIMARY KEY (device, topic))",
        "CREATE TABLE IF NOT EXISTS {}.latest_by_topic (topic text PRIMARY KEY, device text, payload blob, qos tinyint, \
     retained boolean, version bigint, received bigint, server text, present tinyint, payload_format tinyint, \
     content_type text, response_topic text, correlation_data blob, \
     user_properties frozen<list<frozen<tuple<text, text>>>>)",
    ],
    &[
        "CREATE TABLE IF NOT EXISTS {}.history (device text, topic text, bucket bigint, received bigint, version bigint, \
       payload blob, qos tinyint, retained boolean, server text, present tinyint, payload_format tinyint, \
       content_type text, response_topic text, correlation_data blob, \
       user_properties frozen<list<frozen<tuple<text, text>>>>, \
       PRIMARY KEY ((device, topic, bucket), received, version)) \
       WITH CLUSTERING ORDER BY (received DESC, version DESC) AND compaction = {'class': 'TimeWindowCompactionStrategy', \
       'compaction_window_unit': 'DAYS', 'compaction_window_size': '1'}",
    ],
    &[
        "CREATE TABLE IF NOT EXISTS {}.shadows (device text, name text, version bigint, changed bigint, deleted boolean, \
       document blob, PRIMARY KEY (device, name))",
    ],
];

/// Notes which migrations were run.
const NOTES: &str =
    "CREATE TABLE IF NOT EXISTS {}.migrations (name text, number int, PRIMARY KEY (name, number))";

/// Changing a schema takes a cluster longer than writing a row.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(30);

/// Checks that the name can stand in a statement as it is.
pub(super) fn check_keyspace(name: &str) -> Result<(), StoreError> {
    let good = name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.len() <= 48
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    if good {
        return Ok(());
    }
    Err(StoreError::Format(format!("keyspace {name:?}: use up to 48 of a-z, 0-9 and _, a letter first")))
}

/// Tables by name, each with the id that the database gave it: one that is dropped and made again has another.
pub(super) type TableIds = HashMap<String, CqlValue>;

/// Brings the schema to this version, or checks that it is there. Returns the tables.
///
/// # Errors
/// [`StoreError::Format`] if the schema is newer, or not there and not to be made.
pub(super) async fn ready(session: &Session, options: &ScyllaOptions) -> Result<TableIds, StoreError> {
    let keyspace = &options.keyspace;
    let found = FoundSchema::read(session, options).await?;
    let (needed, applied) = (MIGRATIONS.len(), found.applied);
    if applied > needed {
        return Err(StoreError::Format(format!(
            "keyspace {keyspace} is at migration {applied}, this version knows {needed}: run a newer gateway"
        )));
    }
    let missing: Vec<_> = tables().filter(|table| !found.tables.contains_key(*table)).collect();
    if applied == needed && missing.is_empty() {
        return Ok(found.tables);
    }
    if !options.migrate {
        return Err(StoreError::Format(format!(
            "keyspace {keyspace} is at migration {applied} of {needed} and lacks tables ({}): allow migrations once",
            missing.join(", ")
        )));
    }
    if !found.keyspace {
        let text =
            format!("CREATE KEYSPACE IF NOT EXISTS {keyspace} WITH replication = {}", options.replication);
        change(session, options, text).await?;
    }
    if !found.tables.contains_key("migrations") {
        change(session, options, NOTES.replace("{}", keyspace)).await?;
    }
    let begin = if missing.is_empty() { applied } else { 0 };
    for (number, statements) in MIGRATIONS.iter().enumerate().skip(begin) {
        for text in *statements {
            change(session, options, text.replace("{}", keyspace)).await?;
        }
        let done =
            format!("INSERT INTO {keyspace}.migrations (name, number) VALUES ('latest', {})", number + 1);
        change(session, options, done).await?;
    }
    tracing::info!(keyspace, migration = needed, "database schema is made");
    Ok(FoundSchema::read(session, options).await?.tables)
}

/// The tables of all migrations.
fn tables() -> impl Iterator<Item = &'static str> {
    let made = MIGRATIONS.iter().copied().flatten();
    made.filter_map(|text| text.strip_prefix("CREATE TABLE IF NOT EXISTS {}.")?.split(' ').next())
}

/// Schema found in the database.
struct FoundSchema {
    keyspace: bool,
    tables: TableIds,
    applied: usize,
}

impl FoundSchema {
    async fn read(session: &Session, options: &ScyllaOptions) -> Result<Self, StoreError> {
        let keyspace = &options.keyspace;
        let names = |what: &str, table: &str| {
            // The name was checked.
            format!("SELECT {what} FROM system_schema.{table} WHERE keyspace_name = '{keyspace}'")
        };
        let found = ask(session, options, names("keyspace_name", "keyspaces")).await?;
        if found.rows_num() == 0 {
            return Ok(Self { keyspace: false, tables: TableIds::new(), applied: 0 });
        }
        let found = ask(session, options, names("table_name, id", "tables")).await?;
        let listed: Result<Vec<(String, CqlValue)>, _> = found.rows().map_err(damaged)?.collect();
        let mut tables = TableIds::new();
        for (table, id) in listed.map_err(damaged)? {
            if is_known(session, keyspace, &table).await? {
                tables.insert(table, id);
            }
        }
        let mut applied = 0;
        if tables.contains_key("migrations") {
            let newest = format!(
                "SELECT number FROM {keyspace}.migrations WHERE name = 'latest' ORDER BY number DESC LIMIT 1"
            );
            let found = ask(session, options, newest).await?;
            let number = found.maybe_first_row::<(i32,)>().map_err(damaged)?;
            applied = number.and_then(|(number,)| usize::try_from(number).ok()).unwrap_or(0);
        }
        Ok(Self { keyspace: true, tables, applied })
    }
}

/// Returns whether the database knows a table that its list of tables has. Cassandra that was killed amid a change of its schema
/// may come back with a list that is ahead of it; such a table has to be made again.
async fn is_known(session: &Session, keyspace: &str, table: &str) -> Result<bool, StoreError> {
    match session.prepare(Statement::new(format!("SELECT * FROM {keyspace}.{table}"))).await {
        Ok(_) => Ok(true),
        Err(error) if errors::preparing(&error) == ErrorKind::Schema => {
            tracing::warn!(
                keyspace,
                table,
                "the database lists a table that it does not know, it is made again"
            );
            Ok(false)
        }
        Err(error) => Err(errors::not_prepared(&error)),
    }
}

async fn ask(
    session: &Session,
    options: &ScyllaOptions,
    text: String,
) -> Result<scylla::response::query_result::QueryRowsResult, StoreError> {
    let answer = run(session, text, options.request_timeout).await;
    answer.map_err(|e| failed("read the schema", &e, options))?.into_rows_result().map_err(damaged)
}

pub(super) async fn change(
    session: &Session,
    options: &ScyllaOptions,
    text: String,
) -> Result<(), StoreError> {
    let doing = text.split('(').next().unwrap_or_default().trim().to_owned();
    let limit = options.request_timeout.max(CHANGE_TIMEOUT);
    run(session, text, limit).await.map(drop).map_err(|e| failed(&doing, &e, options))
}

async fn run(session: &Session, text: String, limit: Duration) -> Result<QueryResult, ExecutionError> {
    let mut statement = Statement::new(text);
    statement.set_is_idempotent(true);
    statement.set_request_timeout(Some(limit));
    session.query_unpaged(statement, ()).await
}
