//! Cost of decoding and encoding a PUBLISH of 256 B.

mod support;

use std::hint::black_box;

use codec::{Publish, decode_publish, frame};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use gateway_core::{Protocol, QoS};
use support::publish_frame;

fn cases() -> impl Iterator<Item = (Protocol, QoS, String)> {
    [Protocol::V4, Protocol::V5].into_iter().flat_map(|protocol| {
        [QoS::AtMostOnce, QoS::AtLeastOnce]
            .into_iter()
            .map(move |qos| (protocol, qos, format!("{protocol:?}-QoS{}", qos as u8)))
    })
}

fn decoding(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decode-publish-256");
    group.throughput(Throughput::Elements(1));
    for (protocol, qos, name) in cases() {
        let mut bytes = Vec::new();
        publish_frame(protocol, qos).encode(&mut bytes);
        let mut publish = Publish::default();
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                let found =
                    frame(black_box(&bytes), 1 << 20).expect("a valid header").expect("a whole frame");
                decode_publish(found.first, found.body, protocol, &mut publish).expect("a valid packet");
                black_box(publish.payload.len())
            });
        });
    }
    group.finish();
}

fn encoding(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("encode-publish-256");
    group.throughput(Throughput::Elements(1));
    for (protocol, qos, name) in cases() {
        let publish = publish_frame(protocol, qos);
        let mut out = Vec::with_capacity(4096);
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                out.clear();
                black_box(&publish).encode(&mut out);
                black_box(out.len())
            });
        });
    }
    group.finish();
}

criterion_group!(benches, decoding, encoding);
criterion_main!(benches);
