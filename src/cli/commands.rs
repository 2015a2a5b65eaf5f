//! The command line: flags of the configuration, and commands that do something else than run the gateway.

use std::path::PathBuf;

use access::backends::Role;
use clap::{Args, Parser, Subcommand, ValueEnum};
use config::Flags;
use gateway_core::units::ByteSize;
use telemetry::version;

/// The arguments of the program.
#[derive(Debug, Clone, Parser)]
#[command(name = "mqtt-server", version = version(), about = "MQTT for devices, gRPC for backends", args_conflicts_with_subcommands = true)]
pub(super) struct CommandLine {
    #[command(flatten)]
    pub(super) flags: Flags,
    #[command(subcommand)]
    pub(super) command: Option<Command>,
}

/// What to do instead of running the gateway.
#[derive(Debug, Clone, Subcommand)]
pub(super) enum Command {
    /// Looks after a data directory
    #[command(subcommand)]
    Store(StoreCommand),
    /// Makes and looks after a cluster: gateways that share a home whose ledger is in a database
    #[command(subcommand)]
    Cluster(ClusterCommand),
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
    Import(import::ImportCommand),
    /// Talks to a running gateway: messages, devices, groups, commands and all else that its API has
    Ctl(Box<ctl::Args>),
}

/// Commands for a cluster.
#[derive(Debug, Clone, Subcommand)]
pub(super) enum ClusterCommand {
    /// Makes the tables and the first view, once; what is in `data_dir` becomes the home. No gateway may be running there
    Create(ClusterConfig),
    /// Shows who serves, who stands by, and what the engine lacks
    Status(ClusterConfig),
    /// Has another node serve: the one that does hands over, and connections move
    Takeover {
        /// Name of the node; without it whichever is first
        node: Option<String>,
        #[command(flatten)]
        config: ClusterConfig,
    },
    /// Gives up what comes in a stream from a record on, if that is damaged; names are in the error of the takeover
    AcceptLoss {
        /// Home
        home: u16,
        /// Stream
        stream: u8,
        /// Epoch
        epoch: u64,
        /// Number of the first record that is given up
        n: u64,
        #[command(flatten)]
        config: ClusterConfig,
    },
}

/// The configuration of a node of the cluster.
#[derive(Debug, Clone, Args)]
pub(super) struct ClusterConfig {
    /// Configuration file with `[cluster]`
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,
}

/// What to do with a rules file.
#[derive(Debug, Clone, Subcommand)]
pub(super) enum RulesCommand {
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
pub(super) struct RulesTest {
    /// The rules file
    #[arg(long, value_name = "FILE", required_unless_present = "config", conflicts_with = "config")]
    pub(super) rules: Option<PathBuf>,
    /// Configuration file that names the rules file
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,
    /// Client id
    #[arg(long, value_name = "ID")]
    pub(super) client: String,
    /// User name; without it, --cn and --claim the device is anonymous
    #[arg(long, value_name = "NAME")]
    pub(super) user: Option<String>,
    /// Common name of its certificate
    #[arg(long, value_name = "NAME")]
    pub(super) cn: Option<String>,
    /// A group that its token or a hook gives it; may be repeated
    #[arg(long = "group", value_name = "NAME")]
    pub(super) groups: Vec<String>,
    /// A claim of its token; may be repeated, also for several values of one claim
    #[arg(long = "claim", value_name = "NAME=VALUE", value_parser = claim)]
    pub(super) claims: Vec<(String, String)>,
    /// Name of the listener
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub(super) listener: String,
    /// QoS of what is published
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(..=2))]
    pub(super) qos: u8,
    /// What is published is to be retained
    #[arg(long)]
    pub(super) retain: bool,
    /// Bytes of payload, like 1000 or "64 KiB"
    #[arg(long, default_value = "0")]
    pub(super) size: ByteSize,
    /// What it wants to do
    pub(super) action: RulesAction,
    /// Topic, or filter of a subscription; none for connect
    #[arg(required_if_eq_any([("action", "publish"), ("action", "subscribe")]))]
    pub(super) topic: Option<String>,
}

/// What a device wants to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum RulesAction {
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
pub(super) enum PasswdCommand {
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
pub(super) enum StoreCommand {
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
    /// Makes a data directory of an earlier version one of this version; no gateway may be running. Says first how much disk it
    /// needs. Ended at any moment it goes on when it is called again
    Convert {
        /// The data directory
        dir: PathBuf,
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
pub(super) enum TokenCommand {
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
