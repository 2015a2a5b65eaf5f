//! The messages of one partition that members have and have not settled.

use std::collections::VecDeque;

/// A delivered message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OutstandingEntry {
    pub(crate) offset: u64,
    pub(crate) key: u64,
    /// Its number with its member.
    pub(crate) delivery: u64,
    /// Index of the member that has it.
    pub(crate) member: u32,
    /// Number of this delivery of the message, from 1.
    pub(crate) attempt: u32,
    pub(crate) cost: u32,
    live: bool,
}

impl OutstandingEntry {
    pub(crate) fn new(offset: u64, key: u64, member: u32, delivery: u64, attempt: u32, cost: u32) -> Self {
        Self { offset, key, delivery, member, attempt, cost, live: true }
    }
}

/// Entries in order of offset. Most come in order and go in order. One that goes from the middle leaves its place behind,
/// but never more places than twice the entries.
#[derive(Debug, Default)]
pub(crate) struct Outstanding {
    entries: VecDeque<OutstandingEntry>,
    live: usize,
}

impl Outstanding {
    /// Returns the number of live entries.
    pub(crate) fn len(&self) -> usize {
        self.live
    }

    /// All, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &OutstandingEntry> {
        self.entries.iter().filter(|entry| entry.live)
    }

    /// Returns the live entries at `offset` and after it.
    pub(crate) fn from(&self, offset: u64) -> impl Iterator<Item = &OutstandingEntry> {
        let at = self.entries.partition_point(|entry| entry.offset < offset);
        self.entries.range(at..).filter(|entry| entry.live)
    }

    pub(crate) fn insert(&mut self, entry: OutstandingEntry) {
        self.live += 1;
        if self.entries.back().is_none_or(|last| last.offset < entry.offset) {
            self.entries.push_back(entry);
            return;
        }
        match self.entries.binary_search_by_key(&entry.offset, |entry| entry.offset) {
            Ok(at) => {
                debug_assert!(!self.entries[at].live, "a message is with one member");
                self.entries[at] = entry;
            }
            Err(at) => self.entries.insert(at, entry),
        }
    }

    pub(crate) fn get(&self, offset: u64) -> Option<&OutstandingEntry> {
        self.place(offset).map(|at| &self.entries[at])
    }

    pub(crate) fn get_mut(&mut self, offset: u64) -> Option<&mut OutstandingEntry> {
        self.place(offset).map(|at| &mut self.entries[at])
    }

    fn place(&self, offset: u64) -> Option<usize> {
        if self.entries.front().is_some_and(|first| first.offset == offset) {
            return self.entries[0].live.then_some(0);
        }
        let at = self.entries.binary_search_by_key(&offset, |entry| entry.offset).ok()?;
        self.entries[at].live.then_some(at)
    }

    pub(crate) fn remove(&mut self, offset: u64) -> Option<OutstandingEntry> {
        let at = self.place(offset)?;
        let entry = self.entries[at];
        self.live -= 1;
        self.entries[at].live = false;
        while self.entries.front().is_some_and(|first| !first.live) {
            self.entries.pop_front();
        }
        if self.entries.len() > 2 * self.live + 16 {
            self.entries.retain(|entry| entry.live);
        }
        if self.entries.is_empty() && self.entries.capacity() > 64 {
            self.entries = VecDeque::new();
        }
        Some(entry)
    }

    /// Takes out those that `which` says, in order.
    pub(crate) fn extract(&mut self, which: impl Fn(&OutstandingEntry) -> bool) -> Vec<OutstandingEntry> {
        let out: Vec<OutstandingEntry> = self.iter().filter(|entry| which(entry)).copied().collect();
        if !out.is_empty() {
            self.entries.retain(|entry| entry.live && !which(entry));
            self.live = self.entries.len();
        }
        out
    }

    /// Places taken, for the tests of bounds.
    #[cfg(test)]
    pub(crate) fn places(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn entries_are_those_of_a_map_and_gaps_stay_few(steps in prop::collection::vec((any::<bool>(), 0..200_u64), 0..400)) {
            let mut model = BTreeMap::new();
            let mut entries = Outstanding::default();
            for (insert, offset) in steps {
                let entry = OutstandingEntry::new(offset, offset % 7, 0, offset, 1, 10);
                if insert && !model.contains_key(&offset) {
                    model.insert(offset, entry);
                    entries.insert(entry);
                } else {
                    prop_assert_eq!(entries.remove(offset), model.remove(&offset));
                }
                prop_assert_eq!(entries.len(), model.len());
                prop_assert!(entries.places() <= 2 * model.len() + 16 + 1);
            }
            prop_assert!(entries.iter().eq(model.values()));
            prop_assert!(entries.from(100).eq(model.range(100..).map(|(_, entry)| entry)));
            let odd = entries.extract(|entry| entry.offset % 2 == 1);
            prop_assert!(odd.iter().eq(model.values().filter(|entry| entry.offset % 2 == 1)));
            prop_assert!(entries.iter().eq(model.values().filter(|entry| entry.offset % 2 == 0)));
        }
    }
}
