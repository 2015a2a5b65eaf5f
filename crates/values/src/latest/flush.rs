//! From memory to the store, batch by batch, and what happens when it does not take them.

use std::{
    convert::Infallible,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use tokio::{
    sync::watch,
    time::{Instant, timeout},
};

use super::{LatestCache, PROBED, STRIPES, VISIT, late, spill::Spill};
use crate::{counters::count, stripe::TakenEntry};
use store::{LatestStore, LatestValue, StoreError};

/// Limits of a batch for the store, in values (fewer after failures) and in bytes.
pub(super) const BATCH: usize = 4_000;
const SMALLEST_BATCH: usize = 50;
const BATCH_BYTES: usize = 8 << 20;

/// A commit of the spill: large, as each waits for the disk once.
const SPILL_BATCH: usize = 20_000;
const SPILL_BYTES: usize = 32 << 20;

/// A store that was asked and took nothing for this long is as good as away.
const SLOW: Duration = Duration::from_secs(5);

/// Values copied from a stripe under one lock.
const TURN: usize = 64;
const TURN_BYTES: usize = 256 << 10;

const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// Attempts of the last flush at shutdown, if there is no spill.
const LAST_ATTEMPTS: u32 = 5;

/// Destination of a batch.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FlushTarget {
    Store,
    Spill,
}

impl LatestCache {
    /// Flushes every `flush_interval` until `shutdown` is true (or its sender gone), then once more. Meanwhile finds out whether
    /// reads fail.
    pub async fn run(self: Arc<Self>, shutdown: watch::Receiver<bool>) {
        tokio::select! {
            () = self.keep_flushing(shutdown) => {}
            never = self.watch_reads() => match never {},
        }
        self.finish().await;
    }

    async fn keep_flushing(&self, mut shutdown: watch::Receiver<bool>) {
        let mut backoff = BACKOFF.0;
        let mut pause = self.options.flush_interval;
        let mut contact = None;
        while self.pause(pause, &mut shutdown).await {
            let round = tokio::select! {
                biased;
                // A store that hangs must not delay the end: what was on its way goes back to waiting.
                () = async { drop(shutdown.wait_for(|stop| *stop).await) } => break,
                round = self.round(&mut contact) => round,
                // A store that hangs does not keep values in memory either.
                never = self.keep_spilling() => match never {},
            };
            match round {
                Ok(more) => {
                    pause = if more { Duration::ZERO } else { self.options.flush_interval };
                    backoff = BACKOFF.0;
                }
                Err(error) => {
                    self.state.failed(&error, self.gauges().pending_values);
                    pause = backoff;
                    backoff = (backoff * 2).min(BACKOFF.1);
                }
            }
        }
    }

    /// Waits, and meanwhile makes room in memory if the store is away. False if the end came.
    async fn pause(&self, pause: Duration, shutdown: &mut watch::Receiver<bool>) -> bool {
        let until = Instant::now() + pause;
        loop {
            let step = until.saturating_duration_since(Instant::now()).min(self.options.flush_interval);
            if timeout(step, shutdown.wait_for(|stop| *stop)).await.is_ok() {
                return false;
            }
            self.spill_some(self.state.is_down()).await;
            if Instant::now() >= until {
                return true;
            }
        }
    }

    /// One flush, a part of what was spilled, or a sign of life if there is nothing to write. True if more waits in the
    /// spill.
    async fn round(&self, contact: &mut Option<Instant>) -> Result<bool, StoreError> {
        let waiting = self.gauges().pending_values;
        let mut asked = waiting > 0;
        self.flush_to(FlushTarget::Store).await?;
        let mut more = false;
        if let Some(spill) = self.spill.as_ref().filter(|spill| spill.len() > 0) {
            asked = true;
            more = self.replay(spill).await?;
        }
        if let Some(every) = self.options.probe
            && !asked
            && contact.is_none_or(|at| !self.healthy() || at.elapsed() >= every)
        {
            self.read(self.store.get(PROBED, Some(PROBED))).await?;
            asked = true;
        }
        if asked {
            *contact = Some(Instant::now());
            self.state.succeeded(waiting);
        }
        Ok(more)
    }

    /// Writes all that waits now to the store. What fails stays in memory.
    pub async fn flush(&self) -> Result<(), StoreError> {
        let waiting = self.gauges().pending_values;
        let result = self.flush_to(FlushTarget::Store).await;
        match &result {
            Ok(()) if waiting > 0 => self.state.succeeded(waiting),
            Ok(()) => {}
            Err(error) => self.state.failed(error, self.gauges().pending_values),
        }
        result
    }

    async fn flush_to(&self, target: FlushTarget) -> Result<(), StoreError> {
        let _one_at_a_time = match target {
            FlushTarget::Store => self.flushing.lock().await,
            FlushTarget::Spill => self.spilling.lock().await,
        };
        let round = self.round.fetch_add(1, Relaxed) + 1;
        for stripe in &self.stripes {
            while stripe.0.lock().evict(round, VISIT) {
                tokio::task::yield_now().await;
            }
        }
        // As many as wait now; what is recorded from now on is for the next round.
        let mut left = self.gauges().pending_values;
        let mut failed = None;
        while left > 0 {
            if target == FlushTarget::Spill && self.spill.as_ref().is_some_and(|spill| self.is_full(spill, 2))
            {
                let reason = "twice latest.max_bytes of latest values are in the data directory";
                return Err(StoreError::Unavailable(reason.to_owned()));
            }
            let taken = match self.write_batch(target, round).await {
                Ok(taken) => taken,
                // The store took other values, and may take the rest of this round too.
                Err((taken, error @ StoreError::Partly { .. })) => {
                    failed = Some(error);
                    taken
                }
                Err((_, error)) => return Err(error),
            };
            if taken == 0 {
                break;
            }
            left = left.saturating_sub(taken);
        }
        failed.map_or(Ok(()), Err)
    }

    /// Writes one batch. Returns how many values it had, with an error too; [`StoreError::Partly`] means that some were
    /// written.
    async fn write_batch(&self, target: FlushTarget, round: u64) -> Result<usize, (usize, StoreError)> {
        let mut batch = FlushBatch { latest: self, taken: Vec::new(), round, written: BatchOutcome::None };
        let values = match target {
            FlushTarget::Store => batch.take(self.batch.load(Relaxed), BATCH_BYTES),
            FlushTarget::Spill => batch.take(SPILL_BATCH, SPILL_BYTES),
        };
        let taken = values.len();
        if taken == 0 {
            return Ok(0);
        }
        // Values of a write that fails or hangs go back to waiting, and the next attempt writes them as they are
        // then: writes are idempotent and versions decide.
        let result = self.write(values.into(), target).await;
        let retried = match &result {
            Ok(()) => 0,
            Err(StoreError::Partly { unwritten, .. }) => unwritten.len(),
            Err(_) => taken,
        };
        count(|c| {
            c.latest_retried.add(retried as u64);
            match target {
                FlushTarget::Store => &c.latest_written,
                FlushTarget::Spill => &c.latest_spilled,
            }
            .add((taken - retried) as u64);
        });
        if target == FlushTarget::Store && retried < taken {
            *self.written.lock() = Some(Instant::now());
        }
        match result {
            Ok(()) => {
                batch.written = BatchOutcome::All;
                Ok(taken)
            }
            Err(StoreError::Partly { unwritten, reason }) if unwritten.len() < taken => {
                batch.written = BatchOutcome::AllBut(unwritten.clone());
                Err((taken, StoreError::Partly { unwritten, reason }))
            }
            Err(StoreError::Partly { reason, .. }) => Err((taken, StoreError::Unavailable(reason))),
            Err(error) => Err((taken, error)),
        }
    }

    /// Writes one batch, in `write_timeout`.
    async fn write(&self, values: Arc<[LatestValue]>, target: FlushTarget) -> Result<(), StoreError> {
        let number = values.len();
        let spill = self.spill.as_ref().filter(|_| target == FlushTarget::Spill);
        let store: &dyn LatestStore = match spill {
            Some(spill) => spill,
            None => &*self.store,
        };
        let began = Instant::now();
        let write = async {
            let newest = values.iter().map(|value| value.version).max();
            self.reserve_versions(newest.unwrap_or_default()).await?;
            store.upsert(values).await
        };
        let result = timeout(self.options.write_timeout, write).await.unwrap_or_else(|_| {
            count(|c| c.latest_store_timeouts.add(1));
            Err(late())
        });
        if spill.is_none() {
            match &result {
                Ok(()) => {
                    self.latency.observe(began.elapsed());
                    self.adapt(true);
                }
                Err(StoreError::Partly { unwritten, .. }) if unwritten.len() < number / 2 => {}
                Err(_) => self.adapt(false),
            }
            count(|c| c.latest_store_errors.add(result.is_err().into()));
        }
        result
    }

    /// Moves a part of the spill to the store, in `write_timeout`. True if there is more.
    async fn replay(&self, spill: &Spill) -> Result<bool, StoreError> {
        let _one_at_a_time = self.flushing.lock().await;
        let replay = spill.replay(&*self.store, self.batch.load(Relaxed));
        let result = timeout(self.options.write_timeout, replay).await.unwrap_or_else(|_| Err(late()));
        self.adapt(result.is_ok());
        if result.is_err() {
            count(|c| c.latest_store_errors.add(1));
        }
        result
    }

    /// A store that is too slow for a batch gets smaller ones, until it takes them.
    fn adapt(&self, written: bool) {
        let size = self.batch.load(Relaxed);
        let size = if written { size * 2 } else { size / 4 };
        self.batch.store(size.clamp(SMALLEST_BATCH, BATCH), Relaxed);
    }

    pub(super) async fn reserve_versions(&self, newest: u64) -> Result<(), StoreError> {
        if let Some(mark) = &self.options.mark
            && newest > mark.ceiling()
        {
            let mark = Arc::clone(mark);
            let reserve = tokio::task::spawn_blocking(move || mark.reserve(newest));
            reserve.await.map_err(|e| StoreError::Unavailable(e.to_string()))??;
        }
        Ok(())
    }

    /// During a round: moves values to the spill if the store is away, or takes nothing.
    async fn keep_spilling(&self) -> Infallible {
        let begun = Instant::now();
        loop {
            tokio::time::sleep(self.options.flush_interval).await;
            let since = self.written.lock().map_or(begun, |written| written.max(begun));
            self.spill_some(self.state.is_down() || since.elapsed() >= SLOW).await;
        }
    }

    /// Moves a part of what waits to the spill if the store is `away`: one commit, so that sessions and queues get the
    /// disk in between, or as many as it takes while memory is short. That leaves little for shutdown, and a process
    /// that is killed loses little.
    async fn spill_some(&self, away: bool) {
        let Some(spill) = self.spill.as_ref().filter(|_| away) else { return };
        loop {
            if self.gauges().pending_values == 0 || self.is_full(spill, 1) {
                return;
            }
            let _one_at_a_time = self.spilling.lock().await;
            let round = self.round.load(Relaxed);
            match self.write_batch(FlushTarget::Spill, round).await {
                Ok(1..) if self.gauges().pending_bytes > self.options.in_memory() / 2 => {}
                Ok(_) => return,
                Err((_, error)) => {
                    // A failure is tried again, and reported at the end.
                    tracing::debug!(%error, "latest values cannot be kept in the data directory");
                    return;
                }
            }
        }
    }

    /// Returns whether the spill holds `times` the bytes that it may take while running. At shutdown it may take as much again,
    /// so that a gateway that is restarted often while the store is away does not fill the disk of sessions and queues.
    fn is_full(&self, spill: &Spill, times: u64) -> bool {
        !self.options.spill_running && spill.bytes() >= times * self.options.max_bytes as u64
    }

    /// Moves what waits in memory to the spill. What that does not take stays.
    async fn spill_pending(&self) {
        let waiting = self.gauges().pending_values;
        match self.flush_to(FlushTarget::Spill).await {
            Ok(()) => {
                let spilled = self.gauges().spilled;
                tracing::info!(
                    waiting,
                    spilled,
                    "latest values are kept in the data directory for the store"
                );
            }
            Err(error) => {
                tracing::error!(%error, waiting, "latest values cannot be kept in the data directory")
            }
        }
    }

    /// The last flush: to the store while it takes values, for a bounded time if there is a spill, which gets the rest.
    async fn finish(&self) {
        if let Some(spill) = &self.spill {
            if !self.state.is_down() {
                let _ = timeout(self.options.last_write, self.flush_all()).await;
            }
            for attempt in 0..LAST_ATTEMPTS {
                let again = attempt == 0 || !self.is_full(spill, 2);
                if self.gauges().pending_values > 0 && again {
                    self.spill_pending().await;
                }
            }
        } else {
            let mut backoff = BACKOFF.0;
            for attempt in 1..=LAST_ATTEMPTS {
                self.flush_all().await;
                if self.gauges().pending_values == 0 {
                    break;
                }
                if attempt < LAST_ATTEMPTS {
                    tokio::time::sleep(backoff).await;
                    backoff = (backoff * 2).min(BACKOFF.1);
                }
            }
        }
        let lost = self.abandon();
        if lost > 0 {
            tracing::error!(lost, "latest values are lost, as the store cannot be written at shutdown");
            return;
        }
        if let Some(mark) = &self.options.mark {
            let (mark, last) = (Arc::clone(mark), self.clock.last());
            let settled = tokio::task::spawn_blocking(move || mark.settle(last)).await;
            if !matches!(settled, Ok(Ok(()))) {
                tracing::warn!("version mark not settled; versions will skip ahead");
            }
        }
    }

    /// Flushes until nothing waits or the store fails.
    async fn flush_all(&self) {
        while self.gauges().pending_values > 0 && self.flush().await.is_ok() {}
    }
}

/// Part of a batch that the store has taken.
enum BatchOutcome {
    None,
    /// All but these places, which grow.
    AllBut(Vec<usize>),
    All,
}

impl BatchOutcome {
    fn has(&self, place: usize) -> bool {
        match self {
            Self::None => false,
            Self::AllBut(places) => places.binary_search(&place).is_err(),
            Self::All => true,
        }
    }
}

/// Values on their way to the store; back to waiting if dropped unwritten.
struct FlushBatch<'a> {
    latest: &'a LatestCache,
    taken: Vec<(usize, TakenEntry)>,
    round: u64,
    written: BatchOutcome,
}

impl FlushBatch<'_> {
    /// Takes up to about `most` values or `most_bytes` from the stripes in turn.
    fn take(&mut self, most: usize, most_bytes: usize) -> Vec<LatestValue> {
        let (mut values, mut bytes) = (Vec::new(), 0);
        let mut turn = Vec::new();
        let mut stripe = self.latest.next_stripe.load(Relaxed);
        for _ in 0..STRIPES {
            while values.len() < most && bytes < most_bytes {
                bytes += self.latest.stripes[stripe].0.lock().take(TURN, TURN_BYTES, &mut turn);
                if turn.is_empty() {
                    break;
                }
                for (taken, value) in turn.drain(..) {
                    self.taken.push((stripe, taken));
                    values.push(value);
                }
            }
            if values.len() >= most || bytes >= most_bytes {
                break;
            }
            stripe = (stripe + 1) % STRIPES;
        }
        self.latest.next_stripe.store(stripe, Relaxed);
        values
    }
}

impl Drop for FlushBatch<'_> {
    fn drop(&mut self) {
        let keep = self.latest.options.in_memory() / STRIPES / 4;
        for (place, (number, taken)) in self.taken.iter().enumerate() {
            let mut stripe = self.latest.stripes[*number].0.lock();
            let change = stripe.landed(*taken, self.written.has(place), self.round, keep);
            self.latest.apply(change);
        }
    }
}
