//! Models: what the [module](super) promises, in every interleaving of a few threads and with every value that the orderings
//! of its atomics let a thread see.

#![allow(
    clippy::duplicate_mod,
    dead_code,
    unreachable_pub,
    reason = "the same code with another `sync`, used in part"
)]

mod sync {
    pub(super) use loom::sync::atomic;
    use loom::sync::{Mutex as Loom, MutexGuard};

    #[derive(Debug)]
    pub(super) struct Mutex<T>(Loom<T>);

    impl<T> Mutex<T> {
        pub(super) fn new(value: T) -> Self {
            Self(Loom::new(value))
        }

        pub(super) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().expect("nothing panics in a model")
        }
    }
}

#[path = "state.rs"]
mod state;
#[path = "unwritten.rs"]
mod unwritten;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::{Wake, Waker},
};

use loom::{future::block_on, thread};
use parking_lot::Mutex;
use state::{Commit, CommitRefused};
use unwritten::Unwritten;

#[derive(Default)]
struct Wakes(AtomicUsize);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Relaxed);
    }
}

/// Ends two parts in threads of their own; the second is refused. The holder's own part is open still.
fn give_out(commit: &Arc<Commit>) -> [thread::JoinHandle<()>; 2] {
    commit.add();
    commit.add();
    let [well, ill] = [Arc::clone(commit), Arc::clone(commit)];
    [thread::spawn(move || well.done()), thread::spawn(move || ill.refuse())]
}

#[test]
fn whoever_waits_is_woken_and_sees_the_refusal() {
    // All interleavings take seven seconds.
    let mut few = loom::model::Builder::new();
    few.preemption_bound = Some(3);
    few.check(|| {
        let commit = Commit::new();
        let threads = give_out(&commit);
        commit.done();
        assert_eq!(block_on(commit.wait()), Err(CommitRefused));
        threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    });
}

#[test]
fn of_two_that_wait_neither_is_forgotten() {
    loom::model(|| {
        let commit = Commit::new();
        let ask = |commit: &Commit| {
            let wakes = Arc::new(Wakes::default());
            (commit.poll(&Waker::from(Arc::clone(&wakes))), wakes)
        };
        let other = Arc::clone(&commit);
        let asks = thread::spawn(move || ask(&other));
        let last = Arc::clone(&commit);
        let ends = thread::spawn(move || last.done());
        let first = ask(&commit);
        ends.join().expect("no panic");
        for (result, wakes) in [first, asks.join().expect("no panic")] {
            // One that came too late to be put down may be woken all the same.
            assert!(result == Some(Ok(())) || wakes.0.load(Relaxed) == 1);
        }
    });
}

#[test]
fn what_comes_then_runs_once_and_sees_the_refusal() {
    loom::model(|| {
        let commit = Commit::new();
        let threads = give_out(&commit);
        let runs = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&runs);
        commit.done();
        commit.then(move |result| seen.lock().push(result));
        threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
        assert_eq!(*runs.lock(), [Err(CommitRefused)]);
    });
}

/// A closure that ran under the lock would wait for itself.
#[test]
fn what_comes_then_runs_without_the_lock() {
    loom::model(|| {
        let commit = Commit::new();
        let last = Arc::clone(&commit);
        let ends = thread::spawn(move || last.done());
        let again = Arc::clone(&commit);
        commit.then(move |_| again.then(|result| assert_eq!(result, Ok(()))));
        ends.join().expect("no panic");
    });
}

#[test]
fn what_is_unwritten_is_taken_or_settled_and_not_both() {
    loom::model(|| {
        let entry = Arc::new(Unwritten::new(7));
        assert_eq!(entry.look(|content| *content), Some(7));
        let commit = Commit::new();
        commit.add();
        let (of_writer, of_writer_commit) = (Arc::clone(&entry), Arc::clone(&commit));
        let writer = thread::spawn(move || {
            let taken = of_writer.take();
            assert!(taken.is_none_or(|content| content == 7));
            if taken.is_some() {
                of_writer_commit.done();
            } else {
                assert!(of_writer.is_settled());
            }
            taken.is_some()
        });
        let settled = entry.settle();
        if settled {
            commit.done();
        }
        commit.done();
        assert_eq!(block_on(commit.wait()), Ok(()));
        assert_ne!(writer.join().expect("no panic"), settled);
        assert!(entry.take().is_none() && !entry.settle());
    });
}
