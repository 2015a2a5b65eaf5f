//! Nodes whose beats do not change.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use ledger::Beat;

/// A node is suspected when its beat has not changed for so long, on our own clock.
pub const SUSPECTED_AFTER: Duration = Duration::from_secs(5);

/// Longest time between two looks at the beats that counts: who did not look has seen nobody silent.
const LOOKS: Duration = Duration::from_secs(2);

/// Beats as they were seen. One entry for each node in the ledger.
#[derive(Debug, Default)]
pub struct Suspicion {
    seen: BTreeMap<Arc<str>, Seen>,
    began: Option<Duration>,
    looked: Duration,
}

#[derive(Debug)]
struct Seen {
    beat: (u64, u64),
    since: Duration,
    /// Time since which all beats were of this incarnation.
    began: Duration,
}

impl Suspicion {
    /// Takes in all beats as they are read at a time of [`crate::Clock::now`]: each second.
    pub fn observe(&mut self, beats: &[Beat], now: Duration) {
        if self.began.is_none() || now.saturating_sub(self.looked) > LOOKS {
            // The first look, or the first after this process was paused or the engine was away.
            self.began = Some(now);
            self.seen.clear();
        }
        self.looked = now;
        self.seen.retain(|node, _| beats.iter().any(|beat| beat.node == *node));
        for Beat { node, incarnation, number, .. } in beats {
            let beat = (*incarnation, *number);
            let seen = self.seen.entry(Arc::clone(node)).or_insert(Seen { beat, since: now, began: now });
            if seen.beat != beat {
                let began = if seen.beat.0 == *incarnation { seen.began } else { now };
                *seen = Seen { beat, since: now, began };
            }
        }
    }

    /// Time for which the beat of a node is known to have been the same; `None` of a node that has never beaten.
    pub fn unchanged(&self, node: &str) -> Option<Duration> {
        self.seen.get(node).map(|seen| self.looked.saturating_sub(seen.since))
    }

    /// Time for which the beats have been looked at without a pause.
    pub fn watched(&self, now: Duration) -> Duration {
        let is_looking = now.saturating_sub(self.looked) <= LOOKS;
        self.began.filter(|_| is_looking).map_or(Duration::ZERO, |began| now.saturating_sub(began))
    }

    /// Tells whether a node in an incarnation was seen to beat, and is not suspected: a row alone may be of one that is long gone.
    pub fn lives(&self, node: &str, incarnation: u64, now: Duration) -> bool {
        let has_beaten = self.seen.get(node).is_some_and(|seen| Some(seen.since) > self.began);
        has_beaten && !self.suspects(node, incarnation, now)
    }

    /// Tells whether a node in an incarnation is suspected at that time: its beat has not changed, or all beats of the node were another
    /// incarnation's. One that has never beaten is suspected after as long as any other.
    pub fn suspects(&self, node: &str, incarnation: u64, now: Duration) -> bool {
        let since = match self.seen.get(node) {
            Some(seen) if seen.beat.0 == incarnation => Some(seen.since),
            Some(seen) => Some(seen.began),
            None => self.began,
        };
        now.saturating_sub(self.looked) <= LOOKS
            && since.is_some_and(|since| now.saturating_sub(since) >= SUSPECTED_AFTER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn beat(node: &str, incarnation: u64, number: u64) -> Beat {
        Beat { node: node.into(), incarnation, number, about: bytes::Bytes::new() }
    }

    /// Looks each second, at a node whose beats are these.
    fn look(suspicion: &mut Suspicion, seconds: std::ops::Range<u64>, number: impl Fn(u64) -> u64) {
        for second in seconds {
            suspicion.observe(&[beat("a", 1, number(second))], Duration::from_secs(second));
        }
    }

    #[test]
    fn a_node_that_does_not_beat_is_suspected() {
        let mut suspicion = Suspicion::default();
        look(&mut suspicion, 100..110, |second| second);
        assert!(!suspicion.suspects("a", 1, Duration::from_secs(109)));
        look(&mut suspicion, 110..114, |_| 109);
        assert!(!suspicion.suspects("a", 1, Duration::from_secs(113)));
        assert_eq!(suspicion.unchanged("a"), Some(Duration::from_secs(4)));
        assert_eq!(suspicion.unchanged("b"), None);
        look(&mut suspicion, 114..115, |_| 109);
        assert!(suspicion.suspects("a", 1, Duration::from_secs(114)), "the last change was seen at 109");
        look(&mut suspicion, 115..116, |_| 110);
        assert!(!suspicion.suspects("a", 1, Duration::from_secs(115)));
    }

    /// The failure: a standby that was paused, or had no engine, wakes up and takes every home.
    #[test]
    fn a_node_that_did_not_look_suspects_nobody() {
        let mut suspicion = Suspicion::default();
        look(&mut suspicion, 0..4, |_| 7);
        assert!(!suspicion.suspects("a", 1, Duration::from_secs(60)));
        look(&mut suspicion, 60..61, |_| 7);
        assert!(!suspicion.suspects("a", 1, Duration::from_secs(60)));
        look(&mut suspicion, 61..66, |_| 7);
        assert!(suspicion.suspects("a", 1, Duration::from_secs(65)));
    }

    #[test]
    fn a_new_incarnation_is_a_change_and_silence_from_the_beginning_is_none() {
        let mut suspicion = Suspicion::default();
        look(&mut suspicion, 0..4, |_| 7);
        suspicion.observe(&[beat("a", 2, 7)], Duration::from_secs(4));
        look(&mut suspicion, 5..6, |_| 7);
        assert!(!suspicion.suspects("a", 1, Duration::from_secs(5)));
        assert!(suspicion.suspects("b", 1, Duration::from_secs(5)), "it has never beaten");
        assert!(!Suspicion::default().suspects("b", 1, Duration::from_secs(5)));
    }

    /// The failure: nobody takes over from a process that is gone while a later one of the same name beats.
    #[test]
    fn an_incarnation_before_the_one_that_beats_is_suspected() {
        let mut suspicion = Suspicion::default();
        look(&mut suspicion, 0..4, |second| second);
        for second in 4..=9 {
            assert!(!suspicion.suspects("a", 1, Duration::from_secs(second - 1)));
            suspicion.observe(&[beat("a", 2, second)], Duration::from_secs(second));
            assert!(!suspicion.suspects("a", 2, Duration::from_secs(second)));
        }
        assert!(suspicion.suspects("a", 1, Duration::from_secs(9)));
        // The earlier process goes on beside the other.
        suspicion.observe(&[beat("a", 1, 4)], Duration::from_secs(10));
        suspicion.observe(&[beat("a", 2, 11)], Duration::from_secs(11));
        assert!(!suspicion.suspects("a", 1, Duration::from_secs(11)));
    }
}
