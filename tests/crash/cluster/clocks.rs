//! Two gateways whose wall clocks are two hours apart.

use std::{
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

use super::{
    churn::{Churn, MOST},
    deposit::Deposit,
};
use crate::{
    engine::Engine,
    number,
    pair::Pair,
    support::{need, on_path, root},
};

/// Seconds by which each clock is wrong.
const WRONG: [i64; 2] = [3_600, -3_600];
const TAKEOVERS: usize = 6;
/// Some beats.
const SEEN: Duration = Duration::from_secs(4);

/// Compiles what makes a clock wrong; none, loudly, without a C compiler.
fn library(folder: &Path) -> Option<PathBuf> {
    if !need("cc", on_path("cc")) {
        return None;
    }
    let library = folder.join("offset.so");
    let output = Command::new("cc")
        .args(["-shared", "-fPIC", "-O2", "-o"])
        .args([&library, &root().join("tests/recorder/offset.c")])
        .output()
        .expect("run cc");
    assert!(output.status.success(), "cc: {}", String::from_utf8_lossy(&output.stderr));
    Some(library)
}

/// The failures: a session or a message expires at a takeover because two clocks differ; a gateway that is behind removes rows in vain, so
/// that the ledger grows.
fn clocks_apart(engine: &Engine) {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(library) = library(folder.path()) else { return };
    let mut pair = Pair::new(engine);
    for (number, wrong) in WRONG.into_iter().enumerate() {
        let preload = ("LD_PRELOAD".to_owned(), library.display().to_string());
        pair.set_env(number, vec![preload, ("OFFSET_SECONDS".to_owned(), wrong.to_string())]);
    }
    pair.start(0);
    pair.active();
    pair.start(1);
    let mut deposit = Deposit::keeping(1_800);
    for takeover in 0..TAKEOVERS {
        let active = pair.active();
        let other = 1 - active;
        deposit.add(pair.port_of(active), 50, 300);
        pair.until("the copy is warm", |pair| pair.is_warm(other));
        // One that has not seen the other alive has only its own clock to say how long nobody has served.
        thread::sleep(SEEN);
        pair.kill(active, takeover % 2 == 0);
        assert_eq!(pair.active(), other);
        println!("takeover {takeover}: {other} serves, whose clock is wrong by {} s", WRONG[other]);
        deposit.is_whole(pair.port_of(other));
        pair.start(active);
    }
    // The one that is ahead fills the ledger, and the one that is behind removes.
    let mut churn = Churn::begin(engine, &mut pair, number("CRASH_LIVE_MB", 48));
    let (ahead, behind) = (0, 1);
    for active in [ahead, behind] {
        if pair.active() != active {
            let now = 1 - active;
            pair.until("the copy is warm", |pair| pair.is_warm(active));
            thread::sleep(SEEN);
            pair.kill(now, true);
            assert_eq!(pair.active(), active);
            pair.start(now);
        }
        for _ in 0..4 {
            churn.round(&mut pair);
        }
    }
    let ratio = churn.settled_ratio(&mut pair);
    assert!(ratio < MOST, "the ledger has {ratio:.2} times what is alive");
}

#[test]
#[ignore = "takes minutes: scripts/crash.sh N cluster clocks"]
fn clocks_apart_expire_nothing_and_keep_postgresql_small() {
    if let Some(engine) = Engine::postgres() {
        clocks_apart(&engine);
    }
}

#[test]
#[ignore = "takes minutes: scripts/crash.sh N cluster clocks"]
fn clocks_apart_expire_nothing_and_keep_cassandra_small() {
    if let Some(engine) = Engine::cassandra() {
        clocks_apart(&engine);
    }
}
