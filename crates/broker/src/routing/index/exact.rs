//! Every filter once, by number and by text.

use ahash::RandomState;
use hashbrown::HashTable;

use super::subscribers::{SubscriberRemoval, Subscribers};
use crate::{half_hash::widen, slab::Slab, subscriber::Subscriber};

/// A filter and its subscribers: 32 bytes and the text.
pub(super) struct ExactFilter {
    pub(super) text: Box<str>,
    pub(super) subscribers: Subscribers,
}

/// A filter's number with half of its text's hash, so that growing the table reads no text.
struct FilterKey {
    number: u32,
    hash: u32,
}

/// All filters.
pub(super) struct FilterTable {
    records: Slab<ExactFilter>,
    by_text: HashTable<FilterKey>,
}

/// Result of [`FilterTable::remove`].
pub(super) enum Removed {
    /// One of several subscribers.
    Subscriber {
        /// True if the filter has wildcards.
        wildcard: bool,
    },
    /// The last subscriber, and the filter with it.
    Filter(Box<str>),
}

impl Default for FilterTable {
    fn default() -> Self {
        Self { records: Slab::starting_at(0), by_text: HashTable::new() }
    }
}

impl FilterTable {
    /// Number of the filter of this text; `hash` is the text's.
    pub(super) fn find(&self, text: &str, hash: u64) -> Option<u32> {
        let short = hash as u32;
        let same = |key: &FilterKey| {
            key.hash == short && self.records.get(key.number).is_some_and(|filter| &*filter.text == text)
        };
        Some(self.by_text.find(widen(short), same)?.number)
    }

    pub(super) fn get(&self, number: u32) -> Option<&ExactFilter> {
        self.records.get(number)
    }

    pub(super) fn subscribers(&self, number: u32) -> &[Subscriber] {
        self.records.get(number).map_or(&[], |filter| filter.subscribers.as_slice())
    }

    /// Adds or replaces a subscriber; returns the filter's number and whether it is new.
    pub(super) fn set(&mut self, text: &str, hash: u64, entry: Subscriber) -> (u32, bool) {
        if let Some(number) = self.find(text, hash) {
            if let Some(filter) = self.records.get_mut(number) {
                filter.subscribers.set(entry);
            }
            return (number, false);
        }
        let number =
            self.records.insert(ExactFilter { text: Box::from(text), subscribers: Subscribers::One(entry) });
        let key = FilterKey { number, hash: hash as u32 };
        self.by_text.insert_unique(widen(key.hash), key, |key| widen(key.hash));
        (number, true)
    }

    /// Removes the subscriber of `slot`; returns the hash of the text and what was removed.
    pub(super) fn remove(&mut self, number: u32, slot: u32, hasher: &RandomState) -> Option<(u64, Removed)> {
        let filter = self.records.get_mut(number)?;
        let removal = filter.subscribers.remove(slot);
        if removal == SubscriberRemoval::Absent {
            return None;
        }
        let hash = hasher.hash_one(&*filter.text);
        if removal == SubscriberRemoval::Removed {
            return Some((hash, Removed::Subscriber { wildcard: super::is_wildcard(&filter.text) }));
        }
        if let Ok(key) = self.by_text.find_entry(widen(hash as u32), |key| key.number == number) {
            key.remove();
        }
        let (len, capacity) = (self.by_text.len(), self.by_text.capacity());
        if capacity > 4096 && len * 4 < capacity {
            self.by_text.shrink_to(len * 2, |key| widen(key.hash));
        }
        let filter = self.records.remove(number)?;
        Some((hash, Removed::Filter(filter.text)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_with_one_subscriber_is_small() {
        // A free place of the slab takes no byte more.
        assert_eq!(size_of::<Option<ExactFilter>>(), 32);
        assert_eq!(size_of::<FilterKey>(), 8);
    }
}
