//! The statements of docs/storage.md make what the gateway needs, and no gateway makes tables that it must not.

use std::fs;

use crate::{cassandra, gateway::Gateway, load::Load, support::root, tables::Tables};

/// The statements of the guide, for the keyspace of `tables` with one copy.
fn statements(tables: &Tables) -> Vec<String> {
    let guide = fs::read_to_string(root().join("docs/storage.md")).expect("read the guide");
    let (_, rest) = guide.split_once("```cql\n").expect("statements");
    let (block, _) = rest.split_once("```").expect("their end");
    let name = tables.keyspace();
    let own = block.replace("mqtt.", &format!("{name}.")).replace("EXISTS mqtt ", &format!("EXISTS {name} "));
    let own = own.replace("'replication_factor': 3", "'replication_factor': 1");
    own.split(';').map(str::trim).filter(|text| !text.is_empty()).map(str::to_owned).collect()
}

#[test]
fn the_guides_schema_is_enough_and_without_it_nothing_is_lost() {
    let Some(cassandra) = cassandra::shared() else { return };
    let tables = Tables::open(&cassandra.address, None);
    let gateway = Gateway::start(&cassandra.address, &tables, "migrate = false\n");
    let load = Load::start(gateway.mqtt(), "managed");
    gateway.is_degraded();
    load.goes_on();
    assert!(tables.of_device("managed-0").is_err(), "tables that it was told not to make");
    for statement in statements(&tables) {
        tables.execute(&statement);
    }
    gateway.is_well();
    load.goes_on();
    tables.hold(&load.finish());
    gateway.has_written_all();
}
