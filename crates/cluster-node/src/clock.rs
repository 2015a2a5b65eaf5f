//! The machine's clocks.

use std::time::Duration;

use cluster::Clock;
use ledger::BoxFuture;
use rustix::time::{ClockId, clock_gettime};

/// A clock that goes on while the machine is suspended, and the wall clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct MachineClock;

fn read(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or_default())
}

impl Clock for MachineClock {
    fn now(&self) -> Duration {
        read(ClockId::Boottime)
    }

    fn wall(&self) -> u64 {
        u64::try_from(read(ClockId::Realtime).as_micros()).unwrap_or(u64::MAX)
    }

    fn sleep(&self, time: Duration) -> BoxFuture<'_, ()> {
        Box::pin(tokio::time::sleep(time))
    }
}
