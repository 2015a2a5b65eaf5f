//! Threads that read the disk, and remove segments that nobody needs.

use std::{
    collections::VecDeque,
    io,
    sync::{Arc, atomic::Ordering::*},
    thread::JoinHandle,
};

use gateway_core::{GroupId, LogRecord, PARTITIONS, Partition, Timestamp};
use parking_lot::{Condvar, Mutex};
use tokio::sync::oneshot;

use super::{
    format::LogFrame,
    segment::{LogSegment, RecordRun},
    shared::LogShared,
    window::FileWindow,
};
use crate::counters::count;
use store::{BoxFuture, MissingReason, MissingRecords, ReadLimit, Slice, StoreError};

pub(super) const THREADS: usize = 2;

/// Reads that wait; one more fails at once.
const MAX_WAITING: usize = 4096;

/// Most records of one read, whatever it asks for.
const MAX_RECORDS: usize = 10_000;
const MAX_BYTES: usize = 16 << 20;

/// Segments that one read looks through; it may find nothing in them and say where to go on.
const MAX_SEGMENTS: usize = 32;

/// Records that are closer together than this on the average are read with what is between them.
const DENSE: u64 = 4 << 10;

/// Records looked at in one step of a search.
const STEP: usize = 4096;

pub(super) type ReplyTo<T> = oneshot::Sender<Result<T, StoreError>>;

pub(super) enum LogReadRequest {
    Read { partition: Partition, from: u64, limit: ReadLimit, reply: ReplyTo<Slice> },
    Find { partition: Partition, time: Timestamp, reply: ReplyTo<u64> },
}

/// Work of the reader threads.
#[derive(Default)]
pub(super) struct LogReaders {
    work: Mutex<ReadRequests>,
    wake: Condvar,
}

#[derive(Default)]
struct ReadRequests {
    waiting: VecDeque<LogReadRequest>,
    /// Segments may be free.
    remove: bool,
    closed: bool,
}

impl LogReaders {
    pub(super) fn start(readers: &Arc<Self>, shared: Arc<LogShared>) -> Result<JoinHandle<()>, StoreError> {
        let readers = Arc::clone(readers);
        std::thread::Builder::new()
            .name("log-reader".to_owned())
            .spawn(move || readers.run(&shared))
            .map_err(|e| StoreError::Unavailable(format!("cannot start a reader thread: {e}")))
    }

    /// Hands over a request. The answer does not depend on this being polled.
    pub(super) fn submit<T: Send + 'static>(
        &self,
        request: impl FnOnce(ReplyTo<T>) -> LogReadRequest,
    ) -> BoxFuture<'static, Result<T, StoreError>> {
        let (reply, answer) = oneshot::channel();
        let mut work = self.work.lock();
        if work.closed || work.waiting.len() >= MAX_WAITING {
            drop(work);
            count(|c| c.log_refused_reads.add(1));
            let error = StoreError::Unavailable("too many reads of the log wait".to_owned());
            return Box::pin(async { Err(error) });
        }
        work.waiting.push_back(request(reply));
        drop(work);
        self.wake.notify_one();
        Box::pin(async move { answer.await.map_err(|_| StoreError::closed())? })
    }

    /// Looks soon whether segments can be removed.
    pub(super) fn remove_segments(&self) {
        self.work.lock().remove = true;
        self.wake.notify_one();
    }

    /// Lets the threads end once they have answered what is there.
    pub(super) fn close(&self) {
        self.work.lock().closed = true;
        self.wake.notify_all();
    }

    fn run(&self, shared: &LogShared) {
        loop {
            let mut work = self.work.lock();
            let request = loop {
                if std::mem::take(&mut work.remove) {
                    break None;
                }
                if let Some(request) = work.waiting.pop_front() {
                    break Some(request);
                }
                if work.closed {
                    return;
                }
                self.wake.wait(&mut work);
            };
            drop(work);
            match request {
                None => shared.remove_segments(),
                // Nobody waits for a request whose future was dropped.
                Some(LogReadRequest::Read { partition, from, limit, reply }) if !reply.is_closed() => {
                    let _ = reply.send(shared.read(partition, from, limit).map_err(failed));
                }
                Some(LogReadRequest::Find { partition, time, reply }) if !reply.is_closed() => {
                    let _ = reply.send(shared.find(partition, time).map_err(failed));
                }
                Some(_) => {}
            }
        }
    }
}

fn failed(error: io::Error) -> StoreError {
    count(|c| c.log_errors_read.add(1));
    gateway_core::error_limited!(%error, "cannot read the log");
    StoreError::Unavailable(format!("log: {error}"))
}

impl LogShared {
    /// Records of the partition from `from` on.
    fn read(&self, partition: Partition, from: u64, limit: ReadLimit) -> io::Result<Slice> {
        let mut reader = SegmentReader {
            partition,
            records: limit.records.clamp(1, MAX_RECORDS),
            bytes: limit.bytes.min(MAX_BYTES),
            slice: Slice { next: from, ..Slice::default() },
            known: Arc::from([]),
        };
        for _ in 0..MAX_SEGMENTS {
            let (end, durable) = (self.tails.end(partition), self.tails.durable());
            let Some((segment, first)) = self.segment(reader.slice.next) else {
                // Nothing is there after it, but something may have been.
                if reader.slice.next >= end || reader.misses(MissingReason::Damaged, end) {
                    reader.slice.next = reader.slice.next.max(durable);
                }
                break;
            };
            let trimmed = first && segment.header.base != self.damaged;
            match reader.read(&segment, trimmed) {
                Ok(true) => {}
                Ok(false) => break,
                // Trimmed meanwhile; the next look finds another.
                Err(error) if error.kind() == io::ErrorKind::NotFound && self.is_gone(&segment) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(reader.slice)
    }

    /// The place of the first record received at `time` or later.
    fn find(&self, partition: Partition, time: Timestamp) -> io::Result<u64> {
        let mut from = 0;
        while let Some((segment, _)) = self.segment(from) {
            from = from.max(segment.header.base);
            let latest = segment.content().latest;
            if latest.is_some_and(|latest| latest < time) {
                from = segment.end();
                continue;
            }
            match find_in(&segment, partition, time, &mut from) {
                Ok(Some(place)) => return Ok(place),
                Ok(None) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound && self.is_gone(&segment) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(self.tails.end(partition))
    }

    fn is_gone(&self, segment: &Arc<LogSegment>) -> bool {
        !self.segments.read().iter().any(|known| Arc::ptr_eq(known, segment))
    }

    /// Removes segments at the front that no partition needs.
    fn remove_segments(&self) {
        loop {
            let removed = {
                let mut segments = self.segments.write();
                let needed = |second: &Arc<LogSegment>| {
                    let ends = second.header.ends.iter();
                    ends.zip(&self.trims).any(|(end, trim)| trim.load(Acquire) < *end)
                };
                if segments.get(1).is_none_or(needed) {
                    return;
                }
                segments.pop_front()
            };
            let Some(segment) = removed else { return };
            let bytes = std::fs::metadata(&segment.path).map_or(0, |file| file.len());
            if let Err(error) = std::fs::remove_file(&segment.path) {
                // The file is found again at the next start.
                gateway_core::warn_limited!(%error, segment = %segment.path.display(), "cannot remove a segment");
            }
            self.bytes.fetch_sub(bytes, Relaxed);
            if let Some(ledger) = &self.ledger {
                ledger.removed(segment.header.base);
            }
            count(|c| c.log_segments_removed.add(1));
        }
    }
}

/// One read.
struct SegmentReader {
    partition: Partition,
    /// Number of records that may still be added.
    records: usize,
    bytes: usize,
    slice: Slice,
    known: Arc<[GroupId]>,
}

impl SegmentReader {
    /// Reads on in this segment; what is missing before it was `trimmed`, or else damaged. True if all in it was read and the
    /// next may follow.
    fn read(&mut self, segment: &Arc<LogSegment>, trimmed: bool) -> io::Result<bool> {
        let header = &segment.header;
        if self.slice.next < header.base {
            // Between segments, or before the first: it matters if something of the partition was there.
            let until = header.ends[usize::from(self.partition.0) % PARTITIONS];
            let reason = if trimmed { MissingReason::Trimmed } else { MissingReason::Damaged };
            if until > self.slice.next && !self.misses(reason, until) {
                return Ok(false);
            }
            self.slice.next = header.base;
        }
        let file = segment.open()?;
        let RecordRun { places, holes, end } =
            segment.stretch(&file, self.partition, self.slice.next, self.records)?;
        let whole = places.len() < self.records;
        let last = places.last().map_or(0, |&last| u64::from(last));
        let distance = places.first().map_or(0, |&first| last - u64::from(first));
        let dense = places.len() > 1 && distance / (places.len() as u64 - 1) < DENSE;
        let mut window = FileWindow::new(&file, segment.place(end));
        let mut holes = holes.into_iter().peekable();
        for place in places {
            let offset = segment.offset(u64::from(place));
            while let Some((_, until)) = holes.next_if(|(_, until)| *until <= offset) {
                if !self.misses(MissingReason::Damaged, until) {
                    return Ok(false);
                }
            }
            let frame = window.frame(u64::from(place), offset, dense)?;
            let record = match frame {
                Some((LogFrame::Record(record), _)) if record.partition == self.partition => {
                    record.decode(offset, &mut self.known)
                }
                _ => None,
            };
            let Some(record) = record else {
                count(|c| c.log_damaged.add(1));
                gateway_core::error_limited!(segment = %segment.path.display(), offset, "a record of the log is damaged");
                if !self.misses(MissingReason::Damaged, offset + 1) {
                    return Ok(false);
                }
                continue;
            };
            if !self.takes(record) {
                return Ok(false);
            }
        }
        if !whole {
            return Ok(self.records > 0);
        }
        for (_, until) in holes {
            if !self.misses(MissingReason::Damaged, until) {
                return Ok(false);
            }
        }
        self.slice.next = self.slice.next.max(end);
        Ok(true)
    }

    fn takes(&mut self, record: LogRecord) -> bool {
        let cost = record.message.cost();
        if !self.slice.records.is_empty() && cost > self.bytes {
            self.records = 0;
            return false;
        }
        self.bytes = self.bytes.saturating_sub(cost);
        self.slice.next = record.offset + 1;
        self.slice.records.push(record);
        self.records -= 1;
        self.records > 0
    }

    /// Notes that something is missing up to `until`; false if that must wait for the next read.
    fn misses(&mut self, reason: MissingReason, until: u64) -> bool {
        let another = self.slice.missing.is_some_and(|missing| missing.reason != reason);
        if !self.slice.records.is_empty() || another {
            return false;
        }
        self.slice.missing = Some(MissingRecords { reason, until });
        self.slice.next = self.slice.next.max(until);
        true
    }
}

/// Looks for the first record received at `time` or later; without one, sets `from` to the segment's end.
fn find_in(
    segment: &LogSegment,
    partition: Partition,
    time: Timestamp,
    from: &mut u64,
) -> io::Result<Option<u64>> {
    let file = segment.open()?;
    loop {
        let RecordRun { places, end, .. } = segment.stretch(&file, partition, *from, STEP)?;
        let mut window = FileWindow::new(&file, segment.place(end));
        for &place in &places {
            let offset = segment.offset(u64::from(place));
            if let Some((LogFrame::Record(record), _)) = window.frame(u64::from(place), offset, false)?
                && record.received().is_some_and(|received| received >= time)
            {
                return Ok(Some(offset));
            }
            *from = offset + 1;
        }
        if places.len() < STEP {
            *from = end.max(*from);
            return Ok(None);
        }
    }
}
