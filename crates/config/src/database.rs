//! `[database]`: how latest values are kept in the Cassandra or Scylla cluster that `db_addr` names.

use std::{path::PathBuf, time::Duration};

use gateway_core::database::{Compression, Consistency};
use serde::{Deserialize, Serialize};

use super::{
    Config, ConfigError, Problem, Replication, Secret, Span,
    address::optional,
    contact_point::contact_point,
    secret::HIDDEN,
    validate::{Check, filter_is_valid},
};

/// The longest that a database lets a row live.
const MAX_TTL: Duration = Duration::from_secs(20 * 365 * 24 * 3600);

/// One `[[database.ttl]]` or `[[database.history]]` entry.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct TtlRule {
    /// Topics.
    pub filter: String,
    /// Lifetime of the values kept of them; zero is for ever, which no history is.
    pub ttl: Span,
}

/// `[database.tls]`: TLS to the cluster, if a CA is named.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct DatabaseTls {
    /// CA of the nodes' certificates, PEM; empty speaks without TLS.
    #[serde(with = "optional")]
    pub ca: Option<PathBuf>,
    /// Certificate chain that the gateway shows, PEM.
    #[serde(with = "optional")]
    pub cert: Option<PathBuf>,
    /// Its private key, PEM.
    #[serde(with = "optional")]
    pub key: Option<PathBuf>,
}

/// `[database]`: what matters only with `db_addr`.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Database {
    /// Datacenter whose nodes are asked; empty asks all.
    pub datacenter: String,
    /// Keyspace of the tables.
    pub keyspace: String,
    /// Copies of each row, used when the keyspace is made.
    pub replication: Replication,
    /// Make keyspace and tables, and upgrade them.
    pub migrate: bool,
    /// User name; empty logs in without.
    pub username: String,
    /// Password.
    pub password: Secret,
    /// File with the password, read at start.
    #[serde(with = "optional")]
    pub password_file: Option<PathBuf>,
    /// Copies that must have a value before it counts as written.
    pub write_consistency: Consistency,
    /// Copies that are asked for a value.
    pub read_consistency: Consistency,
    /// Time to connect to one node.
    pub connect_timeout: Span,
    /// Time for one request.
    pub request_timeout: Span,
    /// A request unanswered for this long goes to another node too; zero is never.
    pub speculative_delay: Span,
    /// Number of other nodes it may be sent to.
    pub speculative_attempts: usize,
    /// Compression of requests and answers.
    pub compression: Compression,
    /// Most requests under way.
    pub concurrency: usize,
    /// Who this gateway is, written with each value; empty takes the id in the data directory.
    pub server_id: String,
    /// Keep in the data directory what the database does not take, while it is away and at shutdown.
    pub spill: bool,
    /// While the database is away keep more there than `latest.max_bytes`.
    pub spill_running: bool,
    /// While the database is away, answer reads from what waits for it.
    pub memory_reads: bool,
    /// Lifetime of values, by topic; the first rule that matches counts.
    pub ttl: Vec<TtlRule>,
    /// Topics of which every message is kept, and how long; the first rule that matches counts.
    pub history: Vec<TtlRule>,
    /// `[database.tls]`.
    pub tls: DatabaseTls,
}

impl Default for Database {
    fn default() -> Self {
        Self {
            datacenter: String::new(),
            keyspace: "mqtt".to_owned(),
            replication: Replication::default(),
            migrate: true,
            username: String::new(),
            password: Secret::default(),
            password_file: None,
            write_consistency: Consistency::LocalQuorum,
            read_consistency: Consistency::LocalQuorum,
            connect_timeout: Span(Duration::from_secs(5)),
            request_timeout: Span(Duration::from_secs(5)),
            speculative_delay: Span(Duration::from_millis(500)),
            speculative_attempts: 1,
            compression: Compression::None,
            concurrency: 128,
            server_id: String::new(),
            spill: true,
            spill_running: false,
            memory_reads: false,
            ttl: Vec::new(),
            history: Vec::new(),
            tls: DatabaseTls::default(),
        }
    }
}

impl Config {
    /// The nodes of `db_addr`, each as `host:port`; empty if latest values stay in the data directory.
    pub fn contact_points(&self) -> Vec<String> {
        let listed = self.db_addr.iter().flat_map(|list| list.split(','));
        listed.filter_map(|point| contact_point(point).ok()).collect()
    }

    /// The password for the database, from its file if there is one. Reads the file.
    ///
    /// # Errors
    /// The file cannot be read or is empty.
    pub fn database_password(&self) -> Result<Secret, ConfigError> {
        let Some(path) = &self.database.password_file else { return Ok(self.database.password.clone()) };
        let failed = |problem: String| {
            let fix = "name a file that holds the password alone, readable for this user";
            ConfigError(vec![Problem::new("database.password_file", path.display(), problem, fix)])
        };
        let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
        match text.trim_end_matches(['\r', '\n']) {
            "" => Err(failed("is empty".to_owned())),
            password => Ok(password.to_owned().into()),
        }
    }

    pub(super) fn check_database(&self, check: &mut Check) {
        if let Some(list) = &self.db_addr {
            self.check_contact_points(list, check);
        }
        let database = &self.database;
        let name = &database.keyspace;
        let good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        if name.len() > 48 || !name.starts_with(|c: char| c.is_ascii_lowercase()) || !name.chars().all(good) {
            check.fail(
                "database.keyspace",
                format!("\"{name}\""),
                "not a name of a keyspace",
                "use up to 48 of a-z, 0-9 and _, a letter first",
            );
        }
        let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':');
        if database.server_id.len() > 64 || !database.server_id.chars().all(good) {
            check.fail(
                "database.server_id",
                &database.server_id,
                "not an id",
                "use up to 64 letters, digits, dots, colons, - and _, or empty for the id in the data directory",
            );
        }
        if !database.read_consistency.reads() {
            check.fail(
                "database.read_consistency",
                database.read_consistency,
                "is for writes only",
                "use one, local_one, two, three, quorum, local_quorum or all",
            );
        }
        for (key, span) in
            [("connect_timeout", database.connect_timeout), ("request_timeout", database.request_timeout)]
        {
            check.positive(&format!("database.{key}"), span, span.0.is_zero());
        }
        check.positive("database.concurrency", database.concurrency, database.concurrency == 0);
        if database.spill_running && !database.spill {
            check.fail("database.spill_running", true, "database.spill is off", "set both or none");
        }
        self.check_database_login(check);
        self.check_rules(check);
    }

    fn check_rules(&self, check: &mut Check) {
        let history = &self.database.history;
        if !history.is_empty() && self.db_addr.is_none() {
            let filters: Vec<_> = history.iter().map(|rule| &*rule.filter).collect();
            check.fail(
                "database.history",
                filters.join(", "),
                "there is no database to keep it",
                "set db_addr, or remove it",
            );
        }
        for rule in history {
            check.positive("database.history", rule.ttl, rule.ttl.0.is_zero());
        }
        let values = self.database.ttl.iter().map(|rule| ("database.ttl", rule));
        for (key, rule) in values.chain(history.iter().map(|rule| ("database.history", rule))) {
            if !filter_is_valid(&rule.filter) {
                check.fail(
                    key,
                    &rule.filter,
                    "not a topic filter",
                    "use + as a whole level and # as the last level",
                );
            }
            let life = rule.ttl.0;
            if life > MAX_TTL || life.subsec_nanos() > 0 {
                check.fail(key, rule.ttl, "not a life that a row can have", "use 1s to 7300d, or 0s");
            }
        }
    }

    fn check_contact_points(&self, list: &str, check: &mut Check) {
        let bad = list.split(',').find_map(|point| Some((point, contact_point(point).err()?)));
        if let Some((point, problem)) = bad {
            let (problem, fix) = problem.split_once("; ").unwrap_or((
                &problem,
                "write HOST[:PORT][,HOST...], such as 10.0.0.1,10.0.0.2:9042 or [fd00::1]:9042",
            ));
            check.fail("db_addr", list, format!("{:?} {problem}", point.trim()), fix);
        }
        if !self.latest.enabled {
            check.fail(
                "db_addr",
                list,
                "latest values are switched off",
                "set latest.enabled = true, or remove db_addr",
            );
        }
    }

    fn check_database_login(&self, check: &mut Check) {
        let Database { username, password, password_file, tls, .. } = &self.database;
        if !password.is_empty() && password_file.is_some() {
            check.fail("database.password", HIDDEN, "password_file is set too", "set one of them");
        }
        let has_password = !password.is_empty() || password_file.is_some();
        if username.is_empty() && has_password {
            check.fail("database.username", "\"\"", "a password without a user name", "set both or none");
        }
        if !username.is_empty() && !has_password {
            check.fail(
                "database.username",
                username,
                "a user name without a password",
                "set database.password_file, or MQTT_SERVER_DATABASE__PASSWORD",
            );
        }
        if tls.cert.is_some() != tls.key.is_some() {
            let (set, unset) = if tls.cert.is_some() { ("cert", "key") } else { ("key", "cert") };
            check.fail(
                format!("database.tls.{unset}"),
                "\"\"",
                format!("{set} is set without {unset}"),
                "set both or none",
            );
        }
        if tls.ca.is_none() && (tls.cert.is_some() || tls.key.is_some()) {
            check.fail(
                "database.tls.ca",
                "\"\"",
                "a certificate without a CA for the nodes'",
                "set ca, which switches TLS on",
            );
        }
    }
}
