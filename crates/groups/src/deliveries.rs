//! The deliveries of one member, by number and by deadline.

use std::collections::{BTreeMap, VecDeque};

use gateway_core::Timestamp;

use super::{
    config::MAX_VOID,
    ranges::{IdRange, Ranges},
};

/// Delivery of one message: its place, and its deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeliverySlot {
    pub(crate) offset: u64,
    /// Time at which the delivery is taken back.
    pub(crate) deadline: Timestamp,
    pub(crate) partition: u8,
    live: bool,
}

/// Deliveries, numbered 1, 2, 3... as they are handed out. All have the same time until their deadline, so the first is due
/// first; the ones that were given another deadline are kept apart.
///
/// Settled deliveries are forgotten, also behind unsettled ones: memory follows the unsettled.
#[derive(Debug)]
pub(crate) struct Deliveries {
    /// The number of the first of `recent`.
    base: u64,
    recent: VecDeque<DeliverySlot>,
    /// Number of live deliveries in `recent`.
    live: usize,
    /// Older ones that are left.
    old: BTreeMap<u64, DeliverySlot>,
    /// Deliveries with a deadline of their own.
    extended: BTreeMap<u64, DeliverySlot>,
    /// Deliveries that were taken or given back.
    void: Ranges,
    /// Below this it is no longer known what became of those that are not there.
    known: u64,
}

impl Default for Deliveries {
    fn default() -> Self {
        Self {
            base: 1,
            recent: VecDeque::new(),
            live: 0,
            old: BTreeMap::new(),
            extended: BTreeMap::new(),
            void: Ranges::default(),
            known: 0,
        }
    }
}

impl Deliveries {
    /// The number of the next.
    pub(crate) fn next(&self) -> u64 {
        self.base + self.recent.len() as u64
    }

    /// Begins after `numbers` deliveries of an earlier stream, of which those that are [kept](Self::keep) are left.
    pub(crate) fn after(numbers: usize) -> Self {
        Self { base: numbers as u64 + 1, ..Self::default() }
    }

    /// One of those before the first is with the member still. Those that are kept have the same deadline.
    pub(crate) fn keep(&mut self, id: u64, partition: u8, offset: u64, deadline: Timestamp) {
        debug_assert!(id < self.next(), "its number was given before");
        self.old.insert(id, DeliverySlot { offset, deadline, partition, live: true });
    }

    /// Takes a number for one that is to be [kept](Self::keep) perhaps.
    pub(crate) fn skip(&mut self) -> u64 {
        let id = self.next();
        self.recent.push_back(DeliverySlot { offset: 0, deadline: Timestamp(0), partition: 0, live: false });
        id
    }

    /// Returns the deliveries with a deadline of their own: number and deadline.
    pub(crate) fn extended(&self) -> impl Iterator<Item = (u64, Timestamp)> + '_ {
        self.extended.iter().map(|(&id, slot)| (id, slot.deadline))
    }

    /// One of those before the first is not the member's: an acknowledgement of it is too late.
    pub(crate) fn refuse(&mut self, id: u64) {
        self.void.insert(id);
        if self.void.len() > MAX_VOID {
            self.known = self.void.forget_half();
        }
    }

    pub(crate) fn push(&mut self, partition: u8, offset: u64, deadline: Timestamp) -> u64 {
        let id = self.next();
        self.recent.push_back(DeliverySlot { offset, deadline, partition, live: true });
        self.live += 1;
        id
    }

    pub(crate) fn get(&self, id: u64) -> Option<DeliverySlot> {
        if let Some(at) = self.index(id)
            && self.recent[at].live
        {
            return Some(self.recent[at]);
        }
        self.old.get(&id).or_else(|| self.extended.get(&id)).copied()
    }

    fn index(&self, id: u64) -> Option<usize> {
        let at = usize::try_from(id.checked_sub(self.base)?).ok()?;
        (at < self.recent.len()).then_some(at)
    }

    /// Forgets a delivery. Whether it had a deadline of its own is the second of what it returns.
    pub(crate) fn remove(&mut self, id: u64) -> Option<(DeliverySlot, bool)> {
        if let Some(at) = self.index(id)
            && self.recent[at].live
        {
            let slot = self.recent[at];
            self.recent[at].live = false;
            self.live -= 1;
            self.compact();
            return Some((slot, false));
        }
        if let Some(slot) = self.old.remove(&id) {
            return Some((slot, false));
        }
        self.extended.remove(&id).map(|slot| (slot, true))
    }

    /// The same, and an acknowledgement of it is too late from now on.
    pub(crate) fn void(&mut self, id: u64) -> Option<(DeliverySlot, bool)> {
        let removed = self.remove(id)?;
        self.refuse(id);
        Some(removed)
    }

    fn compact(&mut self) {
        while let Some(first) = self.recent.front() {
            if first.live {
                if self.recent.len() <= 2 * self.live + 64 {
                    return;
                }
                self.old.insert(self.base, *first);
                self.live -= 1;
            }
            self.recent.pop_front();
            self.base += 1;
        }
        if self.recent.capacity() > 4_096 {
            self.recent = VecDeque::new();
        }
    }

    /// Gives one another deadline. Returns the one it had if that was its own too.
    pub(crate) fn extend(&mut self, id: u64, deadline: Timestamp) -> Option<Option<Timestamp>> {
        let (slot, own) = self.remove(id)?;
        self.extended.insert(id, DeliverySlot { deadline, ..slot });
        Some(own.then_some(slot.deadline))
    }

    /// The one that is due first among those without a deadline of their own.
    pub(crate) fn first(&mut self) -> Option<(u64, DeliverySlot)> {
        if let Some((&id, &slot)) = self.old.first_key_value() {
            return Some((id, slot));
        }
        while self.recent.front().is_some_and(|first| !first.live) {
            self.recent.pop_front();
            self.base += 1;
        }
        self.recent.front().map(|&slot| (self.base, slot))
    }

    /// The deadline of the oldest among those without one of their own.
    pub(crate) fn oldest(&self) -> Option<Timestamp> {
        let old = self.old.first_key_value().map(|(_, slot)| slot);
        // A delivery at the front that is no longer live goes when it is settled.
        let slot = old.or_else(|| self.recent.iter().find(|slot| slot.live));
        slot.map(|slot| slot.deadline)
    }

    /// Returns the numbers of the deliveries of a range that are left, in order.
    pub(crate) fn within(&self, range: IdRange) -> Vec<u64> {
        if range.first > range.last {
            return Vec::new();
        }
        let old = self.old.range(range.first..=range.last).map(|(&id, _)| id);
        let extended = self.extended.range(range.first..=range.last).map(|(&id, _)| id);
        let mut ids: Vec<u64> = old.chain(extended).collect();
        let first = usize::try_from(range.first.saturating_sub(self.base)).unwrap_or(usize::MAX);
        let end =
            usize::try_from((range.last.saturating_add(1)).saturating_sub(self.base)).unwrap_or(usize::MAX);
        let (first, end) = (first.min(self.recent.len()), end.min(self.recent.len()));
        let sorted = ids.is_empty();
        let recent = self.recent.range(first..end).enumerate().filter(|(_, slot)| slot.live);
        ids.extend(recent.map(|(at, _)| self.base + (first + at) as u64));
        if !sorted {
            ids.sort_unstable();
        }
        ids
    }

    /// Decides the answer to an acknowledgement of `range`, before the deliveries left in it are settled.
    pub(crate) fn classify(&self, range: IdRange, ok: &mut Ranges, lost: &mut Ranges) {
        let next = self.next();
        let first = range.first.max(1);
        if range.first == 0 {
            lost.append(IdRange { first: 0, last: 0 });
        }
        let range = IdRange { first, last: range.last };
        let last = range.last.min(next - 1);
        if range.first < self.known && range.first <= last {
            // Too long ago to know. What is still there is fine.
            let until = last.min(self.known - 1);
            let left = Ranges::of(
                self.within(IdRange { first: range.first, last: until })
                    .into_iter()
                    .map(|id| IdRange { first: id, last: id }),
            );
            left.split(IdRange { first: range.first, last: until }, ok, lost);
        }
        let first = range.first.max(self.known);
        if first <= last {
            self.void.split(IdRange { first, last }, lost, ok);
        }
        if range.last >= next {
            lost.append(IdRange { first: range.first.max(next), last: range.last });
        }
    }

    /// For the model: as many are left as there should be, and memory follows them. How many have a deadline of their own.
    #[cfg(test)]
    pub(crate) fn verify(&self, left: usize) -> usize {
        assert_eq!(self.live + self.old.len() + self.extended.len(), left);
        assert!(self.places() <= 3 * left + 65);
        assert!(self.void.len() <= MAX_VOID);
        self.extended.len()
    }

    /// Places taken, for the tests of bounds.
    #[cfg(test)]
    pub(crate) fn places(&self) -> usize {
        self.recent.len() + self.old.len() + self.extended.len()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    fn single(id: u64) -> IdRange {
        IdRange { first: id, last: id }
    }

    proptest! {
        /// Steps: 0 hands out, 1 settles, 2 takes back, 3 extends.
        #[test]
        fn deliveries_are_those_of_a_map(steps in prop::collection::vec((0..5_u8, 0..1_000_u64), 0..600)) {
            let mut deliveries = Deliveries::default();
            let mut model: BTreeMap<u64, (u64, Option<u64>)> = BTreeMap::new();
            let mut void = BTreeSet::new();
            let mut count = 0;
            for (time, (step, pick)) in steps.into_iter().enumerate() {
                let time = time as u64;
                let picked = 1 + pick % (count + 1);
                match step {
                    0 | 1 => {
                        count += 1;
                        prop_assert_eq!(deliveries.push(7, count * 10, Timestamp(time)), count);
                        model.insert(count, (time, None));
                    }
                    2 => prop_assert_eq!(deliveries.remove(picked).is_some(), model.remove(&picked).is_some()),
                    3 => {
                        let there = model.remove(&picked).is_some();
                        prop_assert_eq!(deliveries.void(picked).is_some(), there);
                        if there {
                            void.insert(picked);
                        }
                    }
                    _ => {
                        let expected = model.get_mut(&picked).map(|entry| entry.1.replace(time + 500));
                        let before = deliveries.extend(picked, Timestamp(time + 500));
                        prop_assert_eq!(before, expected.map(|own| own.map(Timestamp)));
                    }
                }
                let first = model.iter().find(|(_, entry)| entry.1.is_none()).map(|(&id, _)| id);
                prop_assert_eq!(deliveries.first().map(|(id, _)| id), first);
                prop_assert!(deliveries.places() <= 3 * model.len() + 65);
            }
            let all = deliveries.within(IdRange { first: 0, last: u64::MAX });
            prop_assert_eq!(&all, &model.keys().copied().collect::<Vec<_>>());
            for id in 0..count + 2 {
                let (mut ok, mut lost) = Default::default();
                deliveries.classify(single(id), &mut ok, &mut lost);
                let fine = (1..=count).contains(&id) && !void.contains(&id);
                prop_assert_eq!((ok.contains(id), lost.contains(id)), (fine, !fine));
                prop_assert_eq!(deliveries.get(id).is_some(), model.contains_key(&id));
            }
        }
    }

    #[test]
    fn a_late_acknowledgement_of_a_forgotten_delivery_is_too_late() {
        let mut deliveries = Deliveries::default();
        for offset in 0..10_000 {
            deliveries.push(0, offset, Timestamp(0));
        }
        for id in (1..=9_000).step_by(2) {
            deliveries.void(id);
        }
        assert!(deliveries.void.len() <= MAX_VOID);
        let (mut ok, mut lost) = Default::default();
        deliveries.classify(IdRange { first: 1, last: 20_000 }, &mut ok, &mut lost);
        assert!(lost.contains(1) && lost.contains(8_999) && lost.contains(10_001));
        assert!(ok.contains(2), "it is still there");
        assert!(ok.contains(10_000));
    }
}
