//! The list of one filter's subscribers.

use crate::subscriber::Subscriber;

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
    use gateway_core::QoS;

    use super::*;
    use crate::subscriber::Options;

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
}
