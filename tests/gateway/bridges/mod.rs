//! Bridges to systems that are real (Mosquitto) or that tests tell how to behave, and that are killed, slow and away.

mod broker;
mod change;
#[cfg(feature = "kafka")]
mod cluster;
mod group;
mod incoming;
mod inward;
#[cfg(feature = "kafka")]
mod kafka;
#[cfg(feature = "kafka")]
mod kafka_in;
#[cfg(feature = "kafka")]
mod kafka_tls;
#[cfg(feature = "kafka")]
mod lines;
mod loops;
mod mosquitto;
mod papers;
mod poison;
mod scripted;
mod trouble;
mod webhook;

use crate::support::Server;

/// Returns the number of messages that bridges have carried, by the metrics.
fn carried(server: &Server) -> u64 {
    server.metric("gateway_bridge_messages_total")
}

fn lag(server: &Server) -> u64 {
    server.metric("gateway_bridge_lag_messages")
}
