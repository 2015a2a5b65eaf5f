//! The tour of docs/storage.md: every block fenced as `sh database`, in order.

#[path = "../support/tour.rs"]
mod blocks;

use crate::{
    cassandra,
    gateway::Gateway,
    support::{self, need, on_path, root},
    tables::Tables,
};

#[test]
fn what_a_device_says_is_the_same_by_rpc_and_by_cql_as_shown() {
    // Its keyspace is that of everybody's defaults, so not in a database of somebody else.
    let Some(cassandra) = cassandra::victim() else { return };
    let blocks = blocks::blocks("docs/storage.md", "sh database");
    assert!(blocks.len() >= 3, "docs/storage.md has only {} blocks with a database", blocks.len());
    let cqlsh = root().join(".venv/bin");
    if !need("mosquitto_pub", on_path("mosquitto_pub")) || !need("cqlsh", cqlsh.join("cqlsh").exists()) {
        return;
    }
    let tables = Tables::open_keyspace(&cassandra.address, "mqtt");
    tables.drop_keyspace();
    let gateway = Gateway::start_with(&cassandra.address, "");
    let port = cassandra.address.rsplit(':').next().unwrap_or_default();
    for block in blocks {
        block.run(&gateway.server, &[("9142", port)], &cqlsh.display().to_string());
        // A person at a keyboard is slower than the gateway writes.
        gateway.has_written_all();
    }
}
