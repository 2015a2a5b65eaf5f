//! The database is away for long: nothing durable is acknowledged meanwhile, and nobody else notices.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use gateway_core::{Protocol, QoS};

use super::{MILLI, SECOND, judge, run_until};
use crate::{
    backends::Backends,
    blocking::{Client, Got, hello},
    clock,
    engine::Engine,
    history::{Event, Record},
    number,
    pair::Pair,
    rng::Rng,
    seed,
    world::{World, acknowledged},
};

/// Devices that only stay.
const IDLE: usize = 8;
/// An answer may be on its way when its database stops: one that comes later is not of it.
const UNDER_WAY: u64 = SECOND;
/// A gateway admits clients for so long without the database.
const LEASE: u64 = 3 * SECOND;

/// Devices at one gateway that must notice nothing: some that stay, and two between which messages go at QoS 0.
struct Bystanders {
    idle: Vec<Client>,
    stop: Arc<AtomicBool>,
    traffic: JoinHandle<Traffic>,
}

#[derive(Debug)]
struct Traffic {
    messages: u32,
    longest_gap: Duration,
}

impl Bystanders {
    fn at(port: u16) -> Self {
        let idle = (0..IDLE).map(|number| {
            let mut connect = hello(Protocol::V5, &format!("idle-{number}"));
            connect.session_expiry = Some(3600);
            let mut client = Client::connect_with(port, connect);
            assert_eq!(client.subscribe_with("idle/#", QoS::AtLeastOnce, None), 1);
            client
        });
        let idle = idle.collect();
        let mut receiver = Client::connect(port, Protocol::V5, "receiver");
        receiver.subscribe("live");
        let mut sender = Client::connect(port, Protocol::V5, "sender");
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let traffic = thread::spawn(move || {
            let mut traffic = Traffic { messages: 0, longest_gap: Duration::ZERO };
            while !stopped.load(SeqCst) {
                let sent = Instant::now();
                let payload = traffic.messages.to_string();
                sender.publish("live", payload.as_bytes(), QoS::AtMostOnce, false);
                assert_eq!(receiver.next(), Got::Publish("live".to_owned(), payload.into_bytes()));
                traffic.messages += 1;
                traffic.longest_gap = traffic.longest_gap.max(sent.elapsed());
                thread::sleep(Duration::from_millis(20));
            }
            traffic
        });
        Self { idle, stop, traffic }
    }

    /// Nobody was thrown out, and nothing at QoS 0 is missing.
    fn noticed_nothing(mut self, seconds: u64) {
        for client in &mut self.idle {
            client.ping();
        }
        self.stop.store(true, SeqCst);
        let traffic = self.traffic.join().expect("messages at QoS 0 went on");
        println!("    {traffic:?} in {seconds} s, {IDLE} devices stayed");
        assert!(u64::from(traffic.messages) > seconds, "QoS 0 stood still");
    }
}

/// Answers to devices between two times that promise something, with the milliseconds since the first.
fn promised(world: &World, from: u64, to: u64) -> Vec<String> {
    let is_promise = |record: &&Record| match record.event {
        Event::Acked { .. } => (from..to).contains(&record.at),
        Event::Subscribed { .. } | Event::Connected { .. } => (from + LEASE..to).contains(&record.at),
        _ => false,
    };
    let told = |record: &Record| {
        format!("{} ms: {} {:?}", (record.at - from) / MILLI, world.name(record.client), record.event)
    };
    world.history.iter().filter(is_promise).map(told).collect()
}

/// Load for so long without a database, which `begin` takes away and `end` gives back.
fn outage(
    pair: &mut Pair,
    world: &mut World,
    what: &str,
    seconds: u64,
    begin: impl FnOnce(),
    end: impl FnOnce(),
) {
    let active = pair.active();
    let bystanders = Bystanders::at(pair.port_of(active));
    println!("{what} for {seconds} s, {} acknowledged", acknowledged(&world.history));
    begin();
    let from = clock::now() + UNDER_WAY;
    world.run(pair, seconds * SECOND);
    let to = clock::now();
    bystanders.noticed_nothing(seconds);
    end();
    let told = promised(world, from, to);
    assert!(told.is_empty(), "promised while nothing could be stored: {told:#?}");
    let before = acknowledged(&world.history);
    let begun = Instant::now();
    run_until(world, pair, "acknowledgements go on", |pair| pair.serves(0) || pair.serves(1));
    while acknowledged(&world.history) < before + 20 {
        assert!(begun.elapsed() < Duration::from_secs(60), "acknowledgements do not go on");
        world.run(pair, SECOND / 10);
    }
    println!("    acknowledgements go on after {} ms", begun.elapsed().as_millis());
}

struct Scene {
    pair: Pair,
    world: World,
    backends: Backends,
}

fn begin(engine: &Engine) -> Scene {
    let seed = seed();
    println!("CRASH_SEED={seed}");
    let mut pair = Pair::new(engine);
    let mut world = World::new(Rng::new(seed).next());
    pair.start(0);
    pair.start(1);
    pair.active();
    let backends = Backends::start(pair.grpc(), pair.balancer());
    world.settle(&mut pair);
    world.run(&mut pair, 2 * SECOND);
    Scene { pair, world, backends }
}

/// The failures: something is acknowledged that no standby has; a former primary that wakes up is written to; devices lose their
/// connections because the database is away; what was acknowledged before a promotion is gone after it.
#[test]
#[ignore = "takes minutes: scripts/crash.sh N cluster outages"]
fn outages_of_postgresql_throw_nobody_out_and_lose_nothing() {
    let Some(engine) = Engine::postgres() else { return };
    let long = number("CRASH_OUTAGE", 60);
    let Scene { mut pair, mut world, backends } = begin(&engine);
    let (pause, resume) = (|| engine.pause(), || engine.resume());
    outage(&mut pair, &mut world, "the primary stands still", long, pause, resume);
    world.run(&mut pair, 2 * SECOND);
    outage(&mut pair, &mut world, "the primary is dead", 10, || engine.kill(), || engine.start());
    world.run(&mut pair, 2 * SECOND);
    // Both believe to be primaries then.
    let promote = || drop(engine.order(&["promote"]));
    outage(
        &mut pair,
        &mut world,
        "the primary stands still until the standby is promoted",
        10,
        pause,
        promote,
    );
    engine.resume();
    world.run(&mut pair, 10 * SECOND);
    // Another process asks for the primary anew.
    let active = pair.active();
    pair.kill(active, true);
    world.after_kill(&pair);
    pair.active();
    pair.start(active);
    judge(&mut world, &mut pair, backends);
}

/// The failures: something is acknowledged that one node of three has; devices lose their connections meanwhile.
#[test]
#[ignore = "takes minutes: scripts/crash.sh N cluster outages"]
fn outages_of_cassandra_throw_nobody_out_and_lose_nothing() {
    let Some(engine) = Engine::cassandra() else { return };
    let long = number("CRASH_OUTAGE", 60);
    let Scene { mut pair, mut world, backends } = begin(&engine);
    let (pause, resume) = (|| engine.order_majority("pause"), || engine.order_majority("resume"));
    outage(&mut pair, &mut world, "two nodes of three stand still", long, pause, resume);
    world.run(&mut pair, 5 * SECOND);
    outage(
        &mut pair,
        &mut world,
        "two nodes of three are dead",
        long,
        || engine.order_majority("kill"),
        || engine.start(),
    );
    world.run(&mut pair, 5 * SECOND);
    engine.kill();
    let begun = acknowledged(&world.history);
    world.run(&mut pair, 10 * SECOND);
    let gap = longest_gap(&world.history[..], clock::now() - 10 * SECOND);
    println!(
        "one node is dead: {} acknowledged, the longest gap is {gap} ms",
        acknowledged(&world.history) - begun
    );
    engine.start();
    judge(&mut world, &mut pair, backends);
}

/// The longest time without an acknowledgement since `from`, in milliseconds.
fn longest_gap(history: &[Record], from: u64) -> u64 {
    let times =
        history.iter().filter(|record| matches!(record.event, Event::Acked { .. }) && record.at >= from);
    let mut last = from;
    let mut longest = 0;
    for record in times {
        longest = longest.max(record.at - last);
        last = record.at;
    }
    longest / 1_000_000
}
