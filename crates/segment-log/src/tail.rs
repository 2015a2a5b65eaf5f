//! The end of the log in memory: who keeps up reads no disk.

use std::{
    collections::VecDeque,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering::*},
};

use gateway_core::{LogRecord, PARTITIONS, Partition};
use parking_lot::Mutex;

use store::{ReadLimit, Slice};

/// Bytes counted for a record besides its message: itself and its part of the queues.
const OVERHEAD: usize = 64;

/// Less than any record counts.
const LEAST: usize = 192;

/// An emptied queue keeps room for this many records.
const KEPT: usize = 256;

/// The last records of all partitions.
pub(super) struct Tails {
    partitions: Box<[Mutex<LogTail>]>,
    bytes: AtomicUsize,
    /// All below is in the tails, or was.
    durable: AtomicU64,
}

#[derive(Default)]
struct LogTail {
    records: VecDeque<LogRecord>,
    /// All records from this place on are in `records`.
    complete: u64,
    /// One more than the offset of the last record.
    end: u64,
}

/// The order in which records leave. The writer's.
#[derive(Default)]
pub(super) struct LeavingOrder(VecDeque<(Partition, u64)>);

impl Tails {
    /// Nothing is in memory of a log that ends at `durable`, and its partitions at `ends`.
    pub(super) fn new(durable: u64, ends: &[u64]) -> Self {
        let tail = |partition: usize| {
            let end = ends.get(partition).copied().unwrap_or(0);
            Mutex::new(LogTail { records: VecDeque::new(), complete: end, end })
        };
        Self {
            partitions: (0..PARTITIONS).map(tail).collect(),
            bytes: AtomicUsize::new(0),
            durable: AtomicU64::new(durable),
        }
    }

    /// Adds records that are durable, each after all others, and forgets the oldest beyond `limit` bytes. The log now
    /// ends at `durable`.
    pub(super) fn add(
        &self,
        records: &[(Partition, LogRecord)],
        durable: u64,
        limit: usize,
        order: &mut LeavingOrder,
    ) {
        for (partition, record) in records {
            let cost = cost(record);
            let mut tail = self.tail(*partition).lock();
            tail.end = record.offset + 1;
            tail.records.push_back(record.clone());
            drop(tail);
            self.bytes.fetch_add(cost, Relaxed);
            order.0.push_back((*partition, record.offset));
        }
        // A reader that sees the end sees all records before it.
        self.durable.store(durable, Release);
        // Trimmed records are gone, but still in the order.
        let most = (limit / LEAST).max(KEPT);
        while (self.bytes.load(Relaxed) > limit || order.0.len() > most)
            && let Some((partition, offset)) = order.0.pop_front()
        {
            self.tail(partition).lock().forget(offset, &self.bytes);
        }
        for _ in 0..2 * records.len() {
            let Some(&(partition, offset)) = order.0.front() else { break };
            if self.tail(partition).lock().complete <= offset {
                break;
            }
            order.0.pop_front();
        }
        if order.0.capacity() > 2 * KEPT && order.0.len() < order.0.capacity() / 8 {
            order.0.shrink_to(KEPT);
        }
    }

    /// Returns the place at which the log ends.
    pub(super) fn durable(&self) -> u64 {
        self.durable.load(Acquire)
    }

    /// One more than the offset of the last record of the partition.
    pub(super) fn end(&self, partition: Partition) -> u64 {
        self.tail(partition).lock().end
    }

    /// Bytes that are counted.
    pub(super) fn bytes(&self) -> usize {
        self.bytes.load(Relaxed)
    }

    /// Nothing of the partition before this place is needed here.
    pub(super) fn trim(&self, partition: Partition, before: u64) {
        if let Some(last) = before.checked_sub(1) {
            self.tail(partition).lock().forget(last, &self.bytes);
        }
    }

    /// Records from `from` on, if all of them are here.
    pub(super) fn read(&self, partition: Partition, from: u64, limit: ReadLimit) -> Option<Slice> {
        let durable = self.durable();
        let tail = self.tail(partition).lock();
        if from < tail.complete {
            return None;
        }
        let start = tail.records.partition_point(|record| record.offset < from);
        let mut slice = Slice { next: durable.max(from), ..Slice::default() };
        let mut bytes = 0;
        for record in tail.records.range(start..) {
            bytes += record.message.cost();
            let full = slice.records.len() >= limit.records.max(1) || bytes > limit.bytes;
            if full && !slice.records.is_empty() {
                slice.next = slice.records.last().map_or(from, |record| record.offset + 1);
                return Some(slice);
            }
            if slice.records.is_empty() {
                slice.records.reserve(limit.records.min(tail.records.len() - start));
            }
            slice.records.push(record.clone());
            // The record may have come after the end was looked at.
            slice.next = slice.next.max(record.offset + 1);
        }
        Some(slice)
    }

    fn tail(&self, partition: Partition) -> &Mutex<LogTail> {
        &self.partitions[usize::from(partition.0)]
    }
}

impl LogTail {
    /// Forgets records up to and with that at `last`.
    fn forget(&mut self, last: u64, bytes: &AtomicUsize) {
        let mut freed = 0;
        while self.records.front().is_some_and(|record| record.offset <= last) {
            freed += self.records.pop_front().map_or(0, |record| cost(&record));
        }
        // Not more: what comes later must not be taken for something that is on the disk only.
        self.complete = self.complete.max(last.saturating_add(1).min(self.end));
        if self.records.is_empty() && self.records.capacity() > KEPT {
            self.records.shrink_to(KEPT);
        }
        bytes.fetch_sub(freed, Relaxed);
    }
}

fn cost(record: &LogRecord) -> usize {
    record.message.cost() + OVERHEAD
}
