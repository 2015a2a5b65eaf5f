//! A database that answers late, and a network that cuts connections.

use std::time::Duration;

use crate::{
    cassandra,
    gateway::{Gateway, MAX_PENDING},
    load::Load,
    proxy::Proxy,
    tables::Tables,
};

#[test]
fn answers_that_take_seconds_delay_no_acknowledgement_and_lose_no_value() {
    let Some(cassandra) = cassandra::shared() else { return };
    let tables = Tables::open(&cassandra.address, None);
    let proxy = Proxy::start(&cassandra.address);
    let gateway = Gateway::start(&proxy.address, &tables, "");
    let load = Load::start(gateway.mqtt(), "slow");
    load.goes_on();
    gateway.is_well();
    // Less than a request may take.
    proxy.delay(Duration::from_millis(1_500));
    load.goes_on_for_bytes(3 * MAX_PENDING);
    gateway.keeps_within_its_bound();
    let sent = load.finish();
    tables.hold(&sent);

    // More than a request may take.
    proxy.delay(Duration::from_secs(30));
    let load = Load::start(gateway.mqtt(), "slow");
    gateway.is_degraded();
    load.goes_on_for_bytes(3 * MAX_PENDING);
    gateway.keeps_within_its_bound();
    let sent = load.finish();
    proxy.delay(Duration::ZERO);
    gateway.is_well();
    tables.hold(&sent);
    gateway.has_written_all();
}

#[test]
fn connections_cut_again_and_again_lose_and_revive_no_value() {
    let Some(cassandra) = cassandra::shared() else { return };
    let tables = Tables::open(&cassandra.address, None);
    let proxy = Proxy::start(&cassandra.address);
    let gateway = Gateway::start(&proxy.address, &tables, "");
    let load = Load::start(gateway.mqtt(), "cut");
    load.goes_on();
    for _ in 0..3 {
        // Requests under way lose their answers.
        proxy.cut();
        gateway.is_degraded();
        load.goes_on();
        proxy.mend();
        gateway.is_well();
        load.goes_on();
    }
    tables.hold(&load.finish());
    gateway.has_written_all();
}
