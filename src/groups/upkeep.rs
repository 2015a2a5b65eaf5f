//! Now and then: what no group needs is freed, what is too old or too much is given up, and groups without members move on
//! over what is not theirs.

use std::sync::{Arc, Weak};

use gateway_core::{Partition, Timestamp};
use store::{Mark, ReadLimit, Reading};

use super::{
    Groups, WhenFull,
    live::{Inner, Live},
};

/// Records that are looked at for one partition at a time.
const LOOK: ReadLimit = ReadLimit { records: 256, bytes: 1 << 20 };

pub(super) async fn run(groups: Weak<Groups>) {
    loop {
        let Some(pause) = groups.upgrade().map(|groups| groups.options.upkeep_interval) else { return };
        tokio::time::sleep(pause).await;
        let Some(groups) = groups.upgrade() else { return };
        groups.keep_up().await;
    }
}

impl Groups {
    /// One round of it.
    pub(super) async fn keep_up(&self) {
        let now = (self.options.clock)();
        let all = self.table.all();
        let is_full = self.log.bytes() > self.options.max_log_bytes;
        for live in &all {
            self.retain(live, now, is_full);
            self.move_on(live).await;
            live.with(|inner| inner.logic.touch());
        }
        self.trim(&all, now);
    }

    /// Gives up what is too old or too much.
    fn retain(&self, live: &Arc<Live>, now: Timestamp, is_full: bool) {
        let marks = live.log.marks(live.id);
        let Some(end) = marks.last().cloned() else { return };
        let full = live.with(|inner| {
            let definition = &inner.kept.definition;
            let (age, bytes, when) =
                (definition.retention_age, definition.retention_bytes, definition.when_full);
            if age > 0 {
                let old = marks.iter().rfind(|mark| mark.time.plus_millis(age) <= now);
                give_up(live, inner, old);
            }
            let (_, held) = live.lag(inner);
            let too_much = bytes > 0 && held > bytes;
            if when == WhenFull::Refuse {
                return too_much || is_full;
            }
            if too_much {
                give_up(live, inner, marks.iter().find(|mark| end.bytes - mark.bytes <= bytes));
            }
            if is_full {
                // One step at a time, until there is room.
                let first = marks.first().map_or(0, |mark| mark.offset);
                give_up(live, inner, marks.iter().find(|mark| mark.offset > first));
            }
            false
        });
        self.marker.set_full(live.id, full);
    }

    /// Partitions that nobody reads, or in which nothing is the group's, must not keep the log from being trimmed.
    async fn move_on(&self, live: &Arc<Live>) {
        for partition in Partition::all() {
            let end = self.log.bounds(partition).end;
            let place = live.with(|inner| {
                let idle = inner.logic.is_idle(partition);
                (idle && inner.logic.place(partition) < end).then(|| inner.logic.place(partition))
            });
            let Some(place) = place else { continue };
            let slice = match self.log.read(partition, place, LOOK) {
                Reading::Now(slice) => slice,
                Reading::Later(slice) => match slice.await {
                    Ok(slice) => slice,
                    Err(_) => continue,
                },
            };
            live.with(|inner| {
                let born = inner.kept.born.get(usize::from(partition.0)).copied().unwrap_or_default();
                let own = slice.records.iter().position(|record| {
                    record.groups.binary_search(&live.id).is_ok()
                        || (record.offset < born && (inner.wants)(&record.message.borrow()))
                });
                let next = own.map_or(slice.next, |at| slice.records[at].offset);
                inner.logic.pass(partition, place, next);
            });
        }
    }

    /// Tells the log what no group needs any more, as far as that is written.
    fn trim(&self, all: &[Arc<Live>], now: Timestamp) {
        let mut needed: Vec<u64> = Partition::all().map(|partition| self.log.bounds(partition).end).collect();
        for live in all {
            let marks = live.log.marks(live.id);
            live.with(|inner| {
                let age = inner.kept.definition.replay_age;
                let replay = if age == 0 { u64::MAX } else { replay(&marks, now, age) };
                for (needed, &floor) in needed.iter_mut().zip(&inner.floors) {
                    *needed = (*needed).min(floor).min(replay);
                }
            });
        }
        for (partition, needed) in Partition::all().zip(needed) {
            if needed > self.log.bounds(partition).start {
                self.log.trim(partition, needed);
            }
        }
    }
}

/// The last place before which everything is older than `age`.
fn replay(marks: &[Mark], now: Timestamp, age: u64) -> u64 {
    marks.iter().rfind(|mark| mark.time.plus_millis(age) <= now).map_or(0, |mark| mark.offset)
}

/// What is before the mark is lost to the group, as far as it is not settled.
fn give_up(live: &Live, inner: &mut Inner, mark: Option<&Mark>) {
    let Some(mark) = mark else { return };
    let mut raised = false;
    for partition in Partition::all() {
        // One in which nothing waits loses nothing.
        if inner.logic.floor(partition) < mark.offset && !inner.logic.is_idle(partition) {
            inner.logic.raise(partition, mark.offset);
            raised = true;
        }
    }
    if raised {
        // Messages before the mark that were never seen: about.
        let (lag, lag_bytes) = live.lag(inner);
        let left = live.appended.load(std::sync::atomic::Ordering::Relaxed).saturating_sub(mark.messages);
        let left_bytes =
            live.appended_bytes.load(std::sync::atomic::Ordering::Relaxed).saturating_sub(mark.bytes);
        let lost = lag.saturating_sub(left);
        inner.base += lost;
        inner.base_bytes += lag_bytes.saturating_sub(left_bytes);
        inner.lost += lost;
    }
}
