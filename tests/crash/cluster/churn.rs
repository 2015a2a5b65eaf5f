//! The ledger's size while what is alive is changed again and again.

use std::{
    thread,
    time::{Duration, Instant},
};

use super::deposit::Deposit;
use crate::{engine::Engine, number, pair::Pair};

/// The ledger has at most so many times what is alive.
pub(super) const MOST: f64 = 3.0;
/// Bytes of a message.
const MESSAGE: usize = 32 << 10;
/// A start is published at most once a minute, and rows go then.
const SETTLE: Duration = Duration::from_secs(90);

/// Retained messages that are changed in turn.
pub(super) struct Churn<'a> {
    engine: &'a Engine,
    deposit: Deposit,
    topics: usize,
    begun: Instant,
    written: u64,
    highest: f64,
}

impl<'a> Churn<'a> {
    /// Publishes about so many megabytes.
    pub(super) fn begin(engine: &'a Engine, pair: &mut Pair, megabytes: u64) -> Self {
        let topics = (megabytes as usize * 1_000_000).div_ceil(MESSAGE);
        let deposit = Deposit::keeping(86_400);
        let mut churn = Self { engine, deposit, topics, begun: Instant::now(), written: 0, highest: 0.0 };
        churn.round(pair);
        churn.highest = 0.0;
        churn
    }

    /// Changes each message once, and returns how many times what is alive the ledger has.
    pub(super) fn round(&mut self, pair: &mut Pair) -> f64 {
        let active = pair.active();
        self.deposit.add_over(pair.port_of(active), self.topics, MESSAGE, self.topics);
        self.written += (self.topics * MESSAGE) as u64;
        self.ratio(pair)
    }

    fn ratio(&mut self, pair: &Pair) -> f64 {
        let (ledger, alive) = (self.engine.ledger_bytes(pair.cluster()), self.deposit.bytes());
        let ratio = ledger as f64 / alive as f64;
        self.highest = self.highest.max(ratio);
        let megabytes = |bytes: u64| bytes as f64 / 1e6;
        println!(
            "{:>5} s: {:.0} MB published, {:.1} MB alive, {:.1} MB in the ledger, {ratio:.2} times",
            self.begun.elapsed().as_secs(),
            megabytes(self.written),
            megabytes(alive),
            megabytes(ledger)
        );
        ratio
    }

    /// The same once removals have had time, while a little is changed still; everything is there then.
    pub(super) fn settled_ratio(&mut self, pair: &mut Pair) -> f64 {
        let begun = Instant::now();
        let mut ratio = self.ratio(pair);
        while ratio >= MOST && begun.elapsed() < SETTLE {
            let active = pair.active();
            self.deposit.add_over(pair.port_of(active), self.topics.div_ceil(20), MESSAGE, self.topics);
            thread::sleep(Duration::from_secs(1));
            ratio = self.ratio(pair);
        }
        let active = pair.active();
        self.deposit.is_whole(pair.port_of(active));
        ratio
    }
}

/// The failure: the ledger grows with what was ever written, and not with what is alive.
fn churn(engine: &Engine) {
    let length = Duration::from_secs(60 * number("CRASH_MINUTES", 60));
    let mut pair = Pair::new(engine);
    pair.start(0);
    pair.active();
    pair.start(1);
    let mut churn = Churn::begin(engine, &mut pair, number("CRASH_LIVE_MB", 48));
    while churn.begun.elapsed() < length {
        churn.round(&mut pair);
    }
    let ratio = churn.settled_ratio(&mut pair);
    println!("highest {:.2} times what is alive, {ratio:.2} at the end", churn.highest);
    assert!(ratio < MOST, "the ledger has {ratio:.2} times what is alive");
}

#[test]
#[ignore = "takes CRASH_MINUTES: scripts/crash.sh N cluster churn"]
fn churn_leaves_postgresql_within_three_times_of_what_is_alive() {
    if let Some(engine) = Engine::postgres() {
        churn(&engine);
    }
}

#[test]
#[ignore = "takes CRASH_MINUTES: scripts/crash.sh N cluster churn"]
fn churn_leaves_cassandra_within_three_times_of_what_is_alive() {
    if let Some(engine) = Engine::cassandra() {
        churn(&engine);
    }
}
