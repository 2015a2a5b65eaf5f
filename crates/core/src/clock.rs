//! The time of the process, which never jumps.
//!
//! Deadlines (of sessions, wills, messages that wait, retained messages) are points of this time, in memory and on
//! disk. It advances with the monotonic clock, whatever happens to the wall clock, and continues from process to
//! process by a [`ClockReading`] in the data directory. As long as the wall clock has never been wrong, both show the same.
//! What others are told is converted by [`to_wall`].

use std::{
    sync::{
        LazyLock,
        atomic::{AtomicI64, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use crate::Timestamp;

/// By how many milliseconds the wall clock may deviate from what is expected before that is a jump.
const STEADY: u64 = 250;

/// The longest time between two processes for which the wall clock is believed. If it shows more, or went back, no time
/// is taken to have passed.
pub(crate) const LONGEST_ABSENCE: Duration = Duration::from_hours(7 * 24);

/// Age that a mark may have when its process ends: it is kept each half minute, and a disk may be slow.
const MARK_AGE: Duration = Duration::from_secs(60);

/// Now.
pub fn now() -> Timestamp {
    let elapsed = elapsed();
    TIME.at(elapsed)
}

/// Returns the wall-clock time that corresponds to `at`, provided that the wall clock is right now.
pub fn to_wall(at: Timestamp) -> Timestamp {
    TIME.to_wall(at)
}

/// The time at which the wall clock showed this, provided that it is right now.
pub fn from_wall(at: Timestamp) -> Timestamp {
    let now = now();
    Timestamp(at.0.saturating_add(now.0).saturating_sub(to_wall(now).0))
}

/// Reads the wall clock. Returns by how many milliseconds it has jumped since it was read last, if it has.
pub fn observe() -> Option<i64> {
    let elapsed = elapsed();
    TIME.observe(elapsed, wall())
}

/// Both clocks at this moment, for the next process.
pub fn mark() -> ClockReading {
    let now = now();
    ClockReading { time: now.0, wall: to_wall(now).0 }
}

/// Continues where the previous process stopped. To be called at the start, before any deadline is computed. `at_most` is the time for
/// which nothing can have served but this process would have seen it: the mark is of another machine then, whose wall clock may differ.
pub fn resume(mark: ClockReading, at_most: Option<Duration>) -> Absence {
    let elapsed = elapsed();
    TIME.resume(mark, at_most, elapsed, wall())
}

/// Both clocks at one moment, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockReading {
    /// Time on the clock of the process.
    pub time: u64,
    /// Time on the wall clock.
    pub wall: u64,
}

/// Time that passed between two processes, judged by the wall clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Absence {
    /// This long, which is believed.
    Passed(Duration),
    /// This long, which is not believed: deadlines continue as if no time had passed.
    Incredible(Duration),
    /// The wall clock is ahead of the one that the mark is of by this much: no longer than is known has passed.
    Ahead(Duration),
    /// The clock is behind by this much: deadlines continue as if no time had passed.
    Behind(Duration),
}

/// Instant of the first question to this clock. Reading it also sets the beginning of [`TIME`].
static START: LazyLock<Instant> = LazyLock::new(|| {
    TIME.base.store(wall(), Relaxed);
    #[expect(clippy::disallowed_methods, reason = "the clock of the process")]
    Instant::now()
});

/// Not behind the lock of [`START`], since [`to_wall`] is called for each message.
static TIME: ProcessTime = ProcessTime::new(0);

fn elapsed() -> u64 {
    u64::try_from(START.elapsed().as_millis()).unwrap_or(u64::MAX)
}

#[expect(clippy::disallowed_methods, reason = "the only look at the wall clock that deadlines depend on")]
fn wall() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// The rules, without clocks. `elapsed` is what a monotonic clock shows.
struct ProcessTime {
    /// Time at which `elapsed` was 0.
    base: AtomicU64,
    /// Milliseconds by which the wall clock is ahead of the process's.
    ahead: AtomicI64,
}

impl ProcessTime {
    const fn new(wall: u64) -> Self {
        Self { base: AtomicU64::new(wall), ahead: AtomicI64::new(0) }
    }

    fn at(&self, elapsed: u64) -> Timestamp {
        Timestamp(self.base.load(Relaxed).saturating_add(elapsed))
    }

    fn to_wall(&self, at: Timestamp) -> Timestamp {
        Timestamp(at.0.saturating_add_signed(self.ahead.load(Relaxed)))
    }

    fn observe(&self, elapsed: u64, wall: u64) -> Option<i64> {
        let ahead = difference(wall, self.at(elapsed).0);
        let jump = ahead.saturating_sub(self.ahead.load(Relaxed));
        if jump.unsigned_abs() <= STEADY {
            return None;
        }
        self.ahead.store(ahead, Relaxed);
        Some(jump)
    }

    fn resume(&self, mark: ClockReading, at_most: Option<Duration>, elapsed: u64, wall: u64) -> Absence {
        let at_most = at_most.unwrap_or(Duration::MAX);
        let absence = match wall.checked_sub(mark.wall).map(Duration::from_millis) {
            None => Absence::Behind(Duration::from_millis(mark.wall - wall)),
            Some(away) if away > at_most.saturating_add(MARK_AGE) => Absence::Ahead(away - at_most),
            Some(away) if away > LONGEST_ABSENCE => Absence::Incredible(away),
            Some(away) => Absence::Passed(away),
        };
        let passed = match absence {
            Absence::Passed(away) => away,
            Absence::Ahead(_) => at_most,
            Absence::Incredible(_) | Absence::Behind(_) => Duration::ZERO,
        };
        let passed = u64::try_from(passed.as_millis()).unwrap_or(u64::MAX);
        let time = mark.time.saturating_add(passed);
        let ahead = difference(wall, time);
        // Both are the same except for the moment between reading the two clocks.
        let (time, ahead) = if ahead.unsigned_abs() <= STEADY { (wall, 0) } else { (time, ahead) };
        self.base.store(time.saturating_sub(elapsed), Relaxed);
        self.ahead.store(ahead, Relaxed);
        absence
    }
}

fn difference(a: u64, b: u64) -> i64 {
    i64::try_from(i128::from(a) - i128::from(b)).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: u64 = 24 * 60 * 60 * 1000;
    const WALL: u64 = 20_000 * DAY;

    #[test]
    fn a_jump_of_the_wall_clock_moves_no_deadline() {
        let time = ProcessTime::new(WALL);
        let deadline = time.at(0).plus_secs(3600);
        for jump in [365 * DAY.cast_signed(), -40 * DAY.cast_signed(), 3_600_000] {
            let wall = WALL.saturating_add_signed(jump);
            assert!(time.observe(1_000, wall + 1_000).is_some());
            assert_eq!(time.at(1_000), Timestamp(WALL + 1_000), "only a second has passed");
            assert!(time.at(1_000) < deadline && time.at(3_600_000) == deadline);
            assert_eq!(
                time.to_wall(time.at(1_000)),
                Timestamp(wall + 1_000),
                "others are told what is right now"
            );
            assert_eq!(time.observe(2_000, wall + 2_100), None, "once");
        }
    }

    #[test]
    fn small_differences_of_the_clocks_are_no_jumps() {
        let time = ProcessTime::new(WALL);
        for (elapsed, wall) in [(1_000, WALL + 1_001), (2_000, WALL + 1_999), (3_000, WALL + 3_200)] {
            assert_eq!(time.observe(elapsed, wall), None);
            assert_eq!(time.to_wall(Timestamp(WALL)), Timestamp(WALL));
        }
        assert_eq!(time.observe(4_000, WALL + 4_300), Some(300));
        assert_eq!(time.to_wall(Timestamp(WALL)), Timestamp(WALL + 300));
    }

    #[test]
    fn an_absence_counts_if_the_wall_clock_can_be_believed() {
        let mark = ClockReading { time: WALL, wall: WALL };
        let cases = [
            (WALL + DAY, Absence::Passed(Duration::from_millis(DAY)), WALL + DAY),
            (WALL + 7 * DAY, Absence::Passed(LONGEST_ABSENCE), WALL + 7 * DAY),
            (WALL + 8 * DAY, Absence::Incredible(Duration::from_millis(8 * DAY)), WALL),
            (WALL + 3650 * DAY, Absence::Incredible(Duration::from_millis(3650 * DAY)), WALL),
            (WALL - DAY, Absence::Behind(Duration::from_millis(DAY)), WALL),
            (0, Absence::Behind(Duration::from_millis(WALL)), WALL),
        ];
        for (wall, absence, expected) in cases {
            let time = ProcessTime::new(wall);
            assert_eq!(time.resume(mark, None, 500, wall), absence);
            assert_eq!(time.at(500), Timestamp(expected), "{absence:?}");
            assert_eq!(time.to_wall(time.at(500)), Timestamp(wall), "{absence:?}");
        }
    }

    /// The failure: sessions expire at a takeover because the clocks of two machines differ.
    #[test]
    fn no_more_time_has_passed_than_this_process_has_seen_pass() {
        let mark = ClockReading { time: WALL, wall: WALL };
        let seen = Duration::from_secs(9);
        let hour = Duration::from_secs(3600);
        let cases = [
            (30_000, Absence::Passed(Duration::from_secs(30)), WALL + 30_000),
            (3_609_000, Absence::Ahead(hour), WALL + 9_000),
            (8 * DAY, Absence::Ahead(Duration::from_millis(8 * DAY) - seen), WALL + 9_000),
        ];
        for (ahead, absence, expected) in cases {
            let time = ProcessTime::new(WALL + ahead);
            assert_eq!(time.resume(mark, Some(seen), 500, WALL + ahead), absence);
            assert_eq!(time.at(500), Timestamp(expected), "{absence:?}");
            assert_eq!(time.to_wall(time.at(500)), Timestamp(WALL + ahead), "{absence:?}");
        }
    }

    /// The wall clock was wrong at a start, corrected while the process ran, and right at the next start.
    #[test]
    fn time_goes_on_across_processes_however_wrong_the_wall_clock_is() {
        let first = ProcessTime::new(0);
        assert_eq!(first.observe(1_000, WALL), Some((WALL - 1_000).cast_signed()));
        let now = first.at(5_000);
        let mark = ClockReading { time: now.0, wall: first.to_wall(now).0 };
        assert_eq!(mark, ClockReading { time: 5_000, wall: WALL + 4_000 });
        let second = ProcessTime::new(WALL + 10_000);
        assert_eq!(second.resume(mark, None, 0, WALL + 10_000), Absence::Passed(Duration::from_secs(6)));
        assert_eq!(second.at(0), Timestamp(11_000));
        assert_eq!(second.to_wall(second.at(0)), Timestamp(WALL + 10_000));
    }
}
