//! [`LeaseGate`].

use std::{
    fmt,
    sync::{Arc, OnceLock},
};

use parking_lot::Mutex;

use super::Commit;

/// Decides whether this process may acknowledge: in a cluster only while its lease lasts, elsewhere always. An answer that may not go now
/// waits, as for a disk; if the lease never comes back, it is never acknowledged.
#[derive(Default)]
pub struct LeaseGate {
    lease: OnceLock<HoldsLease>,
    /// Answers that wait: as many as all peers together have open, and those of the last moment that nobody wants any more.
    waiting: Mutex<Vec<Arc<Commit>>>,
}

/// Tells whether the lease is held.
type HoldsLease = Box<dyn Fn() -> bool + Send + Sync>;

impl LeaseGate {
    /// From now on `held` decides. Once, before anybody is admitted.
    pub fn set(&self, held: impl Fn() -> bool + Send + Sync + 'static) {
        let _ = self.lease.set(Box::new(held));
    }

    /// Returns whether there is a lease, held or not.
    pub fn is_set(&self) -> bool {
        self.lease.get().is_some()
    }

    /// Returns whether this process may acknowledge now.
    #[inline]
    pub fn is_open(&self) -> bool {
        self.lease.get().is_none_or(|held| held())
    }

    /// A commit that is done once `commit` is, and this process may acknowledge.
    #[cold]
    pub fn wait_for(&self, commit: Option<Arc<Commit>>) -> Arc<Commit> {
        let gated = Commit::new();
        if let Some(commit) = commit {
            let part = gated.part();
            commit.then(move |result| if result.is_ok() { part.done() } else { part.refuse() });
        }
        self.waiting.lock().push(Arc::clone(&gated));
        gated
    }

    /// Lets go of what waits, if it may be acknowledged now, and forgets answers that nobody wants any more: a client that comes back
    /// again and again without a lease leaves nothing. To be called again and again.
    pub fn look(&self) {
        let mut waiting = self.waiting.lock();
        waiting.retain(|commit| Arc::strong_count(commit) > 1);
        if waiting.is_empty() || !self.is_open() {
            return;
        }
        let let_go = std::mem::take(&mut *waiting);
        // Wakers run without the lock.
        drop(waiting);
        let_go.iter().for_each(|commit| commit.done());
    }
}

impl fmt::Debug for LeaseGate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseGate").field("is_set", &self.is_set()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

    use super::*;
    use crate::CommitRefused;

    /// The failure: a process whose home was taken over acknowledges what the next owner does not know.
    #[test]
    fn nothing_is_done_before_both_the_disk_and_the_lease_say_so() {
        let gate = LeaseGate::default();
        assert!(gate.is_open() && !gate.is_set());
        let held = Arc::new(AtomicBool::new(false));
        let shown = Arc::clone(&held);
        gate.set(move || shown.load(SeqCst));
        assert!(!gate.is_open());
        let [disk, refused] = [Commit::new(), Commit::new()];
        let gated =
            [None, Some(Arc::clone(&disk)), Some(Arc::clone(&refused))].map(|commit| gate.wait_for(commit));
        refused.refuse();
        gate.look();
        assert!(gated.iter().all(|commit| commit.result().is_none()));
        held.store(true, SeqCst);
        gate.look();
        assert_eq!(
            [Some(Ok(())), None, Some(Err(CommitRefused))],
            gated.each_ref().map(|commit| commit.result())
        );
        disk.done();
        assert_eq!(gated[1].result(), Some(Ok(())));
    }

    /// The failure: clients that give up and come back while the database is away fill the memory.
    #[test]
    fn an_answer_that_nobody_wants_any_more_is_forgotten() {
        let gate = LeaseGate::default();
        gate.set(|| false);
        let wanted = gate.wait_for(None);
        for _ in 0..100 {
            drop(gate.wait_for(None));
        }
        gate.look();
        assert_eq!(gate.waiting.lock().len(), 1);
        assert_eq!(wanted.result(), None);
    }
}
