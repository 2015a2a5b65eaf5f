//! The log of consumer groups in segment files: one physical log for all partitions, so that whatever was submitted
//! during the last sync takes one write and one sync.
//!
//! ```text
//! format      the bytes of a segment
//! window      frames of a file, read through a buffer
//! segment     one file: what is known of it, reading through it, its footer
//! open        the start: headers and footers, the frames of the last segment, what was torn and is cut
//! writer      the one thread that appends: encode, write, sync, show, tell
//! tail        the last records in memory
//! copy        a backup
//! read        threads that read the disk, and remove segments that nobody needs
//! ```
//!
//! An offset is a distance in bytes from the beginning of the log, so it leads to a place in a file without an index.
//!
//! A sync that fails is final for its segment: the system may have dropped what it could not write, and says so once.
//! The next segment begins where the last sync that succeeded ended, and with that says what of the old one counts.

mod copy;
mod format;
#[cfg(any(test, feature = "fuzz"))]
mod fuzz;
mod open;
mod read;
mod segment;
mod synced;
mod tail;
#[cfg(test)]
mod tests;
mod window;
mod writer;

use std::{
    collections::VecDeque,
    fmt, io,
    path::PathBuf,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering::*},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use gateway_core::{
    Commit, Feeder, GroupId, Message, NoRoom, PARTITIONS, Partition, SharedMessage, Shares, Timestamp,
};
use hashbrown::HashMap;
use parking_lot::{Condvar, Mutex, RwLock};

use super::committer::join;
use crate::counters::count;
pub(super) use copy::copy;
use format::GroupCount;
#[cfg(any(test, feature = "fuzz"))]
pub use fuzz::{fuzz_log, fuzz_log_frame};
use read::{LogReadRequest, LogReaders};
use segment::LogSegment;
use store::{
    BoxFuture, DataDir, LogFull, LogRead, LogWatcher, Mark, PartitionBounds, PartitionedLog, ReadLimit,
    StoreError, StoreHealth,
};
use tail::Tails;

/// While the disk fails, one append per this many milliseconds may try whether it takes it.
const PROBE_MILLIS: u64 = 1000;

/// Bytes counted for a waiting message besides its cost.
const OVERHEAD: usize = 64;

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

/// Setup of [`EmbeddedLog`].
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
}

impl Default for LogOptions {
    fn default() -> Self {
        Self {
            segment_bytes: 64 << 20,
            max_waiting_bytes: 64 << 20,
            cache_bytes: 32 << 20,
            lazy_interval: Duration::from_millis(5),
            hook: None,
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

/// Memory that a log takes, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LogMemory {
    /// Messages that wait for the disk.
    pub waiting: usize,
    /// The last messages, kept for who keeps up.
    pub cached: usize,
    /// Index of the records' places in the files.
    pub index: usize,
}

/// A [`PartitionedLog`] in the data directory. Dropping it writes what was submitted.
pub struct EmbeddedLog {
    shared: Arc<LogShared>,
    readers: Arc<LogReaders>,
    writer: Option<JoinHandle<()>>,
    threads: Vec<JoinHandle<()>>,
}

/// State that all threads of a log share.
struct LogShared {
    folder: PathBuf,
    options: LogOptions,
    id: u64,
    inbox: Mutex<LogInbox>,
    wake: Condvar,
    /// Bytes that are submitted and not yet written, by sender.
    shares: Shares,
    /// Messages that were written or refused.
    ended: AtomicU64,
    failing: AtomicBool,
    started: Instant,
    /// Milliseconds after `started` when the last try was let through.
    probed: AtomicU64,
    /// In order; the last is the one that grows, if any does.
    segments: RwLock<VecDeque<Arc<LogSegment>>>,
    tails: Tails,
    /// Messages and bytes that the groups had got where the log ends, and the time at which the last message was received.
    counts: Mutex<LogCounts>,
    /// Before which nothing is needed, by partition.
    trims: Box<[AtomicU64]>,
    /// Bytes of all files.
    bytes: AtomicU64,
    /// If the log begins here, what was before was set aside.
    damaged: u64,
    watcher: OnceLock<Arc<dyn LogWatcher>>,
    /// Held until the last thread has ended.
    _directory: Arc<DataDir>,
}

#[derive(Default)]
struct LogCounts {
    groups: HashMap<GroupId, GroupCount, ahash::RandomState>,
    latest: Timestamp,
}

/// Records submitted and not yet taken.
#[derive(Default)]
struct LogInbox {
    submitted: VecDeque<SubmittedRecord>,
    /// Number of records submitted since the log was opened, the taken ones included.
    count: u64,
    /// Somebody waits for one of them.
    urgent: bool,
    /// Since when there are some.
    since: Option<Instant>,
    closing: bool,
}

struct SubmittedRecord {
    partition: Partition,
    groups: Arc<[GroupId]>,
    message: Arc<SharedMessage>,
    commit: Option<Arc<Commit>>,
    feeder: Feeder,
}

impl SubmittedRecord {
    fn cost(&self) -> usize {
        self.message.cost() + OVERHEAD
    }
}

impl EmbeddedLog {
    /// Opens the log in the folder `log` of the data directory. Blocks on the disk.
    ///
    /// # Errors
    /// [`StoreError::Format`] if a newer version has written it; nothing is changed then.
    pub fn open(directory: &Arc<DataDir>, options: &LogOptions) -> Result<Self, StoreError> {
        let folder = directory.path().join("log");
        let opened = open::open(&folder)?;
        let shared = Arc::new(LogShared {
            folder,
            options: options.clone(),
            id: opened.id,
            inbox: Mutex::default(),
            wake: Condvar::new(),
            shares: Shares::new(options.max_waiting_bytes),
            ended: AtomicU64::new(0),
            failing: AtomicBool::new(false),
            started: now(),
            probed: AtomicU64::new(0),
            segments: RwLock::new(opened.segments),
            tails: Tails::new(opened.end, &opened.ends),
            counts: Mutex::new(LogCounts {
                groups: opened.counts.into_iter().collect(),
                latest: opened.latest,
            }),
            trims: (0..PARTITIONS).map(|_| AtomicU64::new(0)).collect(),
            bytes: AtomicU64::new(opened.bytes),
            damaged: opened.damaged,
            watcher: OnceLock::new(),
            _directory: Arc::clone(directory),
        });
        let readers = Arc::new(LogReaders::default());
        let threads = (0..read::THREADS)
            .map(|_| LogReaders::start(&readers, Arc::clone(&shared)))
            .collect::<Result<_, _>>()?;
        let writer = writer::start(Arc::clone(&shared), Arc::clone(&readers), opened.file, opened.ends)?;
        Ok(Self { shared, readers, writer: Some(writer), threads })
    }

    /// Memory that it takes.
    pub fn memory(&self) -> LogMemory {
        let shared = &self.shared;
        let segments = shared.segments.read();
        LogMemory {
            waiting: shared.shares.total(),
            cached: shared.tails.bytes(),
            index: segments.iter().map(|segment| segment.memory()).sum(),
        }
    }
}

impl LogShared {
    /// Returns whether a new message should be submitted: the disk takes it, or it is time to try again.
    fn admits(&self) -> bool {
        if !self.failing.load(Relaxed) {
            return true;
        }
        let (now, last) = (self.started.elapsed().as_millis() as u64, self.probed.load(Relaxed));
        now >= last + PROBE_MILLIS && self.probed.compare_exchange(last, now, Relaxed, Relaxed).is_ok()
    }

    /// The first segment that ends after `offset`, and whether it is the first of the log.
    fn segment(&self, offset: u64) -> Option<(Arc<LogSegment>, bool)> {
        let segments = self.segments.read();
        let at = segments.partition_point(|segment| segment.end() <= offset);
        segments.get(at).map(|segment| (Arc::clone(segment), at == 0))
    }
}

impl PartitionedLog for EmbeddedLog {
    fn append(
        &self,
        partition: Partition,
        groups: &Arc<[GroupId]>,
        message: &Arc<SharedMessage>,
        commit: Option<Arc<Commit>>,
    ) -> Result<(), LogFull> {
        let shared = &*self.shared;
        let cost = message.cost() + OVERHEAD;
        let feeder = Feeder::from(&**message);
        if let Err(reason) = shared.shares.admit(message.qos, cost, || feeder) {
            count(|c| match reason {
                NoRoom::Full => c.log_refused_waiting.add(1),
                NoRoom::Share => c.log_refused_share.add(1),
                NoRoom::QosZero => c.log_refused_qos0.add(1),
            });
            return Err(LogFull);
        }
        let mut inbox = shared.inbox.lock();
        if inbox.closing {
            drop(inbox);
            count(|c| c.log_refused_waiting.add(1));
            return Err(LogFull);
        }
        shared.shares.take(feeder, cost);
        let first = inbox.since.is_none();
        if first {
            inbox.since = Some(now());
        }
        let urgent = commit.is_some();
        let wake = first || (urgent && !inbox.urgent);
        inbox.urgent |= urgent;
        inbox.count += 1;
        inbox.submitted.push_back(SubmittedRecord {
            partition,
            groups: Arc::clone(groups),
            message: message.without_receipt(),
            commit,
            feeder,
        });
        drop(inbox);
        if wake {
            shared.wake.notify_one();
        }
        Ok(())
    }

    fn admit(&self, message: &Message<'_>) -> Result<(), NoRoom> {
        let shared = &*self.shared;
        shared.shares.admit_message(message)?;
        match !shared.inbox.lock().closing && shared.admits() {
            true => Ok(()),
            false => Err(NoRoom::Full),
        }
    }

    fn submitted(&self) -> u64 {
        self.shared.inbox.lock().count
    }

    fn ended(&self) -> u64 {
        self.shared.ended.load(Acquire)
    }

    fn read(&self, partition: Partition, from: u64, limit: ReadLimit) -> LogRead {
        match self.shared.tails.read(partition, from, limit) {
            Some(slice) => LogRead::Now(slice),
            None => LogRead::Later(self.readers.submit(|reply| LogReadRequest::Read {
                partition,
                from,
                limit,
                reply,
            })),
        }
    }

    fn find(&self, partition: Partition, time: Timestamp) -> BoxFuture<'static, Result<u64, StoreError>> {
        self.readers.submit(|reply| LogReadRequest::Find { partition, time, reply })
    }

    fn bounds(&self, partition: Partition) -> PartitionBounds {
        let end = self.shared.tails.end(partition);
        let first = self.shared.segments.read().front().map(|segment| segment.header.base);
        let first = first.unwrap_or_else(|| self.shared.tails.durable());
        PartitionBounds { start: first.min(end), end }
    }

    fn trim(&self, partition: Partition, before: u64) {
        let shared = &*self.shared;
        shared.tails.trim(partition, before);
        let old = shared.trims[usize::from(partition.0)].fetch_max(before, AcqRel);
        let needed = {
            let segments = shared.segments.read();
            segments.get(1).map(|second| second.header.ends[usize::from(partition.0)])
        };
        if needed.is_some_and(|needed| old < needed && needed <= before) {
            self.readers.remove_segments();
        }
    }

    fn trimmable(&self) -> u64 {
        self.shared.segments.read().back().map_or(0, |segment| segment.header.base)
    }

    fn forget(&self, group: GroupId) {
        self.shared.counts.lock().groups.remove(&group);
    }

    fn marks(&self, group: GroupId) -> Vec<Mark> {
        let shared = &*self.shared;
        let mark = |offset, time, count: GroupCount| Mark {
            offset,
            time,
            messages: count.messages,
            bytes: count.bytes,
        };
        // The writer adds to the counts and to the tails in one step, under this lock.
        let segments = shared.segments.read();
        let counts = shared.counts.lock();
        let all = counts.groups.get(&group).copied();
        let end = mark(shared.tails.durable(), counts.latest, all.unwrap_or_default());
        drop(counts);
        let mut marks: Vec<Mark> = segments
            .iter()
            // One that was forgotten has nothing anywhere.
            .map(|segment| {
                let count = all.map_or_else(GroupCount::default, |_| segment.count(group));
                mark(segment.header.base, segment.header.time, count)
            })
            .collect();
        marks.push(end);
        marks
    }

    fn time_at(&self, offset: u64) -> Option<Timestamp> {
        if offset >= self.shared.tails.durable() {
            return Some(self.shared.counts.lock().latest);
        }
        let segments = self.shared.segments.read();
        let behind = segments.partition_point(|segment| segment.header.base <= offset);
        segments.get(behind.saturating_sub(1)).map(|segment| segment.header.time)
    }

    fn bytes(&self) -> u64 {
        self.shared.bytes.load(Relaxed)
    }

    fn id(&self) -> u64 {
        self.shared.id
    }

    fn watch(&self, watcher: Arc<dyn LogWatcher>) {
        let _ = self.shared.watcher.set(watcher);
    }

    fn health(&self) -> StoreHealth {
        if self.shared.failing.load(Relaxed) { StoreHealth::Failing } else { StoreHealth::Sound }
    }
}

impl Drop for EmbeddedLog {
    /// Waits for the writer to finish what it was given and for the readers, but not for the current thread.
    fn drop(&mut self) {
        self.shared.inbox.lock().closing = true;
        self.shared.wake.notify_one();
        if let Some(writer) = self.writer.take() {
            join(writer);
        }
        self.readers.close();
        for thread in self.threads.drain(..) {
            join(thread);
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "a writer thread waits for deadlines and measures its commits")]
fn now() -> Instant {
    Instant::now()
}
