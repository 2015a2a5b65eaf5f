//! The command line. Flags win over the environment, which wins over the file.

use std::{collections::BTreeMap, path::PathBuf, sync::LazyLock};

use access::backends::Role;
use clap::{Args, Parser, Subcommand, ValueEnum};
use gateway_core::units::ByteSize;

use super::LogFormat;

/// Command-line flags.
#[derive(Debug, Clone, Default, Parser)]
#[allow(rustdoc::broken_intra_doc_links, reason = "the doc comments are the help text: [default: x]")]
#[command(name = "mqtt-server", version = version(), about = "MQTT for devices, gRPC for backends", args_conflicts_with_subcommands = true)]
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

    /// What to do instead of running the gateway.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// What to do instead of running the gateway.
#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Looks after a data directory
    #[command(subcommand)]
    Store(StoreCommand),
    /// Makes, lists and revokes the tokens of backends and operators
    #[command(subcommand)]
    Token(TokenCommand),
    /// Looks after a file of users and password hashes
    #[command(subcommand)]
    Passwd(PasswdCommand),
    /// Explains, checks and imports rules of what devices may do
    #[command(subcommand)]
    Rules(RulesCommand),
    /// Makes a configuration of a mosquitto.conf, and tells what it could not carry over. Exit code 1 if that is anything
    Import(ImportCommand),
    /// Talks to a running gateway: messages, devices, groups, commands and all else that its API has
    Ctl(Box<ctl::Args>),
}

/// The file to read and the files to write.
#[derive(Debug, Clone, Args)]
pub struct ImportCommand {
    /// The configuration file of Mosquitto
    pub file: PathBuf,
    /// File to write; standard output by default. An existing file is never overwritten
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// File for the rules of acl_file; by default rules.toml beside the output. An existing file is never overwritten
    #[arg(long, value_name = "FILE")]
    pub rules: Option<PathBuf>,
}

/// What to do with a rules file.
#[derive(Debug, Clone, Subcommand)]
pub enum RulesCommand {
    /// Explains rule by rule what a device may do. Exit code 0 if it is allowed, 1 if it is denied, 2 if the file cannot be used
    Test(Box<RulesTest>),
    /// Says whether a file can be used. Exit code 2 if it cannot
    Check {
        /// The file
        file: PathBuf,
    },
    /// Writes Mosquitto's acl_file as rules on standard output. Exit code 1 if a line of it is left out
    Import {
        /// The file of Mosquitto
        file: PathBuf,
    },
}

/// Whose right to what is explained.
#[derive(Debug, Clone, Args)]
pub struct RulesTest {
    /// The rules file
    #[arg(long, value_name = "FILE", required_unless_present = "config", conflicts_with = "config")]
    pub rules: Option<PathBuf>,
    /// Configuration file that names the rules file
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Client id
    #[arg(long, value_name = "ID")]
    pub client: String,
    /// User name; without it, --cn and --claim the device is anonymous
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,
    /// Common name of its certificate
    #[arg(long, value_name = "NAME")]
    pub cn: Option<String>,
    /// A group that its token or a hook gives it; may be repeated
    #[arg(long = "group", value_name = "NAME")]
    pub groups: Vec<String>,
    /// A claim of its token; may be repeated, also for several values of one claim
    #[arg(long = "claim", value_name = "NAME=VALUE", value_parser = claim)]
    pub claims: Vec<(String, String)>,
    /// Name of the listener
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub listener: String,
    /// QoS of what is published
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(..=2))]
    pub qos: u8,
    /// What is published is to be retained
    #[arg(long)]
    pub retain: bool,
    /// Bytes of payload, like 1000 or "64 KiB"
    #[arg(long, default_value = "0")]
    pub size: ByteSize,
    /// What it wants to do
    pub action: RulesAction,
    /// Topic, or filter of a subscription; none for connect
    #[arg(required_if_eq_any([("action", "publish"), ("action", "subscribe")]))]
    pub topic: Option<String>,
}

/// What a device wants to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RulesAction {
    /// Publish a message to a topic.
    Publish,
    /// Subscribe to a filter.
    Subscribe,
    /// Connect under the client id.
    Connect,
}

fn claim(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("a claim is NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

/// What to do with a password file. A running gateway reads it again by itself.
#[derive(Debug, Clone, Subcommand)]
pub enum PasswdCommand {
    /// Adds a user or changes its password, which is asked for, or the first line of standard input
    Add {
        /// The file; made if it is not there
        file: PathBuf,
        /// The user name
        user: String,
        /// For MQTT 5's enhanced authentication with SCRAM-SHA-256 too; faster to guess than the default, argon2id
        #[arg(long)]
        scram: bool,
    },
    /// Removes a user
    Remove {
        /// The file
        file: PathBuf,
        /// The user name
        user: String,
    },
    /// Says whether a password is the user's. Exit code 1 if it is not
    Check {
        /// The file
        file: PathBuf,
        /// The user name
        user: String,
    },
}

/// What to do with a data directory.
#[derive(Debug, Clone, Subcommand)]
pub enum StoreCommand {
    /// Looks at every record and changes nothing; no gateway may be running. Exit code 1 if anything is damaged
    Check {
        /// The data directory
        dir: PathBuf,
    },
    /// Writes the stores anew without free space; no gateway may be running
    Compact {
        /// The data directory
        dir: PathBuf,
    },
    /// Copies the stores while a gateway runs, or while none does
    Backup {
        /// The data directory
        dir: PathBuf,
        /// Where to; empty, or not there yet
        target: PathBuf,
    },
    /// Writes everything into one file of lines in JSON; no gateway may be running, but a backup does as well
    Export {
        /// The data directory
        dir: PathBuf,
        /// The file; not there yet
        file: PathBuf,
    },
    /// Makes a data directory from the file of an export
    Import {
        /// The file
        file: PathBuf,
        /// The data directory; empty, or not there yet
        dir: PathBuf,
    },
}

/// What to do with the tokens of backends and operators. A gateway that runs with the file takes the change in a few seconds.
#[derive(Debug, Clone, Subcommand)]
#[allow(rustdoc::broken_intra_doc_links, reason = "the doc comments are the help text: [default: x]")]
pub enum TokenCommand {
    /// Makes a token and shows it, once: the file has its hash only
    Create {
        /// What its holder may do: reader, publisher, consumer, operator or admin
        #[arg(long)]
        role: Role,
        /// Topic filters, separated by commas; without it all topics
        #[arg(long, value_name = "FILTERS", value_delimiter = ',')]
        topics: Option<Vec<String>>,
        /// Client ids, with * for any characters, separated by commas; without it all devices. Queues and packets of these
        /// devices show what others sent to them, too
        #[arg(long, value_name = "PATTERNS", value_delimiter = ',')]
        devices: Option<Vec<String>>,
        /// How long it is valid, like 90d, 12h or 30m, or never
        #[arg(long, value_name = "SPAN", default_value = "90d")]
        expires: String,
        /// Who has it, for the list
        #[arg(long, value_name = "TEXT", default_value = "")]
        note: String,
        /// The file, backends.tokens of the configuration; made if it is not there
        #[arg(long)]
        file: PathBuf,
    },
    /// Shows the tokens of a file, without what opens doors
    List {
        /// The file
        #[arg(long)]
        file: PathBuf,
    },
    /// Takes a token out of a file
    Revoke {
        /// Its id, as in the list
        id: String,
        /// The file
        #[arg(long)]
        file: PathBuf,
    },
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

/// Text of `--version`: the package version and, in a release, the git commit. scripts/release.sh and the Dockerfile pass the
/// commit in `GIT_COMMIT`; a build that asked git would start anew at each commit.
pub fn version() -> &'static str {
    static VERSION: LazyLock<String> = LazyLock::new(|| match option_env!("GIT_COMMIT") {
        Some(commit) if !commit.is_empty() => format!("{} ({commit})", env!("CARGO_PKG_VERSION")),
        _ => env!("CARGO_PKG_VERSION").to_owned(),
    });
    &VERSION
}
