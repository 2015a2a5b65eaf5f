//! The parts that every listener needs, for any protocol: [doors](door) with places for connections, [TLS](tls), and files
//! that are [read again](reload) while the gateway runs; and a [client](remote) of the HTTP services that the gateway calls.
//!
//! Knows the configuration. Must not know MQTT, gRPC, the broker or a store.
//!
//! A [`Door`](door::Door) is one type by subject, so its files name each other.

pub mod counters;
pub mod door;
pub mod reload;
pub mod remote;
pub mod replace;
pub mod secret_files;
pub mod tls;
