//! A database of a test's own, which keeps the ledger, and the ways of gateways to it.

use std::{
    path::Path,
    process::{Command, Output, Stdio},
};

use scylla::{client::session_builder::SessionBuilder, statement::Statement};
use tokio_stream::StreamExt as _;

use super::{
    proxy::{Dialect, Line, on_host},
    support::ports::free_ports,
};

/// A database, dropped with its data.
pub(crate) enum Engine {
    /// A primary with a synchronous standby.
    Postgres(u16),
    /// Three nodes.
    Cassandra(u16),
}

impl Engine {
    /// Starts PostgreSQL; nothing where it is switched off or cannot be had, which is said.
    pub(crate) fn postgres() -> Option<Self> {
        if std::env::var("MQTT_SERVER_TEST_POSTGRES").is_ok_and(|value| value == "none") {
            println!("!!! SKIPPED: two gateways on PostgreSQL: MQTT_SERVER_TEST_POSTGRES is none");
            return None;
        }
        Self::Postgres(free_ports(2)).started(&["start", "--standby"])
    }

    /// Starts Cassandra; nothing where it cannot be had, which is said.
    pub(crate) fn cassandra() -> Option<Self> {
        Self::Cassandra(free_ports(2)).started(&["start"])
    }

    fn started(self, arguments: &[&str]) -> Option<Self> {
        let started = self.run(arguments);
        let said = String::from_utf8_lossy(&started.stderr).into_owned();
        if started.status.code() == Some(3) {
            println!("!!! SKIPPED: two gateways on a ledger: {said}");
            return None;
        }
        assert!(started.status.success(), "{said}");
        Some(self)
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let (script, variable, port) = match self {
            Self::Postgres(port) => ("scripts/postgres.sh", "POSTGRES_PORT", port),
            Self::Cassandra(port) => ("scripts/cassandra.sh", "CASSANDRA_PORT", port),
        };
        let mut command = Command::new(root.join(script));
        command.args(arguments).env(variable, port.to_string()).stdin(Stdio::null());
        if !self.is_postgres() {
            command.env("CASSANDRA_NODES", "3").env("CASSANDRA_YAML", "paxos_variant: v2");
        }
        command.output().expect("run the script of the database")
    }

    /// Has the script of the database do something, and returns what it prints.
    ///
    /// # Panics
    /// If it fails.
    pub(crate) fn order(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Servers without which no durable write is answered: PostgreSQL's primary, or two nodes of three.
    fn majority(&self) -> &[&'static str] {
        if self.is_postgres() { &["primary"] } else { &["2", "3"] }
    }

    /// Does this to so many servers that no durable write is answered.
    pub(crate) fn order_majority(&self, what: &str) {
        for server in self.majority() {
            self.order(&[what, server]);
        }
    }

    /// PostgreSQL's primary, or one node of Cassandra, stands still.
    pub(crate) fn pause(&self) {
        self.order(&["pause", self.first()]);
    }

    /// And goes on.
    pub(crate) fn resume(&self) {
        self.order(&["resume", self.first()]);
    }

    fn first(&self) -> &'static str {
        if self.is_postgres() { "primary" } else { "1" }
    }

    /// Kills what [`Self::pause`] pauses. The data stay.
    pub(crate) fn kill(&self) {
        self.order(&["kill", self.first()]);
    }

    /// Starts what does not run, and waits until it answers.
    pub(crate) fn start(&self) {
        self.order(&["start"]);
    }

    pub(crate) fn is_postgres(&self) -> bool {
        matches!(self, Self::Postgres(_))
    }

    /// Bytes of all rows of a cluster's ledger that are there.
    pub(crate) fn ledger_bytes(&self, cluster: &str) -> u64 {
        match *self {
            Self::Postgres(_) => {
                let sum = format!(
                    "select coalesce(sum(octet_length(data)), 0) from mqtt_server.ledger \
                     join mqtt_server.cluster on cluster = id where name = '{cluster}'"
                );
                self.order(&["sql", "primary", &sum]).trim().parse().expect("a sum")
            }
            Self::Cassandra(port) => cassandra_bytes(port, cluster).expect("read the ledger"),
        }
    }

    /// A gateway's way to it.
    pub(crate) fn line(&self) -> Line {
        match *self {
            Self::Postgres(port) => {
                let ways = [(on_host(1, 0), on_host(1, port)), (on_host(1, 0), on_host(1, port + 1))];
                Line::start(Dialect::Postgres, &ways)
            }
            // The driver goes to each node's own address, on the port on which it has reached the first.
            Self::Cassandra(port) => {
                let entrance = free_ports(1);
                let way = |host| (on_host(host, entrance), on_host(host, port));
                Line::start(Dialect::Cassandra, &[way(1), way(2), way(3)])
            }
        }
    }

    /// Value of `cluster.ledger` for a gateway that has this way.
    pub(crate) fn ledger(&self, line: &Line, cluster: &str) -> String {
        let hosts: Vec<String> = line.entrances().iter().map(ToString::to_string).collect();
        let hosts = hosts.join(",");
        match self {
            Self::Postgres(_) => format!("postgres://ledger@{hosts}/ledger"),
            Self::Cassandra(_) => format!("cassandra://{hosts}/{cluster}"),
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.run(&["stop"]);
    }
}

fn cassandra_bytes(port: u16, keyspace: &str) -> Result<u64, Box<dyn std::error::Error>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let session = SessionBuilder::new().known_node(format!("127.0.0.1:{port}")).build().await?;
        let mut statement = Statement::new(format!("SELECT data FROM {keyspace}.ledger"));
        // Rows of 128 KiB: the driver's own pages do not fit in a node's memory.
        statement.set_page_size(32);
        let rows = session.query_iter(statement, ()).await?;
        let mut rows = rows.rows_stream::<(Vec<u8>,)>()?;
        let mut bytes = 0;
        while let Some(row) = rows.next().await {
            bytes += row?.0.len() as u64;
        }
        Ok(bytes)
    })
}
