//! Sets of numbers that come in rows.

/// Numbers from the first to the last, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IdRange {
    /// First.
    pub first: u64,
    /// Last; never before the first in a [`Ranges`].
    pub last: u64,
}

/// A set of numbers: ranges in order that neither touch nor overlap. Cheap where numbers come in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ranges(Vec<IdRange>);

impl Ranges {
    /// The set of all numbers in these, which may be in any order and overlap. Ranges that end before they begin hold nothing.
    pub fn of(ranges: impl IntoIterator<Item = IdRange>) -> Self {
        let mut all: Vec<IdRange> = ranges.into_iter().filter(|range| range.first <= range.last).collect();
        if !all.is_sorted() {
            all.sort_unstable();
        }
        let mut set = Self::default();
        for range in all {
            set.append(range);
        }
        set
    }

    /// Adds a number.
    pub fn insert(&mut self, id: u64) {
        match self.0.last_mut() {
            Some(last) if last.last.checked_add(1) == Some(id) => last.last = id,
            Some(last) if id <= last.last => self.insert_before(id),
            _ => self.0.push(IdRange { first: id, last: id }),
        }
    }

    /// Adds a range that begins at or after the first number of the last one.
    pub(crate) fn append(&mut self, range: IdRange) {
        match self.0.last_mut() {
            Some(last) if range.first <= last.last.saturating_add(1) => last.last = last.last.max(range.last),
            _ => self.0.push(range),
        }
    }

    fn insert_before(&mut self, id: u64) {
        let at = self.0.partition_point(|range| range.last < id);
        if self.0[at].first <= id {
            return;
        }
        let joins_next = self.0[at].first == id + 1;
        let joins_previous = at > 0 && self.0[at - 1].last + 1 == id;
        match (joins_previous, joins_next) {
            (true, true) => {
                self.0[at - 1].last = self.0[at].last;
                self.0.remove(at);
            }
            (true, false) => self.0[at - 1].last = id,
            (false, true) => self.0[at].first = id,
            (false, false) => self.0.insert(at, IdRange { first: id, last: id }),
        }
    }

    /// Returns whether the number is in one of the ranges.
    pub fn contains(&self, id: u64) -> bool {
        let at = self.0.partition_point(|range| range.last < id);
        self.0.get(at).is_some_and(|range| range.first <= id)
    }

    /// The ranges, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = IdRange> + '_ {
        self.0.iter().copied()
    }

    /// Returns whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the number of ranges.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Splits `range` into the parts that are in the set and those that are not.
    pub(crate) fn split(&self, range: IdRange, inside: &mut Self, outside: &mut Self) {
        let mut from = range.first;
        let start = self.0.partition_point(|own| own.last < range.first);
        for own in self.0[start..].iter().take_while(|own| own.first <= range.last) {
            if own.first > from {
                outside.append(IdRange { first: from, last: own.first - 1 });
            }
            let last = own.last.min(range.last);
            inside.append(IdRange { first: own.first.max(from), last });
            if last == range.last {
                return;
            }
            from = last + 1;
        }
        outside.append(IdRange { first: from, last: range.last });
    }

    /// Forgets the lower half of the ranges. Returns one more than the last number that was forgotten.
    pub(crate) fn forget_half(&mut self) -> u64 {
        let half = self.0.len() / 2;
        let until = self.0[..half].last().map_or(0, |range| range.last + 1);
        self.0.drain(..half);
        until
    }
}

impl IntoIterator for Ranges {
    type Item = IdRange;
    type IntoIter = std::vec::IntoIter<IdRange>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn numbers(ranges: &Ranges) -> BTreeSet<u64> {
        ranges.iter().flat_map(|range| range.first..=range.last).collect()
    }

    proptest! {
        #[test]
        fn a_set_holds_what_was_put_into_it(ids in prop::collection::vec(0..64_u64, 0..80), first in 0..64_u64, length in 0..64_u64) {
            let mut set = Ranges::default();
            for &id in &ids {
                set.insert(id);
            }
            let expected: BTreeSet<u64> = ids.iter().copied().collect();
            prop_assert_eq!(&numbers(&set), &expected);
            let rows: Vec<IdRange> = set.iter().collect();
            prop_assert!(rows.windows(2).all(|pair| pair[0].last + 1 < pair[1].first));
            let again = Ranges::of(ids.iter().map(|&id| IdRange { first: id, last: id }));
            prop_assert_eq!(&again, &set);
            let range = IdRange { first, last: first + length };
            let (mut inside, mut outside) = Default::default();
            set.split(range, &mut inside, &mut outside);
            let all: BTreeSet<u64> = (range.first..=range.last).collect();
            prop_assert_eq!(numbers(&inside), all.intersection(&expected).copied().collect());
            prop_assert_eq!(numbers(&outside), all.difference(&expected).copied().collect());
        }
    }

    #[test]
    fn a_range_that_ends_before_it_begins_holds_nothing() {
        assert!(Ranges::of([IdRange { first: 5, last: 4 }]).is_empty());
        let all = Ranges::of([IdRange { first: 0, last: u64::MAX }, IdRange { first: 3, last: 4 }]);
        assert_eq!(all.len(), 1);
    }
}
