use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::{Wake, Waker},
};

use parking_lot::Mutex;

use super::*;
use crate::{Journal, Message, Origin, QoS, QueueEntry, QueueId, QueueOp, Timestamp};

struct Closings(Mutex<usize>);

impl Journal for Closings {
    fn submit(&self, op: QueueOp) {
        if let QueueOp::Remove { unit: Some(commit), .. } = op {
            *self.0.lock() += 1;
            commit.done();
        }
    }
}

#[test]
fn a_panic_while_a_unit_is_open_does_not_hold_up_the_store_for_ever() {
    let closings = Closings(Mutex::new(0));
    let mut message = Message::new("t", b"p", Timestamp(0), Origin::SERVER);
    (message.qos, message.unit) = (QoS::ExactlyOnce, true);
    let routed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _unit = Unit::new(&message, &closings);
        let _part = message.commit();
        panic!("a target fails");
    }));
    assert!(routed.is_err());
    assert_eq!(*closings.0.lock(), 1);
    let plain = Message::new("t", b"p", Timestamp(0), Origin::SERVER);
    drop(Unit::new(&plain, &closings));
    assert_eq!(*closings.0.lock(), 1, "there was no unit");
}

#[test]
fn an_entry_is_either_written_or_settled() {
    let message = Arc::clone(Message::new("t", b"p", Timestamp(0), Origin::SERVER).share());
    let commit = Commit::new();
    let new =
        || QueueEntry::new(QueueId(1), 0, Arc::clone(&message), QoS::AtLeastOnce, Some(Arc::clone(&commit)));
    let (written, settled) = (new(), new());
    assert!(written.take().is_some());
    assert!(!written.settle() && written.take().is_none());
    assert!(settled.settle() && settled.is_settled());
    assert!(!settled.settle() && settled.take().is_none());
    commit.done();
    assert_eq!(commit.result(), None, "the entry being written is not done");
    commit.done();
    assert_eq!(commit.result(), Some(Ok(())));
}

#[test]
fn a_commit_ends_with_its_last_part_and_remembers_a_refusal() {
    let commit = Commit::new();
    commit.add();
    commit.refuse();
    assert_eq!(commit.result(), None);
    commit.done();
    assert_eq!(commit.result(), Some(Err(CommitRefused)));
    let commit = Commit::new();
    commit.done();
    assert_eq!(commit.poll(Waker::noop()), Some(Ok(())));
}

#[cfg(debug_assertions)]
#[test]
fn a_part_that_ends_twice_and_one_that_comes_late_are_found() {
    let wrong: [fn(&Commit); 3] = [Commit::done, Commit::refuse, Commit::add];
    for wrong in wrong {
        let commit = Commit::new();
        commit.done();
        let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| wrong(&commit)));
        assert!(found.is_err());
    }
}

#[derive(Default)]
struct Wakes(AtomicUsize);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, SeqCst);
    }
}

#[test]
fn of_too_many_tasks_each_is_woken_to_ask_again() {
    let commit = Commit::new();
    let tasks: Vec<_> = (0..100).map(|_| Arc::new(Wakes::default())).collect();
    for task in &tasks {
        let waker = Waker::from(Arc::clone(task));
        assert_eq!(commit.poll(&waker), None);
        assert_eq!(commit.poll(&waker), None, "known");
    }
    let held = tasks.iter().filter(|task| Arc::strong_count(task) > 1).count();
    assert!(held < 10, "dead ones must not pile up: {held}");
    commit.done();
    assert!(tasks.iter().all(|task| task.0.load(SeqCst) == 1));
}

#[test]
fn a_unit_is_closed_when_what_must_come_before_is_safe() {
    #[derive(Default)]
    struct Kept(Mutex<Vec<(u16, bool)>>);

    impl Journal for Kept {
        fn submit(&self, op: QueueOp) {
            let submitted = match op {
                QueueOp::Receive { packet_id, commit, .. } => {
                    commit.done();
                    (packet_id, true)
                }
                QueueOp::Forget { packet_id, .. } => (packet_id, false),
                op => panic!("{op:?}"),
            };
            self.0.lock().push(submitted);
        }
    }

    for (refused, released) in [(false, false), (false, true), (true, false)] {
        let journal = Arc::new(Kept::default());
        let unit = Commit::of_unit();
        let before = unit.make_before().part();
        Received { queue: QueueId(1), packet_id: 7, released }
            .close(Arc::clone(&unit), Arc::clone(&journal) as _);
        assert!(journal.0.lock().is_empty() && unit.result().is_none());
        if refused {
            before.refuse()
        } else {
            before.done()
        }
        let forgotten = released.then_some((7, false));
        assert_eq!(*journal.0.lock(), [(7, true)].into_iter().chain(forgotten).collect::<Vec<_>>());
        assert_eq!(unit.result(), Some(if refused { Err(CommitRefused) } else { Ok(()) }));
    }
}
