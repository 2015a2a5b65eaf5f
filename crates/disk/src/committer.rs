//! Group commit: one thread that writes whatever was submitted during its last commit in one transaction.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};

use super::environment::Environment;
use crate::{counters::count, table::WriteTxn};
use store::{StoreError, StoreHealth};

/// First pause after a failed commit; it doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// While commits fail, one submission per this many milliseconds may try whether the disk takes it.
const PROBE_MILLIS: u64 = 1000;

/// Operations submitted and not yet taken by the writer. The inbox bounds itself: see the stores.
pub(super) trait Inbox: Send + 'static {
    /// Operation that is submitted.
    type Op;
    /// Adds an operation after all others. Must be short: every submitting thread waits for it.
    fn push(&mut self, op: Self::Op);
    /// Returns the number of operations in it.
    fn len(&self) -> usize;
}

/// The writer's side of one environment. All calls come from the writer thread, in this order: `accept`, `plan`, and if
/// that is true `apply` at least once and then `committed` or `failed`.
pub(super) trait EnvironmentWriter: Send + 'static {
    /// Inbox to which its operations are submitted.
    type Inbox: Inbox;
    /// Nobody waits long for it: its thread leaves the processor to others.
    const GIVES_WAY: bool = false;
    /// Takes over all of `inbox`, after what it still has, and leaves it empty.
    fn accept(&mut self, inbox: &mut Self::Inbox);
    /// Chooses what goes into the next transaction: nothing more once it has about `redo` bytes of changes, at the next place between
    /// two units. False if there is nothing to write now.
    fn plan(&mut self, redo: usize) -> bool;
    /// Writes what was chosen. Called again, on the state before, if the map had to grow.
    fn apply(&mut self, txn: &mut WriteTxn<'_>) -> Result<(), heed::Error>;
    /// Returns whether the chosen operations add to the stored records, so that they must not use the room kept for removals.
    fn adds(&self) -> bool;
    /// Hears that the chosen operations are durable.
    fn committed(&mut self);
    /// Nothing of what was chosen was written. What is kept is chosen again by a later `plan`.
    fn failed(&mut self);
    /// Returns whether operations are left that the next `plan` would choose at once.
    fn more(&self) -> bool;
    /// Returns the time after which to call `plan` even if nothing is submitted.
    fn tick(&self) -> Option<Duration> {
        None
    }
    /// The store is closed; what is left will not be written.
    fn close(&mut self) {}
}

/// Bounds on the delay of operations that nobody waits for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lazy {
    /// Time since the first operation that nobody waits for.
    pub(super) interval: Duration,
    /// Number of such operations.
    pub(super) count: usize,
    /// Time from a commit until the next look whether pages can be unmapped.
    pub(super) unmap: Duration,
}

impl Default for Lazy {
    fn default() -> Self {
        Self { interval: Duration::from_millis(50), count: 10_000, unmap: Duration::from_secs(10) }
    }
}

/// Hands operations to a writer thread. Dropping it waits until what was submitted is written, or failed once more, unless
/// it is dropped in that thread, which then ends by itself after that.
pub(super) struct Committer<W: EnvironmentWriter> {
    shared: Arc<CommitterShared<W::Inbox>>,
    environment: Arc<Environment>,
    thread: Option<JoinHandle<()>>,
}

struct CommitterShared<I> {
    state: Mutex<Submitted<I>>,
    wake: Condvar,
    failing: AtomicBool,
    started: Instant,
    /// Milliseconds after `started` when the last try was let through.
    probed: AtomicU64,
    lazy: Lazy,
}

struct Submitted<I> {
    inbox: I,
    /// Somebody waits for an operation in the inbox.
    urgent: bool,
    /// Since when the inbox is not empty.
    since: Option<Instant>,
    closing: bool,
    /// Of a home that is another gateway's nobody waits for anything any more.
    given_up: bool,
}

impl<W: EnvironmentWriter> Committer<W> {
    /// Starts the thread `name`. `inboxes` are two empty ones, used in turn.
    pub(super) fn start(
        name: &str,
        environment: Arc<Environment>,
        work: W,
        inboxes: [W::Inbox; 2],
        lazy: Lazy,
    ) -> Result<Self, StoreError> {
        let [inbox, spare] = inboxes;
        let state = Submitted { inbox, urgent: false, since: None, closing: false, given_up: false };
        let shared = Arc::new(CommitterShared {
            state: Mutex::new(state),
            wake: Condvar::new(),
            failing: AtomicBool::new(false),
            started: now(),
            probed: AtomicU64::new(0),
            lazy,
        });
        let writer = CommitWriter {
            shared: Arc::clone(&shared),
            environment: Arc::clone(&environment),
            work,
            spare,
            pause: None,
            look: None,
            given_up: false,
            name: name.to_owned(),
        };
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || writer.run())
            .map_err(|e| StoreError::Unavailable(format!("cannot start the thread {name}: {e}")))?;
        Ok(Self { shared, environment, thread: Some(thread) })
    }

    /// Submits an operation: `urgent` is written with the next commit, which begins at once. Never waits for the disk.
    pub(super) fn submit(&self, op: <W::Inbox as Inbox>::Op, urgent: bool) {
        let mut state = self.shared.state.lock();
        state.inbox.push(op);
        let first = state.since.is_none();
        if first {
            state.since = Some(now());
        }
        let full = state.inbox.len() == self.shared.lazy.count;
        let wake = first || full || (urgent && !state.urgent);
        state.urgent |= urgent;
        drop(state);
        if wake {
            self.shared.wake.notify_one();
        }
    }

    /// Begins the next commit at once, with all that was submitted.
    pub(super) fn hurry(&self) {
        let mut state = self.shared.state.lock();
        let wake = !state.urgent && state.since.is_some();
        state.urgent |= wake;
        drop(state);
        if wake {
            self.shared.wake.notify_one();
        }
    }

    /// Refuses what waits, and all that comes, once the home is lost: until then nobody is told anything, as what waits may be in the
    /// ledger or not. Whoever could be told must be gone.
    pub(super) fn give_up(&self) {
        self.shared.state.lock().given_up = true;
        self.shared.wake.notify_one();
    }

    /// Returns whether a new operation should be submitted: commits succeed, or it is time to try again.
    pub(super) fn admits(&self) -> bool {
        match self.health() {
            StoreHealth::Sound => return true,
            StoreHealth::Failing => {}
            StoreHealth::Damaged => return false,
        }
        let CommitterShared { started, probed, .. } = &*self.shared;
        let (now, last) = (started.elapsed().as_millis() as u64, probed.load(Relaxed));
        now >= last + PROBE_MILLIS && probed.compare_exchange(last, now, Relaxed, Relaxed).is_ok()
    }

    /// Returns the health shown by the last commit.
    pub(super) fn health(&self) -> StoreHealth {
        match self.shared.failing.load(Relaxed) {
            _ if self.environment.is_damaged() => StoreHealth::Damaged,
            true => StoreHealth::Failing,
            false => StoreHealth::Sound,
        }
    }
}

impl<I> CommitterShared<I> {
    /// Waits until nobody waits for anything any more; false if the store is closed before.
    fn wait_until_given_up(&self) -> bool {
        let mut state = self.state.lock();
        while !state.closing && !state.given_up {
            self.wake.wait(&mut state);
        }
        state.given_up
    }
}

impl<W: EnvironmentWriter> Drop for Committer<W> {
    fn drop(&mut self) {
        self.shared.state.lock().closing = true;
        self.shared.wake.notify_one();
        if let Some(thread) = self.thread.take() {
            store::join(thread);
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "a writer thread waits for deadlines and measures its commits")]
fn now() -> Instant {
    Instant::now()
}

struct CommitWriter<W: EnvironmentWriter> {
    shared: Arc<CommitterShared<W::Inbox>>,
    environment: Arc<Environment>,
    work: W,
    spare: W::Inbox,
    /// The pause after the last commit, which failed, and when it ends.
    pause: Option<(Duration, Instant)>,
    /// Time of the next look whether pages can be unmapped; `None` if nothing was committed since the last look.
    look: Option<Instant>,
    /// The home is lost, and everything is refused.
    given_up: bool,
    name: String,
}

impl<W: EnvironmentWriter> CommitWriter<W> {
    fn run(mut self) {
        if W::GIVES_WAY {
            gateway_core::give_way();
        }
        loop {
            let closing = self.wait();
            if self.pause.is_none() && self.environment.recover() {
                self.recovered();
            }
            self.look();
            self.work.accept(&mut self.spare);
            let redo = self.environment.redo_room();
            if self.work.plan(redo) {
                let added = self.work.adds();
                // A full disk refuses what adds. What is left removes, and must not wait for the next that adds.
                let written = self.commit();
                if self.environment.is_lost() && !self.given_up {
                    if !self.shared.wait_until_given_up() {
                        // Nobody is told anything: what waits may be in the ledger or not.
                        std::mem::forget(self.work);
                        return;
                    }
                    self.given_up = true;
                    self.work.failed();
                }
                if !written && added && self.environment.is_low() && self.work.plan(redo) {
                    self.commit();
                }
            }
            if closing && (self.pause.is_some() || !self.work.more()) {
                return self.work.close();
            }
        }
    }

    /// Waits for something to do and takes the inbox. True when the store is being closed.
    fn wait(&mut self) -> bool {
        let mut state = self.shared.state.lock();
        let begun = now();
        let more = self.work.more();
        let low = (self.pause.is_none() && self.environment.is_low()).then_some(LONGEST_PAUSE);
        let tick = self.work.tick().into_iter().chain(low).min().map(|tick| begun + tick);
        let tick = tick.into_iter().chain(self.look).min();
        loop {
            let full = state.inbox.len() >= self.shared.lazy.count;
            if state.closing || state.urgent || (self.pause.is_none() && (more || full)) {
                break;
            }
            let due = match self.pause {
                // While commits fail, what nobody waits for does not make them more frequent.
                Some((_, until)) => (more || state.since.is_some()).then_some(until),
                None => state.since.map(|since| since + self.shared.lazy.interval),
            };
            match due.into_iter().chain(tick).min() {
                None => self.shared.wake.wait(&mut state),
                Some(at) => {
                    if now() >= at || self.shared.wake.wait_until(&mut state, at).timed_out() {
                        break;
                    }
                }
            }
        }
        std::mem::swap(&mut state.inbox, &mut self.spare);
        state.urgent = false;
        state.since = None;
        state.closing
    }

    /// Writes what was chosen; returns whether that is durable.
    fn commit(&mut self) -> bool {
        let begun = now();
        let (environment, work) = (&self.environment, &mut self.work);
        let result = match work.adds() {
            true => environment.adding(|txn| work.apply(txn)),
            false => environment.writing(|txn| work.apply(txn)),
        };
        let took = begun.elapsed();
        count(|c| {
            c.store_commits.add(1);
            c.store_commit_micros.add(took.as_micros() as u64);
        });
        match result {
            Ok(()) => {
                self.pause = None;
                self.look.get_or_insert_with(|| now() + self.shared.lazy.unmap);
                if !self.environment.is_low() || self.environment.recover() {
                    self.recovered();
                }
                self.work.committed();
                true
            }
            Err(_) if self.environment.is_lost() && !self.given_up => false,
            Err(error) => {
                count(|c| c.store_commit_errors.add(1));
                if !self.shared.failing.swap(true, Relaxed) && !self.given_up {
                    gateway_core::error_limited!(store = self.name, %error, "store cannot write, it keeps trying");
                }
                let pause = self.pause.map_or(FIRST_PAUSE, |(pause, _)| (pause * 2).min(LONGEST_PAUSE));
                self.pause = Some((pause, now() + pause));
                self.work.failed();
                false
            }
        }
    }

    fn look(&mut self) {
        if self.look.take_if(|due| now() >= *due).is_none() {
            return;
        }
        match self.environment.unmap_free() {
            Ok(true) => {
                tracing::debug!(store = self.name, "pages of the file are unmapped, it is mostly free")
            }
            Ok(false) => {}
            Err(error) => gateway_core::warn_limited!(store = self.name, %error, "cannot unmap free pages"),
        }
    }

    fn recovered(&self) {
        if self.shared.failing.swap(false, Relaxed) {
            tracing::info!(store = self.name, "store takes writes again");
        }
    }
}
