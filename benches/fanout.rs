//! Cost of one message to many subscribers: routed by the broker, encoded by each session. `cargo bench --bench fanout`

mod support;

use std::hint::black_box;

use broker::Turn;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use gateway_core::{Message, Origin, Timestamp};
use support::Keeps;

fn fanout(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("fanout-qos0-256");
    for count in [1, 10, 500] {
        let broker = support::broker();
        for number in 0..count {
            let session = support::open(&broker, &format!("c{number}"), Keeps::Bytes);
            support::subscribe(&broker, &session, "site/telemetry");
        }
        let mut turn = Turn::default();
        group.throughput(Throughput::Elements(count));
        group.bench_function(BenchmarkId::from_parameter(count), |bencher| {
            bencher.iter(|| {
                let message = Message::new("site/telemetry", &[0x5a; 256], Timestamp(0), Origin::BACKEND);
                let published = broker.publish(black_box(&message), &mut turn);
                turn.flush();
                assert_eq!(published.matched as u64, count);
            });
        });
    }
    group.finish();
}

criterion_group!(benches, fanout);
criterion_main!(benches);
