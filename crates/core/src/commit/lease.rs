//! [`LeaseGate`].

use std::{
    fmt,
    sync::{Arc, OnceLock},
};

use parking_lot::Mutex;

use super::Commit;
use crate::Budget;

/// Bytes that an answer counts for while it waits: its commits, and its place among those that wait.
const WAIT: usize = 512;

/// Decides whether this process may acknowledge: in a cluster only while its lease lasts, elsewhere always. An answer that may not go now
/// waits, as for a disk; if the lease never comes back, it is never acknowledged.
#[derive(Default)]
pub struct LeaseGate {
    lease: OnceLock<GateLease>,
    /// Answers that wait: as many as all peers together have open, and those of the last moment that nobody wants any more.
    waiting: Mutex<Vec<Arc<Commit>>>,
}

struct GateLease {
    held: Box<dyn Fn() -> bool + Send + Sync>,
    /// Charged for each answer that waits.
    budget: Box<dyn Budget + Send + Sync>,
}

impl LeaseGate {
    /// From now on `held` decides, and answers that wait are charged to `budget`, also beyond it: the bounds of their peers are theirs.
    /// Once, before anybody is admitted.
    pub fn set(
        &self,
        held: impl Fn() -> bool + Send + Sync + 'static,
        budget: impl Budget + Send + Sync + 'static,
    ) {
        let _ = self.lease.set(GateLease { held: Box::new(held), budget: Box::new(budget) });
    }

    /// Returns whether there is a lease, held or not.
    pub fn is_set(&self) -> bool {
        self.lease.get().is_some()
    }

    /// Returns whether this process may acknowledge now.
    #[inline]
    pub fn is_open(&self) -> bool {
        self.lease.get().is_none_or(|lease| (lease.held)())
    }

    /// Number of answers that wait.
    pub fn waiting(&self) -> usize {
        self.waiting.lock().len()
    }

    /// A commit that is done once `commit` is, and this process may acknowledge.
    #[cold]
    pub fn wait_for(&self, commit: Option<Arc<Commit>>) -> Arc<Commit> {
        let gated = Commit::new();
        if let Some(commit) = commit {
            let part = gated.part();
            commit.then(move |result| if result.is_ok() { part.done() } else { part.refuse() });
        }
        if let Some(lease) = self.lease.get() {
            lease.budget.force(WAIT);
        }
        self.waiting.lock().push(Arc::clone(&gated));
        gated
    }

    /// Lets go of what waits, if it may be acknowledged now, and forgets answers that nobody wants any more: a client that comes back
    /// again and again without a lease leaves nothing. To be called again and again.
    pub fn look(&self) {
        let Some(lease) = self.lease.get() else { return };
        let mut waiting = self.waiting.lock();
        let before = waiting.len();
        waiting.retain(|commit| Arc::strong_count(commit) > 1);
        let let_go = if (lease.held)() { std::mem::take(&mut *waiting) } else { Vec::new() };
        lease.budget.release((before - waiting.len()) * WAIT);
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
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

    use super::*;
    use crate::CommitRefused;

    /// Bytes that are held.
    #[derive(Default)]
    struct Held(Arc<AtomicUsize>);

    impl Budget for Held {
        fn charge(&self, _held: usize, _bytes: usize) -> bool {
            false
        }

        fn force(&self, bytes: usize) {
            self.0.fetch_add(bytes, SeqCst);
        }

        fn release(&self, bytes: usize) {
            self.0.fetch_sub(bytes, SeqCst);
        }
    }

    /// The failure: a process whose home was taken over acknowledges what the next owner does not know.
    #[test]
    fn nothing_is_done_before_both_the_disk_and_the_lease_say_so() {
        let gate = LeaseGate::default();
        assert!(gate.is_open() && !gate.is_set());
        let held = Arc::new(AtomicBool::new(false));
        let shown = Arc::clone(&held);
        gate.set(move || shown.load(SeqCst), Held::default());
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

    /// The failures: clients that give up and come back while the database is away fill the memory; answers that wait are on no
    /// account, or stay on it.
    #[test]
    fn an_answer_counts_until_it_goes_or_nobody_wants_it_any_more() {
        let gate = LeaseGate::default();
        let (held, bytes) = (Arc::new(AtomicBool::new(false)), Held::default());
        let (shown, counted) = (Arc::clone(&held), Arc::clone(&bytes.0));
        gate.set(move || shown.load(SeqCst), bytes);
        let wanted = gate.wait_for(None);
        let given_up: Vec<_> = (0..100).map(|_| gate.wait_for(None)).collect();
        gate.look();
        assert_eq!((gate.waiting(), counted.load(SeqCst)), (101, 101 * WAIT));
        drop(given_up);
        gate.look();
        assert_eq!((gate.waiting(), counted.load(SeqCst)), (1, WAIT));
        assert_eq!(wanted.result(), None);
        held.store(true, SeqCst);
        gate.look();
        assert_eq!((gate.waiting(), counted.load(SeqCst), wanted.result()), (0, 0, Some(Ok(()))));
    }
}
