//! Setup of the database: findings that promise less than a ledger needs.
//!
//! Read repair is not looked at: a takeover writes what it counts at QUORUM itself, so the ledger does without.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use ledger::{Finding, Unknown};
use scylla::{
    client::session::Session,
    cluster::Node,
    errors::ExecutionError,
    policies::load_balancing::{NodeIdentifier, SingleTargetLoadBalancingPolicy},
    response::query_result::QueryResult,
    statement::{Consistency, SerialConsistency, Statement},
};

use super::{LedgerDatabase, TABLES, damaged};
use crate::errors::{self, ErrorKind};

/// Time for one question.
const LIMIT: Duration = Duration::from_secs(10);

/// Hints, and promises of conditional writes, live as long as this at least where nothing else was set.
const LEAST_GC_GRACE: i32 = 3 * 60 * 60;

/// Conditional writes that never apply: they need the rights that the ledger's statements need, and change nothing.
const PROBES: [&str; 3] = [
    "UPDATE {}.cluster SET version = 0 WHERE name = 'rights' IF version = -1",
    "UPDATE {}.member SET number = 0 WHERE node = 'rights' IF number = -1",
    "UPDATE {}.ledger SET parts = 0 WHERE cluster = 00000000-0000-0000-0000-000000000000 AND home = 0 AND stream = 0 \
     AND epoch = 0 AND segment = 0 AND n = 0 AND part = 0 IF parts = -1",
];

/// Settings of a node that are looked at.
const SETTINGS: &str =
    "'paxos_variant', 'commitlog_sync', 'minimum_timestamp_fail_threshold', 'user_timestamps_enabled'";

pub(super) async fn read(database: &Arc<LedgerDatabase>) -> Result<Vec<Finding>, Unknown> {
    let session = database.session().await.map_err(|e| Unknown(e.to_string()))?;
    let check = SetupCheck { database, session: &session };
    let nodes = session.get_cluster_state().get_nodes_info().to_vec();
    let Some(replication) = check.replication().await? else {
        let keyspace = &database.options.keyspace;
        let text = format!("keyspace {keyspace} is not there: run `mqtt-server cluster create` once");
        return Ok(vec![fatal(text)]);
    };
    let mut found = judge_replication(&replication, &nodes_by_datacenter(&nodes));
    found.extend(check.tables().await?);
    let has_tablets = check.has_tablets(&nodes).await?;
    for node in &nodes {
        // A node that is down tells nothing; the others do.
        if node.is_connected() {
            found.extend(check.node(node, has_tablets).await?);
        }
    }
    let is_usable = !found.iter().any(|finding| finding.is_fatal);
    match check.rights().await {
        Ok(lacking) => found.extend(lacking),
        Err(unknown) if is_usable => return Err(unknown),
        Err(_) => {}
    }
    let mut different = Vec::new();
    for finding in found {
        if !different.contains(&finding) {
            different.push(finding);
        }
    }
    Ok(different)
}

fn fatal(text: impl Into<String>) -> Finding {
    Finding { is_fatal: true, text: text.into() }
}

fn warning(text: impl Into<String>) -> Finding {
    Finding { is_fatal: false, text: text.into() }
}

fn nodes_by_datacenter(nodes: &[Arc<Node>]) -> BTreeMap<String, usize> {
    let mut count = BTreeMap::new();
    for node in nodes {
        *count.entry(node.datacenter.clone().unwrap_or_default()).or_default() += 1;
    }
    count
}

/// Questions to the database.
struct SetupCheck<'a> {
    database: &'a LedgerDatabase,
    session: &'a Session,
}

impl SetupCheck<'_> {
    async fn ask(&self, text: &str, node: Option<&Arc<Node>>) -> Result<QueryResult, ExecutionError> {
        let mut statement = Statement::new(text.replace("{}", &self.database.options.keyspace));
        statement.set_request_timeout(Some(LIMIT));
        statement.set_is_idempotent(true);
        statement.set_consistency(Consistency::One);
        if let Some(node) = node {
            let only = SingleTargetLoadBalancingPolicy::new(NodeIdentifier::HostId(node.host_id), None);
            statement.set_load_balancing_policy(Some(only));
        }
        self.session.query_unpaged(statement, ()).await
    }

    fn unknown(&self, doing: &str, error: &ExecutionError) -> Unknown {
        Unknown(errors::failed(doing, error, &self.database.options).to_string())
    }

    /// Options of the keyspace's replication, if it is there.
    async fn replication(&self) -> Result<Option<HashMap<String, String>>, Unknown> {
        let text = "SELECT replication FROM system_schema.keyspaces WHERE keyspace_name = '{}'";
        let rows = self.ask(text, None).await.map_err(|e| self.unknown("read the schema", &e))?;
        let rows = rows.into_rows_result().map_err(damaged)?;
        let row = rows.maybe_first_row::<(HashMap<String, String>,)>().map_err(damaged)?;
        Ok(row.map(|(options,)| options))
    }

    async fn tables(&self) -> Result<Vec<Finding>, Unknown> {
        let text = "SELECT table_name, gc_grace_seconds, default_time_to_live FROM system_schema.tables WHERE keyspace_name = '{}'";
        let rows = self.ask(text, None).await.map_err(|e| self.unknown("read the schema", &e))?;
        let rows = rows.into_rows_result().map_err(damaged)?;
        let mut found = HashMap::new();
        for row in rows.rows::<(String, i32, i32)>().map_err(damaged)? {
            let (table, gc_grace, ttl) = row.map_err(damaged)?;
            found.insert(table, (gc_grace, ttl));
        }
        let keyspace = &self.database.options.keyspace;
        Ok(TABLES
            .iter()
            .flat_map(|(table, _)| judge_table(keyspace, table, found.get(*table).copied()))
            .collect())
    }

    /// Returns whether Scylla divides the keyspace into tablets.
    async fn has_tablets(&self, nodes: &[Arc<Node>]) -> Result<bool, Unknown> {
        if !nodes.iter().any(is_scylla) {
            return Ok(false);
        }
        let text = "SELECT initial_tablets FROM system_schema.scylla_keyspaces WHERE keyspace_name = '{}'";
        match self.ask(text, None).await {
            Ok(rows) => {
                let rows = rows.into_rows_result().map_err(damaged)?;
                let row = rows.maybe_first_row::<(Option<i32>,)>().map_err(damaged)?;
                Ok(row.is_some_and(|(tablets,)| tablets.is_some()))
            }
            // Versions before tablets have no such table.
            Err(e) if matches!(errors::kind(&e), ErrorKind::Schema | ErrorKind::Rejected) => Ok(false),
            Err(e) => Err(self.unknown("read the schema", &e)),
        }
    }

    async fn node(&self, node: &Arc<Node>, has_tablets: bool) -> Result<Vec<Finding>, Unknown> {
        let (version, settings) = if is_scylla(node) {
            (
                "SELECT version FROM system.versions",
                "SELECT name, value FROM system.config WHERE name = 'commitlog_sync'",
            )
        } else {
            ("SELECT release_version FROM system.local", "")
        };
        let of_cassandra =
            format!("SELECT name, value FROM system_views.settings WHERE name IN ({SETTINGS})");
        let settings = if settings.is_empty() { &*of_cassandra } else { settings };
        let rows = self.ask(version, Some(node)).await.map_err(|e| self.unknown("read a version", &e))?;
        let rows = rows.into_rows_result().map_err(damaged)?;
        let version = rows.maybe_first_row::<(String,)>().map_err(damaged)?.unwrap_or_default().0;
        let mut found =
            if is_scylla(node) { judge_scylla(&version, has_tablets) } else { judge_cassandra(&version) };
        match self.ask(settings, Some(node)).await {
            Ok(rows) => {
                let rows = rows.into_rows_result().map_err(damaged)?;
                for row in rows.rows::<(String, Option<String>)>().map_err(damaged)? {
                    let (name, value) = row.map_err(damaged)?;
                    found.extend(judge_setting(&name, value.as_deref().unwrap_or_default()));
                }
            }
            Err(e) => {
                let table = if is_scylla(node) { "system.config" } else { "system_views.settings" };
                let user = &self.database.options.username;
                found.push(warning(match errors::kind(&e) {
                    ErrorKind::Denied => format!(
                        "commitlog_sync and paxos_variant were not looked at, as user {user:?} must not read {table}: \
                         GRANT SELECT ON {table} TO {user}"
                    ),
                    _ => format!("commitlog_sync and paxos_variant were not looked at: {table}: {e}"),
                }));
            }
        }
        Ok(found)
    }

    /// Rights that the user lacks.
    async fn rights(&self) -> Result<Vec<Finding>, Unknown> {
        let options = &self.database.options;
        let mut found = Vec::new();
        for probe in PROBES {
            let mut statement = Statement::new(probe.replace("{}", &options.keyspace));
            statement.set_request_timeout(Some(LIMIT));
            statement.set_consistency(Consistency::Quorum);
            statement.set_serial_consistency(Some(SerialConsistency::Serial));
            let Err(error) = self.session.query_unpaged(statement, ()).await else { continue };
            if errors::kind(&error) != ErrorKind::Denied {
                return Err(self.unknown("try a conditional write", &error));
            }
            let (keyspace, user) = (&options.keyspace, &options.username);
            found.push(fatal(format!(
                "user {user:?} lacks rights on keyspace {keyspace}: GRANT SELECT ON KEYSPACE {keyspace} TO {user} and \
                 GRANT MODIFY ON KEYSPACE {keyspace} TO {user}"
            )));
        }
        Ok(found)
    }
}

fn is_scylla(node: &Arc<Node>) -> bool {
    node.sharder().is_some()
}

/// Replicas that an option of a strategy names: a number, or a list of racks. None for transient ones.
fn replicas(value: &str) -> Option<usize> {
    if value.starts_with('[') {
        return Some(value.split(',').count());
    }
    value.parse().ok()
}

fn judge_replication(options: &HashMap<String, String>, nodes: &BTreeMap<String, usize>) -> Vec<Finding> {
    let class = options.get("class").and_then(|class| class.rsplit('.').next()).unwrap_or_default();
    let counted: Option<Vec<(&String, usize)>> = options
        .iter()
        .filter(|(name, _)| *name != "class")
        .map(|(name, value)| Some((name, replicas(value)?)))
        .collect();
    let counted = match counted {
        Some(counted) if matches!(class, "SimpleStrategy" | "NetworkTopologyStrategy") => counted,
        _ => {
            return vec![fatal(format!(
                "the keyspace is replicated by {options:?}, which no quorum is counted for: use NetworkTopologyStrategy \
                 with 3 full replicas"
            ))];
        }
    };
    let factor: usize = counted.iter().map(|(_, replicas)| replicas).sum();
    let there: usize = nodes.values().sum();
    let mut found = Vec::new();
    if factor < 3 && there == 1 {
        found.push(warning(
            "THIS IS A TEST: the database has one node. With it everything is lost and everything stands still. A ledger \
             needs three nodes and replication factor 3",
        ));
    } else if factor < 3 {
        // By its name: without, existing datacenters keep what they have.
        let datacenter = nodes.keys().next().map_or("DATACENTER", |name| name);
        found.push(fatal(format!(
            "the replication factor is {factor}: a lost node takes what was acknowledged with it, or stops all. ALTER KEYSPACE \
             with replication = {{'class': 'NetworkTopologyStrategy', '{datacenter}': 3}}, then run `nodetool repair \
             --full` on each node"
        )));
    }
    let quorum = factor / 2 + 1;
    if there < factor {
        let text = format!(
            "{factor} replicas are to be kept and {there} nodes are known: add nodes, or lower the replication factor"
        );
        found.push(Finding { is_fatal: there < quorum, text });
    }
    if nodes.len() > 1 && class == "SimpleStrategy" {
        found.push(warning(
            "the keyspace has SimpleStrategy and the database several datacenters: one of them may hold a quorum of some \
             rows and none of others. ALTER KEYSPACE to NetworkTopologyStrategy with 3 replicas in one of them",
        ));
    }
    if counted.iter().filter(|(_, replicas)| *replicas > 0).count() > 1 {
        found.push(warning(
            "the keyspace has replicas in several datacenters: each acknowledgement waits for the distance between them. \
             Keep them in the one where the gateways are, unless that is meant",
        ));
    }
    found
}

fn judge_table(keyspace: &str, table: &str, options: Option<(i32, i32)>) -> Vec<Finding> {
    let Some((gc_grace, ttl)) = options else {
        let text = format!("table {keyspace}.{table} is not there: run `mqtt-server cluster create` once");
        return vec![fatal(text)];
    };
    let mut found = Vec::new();
    if gc_grace < LEAST_GC_GRACE {
        found.push(warning(format!(
            "gc_grace_seconds of {keyspace}.{table} is {gc_grace}: writes that a node missed are not kept for it that long, \
             and removed rows may come back. ALTER TABLE {keyspace}.{table} WITH gc_grace_seconds = 864000"
        )));
    }
    if ttl != 0 {
        found.push(fatal(format!(
            "rows of {keyspace}.{table} vanish after {ttl} s: ALTER TABLE {keyspace}.{table} WITH default_time_to_live = 0"
        )));
    }
    found
}

/// Numbers that a version begins with: `5.0.9`, `4.0-beta4`, `2025.4.0~rc1`.
fn numbers(version: &str) -> [u32; 3] {
    let released = version.split(|c: char| !c.is_ascii_digit() && c != '.').next().unwrap_or_default();
    let mut parts = released.split('.').map(|part| part.parse().unwrap_or_default());
    std::array::from_fn(|_| parts.next().unwrap_or_default())
}

fn judge_cassandra(version: &str) -> Vec<Finding> {
    let is_fixed = match numbers(version) {
        [3, 0, patch] => patch >= 24,
        [3, 11, patch] => patch >= 10,
        [4, 0, 0] => !version.contains("alpha") && !version.contains("beta"),
        [major, ..] => major >= 4,
    };
    if is_fixed {
        return Vec::new();
    }
    vec![fatal(format!(
        "Cassandra {version} may answer a serial read with what was never decided (CASSANDRA-12126), so two gateways could \
         own one home: upgrade to 4.1 or 5"
    ))]
}

fn judge_scylla(version: &str, has_tablets: bool) -> Vec<Finding> {
    let [major, minor, _] = numbers(version);
    if !has_tablets || (major, minor) >= (2025, 4) {
        return Vec::new();
    }
    vec![fatal(format!(
        "Scylla {version} has no conditional writes in keyspaces with tablets: upgrade to 2025.4, or make the keyspace by \
         hand with tablets = {{'enabled': false}} before `mqtt-server cluster create`"
    ))]
}

fn judge_setting(name: &str, value: &str) -> Option<Finding> {
    let value = value.trim_matches('"');
    match name {
        "commitlog_sync" if value == "periodic" => Some(warning(
            "commitlog_sync is periodic: if a quorum of nodes loses power at once, up to the last 10 s of what was \
             acknowledged are lost (commitlog_sync_period). Set commitlog_sync to group or batch, or keep the nodes apart",
        )),
        "paxos_variant" if value.contains("without_linearizable_reads") => Some(fatal(format!(
            "paxos_variant is {value}: a serial read may miss a change of the view. Set it to v2"
        ))),
        "paxos_variant" if value == "v1" => Some(warning(
            "paxos_variant is v1, which is not safe while nodes join or leave: set it to v2, and run \
             `nodetool repair --paxos-only` regularly",
        )),
        "minimum_timestamp_fail_threshold" if !matches!(value, "" | "null") => Some(fatal(
            "minimum_timestamp_fail_threshold is set: rows of the ledger have timestamp 1 and are refused. Remove it",
        )),
        "user_timestamps_enabled" if value == "false" => Some(fatal(
            "user_timestamps_enabled is false: rows of the ledger come with a timestamp and are refused. Set it to true",
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(options: &[(&str, &str)], nodes: &[(&str, usize)]) -> Vec<(bool, String)> {
        let options = options.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let nodes = nodes.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect();
        let found = judge_replication(&options, &nodes);
        found.into_iter().map(|finding| (finding.is_fatal, finding.text)).collect()
    }

    const NETWORK: (&str, &str) = ("class", "org.apache.cassandra.locator.NetworkTopologyStrategy");
    const SIMPLE: (&str, &str) = ("class", "org.apache.cassandra.locator.SimpleStrategy");

    #[test]
    fn fewer_than_three_copies_are_refused_but_for_a_test_on_one_node() {
        assert_eq!(judged(&[NETWORK, ("dc1", "3")], &[("dc1", 3)]), []);
        assert_eq!(judged(&[NETWORK, ("dc1", "['a', 'b', 'c']")], &[("dc1", 3)]), []);
        let two = judged(&[NETWORK, ("dc1", "2")], &[("dc1", 3)]);
        assert!(matches!(&*two, [(true, text)] if text.contains("replication factor is 2")), "{two:?}");
        let test = judged(&[SIMPLE, ("replication_factor", "1")], &[("dc1", 1)]);
        assert!(matches!(&*test, [(false, text)] if text.contains("TEST")), "{test:?}");
        let never = judged(&[NETWORK, ("dc1", "3")], &[("dc1", 1)]);
        assert!(matches!(&*never, [(true, text)] if text.contains("add nodes")), "{never:?}");
        let transient = judged(&[NETWORK, ("dc1", "3/1")], &[("dc1", 3)]);
        assert!(matches!(&*transient, [(true, _)]), "{transient:?}");
    }

    #[test]
    fn several_datacenters_are_told_about() {
        let simple = judged(&[SIMPLE, ("replication_factor", "3")], &[("dc1", 3), ("dc2", 3)]);
        assert!(matches!(&*simple, [(false, text)] if text.contains("SimpleStrategy")), "{simple:?}");
        let both = judged(&[NETWORK, ("dc1", "3"), ("dc2", "3")], &[("dc1", 3), ("dc2", 3)]);
        assert!(matches!(&*both, [(false, text)] if text.contains("several datacenters")), "{both:?}");
    }

    #[test]
    fn versions_without_a_right_serial_read_are_refused() {
        for version in ["3.0.23", "3.11.9", "2.2.19", "4.0-beta3", ""] {
            assert!(judge_cassandra(version).iter().any(|finding| finding.is_fatal), "{version}");
        }
        for version in ["3.0.24", "3.11.10", "4.0", "4.0.1", "4.1.9", "5.0.9", "5.1-SNAPSHOT"] {
            assert_eq!(judge_cassandra(version), [], "{version}");
        }
        for (version, has_tablets, is_right) in [
            ("6.2.3-0.20250119.bd0a0ec", true, false),
            ("2025.3.9", true, false),
            ("2025.3.9", false, true),
            ("2025.4.0-rc1", true, true),
            ("2026.1.0", true, true),
        ] {
            assert_eq!(judge_scylla(version, has_tablets).is_empty(), is_right, "{version}");
        }
    }

    #[test]
    fn settings_that_promise_less_are_named() {
        let is_fatal = |name, value| judge_setting(name, value).map(|finding| finding.is_fatal);
        assert_eq!(is_fatal("commitlog_sync", "periodic"), Some(false));
        assert_eq!(is_fatal("commitlog_sync", "\"periodic\""), Some(false));
        assert_eq!(is_fatal("commitlog_sync", "batch"), None);
        assert_eq!(is_fatal("paxos_variant", "v1"), Some(false));
        assert_eq!(is_fatal("paxos_variant", "v2_without_linearizable_reads"), Some(true));
        assert_eq!(is_fatal("paxos_variant", "v2"), None);
        assert_eq!(is_fatal("minimum_timestamp_fail_threshold", "null"), None);
        assert_eq!(is_fatal("minimum_timestamp_fail_threshold", "1d"), Some(true));
        assert_eq!(is_fatal("user_timestamps_enabled", "false"), Some(true));
        assert!(judge_table("k", "ledger", Some((864_000, 0))).is_empty());
        assert!(judge_table("k", "ledger", Some((864_000, 60)))[0].is_fatal);
        assert!(!judge_table("k", "ledger", Some((600, 0)))[0].is_fatal);
        assert!(judge_table("k", "ledger", None)[0].is_fatal);
    }
}
