//! Configuration: defaults in code, a TOML file over them, the environment over that, flags over all.
//!
//! Immutable after start. Knows the words of `core`, `access` and `shadow`, and nothing that runs: no socket, no broker, no store.

mod address;
mod auth;
mod authorization;
mod backends;
mod bans;
mod bridges;
mod cluster;
mod commands;
mod contact_point;
mod database;
mod effective;
mod environment;
mod error;
mod flags;
mod groups;
mod grpc_hook;
mod load;
pub mod log_level;
mod quic;
mod record_topic;
mod remote;
mod replication;
mod secret;
mod sections;
mod shadow;
mod template;
mod tenants;
mod tls;
mod validate;

#[cfg(test)]
mod tests;

pub use gateway_core::{
    Quotas,
    database::{Compression, Consistency},
    limits::{Limits, OverflowPolicy, SharedStrategy},
    units::{ByteSize, Span},
};

pub use address::{Address, Binding, FileMode};
pub use auth::{Auth, AuthCertificate, AuthHttp, AuthJwt, AuthPassword, AuthStep};
pub use authorization::{Authorization, DeniedPublish};
pub use backends::{BackendCertificate, BackendJwt, Backends};
pub use bans::Bans;
pub use bridges::{
    Bridge, Direction, KafkaBridge, KafkaCompression, KafkaStart, MqttBridge, MqttLevel, SaslMechanism,
    WebhookBridge, WhenFull,
};
pub use cluster::{ClusterSettings, LedgerAddress, LedgerKind, LinkSettings};
pub use commands::Commands;
pub use database::{Database, DatabaseTls, TtlRule};
pub use environment::kubernetes_variables;
pub use error::{ConfigError, Problem};
pub use flags::Flags;
pub use groups::Groups;
pub use grpc_hook::{AuthGrpc, HookEvent};
pub use quic::Quic;
pub use record_topic::{RecordFields, RecordTopic};
pub use remote::{OnError, RemoteLimits};
pub use replication::Replication;
pub use secret::Secret;
pub use sections::{
    Config, DurabilityMode, DurabilityRule, Grpc, Http, Latest, Listener, ListenerKind, Log, LogFormat, Otel,
    ShutdownTimes, Store, Sys,
};
pub use shadow::Shadow;
pub use template::Template;
pub use tls::{CertificatePair, CipherSuite, Tls, TlsFiles, TlsVersion, ocsp_of};

/// Directory in which `--dev` makes its certificates.
pub const DEV_CERTS_DIR: &str = "certs";

use load::CONFIG_VARIABLE;
