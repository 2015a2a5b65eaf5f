//! Nothing acknowledged is lost: the real binary is killed at random moments under load, or its disk loses what was
//! not synced, stands still or is full; then an independent model looks at everything that clients saw.
//!
//! `CRASH_ROUNDS` and `CRASH_IMAGES` make it longer, `CRASH_SEED` repeats a run (as far as timing allows); the seed of
//! a run is in its output. `CRASH_BINARY` is another build of the server, `CRASH_HISTORY` a file for what clients saw,
//! if something is wrong. See docs/operations/crashes.md.
#![expect(clippy::print_stdout, reason = "a failing run must be repeatable")]
#![expect(clippy::disallowed_methods, reason = "waiting for another process needs the real clock")]

mod backends;
mod balancer;
#[path = "../support/client.rs"]
mod blocking;
mod broker;
mod client;
mod clock;
mod cluster;
mod disk;
mod engine;
mod full;
mod full_commands;
mod history;
mod latest;
mod model;
mod model_tests;
mod pair;
mod power;
mod proxy;
mod recorder;
mod rng;
mod stress;
#[path = "../support/mod.rs"]
mod support;
mod world;

use std::collections::BTreeMap;

use broker::{Broker, MemoryKind};
use model::{Facts, Violation};
use rng::Rng;
use world::{SHORT, World, acknowledged};

/// Kills against one data directory; more rounds take a new one, so that no queue comes near its cap.
const BATCH: u64 = 7;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name} is not a number")))
}

/// Returns the seed of `CRASH_SEED`, or a new one.
fn seed() -> u64 {
    number("CRASH_SEED", clock::now() ^ u64::from(std::process::id()) << 40)
}

/// Describes the violations, by kind with some examples. All actions and observations of clients go to the file
/// `CRASH_HISTORY`.
fn report(world: &World, violations: &[Violation]) -> String {
    if let Some(path) = std::env::var_os("CRASH_HISTORY") {
        let line = |record: &history::Record| {
            format!("{} {} {:?}\n", record.at / 1_000, world.name(record.client), record.event)
        };
        let lines: String = world.history.iter().map(line).collect();
        std::fs::write(path, lines).expect("write the history");
    }
    let mut kinds: BTreeMap<String, Vec<&Violation>> = BTreeMap::new();
    for violation in violations {
        let text = format!("{violation:?}");
        let kind = text.split([' ', '{']).next().unwrap_or_default().to_owned();
        kinds.entry(kind).or_default().push(violation);
    }
    let mut text = String::new();
    for (kind, list) in kinds {
        text += &format!("{kind}: {}\n", list.len());
        for violation in list.iter().take(8) {
            let who = violation.client().map(|number| world.name(number)).unwrap_or_default();
            text += &format!("    {who} {violation:?}\n");
        }
    }
    text
}

/// Kills `rounds` times under load, drains, kills once more, and says what the model found.
fn campaign(kind: MemoryKind, seed: u64, rounds: u64) -> (World, Vec<Violation>) {
    let mut rng = Rng::new(seed);
    let mut broker = Broker::new(kind);
    let mut world = World::new(rng.next());
    if kind != MemoryKind::Own {
        world = world.without_wills();
        world.silence = SHORT;
    }
    broker.start();
    world.settle(&mut broker);
    for round in 0..rounds {
        // Now and then while it still starts.
        let life = if rng.one_in(6) { rng.between(1, 200) } else { rng.between(300, 1_500) };
        world.run(&mut broker, life * 1_000_000);
        if kind != MemoryKind::Own {
            // This kind of store is to be found guilty, so that there has to be something to lose.
            world.run_until_something_waits(&mut broker, 0);
        }
        broker.kill();
        world.after_kill(&broker);
        println!(
            "round {round}: killed after {life} ms or more, {} acknowledged",
            acknowledged(&world.history)
        );
        broker.start();
    }
    world.drain(&mut broker);
    // A message that is repeated after this was not remembered.
    broker.kill();
    world.after_kill(&broker);
    broker.start();
    world.drain(&mut broker);
    world.probe(&mut broker);
    let facts = Facts::new(&world.history, &world.cast);
    println!(
        "{} acknowledged, {} arrived, {} wills, {} unanswered",
        facts.acked(),
        facts.arrived(),
        facts.wills(),
        world.unanswered()
    );
    let violations = facts.violations(&world.cast);
    (world, violations)
}

#[test]
fn kill_9_loses_repeats_or_reorders_nothing() {
    let mut rounds = number("CRASH_ROUNDS", BATCH);
    let mut seeds = Rng::new(seed());
    while rounds > 0 {
        let (seed, batch) = (seeds.next(), rounds.min(BATCH));
        println!("CRASH_SEED={seed} (a batch of {batch} rounds)");
        let (world, violations) = campaign(MemoryKind::Own, seed, batch);
        assert!(violations.is_empty(), "seed {seed}:\n{}", report(&world, &violations));
        assert_eq!(world.unanswered(), 0, "seed {seed}: publishers wait for ever");
        assert!(acknowledged(&world.history) > 20 * batch as usize, "too little load to prove anything");
        rounds -= batch;
    }
}

/// The harness itself: a broker that keeps sessions in memory does lose them.
#[test]
fn the_loss_of_a_broker_that_does_not_sync_is_found() {
    if !support::need("mosquitto", Broker::has_mosquitto()) {
        return;
    }
    let seed = seed();
    println!("CRASH_SEED={seed}");
    let (world, violations) = campaign(MemoryKind::Mosquitto, seed, 1);
    let found = report(&world, &violations);
    println!("{found}");
    assert!(violations.iter().any(|violation| matches!(violation, Violation::SessionLost { .. })), "{found}");
    assert!(violations.iter().any(|violation| matches!(violation, Violation::Lost { .. })), "{found}");
}

/// Comings, goings and takeovers, without a crash; what the model finds.
fn calm(kind: MemoryKind, seed: u64) -> Result<(), String> {
    println!("CRASH_SEED={seed}");
    let mut broker = Broker::new(kind);
    let mut world = World::new(seed);
    if kind != MemoryKind::Own {
        world = world.without_wills();
    }
    broker.start();
    world.settle(&mut broker);
    world.run(&mut broker, 2_500_000_000);
    world.drain(&mut broker);
    world.probe(&mut broker);
    let violations = Facts::new(&world.history, &world.cast).violations(&world.cast);
    match (violations.is_empty(), world.unanswered()) {
        (true, 0) => Ok(()),
        (true, waiting) => Err(format!("seed {seed}: {waiting} publishers wait for ever")),
        (false, _) => Err(format!("seed {seed}:\n{}", report(&world, &violations))),
    }
}

/// Checks that no loss by takeovers is blamed on the store.
#[test]
fn takeovers_and_absence_alone_lose_nothing() {
    calm(MemoryKind::Own, seed()).unwrap();
}

/// The harness itself: what it finds is not its own fault, nor what both brokers have from one author.
///
/// The other broker has faults of its own (on a busy machine it was seen to repeat a message), so that
/// one accusation is allowed. A harness at fault would accuse it again.
#[test]
fn another_broker_is_not_accused_while_it_lives() {
    if !support::need("mosquitto", Broker::has_mosquitto()) {
        return;
    }
    let mut seeds = Rng::new(seed());
    if let Err(accusation) = calm(MemoryKind::Mosquitto, seeds.next()) {
        println!("{accusation}");
        calm(MemoryKind::Mosquitto, seeds.next()).unwrap();
    }
}
