//! The gRPC API against a real gateway in this process, with real devices over TCP.
#![expect(clippy::unwrap_used, reason = "helpers of tests panic like the tests")]

mod access;
mod acked;
mod bans;
#[path = "../support/client.rs"]
mod client;
mod client_library;
mod commands;
mod devices;
mod events;
mod groups;
mod groups_bounds;
mod groups_changes;
mod groups_claims;
mod groups_deliveries;
mod harness;
mod keys;
mod links;
mod many;
mod publishing;
mod queue;
mod scheduled;
mod shadows;
mod state;
mod streams;
mod subscribing;
#[path = "../support/mod.rs"]
mod support;
mod tenants;
mod top;
#[expect(dead_code, reason = "devices here show no certificate")]
#[path = "../gateway/matrix/ways.rs"]
mod ways;
