//! [`Commit`]. Also compiled into the models, with another `sync`.

use std::{
    fmt,
    future::poll_fn,
    sync::{Arc, OnceLock},
    task::{Poll, Waker},
};

use super::sync::{
    Mutex,
    atomic::{AtomicBool, AtomicU32, Ordering::AcqRel, Ordering::Acquire, Ordering::Release},
};

/// Tasks that may wait for one commit before those that came first must ask again: a client that comes back again and again
/// while the disk hangs leaves a dead one each time.
const MOST_TASKS: usize = 8;

/// Counts the parts of one promise that have not ended yet; see the [module](super).
pub struct Commit {
    left: AtomicU32,
    refused: AtomicBool,
    unit: bool,
    /// Commit that must be done before the unit is closed.
    before: OnceLock<Arc<Self>>,
    waiting: Mutex<Waiters>,
}

/// The store could not keep a part: the whole must be refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommitRefused;

/// Tasks and closures to call at the end. Nearly always one task, which costs no allocation.
#[derive(Default)]
struct Waiters {
    task: Option<Waker>,
    more: Vec<CommitWaiter>,
}

enum CommitWaiter {
    Task(Waker),
    Then(Box<dyn FnOnce(Result<(), CommitRefused>) + Send>),
}

impl Commit {
    /// A commit with the holder's own part open.
    pub fn new() -> Arc<Self> {
        Self::with(false)
    }

    /// As [`Self::new`]; the parts are also written together or not at all: the store leaves them waiting until an
    /// operation that closes the unit has come.
    pub fn of_unit() -> Arc<Self> {
        Self::with(true)
    }

    fn with(unit: bool) -> Arc<Self> {
        Arc::new(Self {
            left: AtomicU32::new(1),
            refused: AtomicBool::new(false),
            unit,
            before: OnceLock::new(),
            waiting: Mutex::new(Waiters::default()),
        })
    }

    /// Returns whether the parts are written together.
    pub fn is_unit(&self) -> bool {
        self.unit
    }

    /// A commit that must be done before this unit is closed; made when first asked for. Its own part belongs to whoever closes
    /// the unit.
    pub(crate) fn make_before(&self) -> &Arc<Self> {
        self.before.get_or_init(Self::new)
    }

    /// Returns the commit that must be done before this unit is closed, if there is one.
    pub fn before(&self) -> Option<&Arc<Self>> {
        self.before.get()
    }

    /// Adds a part and hands it out; the receiver ends it. The caller must hold a part that is open.
    pub fn part(self: &Arc<Self>) -> Arc<Self> {
        self.add();
        Arc::clone(self)
    }

    /// As [`Self::part`], where the receiver has the commit already.
    pub fn add(&self) {
        let open = self.left.fetch_add(1, AcqRel);
        debug_assert!(open > 0, "nothing is added to a commit that is done");
    }

    /// One part has ended well. If it was the last, all that wait are woken, in this thread.
    pub fn done(&self) {
        let open = self.left.fetch_sub(1, AcqRel);
        debug_assert!(open > 0, "a part ends once");
        if open == 1 {
            self.tell();
        }
    }

    /// One part cannot be kept. It has ended with that.
    pub fn refuse(&self) {
        self.refused.store(true, Release);
        self.done();
    }

    fn tell(&self) {
        let Waiters { task, more } = std::mem::take(&mut *self.waiting.lock());
        if let Some(task) = task {
            task.wake();
        }
        for waiter in more {
            match waiter {
                CommitWaiter::Task(task) => task.wake(),
                CommitWaiter::Then(run) => run(self.outcome()),
            }
        }
    }

    /// The result, once no part is open.
    pub fn result(&self) -> Option<Result<(), CommitRefused>> {
        (self.left.load(Acquire) == 0).then(|| self.outcome())
    }

    fn outcome(&self) -> Result<(), CommitRefused> {
        if self.refused.load(Acquire) { Err(CommitRefused) } else { Ok(()) }
    }

    /// Does this once the commit is done: now, if it is, else in the thread that ends its last part, where it must neither
    /// block nor take long.
    pub fn then(&self, run: impl FnOnce(Result<(), CommitRefused>) + Send + 'static) {
        let mut waiting = self.waiting.lock();
        // The thread that ends the last part takes the lock after that: it finds the closure put down here, or we see
        // the end.
        let Some(result) = self.result() else {
            return waiting.more.push(CommitWaiter::Then(Box::new(run)));
        };
        drop(waiting);
        run(result);
    }

    /// The result, or `None` after `waker` was put down to be woken.
    pub fn poll(&self, waker: &Waker) -> Option<Result<(), CommitRefused>> {
        if let Some(result) = self.result() {
            return Some(result);
        }
        let mut waiting = self.waiting.lock();
        let crowd = waiting.put_down(waker);
        // The last part may have ended before the waker was there.
        let result = self.result();
        drop(waiting);
        crowd.into_iter().for_each(Waker::wake);
        result
    }

    /// Waits for the result. Cancel safe.
    pub async fn wait(&self) -> Result<(), CommitRefused> {
        poll_fn(|cx| match self.poll(cx.waker()) {
            Some(result) => Poll::Ready(result),
            None => Poll::Pending,
        })
        .await
    }
}

impl Waiters {
    /// Puts a waker down, once. Those that are too many are given back, to be woken without the lock.
    fn put_down(&mut self, waker: &Waker) -> Vec<Waker> {
        let Some(task) = &self.task else {
            self.task = Some(waker.clone());
            return Vec::new();
        };
        let is_known =
            |waiter: &CommitWaiter| matches!(waiter, CommitWaiter::Task(task) if task.will_wake(waker));
        if task.will_wake(waker) || self.more.iter().any(is_known) {
            return Vec::new();
        }
        let mut crowd = Vec::new();
        if self.more.iter().filter(|waiter| matches!(waiter, CommitWaiter::Task(_))).count() + 1 >= MOST_TASKS
        {
            crowd.extend(self.task.replace(waker.clone()));
            let is_task = |waiter: &mut CommitWaiter| matches!(waiter, CommitWaiter::Task(_));
            crowd.extend(self.more.extract_if(.., is_task).filter_map(CommitWaiter::into_task));
        } else {
            self.more.push(CommitWaiter::Task(waker.clone()));
        }
        crowd
    }
}

impl CommitWaiter {
    fn into_task(self) -> Option<Waker> {
        match self {
            Self::Task(task) => Some(task),
            Self::Then(_) => None,
        }
    }
}

impl fmt::Debug for Commit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Commit");
        shown.field("left", &self.left).field("refused", &self.refused).field("unit", &self.unit);
        shown.field("before", &self.before).finish_non_exhaustive()
    }
}
