//! Time until the other gateway serves, with a little and with much in the home.

use std::time::{Duration, Instant};

use super::deposit::Deposit;
use crate::{engine::Engine, number, pair::Pair};

/// Bytes of a message.
const MESSAGE: usize = 64 << 10;
/// Bytes that are published at a time.
const BATCH: usize = 32 << 20;
/// More may be stored than by default, and taking it on in a cold directory may last.
const LIMITS: &str = "[limits]\nretained_bytes = \"16 GiB\"\n";
const PATIENCE: Duration = Duration::from_secs(1_800);

/// Returns whether retained messages take less than they may: a quarter of the budget. They leave memory from an eighth on.
fn has_room(pair: &Pair) -> bool {
    let held = pair.metric(0, r#"gateway_memory_bytes{kind="retained"}"#);
    held.zip(pair.metric(0, "gateway_memory_budget_bytes")).is_some_and(|(held, budget)| held < budget / 6.0)
}

/// Fills a home, and measures a takeover by a gateway with a warm copy, and by one with none.
fn measure(engine: &Engine, megabytes: u64) {
    let mut pair = Pair::with_sections(engine, LIMITS);
    pair.patience = PATIENCE;
    pair.start(0);
    pair.active();
    pair.start(1);
    let mut deposit = Deposit::keeping(86_400);
    let begun = Instant::now();
    let count = (megabytes as usize * 1_000_000).div_ceil(MESSAGE);
    let mut left = count;
    while left > 0 {
        let batch = left.min(BATCH / MESSAGE);
        deposit.add(pair.port_of(0), batch, MESSAGE);
        left -= batch;
        pair.until("retained messages leave memory", has_room);
    }
    // Such a message is acknowledged and not stored.
    let refused = pair.metric(0, r#"mqtt_retained_refused_total{reason="memory"}"#);
    assert_eq!(refused, Some(0.0), "memory was short for retained messages");
    println!("{megabytes} MB: filled in {:.1} s", begun.elapsed().as_secs_f64());
    pair.until("the copy is warm", |pair| pair.is_warm(1));
    println!("    the copy is warm {:.1} s after that began", begun.elapsed().as_secs_f64());

    let begun = Instant::now();
    pair.kill(0, true);
    assert_eq!(pair.active(), 1);
    println!("    warm: serves {} ms after the kill", begun.elapsed().as_millis());
    assert!(deposit.has(pair.port_of(1), 0), "the first message is missing");

    pair.kill(1, true);
    let begun = Instant::now();
    pair.start(0);
    assert_eq!(pair.active(), 0);
    println!("    cold: serves {} ms after its start on an empty directory", begun.elapsed().as_millis());
    assert!(deposit.has(pair.port_of(0), count - 1), "the last message is missing");
    println!("    ledger: {:.1} MB", engine.ledger_bytes(pair.cluster()) as f64 / 1e6);
}

/// Both gateways are on one host, where the end of a process is seen at once: between hosts up to 5 s until it is suspected, and 4 s for
/// its lease, come on top.
#[test]
#[ignore = "takes minutes, and three times CRASH_MB on the disk: scripts/crash.sh N cluster times"]
fn times_of_takeovers_by_size_of_the_home() {
    let Some(engine) = Engine::postgres() else { return };
    measure(&engine, 10);
    measure(&engine, number("CRASH_MB", 2_000));
}
