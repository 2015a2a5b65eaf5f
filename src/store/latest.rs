//! Latest values with write-behind: recorded in memory by the shards, written to the store in batches.
//!
//! What is lost when the process is killed: what was recorded in the last `flush_interval` and during one
//! commit of the store. While the store is away values stay in memory, the newest per (device, topic), up
//! to `max_bytes`; then values of pairs not yet waiting are refused and counted. A store that neither writes nor
//! fails counts as away after `write_timeout`; a read ends after `read_timeout`.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicIsize, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, watch};

use super::{
    BoxFuture, LatestPage, LatestQuery, LatestStore, LatestValue, PageBuilder, PageToken, Selection,
    StoreError, VersionClock, VersionMark, Watch, WatchSelector,
    page::PAGE_BYTES,
    stripe::{Bounds, Change, Pending, Refusal, Stripe, Taken},
    watch::Watchers,
};
use crate::{
    telemetry::count,
    types::{Message, OriginKind, matches},
};

const STRIPES: usize = 64;

/// A batch for the store: so many values, or so many bytes.
const BATCH: usize = 2_000;
const BATCH_BYTES: usize = 8 << 20;

/// What is copied from a stripe under one lock.
const TURN: usize = 64;
const TURN_BYTES: usize = 256 << 10;

/// Slots searched under one lock.
const VISIT: usize = 512;

const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// Attempts of the last flush at shutdown.
const LAST_ATTEMPTS: u32 = 5;

/// How [`Latest`] behaves.
#[derive(Debug, Clone)]
pub struct LatestOptions {
    /// Time between two flushes.
    pub flush_interval: Duration,
    /// Bytes of values not yet in the store. Values that already wait may be replaced by larger ones up to a
    /// quarter more.
    pub max_bytes: usize,
    /// Topics in memory per device; the store has its own bound over time.
    pub topics_per_device: usize,
    /// MQTT filters of topics that are not kept.
    pub excluded: Vec<String>,
    /// Versions start above this.
    pub version_start: u64,
    /// The ceiling of versions on disk; versions start above it, too.
    pub mark: Option<Arc<VersionMark>>,
    /// A batch that is not written after so long has failed; it is tried again.
    pub write_timeout: Duration,
    /// A read that is not answered after so long has failed.
    pub read_timeout: Duration,
}

impl Default for LatestOptions {
    fn default() -> Self {
        Self {
            flush_interval: Duration::from_millis(250),
            max_bytes: 256 << 20,
            topics_per_device: 10_000,
            excluded: Vec::new(),
            version_start: 0,
            mark: None,
            write_timeout: Duration::from_secs(30),
            read_timeout: Duration::from_secs(10),
        }
    }
}

/// What waits for the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatestGauges {
    /// (device, topic) pairs.
    pub pending_values: usize,
    /// Their bytes.
    pub pending_bytes: usize,
    /// Whether the last write succeeded.
    pub healthy: bool,
}

/// Latest values with write-behind in front of a [`LatestStore`].
pub struct Latest {
    store: Arc<dyn LatestStore>,
    options: LatestOptions,
    stripes: Box<[Padded]>,
    hashing: ahash::RandomState,
    clock: VersionClock,
    watchers: Arc<Watchers>,
    pending_values: AtomicIsize,
    pending_bytes: AtomicIsize,
    healthy: AtomicBool,
    round: AtomicU64,
    flushing: AsyncMutex<()>,
}

/// On cache lines of its own.
#[derive(Default)]
#[repr(align(128))]
struct Padded(Mutex<Stripe>);

impl Latest {
    /// Values go to `store` once [`Latest::run`] is running.
    pub fn new(store: Arc<dyn LatestStore>, options: LatestOptions) -> Arc<Self> {
        let ceiling = options.mark.as_ref().map_or(0, |mark| mark.ceiling());
        Arc::new(Self {
            store,
            stripes: (0..STRIPES).map(|_| Padded::default()).collect(),
            hashing: ahash::RandomState::new(),
            clock: VersionClock::new(options.version_start.max(ceiling)),
            watchers: Arc::default(),
            pending_values: AtomicIsize::new(0),
            pending_bytes: AtomicIsize::new(0),
            healthy: AtomicBool::new(true),
            round: AtomicU64::new(0),
            flushing: AsyncMutex::new(()),
            options,
        })
    }

    /// Records a message that was accepted from a device; others are ignored, and so are `$` topics.
    ///
    /// Allocates only when the (device, topic) is not in memory or the payload outgrows its buffer.
    pub fn record(&self, message: &Message<'_>) {
        let Some(device) = message.origin.client_id else { return };
        if message.origin.kind != OriginKind::Device || message.topic.starts_with('$') {
            return;
        }
        let (stripe, hash) = self.place(device.as_str(), message.topic);
        let max_bytes = self.options.max_bytes as isize;
        let bounds = Bounds {
            free: max_bytes - self.pending_bytes.load(Relaxed),
            growth: max_bytes / 4,
            topics_per_device: self.options.topics_per_device as u32,
        };
        let excluded = || self.options.excluded.iter().any(|f| matches(f, message.topic));
        let version = || self.clock.next(message.received);
        let result = {
            let mut stripe = self.stripes[stripe].0.lock();
            let result = stripe.record(hash, device, message, bounds, excluded, version);
            if let Ok((_, change)) = result {
                self.apply(change);
            }
            result
        };
        match result {
            Ok((version, _)) => {
                count(|c| c.latest_updates.add(1));
                if self.watchers.any() {
                    self.watchers.notify(device, message, version);
                }
            }
            Err(Refusal::Excluded) => {}
            Err(Refusal::DeviceTopics) => count(|c| c.latest_dropped_topics.add(1)),
            Err(Refusal::Bytes) => count(|c| c.latest_dropped_bytes.add(1)),
        }
    }

    /// Flushes every `flush_interval` until `shutdown` is true (or its sender gone), then once more.
    pub async fn run(self: Arc<Self>, mut shutdown: watch::Receiver<bool>) {
        let mut backoff = BACKOFF.0;
        let mut pause = self.options.flush_interval;
        while tokio::time::timeout(pause, shutdown.wait_for(|stop| *stop)).await.is_err() {
            match self.flush().await {
                Ok(()) => (pause, backoff) = (self.options.flush_interval, BACKOFF.0),
                Err(e) => {
                    tracing::warn!(error = %e, retry_in = ?backoff, "latest values cannot be written, they wait in memory");
                    pause = backoff;
                    backoff = (backoff * 2).min(BACKOFF.1);
                }
            }
        }
        self.finish().await;
    }

    /// Writes all that waits now to the store. What fails stays in memory.
    pub async fn flush(&self) -> Result<(), StoreError> {
        let _one_at_a_time = self.flushing.lock().await;
        let round = self.round.fetch_add(1, Relaxed) + 1;
        for stripe in &self.stripes {
            while stripe.0.lock().evict(round, VISIT) {
                tokio::task::yield_now().await;
            }
        }
        // As many as wait now; what is recorded from now on is for the next round.
        let mut left = self.gauges().pending_values;
        let mut start = 0;
        while left > 0 {
            let mut batch = Batch { latest: self, taken: Vec::new(), round, written: false };
            let values = batch.take(&mut start);
            let Some(newest) = values.iter().map(|value| value.version).max() else { break };
            let taken = values.len();
            left = left.saturating_sub(taken);
            // Values of a write that hangs go back to waiting, and the next attempt writes them as they are
            // then: writes are idempotent and versions decide.
            let write = tokio::time::timeout(self.options.write_timeout, self.write(values.into(), newest));
            let result = match write.await {
                Ok(result) => result,
                Err(_) => {
                    count(|c| c.latest_store_timeouts.add(1));
                    Err(late())
                }
            };
            batch.written = result.is_ok();
            drop(batch);
            self.healthy.store(result.is_ok(), Relaxed);
            if result.is_err() {
                count(|c| c.latest_store_errors.add(1));
                return result;
            }
            count(|c| c.latest_written.add(taken as u64));
        }
        Ok(())
    }

    /// The value of `topic` of `device`, or without a device the newest over all devices. Includes what is
    /// not yet in the store; if the store cannot be read, a value in memory is still returned.
    pub async fn get(&self, topic: &str, device: Option<&str>) -> Result<Option<LatestValue>, StoreError> {
        // First memory, then the store: a value on its way is in one of them.
        let pending = match device {
            Some(device) => {
                let (stripe, hash) = self.place(device, topic);
                self.stripes[stripe].0.lock().get(hash, device, topic)
            }
            None => self.newest_pending(topic),
        };
        match (self.read(self.store.get(topic, device)).await, pending) {
            (Ok(Some(stored)), Some(pending)) if stored.version > pending.version => Ok(Some(stored)),
            (_, Some(pending)) => Ok(Some(pending)),
            (stored, None) => stored,
        }
    }

    /// One page by device and topic, including what is not yet in the store.
    pub async fn list(&self, query: LatestQuery) -> Result<LatestPage, StoreError> {
        let selection = Selection::new(query.clone())?;
        let (mut merged, pending_end) = self.select_pending(&selection);
        let stored = self.read(self.store.list(query)).await?;
        // Both sides are complete up to here.
        let end = match (PageToken::parse(&stored.next)?, pending_end) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        for value in stored.values {
            let key = PageToken::new(value.device.as_str(), &value.topic);
            let newer = merged.get(&key).is_none_or(|pending| pending.version < value.version);
            if newer {
                merged.insert(key, value);
            }
        }
        if let Some(end) = &end {
            merged.retain(|key, _| *key <= *end);
        }
        let mut page = PageBuilder::new(selection.limit);
        for value in merged.into_values() {
            if page.is_full() {
                return Ok(page.cut());
            }
            page.push(value);
        }
        Ok(page.searched_to(end))
    }

    /// Follows changes from now on.
    pub fn watch(&self, selector: WatchSelector) -> Watch {
        self.watchers.add(selector)
    }

    /// Whether the last write to the store succeeded.
    pub fn healthy(&self) -> bool {
        self.healthy.load(Relaxed)
    }

    /// What waits for the store.
    pub fn gauges(&self) -> LatestGauges {
        let positive = |n: &AtomicIsize| usize::try_from(n.load(Relaxed)).unwrap_or(0);
        LatestGauges {
            pending_values: positive(&self.pending_values),
            pending_bytes: positive(&self.pending_bytes),
            healthy: self.healthy(),
        }
    }

    /// The bound on topics per device.
    pub fn topics_per_device(&self) -> usize {
        self.options.topics_per_device
    }

    #[cfg(test)]
    pub(super) fn watchers_exist(&self) -> bool {
        self.watchers.any()
    }

    fn place(&self, device: &str, topic: &str) -> (usize, u64) {
        let device = self.hashing.hash_one(device);
        let topic = self.hashing.hash_one(topic);
        let hash = (device.rotate_left(29) ^ topic).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        ((device % STRIPES as u64) as usize, hash)
    }

    fn apply(&self, change: Change) {
        if change.values != 0 {
            self.pending_values.fetch_add(change.values, Relaxed);
        }
        if change.bytes != 0 {
            self.pending_bytes.fetch_add(change.bytes, Relaxed);
        }
    }

    async fn read<T>(&self, read: BoxFuture<'_, Result<T, StoreError>>) -> Result<T, StoreError> {
        tokio::time::timeout(self.options.read_timeout, read).await.unwrap_or_else(|_| {
            count(|c| c.latest_read_timeouts.add(1));
            Err(late())
        })
    }

    async fn write(&self, values: Arc<[LatestValue]>, newest: u64) -> Result<(), StoreError> {
        if let Some(mark) = &self.options.mark
            && newest > mark.ceiling()
        {
            let mark = Arc::clone(mark);
            let reserve = tokio::task::spawn_blocking(move || mark.reserve(newest));
            reserve.await.map_err(|e| StoreError::Unavailable(e.to_string()))??;
        }
        self.store.upsert(values).await
    }

    async fn finish(&self) {
        let mut backoff = BACKOFF.0;
        for attempt in 1..=LAST_ATTEMPTS {
            while let Ok(()) = self.flush().await {
                if self.gauges().pending_values == 0 {
                    if let Some(mark) = &self.options.mark {
                        let (mark, last) = (Arc::clone(mark), self.clock.last());
                        let settled = tokio::task::spawn_blocking(move || mark.settle(last)).await;
                        if !matches!(settled, Ok(Ok(()))) {
                            tracing::warn!("version mark not settled; versions will skip ahead");
                        }
                    }
                    return;
                }
            }
            if attempt < LAST_ATTEMPTS {
                tokio::time::sleep(backoff).await;
                backoff = (backoff * 2).min(BACKOFF.1);
            }
        }
        let lost = self.gauges().pending_values;
        tracing::error!(lost, "latest values are lost, as the store cannot be written at shutdown");
    }

    fn newest_pending(&self, topic: &str) -> Option<LatestValue> {
        let mut newest: Option<LatestValue> = None;
        self.visit_pending(|pending| {
            let newer = newest.as_ref().is_none_or(|newest| newest.version < pending.version());
            if newer && **pending.names().1 == *topic {
                newest = Some(pending.value());
            }
        });
        newest
    }

    /// The first values in memory that `selection` asks for, and the last of them if there are more.
    fn select_pending(&self, selection: &Selection) -> (BTreeMap<PageToken, LatestValue>, Option<PageToken>) {
        let mut keys = BTreeSet::new();
        let mut more = false;
        self.visit_pending(|pending| {
            let (device, topic) = pending.names();
            if selection.selects(device.as_str(), topic) {
                keys.insert(PageToken::new(device.as_str(), topic));
                if keys.len() > selection.limit {
                    keys.pop_last();
                    more = true;
                }
            }
        });
        let mut end = if more { keys.last().cloned() } else { None };
        let mut values = BTreeMap::new();
        let mut bytes = 0;
        for key in keys {
            if bytes >= PAGE_BYTES {
                end = values.last_key_value().map(|(key, _): (&PageToken, _)| key.clone());
                break;
            }
            let (stripe, hash) = self.place(&key.device, &key.topic);
            // None if it reached the store meanwhile, which is read after this.
            if let Some(value) = self.stripes[stripe].0.lock().get(hash, &key.device, &key.topic) {
                bytes += value.payload.len();
                values.insert(key, value);
            }
        }
        (values, end)
    }

    fn visit_pending(&self, mut visit: impl FnMut(Pending<'_>)) {
        if self.pending_values.load(Relaxed) == 0 {
            return;
        }
        for stripe in &self.stripes {
            let mut from = 0;
            while stripe.0.lock().visit(from, VISIT, &mut visit) {
                from += VISIT;
            }
        }
    }
}

fn late() -> StoreError {
    StoreError::Unavailable("no answer in time".to_owned())
}

/// Values on their way to the store; back to waiting if dropped unwritten.
struct Batch<'a> {
    latest: &'a Latest,
    taken: Vec<(usize, Taken)>,
    round: u64,
    written: bool,
}

impl Batch<'_> {
    /// Takes values of the stripes in turn from `start`, which goes to where the next batch begins.
    fn take(&mut self, start: &mut usize) -> Vec<LatestValue> {
        let (mut values, mut bytes) = (Vec::new(), 0);
        let mut turn = Vec::new();
        for _ in 0..STRIPES {
            loop {
                if values.len() >= BATCH || bytes >= BATCH_BYTES {
                    return values;
                }
                bytes += self.latest.stripes[*start].0.lock().take(TURN, TURN_BYTES, &mut turn);
                if turn.is_empty() {
                    break;
                }
                for (taken, value) in turn.drain(..) {
                    self.taken.push((*start, taken));
                    values.push(value);
                }
            }
            *start = (*start + 1) % STRIPES;
        }
        values
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        let keep = self.latest.options.max_bytes / STRIPES / 4;
        for (number, taken) in &self.taken {
            let mut stripe = self.latest.stripes[*number].0.lock();
            let change = stripe.landed(*taken, self.written, self.round, keep);
            self.latest.apply(change);
        }
    }
}
