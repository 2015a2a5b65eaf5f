//! Latest values with write-behind: recorded in memory by the shards, written to the store in batches.
//!
//! A process that is killed loses what was recorded in the last `flush_interval` and during one commit of the store.
//! While the store is away values stay in memory, the newest per (device, topic), up to `max_bytes`; then values of
//! pairs not yet waiting are refused and counted. A store that neither writes nor fails counts as away after
//! `write_timeout`; a read ends after `read_timeout`.
//!
//! With a [`SpillStore`], values go there as they come while the store is away, in large commits, so that little is
//! left for the end; from there they go to the store once it takes values again. A value is first in memory, then maybe
//! in the spill, then in the store, and is looked for in this order, so that it is seen wherever it is.
//!
//! ```text
//! options condition   how it behaves; whether the store takes values, and the log of that
//! reads               whether reads are known to fail
//! flush spill         memory -> store; memory -> spill -> store
//! read delete         memory, spill and store as one
//! ```

mod condition;
mod delete;
mod flush;
mod options;
mod read;
mod reads;
mod spill;

use std::{
    sync::{
        Arc,
        atomic::{AtomicIsize, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use gateway_core::{Effort, Message, OriginKind, Timestamp, clock, matches, metrics::Histogram};
use parking_lot::Mutex;
use tokio::{
    sync::{Mutex as AsyncMutex, watch},
    time::Instant,
};

use self::{condition::ConditionWatch, spill::Spill};
use super::stripe::{NotRecorded, Stripe, StripeBounds, Sums, Unflushed};
use crate::counters::count;
use store::{LatestStore, Recorder, SpillStore, StoreError, VersionClock};

pub use self::{condition::StoreCondition, options::LatestOptions, reads::ReadWatch};

const STRIPES: usize = 64;

/// Slots searched under one lock.
const VISIT: usize = 512;

/// Upper bounds of the buckets of the write latency, in seconds.
const LATENCY: &[f64] = &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// Figures of the values that wait for the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatestGauges {
    /// (device, topic) pairs in memory.
    pub pending_values: usize,
    /// Their bytes.
    pub pending_bytes: usize,
    /// Values in the spill.
    pub spilled: usize,
    /// True if the store takes values, as far as is known.
    pub healthy: bool,
}

/// Latest values with write-behind in front of a [`LatestStore`].
pub struct LatestCache {
    store: Arc<dyn LatestStore>,
    spill: Option<Spill>,
    options: LatestOptions,
    stripes: Box<[Padded]>,
    hashing: ahash::RandomState,
    clock: VersionClock,
    pending_values: AtomicIsize,
    pending_bytes: AtomicIsize,
    state: ConditionWatch,
    latency: Histogram,
    round: AtomicU64,
    /// The stripe where the next batch begins, so that all get their turn even if values change faster than they are
    /// written.
    next_stripe: AtomicUsize,
    /// Values in a batch: fewer while the store fails, so that a slow one gets something done in time.
    batch: AtomicUsize,
    flushing: AsyncMutex<()>,
    /// As `flushing`, for the spill, which does not wait for a store that hangs.
    spilling: AsyncMutex<()>,
    /// Time of the last batch that the store took.
    written: Mutex<Option<Instant>>,
}

/// On cache lines of its own.
#[derive(Default)]
#[repr(align(128))]
struct Padded(Mutex<Stripe>);

impl LatestCache {
    /// Values go to `store` once [`LatestCache::run`] is running.
    pub fn new(store: Arc<dyn LatestStore>, options: LatestOptions) -> Arc<Self> {
        Self::with_spill(store, None, options)
    }

    /// As [`LatestCache::new`]; what `store` does not take while it is away and at shutdown goes to `spill`, and what is in
    /// `spill` goes to `store`.
    pub fn with_spill(
        store: Arc<dyn LatestStore>,
        spill: Option<Arc<dyn SpillStore>>,
        options: LatestOptions,
    ) -> Arc<Self> {
        let ceiling = options.mark.as_ref().map_or(0, |mark| mark.ceiling());
        Arc::new(Self {
            store,
            spill: spill.map(Spill::new),
            stripes: (0..STRIPES).map(|_| Padded::default()).collect(),
            hashing: ahash::RandomState::new(),
            clock: VersionClock::new(options.version_start.max(ceiling), options.version_offset),
            pending_values: AtomicIsize::new(0),
            pending_bytes: AtomicIsize::new(0),
            state: ConditionWatch::new(options.probe.is_some()),
            latency: Histogram::new(LATENCY),
            round: AtomicU64::new(0),
            next_stripe: AtomicUsize::new(0),
            batch: AtomicUsize::new(flush::BATCH),
            flushing: AsyncMutex::new(()),
            spilling: AsyncMutex::new(()),
            written: Mutex::new(None),
            options,
        })
    }

    /// Stops writing: what still waits is lost and counted. Returns how many values that is.
    pub fn abandon(&self) -> usize {
        let lost = self.gauges().pending_values;
        store::counters::count(|c| c.latest_dropped_shutdown.add(lost as u64));
        lost
    }

    /// Returns whether the store takes values, as far as is known.
    pub fn healthy(&self) -> bool {
        self.state.is_up()
    }

    /// The condition of the store, now and when it changes.
    pub fn condition(&self) -> watch::Receiver<StoreCondition> {
        self.state.subscribe()
    }

    /// Returns figures of the values that wait for the store.
    pub fn gauges(&self) -> LatestGauges {
        let positive = |n: &AtomicIsize| usize::try_from(n.load(Relaxed)).unwrap_or(0);
        LatestGauges {
            pending_values: positive(&self.pending_values),
            pending_bytes: positive(&self.pending_bytes),
            spilled: self.spill.as_ref().map_or(0, Spill::len),
            healthy: self.healthy(),
        }
    }

    /// Returns the age of the oldest waiting value in memory at `now`. Looks at all of them: for a page of metrics.
    pub fn oldest_pending(&self, now: Timestamp) -> Duration {
        let mut oldest = now;
        self.visit_pending(|pending| oldest = oldest.min(pending.since()));
        Duration::from_millis(now.0 - oldest.0)
    }

    /// Returns the durations of successful writes of a batch.
    pub fn write_latency(&self) -> &Histogram {
        &self.latency
    }

    /// The limit of topics per device.
    pub fn topics_per_device(&self) -> usize {
        self.options.topics_per_device
    }

    /// Entries in memory, those that are written too.
    #[cfg(test)]
    pub(crate) fn entries(&self) -> usize {
        self.stripes.iter().map(|stripe| stripe.0.lock().len()).sum()
    }

    fn place(&self, device: &str, topic: &str) -> (usize, u64) {
        let device = self.hashing.hash_one(device);
        let topic = self.hashing.hash_one(topic);
        let hash = (device.rotate_left(29) ^ topic).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        ((device % STRIPES as u64) as usize, hash)
    }

    fn apply(&self, change: Sums) {
        if change.values != 0 {
            self.pending_values.fetch_add(change.values, Relaxed);
        }
        if change.bytes != 0 {
            self.pending_bytes.fetch_add(change.bytes, Relaxed);
        }
    }

    fn visit_pending(&self, mut visit: impl FnMut(Unflushed<'_>)) {
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

impl Recorder for LatestCache {
    /// Records a message that was accepted from a device; others are ignored, and so are `$` topics.
    ///
    /// The store knows the topics of a device, and decides which are too many: a bound in memory would keep the newest
    /// values of known topics from it. In memory a device is bounded by its share of the bytes.
    ///
    /// Allocates only when the (device, topic) is not in memory or the payload outgrows its buffer. The former costs the publisher
    /// effort: on one core ever new topics would keep the others waiting.
    fn record(&self, message: &Message<'_>, effort: &mut Effort) {
        let Some(device) = message.origin.client_id else { return };
        if message.origin.kind != OriginKind::Device || message.topic.starts_with('$') {
            return;
        }
        let (stripe, hash) = self.place(device.as_str(), message.topic);
        let max_bytes = self.options.in_memory() as isize;
        let bounds =
            StripeBounds { free: max_bytes - self.pending_bytes.load(Relaxed), growth: max_bytes / 4 };
        let excluded = || self.options.excluded.iter().any(|f| matches(f, message.topic));
        let stamp = || {
            let received = clock::to_wall(message.received);
            (self.clock.next(received), received)
        };
        let result = {
            let mut stripe = self.stripes[stripe].0.lock();
            let result = stripe.record(hash, device, message, bounds, excluded, stamp);
            if let Ok(recorded) = &result {
                self.apply(recorded.change);
            }
            result
        };
        match result {
            Ok(recorded) => {
                if recorded.inserted {
                    effort.spend(Effort::VALUE);
                }
                count(|c| {
                    c.latest_updates.add(1);
                    c.latest_coalesced.add(recorded.coalesced.into());
                });
            }
            Err(NotRecorded::Excluded) => {}
            Err(NotRecorded::Bytes) => store::counters::count(|c| c.latest_dropped_bytes.add(1)),
            Err(NotRecorded::Share) => store::counters::count(|c| c.latest_dropped_share.add(1)),
        }
    }
}

/// Topic and device of a question whose answer is that there is no such value: no device can write it.
const PROBED: &str = "$probe";

fn late() -> StoreError {
    StoreError::Unavailable("no answer in time".to_owned())
}
