//! Tables of the ledger and the statements on them.

use scylla::{
    client::session::Session,
    errors::PrepareError,
    statement::{Consistency, SerialConsistency, Statement, prepared::PreparedStatement},
};

/// Tables; `{}` is the keyspace. Only `mqtt-server cluster create` makes them.
///
/// `view` is a row of `cluster` and replaced by conditional writes alone; its owners stand in a column of their own, as they are read
/// with every append: by all replicas at once (`ALWAYS`), since a read that waits for one that has just died takes as long as slow ones
/// do, until the others know. A segment of the ledger is a partition, written once and removed whole: the levelled compaction merges
/// the mark of its removal with its rows soon, where the default would keep both until files of their size meet.
pub(super) const TABLES: [(&str, &str); 3] = [
    (
        "cluster",
        "CREATE TABLE IF NOT EXISTS {}.cluster (name text PRIMARY KEY, id uuid, version bigint, document blob, \
         owners frozen<list<frozen<tuple<int, text, bigint, bigint>>>>) WITH speculative_retry = 'ALWAYS'",
    ),
    (
        "member",
        "CREATE TABLE IF NOT EXISTS {}.member (node text PRIMARY KEY, incarnation bigint, number bigint, about blob)",
    ),
    (
        "ledger",
        "CREATE TABLE IF NOT EXISTS {}.ledger (cluster uuid, home int, stream int, epoch bigint, segment int, n bigint, \
         part int, parts int, data blob, PRIMARY KEY ((cluster, home, stream, epoch, segment), n, part)) \
         WITH compaction = {'class': 'LeveledCompactionStrategy'}",
    ),
];

/// Prepared statements of the ledger. Those that may be sent twice are marked so: the driver then asks a second node.
pub(super) struct Statements {
    pub(super) insert: PreparedStatement,
    pub(super) read: PreparedStatement,
    pub(super) delete: PreparedStatement,
    pub(super) owners: PreparedStatement,
    pub(super) view: PreparedStatement,
    pub(super) create_view: PreparedStatement,
    pub(super) swap_view: PreparedStatement,
    pub(super) beat: PreparedStatement,
    pub(super) beats: PreparedStatement,
    pub(super) newest_beats: PreparedStatement,
}

impl Statements {
    /// # Errors
    /// The driver's: a table is missing, or no node answers.
    pub(super) async fn prepare(session: &Session, keyspace: &str) -> Result<Self, PrepareError> {
        let plain = async |text: &str| {
            let mut statement = session.prepare(Statement::new(text.replace("{}", keyspace))).await?;
            statement.set_is_idempotent(true);
            statement.set_consistency(Consistency::Quorum);
            statement.set_serial_consistency(Some(SerialConsistency::Serial));
            Ok::<_, PrepareError>(statement)
        };
        let conditional = async |text: &str| {
            let mut statement = plain(text).await?;
            statement.set_is_idempotent(false);
            Ok::<_, PrepareError>(statement)
        };
        let partition = "cluster = ? AND home = ? AND stream = ? AND epoch = ? AND segment = ?";
        let mut view =
            plain("SELECT id, version, document, owners FROM {}.cluster WHERE name = 'view'").await?;
        view.set_consistency(Consistency::Serial);
        Ok(Self {
            // A row has the same bytes whenever it is written, so it needs no clock; what is removed is removed whatever comes late.
            insert: plain(
                "INSERT INTO {}.ledger (cluster, home, stream, epoch, segment, n, part, parts, data) \
                 VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) USING TIMESTAMP 1",
            )
            .await?,
            read: plain(&format!(
                "SELECT n, part, parts, data FROM {{}}.ledger WHERE {partition} AND (n, part) >= (?, ?)"
            ))
            .await?,
            delete: plain(&format!("DELETE FROM {{}}.ledger USING TIMESTAMP 2 WHERE {partition}")).await?,
            owners: plain("SELECT id, owners FROM {}.cluster WHERE name = 'view'").await?,
            view,
            create_view: conditional(
                "INSERT INTO {}.cluster (name, id, version, document, owners) VALUES ('view', ?, ?, ?, ?) IF NOT EXISTS",
            )
            .await?,
            swap_view: conditional(
                "UPDATE {}.cluster SET version = ?, document = ?, owners = ? WHERE name = 'view' IF version = ? AND id = ?",
            )
            .await?,
            beat: plain("INSERT INTO {}.member (node, incarnation, number, about) VALUES (?, ?, ?, ?) USING TIMESTAMP ?")
                .await?,
            beats: plain("SELECT node, incarnation, number, about FROM {}.member").await?,
            newest_beats: plain("SELECT WRITETIME(number) FROM {}.member").await?,
        })
    }
}
