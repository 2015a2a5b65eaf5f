//! A gRPC-fronted device gateway: MQTT 3.1, 3.1.1 and 5.0 for devices, a typed gRPC API for backends.
//!
//! # Code map
//!
//! ```text
//! main, gateway   arguments, configuration, runtimes, signals; wires everything
//! net   grpc      sockets, TLS, WebSocket, connection task, flush | tonic services, proto <-> types
//! session         the MQTT session without sockets: packets in, bytes out, time as argument
//! codec           bytes <-> packets
//! broker          routing: subscription index, retained, shared groups, registry; knows only `Target`
//! store           traits and backends of what outlives the process
//! types           ClientId, topics, QoS, Message
//! auth clock config door shutdown telemetry tls     leaves
//! ```
//!
//! Allowed edges: net -> session, broker; grpc -> broker, store; session -> codec -> types; broker -> store ->
//! types. Never broker -> session or codec, never net <-> grpc. `tests/layers.rs` enforces them.
//!
//! # Embedding
//!
//! [`gateway::Gateway`] starts the whole gateway inside another program; see `examples/embed.rs`.

pub mod auth;
pub mod broker;
pub mod clock;
pub mod codec;
pub mod config;
pub mod door;
pub mod gateway;
pub mod grpc;
pub mod net;
pub mod session;
pub mod shutdown;
pub mod store;
pub mod telemetry;
pub mod tls;
pub mod types;

pub use gateway::Gateway;
