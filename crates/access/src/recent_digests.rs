//! A bounded memory of digests that were seen lately.

use std::{collections::HashSet, mem};

/// A digest, cut to what tells one from the others.
pub type ShortDigest = [u8; 16];

/// Digests of two generations: when the younger one is full it becomes the older, and the older is forgotten.
#[derive(Debug)]
pub struct RecentDigests {
    young: HashSet<ShortDigest>,
    old: HashSet<ShortDigest>,
    /// Most digests of a generation.
    most: usize,
}

impl RecentDigests {
    /// An empty one, which remembers at least the last `most` digests and at most twice as many.
    pub fn new(most: usize) -> Self {
        Self { young: HashSet::new(), old: HashSet::new(), most }
    }

    /// Remembers a digest.
    pub fn insert(&mut self, digest: ShortDigest) {
        if self.young.len() >= self.most && !self.young.contains(&digest) {
            self.old = mem::take(&mut self.young);
        }
        self.young.insert(digest);
    }

    /// Tells whether the digest is remembered.
    pub fn contains(&self, digest: &ShortDigest) -> bool {
        self.young.contains(digest) || self.old.contains(digest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_are_remembered_and_the_number_is_bounded() {
        let mut lately = RecentDigests::new(10);
        let digest = |number: u32| {
            let mut digest = [0; 16];
            digest[..4].copy_from_slice(&number.to_be_bytes());
            digest
        };
        for number in 0..1_000 {
            lately.insert(digest(number));
            // One that comes again and again pushes nobody out.
            lately.insert(digest(number));
            assert!(lately.young.len() + lately.old.len() <= 20);
            for known in number.saturating_sub(9)..=number {
                assert!(lately.contains(&digest(known)), "{known} of {number}");
            }
        }
        assert!(!lately.contains(&digest(0)));
    }
}
