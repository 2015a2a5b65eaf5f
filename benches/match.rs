//! Cost of routing one message at growing numbers of subscriptions: exact and wildcard, with the match
//! remembered (hot) and looked up anew (cold). `cargo bench --bench match`

use std::{any::Any, fmt::Write, hint::black_box, sync::Arc};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use mqtt_server::{
    broker::{
        Broker, BrokerConfig, CloseReason, ConnectionInfo, Delivered, Frames, MatchOptions, OpenRequest,
        Outcome, QueueInfo, Session, SessionCore, SubscribeRequest, Target, Turn,
    },
    config::Limits,
    types::{ClientId, Message, Origin, Protocol, QoS, SharedMessage, Timestamp},
};

/// A session that takes everything and keeps nothing.
struct Sink(SessionCore);

impl Target for Sink {
    fn deliver(&self, _: &Message<'_>, _: MatchOptions<'_>, _: &mut Frames) -> Delivered {
        Delivered { outcome: Outcome::Sent, flush: false }
    }
    fn flush(self: Arc<Self>) {}
    fn is_online(&self) -> bool {
        true
    }
    fn load(&self) -> usize {
        0
    }
}

impl Session for Sink {
    fn core(&self) -> &SessionCore {
        &self.0
    }
    fn close(&self, _: u32, _: CloseReason) {}
    fn end(&self) -> Vec<(u32, Arc<SharedMessage>)> {
        Vec::new()
    }
    fn yield_shared(&self) -> Vec<(u32, Arc<SharedMessage>)> {
        Vec::new()
    }
    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
    fn queue(&self) -> QueueInfo {
        QueueInfo::default()
    }
}

/// Makes the filter of a number.
type Filter = fn(usize) -> String;

/// A broker with `count` subscriptions, a thousand for each session.
fn filled(runtime: &tokio::runtime::Runtime, count: usize, filter: Filter) -> Broker {
    let broker = Broker::new(BrokerConfig {
        limits: Arc::new(Limits::default()),
        non_broker: false,
        namespace: String::new(),
        listener_strategies: Default::default(),
        latest: None,
    });
    let info = ConnectionInfo {
        peer: std::net::SocketAddr::from(([127, 0, 0, 1], 1)).into(),
        listener: Arc::new("bench".to_owned()),
        protocol: Protocol::V5,
        keep_alive: 60,
        username: None,
    };
    let mut turn = Turn::default();
    let before = resident();
    for first in (0..count).step_by(1000) {
        let request = OpenRequest {
            client_id: ClientId::new(&format!("c{first}")),
            clean_start: true,
            expiry: 0,
            will: None,
            info: info.clone(),
            now: Timestamp(0),
        };
        let make = |core| -> Arc<dyn Session> { Arc::new(Sink(core)) };
        let opened = runtime.block_on(broker.open(request, make, &mut turn));
        for number in first..count.min(first + 1000) {
            let request = SubscribeRequest {
                filter: &filter(number),
                qos: QoS::AtMostOnce,
                no_local: false,
                retain_as_published: false,
                retain_handling: 0,
                id: None,
            };
            assert!(broker.subscribe(&opened.session, &request, Timestamp(0)).is_ok());
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

#[expect(clippy::print_stderr)]
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
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("runtime");
    let kinds: [(&str, Filter); 2] = [
        ("exact", |number| format!("site/{}/device/{number}/t", number % 100)),
        ("wildcard", |number| format!("site/{}/device/{number}/+", number % 100)),
    ];
    for (kind, filter) in kinds {
        for count in [1_000, 100_000, 1_000_000] {
            let broker = filled(&runtime, count, filter);
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
