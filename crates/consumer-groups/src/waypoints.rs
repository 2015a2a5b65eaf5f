//! Places at which a group can begin to keep less, between those at which the log counts, which are 64 MiB apart.

use std::collections::VecDeque;

use gateway_core::{LogRecord, Timestamp};
use store::Mark;

/// Parts into which what a group keeps is divided, by bytes and by time.
const PARTS: u64 = 32;
/// Places at most: with more of them every second one is forgotten.
const MOST: usize = 4 * PARTS as usize;

/// Places of what was appended for a group by this process, in order.
#[derive(Debug, Default)]
pub(super) struct Waypoints {
    marks: VecDeque<Mark>,
    /// Bytes between two of them.
    apart: u64,
    /// The bytes at which the next is due, and the time.
    next: (u64, Timestamp),
}

impl Waypoints {
    /// Tells whether [`Self::note`] would note a place in records that end at `bytes`, the last of them received at `time`.
    pub(super) fn is_due(&self, (most, age): (u64, u64), bytes: u64, time: Timestamp) -> bool {
        most > 0 && bytes > self.next.0 || age > 0 && time >= self.next.1
    }

    /// The group has got these records, and before them so many messages and bytes. It keeps `most` bytes, for `age` ms; 0 is
    /// without limit. Nothing in the log was received later than `latest`. A dead letter that is put back is older than what is
    /// before it, which must not go for that: see [`Mark::time`].
    pub(super) fn note<'a>(
        &mut self,
        (most, age): (u64, u64),
        records: impl Iterator<Item = &'a LogRecord>,
        before: (u64, u64),
        latest: Timestamp,
    ) {
        if most == 0 && age == 0 {
            return;
        }
        let (mut messages, mut bytes) = before;
        self.apart = self.apart.max(most / PARTS).max(1);
        for record in records {
            let time = record.message.received.max(latest);
            let is_due = most > 0 && bytes >= self.next.0 || age > 0 && time >= self.next.1;
            if is_due && self.marks.back().is_none_or(|last| last.offset < record.offset) {
                self.marks.push_back(Mark { offset: record.offset, time, messages, bytes });
                self.next = (bytes + self.apart, time.plus_millis(age / PARTS));
                if self.marks.len() > MOST {
                    self.thin();
                }
            }
            messages += 1;
            bytes += record.message.cost() as u64;
        }
    }

    fn thin(&mut self) {
        let mut keep = false;
        self.marks.retain(|_| {
            keep = !keep;
            keep
        });
        self.apart *= 2;
    }

    /// Has the next record noted, since the bounds of the group have changed.
    pub(super) fn hasten(&mut self) {
        (self.apart, self.next) = (0, (0, Timestamp(0)));
    }

    /// Forgets the places before this one, which are no longer of use.
    pub(super) fn forget_before(&mut self, offset: u64) {
        while self.marks.front().is_some_and(|mark| mark.offset < offset) {
            self.marks.pop_front();
        }
        if self.marks.len() < PARTS as usize {
            self.apart = 0;
        }
    }

    /// The last place before which everything is older than `age` ms.
    pub(super) fn aged(&self, age: u64, now: Timestamp, marks: &[Mark]) -> Option<Mark> {
        let old = marks.iter().chain(&self.marks).filter(|mark| mark.time.plus_millis(age) <= now);
        old.max_by_key(|mark| mark.offset).cloned()
    }

    /// The first place after which no more than `most` bytes are, given the places at which the log counts, the last of which
    /// is the end. Between two that are far apart it is where it would be if messages were spread evenly.
    pub(super) fn keeping(&self, most: u64, marks: &[Mark]) -> Option<Mark> {
        let end = marks.last()?;
        let fits = |mark: &&Mark| end.bytes.saturating_sub(mark.bytes) <= most;
        let all = || marks.iter().chain(&self.marks);
        let after = all().filter(fits).min_by_key(|mark| mark.offset)?;
        let before = all().filter(|mark| !fits(mark)).max_by_key(|mark| mark.offset)?;
        let kept = end.bytes.saturating_sub(after.bytes);
        if most - kept <= most / 8 {
            return Some(after.clone());
        }
        let bytes = end.bytes.saturating_sub(most);
        let part = |from: u64, to: u64| {
            let (done, whole) = (bytes - before.bytes, (after.bytes - before.bytes).max(1));
            from + (u128::from(to.saturating_sub(from)) * u128::from(done) / u128::from(whole)) as u64
        };
        Some(Mark {
            // Between records there is nothing: the next one is the first that is kept.
            offset: part(before.offset, after.offset) + 1,
            time: before.time,
            messages: part(before.messages, after.messages),
            bytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(offset: u64, messages: u64, bytes: u64) -> Mark {
        Mark { offset, time: Timestamp(1), messages, bytes }
    }

    #[test]
    fn what_the_log_counts_far_apart_is_divided_evenly() {
        let none = Waypoints::default();
        let marks = [mark(0, 0, 0), mark(1_000, 100, 10_000)];
        let place = none.keeping(2_500, &marks).expect("a place");
        assert_eq!((place.offset, place.messages, place.bytes), (751, 75, 7_500));
        assert!(none.keeping(10_000, &marks).is_none(), "nothing goes");
        assert!(none.keeping(1, &[]).is_none());
    }

    #[test]
    fn the_nearest_place_that_was_noted_is_taken() {
        let mut noted = Waypoints::default();
        noted.marks.extend([mark(500, 50, 5_000), mark(720, 76, 7_600)]);
        let marks = [mark(0, 0, 0), mark(1_000, 100, 10_000)];
        let place = noted.keeping(2_500, &marks).expect("a place");
        assert_eq!(place, mark(720, 76, 7_600));
        noted.forget_before(721);
        assert_eq!(noted.keeping(2_500, &marks).expect("a place").messages, 75);
    }

    #[test]
    fn what_is_old_goes_although_the_log_counts_it_with_what_is_new() {
        let at = |offset, time| Mark { time: Timestamp(time), ..mark(offset, offset, offset) };
        let mut noted = Waypoints::default();
        noted.marks.extend([at(100, 1_000), at(200, 2_000), at(300, 3_000)]);
        let marks = [at(0, 0), at(400, 4_000)];
        let place = |now| noted.aged(500, Timestamp(now), &marks).map(|place| place.offset);
        assert_eq!((place(499), place(2_600), place(5_000)), (None, Some(200), Some(400)));
    }
}
