//! A gRPC-fronted device gateway: MQTT for devices, a typed gRPC API for backends.
pub mod types;
pub mod config;
pub mod codec;
pub mod broker;
pub mod store;
pub mod telemetry;
pub mod session;
