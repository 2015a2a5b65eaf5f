//! Keyspace and tables, made by numbered migrations.

use scylla::client::session::Session;

use super::{ScyllaOptions, StoreError, unavailable};

/// Migration n is entry n - 1; `{}` is the keyspace. What was released is never changed, only added to.
const MIGRATIONS: &[&[&str]] = &[&[
    "CREATE TABLE IF NOT EXISTS {}.latest_by_device (device text, topic text, payload blob, qos tinyint, \
     retained boolean, version bigint, received bigint, server text, present tinyint, payload_format tinyint, content_type text, \
     response_topic text, correlation_data blob, user_properties frozen<list<frozen<tuple<text, text>>>>, \
     PRIMARY KEY (device, topic))",
    "CREATE TABLE IF NOT EXISTS {}.latest_by_topic (topic text PRIMARY KEY, device text, payload blob, qos tinyint, \
     retained boolean, version bigint, received bigint, server text, present tinyint, payload_format tinyint, content_type text, \
     response_topic text, correlation_data blob, user_properties frozen<list<frozen<tuple<text, text>>>>)",
]];

/// Whether it can stand in a statement as it is.
pub(super) fn check_keyspace(name: &str) -> Result<(), StoreError> {
    let good = name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.len() <= 48
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    if good {
        return Ok(());
    }
    Err(StoreError::Format(format!("keyspace {name:?}: use up to 48 of a-z, 0-9 and _, a letter first")))
}

/// Brings the schema to this version, or checks that it is there.
///
/// # Errors
/// [`StoreError::Format`] if the schema is newer, or older and not to be migrated.
pub(super) async fn ready(session: &Session, options: &ScyllaOptions) -> Result<(), StoreError> {
    let keyspace = &options.keyspace;
    if options.migrate {
        for text in [
            format!("CREATE KEYSPACE IF NOT EXISTS {keyspace} WITH replication = {}", options.replication),
            format!(
                "CREATE TABLE IF NOT EXISTS {keyspace}.migrations (name text, number int, PRIMARY KEY (name, number))"
            ),
        ] {
            session.query_unpaged(text, ()).await.map_err(unavailable)?;
        }
    }
    let newest = format!(
        "SELECT number FROM {keyspace}.migrations WHERE name = 'latest' ORDER BY number DESC LIMIT 1"
    );
    let answer = session.query_unpaged(newest, ()).await.map_err(unavailable)?;
    let rows = answer.into_rows_result().map_err(unavailable)?;
    let found = rows.maybe_first_row::<(i32,)>().map_err(unavailable)?.map_or(0, |(number,)| number);
    let applied = usize::try_from(found).unwrap_or(0);
    if applied > MIGRATIONS.len() {
        return Err(StoreError::Format(format!(
            "keyspace {keyspace} is at migration {applied}, this version knows {}: run a newer gateway",
            MIGRATIONS.len()
        )));
    }
    if applied < MIGRATIONS.len() && !options.migrate {
        return Err(StoreError::Format(format!(
            "keyspace {keyspace} is at migration {applied}, this version needs {}: allow migrations once",
            MIGRATIONS.len()
        )));
    }
    for (number, statements) in MIGRATIONS.iter().enumerate().skip(applied) {
        for text in *statements {
            session.query_unpaged(text.replace("{}", keyspace), ()).await.map_err(unavailable)?;
        }
        let done =
            format!("INSERT INTO {keyspace}.migrations (name, number) VALUES ('latest', {})", number + 1);
        session.query_unpaged(done, ()).await.map_err(unavailable)?;
    }
    Ok(())
}
