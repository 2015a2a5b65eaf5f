//! The durable side of a session against a model of disk and client: random operations, and crashes among them.

mod disk;
mod inbound;
mod outbound;

/// Seeded inputs, each a list of operations with their arguments.
fn inputs(runs: usize, length: usize) -> impl Iterator<Item = Vec<u8>> {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    (0..runs).map(move |_| {
        let byte = |_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        };
        (0..length).map(byte).collect()
    })
}
