//! Numbers by chance from a seed, the same on every machine.

/// SplitMix64.
#[derive(Debug, Clone)]
pub struct Chance(u64);

impl Chance {
    /// Draws the same numbers for the same seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Any number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `end`; 0 if that is 0.
    pub fn below(&mut self, end: usize) -> usize {
        (self.draw() >> 33) as usize % end.max(1)
    }

    /// True `times` of a thousand times.
    pub fn per_mille(&mut self, times: usize) -> bool {
        self.below(1000) < times
    }

    /// The numbers below `end` in an order by chance.
    pub fn order(&mut self, end: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..end).collect();
        for at in (1..end).rev() {
            order.swap(at, self.below(at + 1));
        }
        order
    }
}
