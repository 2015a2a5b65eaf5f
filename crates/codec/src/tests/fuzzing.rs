//! The fuzz function over a corpus that is the same in every run.

use proptest::{
    strategy::{Strategy, ValueTree},
    test_runner::TestRunner,
};

use super::{packets::sample, *};

struct XorShift(u64);

impl XorShift {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    fn byte(&mut self) -> u8 {
        self.next().to_be_bytes()[0]
    }
}

/// Valid packets of all levels.
fn seeds() -> Vec<Vec<u8>> {
    let mut runner = TestRunner::deterministic();
    let mut seeds = Vec::new();
    for protocol in [Protocol::V3, Protocol::V4, Protocol::V5] {
        let strategy = sample(protocol);
        for _ in 0..300 {
            let value = strategy.new_tree(&mut runner).expect("a sample").current();
            seeds.push(encoded(&value.packet(), protocol));
        }
    }
    seeds
}

fn mutate(bytes: &mut Vec<u8>, random: &mut XorShift) {
    for _ in 0..=random.below(3) {
        let at = random.below(bytes.len());
        match random.below(6) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.byte(),
            2 => bytes.insert(at, random.byte()),
            3 if bytes.len() > 2 => drop(bytes.remove(at)),
            4 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][random.below(5)],
            _ => bytes.push(random.byte()),
        }
    }
}

/// The frame's Remaining Length set to what is there, so that decoding goes deeper.
fn repaired(bytes: &[u8]) -> Vec<u8> {
    let body = bytes.get(2..).unwrap_or_default();
    framed(bytes.first().copied().unwrap_or_default(), body)
}

#[test]
fn forty_thousand_seeded_inputs_survive() {
    let mut random = XorShift(0x9e37_79b9_7f4a_7c15);
    let seeds = seeds();
    for seed in &seeds {
        fuzz_decode(seed);
    }
    for round in 0..40_000 {
        let mut bytes = if round % 8 == 0 {
            let len = 2 + random.below(60);
            (0..len).map(|_| random.byte()).collect()
        } else {
            seeds[random.below(seeds.len())].clone()
        };
        mutate(&mut bytes, &mut random);
        if round % 2 == 0 {
            bytes = repaired(&bytes);
        }
        fuzz_decode(&bytes);
    }
}
