//! A gRPC-fronted device gateway: MQTT for devices, a typed gRPC API for backends.
pub mod broker;
pub mod codec;
pub mod config;
pub mod shutdown;
pub mod store;
pub mod sys;
pub mod telemetry;
pub mod tls;
pub mod types;
