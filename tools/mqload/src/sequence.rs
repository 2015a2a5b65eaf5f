//! Exact account of the sequence numbers that arrived: first-time, duplicate,
//! late (out of order), and missing ones.

use std::collections::{BTreeMap, HashMap};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arrival {
    InOrder,
    /// Some numbers before it have not arrived (yet).
    AfterGap,
    /// A missing one, after a later one.
    Late,
    Duplicate,
}

impl Arrival {
    #[inline]
    pub fn fresh(self) -> bool {
        self != Arrival::Duplicate
    }
}

/// One counter for each stream (one publisher as seen by one subscriber), and
/// the missing ranges of the few streams that have any.
pub struct Streams {
    next: Vec<u64>,
    gaps: HashMap<usize, BTreeMap<u64, u64>>,
}

impl Streams {
    pub fn new(n: usize) -> Streams {
        Streams { next: vec![0; n], gaps: HashMap::new() }
    }

    /// The number expected next in a stream.
    #[inline]
    pub fn next(&self, stream: usize) -> u64 {
        self.next[stream]
    }

    /// The lowest such number of some consecutive streams, and how many have it.
    pub fn lowest(&self, streams: std::ops::Range<usize>) -> (u64, usize) {
        let s = &self.next[streams];
        let min = s.iter().copied().min().unwrap_or(0);
        (min, s.iter().filter(|x| **x == min).count())
    }

    #[inline]
    pub fn arrived(&mut self, stream: usize, seq: u64) -> Arrival {
        let next = &mut self.next[stream];
        if seq == *next {
            *next += 1;
            return Arrival::InOrder;
        }
        self.irregular(stream, seq)
    }

    #[cold]
    fn irregular(&mut self, stream: usize, seq: u64) -> Arrival {
        let next = &mut self.next[stream];
        if seq > *next {
            self.gaps.entry(stream).or_default().insert(*next, seq);
            *next = seq + 1;
            return Arrival::AfterGap;
        }
        let Some(gaps) = self.gaps.get_mut(&stream) else {
            return Arrival::Duplicate;
        };
        match gaps.range(..=seq).next_back().map(|(a, b)| (*a, *b)) {
            Some((a, b)) if seq < b => {
                gaps.remove(&a);
                if a < seq {
                    gaps.insert(a, seq);
                }
                if seq + 1 < b {
                    gaps.insert(seq + 1, b);
                }
                Arrival::Late
            }
            _ => Arrival::Duplicate,
        }
    }
}

/// A growing set of numbers.
#[derive(Clone, Default)]
pub struct BitSet(Vec<u64>);

impl BitSet {
    /// Adds a number; false when it was there already.
    #[inline]
    pub fn insert(&mut self, n: u64) -> bool {
        let (w, bit) = ((n / 64) as usize, 1u64 << (n % 64));
        if w >= self.0.len() {
            self.0.resize((w + 1).next_power_of_two(), 0);
        }
        let fresh = self.0[w] & bit == 0;
        self.0[w] |= bit;
        fresh
    }

    pub fn contains(&self, n: u64) -> bool {
        self.0.get((n / 64) as usize).is_some_and(|w| w & (1 << (n % 64)) != 0)
    }

    pub fn union(&mut self, o: &BitSet) {
        if self.0.len() < o.0.len() {
            self.0.resize(o.0.len(), 0);
        }
        for (a, b) in self.0.iter_mut().zip(&o.0) {
            *a |= b;
        }
    }

    pub fn len(&self) -> u64 {
        self.0.iter().map(|w| w.count_ones() as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Arrival::*;

    #[test]
    fn order_gaps_duplicates() {
        let mut s = Streams::new(2);
        assert_eq!(s.arrived(0, 0), InOrder);
        assert_eq!(s.arrived(0, 0), Duplicate);
        assert_eq!(s.arrived(0, 5), AfterGap); // 1..5 missing
        assert_eq!(s.arrived(0, 3), Late);
        assert_eq!(s.arrived(0, 3), Duplicate);
        assert_eq!(s.arrived(0, 1), Late);
        assert_eq!(s.arrived(0, 4), Late);
        assert_eq!(s.arrived(0, 2), Late);
        assert_eq!(s.arrived(0, 2), Duplicate);
        assert_eq!(s.arrived(0, 6), InOrder);
        assert_eq!(s.next(1), 0);
        assert_eq!(s.lowest(0..2), (0, 1));
        s.arrived(1, 6);
        assert_eq!(s.lowest(0..2), (7, 2));
    }

    #[test]
    fn bits() {
        let mut b = BitSet::default();
        assert!(b.insert(1000) && !b.insert(1000) && b.insert(0));
        let mut c = BitSet::default();
        c.insert(5);
        c.union(&b);
        assert_eq!(c.len(), 3);
        assert!(c.contains(1000) && !c.contains(999) && !c.contains(1 << 40));
    }
}
