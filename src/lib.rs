//! A gRPC-fronted device gateway: MQTT for devices, a typed gRPC API for backends.
pub mod broker;
pub mod codec;
pub mod config;
pub mod grpc;
pub mod store;
pub mod telemetry;
pub mod types;
