//! Flags of the command line. They win over the environment, which wins over the file.

use std::{collections::BTreeMap, path::PathBuf};

use clap::Parser;

use super::LogFormat;

/// Flags of the command line that set something; the program adds commands to them.
#[derive(Debug, Clone, Default, Parser)]
#[allow(rustdoc::broken_intra_doc_links, reason = "the doc comments are the help text: [default: x]")]
pub struct Flags {
    /// Address of the default MQTT listener: ip:port, [v6]:port or unix:/path. It speaks TLS, or
    /// plain TCP with --non-tls [default: 127.0.0.1:8883]
    #[arg(short = 'a', long, value_name = "ADDR", help_heading = "Devices")]
    pub addr: Option<String>,
    /// Server certificate chain, PEM [default: server.crt]
    #[arg(short = 'c', long, value_name = "FILE", help_heading = "Devices")]
    pub cert: Option<PathBuf>,
    /// Private key of the certificate, PEM: PKCS#8, PKCS#1 or SEC1 [default: private.key]
    #[arg(short = 'k', long, value_name = "FILE", help_heading = "Devices")]
    pub key: Option<PathBuf>,
    /// The default listener speaks plain TCP
    #[arg(long, help_heading = "Devices")]
    pub non_tls: bool,
    /// Let devices connect that prove nothing about themselves, also from other machines
    #[arg(long, help_heading = "Devices")]
    pub allow_anonymous: bool,
    /// Devices talk to backends only, never to each other
    #[arg(short = 'n', long, help_heading = "Devices")]
    pub non_broker: bool,

    /// Address of the gRPC API [default: 127.0.0.1:10000]
    #[arg(long, value_name = "ADDR", help_heading = "Backends and operators")]
    pub grpc_addr: Option<String>,
    /// Address of the page with metrics and health [default: 127.0.0.1:9090]
    #[arg(long, value_name = "ADDR", help_heading = "Backends and operators")]
    pub http_addr: Option<String>,
    /// Allow gRPC and HTTP off the loopback interface although nothing asks who calls, and without TLS
    #[arg(long, help_heading = "Backends and operators")]
    pub insecure_grpc: bool,

    /// Directory of all that is kept on disk [default: ./data]
    #[arg(long, value_name = "DIR", help_heading = "Storage")]
    pub data_dir: Option<PathBuf>,
    /// Read the files of all stores page by page before they are used, also those that were closed cleanly, whatever
    /// time it takes
    #[arg(long, help_heading = "Storage")]
    pub verify_store: bool,
    /// Nodes of a Cassandra or Scylla cluster for latest values, HOST[:PORT][,HOST...]; without it they are kept in
    /// the data directory
    #[arg(short = 'd', long, visible_alias = "db_addr", value_name = "NODES", help_heading = "Storage")]
    pub db_addr: Option<String>,
    /// Make and upgrade the keyspace and tables of --db-addr [default: true]
    #[arg(long, value_name = "BOOL", help_heading = "Storage")]
    pub db_migrate: Option<bool>,

    /// Configuration file, TOML; also MQTT_SERVER_CONFIG
    #[arg(long, value_name = "FILE", help_heading = "Running")]
    pub config: Option<PathBuf>,
    /// Validate the configuration and exit
    #[arg(long, help_heading = "Running")]
    pub check: bool,
    /// For development on this machine, loopback only: makes certificates under certs/, and opens plaintext MQTT
    /// on port 1883 and WebSocket on port 8083 too, unless they are in use or listeners are configured
    #[arg(long, help_heading = "Running")]
    pub dev: bool,

    /// Log at level debug
    #[arg(long, help_heading = "Logs")]
    pub debug: bool,
    /// Log at level trace
    #[arg(long, conflicts_with = "debug", help_heading = "Logs")]
    pub trace: bool,
    /// Form of the log: human on a terminal and JSON elsewhere (auto), or one of them always
    #[arg(long, value_enum, value_name = "FORMAT", help_heading = "Logs")]
    pub log_format: Option<LogFormat>,
}

impl Flags {
    /// The configuration file to read: `--config`, else `MQTT_SERVER_CONFIG`.
    pub fn config_file(&self, env: &BTreeMap<String, String>) -> Option<PathBuf> {
        self.config.clone().or_else(|| env.get(super::CONFIG_VARIABLE).map(PathBuf::from))
    }

    /// The flags that were given, as (flag, configuration key, value).
    pub(super) fn settings(&self) -> Vec<(&'static str, &'static str, toml::Value)> {
        let path = |path: &Option<PathBuf>| path.as_ref().map(|p| p.to_string_lossy().into_owned());
        let texts = [
            ("--addr", "addr", self.addr.clone()),
            ("--cert", "cert", path(&self.cert)),
            ("--key", "key", path(&self.key)),
            ("--db-addr", "db_addr", self.db_addr.clone()),
            ("--grpc-addr", "grpc_addr", self.grpc_addr.clone()),
            ("--http-addr", "http_addr", self.http_addr.clone()),
            ("--data-dir", "data_dir", path(&self.data_dir)),
            ("--debug", "log.level", self.debug.then(|| "debug".to_owned())),
            ("--trace", "log.level", self.trace.then(|| "trace".to_owned())),
            ("--log-format", "log.format", self.log_format.map(|f| f.as_str().to_owned())),
        ];
        let switches = [
            ("--non-tls", "non_tls", self.non_tls),
            ("--non-broker", "non_broker", self.non_broker),
            ("--allow-anonymous", "auth.allow_anonymous", self.allow_anonymous),
            ("--dev", "dev", self.dev),
            ("--insecure-grpc", "insecure_grpc", self.insecure_grpc),
            ("--verify-store", "store.verify", self.verify_store),
        ];
        let migrate =
            self.db_migrate.map(|on| ("--db-migrate", "database.migrate", toml::Value::Boolean(on)));
        let texts =
            texts.into_iter().filter_map(|(flag, key, value)| Some((flag, key, toml::Value::String(value?))));
        let switches = switches
            .into_iter()
            .filter(|(_, _, on)| *on)
            .map(|(flag, key, _)| (flag, key, toml::Value::Boolean(true)));
        texts.chain(switches).chain(migrate).collect()
    }
}
