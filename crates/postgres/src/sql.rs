//! Tables and statements.
//!
//! Every statement returns at least one row, and the session's mark as the last column of each row: what
//! [`ServerSession`](super::session::ServerSession) tells a pooler by. Numbers of 64 bits are stored as signed ones with the same bits.

/// Column by which an answer shows that its session is the one that was set up.
const MARK: &str = "current_setting('mqtt_server.session', true)";

/// Makes a read wait for the synchronous standby as a commit does: a message in the log that nobody reads. A server that was cut off
/// from its standby, which may have been promoted, then gives no answer.
const CONFIRMED: &str = "pg_logical_emit_message(true, 'mqtt-server', '')";

/// A statement. Each is one round trip and a transaction of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Query {
    Append,
    Owners,
    Read,
    Delete,
    View,
    Swap,
    Beat,
    Beats,
    Findings,
    Leftovers,
}

/// Makes the tables unless they are there. A schema that an administrator has made needs no right on the database.
pub(super) fn tables(schema: &str) -> String {
    format!(
        "DO $$ BEGIN
           IF to_regnamespace('{schema}') IS NULL THEN CREATE SCHEMA {schema}; END IF;
         END $$;
         CREATE TABLE IF NOT EXISTS {schema}.cluster (
           name text PRIMARY KEY, id uuid NOT NULL, version bigint NOT NULL, document bytea NOT NULL);
         CREATE TABLE IF NOT EXISTS {schema}.home (
           cluster text, home int, id uuid NOT NULL, node text NOT NULL, incarnation bigint NOT NULL, epoch bigint NOT NULL,
           PRIMARY KEY (cluster, home));
         CREATE TABLE IF NOT EXISTS {schema}.member (
           cluster text, node text, incarnation bigint NOT NULL, number bigint NOT NULL, about bytea NOT NULL,
           PRIMARY KEY (cluster, node));
         CREATE TABLE IF NOT EXISTS {schema}.ledger (
           cluster uuid, home int, stream smallint, epoch bigint, segment bigint, n bigint, part smallint,
           parts smallint NOT NULL, data bytea NOT NULL,
           PRIMARY KEY (cluster, home, stream, epoch, segment, n, part)) WITH (toast_tuple_target = 8160);
         ALTER TABLE {schema}.ledger ALTER COLUMN data SET STORAGE EXTERNAL;"
    )
}

/// Text of a statement.
pub(super) fn text(schema: &str, query: Query) -> String {
    match query {
        // The lock, not the reading, is the fence: it waits for a change of the owner that is under way, shows what became of it,
        // and keeps the next one off until this commits. It is also a write, so that a repeat that finds its rows waits for the
        // standby as the first try did.
        Query::Append => format!(
            "WITH fence AS MATERIALIZED (
               SELECT home, id, node, incarnation, epoch FROM {schema}.home
               WHERE cluster = $1 AND home = ANY ($2::int[]) ORDER BY home FOR SHARE
             ), owned AS MATERIALIZED (
               SELECT claim.number, fence.id
               FROM unnest($2::int[], $3::text[], $4::bigint[], $5::bigint[])
                 WITH ORDINALITY AS claim (home, node, incarnation, epoch, number)
               JOIN fence USING (home, node, incarnation, epoch)
             ), stored AS (
               INSERT INTO {schema}.ledger (cluster, home, stream, epoch, segment, n, part, parts, data)
               SELECT owned.id, home, stream, epoch, segment, n, part, parts, data
               FROM unnest($6::bigint[], $7::int[], $8::smallint[], $9::bigint[], $10::bigint[], $11::bigint[],
                 $12::smallint[], $13::smallint[], $14::bytea[])
                 AS given (claim, home, stream, epoch, segment, n, part, parts, data)
               JOIN owned ON owned.number = given.claim
               ON CONFLICT DO NOTHING
             )
             SELECT ARRAY (SELECT number FROM owned), set_config('synchronous_commit', 'on', true), {MARK}"
        ),
        Query::Owners => format!(
            "SELECT home, node, incarnation, epoch, {CONFIRMED}, {MARK}
             FROM (SELECT) AS one LEFT JOIN {schema}.home ON cluster = $1"
        ),
        // Bytes are summed without fetching them, of so many rows.
        Query::Read => format!(
            "SELECT n, part, parts, data, {MARK} FROM (SELECT) AS one LEFT JOIN (
               SELECT *, sum(octet_length(data)) OVER (ORDER BY n, part ROWS UNBOUNDED PRECEDING) - octet_length(data) AS before
               FROM (
                 SELECT n, part, parts, data FROM {schema}.ledger
                 WHERE cluster = (SELECT id FROM {schema}.cluster WHERE name = $1)
                   AND home = $2 AND stream = $3 AND epoch = $4 AND segment = $5 AND (n, part) >= ($6, $7::smallint)
                 ORDER BY n, part LIMIT $9::bigint
               ) AS next
             ) AS summed ON before < $8::bigint
             ORDER BY n, part"
        ),
        Query::Delete => format!(
            "WITH gone AS (
               DELETE FROM {schema}.ledger
               WHERE cluster = (SELECT id FROM {schema}.cluster WHERE name = $1)
                 AND home = $2 AND stream = $3 AND epoch = $4 AND segment = $5
             )
             SELECT {MARK}"
        ),
        Query::View => format!(
            "SELECT cluster.id, version, document, home, node, incarnation, epoch, {CONFIRMED}, {MARK}
             FROM (SELECT) AS one LEFT JOIN {schema}.cluster ON name = $1 LEFT JOIN {schema}.home ON cluster = name
             ORDER BY home"
        ),
        // Rows of homes that do not change are not even locked: their appends go on.
        Query::Swap => format!(
            "WITH made AS (
               INSERT INTO {schema}.cluster (name, id, version, document) SELECT $1::text, $2::uuid, $3::bigint, $4::bytea WHERE $3 = 1
               ON CONFLICT DO NOTHING RETURNING 1
             ), moved AS (
               UPDATE {schema}.cluster SET version = $3, document = $4
               WHERE name = $1 AND id = $2 AND version = $3 - 1 RETURNING 1
             ), applied AS (
               SELECT FROM made UNION ALL SELECT FROM moved
             ), gone AS (
               DELETE FROM {schema}.home WHERE cluster = $1 AND home <> ALL ($5::int[]) AND EXISTS (SELECT FROM applied)
             ), put AS (
               INSERT INTO {schema}.home (cluster, home, id, node, incarnation, epoch)
               SELECT $1, wanted.home, $2, wanted.node, wanted.incarnation, wanted.epoch
               FROM applied CROSS JOIN unnest($5::int[], $6::text[], $7::bigint[], $8::bigint[])
                 AS wanted (home, node, incarnation, epoch)
               LEFT JOIN {schema}.home AS present ON present.cluster = $1 AND present.home = wanted.home
               WHERE (present.node, present.incarnation, present.epoch) IS DISTINCT FROM (wanted.node, wanted.incarnation, wanted.epoch)
               ORDER BY wanted.home
               ON CONFLICT (cluster, home) DO UPDATE
               SET id = excluded.id, node = excluded.node, incarnation = excluded.incarnation, epoch = excluded.epoch
             )
             SELECT EXISTS (SELECT FROM applied), set_config('synchronous_commit', 'on', true), {MARK}"
        ),
        // The commit waits for the standby, so that an answer confirms what was read before it.
        Query::Beat => format!(
            "WITH put AS (
               INSERT INTO {schema}.member (cluster, node, incarnation, number, about) VALUES ($1, $2, $3, $4, $5)
               ON CONFLICT (cluster, node) DO UPDATE
               SET incarnation = excluded.incarnation, number = excluded.number, about = excluded.about
             )
             SELECT home, node, incarnation, epoch, set_config('synchronous_commit', 'on', true), {MARK}
             FROM (SELECT) AS one LEFT JOIN {schema}.home ON cluster = $1"
        ),
        Query::Beats => format!(
            "SELECT node, incarnation, number, about, {MARK}
             FROM (SELECT) AS one LEFT JOIN {schema}.member ON cluster = $1"
        ),
        Query::Findings => format!(
            "SELECT current_setting('synchronous_standby_names') <> '' AS has_standbys,
               (SELECT count(*) FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum')) AS standbys,
               pg_has_role('pg_read_all_stats', 'USAGE') AS sees_standbys,
               current_setting('synchronous_commit') AS synchronous_commit,
               current_setting('fsync') = 'on' AS fsync,
               current_setting('full_page_writes') = 'on' AS full_page_writes,
               has_database_privilege(current_database(), 'CREATE') AS may_make_schema,
               CASE WHEN to_regnamespace('{schema}') IS NOT NULL
                 THEN has_schema_privilege('{schema}', 'USAGE') END AS may_use_schema,
               CASE WHEN to_regnamespace('{schema}') IS NOT NULL
                 THEN has_schema_privilege('{schema}', 'CREATE') END AS may_make_tables,
               ARRAY (
                 SELECT relname || ': ' || kind FROM pg_class
                 CROSS JOIN unnest(ARRAY ['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS kind
                 WHERE relnamespace = to_regnamespace('{schema}') AND relkind IN ('r', 'p')
                   AND relname IN ('cluster', 'home', 'member', 'ledger') AND NOT has_table_privilege(pg_class.oid, kind)
               )::text[] AS missing,
               current_user::text AS me, current_database()::text AS database, {MARK}"
        ),
        Query::Leftovers => format!(
            "SELECT count(*), {MARK} FROM pg_stat_activity
             WHERE application_name = current_setting('application_name') AND pid <> pg_backend_pid() AND state = 'active'"
        ),
    }
}

/// First question to a new session: may it be used.
pub(super) fn greeting() -> String {
    format!(
        "SELECT pg_is_in_recovery() OR current_setting('default_transaction_read_only')::bool,
           current_setting('server_version_num')::int, {MARK}"
    )
}

/// Timeline of a primary: one more with each promotion.
pub(super) const TIMELINE: &str =
    "SELECT ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int";

/// Settings of a session. Nothing ends a statement but its answer, commits wait for the standby, and the warning about one that did not
/// comes. Those that this version of the server does not know are left out.
pub(super) const SETTINGS: &str = "SELECT set_config(name, wanted, false) FROM pg_settings JOIN (VALUES
      ('statement_timeout', '0'), ('lock_timeout', '0'), ('transaction_timeout', '0'),
      ('idle_in_transaction_session_timeout', '0'), ('idle_session_timeout', '0'),
      ('synchronous_commit', 'on'), ('client_min_messages', 'warning'),
      ('default_transaction_isolation', 'read committed'), ('jit', 'off'), ('plan_cache_mode', 'force_generic_plan')
    ) AS ours (name, wanted) USING (name)
    UNION ALL SELECT set_config('mqtt_server.session', $1, false)";
