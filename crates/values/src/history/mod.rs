//! Every message of the topics that a rule names, with write-behind: queued in memory by the shards, written to the
//! store in batches.
//!
//! The queue is bounded in messages and bytes, those under way included, and devices share it: while it is short of room,
//! QoS 0 goes first, and no device holds more than its share ([`Shares`]). A message without room is not kept
//! (and counted): that costs a publisher nothing, leaves one hole from the moment the queue was full until the store is
//! back, and the newest value of every topic is among the latest values anyway. A process that is killed loses what the
//! queue holds. Writes are idempotent, so a batch that failed or hung is written again as it is, until the store takes
//! it.

#[cfg(test)]
mod tests;

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use gateway_core::{Effort, Feeder, Message, NoRoom, OriginKind, Shares, Timestamp, clock, matches};
use parking_lot::Mutex;
use tokio::{
    sync::{Mutex as AsyncMutex, watch},
    time::{sleep, timeout},
};

use super::{ReadWatch, stripe::properties_size};
use crate::counters::count;
use store::{
    HistoryEntry, HistoryPage, HistoryQuery, HistoryRemoval, HistoryStore, LatestValue, Recorder, StoreError,
    VersionClock, bucket,
};

/// Limits of a batch for the store, in messages and in bytes.
const BATCH: usize = 2_000;
const BATCH_BYTES: usize = 8 << 20;

const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// Bytes of a queued message besides names, payload and properties.
const OVERHEAD: usize = 192;

/// Client id and topic together: databases bound their keys at 64 KiB.
const MAX_NAMES: usize = 60_000;

/// Most milliseconds by which the clocks of gateways that share a store may be ahead of ours.
const AHEAD: u64 = 60_000;

/// Selects messages to keep, and the time for which they are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HistoryRule {
    /// MQTT filter of topics.
    pub filter: String,
    /// Time to keep a message, whole seconds, at least one.
    pub ttl: Duration,
}

/// Options of [`History`].
#[derive(Debug, Clone)]
pub struct HistoryOptions {
    /// The first whose filter matches counts; a topic without a rule has no history.
    pub rules: Vec<HistoryRule>,
    /// Time between two flushes.
    pub flush_interval: Duration,
    /// Messages not yet in the store.
    pub max_messages: usize,
    /// Bytes of messages not yet in the store.
    pub max_bytes: usize,
    /// Larger messages (payload and properties) are not kept: Cassandra takes no mutation above half a commit log
    /// segment, 16 MiB by default, and one that it never takes would hold up all others.
    pub max_message_bytes: usize,
    /// Versions start above this.
    pub version_start: u64,
    /// This gateway's offset, see [`version_offset`](store::version_offset).
    pub version_offset: u64,
    /// A batch not written within this time has failed and is tried again.
    pub write_timeout: Duration,
    /// A read not answered within this time has failed.
    pub read_timeout: Duration,
    /// Watch over reads of the same database.
    pub reads: Arc<ReadWatch>,
    /// Time that writing may go on after shutdown began; messages left then are lost.
    pub last_flush: Duration,
}

impl Default for HistoryOptions {
    fn default() -> Self {
        Self {
            rules: Vec::new(),
            flush_interval: Duration::from_millis(250),
            max_messages: 200_000,
            max_bytes: 64 << 20,
            max_message_bytes: 4 << 20,
            version_start: 0,
            version_offset: 0,
            write_timeout: Duration::from_secs(30),
            read_timeout: Duration::from_secs(10),
            reads: Arc::default(),
            last_flush: Duration::from_secs(2),
        }
    }
}

/// Figures of the messages that wait for the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HistoryGauges {
    /// Messages, those under way included.
    pub pending: usize,
    /// Their bytes.
    pub pending_bytes: usize,
    /// True if the last write succeeded.
    pub healthy: bool,
}

/// History with write-behind in front of a [`HistoryStore`].
pub struct History {
    store: Arc<dyn HistoryStore>,
    options: HistoryOptions,
    clock: VersionClock,
    /// Messages and bytes of `queue` and `batch`.
    messages: AtomicUsize,
    bytes: AtomicUsize,
    /// The same by device. A message counts for its bytes, and at least for its part of the room in messages.
    shares: Shares,
    queue: Mutex<VecDeque<HistoryEntry>>,
    /// Batch that is being written, or failed and is written next.
    batch: AsyncMutex<Arc<[HistoryEntry]>>,
    healthy: AtomicBool,
}

impl History {
    /// Messages go to `store` once [`History::run`] is running.
    pub fn new(store: Arc<dyn HistoryStore>, options: HistoryOptions) -> Arc<Self> {
        Arc::new(Self {
            store,
            clock: VersionClock::new(options.version_start, options.version_offset),
            shares: Shares::new(options.max_bytes),
            options,
            messages: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            queue: Mutex::default(),
            batch: AsyncMutex::default(),
            healthy: AtomicBool::new(true),
        })
    }

    /// Deletes what `device` sent on `topics` before the call, what waits for the store included. Beside each topic is when
    /// its newest message was received: nothing is looked for after that, nor before the rule's `ttl`. What is received
    /// meanwhile may stay.
    ///
    /// # Errors
    /// As the store's. A part is deleted then; deleting again does the rest.
    pub async fn delete(
        &self,
        device: &str,
        topics: impl IntoIterator<Item = (Arc<str>, Timestamp)>,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        let rules = &self.options.rules;
        let topics: Vec<_> = topics
            .into_iter()
            .filter_map(|(topic, newest)| {
                let rule = rules.iter().find(|rule| matches(&rule.filter, &topic))?;
                let ttl = u64::try_from(rule.ttl.as_millis()).unwrap_or(u64::MAX);
                let first = bucket(now.0.saturating_sub(ttl).saturating_sub(AHEAD));
                Some((topic, first, bucket(newest.0)))
            })
            .collect();
        if topics.is_empty() {
            return Ok(());
        }
        let removal = HistoryRemoval { device: device.to_owned(), topics, version: self.clock.next(now) };
        timeout(self.options.write_timeout, self.store.remove(removal)).await.unwrap_or_else(|_| Err(late()))
    }

    /// Flushes every `flush_interval` until `shutdown` is true (or its sender gone), then once more within `last_flush`.
    pub async fn run(self: Arc<Self>, mut shutdown: watch::Receiver<bool>) {
        let writing = async {
            let mut backoff = BACKOFF.0;
            let mut pause = self.options.flush_interval;
            loop {
                sleep(pause).await;
                match self.flush().await {
                    Ok(()) => (pause, backoff) = (self.options.flush_interval, BACKOFF.0),
                    Err(_) => (pause, backoff) = (backoff, (backoff * 2).min(BACKOFF.1)),
                }
            }
        };
        tokio::select! {
            _ = shutdown.wait_for(|stop| *stop) => {}
            () = writing => {}
        }
        self.finish().await;
    }

    /// Writes all that waits now to the store. What fails stays in memory.
    ///
    /// # Cancel safety
    /// Dropped before it is done, it loses nothing: what was under way is written again.
    pub async fn flush(&self) -> Result<(), StoreError> {
        let mut batch = self.batch.lock().await;
        // Messages that come from now on, or again, are for the next flush.
        let mut left = self.gauges().pending;
        let mut partly = Ok(());
        while left > 0 {
            if batch.is_empty() {
                *batch = self.take();
            }
            if batch.is_empty() {
                break;
            }
            let append = timeout(self.options.write_timeout, self.store.append(Arc::clone(&batch)));
            let result = append.await.unwrap_or_else(|_| Err(late()));
            self.note(&result);
            let unwritten = match result {
                Ok(()) => Vec::new(),
                Err(StoreError::Partly { unwritten, reason }) => {
                    partly = Err(StoreError::Unavailable(reason));
                    unwritten
                }
                Err(error) => return Err(error),
            };
            left = left.saturating_sub(batch.len());
            self.landed(&std::mem::take(&mut *batch), &unwritten);
        }
        partly
    }

    /// One page of what is in the store. `query` is narrowed to what can be there at `now`: nothing older than the longest
    /// `ttl` of all rules. A message that was just received is not yet in the store.
    ///
    /// # Errors
    /// At once while the store is known to be away.
    pub async fn page(&self, query: HistoryQuery, now: Timestamp) -> Result<HistoryPage, StoreError> {
        let longest = self.options.rules.iter().map(|rule| rule.ttl.as_secs()).max().unwrap_or_default();
        let from = Timestamp(now.0.saturating_sub(longest.saturating_mul(1000)));
        let to = Timestamp(now.0.saturating_add(AHEAD));
        let query = HistoryQuery { from: query.from.max(from), to: query.to.min(to), ..query };
        let reads = &self.options.reads;
        let page = match reads.check() {
            Ok(()) => timeout(self.options.read_timeout, self.store.page(query)).await,
            Err(known) => Ok(Err(known)),
        };
        let page = page.unwrap_or_else(|_| Err(late()));
        reads.note(&page);
        if matches!(page, Err(StoreError::Unavailable(_))) {
            count(|c| c.history_read_errors.add(1));
        }
        page
    }

    /// Returns figures of the messages that wait for the store.
    pub fn gauges(&self) -> HistoryGauges {
        HistoryGauges {
            pending: self.messages.load(Relaxed),
            pending_bytes: self.bytes.load(Relaxed),
            healthy: self.healthy.load(Relaxed),
        }
    }

    fn take(&self) -> Arc<[HistoryEntry]> {
        let mut queue = self.queue.lock();
        let (mut number, mut bytes) = (0, 0);
        while number < BATCH && bytes < BATCH_BYTES {
            let Some(entry) = queue.get(number) else { break };
            bytes += size_of_entry(entry);
            number += 1;
        }
        let taken: Vec<_> = queue.drain(..number).collect();
        if queue.is_empty() {
            // An outage of the store may have made it large.
            queue.shrink_to(BATCH);
        }
        drop(queue);
        taken.into()
    }

    /// Forgets what was written and puts the rest after all that waits, so that it does not hold up anything else.
    fn landed(&self, batch: &[HistoryEntry], unwritten: &[usize]) {
        let (mut messages, mut bytes) = (0, 0);
        for (number, entry) in batch.iter().enumerate() {
            if unwritten.binary_search(&number).is_ok() {
                self.queue.lock().push_back(entry.clone());
            } else {
                let feeder = Feeder::of(OriginKind::Device, Some(&entry.value.device));
                self.shares.give_back(feeder, self.weight(size_of_entry(entry)));
                (messages, bytes) = (messages + 1, bytes + size_of_entry(entry));
            }
        }
        self.release(messages, bytes);
        count(|c| c.history_written.add(messages as u64));
    }

    /// Bytes that a message of this size counts for in its device's share.
    fn weight(&self, size: usize) -> usize {
        size.max(self.options.max_bytes / self.options.max_messages.max(1))
    }

    fn release(&self, messages: usize, bytes: usize) {
        self.messages.fetch_sub(messages, Relaxed);
        self.bytes.fetch_sub(bytes, Relaxed);
    }

    /// Counts a failure, and logs when writes begin to fail and when they succeed again.
    fn note(&self, result: &Result<(), StoreError>) {
        let was_healthy = self.healthy.swap(result.is_ok(), Relaxed);
        match result {
            Ok(()) if !was_healthy => tracing::info!("history is written again"),
            Err(error) => {
                count(|c| c.history_write_errors.add(1));
                if was_healthy {
                    gateway_core::warn_limited!(%error, "history cannot be written, messages wait in memory");
                }
            }
            Ok(()) => {}
        }
    }

    async fn finish(&self) {
        let flush = async {
            while self.gauges().pending > 0 {
                if self.flush().await.is_err() {
                    sleep(BACKOFF.0).await;
                }
            }
        };
        if timeout(self.options.last_flush, flush).await.is_err() {
            let lost = self.gauges().pending;
            store::counters::count(|c| c.history_dropped_shutdown.add(lost as u64));
            tracing::error!(lost, "messages of the history are lost, as they cannot be written at shutdown");
        }
    }
}

impl Recorder for History {
    /// Queues a message that was accepted from a device if a rule names its topic; `$` topics have no history.
    fn record(&self, message: &Message<'_>, effort: &mut Effort) {
        let Some(device) = message.origin.client_id else { return };
        if message.origin.kind != OriginKind::Device || message.topic.starts_with('$') {
            return;
        }
        let rules = &self.options.rules;
        let Some(rule) = rules.iter().find(|rule| matches(&rule.filter, message.topic)) else { return };
        let properties = message.properties.map_or(0, |p| properties_size(p));
        if message.payload.len() + properties > self.options.max_message_bytes
            || device.as_str().len() + message.topic.len() > MAX_NAMES
        {
            store::counters::count(|c| c.history_dropped_too_large.add(1));
            return;
        }
        let size = OVERHEAD + message.topic.len() + message.payload.len() + properties;
        let feeder = Feeder::from(message);
        let weight = self.weight(size);
        if let Err(NoRoom::Share | NoRoom::QosZero) = self.shares.admit(message.qos, weight, || feeder) {
            store::counters::count(|c| c.history_dropped_share.add(1));
            return;
        }
        // Counted before the check, so that many shards together stay within the bounds.
        let messages = self.messages.fetch_add(1, Relaxed);
        let bytes = self.bytes.fetch_add(size, Relaxed);
        if messages >= self.options.max_messages || bytes + size > self.options.max_bytes {
            self.release(1, size);
            if messages >= self.options.max_messages {
                store::counters::count(|c| c.history_dropped_messages.add(1));
            } else {
                store::counters::count(|c| c.history_dropped_bytes.add(1));
            }
            return;
        }
        let shared = message.share();
        let value = LatestValue {
            device: device.clone(),
            topic: Arc::clone(&shared.topic),
            payload: shared.payload.clone(),
            qos: message.qos,
            retain: message.retain,
            properties: message.properties.cloned(),
            received: clock::to_wall(message.received),
            version: self.clock.next(clock::to_wall(message.received)),
            server: None,
        };
        let ttl = u32::try_from(rule.ttl.as_secs()).unwrap_or(u32::MAX);
        self.shares.take(feeder, weight);
        effort.spend(Effort::VALUE);
        self.queue.lock().push_back(HistoryEntry { value, ttl });
        count(|c| c.history_recorded.add(1));
    }
}

fn late() -> StoreError {
    StoreError::Unavailable("no answer in time".to_owned())
}

/// Bytes of an entry in the queue.
fn size_of_entry(entry: &HistoryEntry) -> usize {
    let value = &entry.value;
    let properties = value.properties.as_ref().map_or(0, |p| properties_size(p));
    OVERHEAD + value.topic.len() + value.payload.len() + properties
}
