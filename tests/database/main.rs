//! Latest values, and shadows, in a real Cassandra: the real gateway, real devices, and what the tables hold after each fault.
//!
//! The tests take the Cassandra at `MQTT_SERVER_TEST_CASSANDRA` (address) or start their own by
//! scripts/cassandra.sh; where Java 17 or Maven is missing they say loudly that they were skipped. Each has a keyspace of its
//! own, and those that stop or kill a Cassandra, or fill its disk, start one for that.
//! `MQTT_SERVER_TEST_FAULT_SECONDS` (20) is how long a fault lasts at least.
//!
//! Every key (device, topic) has one writer, which knows the last value that it sent. No fault may change this: devices
//! get their acknowledgements, memory stays within its bound, and when the database is back each row holds the last
//! value sent.

mod cassandra;
#[path = "../support/client.rs"]
mod client;
mod cluster;
mod disk;
mod faults;
mod gateway;
mod history;
mod load;
mod proxy;
mod rpcs;
mod schema;
mod several;
mod shadows;
mod slow;
mod stream;
#[path = "../support/mod.rs"]
mod support;
mod tables;
mod tour;
