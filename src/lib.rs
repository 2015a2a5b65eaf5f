//! A gRPC-fronted device gateway: MQTT 3.1, 3.1.1 and 5.0 for devices, a typed gRPC API for backends.
//!
//! # Embedding
//!
//! [`Gateway`] starts the whole gateway inside another program, with a [`Config`](config::Config) of its making; see
//! `examples/embed.rs`. [`proto`] has the messages and clients of the gRPC API.
//!
//! # Code map
//!
//! ```text
//! src/                 this crate: the binary and the wiring
//!   main cli           arguments, logs, runtimes, signals
//!   gateway            starts and stops everything
//!   net   grpc         sockets, TLS, WebSocket, connection task, flush | tonic services, proto <-> messages
//!   http               the HTTP listener: metrics and health, the API as JSON
//!   bridges            messages to and from other systems
//!   shutdown           order of the end
//! crates/session       the MQTT session without sockets: packets in, bytes out, time as argument
//! crates/codec         bytes <-> packets
//! crates/broker        routing: subscription index, retained, shared groups, registry; knows only `Target`
//! crates/consumer-groups  consumer groups at work: log, logic and records joined
//! crates/groups        their logic, without log, disk and clock: who gets what, and what is settled
//! crates/device-shadows   device shadows at work: requests in order, the store, who is told
//! crates/shadow        their documents: what an update makes of them, and what is told about it
//! crates/commands      requests to devices, and their answers
//! crates/store         traits of what outlives the process, their suites and twins in memory
//! crates/disk          those stores in the data directory: LMDB, and segments of the log
//! crates/cassandra     those stores in Cassandra or Scylla
//! crates/values        latest values and history with write-behind, over the traits of their stores
//! crates/auth          the same at run time: devices, backends, bans
//! crates/access        who a peer is and what it may do: passwords, tokens, certificates, rules, bans
//! crates/api           messages and clients of the gRPC API
//! crates/ctl           `mqtt-server ctl`: that API on a command line, over clients/rust
//! crates/config        settings: defaults, file, environment and flags, checked before anything starts
//! crates/edge          for every listener: doors, TLS, files read again; the client of HTTP services
//! crates/telemetry     logs, metrics, OTLP export
//! crates/core          ClientId, topics, QoS, Message, limits, counters, clock
//! clients/rust         the client library: that API for backends in Rust, with lost connections made good
//! ```
//!
//! The manifests say who may use whom: session -> codec -> core; broker -> store -> core; disk, cassandra and values -> store;
//! groups and access -> core; config -> access, shadow, core; telemetry -> edge -> config; commands, consumer-groups (with
//! groups and access) and device-shadows (with shadow) -> broker; ctl -> client library -> api; shadow and api use nobody; this crate
//! uses all. What they cannot say, such as that `net` and `grpc` don't know each other, is in `tests/repository/layers.rs`.

#[doc(hidden)]
pub mod cli;
pub mod gateway;
mod grpc;
mod http;
mod shutdown;

pub use ::config;

/// Authentication and authorization of devices by the program that embeds the gateway: the traits to implement, and their messages.
pub mod auth {
    pub use ::auth::{
        AllowAll, Answering, AuthProgress, Authenticator, Authorizer, Credentials, Decision, Denied,
        Dialogue, Method, Principal, RuleGrant, SecretBytes, Subject, Subscribing,
    };
}
pub use edge::reload;
pub use gateway::Gateway;

/// The gRPC API: messages, clients, and the descriptors of its services; and in `hooks` the service that the gateway calls, with
/// the trait to implement it.
pub mod proto {
    pub use crate::grpc::proto::{DESCRIPTORS, gateway, rpcserver};
    pub use auth::hooks;
}

/// For the fuzz targets and tests of this repository; anything may change.
#[doc(hidden)]
pub mod internals {
    pub use telemetry::trace_clients;

    pub use crate::grpc::fuzz_convert;
}
