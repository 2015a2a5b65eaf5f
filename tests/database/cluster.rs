//! Three nodes, of which one is lost.
//!
//! Long form, since three of them need 3 GB and a minute or two to start:
//! `cargo test --test database -- --ignored --nocapture`

use crate::{
    cassandra::{self, Cassandra},
    gateway::Gateway,
    load::Load,
    tables::Tables,
};

#[test]
#[ignore = "three nodes of Cassandra: run it with --ignored"]
fn one_node_of_three_is_lost_and_comes_back_and_quorum_goes_on() {
    let Some(cluster) = Cassandra::start(cassandra::own_port() + 20, &[("CASSANDRA_NODES", "3")]) else {
        return;
    };
    let tables = Tables::open(&cluster.address, None);
    let gateway = Gateway::start(&cluster.address, &tables, "replication = \"3\"\n");
    let load = Load::start(gateway.mqtt(), "three");
    load.goes_on();
    gateway.is_well();
    // The first is the one that the gateway was told of.
    for node in [3, 1] {
        cluster.script(&format!("kill {node}"));
        load.goes_on_for_bytes(8 << 20);
        // Quorum of what is left.
        gateway.is_well();
        gateway.has_written_much_since(|| load.goes_on());
        cluster.script(&format!("start {node}"));
        load.goes_on();
    }
    // Two of three: no quorum, so nothing is written, and nothing lost.
    cluster.script("kill 2");
    cluster.script("kill 3");
    gateway.is_degraded();
    load.goes_on_for_bytes(3 << 20);
    gateway.keeps_within_its_bound();
    let sent = load.finish();
    cluster.script("start");
    gateway.is_well();
    gateway.has_written_all();
    tables.hold(&sent);
}
