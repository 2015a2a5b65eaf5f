//! What must be on disk before something may be acknowledged.

use std::{
    future::poll_fn,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU32, Ordering::AcqRel, Ordering::Acquire, Ordering::Release},
    },
    task::{Poll, Waker},
};

use parking_lot::Mutex;

/// Counts the parts of one acknowledgement that are not safe yet. Whoever acknowledges holds one part itself until it
/// has given out all others, so that the count cannot reach zero before.
#[derive(Debug)]
pub struct Commit {
    left: AtomicU32,
    refused: AtomicBool,
    unit: bool,
    closed: AtomicBool,
    /// What must be done before the unit is closed.
    before: OnceLock<Arc<Self>>,
    waker: Mutex<Option<Waker>>,
}

/// The store could not keep a part: the whole must be refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused;

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
            closed: AtomicBool::new(!unit),
            before: OnceLock::new(),
            waker: Mutex::new(None),
        })
    }

    /// Whether the parts are written together.
    pub fn is_unit(&self) -> bool {
        self.unit
    }

    /// Whether the store may write the parts: it has seen the operation that closes the unit.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Acquire)
    }

    /// The store has seen the operation that closes the unit.
    pub fn close(&self) {
        self.closed.store(true, Release);
    }

    /// A commit that must be done before this unit is closed; made when first asked for. Its own part is the asker's.
    pub fn make_before(&self) -> &Arc<Self> {
        self.before.get_or_init(Self::new)
    }

    /// What must be done before this unit is closed, if there is anything.
    pub fn before(&self) -> Option<&Arc<Self>> {
        self.before.get()
    }

    /// One more part.
    pub fn add(&self) {
        self.left.fetch_add(1, AcqRel);
    }

    /// One part is safe. After the last one the waiting party is woken.
    pub fn done(&self) {
        if self.left.fetch_sub(1, AcqRel) == 1 {
            let waker = self.waker.lock().take();
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }

    /// One part cannot be kept.
    pub fn refuse(&self) {
        self.refused.store(true, Release);
        self.done();
    }

    /// The result, once no part is open.
    pub fn result(&self) -> Option<Result<(), Refused>> {
        (self.left.load(Acquire) == 0).then(|| match self.refused.load(Acquire) {
            false => Ok(()),
            true => Err(Refused),
        })
    }

    /// The result, or `None` after `waker` was put down to be woken once at the end. One party at a time.
    pub fn poll(&self, waker: &Waker) -> Option<Result<(), Refused>> {
        if let Some(result) = self.result() {
            return Some(result);
        }
        let mut place = self.waker.lock();
        if !place.as_ref().is_some_and(|known| known.will_wake(waker)) {
            *place = Some(waker.clone());
        }
        // The last part may have come before the waker was there.
        self.result()
    }

    /// Waits for the result. One caller at a time. Cancel safe.
    pub async fn wait(&self) -> Result<(), Refused> {
        poll_fn(|cx| match self.poll(cx.waker()) {
            Some(result) => Poll::Ready(result),
            None => Poll::Pending,
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_ends_with_its_last_part_and_remembers_a_refusal() {
        let commit = Commit::new();
        commit.add();
        commit.refuse();
        assert_eq!(commit.result(), None);
        commit.done();
        assert_eq!(commit.result(), Some(Err(Refused)));
        let commit = Commit::new();
        commit.done();
        assert_eq!(commit.poll(Waker::noop()), Some(Ok(())));
    }
}
