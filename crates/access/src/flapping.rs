//! Clients that connect again and again.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use gateway_core::Timestamp;

/// Connects of each client id within a time. The number of ids is bounded: beyond it the one whose time began first is
/// forgotten.
#[derive(Debug)]
pub struct Flapping {
    connects: u32,
    within: Duration,
    most: usize,
    seen: HashMap<Arc<str>, SeenConnects>,
    order: BTreeSet<(Timestamp, Arc<str>)>,
}

#[derive(Debug, Clone, Copy)]
struct SeenConnects {
    began: Timestamp,
    connects: u32,
}

impl Flapping {
    /// More than `connects` connects `within` this time are too many; `most` client ids are remembered.
    pub fn new(connects: u32, within: Duration, most: usize) -> Self {
        Self { connects, within, most, seen: HashMap::new(), order: BTreeSet::new() }
    }

    /// A client has connected. True if that was once too often; it then begins anew.
    pub fn connected(&mut self, client_id: &str, now: Timestamp) -> bool {
        self.forget(now);
        if let Some(seen) = self.seen.get_mut(client_id) {
            seen.connects += 1;
            if seen.connects <= self.connects {
                return false;
            }
            let began = seen.began;
            if let Some((id, _)) = self.seen.remove_entry(client_id) {
                self.order.remove(&(began, id));
            }
            return true;
        }
        if self.seen.len() >= self.most
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.seen.remove(&oldest);
        }
        let id: Arc<str> = client_id.into();
        self.order.insert((now, Arc::clone(&id)));
        self.seen.insert(id, SeenConnects { began: now, connects: 1 });
        false
    }

    /// Returns the number of client ids remembered.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Returns whether no client id is remembered.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    fn forget(&mut self, now: Timestamp) {
        while let Some((began, _)) = self.order.first()
            && began.plus_millis(self.within.as_millis() as u64) <= now
        {
            if let Some((_, id)) = self.order.pop_first() {
                self.seen.remove(&id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Timestamp {
        Timestamp(1_000_000 + seconds * 1000)
    }

    fn flapping() -> Flapping {
        Flapping::new(3, Duration::from_secs(60), 10)
    }

    #[test]
    fn one_connect_too_many_within_the_time_is_flapping() {
        let mut flapping = flapping();
        for second in 0..3 {
            assert!(!flapping.connected("a", at(second)));
        }
        assert!(!flapping.connected("b", at(3)), "others are others");
        assert!(flapping.connected("a", at(59)));
        assert!(!flapping.connected("a", at(59)), "it begins anew");
    }

    #[test]
    fn a_slow_client_is_none_and_is_forgotten() {
        let mut flapping = flapping();
        for minute in 0..20 {
            for second in [0, 1, 2] {
                assert!(!flapping.connected("a", at(minute * 60 + second)));
            }
        }
        flapping.connected("b", at(10_000));
        assert_eq!(flapping.len(), 1);
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut flapping = flapping();
        for number in 0..1_000 {
            flapping.connected(&format!("c{number}"), at(0));
        }
        assert_eq!((flapping.len(), flapping.seen.len()), (10, 10));
    }
}
