//! One subscriber of one filter, in twelve bytes, and the list of them.

use gateway_core::QoS;

/// Set in [`Entry::slot`] when the subscriber is a shared group; the rest is its id.
pub(crate) const GROUP: u32 = 1 << 31;

/// Granted QoS and flags of a subscription in one byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Options(u8);

const AS_PUBLISHED: u8 = 4;
const NO_LOCAL: u8 = 8;
const STREAM: u8 = 16;

impl Options {
    /// Of a session's subscription.
    pub(crate) fn new(qos: QoS, retain_as_published: bool, no_local: bool) -> Self {
        let as_published = if retain_as_published { AS_PUBLISHED } else { 0 };
        let no_local = if no_local { NO_LOCAL } else { 0 };
        Self(qos as u8 | as_published | no_local)
    }

    /// Of a gRPC stream: everything as published.
    pub(crate) fn stream() -> Self {
        Self(QoS::ExactlyOnce as u8 | AS_PUBLISHED | STREAM)
    }

    pub(crate) fn qos(self) -> QoS {
        QoS::from_bits(self.0 & 3).unwrap_or_default()
    }

    pub(crate) fn retain_as_published(self) -> bool {
        self.0 & AS_PUBLISHED != 0
    }

    pub(crate) fn no_local(self) -> bool {
        self.0 & NO_LOCAL != 0
    }

    pub(crate) fn is_stream(self) -> bool {
        self.0 & STREAM != 0
    }
}

/// One subscriber of a filter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Slot of the receiver, or [`GROUP`] and a group id.
    pub(crate) slot: u32,
    /// Subscription identifier, 0 for none.
    pub(crate) id: u32,
    pub(crate) options: Options,
}

/// Subscribers of one filter, one per slot: inline for one, else ordered by slot.
#[derive(Debug)]
pub(super) enum Subscribers {
    One(Entry),
    #[expect(clippy::box_collection, reason = "the common single subscriber costs 16 bytes, not 24")]
    Many(Box<Vec<Entry>>),
}

/// What [`Subscribers::remove`] found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Removal {
    Absent,
    Removed,
    /// It was the last one: the filter goes too.
    Last,
}

impl Subscribers {
    pub(super) fn as_slice(&self) -> &[Entry] {
        match self {
            Self::One(entry) => std::slice::from_ref(entry),
            Self::Many(entries) => entries,
        }
    }

    pub(super) fn get(&self, slot: u32) -> Option<Entry> {
        let entries = self.as_slice();
        let position = entries.binary_search_by_key(&slot, |entry| entry.slot).ok()?;
        Some(entries[position])
    }

    /// Adds the entry or replaces the one of its slot.
    pub(super) fn set(&mut self, entry: Entry) {
        let first = match self {
            Self::One(first) => *first,
            Self::Many(entries) => {
                match entries.binary_search_by_key(&entry.slot, |entry| entry.slot) {
                    Ok(position) => entries[position] = entry,
                    Err(position) => entries.insert(position, entry),
                }
                return;
            }
        };
        if first.slot == entry.slot {
            *self = Self::One(entry);
            return;
        }
        let pair = if first.slot < entry.slot { vec![first, entry] } else { vec![entry, first] };
        *self = Self::Many(Box::new(pair));
    }

    pub(super) fn remove(&mut self, slot: u32) -> Removal {
        let left = match self {
            Self::One(entry) => {
                return if entry.slot == slot { Removal::Last } else { Removal::Absent };
            }
            Self::Many(entries) => {
                let Ok(position) = entries.binary_search_by_key(&slot, |entry| entry.slot) else {
                    return Removal::Absent;
                };
                entries.remove(position);
                if entries.capacity() > 64 && entries.len() * 4 < entries.capacity() {
                    entries.shrink_to(entries.len() * 2);
                }
                match entries.as_slice() {
                    [] => return Removal::Last,
                    [left] => *left,
                    _ => return Removal::Removed,
                }
            }
        };
        *self = Self::One(left);
        Removal::Removed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(slot: u32, id: u32) -> Entry {
        Entry { slot, id, options: Options::new(QoS::AtLeastOnce, false, true) }
    }

    #[test]
    fn entries_are_small() {
        assert_eq!(size_of::<Entry>(), 12);
        assert_eq!(size_of::<Subscribers>(), 16);
    }

    #[test]
    fn lists_grow_shrink_and_replace() {
        let mut list = Subscribers::One(entry(5, 0));
        list.set(entry(5, 1));
        assert_eq!(list.as_slice(), [entry(5, 1)]);
        list.set(entry(2, 0));
        list.set(entry(9, 0));
        list.set(entry(2, 7));
        assert_eq!(list.as_slice(), [entry(2, 7), entry(5, 1), entry(9, 0)]);
        assert_eq!(list.get(9), Some(entry(9, 0)));
        assert_eq!(list.remove(4), Removal::Absent);
        assert_eq!(list.remove(2), Removal::Removed);
        assert_eq!(list.remove(9), Removal::Removed);
        assert!(matches!(list, Subscribers::One(_)));
        assert_eq!(list.remove(5), Removal::Last);
    }

    #[test]
    fn options_keep_every_flag() {
        let options = Options::new(QoS::ExactlyOnce, true, true);
        assert_eq!(options.qos(), QoS::ExactlyOnce);
        assert!(options.retain_as_published() && options.no_local() && !options.is_stream());
        assert!(Options::stream().is_stream() && !Options::stream().no_local());
    }
}
