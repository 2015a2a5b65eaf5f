//! `[cluster]`: gateways that share one home, whose ledger is in a database.

use std::{net::SocketAddr, path::PathBuf};

use serde::{Deserialize, Serialize};

use super::{
    Config, ConfigError, DatabaseTls, Problem, Secret, TlsFiles, TlsVersion, address::optional,
    validate::Check,
};

/// Port of PostgreSQL, and of Cassandra.
const POSTGRES_PORT: u16 = 5432;
const CASSANDRA_PORT: u16 = 9042;

/// Longest name of a cluster or node.
const MAX_NAME: usize = 64;

/// Most homes of a cluster: each has threads and files of its own.
const MAX_HOMES: u16 = 12;

/// Form of `cluster.ledger`.
const LEDGER_FORM: &str = "write postgres://USER@HOST[:PORT][,HOST...]/DATABASE or cassandra://[USER@]HOST[:PORT][,HOST...]/KEYSPACE";

/// `[cluster]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct ClusterSettings {
    /// Name of the cluster, the same on every gateway of it; empty is a gateway alone.
    pub name: String,
    /// Name of this gateway in it, which no other has; empty takes the name of the host.
    pub node: String,
    /// Database that keeps the ledger: `postgres://USER@HOST[:PORT][,HOST...]/DATABASE` or
    /// `cassandra://[USER@]HOST[:PORT][,HOST...]/KEYSPACE`.
    pub ledger: String,
    /// Password for it.
    pub password: Secret,
    /// File with the password, read at start.
    #[serde(with = "optional")]
    pub password_file: Option<PathBuf>,
    /// Datacenter of Cassandra whose nodes are asked; empty asks all.
    pub datacenter: String,
    /// Homes of the cluster, from 1 to 12, fixed when it is created. With one, a gateway serves and the others stand by; with more, the
    /// devices are spread over gateways that all serve, which needs `cluster.links`, `non_broker` and no consumer groups in this version.
    pub homes: u16,
    /// Take over when the gateway that serves is gone; without it only by command.
    pub standby: bool,
    /// Address under which backends reach this gateway, told to callers of another that stands by.
    pub address: String,
    /// `[cluster.tls]`: TLS to the database, if a CA is named.
    pub tls: DatabaseTls,
    /// `[cluster.links]`: connections between the gateways.
    pub links: LinkSettings,
}

/// `[cluster.links]`: with these, a gateway that stands by takes devices and calls, too, and passes them on to the one that serves.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct LinkSettings {
    /// Address for the other gateways, `IP:PORT`; without it there are no links.
    #[serde(with = "optional")]
    pub listen: Option<SocketAddr>,
    /// `HOST:PORT` by which the other gateways reach it; empty is `listen`.
    pub address: String,
    /// CA of the certificates of all gateways of the cluster, PEM, and of nobody else's.
    #[serde(with = "optional")]
    pub ca: Option<PathBuf>,
    /// Certificate chain of this gateway, PEM, with the name of its node as a DNS name.
    #[serde(with = "optional")]
    pub cert: Option<PathBuf>,
    /// Its private key, PEM.
    #[serde(with = "optional")]
    pub key: Option<PathBuf>,
}

impl LinkSettings {
    /// Returns whether there are links.
    pub fn is_on(&self) -> bool {
        self.listen.is_some()
    }

    /// The address that the other gateways are told.
    pub fn told_address(&self) -> String {
        match (&self.listen, self.address.as_str()) {
            (Some(listen), "") => listen.to_string(),
            (_, address) => address.to_owned(),
        }
    }

    /// Files for connections to others.
    pub fn client_files(&self) -> DatabaseTls {
        let Self { ca, cert, key, .. } = self;
        DatabaseTls { ca: ca.clone(), cert: cert.clone(), key: key.clone() }
    }
}

impl Default for ClusterSettings {
    fn default() -> Self {
        Self {
            name: String::new(),
            node: String::new(),
            ledger: String::new(),
            password: Secret::default(),
            password_file: None,
            datacenter: String::new(),
            homes: 1,
            standby: true,
            address: String::new(),
            tls: DatabaseTls::default(),
            links: LinkSettings::default(),
        }
    }
}

/// Kind of database that keeps a ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LedgerKind {
    /// PostgreSQL.
    Postgres,
    /// Cassandra or Scylla.
    Cassandra,
}

/// The parts of `cluster.ledger`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LedgerAddress {
    /// Kind of database.
    pub kind: LedgerKind,
    /// User name; empty logs in without.
    pub user: String,
    /// Hosts and ports.
    pub hosts: Vec<(String, u16)>,
    /// Database, or keyspace.
    pub database: String,
}

impl LedgerAddress {
    fn parse(text: &str) -> Result<Self, &'static str> {
        let (scheme, rest) = text.split_once("://").ok_or("has no scheme")?;
        let (kind, port) = match scheme {
            "postgres" | "postgresql" => (LedgerKind::Postgres, POSTGRES_PORT),
            "cassandra" | "scylla" => (LedgerKind::Cassandra, CASSANDRA_PORT),
            _ => return Err("names another database"),
        };
        let (user, rest) = rest.rsplit_once('@').unwrap_or(("", rest));
        if user.contains(':') {
            return Err("contains a password, which belongs into cluster.password_file");
        }
        if user.is_empty() && kind == LedgerKind::Postgres {
            return Err("names no user");
        }
        let (hosts, database) = rest.split_once('/').ok_or("names no database")?;
        let is_name = |name: &str| {
            !name.is_empty()
                && name.len() <= 63
                && name.chars().all(|c| c.is_ascii_alphanumeric() || "_-".contains(c))
        };
        if !is_name(database) {
            return Err("names no database of letters, digits, _ and -");
        }
        let hosts = hosts.split(',').map(|host| split_port(host, port).ok_or("names no host"));
        let hosts = hosts.collect::<Result<_, _>>()?;
        Ok(Self { kind, user: user.to_owned(), hosts, database: database.to_owned() })
    }
}

/// `HOST`, `HOST:PORT`, `[IPV6]` or `[IPV6]:PORT`.
fn split_port(text: &str, default: u16) -> Option<(String, u16)> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']')?;
            (host, rest.strip_prefix(':'))
        }
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    let port = port.map_or(Some(default), |port| port.parse().ok())?;
    (!host.is_empty() && port > 0).then(|| (host.to_owned(), port))
}

impl ClusterSettings {
    /// Returns whether this gateway is in a cluster.
    pub fn is_on(&self) -> bool {
        !self.name.is_empty()
    }

    /// The parts of `ledger`; `None` if it is not written as it must be.
    pub fn ledger_address(&self) -> Option<LedgerAddress> {
        LedgerAddress::parse(&self.ledger).ok()
    }
}

impl Config {
    /// The password for the ledger, from its file if there is one. Reads the file.
    ///
    /// # Errors
    /// The file cannot be read or is empty.
    pub fn ledger_password(&self) -> Result<Secret, ConfigError> {
        let Some(path) = &self.cluster.password_file else { return Ok(self.cluster.password.clone()) };
        let failed = |problem: String| {
            let fix = "name a file that holds the password alone, readable for this user";
            ConfigError(vec![Problem::new("cluster.password_file", path.display(), problem, fix)])
        };
        let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
        match text.trim_end_matches(['\r', '\n']) {
            "" => Err(failed("is empty".to_owned())),
            password => Ok(password.to_owned().into()),
        }
    }

    /// Returns whether the ledger keeps latest values, for want of a database that does.
    pub fn latest_in_ledger(&self) -> bool {
        let kind = self.cluster.ledger_address().map(|address| address.kind);
        self.cluster.is_on()
            && kind == Some(LedgerKind::Postgres)
            && self.latest.enabled
            && self.contact_points().is_empty()
    }

    pub(super) fn check_cluster(&self, check: &mut Check) {
        let cluster = &self.cluster;
        if !cluster.is_on() {
            if !cluster.ledger.is_empty() {
                check.fail("cluster.ledger", &cluster.ledger, "cluster.name is empty", "name the cluster");
            }
            return;
        }
        let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        for (key, name) in [("cluster.name", &cluster.name), ("cluster.node", &cluster.node)] {
            if name.len() > MAX_NAME || !name.chars().all(good) {
                check.fail(key, name, "not a name", "use up to 64 letters, digits, dots, - and _");
            }
        }
        let parsed = LedgerAddress::parse(&cluster.ledger);
        if let Err(problem) = &parsed {
            check.fail("cluster.ledger", format!("\"{}\"", cluster.ledger), *problem, LEDGER_FORM);
        }
        self.check_homes(check);
        if !self.store.enabled {
            check.fail(
                "cluster.name",
                &cluster.name,
                "the store is switched off, so that there is nothing to take over",
                "set store.enabled = true, or remove [cluster]",
            );
        }
        if parsed.is_ok_and(|ledger| ledger.kind == LedgerKind::Cassandra)
            && self.latest.enabled
            && self.db_addr.is_none()
        {
            check.fail(
                "cluster.ledger",
                &cluster.ledger,
                "latest values would stay in the data directory of one gateway",
                "set db_addr, so that they are in the database, too, or latest.enabled = false",
            );
        }
        if !cluster.password.is_empty() && cluster.password_file.is_some() {
            check.fail("cluster.password_file", "...", "cluster.password is set, too", "set one of them");
        }
        let DatabaseTls { ca, cert, key } = &cluster.tls;
        if ca.is_none() && (cert.is_some() || key.is_some()) {
            check.fail("cluster.tls.ca", "\"\"", "cert and key are not used without it", "name the CA, too");
        }
        if cert.is_some() != key.is_some() {
            check.fail("cluster.tls.cert", "...", "certificate and key belong together", "set both or none");
        }
        self.check_links(check);
    }

    fn check_homes(&self, check: &mut Check) {
        let homes = self.cluster.homes;
        if homes == 1 {
            return;
        }
        let mut fail = |problem: &str, fix: &str| check.fail("cluster.homes", homes, problem, fix);
        if homes == 0 || homes > MAX_HOMES {
            fail("not a number of homes", "write a number from 1 to 12");
        }
        if !self.cluster.links.is_on() {
            fail(
                "devices and calls come to gateways that do not have their home",
                "set cluster.links, or write 1",
            );
        }
        if !self.non_broker {
            fail(
                "messages between devices of different homes are not routed in this version",
                "set non_broker = true, or write 1",
            );
        }
        if self.groups.enabled {
            fail(
                "consumer groups would get messages of the first home alone in this version",
                "set groups.enabled = false, or write 1",
            );
        }
        if !self.bridges.is_empty() {
            fail(
                "bridges would get messages of the first home alone in this version",
                "remove [[bridges]], or write 1",
            );
        }
    }

    fn check_links(&self, check: &mut Check) {
        let LinkSettings { listen, address, ca, cert, key } = &self.cluster.links;
        let Some(listen) = listen else {
            if ca.is_some() || cert.is_some() || key.is_some() || !address.is_empty() {
                check.fail(
                    "cluster.links.listen",
                    "\"\"",
                    "the other keys of cluster.links are not used without it",
                    "set the address for the other gateways, such as 0.0.0.0:7400",
                );
            }
            return;
        };
        for (name, file) in
            [("cluster.links.ca", ca), ("cluster.links.cert", cert), ("cluster.links.key", key)]
        {
            if file.is_none() {
                check.fail(name, "\"\"", "gateways know each other by certificates", "name the PEM file");
            }
        }
        if address.is_empty() && listen.ip().is_unspecified() {
            check.fail(
                "cluster.links.address",
                "\"\"",
                "no other gateway reaches this one under the address of cluster.links.listen",
                "set HOST:PORT, such as gateway-a.example:7400",
            );
        } else if !address.is_empty() && split_port(address, 0).is_none_or(|(_, port)| port == 0) {
            check.fail("cluster.links.address", address, "has no host and port", "write HOST:PORT");
        }
        if self.cluster.node.contains('_') {
            check.fail(
                "cluster.node",
                &self.cluster.node,
                "with cluster.links the name stands in a certificate, where no name has _",
                "use letters, digits, dots and -",
            );
        }
    }

    /// Files for connections from other gateways, which have to show a certificate; `None` without links.
    pub fn links_tls(&self) -> Option<TlsFiles> {
        let LinkSettings { listen: Some(_), ca, cert: Some(cert), key: Some(key), .. } = &self.cluster.links
        else {
            return None;
        };
        Some(TlsFiles {
            cert: cert.clone(),
            key: key.clone(),
            certificates: Vec::new(),
            client_ca: ca.clone(),
            require_client_cert: true,
            crl: None,
            min_version: TlsVersion::V13,
            ciphersuites: Vec::new(),
            open_key_files: self.tls.open_key_files,
        })
    }
}
