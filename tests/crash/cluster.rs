//! Nothing acknowledged is lost when the gateway that serves dies with its disk, stands still, or loses its database: the world and the
//! model of `kill_9`, on two gateways, with backends beside it.
//!
//! `CRASH_ROUNDS` makes the long forms longer: so many faults, of kinds that are drawn.

mod churn;
mod clocks;
mod deposit;
mod directories;
mod outages;
mod starts;
mod times;

use std::{
    thread,
    time::{Duration, Instant},
};

use gateway_core::{Protocol, QoS};

use super::{
    backends::Backends,
    blocking::{Client, Got},
    engine::Engine,
    model::Facts,
    number,
    pair::Pair,
    proxy::Passage,
    report,
    rng::Rng,
    seed,
    world::{World, acknowledged},
};

const MILLI: u64 = 1_000_000;
const SECOND: u64 = 1_000 * MILLI;

/// A fault, and what comes after it.
#[derive(Debug, Clone, Copy)]
enum Fault {
    /// The active one is killed and its directory deleted; it comes back with nothing.
    Disk,
    /// The active one is killed and comes back with its directory.
    Kill,
    /// The active one stands still for so many seconds, and the other takes over meanwhile.
    Pause(u64),
    /// The database stands still.
    Database,
    /// A server of the database is killed, and comes back.
    Crash,
    /// Both are killed, and started at once.
    Both,
    /// The active one ends in order.
    Stop,
    /// The active one is cut off from the database, or hears nothing of it, until the other serves, and a while longer.
    Apart(Passage),
    /// Answers of the database are swallowed, while the active one is killed and its directory deleted.
    Lossy,
}

const SHORT: [Fault; 13] = [
    Fault::Disk,
    Fault::Disk,
    Fault::Both,
    Fault::Pause(1),
    Fault::Disk,
    Fault::Both,
    Fault::Database,
    Fault::Both,
    Fault::Disk,
    Fault::Stop,
    Fault::Both,
    Fault::Disk,
    Fault::Both,
];

/// A device that is connected to one gateway, past the balancer, to see what becomes of it there.
struct Witness(Client);

impl Witness {
    /// Connects, and is acknowledged a message.
    fn at(port: u16) -> Self {
        let mut client = Client::connect(port, Protocol::V5, "witness");
        client.publish_acked("witness", b"before", true);
        Self(client)
    }

    /// Publishes what has to be stored, to a gateway that cannot.
    fn publish(&mut self) {
        self.0.publish("witness", b"late", QoS::AtLeastOnce, true);
    }

    /// The gateway ends the connection, and acknowledges nothing before.
    fn sees_the_end(mut self) {
        assert_eq!(self.0.next(), Got::Closed, "a gateway that was replaced answers");
    }
}

/// Load until `is_so`.
fn run_until(world: &mut World, pair: &mut Pair, what: &str, is_so: impl Fn(&Pair) -> bool) {
    let begun = Instant::now();
    while !is_so(pair) {
        assert!(begun.elapsed() < Duration::from_secs(60), "not after 60 s: {what}");
        world.run(pair, 200 * MILLI);
    }
}

fn strike(fault: Fault, pair: &mut Pair, world: &mut World, engine: &Engine) {
    let active = pair.active();
    let other = 1 - active;
    let begun = Instant::now();
    let told =
        |serves: usize| println!("    {fault:?}: {serves} serves after {} ms", begun.elapsed().as_millis());
    match fault {
        Fault::Disk | Fault::Kill => {
            pair.until("the copy is warm", |pair| pair.is_warm(other));
            pair.kill(active, matches!(fault, Fault::Disk));
            world.after_kill(pair);
            assert_eq!(pair.active(), other);
            told(other);
            pair.start(active);
        }
        Fault::Pause(seconds) => {
            pair.until("the copy is warm", |pair| pair.is_warm(other));
            let mut witness = Witness::at(pair.port_of(active));
            pair.signal(active, "STOP");
            // The process stands still by then.
            thread::sleep(Duration::from_millis(50));
            witness.publish();
            world.run(pair, seconds * SECOND);
            run_until(world, pair, "the other serves", |pair| pair.serves(other));
            told(other);
            world.run(pair, SECOND);
            pair.signal(active, "CONT");
            witness.sees_the_end();
            pair.until("the one that stood still stands by", |pair| pair.is_warm(active));
        }
        Fault::Database => {
            engine.pause();
            world.run(pair, 4 * SECOND);
            engine.resume();
        }
        Fault::Crash => {
            engine.kill();
            // Its start waits until it answers.
            thread::scope(|scope| {
                world.run(pair, SECOND);
                scope.spawn(|| engine.start());
                world.run(pair, 4 * SECOND);
            });
        }
        Fault::Both => {
            for number in [active, other] {
                pair.kill(number, false);
            }
            world.after_kill(pair);
            pair.start(other);
            pair.start(active);
            told(pair.active());
        }
        Fault::Stop => {
            pair.stop(active);
            world.after_kill(pair);
            assert_eq!(pair.active(), other);
            told(other);
            pair.start(active);
        }
        Fault::Apart(passage) => {
            pair.until("the copy is warm", |pair| pair.is_warm(other));
            let mut witness = Witness::at(pair.port_of(active));
            pair.line(active).set(passage);
            witness.publish();
            run_until(world, pair, "the other serves", |pair| pair.serves(other));
            told(other);
            world.run(pair, 2 * SECOND);
            pair.line(active).set(Passage::Open);
            witness.sees_the_end();
            pair.until("the one that was apart stands by", |pair| pair.is_warm(active));
        }
        Fault::Lossy => {
            let lossy = |pair: &Pair, passage| (0..2).for_each(|number| pair.line(number).set(passage));
            let swallowed = |pair: &Pair| (0..2).map(|number| pair.line(number).swallowed()).sum::<u64>();
            let before = swallowed(pair);
            lossy(pair, Passage::Lossy);
            world.run(pair, 3 * SECOND);
            pair.until("the copy is warm", |pair| pair.is_warm(other));
            pair.kill(active, true);
            world.after_kill(pair);
            assert_eq!(pair.active(), other);
            told(other);
            world.run(pair, 3 * SECOND);
            let swallowed = swallowed(pair) - before;
            println!("    {swallowed} answers were swallowed");
            assert!(swallowed > 0, "no answer was swallowed");
            lossy(pair, Passage::Open);
            pair.start(active);
        }
    }
}

/// Devices and backends get what they were promised at the end, and were told nothing that was not so.
fn judge(world: &mut World, pair: &mut Pair, backends: Backends) {
    world.drain(pair);
    world.probe(pair);
    let (problems, figures) = backends.finish(&world.history);
    let facts = Facts::new(&world.history, &world.cast);
    println!(
        "{} acknowledged, {} arrived, {} unanswered; {figures}",
        facts.acked(),
        facts.arrived(),
        world.unanswered()
    );
    let violations = facts.violations(&world.cast);
    let few: Vec<_> = problems.iter().take(20).collect();
    assert!(violations.is_empty() && problems.is_empty(), "{}\n{few:#?}", report(world, &violations));
    assert_eq!(world.unanswered(), 0, "publishers wait for ever");
    assert!(figures.replied > 0 && figures.keyed > 0 && figures.updates > 0, "no backend got anywhere");
}

/// Half of all worlds have links, and clients that come to either gateway in turn.
fn campaign(engine: &Engine, seed: u64, faults: &[Fault]) {
    let begun = Instant::now();
    let mut rng = Rng::new(seed);
    let has_links = rng.one_in(2);
    println!("CRASH_SEED={seed}{}", if has_links { ", with links" } else { "" });
    let mut pair = Pair::new(engine);
    if has_links {
        pair.link();
    }
    let mut world = World::new(rng.next());
    pair.start(0);
    pair.start(1);
    pair.active();
    let backends = Backends::start(pair.grpc(), pair.balancer());
    world.settle(&mut pair);
    for (round, fault) in faults.iter().enumerate() {
        world.run(&mut pair, rng.between(200, 1_000) * MILLI);
        let begun = begun.elapsed().as_secs();
        println!("{begun:>4} s, round {round}: {fault:?}, {} acknowledged", acknowledged(&world.history));
        strike(*fault, &mut pair, &mut world, engine);
    }
    judge(&mut world, &mut pair, backends);
    assert!(acknowledged(&world.history) > 20 * faults.len(), "too little load to prove anything");
}

/// The failures: a message that was acknowledged is missing or comes twice at QoS 2 at the gateway that took over; a gateway that was
/// replaced acknowledges; two serve; what a backend was told of a group, a command or a shadow is not so any more.
#[test]
fn a_gateway_that_takes_over_lacks_and_repeats_nothing() {
    if let Some(engine) = Engine::postgres() {
        campaign(&engine, seed(), &SHORT);
    }
}

/// The long form.
#[test]
#[ignore = "takes minutes: scripts/crash.sh N cluster many"]
fn many_takeovers_on_postgresql_lose_and_repeat_nothing() {
    if let Some(engine) = Engine::postgres() {
        many(&engine);
    }
}

/// The same on three nodes of Cassandra, of which one stands still or dies now and then.
#[test]
#[ignore = "takes minutes: scripts/crash.sh N cluster many"]
fn many_takeovers_on_cassandra_lose_and_repeat_nothing() {
    if let Some(engine) = Engine::cassandra() {
        many(&engine);
    }
}

/// Kills with the directory deleted are half of all, and each other kind comes once in ten faults.
fn many(engine: &Engine) {
    use Fault::{Apart, Both, Crash, Database, Disk, Kill, Lossy, Pause, Stop};
    let mut rng = Rng::new(seed());
    let others = [
        Kill,
        Pause(20),
        Database,
        Crash,
        Both,
        Both,
        Stop,
        Apart(Passage::Cut),
        Apart(Passage::Silent),
        Lossy,
    ];
    let (mut left, mut disks) = (number("CRASH_ROUNDS", 50), 0);
    while left > 0 {
        let batch = left.min(10);
        let mut draw =
            || if rng.one_in(2) { Disk } else { others[rng.between(0, others.len() as u64) as usize] };
        let faults: Vec<Fault> = (0..batch).map(|_| draw()).collect();
        campaign(engine, rng.next(), &faults);
        disks += faults.iter().filter(|fault| matches!(fault, Disk | Lossy)).count();
        left -= batch;
    }
    println!("{disks} gateways were killed with their directory deleted");
}
