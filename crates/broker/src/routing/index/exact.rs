//! Every filter once, by number and by text.

use ahash::RandomState;
use hashbrown::HashTable;

use super::entry::{Entry, Removal, Subscribers};
use crate::{sessions::spread, slab::Slab};

/// A filter and its subscribers: 32 bytes and the text.
pub(super) struct Filter {
    pub(super) text: Box<str>,
    pub(super) subscribers: Subscribers,
}

/// Keeps half of the hash, so that growing the table reads no filter text.
struct Name {
    number: u32,
    hash: u32,
}

/// All filters.
pub(super) struct Filters {
    records: Slab<Filter>,
    names: HashTable<Name>,
}

/// What [`Filters::remove`] removed.
pub(super) enum Removed {
    /// One of several subscribers.
    Entry {
        /// Whether the filter has wildcards.
        wildcard: bool,
    },
    /// The last subscriber and so the filter.
    Filter(Box<str>),
}

impl Default for Filters {
    fn default() -> Self {
        Self { records: Slab::starting_at(0), names: HashTable::new() }
    }
}

impl Filters {
    /// Number of the filter of this text; `hash` is the text's.
    pub(super) fn find(&self, text: &str, hash: u64) -> Option<u32> {
        let short = hash as u32;
        let same = |name: &Name| {
            name.hash == short && self.records.get(name.number).is_some_and(|filter| &*filter.text == text)
        };
        Some(self.names.find(spread(short), same)?.number)
    }

    pub(super) fn get(&self, number: u32) -> Option<&Filter> {
        self.records.get(number)
    }

    pub(super) fn subscribers(&self, number: u32) -> &[Entry] {
        self.records.get(number).map_or(&[], |filter| filter.subscribers.as_slice())
    }

    /// Adds or replaces an entry; the filter's number and whether it is new.
    pub(super) fn set(&mut self, text: &str, hash: u64, entry: Entry) -> (u32, bool) {
        if let Some(number) = self.find(text, hash) {
            if let Some(filter) = self.records.get_mut(number) {
                filter.subscribers.set(entry);
            }
            return (number, false);
        }
        let number =
            self.records.insert(Filter { text: Box::from(text), subscribers: Subscribers::One(entry) });
        let name = Name { number, hash: hash as u32 };
        self.names.insert_unique(spread(name.hash), name, |name| spread(name.hash));
        (number, true)
    }

    /// Removes the entry of `slot`; the hash of the text and what went.
    pub(super) fn remove(&mut self, number: u32, slot: u32, hasher: &RandomState) -> Option<(u64, Removed)> {
        let filter = self.records.get_mut(number)?;
        let removal = filter.subscribers.remove(slot);
        if removal == Removal::Absent {
            return None;
        }
        let hash = hasher.hash_one(&*filter.text);
        if removal == Removal::Removed {
            return Some((hash, Removed::Entry { wildcard: super::is_wildcard(&filter.text) }));
        }
        if let Ok(name) = self.names.find_entry(spread(hash as u32), |name| name.number == number) {
            name.remove();
        }
        let (len, capacity) = (self.names.len(), self.names.capacity());
        if capacity > 4096 && len * 4 < capacity {
            self.names.shrink_to(len * 2, |name| spread(name.hash));
        }
        let filter = self.records.remove(number)?;
        Some((hash, Removed::Filter(filter.text)))
    }
}
