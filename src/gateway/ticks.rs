//! Work of each second: timers of the broker, and a look at the clocks.

use std::{sync::Arc, time::Duration};

use auth::abuse::BanRegistry;
use broker::{Broker, Turn};
use gateway_core::{Timestamp, clock, log_limits::peer_limits};
use store::ClockMark;
use tokio::task::JoinHandle;
use tracing::{info, warn};

/// Interval at which the clocks are saved.
const KEEP_CLOCK: Duration = Duration::from_secs(30);

/// Seconds between two looks for bans that have expired.
const SWEEP_BANS: u32 = 60;

/// Writes down where time continues after the next start.
pub(super) async fn keep_clock(mark: &Arc<ClockMark>) {
    let mark = Arc::clone(mark);
    let kept = tokio::task::spawn_blocking(move || mark.keep()).await;
    if let Ok(Err(error)) = kept {
        warn!(%error, "cannot keep the clock");
    }
}

/// Timers of the broker, once a second, and a look at the wall clock.
pub(super) async fn run_ticks(broker: Broker, bans: Arc<BanRegistry>, mark: Option<Arc<ClockMark>>) {
    let mut kept = None;
    let mut keeping: Option<JoinHandle<()>> = None;
    let mut ticks = 0u32;
    let mut second = tokio::time::interval(Duration::from_secs(1));
    second.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
    loop {
        second.tick().await;
        ticks = ticks.wrapping_add(1);
        if ticks.is_multiple_of(SWEEP_BANS) {
            bans.sweep();
        }
        let jump = clock::observe();
        if let Some(millis) = jump.filter(|millis| millis.unsigned_abs() >= 10_000) {
            warn!(seconds = millis / 1000, "wall clock has jumped, sessions and messages age as before");
        }
        let now = clock::now();
        let is_due = kept.is_none_or(|at: Timestamp| now >= at.plus_millis(KEEP_CLOCK.as_millis() as u64));
        if let Some(mark) = mark.as_ref().filter(|_| jump.is_some() || is_due) {
            kept = Some(now);
            // Nothing else waits for a ledger that does not answer; one that keeps the clock already is enough.
            if keeping.as_ref().is_none_or(JoinHandle::is_finished) {
                let mark = Arc::clone(mark);
                keeping = Some(tokio::spawn(async move { keep_clock(&mark).await }));
            }
        }
        let mut turn = Turn::default();
        let left = broker.tick(clock::now(), &mut turn);
        turn.flush();
        if let Some(left) = left {
            left.settle().await;
        }
        for (said, peer, suppressed) in peer_limits().sweep() {
            let peer = peer.map_or_else(|| "others".to_owned(), |peer| peer.to_string());
            info!(?said, peer, suppressed, "more of the same was left out of the log");
        }
    }
}
