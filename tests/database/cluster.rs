//! Three nodes, of which one is lost or stands still.
//!
//! Long form, since three of them need 3 GB and a minute or two to start:
//! `cargo test --test database -- --ignored --nocapture`

use std::{sync::LazyLock, time::Duration};

use parking_lot::{Mutex, MutexGuard};

use crate::{
    cassandra::{self, Cassandra},
    gateway::{Gateway, MAX_PENDING},
    load::Load,
    tables::Tables,
};

/// Far longer than a second node takes to be asked and to answer. Far less than the 10 seconds in which the driver does
/// not give up a node that is silent: until then a request waits for it, if no other one is asked.
const SOON: Duration = Duration::from_secs(4);

/// All nodes running, for one test at a time. None, and that is said, where there can be none.
fn three() -> Option<MutexGuard<'static, Cassandra>> {
    static CLUSTER: LazyLock<Option<Mutex<Cassandra>>> = LazyLock::new(|| {
        let found = Cassandra::start(cassandra::own_port() + 20, &[("CASSANDRA_NODES", "3")]);
        found.map(Mutex::new)
    });
    let cluster = CLUSTER.as_ref()?.lock();
    // A test that failed half way may have left some stopped or dead.
    cluster.resume();
    cluster.start_again();
    Some(cluster)
}

/// A gateway whose requests may take a minute, and go to a second node after `delay`.
fn patient(cluster: &Cassandra, tables: &Tables, delay: &str) -> Gateway {
    let keyspace = tables.keyspace();
    let toml = format!(
        "[latest]\nmax_bytes = {MAX_PENDING}\n[database]\nkeyspace = \"{keyspace}\"\nreplication = \"3\"\n\
         request_timeout = \"60s\"\nspeculative_delay = \"{delay}\"\n"
    );
    Gateway::start_with(&cluster.address, &toml)
}

#[test]
#[ignore = "three nodes of Cassandra: run it with --ignored"]
fn values_do_not_wait_for_a_stalled_node_if_another_may_be_asked() {
    let Some(cluster) = three() else { return };
    // Asked of a node that does not stand still.
    let second = cluster.address.split(',').nth(1).expect("three addresses");
    let (asking, waiting) = (Tables::of_node(second), Tables::of_node(second));
    let with = patient(&cluster, &asking, "200ms");
    let without = patient(&cluster, &waiting, "0s");
    // Both have connections to all nodes, and have written.
    asking.hold(&Load::once(with.mqtt(), "asking"));
    waiting.hold(&Load::once(without.mqtt(), "waiting"));

    cluster.script("pause 1");
    let late = Load::once(without.mqtt(), "waiting");
    let mut early = Load::once(with.mqtt(), "asking");
    asking.hold_within(SOON, &early);
    // Once more, so that the other one had its time to write as well.
    early = Load::once(with.mqtt(), "asking");
    asking.hold_within(SOON, &early);
    assert!(waiting.agree(&late).is_err(), "nothing was asked of the node that stands still");
    cluster.script("resume 1");
    waiting.hold(&late);
    for gateway in [with, without] {
        gateway.is_well();
        gateway.has_written_all();
    }
    asking.hold(&early);
}

#[test]
#[ignore = "three nodes of Cassandra: run it with --ignored"]
fn one_node_of_three_is_lost_and_comes_back_and_quorum_goes_on() {
    let Some(cluster) = three() else { return };
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
