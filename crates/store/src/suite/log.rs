//! Suite that every [`PartitionedLog`] must pass. Each engine runs all of it, and so does one that is told to delay, to settle
//! partitions in another order than they came in, and to fail.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::SeqCst},
};

use gateway_core::{
    ClientId, Commit, GroupId, LogRecord, Message, Origin, OriginKind, Partition, QoS, SharedMessage,
    Timestamp,
};
use parking_lot::{Condvar, Mutex};

use crate::{LogRead, LogWatcher, MissingReason, PartitionedLog, ReadLimit, Slice};

pub const EVERYTHING: ReadLimit = ReadLimit { records: usize::MAX, bytes: usize::MAX };

/// Makes what was appended durable, if the engine must be told; called again and again while somebody waits.
pub type Push<'a> = &'a (dyn Fn() + Sync);

/// A message of a device with all that one can have.
pub fn message(text: &str, received: u64) -> Arc<SharedMessage> {
    let device = ClientId::new("device");
    let origin = Origin { kind: OriginKind::Device, client_id: Some(&device), slot: 3 };
    let mut message = Message::new("some/topic", text.as_bytes(), Timestamp(received), origin);
    message.qos = QoS::AtLeastOnce;
    message.expires = Some(Timestamp(received + 60_000));
    Arc::clone(message.share())
}

pub fn groups(ids: &[u32]) -> Arc<[GroupId]> {
    ids.iter().map(|id| GroupId(*id)).collect()
}

pub fn text(record: &LogRecord) -> String {
    String::from_utf8(record.message.payload.to_vec()).unwrap()
}

pub fn wait<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

pub fn read(log: &dyn PartitionedLog, partition: Partition, from: u64, limit: ReadLimit) -> Slice {
    match log.read(partition, from, limit) {
        LogRead::Now(slice) => slice,
        LogRead::Later(slice) => wait(slice).unwrap(),
    }
}

/// All records of a partition from `from` on, and what was told as missing.
pub fn all(
    log: &dyn PartitionedLog,
    partition: Partition,
    mut from: u64,
    limit: ReadLimit,
) -> (Vec<LogRecord>, Vec<MissingReason>) {
    let (mut records, mut missing): (Vec<LogRecord>, _) = (Vec::new(), Vec::new());
    loop {
        let slice = read(log, partition, from, limit);
        assert!(slice.records.len() <= limit.records);
        assert!(slice.records.iter().all(|record| record.offset >= from && record.offset < slice.next));
        missing.extend(slice.missing.map(|missing| missing.reason));
        records.extend(slice.records);
        assert!(records.is_sorted_by(|a, b| a.offset < b.offset), "in order, each once");
        if slice.next == from || slice.next >= log.bounds(partition).end {
            return (records, missing);
        }
        from = slice.next;
    }
}

fn done(commit: &Arc<Commit>, push: Push<'_>) -> bool {
    loop {
        if let Some(result) = commit.result() {
            return result.is_ok();
        }
        push();
        std::thread::yield_now();
    }
}

/// Appends, waits and returns whether it is durable.
pub fn append(
    log: &dyn PartitionedLog,
    partition: Partition,
    ids: &[u32],
    message: &Arc<SharedMessage>,
    push: Push<'_>,
) -> bool {
    let commit = Commit::new();
    log.append(partition, &groups(ids), message, Some(commit.part())).unwrap();
    commit.done();
    done(&commit, push)
}

#[derive(Default)]
struct SeenRecords {
    records: Mutex<Vec<(Partition, LogRecord)>>,
    changed: Condvar,
}

impl LogWatcher for SeenRecords {
    fn appended(&self, records: &[(Partition, LogRecord)]) {
        self.records.lock().extend_from_slice(records);
        self.changed.notify_all();
    }
}

/// Runs the whole suite on an empty log that is nowhere full.
pub fn run(log: &dyn PartitionedLog, push: Push<'_>) {
    let seen = Arc::new(SeenRecords::default());
    log.watch(Arc::clone(&seen) as _);
    an_empty_log_has_nothing(log);
    a_record_comes_back_as_it_went(log, push);
    each_partition_is_in_order_and_read_in_parts(log, push);
    the_watcher_hears_of_each_once_and_in_order(log, &seen);
    what_has_ended_can_be_read(log, push);
    a_time_is_found(log, push);
    marks_count_what_a_group_got(log, push);
    marks_do_not_go_back_in_time(log, push);
    what_is_trimmed_may_go_and_the_rest_stays(log, push);
}

/// Tells whether the log would take a QoS 1 message of a sender that has nothing there.
pub fn accepts(log: &dyn PartitionedLog) -> bool {
    let mut message = Message::new("t", b"", Timestamp(0), Origin::SERVER);
    message.qos = QoS::AtLeastOnce;
    log.admit(&message).is_ok()
}

fn an_empty_log_has_nothing(log: &dyn PartitionedLog) {
    for partition in Partition::all() {
        let bounds = log.bounds(partition);
        assert!(bounds.end <= bounds.start, "{bounds:?}");
        let slice = read(log, partition, 0, EVERYTHING);
        assert!(slice.records.is_empty() && slice.missing.is_none());
        assert_eq!(wait(log.find(partition, Timestamp(0))).unwrap(), bounds.end);
    }
    assert!(accepts(log));
}

fn a_record_comes_back_as_it_went(log: &dyn PartitionedLog, push: Push<'_>) {
    let partition = Partition(200);
    let message = message("whole", 1_000);
    let asked = message.with_receipt(Arc::default());
    for groups in [&[][..], &[7], &[1, 2, 300, 70_000, u32::MAX]] {
        let from = log.bounds(partition).end;
        assert!(append(log, partition, groups, &asked, push));
        let (records, missing) = all(log, partition, from, EVERYTHING);
        let [record] = &records[..] else { panic!("{records:?}") };
        assert!(missing.is_empty());
        assert_eq!(record.offset + 1, log.bounds(partition).end);
        assert_eq!(record.groups.iter().map(|group| group.0).collect::<Vec<_>>(), groups);
        let kept = &record.message;
        assert!(kept.receipt.is_none(), "nobody waits for what is in the log");
        let facts = |message: &SharedMessage| {
            let SharedMessage { topic, payload, qos, retain, expires, received, kind, client_id, .. } =
                message;
            format!("{topic} {payload:?} {qos:?} {retain} {expires:?} {received:?} {kind:?} {client_id:?}")
        };
        assert_eq!(facts(kept), facts(&message));
    }
}

fn each_partition_is_in_order_and_read_in_parts(log: &dyn PartitionedLog, push: Push<'_>) {
    let partitions = [Partition(0), Partition(1), Partition(255)];
    let starts = partitions.map(|partition| log.bounds(partition).end);
    let commit = Commit::new();
    for n in 0..300 {
        let message = message(&format!("{n}"), 2_000 + n);
        log.append(partitions[n as usize % 3], &groups(&[1]), &message, Some(commit.part())).unwrap();
    }
    // Nobody waits for these; they come all the same.
    for partition in partitions {
        log.append(partition, &groups(&[1]), &message("last", 2_400), None).unwrap();
    }
    commit.done();
    assert!(done(&commit, push));
    for (at, (&partition, start)) in partitions.iter().zip(starts).enumerate() {
        while all(log, partition, start, EVERYTHING).0.len() < 101 {
            push();
            std::thread::yield_now();
        }
        let mut expected: Vec<String> = (0..300).skip(at).step_by(3).map(|n| n.to_string()).collect();
        expected.push("last".to_owned());
        let one = ReadLimit { records: 1, bytes: 1 };
        let few = ReadLimit { records: 7, bytes: 2_000 };
        for limit in [one, few, EVERYTHING] {
            let (records, missing) = all(log, partition, start, limit);
            assert_eq!(records.iter().map(text).collect::<Vec<_>>(), expected);
            assert!(missing.is_empty());
        }
        // From within, from between two records, and from after the end.
        let (records, _) = all(log, partition, start, EVERYTHING);
        let from = records[50].offset;
        assert_eq!(all(log, partition, from, EVERYTHING).0.len(), 51);
        assert_eq!(all(log, partition, from + 1, EVERYTHING).0.len(), 50);
        let end = log.bounds(partition).end;
        let slice = read(log, partition, end, EVERYTHING);
        assert!(slice.records.is_empty() && slice.next >= end);
    }
}

fn the_watcher_hears_of_each_once_and_in_order(log: &dyn PartitionedLog, seen: &SeenRecords) {
    for partition in [Partition(0), Partition(1), Partition(200), Partition(255)] {
        let expected: Vec<u64> =
            all(log, partition, 0, EVERYTHING).0.iter().map(|record| record.offset).collect();
        let mut records = seen.records.lock();
        loop {
            let told = records.iter().filter(|(of, _)| *of == partition).map(|(_, record)| record.offset);
            let told: Vec<u64> = told.collect();
            assert!(told.len() <= expected.len());
            if told.len() == expected.len() {
                assert_eq!(told, expected);
                break;
            }
            // The watcher is told after the commit has ended.
            seen.changed.wait(&mut records);
        }
    }
}

/// Checks that messages that have ended are in the bounds: a reader that waited for all submitted ones to end would otherwise
/// miss some.
fn what_has_ended_can_be_read(log: &dyn PartitionedLog, push: Push<'_>) {
    let partitions = [Partition(70), Partition(71), Partition(72)];
    let there =
        || partitions.iter().map(|&partition| all(log, partition, 0, EVERYTHING).0.len()).sum::<usize>();
    let (before, count) = (log.submitted(), there());
    for n in 0..30 {
        let message = message("counted", 4_000);
        log.append(partitions[n % 3], &groups(&[1]), &message, None).unwrap();
    }
    assert_eq!(log.submitted(), before + 30);
    loop {
        let ended = log.ended();
        assert!(ended <= before + 30, "{ended}");
        assert!((there() - count) as u64 >= ended.saturating_sub(before), "{ended}");
        if ended == before + 30 {
            return;
        }
        push();
        std::thread::yield_now();
    }
}

fn a_time_is_found(log: &dyn PartitionedLog, push: Push<'_>) {
    let partition = Partition(20);
    for time in [5_000, 5_010, 5_008, 5_020] {
        assert!(append(log, partition, &[1], &message("timed", time), push));
    }
    let places: Vec<u64> = all(log, partition, 0, EVERYTHING).0.iter().map(|record| record.offset).collect();
    let find = |time| wait(log.find(partition, Timestamp(time))).unwrap();
    assert_eq!([4_000, 5_000, 5_001, 5_010, 5_020].map(find), [0, 0, 1, 1, 3].map(|at: usize| places[at]));
    assert_eq!(find(5_021), log.bounds(partition).end);
}

fn marks_count_what_a_group_got(log: &dyn PartitionedLog, push: Push<'_>) {
    let count = |group| {
        let marks = log.marks(GroupId(group));
        assert!(marks.len() >= 2, "where it starts and where it ends");
        for mark in &marks {
            let last = marks.iter().rfind(|other| other.offset <= mark.offset).unwrap();
            assert_eq!(log.time_at(mark.offset), Some(last.time), "{mark:?} of {marks:?}");
        }
        assert!(
            marks.is_sorted_by(|a, b| a.offset <= b.offset && a.messages <= b.messages && a.bytes <= b.bytes)
        );
        let (first, last) = (marks.first().unwrap(), marks.last().unwrap());
        (last.messages - first.messages, last.bytes - first.bytes)
    };
    let before = [count(40), count(41), count(42)];
    let message = message("counted", 6_000);
    for n in 0..250 {
        let groups: &[u32] = if n % 2 == 0 { &[40, 41] } else { &[41] };
        assert!(append(log, Partition(n as u8), groups, &message, push));
    }
    let cost = message.cost() as u64;
    assert_eq!(before, [(0, 0); 3]);
    // Trimming between the two looks would change where it starts.
    assert_eq!([count(40), count(41), count(42)], [(125, 125 * cost), (250, 250 * cost), (0, 0)]);
    log.forget(GroupId(42));
    assert_eq!(count(41).0, 250);
}

/// The failure: a segment that begins with a message received long ago, as a dead letter that is put back, made all before it
/// as old: groups gave it up.
fn marks_do_not_go_back_in_time(log: &dyn PartitionedLog, push: Push<'_>) {
    assert!(append(log, Partition(25), &[1], &message("now", 6_500), push));
    let end = log.bounds(Partition(25)).end;
    for n in 0..250 {
        assert!(append(log, Partition(25), &[1], &message(&format!("of long ago {n}"), 10), push));
    }
    let marks = log.marks(GroupId(1));
    assert!(marks.is_sorted_by_key(|mark| mark.time), "{marks:?}");
    let behind = marks.iter().filter(|mark| mark.offset >= end);
    assert!(behind.clone().all(|mark| mark.time >= Timestamp(6_500)), "{marks:?}");
    assert_eq!(log.time_at(u64::MAX), marks.last().map(|mark| mark.time));
}

fn what_is_trimmed_may_go_and_the_rest_stays(log: &dyn PartitionedLog, push: Push<'_>) {
    let partition = Partition(30);
    for n in 0..100 {
        assert!(append(log, partition, &[1], &message(&n.to_string(), 7_000 + n), push));
    }
    let (records, _) = all(log, partition, 0, EVERYTHING);
    let keep = records[60].offset;
    log.trim(partition, keep);
    log.trim(partition, records[10].offset);
    let (left, missing) = all(log, partition, 0, EVERYTHING);
    assert!(left.len() >= records.len() - 60, "{}", left.len());
    assert_eq!(left.last().unwrap().offset, records.last().unwrap().offset);
    if left.len() < records.len() {
        assert_eq!(missing.first(), Some(&MissingReason::Trimmed));
    }
    assert_eq!(all(log, partition, keep, EVERYTHING).0.len(), records.len() - 60);
    assert!(all(log, partition, keep, EVERYTHING).1.is_empty());
    // Everything, and more than there is: what comes later is not concerned.
    for partition in Partition::all() {
        log.trim(partition, log.bounds(partition).end);
    }
    assert!(append(log, partition, &[1], &message("after", 8_000), push));
    let (records, _) = all(log, partition, log.bounds(partition).end - 1, EVERYTHING);
    assert_eq!(records.iter().map(text).collect::<Vec<_>>(), ["after"]);
    assert!(log.bounds(partition).start < log.bounds(partition).end);
}

/// Runs on a log with room for `room` bytes that wait, while it is held: what is not taken is still the caller's.
pub fn a_full_log_gives_the_part_back(log: &dyn PartitionedLog, go_on: &dyn Fn(), push: Push<'_>) -> usize {
    let commit = Commit::new();
    let message = message(&"x".repeat(1_000), 1);
    let mut taken = 0;
    while log.append(Partition(1), &groups(&[1]), &message, Some(commit.part())).is_ok() {
        taken += 1;
        assert!(taken < 1_000_000);
    }
    assert!(log.admit(&message.borrow()).is_err());
    assert!(all(log, Partition(1), 0, EVERYTHING).0.is_empty(), "only what is durable can be read");
    go_on();
    commit.done();
    for _ in 0..1_000 {
        push();
    }
    assert!(commit.result().is_none(), "the part that was not taken has not ended");
    commit.done();
    assert!(done(&commit, push));
    while !accepts(log) {
        std::thread::yield_now();
    }
    assert_eq!(all(log, Partition(1), 0, EVERYTHING).0.len(), taken);
    assert!(append(log, Partition(1), &[1], &message, push));
    taken
}

/// Runs on a log for which `fail` makes all that waits fail: nothing of it is ever read.
pub fn what_is_refused_is_never_read(log: &dyn PartitionedLog, fail: &dyn Fn(bool), push: Push<'_>) {
    let kept = message("kept", 1);
    assert!(append(log, Partition(9), &[1], &kept, push));
    fail(true);
    let ended = Arc::new(AtomicBool::new(false));
    let commit = Commit::new();
    log.append(Partition(9), &groups(&[1]), &message("refused", 2), Some(commit.part())).unwrap();
    let told = Arc::clone(&ended);
    commit.then(move |_| assert!(!told.swap(true, SeqCst), "a commit ends once"));
    commit.done();
    assert!(!done(&commit, push));
    assert_eq!(log.health(), crate::StoreHealth::Failing);
    assert_eq!(log.ended(), log.submitted());
    assert_eq!(all(log, Partition(9), 0, EVERYTHING).0.len(), 1, "what was there can be read all the while");
    fail(false);
    assert!(append(log, Partition(9), &[1], &message("again", 3), push));
    assert_eq!(log.health(), crate::StoreHealth::Sound);
    let (records, missing) = all(log, Partition(9), 0, EVERYTHING);
    assert_eq!(records.iter().map(text).collect::<Vec<_>>(), ["kept", "again"]);
    assert!(missing.is_empty());
    assert_eq!(log.marks(GroupId(1)).last().unwrap().messages, 2);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MemoryLog, MemoryLogOptions};

    #[test]
    fn memory() {
        run(&MemoryLog::default(), &|| ());
        run(
            &MemoryLog::new(MemoryLogOptions { stride: 17, late: true, ..MemoryLogOptions::default() }),
            &|| (),
        );
    }

    #[test]
    fn memory_that_delays_and_mixes_partitions() {
        for seed in 1..20_u64 {
            let options = MemoryLogOptions { held: true, stride: seed, ..MemoryLogOptions::default() };
            let log = MemoryLog::new(options);
            let state = Mutex::new(seed);
            let push = || {
                log.settle(|_| {
                    let mut state = state.lock();
                    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    *state >> 33 & 1 == 0
                });
            };
            run(&log, &push);
        }
    }

    #[test]
    fn memory_that_is_full_and_fails() {
        let options =
            MemoryLogOptions { held: true, max_waiting_bytes: 100_000, ..MemoryLogOptions::default() };
        let log = MemoryLog::new(options.clone());
        a_full_log_gives_the_part_back(&log, &|| (), &|| {
            log.settle_all();
        });
        let log = MemoryLog::new(options);
        let failing = AtomicBool::new(false);
        let push = || {
            match failing.load(SeqCst) {
                true => log.fail(),
                false => log.settle_all(),
            };
        };
        what_is_refused_is_never_read(&log, &|fails| failing.store(fails, SeqCst), &push);
    }

    #[test]
    fn damage_in_memory_is_told() {
        let log = MemoryLog::default();
        for n in 0..5 {
            assert!(append(&log, Partition(3), &[1], &message(&n.to_string(), n), &|| ()));
        }
        let (records, _) = all(&log, Partition(3), 0, EVERYTHING);
        log.damage(Partition(3), records[2].offset);
        let (records, missing) = all(&log, Partition(3), 0, EVERYTHING);
        assert_eq!(records.iter().map(text).collect::<Vec<_>>(), ["0", "1", "3", "4"]);
        assert_eq!(missing, [MissingReason::Damaged]);
    }
}
