//! State that all threads of a log share, and its setup.

use std::{
    collections::VecDeque,
    fmt, io,
    path::PathBuf,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering::*},
    },
    time::{Duration, Instant},
};

use gateway_core::{Commit, Feeder, GroupId, Partition, SharedMessage, Shares, Timestamp};
use hashbrown::HashMap;
use parking_lot::{Condvar, Mutex, RwLock};

use super::{format::GroupCount, segment::LogSegment, shipped::LogLedger, tail::Tails};
use ledger::Shipping;
use store::{DataDir, LogWatcher};

/// While the disk fails, one append per this many milliseconds may try whether it takes it.
const PROBE_MILLIS: u64 = 1000;

/// Bytes counted for a waiting message besides its cost.
pub(super) const OVERHEAD: usize = 64;

/// Step before which a [`LogHook`] is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogStep {
    /// A segment is made.
    Create,
    /// Bytes are written.
    Write,
    /// The written bytes are synced.
    Sync,
}

/// Called in the writing thread; an error fails the step. For tests of failing and slow disks.
pub type LogHook = Arc<dyn Fn(LogStep) -> io::Result<()> + Send + Sync>;

/// Setup of [`EmbeddedLog`](super::EmbeddedLog).
#[derive(Clone)]
pub struct LogOptions {
    /// A segment that has so many bytes is followed by another.
    pub segment_bytes: u64,
    /// Bytes of messages that may wait for the disk, which those that send them share; beyond it nothing is taken.
    pub max_waiting_bytes: usize,
    /// Bytes of the last messages that are kept in memory for who keeps up.
    pub cache_bytes: usize,
    /// Longest wait of a message that nobody waits for.
    pub lazy_interval: Duration,
    /// For tests.
    pub hook: Option<LogHook>,
    /// A ledger that has each batch before it is written.
    pub shipping: Option<Arc<dyn Shipping>>,
}

impl Default for LogOptions {
    fn default() -> Self {
        Self {
            segment_bytes: 64 << 20,
            max_waiting_bytes: 64 << 20,
            cache_bytes: 32 << 20,
            lazy_interval: Duration::from_millis(5),
            hook: None,
            shipping: None,
        }
    }
}

impl fmt::Debug for LogOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LogOptions")
            .field("segment_bytes", &self.segment_bytes)
            .field("max_waiting_bytes", &self.max_waiting_bytes)
            .field("cache_bytes", &self.cache_bytes)
            .field("lazy_interval", &self.lazy_interval)
            .finish_non_exhaustive()
    }
}

/// State that all threads of a log share.
pub(super) struct LogShared {
    pub(super) ledger: Option<LogLedger>,
    pub(super) folder: PathBuf,
    pub(super) options: LogOptions,
    pub(super) id: u64,
    pub(super) inbox: Mutex<LogInbox>,
    pub(super) wake: Condvar,
    /// Bytes that are submitted and not yet written, by sender.
    pub(super) shares: Shares,
    /// Messages that were written or refused.
    pub(super) ended: AtomicU64,
    pub(super) failing: AtomicBool,
    pub(super) started: Instant,
    /// Milliseconds after `started` when the last try was let through.
    pub(super) probed: AtomicU64,
    /// In order; the last is the one that grows, if any does.
    pub(super) segments: RwLock<VecDeque<Arc<LogSegment>>>,
    pub(super) tails: Tails,
    /// Messages and bytes that the groups had got where the log ends, and the time at which the last message was received.
    pub(super) counts: Mutex<LogCounts>,
    /// Before which nothing is needed, by partition.
    pub(super) trims: Box<[AtomicU64]>,
    /// Bytes of all files.
    pub(super) bytes: AtomicU64,
    /// If the log begins here, what was before was set aside.
    pub(super) damaged: u64,
    pub(super) watcher: OnceLock<Arc<dyn LogWatcher>>,
    /// Held until the last thread has ended.
    pub(super) _directory: Arc<DataDir>,
}

#[derive(Default)]
pub(super) struct LogCounts {
    pub(super) groups: HashMap<GroupId, GroupCount, ahash::RandomState>,
    pub(super) latest: Timestamp,
}

/// Records submitted and not yet taken.
#[derive(Default)]
pub(super) struct LogInbox {
    pub(super) submitted: VecDeque<SubmittedRecord>,
    /// Number of records submitted since the log was opened, the taken ones included.
    pub(super) count: u64,
    /// Somebody waits for one of them.
    pub(super) urgent: bool,
    /// Since when there are some.
    pub(super) since: Option<Instant>,
    pub(super) closing: bool,
    /// Of a home that is another gateway's nobody waits for anything any more.
    pub(super) given_up: bool,
}

pub(super) struct SubmittedRecord {
    pub(super) partition: Partition,
    pub(super) groups: Arc<[GroupId]>,
    pub(super) message: Arc<SharedMessage>,
    pub(super) commit: Option<Arc<Commit>>,
    pub(super) feeder: Feeder,
}

impl SubmittedRecord {
    pub(super) fn cost(&self) -> usize {
        self.message.cost() + OVERHEAD
    }
}

impl LogShared {
    /// Returns whether a new message should be submitted: the disk takes it, or it is time to try again.
    pub(super) fn admits(&self) -> bool {
        if !self.failing.load(Relaxed) {
            return true;
        }
        let (now, last) = (self.started.elapsed().as_millis() as u64, self.probed.load(Relaxed));
        now >= last + PROBE_MILLIS && self.probed.compare_exchange(last, now, Relaxed, Relaxed).is_ok()
    }

    /// The first segment that ends after `offset`, and whether it is the first of the log.
    pub(super) fn segment(&self, offset: u64) -> Option<(Arc<LogSegment>, bool)> {
        let segments = self.segments.read();
        let at = segments.partition_point(|segment| segment.end() <= offset);
        segments.get(at).map(|segment| (Arc::clone(segment), at == 0))
    }
}

#[expect(clippy::disallowed_methods, reason = "a writer thread waits for deadlines and measures its commits")]
pub(super) fn now() -> Instant {
    Instant::now()
}
