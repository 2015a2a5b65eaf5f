//! One subscriber of one filter, in twelve bytes, and the list of them.

use gateway_core::QoS;

/// Set in [`Subscriber::slot`] when the subscriber is a shared group; the rest is its id.
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
pub(crate) struct Subscriber {
    /// Slot of the receiver, or [`GROUP`] and a group id.
    pub(crate) slot: u32,
    /// Subscription identifier, 0 for none.
    pub(crate) id: u32,
    pub(crate) options: Options,
}

/// Subscribers of one filter, one per slot: inline for one, else ordered by slot.
#[derive(Debug)]
pub(super) enum Subscribers {
    One(Subscriber),
    #[expect(clippy::box_collection, reason = "the common single subscriber costs 16 bytes, not 24")]
    Many(Box<Vec<Subscriber>>),
}

/// Result of [`Subscribers::remove`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum SubscriberRemoval {
    Absent,
    Removed,
    /// The last subscriber was removed: the filter goes too.
    Last,
}

impl Subscribers {
    pub(super) fn as_slice(&self) -> &[Subscriber] {
        match self {
            Self::One(subscriber) => std::slice::from_ref(subscriber),
            Self::Many(all) => all,
        }
    }

    pub(super) fn get(&self, slot: u32) -> Option<Subscriber> {
        let all = self.as_slice();
        let position = all.binary_search_by_key(&slot, |subscriber| subscriber.slot).ok()?;
        Some(all[position])
    }

    /// Adds the subscriber or replaces the one of its slot.
    pub(super) fn set(&mut self, subscriber: Subscriber) {
        let first = match self {
            Self::One(first) => *first,
            Self::Many(all) => {
                match all.binary_search_by_key(&subscriber.slot, |subscriber| subscriber.slot) {
                    Ok(position) => all[position] = subscriber,
                    Err(position) => all.insert(position, subscriber),
                }
                return;
            }
        };
        if first.slot == subscriber.slot {
            *self = Self::One(subscriber);
            return;
        }
        let pair =
            if first.slot < subscriber.slot { vec![first, subscriber] } else { vec![subscriber, first] };
        *self = Self::Many(Box::new(pair));
    }

    pub(super) fn remove(&mut self, slot: u32) -> SubscriberRemoval {
        let left = match self {
            Self::One(subscriber) => {
                return if subscriber.slot == slot {
                    SubscriberRemoval::Last
                } else {
                    SubscriberRemoval::Absent
                };
            }
            Self::Many(all) => {
                let Ok(position) = all.binary_search_by_key(&slot, |subscriber| subscriber.slot) else {
                    return SubscriberRemoval::Absent;
                };
                all.remove(position);
                if all.capacity() > 64 && all.len() * 4 < all.capacity() {
                    all.shrink_to(all.len() * 2);
                }
                match all.as_slice() {
                    [] => return SubscriberRemoval::Last,
                    [left] => *left,
                    _ => return SubscriberRemoval::Removed,
                }
            }
        };
        *self = Self::One(left);
        SubscriberRemoval::Removed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subscriber(slot: u32, id: u32) -> Subscriber {
        Subscriber { slot, id, options: Options::new(QoS::AtLeastOnce, false, true) }
    }

    #[test]
    fn entries_are_small() {
        assert_eq!(size_of::<Subscriber>(), 12);
        assert_eq!(size_of::<Subscribers>(), 16);
    }

    #[test]
    fn lists_grow_shrink_and_replace() {
        let mut list = Subscribers::One(subscriber(5, 0));
        list.set(subscriber(5, 1));
        assert_eq!(list.as_slice(), [subscriber(5, 1)]);
        list.set(subscriber(2, 0));
        list.set(subscriber(9, 0));
        list.set(subscriber(2, 7));
        assert_eq!(list.as_slice(), [subscriber(2, 7), subscriber(5, 1), subscriber(9, 0)]);
        assert_eq!(list.get(9), Some(subscriber(9, 0)));
        assert_eq!(list.remove(4), SubscriberRemoval::Absent);
        assert_eq!(list.remove(2), SubscriberRemoval::Removed);
        assert_eq!(list.remove(9), SubscriberRemoval::Removed);
        assert!(matches!(list, Subscribers::One(_)));
        assert_eq!(list.remove(5), SubscriberRemoval::Last);
    }

    #[test]
    fn options_keep_every_flag() {
        let options = Options::new(QoS::ExactlyOnce, true, true);
        assert_eq!(options.qos(), QoS::ExactlyOnce);
        assert!(options.retain_as_published() && options.no_local() && !options.is_stream());
        assert!(Options::stream().is_stream() && !Options::stream().no_local());
    }
}
