//! Marks of a cleaner, which repeats all keys of a store over and over, in their order.
//!
//! A mark is a place among the keys, and the record that goes on from there. Once the cleaner has come to that place again, the mark is
//! passed: every key has been repeated since that record, and nothing before it is needed.

use std::collections::VecDeque;

/// Most marks that are not passed.
const MOST: usize = 32;

/// Part of a record in cleaning. The writer of the stream keeps the record of each mark, in the same order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cleaned {
    /// The record has a mark: the stream may begin with it later.
    pub marks: bool,
    /// Marks that are passed with the record, the oldest first; its own may be among them.
    pub passed: usize,
}

impl Cleaned {
    /// Part of a record that repeats the whole store by itself.
    pub const WHOLE: Self = Self { marks: true, passed: 1 };
}

/// Marks that are not passed, the oldest first.
#[derive(Debug, Clone)]
pub struct Marks<P> {
    places: VecDeque<P>,
    /// Number of those that were set before the present round began.
    earlier: usize,
}

impl<P> Default for Marks<P> {
    fn default() -> Self {
        Self { places: VecDeque::new(), earlier: 0 }
    }
}

impl<P: Ord> Marks<P> {
    /// Tells whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Their number.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Sets a mark at the cleaner's place, for the record that goes on from there. False if there are too many already.
    pub fn set(&mut self, place: P) -> bool {
        let has_room = self.places.len() < MOST;
        if has_room {
            self.places.push_back(place);
        }
        has_room
    }

    /// Moves the cleaner to a place behind its last one, or to the first of all if it `has_ended_round`. Returns how many marks it passes.
    pub fn pass(&mut self, place: &P, has_ended_round: bool) -> usize {
        let before = self.places.len();
        if has_ended_round {
            self.places.drain(..self.earlier);
            self.earlier = self.places.len();
        }
        while self.earlier > 0 && self.places.front().is_some_and(|mark| mark <= place) {
            self.places.pop_front();
            self.earlier -= 1;
        }
        before - self.places.len()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The failures: a mark is passed before all keys behind it and before it were repeated, or not as soon as they were.
        #[test]
        fn a_mark_is_passed_once_all_keys_were_repeated(steps in prop::collection::vec((0..4usize, any::<bool>()), 1..200)) {
            const KEYS: usize = 7;
            let (mut marks, mut at) = (Marks::default(), 0);
            // For each mark, the keys that were not repeated since.
            let mut open: VecDeque<Vec<usize>> = VecDeque::new();
            for (repeated, sets) in steps {
                if sets && marks.set(at) {
                    open.push_back((0..KEYS).collect());
                }
                let end = at + repeated;
                open.iter_mut().for_each(|left| left.retain(|key| !(at..end).contains(key)));
                let has_ended_round = end >= KEYS;
                at = if has_ended_round { 0 } else { end };
                for _ in 0..marks.pass(&at, has_ended_round) {
                    prop_assert_eq!(open.pop_front(), Some(Vec::new()));
                }
                prop_assert!(open.len() <= MOST && open.iter().all(|left| !left.is_empty()));
                prop_assert_eq!(marks.len(), open.len());
            }
        }
    }
}
