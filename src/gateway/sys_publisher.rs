//! Publishes the `$SYS` topics.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use broker::{Broker, Turn};
use gateway_core::{Message, Origin, clock};
use telemetry::ProcessStats;

use super::sys::{SysInput, SysStats, SysTotals, is_answered_once};

/// Publishes `$SYS`, retained so that a subscriber is answered at once. The time and the version are only kept, so that
/// a subscriber is answered once; the time is that of the last interval.
pub(super) struct SysPublisher {
    broker: Broker,
    stats: SysStats,
}

impl SysPublisher {
    /// Publishes for the first time: before anybody can subscribe, as a value that is only kept is never sent later.
    pub(super) fn start(broker: Broker) -> Self {
        let mut sys = Self { broker, stats: SysStats::new(since_epoch()) };
        sys.publish();
        sys
    }

    /// Publishes again at every interval.
    pub(super) async fn run(mut self, interval: Duration) {
        let mut ticks = tokio::time::interval(interval.max(Duration::from_secs(1)));
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        // The first is now.
        ticks.tick().await;
        loop {
            ticks.tick().await;
            self.publish();
        }
    }

    fn publish(&mut self) {
        let process = ProcessStats::read();
        let input =
            SysInput { now: since_epoch(), heap: process.rss_bytes, heap_maximum: process.rss_peak_bytes };
        let values = self.stats.tick(input, &SysTotals::read(), &self.broker.gauges());
        let mut turn = Turn::default();
        for (topic, payload) in &values {
            let mut message = Message::new(topic, payload.as_bytes(), clock::now(), Origin::SERVER);
            message.retain = true;
            // A value that answers a subscription once is only kept; without retained messages it can only be sent.
            if !(is_answered_once(topic) && self.broker.set_retained(&message).is_ok()) {
                self.broker.publish(&message, &mut turn);
            }
        }
        turn.flush();
    }
}

#[expect(clippy::disallowed_methods, reason = "$SYS shows the wall clock")]
fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
