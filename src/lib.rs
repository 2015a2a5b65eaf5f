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
//!   cluster            stands by for another gateway of a cluster, then serves
//!   shutdown           order of the end
//! crates/net           sockets, TLS, WebSocket, QUIC, connection task
//! crates/device        the receiver: outbound half, link and lock of a session, and the write to its socket
//! crates/grpc          the API for backends: tonic services over the broker
//! crates/grpc-homes    calls in a cluster of several homes: each to its home, or to all with the answers merged
//! crates/grpc-messages its messages and the gateway's types, and the errors of calls with their statuses
//! crates/http          the HTTP listener: metrics and health, the API as JSON, the web page
//! crates/bridges       messages to and from other systems
//! crates/session       the MQTT session without sockets: packets in, bytes out, time as argument
//! crates/codec         bytes <-> packets
//! crates/broker        routing: subscription index, retained, shared groups, registry; knows only `Target`
//! crates/consumer-groups  consumer groups at work: log, logic and records joined
//! crates/groups        their logic, without log, disk and clock: who gets what, and what is settled
//! crates/device-shadows   device shadows at work: requests in order, the store, who is told
//! crates/shadow        their documents: what an update makes of them, and what is told about it
//! crates/commands      requests to devices, and their answers
//! crates/store         traits of what outlives the process, their suites and twins in memory
//! crates/ledger        the ledger of a cluster: trait of its engines, records, a twin in memory
//! crates/cluster       the protocol of a cluster over it; no I/O, no clock
//! crates/cluster-node  a gateway of a cluster: stands by, takes over, ships
//! crates/links         connections between the gateways of a cluster
//! crates/disk          those stores in the data directory, over LMDB, and the tools for all of it
//! crates/segment-log   the log of consumer groups in segment files
//! crates/lmdb-0-9-pages   the pages of a file of LMDB, read without it
//! crates/cassandra     those stores, and the ledger of a cluster, in Cassandra or Scylla
//! crates/postgres      the ledger of a cluster in PostgreSQL
//! crates/values        latest values and history with write-behind, over the traits of their stores
//! crates/auth          the same at run time: devices, backends, bans
//! crates/access        who a peer is and what it may do: passwords, tokens, certificates, rules, bans
//! crates/api           messages and clients of the gRPC API
//! crates/ctl           `mqtt-server ctl`: that API on a command line, over clients/rust
//! crates/import        `mqtt-server import`: a configuration of Mosquitto as one of the gateway
//! crates/config        settings: defaults, file, environment and flags, checked before anything starts
//! crates/edge          for every listener: doors, TLS, files read again; the client of HTTP services
//! crates/telemetry     logs, metrics, OTLP export
//! crates/core          ClientId, topics, QoS, Message, limits, counters, clock
//! clients/rust         the client library: that API for backends in Rust, with lost connections made good
//! ```
//!
//! The manifests say who may use whom. The words are in core, which everything knows; codec and session know MQTT; broker, store
//! and the stores know messages and no protocol; net, grpc and http are beside each other and know none of the others; this
//! crate wires all. docs/dev/architecture.md has a picture of it.

#[doc(hidden)]
pub mod cli;
mod cluster;
pub mod gateway;
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
    pub use auth::hooks;
    pub use gateway_api::{DESCRIPTORS, gateway, rpcserver};
}

/// For tests of this repository; anything may change.
#[doc(hidden)]
pub mod internals {
    pub use crate::gateway::counters::families;
    pub use telemetry::trace_clients;
}
