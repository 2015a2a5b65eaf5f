//! The database that keeps the ledger, with a runtime of its own: a store's writer may wait for it in any thread.

use std::{sync::Arc, time::Duration};

use cassandra::ledger::{CassandraLedger, LedgerOptions};
use config::{Config, LedgerAddress, LedgerKind};
use edge::tls;
use ledger::Ledger;
use postgres::{PostgresLedger, PostgresSettings};
use thiserror::Error;
use tokio::runtime::{Builder, Runtime};

/// Threads of the runtime: one may restore a home while the other beats.
const THREADS: usize = 2;

/// Time to connect to a node of Cassandra.
const CONNECT: Duration = Duration::from_secs(3);

/// A ledger that cannot be opened. Its database need not be there.
#[derive(Debug, Error)]
pub(crate) enum EngineError {
    /// The configuration cannot be used.
    #[error(transparent)]
    Config(#[from] config::ConfigError),
    /// A certificate or key cannot be used.
    #[error("tls for cluster: {0}")]
    Tls(#[from] tls::TlsError),
    /// The keyspace is not a name.
    #[error(transparent)]
    Store(#[from] store::StoreError),
    /// No thread can be made.
    #[error("start threads: {0}")]
    Io(#[from] std::io::Error),
}

/// The open engine. Dropping it does not wait for calls under way.
pub(crate) struct LedgerEngine {
    pub(crate) ledger: Arc<dyn Ledger>,
    runtime: Option<Runtime>,
}

impl LedgerEngine {
    /// Opens the ledger that `[cluster]` names. Connects when it can.
    pub(crate) fn open(config: &Config) -> Result<Self, EngineError> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("cluster")
            .enable_all()
            .build()?;
        let _entered = runtime.enter();
        let cluster = &config.cluster;
        let tls = tls::client_config(&cluster.tls, config.tls.open_key_files)?.map(Arc::new);
        let password = config.ledger_password()?.expose().to_owned();
        let address = cluster.ledger_address();
        let LedgerAddress { kind, user, hosts, database } = address.unwrap_or_else(|| LedgerAddress {
            kind: LedgerKind::Postgres,
            user: String::new(),
            hosts: Vec::new(),
            database: String::new(),
        });
        let hosts = hosts.into_iter().map(|(host, port)| match host.contains(':') {
            true => format!("[{host}]:{port}"),
            false => format!("{host}:{port}"),
        });
        let ledger: Arc<dyn Ledger> = match kind {
            LedgerKind::Postgres => Arc::new(PostgresLedger::start(PostgresSettings {
                hosts: hosts.collect(),
                user,
                password,
                database,
                tls_required: tls.is_some(),
                tls,
                cluster: cluster.name.as_str().into(),
                ..PostgresSettings::default()
            })),
            LedgerKind::Cassandra => Arc::new(CassandraLedger::new(LedgerOptions {
                contact_points: hosts.collect(),
                datacenter: cluster.datacenter.clone(),
                username: user,
                password,
                tls,
                keyspace: database,
                replication: config.database.replication.to_cql(),
                connect_timeout: CONNECT,
                ..LedgerOptions::default()
            })?),
        };
        drop(_entered);
        Ok(Self { ledger, runtime: Some(runtime) })
    }

    /// Its runtime.
    pub(crate) fn handle(&self) -> &tokio::runtime::Handle {
        // Taken by the drop alone.
        #[expect(clippy::expect_used, reason = "taken by the drop alone")]
        self.runtime.as_ref().expect("open").handle()
    }
}

impl Drop for LedgerEngine {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
