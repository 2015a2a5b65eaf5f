//! The log of consumer groups in segment files: one physical log for all partitions, so that whatever was submitted
//! during the last sync takes one write and one sync.
//!
//! ```text
//! format      the bytes of a segment
//! shared      what all threads share
//! window      frames of a file, read through a buffer
//! segment     one file: what is known of it, reading through it, its footer
//! open        the start: headers and footers, the frames of the last segment, what was torn and is cut
//! writer      the one thread that appends: encode, write, sync, show, tell
//! tail        the last records in memory
//! copy        a backup
//! shipped     the log in the ledger of a cluster, and the copy made of it
//! read        threads that read the disk, and remove segments that nobody needs
//! ```
//!
//! An offset is a distance in bytes from the beginning of the log, so it leads to a place in a file without an index.
//!
//! A sync that fails is final for its segment: the system may have dropped what it could not write, and says so once.
//! The next segment begins where the last sync that succeeded ended, and with that says what of the old one counts.

mod copy;
pub mod counters;
mod format;
#[cfg(any(test, feature = "fuzz"))]
mod fuzz;
mod open;
mod read;
mod segment;
mod shared;
mod shipped;
mod synced;
mod tail;
#[cfg(test)]
mod tests;
mod window;
mod writer;

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering::*},
    },
    thread::JoinHandle,
};

use gateway_core::{
    Commit, Feeder, GroupId, Message, NoRoom, PARTITIONS, Partition, SharedMessage, Shares, Timestamp,
};
use parking_lot::{Condvar, Mutex, RwLock};

use crate::counters::count;
pub use copy::copy;
use format::GroupCount;
#[cfg(any(test, feature = "fuzz"))]
pub use fuzz::{fuzz_log, fuzz_log_frame};
use read::{LogReadRequest, LogReaders};
use shared::{LogCounts, LogShared, OVERHEAD, SubmittedRecord, now};
pub use shared::{LogHook, LogOptions, LogStep};
use shipped::LogLedger;
pub use shipped::{LogCopy, export, has_segments};
use store::{
    BoxFuture, DataDir, LogFull, LogRead, LogWatcher, Mark, PartitionBounds, PartitionedLog, ReadLimit,
    StoreError, StoreHealth, join,
};
use tail::Tails;

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

impl EmbeddedLog {
    /// The home is another gateway's, and whoever could be told of an answer is gone: what waits is refused, and so is all that comes.
    pub fn give_up(&self) {
        self.shared.inbox.lock().given_up = true;
        self.shared.wake.notify_one();
    }

    /// Opens the log in the folder `log` of the data directory. Blocks on the disk.
    ///
    /// # Errors
    /// [`StoreError::Format`] if a newer version has written it; nothing is changed then.
    pub fn open(directory: &Arc<DataDir>, options: &LogOptions) -> Result<Self, StoreError> {
        let folder = directory.path().join("log");
        let opened = open::open(&folder)?;
        let ledger = match &options.shipping {
            Some(shipping) => Some(
                LogLedger::open(&folder, opened.id, Arc::clone(shipping))
                    .map_err(|e| StoreError::Unavailable(format!("log {}: {e}", folder.display())))?,
            ),
            None => None,
        };
        let shared = Arc::new(LogShared {
            ledger,
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
