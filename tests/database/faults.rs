//! Cassandra stops, dies, refuses, forgets. Each fault is made under load, and lasts until the gateway says so.

use std::time::{Duration, Instant};

use tonic::Code;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_types::StatusExt as _;

use crate::{
    cassandra::{self, Cassandra},
    gateway::{Gateway, MAX_PENDING, STATE, toml},
    load::Load,
    proxy::Proxy,
    tables::{Login, Tables, wait_for},
};

/// Returns the least duration of a fault.
fn fault() -> Duration {
    let seconds = std::env::var("MQTT_SERVER_TEST_FAULT_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(20))
}

/// Checks the promises while the database is away: one report of the loss, devices served, memory bounded, the last
/// value read from memory.
fn devices_notice_nothing(gateway: &Gateway, load: &Load) {
    gateway.is_degraded();
    // Many times what may wait: kept only as the last value of each key.
    load.goes_on_for_bytes(3 * MAX_PENDING);
    gateway.keeps_within_its_bound();
}

/// The failure: each read that needs the database waits for its own time-out of 2 s, though the gateway knows.
#[expect(clippy::disallowed_methods, reason = "the gateway's time-out is one of the real clock")]
fn reads_are_refused_at_once(gateway: &Gateway) {
    const READS: u32 = 100;
    let read = || gateway.get("none", Some("nobody")).expect_err("only the database could know");
    // The first may be the one that finds it out.
    read();
    let begin = Instant::now();
    for _ in 0..READS {
        let refused = read();
        let reason = refused.get_details_error_info().expect("ErrorInfo").reason;
        assert_eq!((refused.code(), reason.as_str()), (Code::Unavailable, "STORE_UNAVAILABLE"), "{refused}");
    }
    assert!(begin.elapsed() < Duration::from_secs(READS.into()), "half of what waiting would take");
}

/// The failure: a line in the log for each attempt that fails. A loss is told once, and again only after the database has
/// answered: on a slow machine it may do so in between.
fn says_so_once(gateway: &Gateway) {
    const LOST: &str = "latest values cannot be written";
    let told = || {
        let log = gateway.server.log();
        // A table that the database lost amid its first schema is told besides.
        let of_the_database = |line: &&str| {
            (line.contains("latest values") || line.contains("database")) && !line.contains("is made again")
        };
        let is_told =
            |line: &&str| ["\"WARN\"", "\"ERROR\"", "written again"].iter().any(|part| line.contains(part));
        log.lines().filter(of_the_database).filter(is_told).map(str::to_owned).collect::<Vec<_>>()
    };
    // Before the first attempt has failed the database counts as away already.
    wait_for("a line in the log", || if told().is_empty() { Err("none".to_owned()) } else { Ok(()) });
    let told = told();
    for (number, line) in told.iter().enumerate() {
        assert_eq!(line.contains(LOST), number % 2 == 0, "loss and return in turn: {told:#?}");
    }
}

#[test]
fn a_database_that_stands_still_costs_no_value_and_no_acknowledgement() {
    let Some(cassandra) = cassandra::victim() else { return };
    let tables = Tables::open(&cassandra.address, None);
    let gateway = Gateway::start(&cassandra.address, &tables, "");
    let load = Load::start(gateway.mqtt(), "still");
    load.goes_on();
    gateway.is_well();
    wait_for("values in the tables", || match gateway.server.metric("gateway_latest_written_total") {
        0 => Err("none".to_owned()),
        _ => Ok(()),
    });
    cassandra.pause();
    devices_notice_nothing(&gateway, &load);
    reads_are_refused_at_once(&gateway);
    std::thread::sleep(fault());
    load.goes_on();
    gateway.keeps_within_its_bound();
    cassandra.resume();
    gateway.is_well();
    load.goes_on();
    tables.hold(&load.finish());
    gateway.has_written_all();
    says_so_once(&gateway);
}

#[test]
fn a_database_killed_or_absent_at_start_gets_every_value_later() {
    let Some(cassandra) = cassandra::victim() else { return };
    let (tables, others) = (Tables::open(&cassandra.address, None), Tables::open(&cassandra.address, None));
    let gateway = Gateway::start(&cassandra.address, &tables, "");
    let load = Load::start(gateway.mqtt(), "killed");
    load.goes_on();
    cassandra.kill();
    devices_notice_nothing(&gateway, &load);
    reads_are_refused_at_once(&gateway);
    // Cassandra itself may forget what it took within its last moment. Every key is sent once more.
    load.goes_on();
    let sent = load.finish();

    let late = Gateway::start(&cassandra.address, &others, "");
    let early = Load::start(late.mqtt(), "early");
    devices_notice_nothing(&late, &early);

    cassandra.start_again();
    gateway.is_well();
    late.is_well();
    tables.hold(&sent);
    early.goes_on();
    others.hold(&early.finish());
    gateway.has_written_all();
    says_so_once(&gateway);
    says_so_once(&late);
}

#[test]
fn tables_dropped_while_it_runs_are_made_again_and_get_what_comes() {
    let Some(cassandra) = cassandra::shared() else { return };
    let tables = Tables::open(&cassandra.address, None);
    let gateway = Gateway::start(&cassandra.address, &tables, "");
    let load = Load::start(gateway.mqtt(), "dropped");
    load.goes_on();
    gateway.is_well();
    tables.drop_keyspace();
    load.goes_on_for_bytes(MAX_PENDING);
    // All keys, so that none is missing that went with the tables.
    load.finish();
    wait_for("the tables again", || tables.of_device("dropped-0").map(drop));
    gateway.is_well();
    tables.hold(&Load::once(gateway.mqtt(), "dropped"));
}

#[test]
fn a_refused_login_disturbs_no_device_and_values_wait_for_the_right_one() {
    let Some((guarded, ca)) = Cassandra::guarded() else { return };
    // The user that Cassandra has at first.
    let right = Login { name: "cassandra", password: "cassandra", ca: Some(&ca) };
    let tables = Tables::open(&guarded.address, Some(&right));
    let login = |password: &str| {
        let (name, ca) = (right.name, ca.display());
        format!("username = \"{name}\"\npassword = \"{password}\"\n[database.tls]\nca = \"{ca}\"")
    };
    let gateway = Gateway::start(&guarded.address, &tables, &login("wrong"));
    let load = Load::start(gateway.mqtt(), "refused");
    devices_notice_nothing(&gateway, &load);
    let sent = load.finish();
    says_so_once(&gateway);
    assert!(!gateway.server.log().contains("wrong"), "the log has the password");
    let (device, topic, payload) = sent.one();
    assert_eq!(gateway.get(topic, Some(device)).unwrap().payload, payload, "from memory");

    let gateway = gateway.restart_with(&toml(&tables, &login(right.password)));
    gateway.is_well();
    tables.hold(&sent);
    gateway.has_written_all();
}

#[test]
fn what_waits_when_the_gateway_stops_is_written_by_the_next_start() {
    let Some(cassandra) = cassandra::shared() else { return };
    let tables = Tables::open(&cassandra.address, None);
    let proxy = Proxy::start(&cassandra.address);
    let gateway = Gateway::start(&proxy.address, &tables, "");
    let before = Load::once(gateway.mqtt(), "spilled");
    tables.hold(&before);
    proxy.cut();
    let load = Load::start(gateway.mqtt(), "spilled");
    gateway.is_degraded();
    load.goes_on();
    let sent = before.then(load.finish());

    // Twice without the database: what was replayed is kept a second time.
    let gateway = gateway.restart().restart();
    gateway.is_degraded();
    assert_eq!(gateway.health(""), ServingStatus::Serving);
    assert_eq!(gateway.health(STATE), ServingStatus::NotServing);
    let (device, topic, payload) = sent.one();
    assert_eq!(gateway.get(topic, Some(device)).unwrap().payload, payload, "from memory");
    // A newer value is not undone by what was kept.
    let sent = sent.then(Load::once(gateway.mqtt(), "spilled"));

    proxy.mend();
    gateway.is_well();
    tables.hold(&sent);
    gateway.has_written_all();
    // Nothing is kept that was written: another start writes nothing older.
    let gateway = gateway.restart();
    gateway.has_written_all();
    tables.hold(&sent);
}

/// The failure: Cassandra that was killed amid a change of its schema lists a table that it does not know, and the gateway asks
/// for that table for ever.
#[test]
fn a_database_killed_amid_its_first_schema_gets_the_rest() {
    let Some(cassandra) = cassandra::victim() else { return };
    for (round, table) in ["migrations", "latest_by_device"].into_iter().enumerate() {
        let tables = Tables::open(&cassandra.address, None);
        let gateway = Gateway::start(&cassandra.address, &tables, "");
        let load = Load::start(gateway.mqtt(), &format!("amid-{round}"));
        wait_for("the first tables", || tables.list(table));
        cassandra.kill();
        load.goes_on();
        cassandra.start_again();
        gateway.is_well();
        load.goes_on();
        tables.hold(&load.finish());
    }
}
