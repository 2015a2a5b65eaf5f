//! Properties that the server lacks, and the remedies.

use ledger::Finding;
use tokio_postgres::Row;

use super::PostgresSettings;

/// Findings in the answer to [`Query::Findings`](super::sql::Query::Findings).
pub(super) fn findings(row: &Row, settings: &PostgresSettings) -> Vec<Finding> {
    let is = |column: &str| row.get::<_, Option<bool>>(column);
    let schema = &*settings.schema;
    let (me, database) = (row.get::<_, String>("me"), row.get::<_, String>("database"));
    let mut found = Vec::new();
    let mut find = |is_fatal: bool, text: String| found.push(Finding { is_fatal, text });
    if is("has_standbys") == Some(false) {
        let text = "PostgreSQL has no synchronous standby: if its machine is lost, so are acknowledged messages; set up a standby \
                    and name it in synchronous_standby_names";
        find(false, text.into());
    } else if is("sees_standbys") == Some(true) && row.get::<_, i64>("standbys") == 0 {
        let text = "no synchronous standby of PostgreSQL is connected: nothing durable is acknowledged until one of \
                    synchronous_standby_names is";
        find(false, text.into());
    }
    let commit = row.get::<_, String>("synchronous_commit");
    if commit != "on" {
        let text = format!(
            "synchronous_commit is {commit} although the session has set it to on: name the server itself, or a pool in session mode"
        );
        find(true, text);
    }
    if is("fsync") == Some(false) {
        find(true, "fsync of PostgreSQL is off: a power loss destroys the ledger; set it to on".into());
    }
    if is("full_page_writes") == Some(false) {
        let text = "full_page_writes of PostgreSQL is off: a power loss may destroy the ledger unless its file system writes whole \
                    pages; set it to on";
        find(false, text.into());
    }
    match (is("may_use_schema"), is("may_make_tables"), is("may_make_schema")) {
        (None, _, Some(false)) => find(
            true,
            format!(
                "user {me} may not make schema {schema}: CREATE SCHEMA {schema} AUTHORIZATION {me}, or GRANT CREATE ON DATABASE {database} TO {me}"
            ),
        ),
        (Some(false), ..) => {
            find(
                true,
                format!(
                    "user {me} may not use schema {schema}: GRANT USAGE, CREATE ON SCHEMA {schema} TO {me}"
                ),
            );
        }
        _ => {}
    }
    let missing = row.get::<_, Vec<String>>("missing");
    if !missing.is_empty() {
        let text = format!(
            "user {me} lacks rights ({}): GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {me}",
            missing.join(", ")
        );
        find(true, text);
    }
    found
}
