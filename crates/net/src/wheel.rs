//! Keep alive of all connections of a shard: a wheel of places, each an eighth of a second, over when each device was
//! last heard.

use std::{
    cell::{Cell, RefCell},
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use broker::{CloseReason, Session};
use device::{Device, HEARD, PAUSED};

use crate::counters::count;

/// Ticks of a shard's clock in a second.
pub(super) const PER_SECOND: u32 = 8;

/// Time between two ticks.
pub(super) const TICK: Duration = Duration::from_millis(1000 / PER_SECOND as u64);

/// A wheel turns once in about four minutes: a longer keep alive is looked at again as often.
const PLACES: u32 = 256 * PER_SECOND;
/// Ended connections before a sweep is worth it.
const SWEEP: usize = 1024;

/// The longest interval that one tick may account for. If the shard stalled for longer, the excess is not the peer's silence.
const LONGEST: Duration = Duration::from_millis(2 * 1000 / PER_SECOND as u64);

/// Slack, so that nobody is closed early: what was heard is noted with the tick before, which is up to [`LONGEST`] old, and
/// ticks are rounded down. Together with the next tick this stays far below the second that a will may be late.
const BEHIND: u32 = 3;

struct WheelEntry {
    device: Weak<Device>,
    epoch: u32,
    /// Ticks of silence allowed: keep alive times 1.5 [MQTT-3.1.2-22].
    allowed: u32,
}

struct Wheel {
    start: Instant,
    /// Time of the last tick.
    ticked: Duration,
    /// The time that the shard lived through, without that in which it stood still.
    lived: Duration,
    done: u32,
    entries: usize,
    /// Watched connections that ended since the last sweep; their entries may still be there.
    ended: usize,
    places: Vec<Vec<WheelEntry>>,
}

thread_local! {
    static NOW: Cell<u32> = const { Cell::new(0) };
    static WHEEL: RefCell<Wheel> = RefCell::new(Wheel {
        #[expect(clippy::disallowed_methods, reason = "the shard's monotonic clock")]
        start: Instant::now(),
        ticked: Duration::ZERO,
        lived: Duration::ZERO,
        done: 0,
        entries: 0,
        ended: 0,
        places: (0..PLACES).map(|_| Vec::new()).collect(),
    });
}

/// Ticks on this shard's clock, as of the last: reading it costs no look at a clock.
pub(super) fn now() -> u32 {
    NOW.get()
}

/// Watches a connection.
pub(super) fn watch(device: &Arc<Device>, epoch: u32, keep_alive: u16) {
    if keep_alive == 0 {
        return;
    }
    let allowed = u32::from(keep_alive) * (PER_SECOND + PER_SECOND / 2);
    WHEEL.with_borrow_mut(|wheel| {
        let entry = WheelEntry { device: Arc::downgrade(device), epoch, allowed };
        let due = now() + allowed + BEHIND;
        insert(wheel, entry, due);
    });
}

/// A watched connection has ended. Its entry keeps the memory of its device, and would do so until it is due, which
/// clients that come and go would make grow: when most entries are of ended connections, they are swept out.
pub(super) fn ended() {
    WHEEL.with_borrow_mut(|wheel| {
        wheel.ended += 1;
        if wheel.ended >= SWEEP && wheel.ended * 2 > wheel.entries {
            for place in &mut wheel.places {
                place.retain(|entry| {
                    entry.device.upgrade().is_some_and(|device| device.lock_owned(entry.epoch).is_some())
                });
            }
            wheel.entries = wheel.places.iter().map(Vec::len).sum();
            wheel.ended = 0;
        }
    });
}

/// Closes the silent connections that are due. Call every [`TICK`]. A shard that stalls gets its ticks late and all at
/// once: the time of which it knows nothing is not counted.
pub(super) fn tick() {
    tick_at(WHEEL.with_borrow(|wheel| wheel.start.elapsed()));
}

/// A tick so long after the start.
fn tick_at(elapsed: Duration) {
    let now = WHEEL.with_borrow_mut(|wheel| {
        wheel.lived += elapsed.saturating_sub(wheel.ticked).min(LONGEST);
        wheel.ticked = elapsed;
        u32::try_from(wheel.lived.as_millis() / TICK.as_millis()).unwrap_or(PAUSED - 1)
    });
    // The value noted for a tick must not look like a pause.
    NOW.set(if now & HEARD == HEARD { now - 1 } else { now });
    loop {
        let entries = WHEEL.with_borrow_mut(|wheel| {
            if wheel.done >= now {
                return None;
            }
            wheel.done += 1;
            let place = (wheel.done % PLACES) as usize;
            let due = std::mem::take(&mut wheel.places[place]);
            wheel.entries -= due.len();
            Some(due)
        });
        let Some(entries) = entries else { return };
        for entry in entries {
            check(entry, now);
        }
    }
}

fn check(entry: WheelEntry, now: u32) {
    let Some(device) = entry.device.upgrade() else { return };
    if device.lock_owned(entry.epoch).is_none() {
        return;
    }
    let due = match device.last_heard(entry.epoch, now) {
        Some(PAUSED) => now + entry.allowed,
        Some(seen) => seen + entry.allowed + BEHIND,
        None => {
            // The connection that this one took over has just noted activity of its own, which it will soon stop doing. Start
            // counting from now.
            device.heard(entry.epoch, now);
            now + entry.allowed + BEHIND
        }
    };
    if due <= now {
        count(|c| c.keep_alive_timeouts.add(1));
        device.close(entry.epoch, CloseReason::KeepAlive);
        return;
    }
    WHEEL.with_borrow_mut(|wheel| insert(wheel, entry, due));
}

fn insert(wheel: &mut Wheel, entry: WheelEntry, due: u32) {
    let due = due.clamp(wheel.done + 1, wheel.done + PLACES - 1);
    wheel.places[(due % PLACES) as usize].push(entry);
    wheel.entries += 1;
}

#[cfg(test)]
mod tests {
    use device::{
        SocketWriter,
        test_util::{attach, context, open, open_as},
    };
    use gateway_core::limits::Limits;

    use super::*;

    /// A tick so many milliseconds after the wheel began.
    fn tick_after(millis: u64) {
        tick_at(Duration::from_millis(millis));
    }

    /// Its bytes may wait in its socket all the time: only the shard was silent.
    #[test]
    fn what_a_shard_stood_still_is_nobody_s_silence() {
        let context = context(Limits::default());
        let close = |device: &Device| device.lock().link.as_ref().and_then(|link| link.close);
        let (device, epoch) = open(&context, true);
        assert!(attach(&device, epoch, &Arc::default(), SocketWriter::Owner));
        tick_after(1_000);
        device.heard(epoch, now());
        watch(&device, epoch, 10);
        // A minute, and then all ticks at once.
        for _ in 0..60 {
            tick_after(61_000);
        }
        assert_eq!(close(&device), None);
        ticks(61_000, 75_750);
        assert_eq!(close(&device), None, "15 seconds, of which the stall counts for a quarter of one");
        ticks(75_750, 76_500);
        assert_eq!(close(&device), Some(CloseReason::KeepAlive), "real silence is found as before");
    }

    /// All ticks between two times, in milliseconds.
    fn ticks(from: u64, to: u64) {
        (from..=to).step_by(125).for_each(tick_after);
    }

    /// [MQTT-3.1.2-24] of 3.1.1, [MQTT-3.1.2-22] of 5.0: whenever the last packet comes between two ticks, and though ticks
    /// are late.
    #[test]
    fn silence_ends_a_connection_within_a_second_of_its_time_and_never_early() {
        let context = context(Limits::default());
        let tick_time = |tick: u64| tick * 125 + tick * 37 % 100;
        let mut open_connections = Vec::new();
        let mut closed = 0;
        for tick in 0..100 {
            tick_after(tick_time(tick));
            open_connections.retain(|(device, heard): &(Arc<Device>, u64)| {
                let close = device.lock().link.as_ref().and_then(|link| link.close);
                if close == Some(CloseReason::KeepAlive) {
                    let silent = tick_time(tick) - heard;
                    assert!((1_500..2_500).contains(&silent), "{silent} ms");
                    closed += 1;
                }
                close.is_none()
            });
            if tick < 70 {
                let (device, epoch) = open_as(&context, &format!("c{tick}"), true);
                assert!(attach(&device, epoch, &Arc::default(), SocketWriter::Owner));
                let time_to_next = tick_time(tick + 1) - tick_time(tick);
                device.heard(epoch, now());
                watch(&device, epoch, 1);
                open_connections.push((device, tick_time(tick) + (tick * 29) % time_to_next));
            }
        }
        assert_eq!(closed, 70);
    }

    /// The earlier connection may be on another shard, in the middle of a poll, when its session is taken over.
    #[test]
    fn what_a_taken_over_connection_notes_does_not_count_for_its_successor() {
        let context = context(Limits::default());
        let close = |device: &Device| device.lock().link.as_ref().and_then(|link| link.close);
        let (device, earlier) = open(&context, false);
        assert!(attach(&device, earlier, &Arc::default(), SocketWriter::Owner));
        let (device, epoch) = open(&context, false);
        device.heard(epoch, now());
        assert!(attach(&device, epoch, &Arc::default(), SocketWriter::Owner));
        watch(&device, epoch, 10);
        device.heard(earlier, PAUSED);
        ticks(1_000, 40_000);
        assert_eq!(close(&device), Some(CloseReason::KeepAlive), "silent since it attached");
    }

    #[test]
    fn connections_that_come_and_go_leave_no_memory_in_the_wheel() {
        let context = context(Limits::default());
        for _ in 0..5_000 {
            let (device, epoch) = open(&context, true);
            watch(&device, epoch, 60_000);
            ended();
        }
        let entries = WHEEL.with_borrow(|wheel| wheel.entries);
        assert!(entries <= 1_024, "{entries} entries of ended connections");
    }
}
