//! The thread that appends.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt as _,
    sync::{Arc, atomic::Ordering::*},
    thread::JoinHandle,
    time::Duration,
};

use gateway_core::{GroupId, LogRecord, Partition, Timestamp};

use super::{
    format::{self, GroupCount, SegmentHeader},
    read::LogReaders,
    segment::{self, LogSegment},
    shared::{LogShared, LogStep, SubmittedRecord, now},
    synced::SyncedMark,
    tail::LeavingOrder,
};
use crate::counters::count;
use ledger::{RECORD_BYTES, Shipped};
use store::StoreError;

/// Bytes of messages in one write; what is more waits for the next.
const BATCH_BYTES: usize = 8 << 20;

/// Buffers do not stay larger than this.
const KEPT_BYTES: usize = 16 << 20;

struct LogWriter {
    shared: Arc<LogShared>,
    readers: Arc<LogReaders>,
    /// The segment that grows.
    active: Option<Active>,
    /// One more than the offset of the last durable record of each partition.
    ends: Box<[u64]>,
    order: LeavingOrder,
    buffer: Vec<u8>,
    records: Vec<(Partition, LogRecord)>,
    places: Vec<(Partition, u32)>,
    /// None if there can be no such file: then a log that is cut short looks torn.
    synced: Option<SyncedMark>,
    /// The home belongs to another process.
    lost: bool,
}

struct Active {
    file: File,
    segment: Arc<LogSegment>,
    /// Place in the file where the next batch goes: all before it is synced.
    place: u64,
}

/// Between two tries to write what the ledger has.
const PAUSE: Duration = Duration::from_millis(100);

/// Why a batch was not written.
enum WriteFailure {
    /// The disk took no bytes.
    Write(io::Error),
    /// The bytes that the disk took may be lost.
    Sync(io::Error),
    /// The home belongs to another process: nothing was written.
    Lost,
}

/// Starts the thread. `file` is that of the last segment, if it goes on.
pub(super) fn start(
    shared: Arc<LogShared>,
    readers: Arc<LogReaders>,
    file: Option<File>,
    ends: Box<[u64]>,
) -> Result<JoinHandle<()>, StoreError> {
    let last = shared.segments.read().back().map(Arc::clone);
    let active = file.zip(last).map(|(file, segment)| {
        let place = segment.place(segment.end());
        Active { file, segment, place }
    });
    let synced = SyncedMark::open(&shared.folder, shared.id)
        .inspect_err(|error| tracing::debug!(%error, "the end of the log is not noted"))
        .ok();
    let writer = LogWriter {
        shared,
        readers,
        active,
        ends,
        order: LeavingOrder::default(),
        buffer: Vec::new(),
        records: Vec::new(),
        places: Vec::new(),
        synced,
        lost: false,
    };
    std::thread::Builder::new()
        .name("log-writer".to_owned())
        .spawn(move || writer.run())
        .map_err(|e| StoreError::Unavailable(format!("cannot start the thread log-writer: {e}")))
}

impl LogWriter {
    fn run(mut self) {
        let mut taken = std::collections::VecDeque::new();
        let most = if self.shared.ledger.is_some() { RECORD_BYTES } else { BATCH_BYTES };
        loop {
            let closing = self.wait(&mut taken);
            let mut chunk = Vec::new();
            while !taken.is_empty() {
                let mut bytes = 0;
                while let Some(next) = taken.front()
                    && (chunk.is_empty() || bytes + next.cost() <= most)
                {
                    bytes += next.cost();
                    chunk.extend(taken.pop_front());
                }
                if self.shared.ledger.is_some() && !taken.is_empty() {
                    count(|c| c.log_full_records.add(1));
                }
                self.commit(&chunk);
                if self.lost && !self.wait_until_given_up() {
                    // Nobody is told anything: what waits may be in the ledger or not.
                    std::mem::forget((chunk, taken));
                    return;
                }
                self.shared.ended.fetch_add(chunk.len() as u64, Release);
                for written in &chunk {
                    self.shared.shares.give_back(written.feeder, written.cost());
                }
                self.tell(&mut chunk);
            }
            if taken.capacity() > 1 << 16 {
                taken.shrink_to(1 << 12);
            }
            if closing {
                return self.close();
            }
        }
    }

    /// Waits until nobody waits for anything any more; false if the log is closed before.
    fn wait_until_given_up(&self) -> bool {
        let mut inbox = self.shared.inbox.lock();
        while !inbox.closing && !inbox.given_up {
            self.shared.wake.wait(&mut inbox);
        }
        inbox.given_up
    }

    /// Waits for something to do and takes it. True when the log is being closed.
    fn wait(&self, taken: &mut std::collections::VecDeque<SubmittedRecord>) -> bool {
        let mut inbox = self.shared.inbox.lock();
        while !inbox.closing && !inbox.urgent {
            let Some(since) = inbox.since else {
                self.shared.wake.wait(&mut inbox);
                continue;
            };
            let due = since + self.shared.options.lazy_interval;
            if now() >= due || self.shared.wake.wait_until(&mut inbox, due).timed_out() {
                break;
            }
        }
        std::mem::swap(&mut inbox.submitted, taken);
        inbox.urgent = false;
        inbox.since = None;
        inbox.closing
    }

    /// Makes a batch durable, and shows it. `self.records` are what it wrote; none if it could not.
    fn commit(&mut self, chunk: &[SubmittedRecord]) {
        let begun = now();
        let mut result = self.attempt(chunk);
        if let Err(WriteFailure::Sync(error)) = &result {
            count(|c| c.log_errors_sync.add(1));
            gateway_core::error_limited!(%error, "the log could not be synced, what was not is written again");
            // Nothing is known of what was written: it goes into another segment.
            result = self.attempt(chunk);
        }
        let took = begun.elapsed();
        count(|c| {
            c.log_commits.add(1);
            c.log_commit_micros.add(took.as_micros() as u64);
        });
        match result {
            Ok(()) => {
                count(|c| c.log_appended.add(chunk.len() as u64));
                if self.shared.failing.swap(false, Relaxed) {
                    tracing::info!("the log takes messages again");
                }
            }
            Err(WriteFailure::Lost) => {
                self.records.clear();
                self.lost = true;
            }
            Err(WriteFailure::Write(error) | WriteFailure::Sync(error)) => {
                self.records.clear();
                count(|c| {
                    c.log_errors_write.add(1);
                    c.log_refused_disk.add(chunk.len() as u64);
                });
                if !self.shared.failing.swap(true, Relaxed) {
                    gateway_core::error_limited!(%error, "the log cannot be written, messages for groups are refused");
                }
            }
        }
    }

    fn attempt(&mut self, chunk: &[SubmittedRecord]) -> Result<(), WriteFailure> {
        self.roll_if_full(chunk).map_err(WriteFailure::Write)?;
        let Some(active) = &self.active else {
            return Err(WriteFailure::Write(io::ErrorKind::NotFound.into()));
        };
        let segment = Arc::clone(&active.segment);
        self.encode(chunk, segment.offset(active.place));
        match self.write() {
            Ok(()) => {}
            Err(failure) => {
                self.give_up(matches!(failure, WriteFailure::Sync(_)));
                return Err(failure);
            }
        }
        self.show(chunk, &segment);
        Ok(())
    }

    /// Puts the batch into the buffer, and what it will be when it is durable into `records`.
    fn encode(&mut self, chunk: &[SubmittedRecord], start: u64) {
        self.buffer.clear();
        self.records.clear();
        format::put_batch(start, &mut self.buffer);
        for submitted in chunk {
            let SubmittedRecord { partition, groups, message, .. } = submitted;
            let offset = start + self.buffer.len() as u64;
            let cost = u32::try_from(message.cost()).unwrap_or(u32::MAX);
            format::put_record(*partition, groups, cost, message, offset, &mut self.buffer);
            let record = LogRecord { offset, groups: Arc::clone(groups), message: Arc::clone(message) };
            self.records.push((*partition, record));
        }
    }

    fn write(&mut self) -> Result<(), WriteFailure> {
        let Some(active) = &self.active else { return Ok(()) };
        let (base, place) = (active.segment.header.base, active.place);
        let Some(ledger) = &self.shared.ledger else { return self.write_here(active) };
        let position = match ledger.ship(base, place, &self.buffer) {
            Shipped::Done(position) => position,
            Shipped::Refused => return Err(WriteFailure::Write(io::ErrorKind::FileTooLarge.into())),
            Shipped::Lost => return Err(WriteFailure::Lost),
        };
        // The ledger has it: there is no other end than that it is written here, too.
        while let Err(failure) = self.write_here(active) {
            let WriteFailure::Write(error) = failure else { return Err(failure) };
            count(|c| c.log_errors_write.add(1));
            gateway_core::error_limited!(%error, "the ledger has a batch that the log cannot write, it is tried again");
            std::thread::sleep(PAUSE);
        }
        ledger.note(position, base, place + self.buffer.len() as u64);
        Ok(())
    }

    fn write_here(&self, active: &Active) -> Result<(), WriteFailure> {
        let hook = |step| self.shared.hook(step);
        hook(LogStep::Write)
            .and_then(|()| active.file.write_all_at(&self.buffer, active.place))
            .map_err(WriteFailure::Write)?;
        hook(LogStep::Sync).and_then(|()| active.file.sync_data()).map_err(WriteFailure::Sync)
    }

    /// Shows the records just written to readers: they are durable.
    fn show(&mut self, chunk: &[SubmittedRecord], segment: &Arc<LogSegment>) {
        let Some(active) = &mut self.active else { return };
        self.places.clear();
        let mut latest = Timestamp(0);
        for (partition, record) in &self.records {
            self.ends[usize::from(partition.0)] = record.offset + 1;
            // A segment ends long before its places do not fit.
            self.places.push((*partition, segment.place(record.offset) as u32));
            latest = latest.max(record.message.received);
        }
        active.place += self.buffer.len() as u64;
        let end = segment.offset(active.place);
        // A failure leaves an older place there.
        let _ = self.synced.as_ref().map(|synced| synced.note(end));
        segment.add(&self.places, end, latest);
        let shared = &self.shared;
        shared.bytes.fetch_add(self.buffer.len() as u64, Relaxed);
        let mut counts = shared.counts.lock();
        counts.latest = counts.latest.max(latest);
        let mut at = 0;
        while let Some(first) = chunk.get(at) {
            // Most have the groups of the one before.
            let run = chunk[at..].iter().take_while(|next| Arc::ptr_eq(&next.groups, &first.groups));
            let (mut messages, mut bytes) = (0, 0);
            for submitted in run {
                messages += 1;
                bytes += submitted.message.cost() as u64;
            }
            for group in &*first.groups {
                let count = counts.groups.entry(*group).or_default();
                count.messages += messages;
                count.bytes += bytes;
            }
            at += messages as usize;
        }
        shared.tails.add(&self.records, end, shared.options.cache_bytes, &mut self.order);
        drop(counts);
        if self.buffer.capacity() > KEPT_BYTES {
            self.buffer = Vec::new();
        }
    }

    /// Ends what waited for the batch, and tells who watches.
    fn tell(&mut self, chunk: &mut Vec<SubmittedRecord>) {
        let written = !self.records.is_empty();
        for commit in chunk.drain(..).filter_map(|submitted| submitted.commit) {
            if written { commit.done() } else { commit.refuse() }
        }
        if written && let Some(watcher) = self.shared.watcher.get() {
            watcher.appended(&self.records);
        }
        self.records.clear();
    }

    /// After a failure: whatever is after the last sync is no part of the segment.
    fn give_up(&mut self, lost: bool) {
        let Some(active) = &self.active else { return };
        let cut = active.file.set_len(active.place);
        if lost || cut.is_err() {
            // The next segment's base says so, if the file cannot be cut.
            self.active = None;
        }
    }

    /// Begins another segment if there is none or the last is full.
    fn roll_if_full(&mut self, chunk: &[SubmittedRecord]) -> io::Result<()> {
        if let Some(active) = &self.active {
            if active.place < self.shared.options.segment_bytes {
                return Ok(());
            }
            self.seal();
        }
        let shared = Arc::clone(&self.shared);
        let base = shared.tails.durable();
        if let Some(useless) = shared.segments.write().pop_back_if(|segment| segment.header.base == base) {
            // Nothing in it was ever synced.
            let _ = std::fs::remove_file(&useless.path);
            shared.bytes.fetch_sub(useless.head, Relaxed);
        }
        let (counts, latest) = {
            let shared = shared.counts.lock();
            let mut counts: Vec<(GroupId, GroupCount)> =
                shared.groups.iter().map(|(group, count)| (*group, *count)).collect();
            counts.sort_unstable_by_key(|(group, _)| *group);
            (counts, shared.latest)
        };
        let header = SegmentHeader {
            log: shared.id,
            base,
            // A dead letter comes again with the time at which it was received first: what is before it is not that old.
            time: chunk.first().map_or(latest, |first| first.message.received.max(latest)),
            ends: self.ends.clone(),
            counts: counts.into(),
        };
        shared.hook(LogStep::Create)?;
        let (file, head) = segment::create(&shared.folder, &header)?;
        if let Some(ledger) = &shared.ledger {
            ledger.begun(base, &header.encode());
        }
        let segment = Arc::new(LogSegment::new(segment::path(&shared.folder, base), header, head));
        shared.bytes.fetch_add(head, Relaxed);
        shared.segments.write().push_back(Arc::clone(&segment));
        self.active = Some(Active { file, segment, place: head });
        // The segment before may have been kept only because it was the last.
        self.readers.remove_segments();
        Ok(())
    }

    /// Ends the segment that grows. Its footer need not be synced: without one it is read through.
    fn seal(&mut self) {
        let Some(active) = self.active.take() else { return };
        let Some(footer) = active.segment.footer() else { return };
        let written =
            self.shared.hook(LogStep::Write).and_then(|()| active.file.write_all_at(&footer, active.place));
        match written {
            Ok(()) => {
                self.shared.bytes.fetch_add(footer.len() as u64, Relaxed);
                active.segment.seal();
            }
            Err(error) => {
                let _ = active.file.set_len(active.place);
                tracing::debug!(%error, "a segment has no footer");
            }
        }
    }

    /// Notes that all that is there was synced: what is damaged later was not just torn.
    fn close(&mut self) {
        // With a ledger, what is there is what the ledger has.
        let Some(active) = self.active.as_mut().filter(|_| self.shared.ledger.is_none()) else { return };
        self.buffer.clear();
        format::put_batch(active.segment.offset(active.place), &mut self.buffer);
        if self.write().is_err() {
            return self.give_up(false);
        }
        let (Some(active), Some(synced)) = (&self.active, &self.synced) else { return };
        let end = active.segment.offset(active.place + self.buffer.len() as u64);
        let _ = synced.note(end).and_then(|()| synced.sync());
    }
}

impl LogShared {
    fn hook(&self, step: LogStep) -> io::Result<()> {
        self.options.hook.as_ref().map_or(Ok(()), |hook| hook(step))
    }
}
