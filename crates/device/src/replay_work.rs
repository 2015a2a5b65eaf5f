//! Replay work of connections for subscriptions they have not asked for, from a backend's request until their next poll.
//!
//! Replay work lies here and not with the connection, which thus pays nothing while nobody sends any. Replay work that a
//! connection has not taken when it ends is forgotten: the retained messages of a subscription of its own would not
//! come either.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

use ahash::RandomState;
use broker::ReplayWork;
use parking_lot::Mutex;

/// Most at once, and most of one connection. Each takes its own at its next poll.
const MOST: usize = 1_024;
const MOST_OF_ONE: usize = 64;

/// A session's slot and the epoch of its connection.
type ReplayWorkKey = (u32, u32);

/// Replay work that waits for all connections of a gateway.
#[derive(Default)]
pub(super) struct PendingReplayWork {
    waiting: Mutex<HashMap<ReplayWorkKey, Vec<ReplayWork>, RandomState>>,
    /// Number of waiting pieces of replay work. Changed under the lock; read without it by connections of which nothing can have
    /// been asked since they looked.
    count: AtomicUsize,
}

impl PendingReplayWork {
    /// Adds one; gives it back if there are too many.
    pub(super) fn add(&self, key: ReplayWorkKey, replay_work: ReplayWork) -> Result<(), ReplayWork> {
        let mut waiting = self.waiting.lock();
        let all = self.count.load(Relaxed);
        if all >= MOST || waiting.get(&key).is_some_and(|own| own.len() >= MOST_OF_ONE) {
            return Err(replay_work);
        }
        waiting.entry(key).or_default().push(replay_work);
        self.count.store(all + 1, Relaxed);
        Ok(())
    }

    /// Takes a connection's replay work, in order. With none pending for anybody this costs one atomic load.
    pub(super) fn take(&self, key: ReplayWorkKey) -> Vec<ReplayWork> {
        if self.count.load(Relaxed) == 0 {
            return Vec::new();
        }
        let mut waiting = self.waiting.lock();
        let taken = waiting.remove(&key).unwrap_or_default();
        self.count.store(self.count.load(Relaxed) - taken.len(), Relaxed);
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rules out a backend that fills the memory by way of connections that are stuck.
    #[test]
    fn replay_work_is_bounded_for_one_connection_and_for_all() {
        let waiting_work = PendingReplayWork::default();
        let replay_work = || ReplayWork::EndReplay("a".into());
        let taken = (0..MOST_OF_ONE + 1).filter(|_| waiting_work.add((1, 1), replay_work()).is_ok()).count();
        assert_eq!(taken, MOST_OF_ONE);
        let others =
            (0..MOST as u32).filter(|slot| waiting_work.add((slot + 2, 1), replay_work()).is_ok()).count();
        assert_eq!(others, MOST - MOST_OF_ONE);
        assert_eq!(waiting_work.take((1, 2)).len(), 0, "another connection of the session");
        assert_eq!(waiting_work.take((1, 1)).len(), MOST_OF_ONE);
        assert!(waiting_work.add((1, 1), replay_work()).is_ok());
    }
}
