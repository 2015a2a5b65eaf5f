//! The sections of the configuration, each with its defaults. What they mean together is in `validate`.

use std::{collections::BTreeMap, fmt, net::SocketAddr, path::PathBuf, str::FromStr, time::Duration};

use gateway_core::{Durability, Quotas};
use serde::{
    Deserialize, Serialize,
    de::{IntoDeserializer, value},
};

use super::{
    Address, ByteSize, CertificatePair, FileMode, SharedStrategy, Span, Tls,
    address::{optional, socket},
};

/// Form of the log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// Human on a terminal, JSON elsewhere.
    #[default]
    Auto,
    /// Lines for people.
    Human,
    /// One JSON object a line.
    Json,
}

impl LogFormat {
    /// As written in the configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Human => "human",
            Self::Json => "json",
        }
    }
}

/// `[log]`.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    /// error, warn, info, debug or trace; also per module: `info,mqtt_server::net=debug`.
    pub level: String,
    /// Form.
    pub format: LogFormat,
    /// Client ids whose packets are logged from the start; changeable at run time.
    pub trace_clients: Vec<String>,
    /// File of the audit log, JSON lines; empty puts it among the other lines.
    #[serde(with = "optional")]
    pub audit: Option<PathBuf>,
}

impl Default for Log {
    fn default() -> Self {
        Self { level: "info".to_owned(), format: LogFormat::Auto, trace_clients: Vec::new(), audit: None }
    }
}

/// Protocol of a listener.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ListenerKind {
    /// Plain MQTT.
    Tcp,
    /// MQTT over TLS.
    #[default]
    Tls,
    /// MQTT over WebSocket.
    Ws,
    /// MQTT over WebSocket over TLS.
    Wss,
    /// MQTT over QUIC, which is over UDP and always encrypted.
    Quic,
}

impl ListenerKind {
    /// Returns whether the protocol is encrypted.
    pub fn is_tls(self) -> bool {
        matches!(self, Self::Tls | Self::Wss | Self::Quic)
    }

    /// Returns whether this is a WebSocket listener.
    pub fn is_websocket(self) -> bool {
        matches!(self, Self::Ws | Self::Wss)
    }
}

/// One `[[listeners]]` entry.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Listener {
    /// Name in logs and metrics; unique.
    pub name: String,
    /// Address that it binds; required.
    #[serde(with = "optional")]
    pub address: Option<Address>,
    /// `[::]` takes no connections over IPv4.
    pub ipv6_only: bool,
    /// What it speaks.
    pub kind: ListenerKind,
    /// Certificate chain; empty takes the top-level one.
    #[serde(with = "optional")]
    pub cert: Option<PathBuf>,
    /// Private key; empty takes the top-level one.
    #[serde(with = "optional")]
    pub key: Option<PathBuf>,
    /// CA of client certificates; empty takes that of `[tls]`.
    #[serde(with = "optional")]
    pub client_ca: Option<PathBuf>,
    /// Refuse clients without a certificate; on if it is on in `[tls]`.
    pub require_client_cert: bool,
    /// Further pairs, shown to clients that ask for a DNS name in them; none takes those of `[tls]`.
    pub certificates: Vec<CertificatePair>,
    /// Connections at once through this listener; 0 for no limit of its own.
    pub max_connections: usize,
    /// Expect a PROXY protocol header (v1 or v2) before anything else; only behind a trusted proxy.
    pub proxy_protocol: bool,
    /// File mode that decides who may connect to a Unix socket.
    pub mode: FileMode,
    /// Strategy of shared groups that a client of this listener creates; empty takes that of `[limits]`.
    #[serde(with = "optional")]
    pub shared_strategy: Option<SharedStrategy>,
    /// Mode of messages from this listener; empty takes that of `[store]`.
    #[serde(with = "optional")]
    pub durability: Option<DurabilityMode>,
    /// How devices of this listener prove who they are; none takes the steps of `[auth]`.
    pub auth: Vec<super::AuthStep>,
    /// Path of WebSocket requests.
    pub path: String,
    /// Origins of pages that may open a WebSocket; none is pages of the host that the request names, `*` is all.
    pub allowed_origins: Vec<String>,
}

impl Default for Listener {
    fn default() -> Self {
        Self {
            name: String::new(),
            address: None,
            ipv6_only: false,
            kind: ListenerKind::Tls,
            cert: None,
            key: None,
            client_ca: None,
            require_client_cert: false,
            certificates: Vec::new(),
            max_connections: 0,
            proxy_protocol: false,
            mode: FileMode::default(),
            shared_strategy: None,
            durability: None,
            auth: Vec::new(),
            path: "/mqtt".to_owned(),
            allowed_origins: Vec::new(),
        }
    }
}

/// `[grpc]`.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Grpc {
    /// `[::]` as grpc_addr takes no connections over IPv4.
    pub ipv6_only: bool,
    /// Speak TLS.
    pub tls: bool,
    /// Certificate chain; empty takes the top-level one.
    #[serde(with = "optional")]
    pub cert: Option<PathBuf>,
    /// Private key; empty takes the top-level one.
    #[serde(with = "optional")]
    pub key: Option<PathBuf>,
    /// CA of client certificates, PEM.
    #[serde(with = "optional")]
    pub client_ca: Option<PathBuf>,
    /// Refuse backends without a certificate.
    pub require_client_cert: bool,
    /// How long a publish waits for SENT or ACKED when the call has no deadline.
    pub default_deadline: Span,
    /// Streams at once in the process.
    pub max_streams: u32,
    /// Streams at once of one caller; 0 for no limit of its own.
    pub max_streams_per_caller: u32,
    /// Connections at once; for one more the oldest without credentials is closed, or it is refused.
    pub max_connections: u32,
    /// The same from one address; 0 for no limit of its own.
    pub max_connections_per_address: u32,
    /// Connections at once that have not finished TLS and the beginning of HTTP/2; more wait.
    pub max_handshakes: u32,
    /// Time for TLS and the beginning of HTTP/2.
    pub handshake_timeout: Span,
    /// Calls and streams at once on one connection; more are answered RESOURCE_EXHAUSTED.
    pub max_calls_per_connection: u32,
    /// Calls and streams at once in the process; more are answered RESOURCE_EXHAUSTED.
    pub max_calls: u32,
    /// Calls and streams at once of one caller; 0 for no limit of its own.
    pub max_calls_per_caller: u32,
    /// Idempotency keys of messages that are remembered; the oldest go.
    pub idempotency_keys: u32,
    /// For how long they are.
    pub idempotency_time: Span,
    /// Messages with `deliver_at` that wait for their time; more are refused.
    pub scheduled_messages: u32,
    /// Their bytes.
    pub scheduled_bytes: ByteSize,
    /// How often connections are pinged.
    pub keepalive_interval: Span,
    /// A connection that leaves a ping unanswered for this long is closed.
    pub keepalive_timeout: Span,
}

impl Default for Grpc {
    fn default() -> Self {
        Self {
            ipv6_only: false,
            tls: true,
            cert: None,
            key: None,
            client_ca: None,
            require_client_cert: false,
            default_deadline: Span(Duration::from_secs(30)),
            max_streams: 10_000,
            max_streams_per_caller: 5_000,
            max_connections: 1_000,
            max_connections_per_address: 500,
            max_handshakes: 1_000,
            handshake_timeout: Span(Duration::from_secs(10)),
            max_calls_per_connection: 1_000,
            max_calls: 20_000,
            max_calls_per_caller: 10_000,
            idempotency_keys: 100_000,
            idempotency_time: Span(Duration::from_mins(10)),
            scheduled_messages: 100_000,
            scheduled_bytes: ByteSize(64 << 20),
            keepalive_interval: Span(Duration::from_secs(30)),
            keepalive_timeout: Span(Duration::from_secs(20)),
        }
    }
}

/// `[http]`: metrics and health, the API for those without gRPC, and the web page.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Http {
    /// Serve it.
    pub enabled: bool,
    /// `[::]` as http_addr takes no connections over IPv4.
    pub ipv6_only: bool,
    /// Speak TLS.
    pub tls: bool,
    /// Certificate chain; empty takes the top-level one.
    #[serde(with = "optional")]
    pub cert: Option<PathBuf>,
    /// Private key; empty takes the top-level one.
    #[serde(with = "optional")]
    pub key: Option<PathBuf>,
    /// Serve the API as JSON too, below /v1.
    pub api: bool,
    /// Serve the web page, below /page.
    pub page: bool,
    /// Take tokens off loopback although there is no TLS to hide them.
    pub plaintext_tokens: bool,
    /// Connections at once that read pages, and as many that ask for health.
    pub max_connections: usize,
    /// Connections at once with a request to the API.
    pub max_requests: usize,
    /// The same of one caller; 0 for no limit of its own.
    pub max_requests_per_caller: usize,
    /// Connections at once whose answer is a stream of events.
    pub max_streams: usize,
    /// The same of one caller; 0 for no limit of its own.
    pub max_streams_per_caller: usize,
    /// Most bytes of a request's body.
    pub max_body: ByteSize,
    /// Time for a request's body, or 64 KiB of it.
    pub body_timeout: Span,
    /// Origins of pages that may use the API from a browser, besides those of the host that the request names.
    pub cors_origins: Vec<String>,
    /// Time for a request's header, also between requests.
    pub header_timeout: Span,
    /// Time for which a client may read nothing of an answer before its connection ends.
    pub write_timeout: Span,
}

impl Default for Http {
    fn default() -> Self {
        let seconds = Span(Duration::from_secs(10));
        Self {
            enabled: true,
            ipv6_only: false,
            tls: false,
            cert: None,
            key: None,
            api: true,
            page: true,
            plaintext_tokens: false,
            max_connections: 64,
            max_requests: 256,
            max_requests_per_caller: 128,
            max_streams: 256,
            max_streams_per_caller: 128,
            max_body: ByteSize(1 << 20),
            body_timeout: seconds,
            cors_origins: Vec::new(),
            header_timeout: seconds,
            write_timeout: seconds,
        }
    }
}

/// `[latest]`: the last payload of every (device, topic).
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Latest {
    /// Keep latest values.
    pub enabled: bool,
    /// How long changes gather before they are written.
    pub flush_interval: Span,
    /// Bytes of values not yet written; above it new topics are not recorded but counted.
    pub max_bytes: ByteSize,
    /// Topics per device.
    pub topics_per_device: usize,
    /// Topic filters whose messages are not recorded.
    pub excluded: Vec<String>,
    /// Time in which a value goes at most once to a ledger that keeps latest values.
    pub ledger_interval: Span,
    /// Bytes of latest values that go to that ledger in a second.
    pub ledger_bytes: ByteSize,
}

impl Default for Latest {
    fn default() -> Self {
        Self {
            enabled: true,
            flush_interval: Span(Duration::from_millis(500)),
            max_bytes: ByteSize(256 << 20),
            topics_per_device: 10_000,
            excluded: Vec::new(),
            ledger_interval: Span(Duration::from_secs(5)),
            ledger_bytes: ByteSize(1 << 20),
        }
    }
}

/// Promise of the acknowledgement of a QoS 1 or 2 message.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DurabilityMode {
    /// It is on disk for every persistent session that it matched, or their clients have it.
    #[default]
    Always,
    /// The message will be on disk within `store.interval`.
    Interval,
    /// Nothing: only what waits for clients that are away or slow is written.
    None,
}

impl fmt::Display for DurabilityMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

impl FromStr for DurabilityMode {
    type Err = value::Error;

    fn from_str(text: &str) -> Result<Self, value::Error> {
        Self::deserialize(text.into_deserializer())
    }
}

impl From<DurabilityMode> for Durability {
    fn from(mode: DurabilityMode) -> Self {
        match mode {
            DurabilityMode::Always => Self::Always,
            DurabilityMode::Interval => Self::Interval,
            DurabilityMode::None => Self::None,
        }
    }
}

/// One `[[store.rules]]` entry.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DurabilityRule {
    /// Topics.
    pub filter: String,
    /// Their mode, whatever the listener's is.
    pub durability: DurabilityMode,
}

/// `[store]`: sessions, their queues and retained messages on disk.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Store {
    /// Keep them; otherwise they end with the process.
    pub enabled: bool,
    /// Mode of messages that neither a rule nor their listener gives one.
    pub durability: DurabilityMode,
    /// Modes by topic; the first rule that matches counts.
    pub rules: Vec<DurabilityRule>,
    /// How long changes that nobody waits for gather before they are written.
    pub interval: Span,
    /// Bytes that may wait for the disk; beyond it messages for persistent sessions are refused.
    pub max_waiting_bytes: ByteSize,
    /// Verify the files of all stores at the start, also those that were closed cleanly, and without `verify_limit`.
    pub verify: bool,
    /// How long a start may verify each file that was not closed cleanly; zero is without limit.
    pub verify_limit: Span,
}

impl Default for Store {
    fn default() -> Self {
        Self {
            enabled: true,
            durability: DurabilityMode::Always,
            rules: Vec::new(),
            interval: Span(Duration::from_millis(50)),
            max_waiting_bytes: ByteSize(256 << 20),
            verify: false,
            verify_limit: Span(Duration::from_secs(60)),
        }
    }
}

/// `[sys]`: the `$SYS` topics.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sys {
    /// Publish them.
    pub enabled: bool,
    /// How often.
    pub interval: Span,
}

impl Default for Sys {
    fn default() -> Self {
        Self { enabled: true, interval: Span(Duration::from_secs(10)) }
    }
}

/// `[shutdown]`.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct ShutdownTimes {
    /// Most time from the signal to the end, whatever is still open.
    pub deadline: Span,
    /// Time over which DISCONNECTs are spread, to avoid a storm of reconnects.
    pub disconnect_window: Span,
}

impl Default for ShutdownTimes {
    fn default() -> Self {
        Self { deadline: Span(Duration::from_secs(10)), disconnect_window: Span(Duration::from_secs(2)) }
    }
}

/// `[otel]`: OTLP export of metrics and spans; only in a build with the cargo feature `otel`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Otel {
    /// Collector (OTLP over gRPC), `http://host:port` such as `http://127.0.0.1:4317`; empty is off.
    #[serde(with = "optional")]
    pub endpoint: Option<String>,
}

/// The whole configuration. Immutable after start.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Address of the default listener; empty is none.
    #[serde(with = "optional")]
    pub addr: Option<Address>,
    /// `[::]` as addr takes no connections over IPv4.
    pub ipv6_only: bool,
    /// Certificate chain, PEM.
    pub cert: PathBuf,
    /// Private key, PEM.
    pub key: PathBuf,
    /// The default listener speaks plain TCP.
    pub non_tls: bool,
    /// Devices talk to backends only.
    pub non_broker: bool,
    /// A device's own namespace in non-broker mode.
    pub namespace: String,
    /// Response Information for v5 clients that ask for it; empty is none.
    pub response_information: String,
    /// gRPC.
    #[serde(with = "socket")]
    pub grpc_addr: SocketAddr,
    /// Metrics and health.
    #[serde(with = "socket")]
    pub http_addr: SocketAddr,
    /// Stores.
    pub data_dir: PathBuf,
    /// Nodes of a Cassandra or Scylla cluster for latest values, `HOST[:PORT][,HOST...]`.
    #[serde(with = "optional")]
    pub db_addr: Option<String>,
    /// Development mode.
    pub dev: bool,
    /// Allow backends without client certificates off loopback, and without TLS.
    pub insecure_grpc: bool,
    /// Threads that serve devices, 0 is one per core.
    pub shards: usize,
    /// `[log]`.
    pub log: Log,
    /// `[[listeners]]`.
    pub listeners: Vec<Listener>,
    /// `[auth]`.
    pub auth: super::Auth,
    /// `[tls]`.
    pub tls: Tls,
    /// `[authorization]`.
    pub authorization: super::Authorization,
    /// `[grpc]`.
    pub grpc: Grpc,
    /// `[backends]`.
    pub backends: super::Backends,
    /// `[http]`.
    pub http: Http,
    /// `[latest]`.
    pub latest: Latest,
    /// `[database]`.
    pub database: super::Database,
    /// `[cluster]`.
    pub cluster: super::ClusterSettings,
    /// `[store]`.
    pub store: Store,
    /// `[sys]`.
    pub sys: Sys,
    /// `[groups]`.
    pub groups: super::Groups,
    /// `[commands]`.
    pub commands: super::Commands,
    /// `[quic]`.
    pub quic: super::Quic,
    /// `[shadow]`.
    pub shadow: super::Shadow,
    /// `[bans]`.
    pub bans: super::Bans,
    /// `[limits]`.
    pub limits: super::Limits,
    /// `[bridges]`: ways to other systems, by name.
    pub bridges: BTreeMap<String, super::Bridge>,
    /// `[tenants]`: quotas by name; `*` is every tenant that is not here.
    pub tenants: BTreeMap<String, Quotas>,
    /// `[shutdown]`.
    pub shutdown: ShutdownTimes,
    /// `[otel]`.
    pub otel: Otel,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            addr: Some(Address::Ip(SocketAddr::from(([127, 0, 0, 1], 8883)))),
            ipv6_only: false,
            cert: PathBuf::from("server.crt"),
            key: PathBuf::from("private.key"),
            non_tls: false,
            non_broker: false,
            namespace: "devices/{client_id}/#".to_owned(),
            response_information: "{namespace}".to_owned(),
            grpc_addr: SocketAddr::from(([127, 0, 0, 1], 10000)),
            http_addr: SocketAddr::from(([127, 0, 0, 1], 9090)),
            data_dir: PathBuf::from("./data"),
            db_addr: None,
            dev: false,
            insecure_grpc: false,
            shards: 0,
            log: Log::default(),
            listeners: Vec::new(),
            auth: super::Auth::default(),
            tls: Tls::default(),
            authorization: super::Authorization::default(),
            grpc: Grpc::default(),
            backends: super::Backends::default(),
            http: Http::default(),
            latest: Latest::default(),
            database: super::Database::default(),
            cluster: super::ClusterSettings::default(),
            store: Store::default(),
            sys: Sys::default(),
            groups: super::Groups::default(),
            commands: super::Commands::default(),
            quic: super::Quic::default(),
            shadow: super::Shadow::default(),
            bans: super::Bans::default(),
            limits: super::Limits::default(),
            bridges: BTreeMap::new(),
            tenants: BTreeMap::new(),
            shutdown: ShutdownTimes::default(),
            otel: Otel::default(),
        }
    }
}
