//! Work to be counted in instructions: `instructions CASE REPEATS` does one thing so often. scripts/instructions.sh
//! runs it under callgrind with two numbers of repeats; the difference is the work alone, without preparation.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "it is a command-line tool")]

#[path = "support/rules.rs"]
mod ruled;
mod support;

use std::{env, hint::black_box, process::ExitCode};

use broker::{Broker, Turn};
use codec::{Publish, decode_publish, frame};
use gateway_core::{Message, Origin, Protocol, QoS, Timestamp};
use ruled::Ruled;
use support::{Keeps, publish_frame};

/// More than the broker remembers matches of.
const TOPICS: usize = 20_000;

/// Does a thing so often.
type Work = fn(usize);

const CASES: [(&str, Work); 12] = [
    ("decode-v4-qos0", |repeats| decode(repeats, Protocol::V4, QoS::AtMostOnce)),
    ("decode-v5-qos1", |repeats| decode(repeats, Protocol::V5, QoS::AtLeastOnce)),
    ("encode-v4-qos0", |repeats| encode(repeats, Protocol::V4, QoS::AtMostOnce)),
    ("encode-v5-qos1", |repeats| encode(repeats, Protocol::V5, QoS::AtLeastOnce)),
    ("match-exact-hot", |repeats| route(repeats, 1, |number| format!("site/{number}/t"))),
    ("match-exact-cold", |repeats| route(repeats, TOPICS, |number| format!("site/{number}/t"))),
    ("match-wildcard-hot", |repeats| route(repeats, 1, |number| format!("site/{number}/+"))),
    ("match-wildcard-cold", |repeats| route(repeats, TOPICS, |number| format!("site/{number}/+"))),
    ("fanout-1", |repeats| fanout(repeats, 1)),
    ("fanout-100", |repeats| fanout(repeats, 100)),
    ("rules-hot", |repeats| Ruled::new().hot(repeats)),
    ("rules-cold", |repeats| Ruled::new().cold(repeats)),
];

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    let [name, repeats] = &args[..] else {
        for (name, _) in CASES {
            println!("{name}");
        }
        return ExitCode::SUCCESS;
    };
    let case = CASES.iter().find(|(known, _)| known == name);
    match (case, repeats.parse()) {
        (Some((_, work)), Ok(repeats)) => work(repeats),
        _ => {
            eprintln!("usage: instructions CASE REPEATS; without arguments it lists the cases");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

fn decode(repeats: usize, protocol: Protocol, qos: QoS) {
    let mut bytes = Vec::new();
    publish_frame(protocol, qos).encode(&mut bytes);
    let mut publish = Publish::default();
    for _ in 0..repeats {
        let found = frame(black_box(&bytes), 1 << 20).expect("a valid header").expect("a whole frame");
        decode_publish(found.first, found.body, protocol, &mut publish).expect("a valid packet");
        black_box(publish.payload.len());
    }
}

fn encode(repeats: usize, protocol: Protocol, qos: QoS) {
    let publish = publish_frame(protocol, qos);
    let mut out = Vec::with_capacity(4096);
    for _ in 0..repeats {
        out.clear();
        black_box(&publish).encode(&mut out);
        black_box(out.len());
    }
}

/// Routes to one of many subscriptions, over `topics` topics in turn: one is remembered, all of them are not.
fn route(repeats: usize, topics: usize, filter: fn(usize) -> String) {
    let broker = support::broker();
    for first in (0..TOPICS).step_by(500) {
        let session = support::open(&broker, &format!("c{first}"), Keeps::Nothing);
        for number in first..first + 500 {
            support::subscribe(&broker, &session, &filter(number));
        }
    }
    let topics: Vec<String> = (0..topics).map(|number| format!("site/{number}/t")).collect();
    // The first round fills the memory for matches and is no part of the difference.
    publish(topics.len() + repeats, &broker, &topics, 1);
}

fn fanout(repeats: usize, count: usize) {
    let broker = support::broker();
    for number in 0..count {
        let session = support::open(&broker, &format!("c{number}"), Keeps::Bytes);
        support::subscribe(&broker, &session, "site/t");
    }
    publish(repeats, &broker, &["site/t".to_owned()], count);
}

fn publish(repeats: usize, broker: &Broker, topics: &[String], matches: usize) {
    let mut turn = Turn::default();
    for topic in topics.iter().cycle().take(repeats) {
        let message = Message::new(topic, &[0x5a; 256], Timestamp(0), Origin::BACKEND);
        let published = broker.publish(black_box(&message), &mut turn);
        turn.flush();
        assert_eq!(published.matched as usize, matches);
    }
}
