//! Cost of routing one message at growing numbers of subscriptions: exact and wildcard, with the match
//! remembered (hot) and looked up anew (cold). `cargo bench --bench match`

mod support;

use std::{fmt::Write, hint::black_box};

use broker::{Broker, Turn};
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use gateway_core::{Message, Origin, Timestamp};
use support::Keeps;

/// Makes the filter of a number.
type Filter = fn(usize) -> String;

/// A broker with `count` subscriptions, a thousand for each session.
fn filled(count: usize, filter: Filter) -> Broker {
    let broker = support::broker();
    let before = resident();
    for first in (0..count).step_by(1000) {
        let session = support::open(&broker, &format!("c{first}"), Keeps::Nothing);
        for number in first..count.min(first + 1000) {
            support::subscribe(&broker, &session, &filter(number));
        }
    }
    // Smaller runs, and the second kind, reuse freed memory.
    if count >= 1_000_000
        && let (Some(before), Some(after)) = (before, resident())
    {
        say(&format!("{count} subscriptions: {} B each", (after - before) / count));
    }
    broker
}

#[expect(clippy::print_stderr, reason = "a figure beside those of Criterion")]
fn say(text: &str) {
    eprintln!("{text}");
}

/// Resident bytes of this process, where the system tells.
fn resident() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    Some(line.split_whitespace().nth(1)?.parse::<usize>().ok()? * 1024)
}

fn routing(criterion: &mut Criterion) {
    let kinds: [(&str, Filter); 2] = [
        ("exact", |number| format!("site/{}/device/{number}/t", number % 100)),
        ("wildcard", |number| format!("site/{}/device/{number}/+", number % 100)),
    ];
    for (kind, filter) in kinds {
        for count in [1_000, 100_000, 1_000_000] {
            let broker = filled(count, filter);
            let mut turn = Turn::default();
            let mut topic = String::new();
            let mut publish = |number: usize| {
                topic.clear();
                let _ = write!(topic, "site/{}/device/{number}/t", number % 100);
                let message = Message::new(&topic, b"payload", Timestamp(0), Origin::BACKEND);
                let published = broker.publish(black_box(&message), &mut turn);
                assert_eq!(published.matched, 1);
            };
            let mut group = criterion.benchmark_group(kind);
            let mut number = 0;
            group.bench_function(BenchmarkId::new("hot", count), |bencher| {
                bencher.iter(|| {
                    number = (number + 1) % 10;
                    publish(number);
                });
            });
            if count > 4096 {
                // A stride through all topics: each is long forgotten when its turn comes again.
                group.bench_function(BenchmarkId::new("cold", count), |bencher| {
                    bencher.iter(|| {
                        number = (number + 76_543) % count;
                        publish(number);
                    });
                });
            }
            group.finish();
        }
    }
}

criterion_group!(benches, routing);
criterion_main!(benches);
