//! Now and then: what no group needs is freed, what is too old or too much is given up, and groups pass over what is not
//! theirs.
//!
//! A group is told of each message of its own that becomes durable. So what nothing waits of needs no reading to be passed
//! over: a quiet group keeps nothing of the log, and costs a look at its partitions in each round and a write for each segment
//! of the log. Only messages from before this process may have to be looked at.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use gateway_core::{LogRecord, Partition, Timestamp};
use store::{LogRead, Mark, PartitionedLog, ReadLimit, Slice};
use tokio::time::MissedTickBehavior;

use super::{
    Intake, RetentionPolicy,
    live::{GroupInner, Live},
    watching::GroupTable,
};

/// Records that are looked at for one partition at a time.
const LOOK: ReadLimit = ReadLimit { records: 256, bytes: 1 << 20 };
/// Lost messages that are counted one by one in a round, for each group.
const MOST_COUNTED: usize = 100_000;

/// The log may exceed its size by one part in this many: a group that keeps all it has and refuses more must not let the log fill
/// the disk with what others get.
const OVER: u64 = 8;

/// Messages of a group in a partition that nobody has read.
struct UnreadMessages {
    partition: Partition,
    /// The place and the cost of each.
    records: Vec<(u64, u64)>,
    /// There are no others.
    is_all: bool,
}

/// Room in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Space {
    /// The log takes more.
    Some,
    /// The log takes more while groups that do not refuse give up old messages.
    None,
    /// Even so there is no room: nothing more is taken for any group.
    Over,
}

/// Time that the end waits for the last writes of all groups.
const LAST_WRITE: Duration = Duration::from_secs(1);
/// Reads of a group in one round, to find messages from before this process.
const MOST_LOOKS: usize = 64;
/// Times between rounds that are made because a group, or the log, has more than it may.
const AFTER_GROUP: Duration = Duration::from_millis(5);
const AFTER_LOG: Duration = Duration::from_millis(100);

/// The log and its groups, as what is done with them now and then needs them.
pub(super) struct GroupUpkeep {
    log: Arc<dyn PartitionedLog>,
    table: Arc<GroupTable>,
    clock: fn() -> Timestamp,
    max_log_bytes: u64,
}

impl GroupUpkeep {
    pub(super) fn new(
        log: Arc<dyn PartitionedLog>,
        table: Arc<GroupTable>,
        clock: fn() -> Timestamp,
        max_log_bytes: u64,
    ) -> Self {
        Self { log, table, clock, max_log_bytes }
    }

    /// One round per `interval`, and earlier when a group, or the log, has more than it may.
    pub(super) async fn run(self: Arc<Self>, interval: Duration) {
        let mut ticks = tokio::time::interval(interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks.tick().await;
        loop {
            let is_over = tokio::select! {
                biased;
                _ = ticks.tick() => false,
                () = self.table.over() => true,
            };
            if !is_over || self.log.bytes() > self.max_log_bytes {
                self.keep_up().await;
                tokio::time::sleep(if is_over { AFTER_LOG } else { Duration::ZERO }).await;
            } else {
                self.keep_bounds().await;
                tokio::time::sleep(AFTER_GROUP).await;
            }
        }
    }

    /// One round of it.
    pub(super) async fn keep_up(&self) {
        let now = (self.clock)();
        let all = self.table.all();
        let (room, excess) = self.space();
        for live in &all {
            self.retain(live, now, (room, excess)).await;
            self.move_on(live).await;
            let place = self.log.trimmable();
            live.with(|inner| inner.logic.touch(place));
        }
        self.trim(&all, now);
    }

    /// For the end: writes how far each group has got by others' messages, so that the next start need not read them.
    pub(super) async fn write_places(&self) {
        let (all, told) = (self.table.all(), self.table.told());
        let mut numbers = Vec::with_capacity(all.len());
        for live in &all {
            numbers.push(live.with(|inner| {
                inner.pass(told);
                inner.logic.touch(u64::MAX);
                Live::wait_number(inner)
            }));
        }
        let written = async {
            for (live, number) in all.iter().zip(numbers) {
                let _ = live.written(number).await;
            }
        };
        let _ = tokio::time::timeout(LAST_WRITE, written).await;
    }

    /// Gives up what groups have beyond their own bounds.
    async fn keep_bounds(&self) {
        let (now, space) = ((self.clock)(), self.space());
        for live in self.table.all() {
            if live.over.swap(false, Relaxed) {
                self.retain(&live, now, space).await;
            }
        }
    }

    /// The room in the log, and the bytes that it has too many.
    fn space(&self) -> (Space, u64) {
        let (bytes, most) = (self.log.bytes(), self.max_log_bytes);
        let room = match bytes {
            _ if bytes <= most => Space::Some,
            _ if bytes - most <= most / OVER => Space::None,
            _ => Space::Over,
        };
        (room, bytes.saturating_sub(most))
    }

    /// Gives up what is too old or too much.
    async fn retain(&self, live: &Arc<Live>, now: Timestamp, (room, excess): (Space, u64)) {
        let is_full = room != Space::Some;
        let marks = live.log.marks(live.id);
        let look = |inner: &mut GroupInner| {
            let definition = &inner.kept.definition;
            let (age, bytes, when) =
                (definition.retention_age, definition.retention_bytes, definition.when_full);
            let old = if age > 0 { inner.waypoints.aged(age, now, &marks) } else { None };
            let (_, held) = live.lag(inner);
            let too_much = bytes > 0 && held > bytes;
            if when == RetentionPolicy::Refuse {
                inner.log_intake = if is_full { Intake::Refuses } else { Intake::All };
                return old;
            }
            // Messages that others keep must not fill the disk; the loss of this group is no publisher's trouble.
            inner.log_intake = if room == Space::Over { Intake::Skips } else { Intake::All };
            let over = if too_much { inner.waypoints.keeping(bytes, &marks) } else { None };
            // As much as there is too much, or one step where places are not bytes.
            let first = marks.first().map_or(0, |mark| mark.offset);
            let enough = marks.iter().find(|mark| mark.offset > first && mark.offset - first >= excess);
            let step = enough.or_else(|| marks.iter().find(|mark| mark.offset > first));
            let step = step.filter(|_| is_full).cloned();
            old.into_iter().chain(over).chain(step).max_by_key(|mark| mark.offset)
        };
        if let Some(place) = live.with(look) {
            self.give_up(live, &place).await;
        }
        live.with(|inner| live.update_intake(inner));
    }

    /// Gives up the messages before the mark, as far as they are not settled and no member has them: the group has lost
    /// them.
    async fn give_up(&self, live: &Arc<Live>, mark: &Mark) {
        // If no partition has been read beyond the mark, everything after it is still to come, and the loss is a subtraction.
        // Otherwise lost messages are counted one by one.
        let waiting: Vec<Partition> = live.with(|inner| {
            inner.waypoints.forget_before(mark.offset);
            let logic = &inner.logic;
            let waits =
                |partition: &Partition| logic.floor(*partition) < mark.offset && !logic.is_idle(*partition);
            Partition::all().filter(waits).collect()
        });
        if waiting.is_empty() {
            return;
        }
        let is_beyond = |inner: &mut GroupInner| {
            Partition::all().any(|partition| inner.logic.place(partition) > mark.offset)
        };
        let counted = match live.with(is_beyond) {
            true => Some(self.unread(live, &waiting, mark.offset).await),
            false => None,
        };
        live.with(|inner| {
            let unread = match counted {
                Some(counted) => raise_counted(inner, &counted, mark),
                None => raise_all(live, inner, &waiting, mark),
            };
            inner.base += unread.0;
            inner.base_bytes += unread.1;
            inner.lost += unread.0;
        });
    }

    /// The group's messages before a place that nobody has read: where they are, and what they cost. Each is read once in its
    /// life for this; after very many the rest is not counted.
    async fn unread(&self, live: &Arc<Live>, partitions: &[Partition], until: u64) -> Vec<UnreadMessages> {
        let mut left = MOST_COUNTED;
        let mut all = Vec::with_capacity(partitions.len());
        for &partition in partitions {
            let mut place = live.with(|inner| inner.logic.place(partition));
            let (mut records, mut is_whole) = (Vec::new(), true);
            while place < until && left > 0 {
                let Some((slice, own)) = self.look(live, partition, place).await else { break };
                let own = own.into_iter().map(|at| &slice.records[at]).filter(|record| record.offset < until);
                let before = records.len();
                records.extend(own.map(|record| (record.offset, record.message.cost() as u64)));
                left = left.saturating_sub(records.len() - before);
                is_whole &= slice.missing.is_none();
                place = slice.next.max(place + 1);
            }
            all.push(UnreadMessages { partition, records, is_all: is_whole && place >= until });
        }
        all
    }

    /// Reads a partition from a place on; also returns which of the records are the group's.
    async fn look(&self, live: &Arc<Live>, partition: Partition, place: u64) -> Option<(Slice, Vec<usize>)> {
        let slice = match self.log.read(partition, place, LOOK) {
            LogRead::Now(slice) => slice,
            LogRead::Later(slice) => slice.await.ok()?,
        };
        let own = live.with(|inner| {
            let born = inner.kept.born.get(usize::from(partition.0)).copied().unwrap_or_default();
            let is_own = |record: &LogRecord| {
                record.groups.binary_search(&live.id).is_ok()
                    || (record.offset < born && (inner.wants)(&record.message.borrow()))
            };
            let own = slice.records.iter().enumerate().filter(|(_, record)| is_own(record));
            own.map(|(at, _)| at).collect()
        });
        Some((slice, own))
    }

    /// Passes over what is not the group's.
    async fn move_on(&self, live: &Arc<Live>) {
        let told = self.table.told();
        live.with(|inner| inner.pass(told));
        // Messages from before this process were not told to the group.
        let unread: Vec<(Partition, u64)> = live.with(|inner| {
            let places = Partition::all().filter(|partition| inner.logic.is_unread(*partition));
            let places = places.map(|partition| (partition, inner.logic.place(partition)));
            places.filter(|(partition, place)| inner.next_own.get(&partition.0) != Some(place)).collect()
        });
        for (partition, place) in unread.into_iter().take(MOST_LOOKS) {
            let Some((slice, own)) = self.look(live, partition, place).await else { continue };
            live.with(|inner| {
                let next = match own.first() {
                    Some(&at) => {
                        let next = slice.records[at].offset;
                        inner.next_own.insert(partition.0, next);
                        next
                    }
                    None => slice.next,
                };
                inner.logic.pass(partition, place, next);
            });
        }
    }

    /// Tells the log what all groups are done with, as far as that is written.
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

/// Raises partitions to the mark; the messages that were not read and are lost, and their cost.
fn raise_counted(inner: &mut GroupInner, counted: &[UnreadMessages], mark: &Mark) -> (u64, u64) {
    let mut lost = (0, 0);
    for UnreadMessages { partition, records, is_all } in counted {
        // Of what was counted, a member may have read some meanwhile.
        let place = inner.logic.place(*partition);
        let left = records.iter().filter(|(offset, _)| *offset >= place);
        let (messages, bytes) =
            left.fold((0, 0), |(messages, bytes), (_, cost)| (messages + 1, bytes + cost));
        inner.logic.raise(*partition, mark.offset, is_all.then_some(messages));
        lost = (lost.0 + messages, lost.1 + bytes);
    }
    lost
}

/// The same where nobody has read beyond the mark, and all behind it is left. How many are lost in each of several partitions
/// is not known.
fn raise_all(live: &Live, inner: &mut GroupInner, waiting: &[Partition], mark: &Mark) -> (u64, u64) {
    let had = waiting.iter().map(|partition| inner.logic.outstanding_before(*partition, mark.offset));
    let left = live.appended.load(Relaxed).saturating_sub(mark.messages) + had.sum::<usize>() as u64;
    let left_bytes = live.appended_bytes.load(Relaxed).saturating_sub(mark.bytes);
    let (lag, lag_bytes) = live.lag(inner);
    let seen = waiting.iter().map(|partition| inner.logic.seen_before(*partition, mark.offset));
    let unread = lag.saturating_sub(seen.sum::<usize>() as u64 + left);
    for &partition in waiting {
        inner.logic.raise(partition, mark.offset, (waiting.len() == 1).then_some(unread));
    }
    (unread, lag_bytes.saturating_sub(left_bytes))
}

/// The last place before which everything is older than `age`.
fn replay(marks: &[Mark], now: Timestamp, age: u64) -> u64 {
    marks.iter().rfind(|mark| mark.time.plus_millis(age) <= now).map_or(0, |mark| mark.offset)
}
