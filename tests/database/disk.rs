//! A database whose disk is full, or nearly.

use crate::{
    cassandra::Cassandra,
    gateway::{Gateway, MAX_PENDING},
    load::Load,
    stream::Stream,
    tables::{Login, Tables},
};

/// A gateway that writes, with devices and a stream.
fn writing(address: &str, tables: &Tables, database: &str, name: &str) -> (Gateway, Load, Stream) {
    let gateway = Gateway::start(address, tables, database);
    let load = Load::start(gateway.mqtt(), name);
    let stream = gateway.stream();
    load.goes_on();
    gateway.is_well();
    gateway.has_written_much_since(|| load.goes_on());
    (gateway, load, stream)
}

fn devices_and_streams_notice_nothing(gateway: &Gateway, load: &Load, stream: &Stream) {
    gateway.is_degraded();
    load.goes_on_for_bytes(3 * MAX_PENDING);
    stream.goes_on();
    gateway.keeps_within_its_bound();
}

#[test]
fn a_full_disk_of_the_database_costs_no_value_and_no_acknowledgement() {
    let Some(cassandra) = Cassandra::on_a_small_disk(false) else { return };
    let tables = Tables::open(&cassandra.address, None);
    let (gateway, load, stream) = writing(&cassandra.address, &tables, "", "full");
    // No byte is free, whatever Cassandra tries: its commit log cannot go on, and it ends or serves no more.
    cassandra.fill(0);
    devices_and_streams_notice_nothing(&gateway, &load, &stream);
    // Cassandra itself may forget what it took within its last moment. Every key is sent once more.
    load.goes_on();
    let sent = load.finish();
    cassandra.kill();
    cassandra.script("free");
    cassandra.start_again();
    gateway.is_well();
    tables.hold(&sent);
    gateway.has_written_all();
}

#[test]
fn values_refused_because_a_disk_is_nearly_full_are_not_dropped() {
    let Some(cassandra) = Cassandra::on_a_small_disk(true) else { return };
    // Guardrails are not for the user that Cassandra has at first.
    let root = Login { name: "cassandra", password: "cassandra", ca: None };
    let tables = Tables::open(&cassandra.address, Some(&root));
    tables.execute("CREATE ROLE IF NOT EXISTS gateway WITH PASSWORD = 'secret' AND LOGIN = true");
    tables.execute("GRANT ALL PERMISSIONS ON ALL KEYSPACES TO gateway");
    let login = "username = \"gateway\"\npassword = \"secret\"\n";
    let (gateway, load, stream) = writing(&cassandra.address, &tables, login, "guarded");
    cassandra.fill(20);
    devices_and_streams_notice_nothing(&gateway, &load, &stream);
    let sent = load.finish();
    cassandra.script("free");
    gateway.is_well();
    tables.hold(&sent);
    gateway.has_written_all();
}
