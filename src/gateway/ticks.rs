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

#[cfg(test)]
mod tests {
    use std::sync::{
        atomic::{AtomicBool, Ordering::SeqCst},
        mpsc::{Receiver, sync_channel},
    };

    use broker::BrokerConfig;
    use config::Config;
    use gateway_core::{Message, Origin};
    use parking_lot::Mutex;
    use store::{DataDir, FileShipping, StoreError};
    use tokio::time::{sleep, timeout};

    use super::*;

    /// A ledger that answers once the test has ended.
    struct Silent {
        asked: Arc<AtomicBool>,
        end: Mutex<Receiver<()>>,
    }

    impl FileShipping for Silent {
        fn replace(
            &self,
            _name: &str,
            _content: &str,
            _write: &mut dyn FnMut() -> Result<(), StoreError>,
        ) -> Result<(), StoreError> {
            self.asked.store(true, SeqCst);
            let _ = self.end.lock().recv();
            Err(StoreError::closed())
        }
    }

    /// The failure: while the ledger did not answer, nothing expired and no will was published, since the loop waited for its clock
    /// to be kept.
    #[tokio::test]
    async fn timers_go_on_while_the_ledger_does_not_answer() {
        let folder = tempfile::tempdir().unwrap();
        let directory = DataDir::open(folder.path()).unwrap();
        let (_at_the_end, end) = sync_channel(0);
        let asked = Arc::new(AtomicBool::new(false));
        let mark = Arc::new(ClockMark::resume(&directory, None));
        directory.ship_files(Arc::new(Silent { asked: Arc::clone(&asked), end: Mutex::new(end) }));
        let config = Config::default();
        let broker = Broker::new(BrokerConfig::default());
        let bans = Arc::new(BanRegistry::open(&config.bans, None).unwrap());
        let keep = |topic: &str| {
            let mut message = Message::new(topic, b"value", clock::now(), Origin::SERVER);
            message.retain = true;
            message.expires = Some(clock::now().plus_millis(100));
            let mut turn = Turn::default();
            broker.publish(&message, &mut turn);
            turn.flush();
        };
        keep("before");
        assert_eq!(broker.gauges().retained, 1);
        let ticks = tokio::spawn(run_ticks(broker.clone(), bans, Some(mark)));
        let expired = async || {
            while broker.gauges().retained > 0 || !asked.load(SeqCst) {
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(Duration::from_secs(60), expired()).await.expect("it expires");
        // In the loop that the clock is kept in, and in a later turn of it.
        keep("after");
        timeout(Duration::from_secs(60), expired()).await.expect("it expires while the ledger is silent");
        ticks.abort();
    }
}
