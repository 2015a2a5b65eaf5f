//! Random operations against a list.

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum Step {
    /// Appends to partitions, of which the last waits for the disk.
    Append(Vec<(u8, u16)>),
    /// Reads a partition from the n-th record that was ever appended to it.
    Read(u8, usize, usize),
    /// Nothing before the n-th is needed.
    Trim(u8, usize),
    Find(u8, u16),
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => prop::collection::vec((0..4_u8, any::<u16>()), 1..20).prop_map(Step::Append),
        4 => (0..4_u8, 0..60_usize, 1..30_usize).prop_map(|(partition, from, most)| Step::Read(partition, from, most)),
        2 => (0..4_u8, 0..60_usize).prop_map(|(partition, before)| Step::Trim(partition, before)),
        1 => (0..4_u8, any::<u16>()).prop_map(|(partition, time)| Step::Find(partition, time)),
        1 => Just(Step::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn the_log_is_a_list_that_loses_its_front(
        steps in prop::collection::vec(step(), 1..40),
        segment_bytes in 2_200..8_000_u64,
        cache_bytes in prop_oneof![Just(0), Just(2_000), Just(1 << 20)],
    ) {
        let dir = tempfile::tempdir().unwrap();
        let options = LogOptions { segment_bytes, cache_bytes, ..LogOptions::default() };
        let mut log = open(dir.path(), &options);
        // Time and offset of all that was ever appended, and where each partition was trimmed.
        let mut lists: [Vec<(u64, u64)>; 4] = Default::default();
        let mut trimmed = [0; 4];
        let mut appended = 0;
        for step in steps {
            match step {
                Step::Append(messages) => {
                    let starts = [0, 1, 2, 3].map(|partition| log.bounds(Partition(partition)).end);
                    let commit = Commit::new();
                    for (partition, time) in &messages {
                        let message = message(&time.to_string(), u64::from(*time));
                        log.append(Partition(*partition), &groups(&[1]), &message, Some(commit.part())).unwrap();
                    }
                    commit.done();
                    suite::wait(commit.wait()).unwrap();
                    appended += messages.len() as u64;
                    for (partition, start) in (0..4).zip(starts) {
                        let (records, missing) = all(&log, Partition(partition), start, EVERYTHING);
                        prop_assert!(missing.is_empty());
                        let times = messages.iter().filter(|(of, _)| *of == partition).map(|(_, time)| u64::from(*time));
                        let found: Vec<_> = records.iter().map(|record| record.message.received.0).collect();
                        prop_assert_eq!(found, times.collect::<Vec<_>>());
                        lists[usize::from(partition)].extend(records.iter().map(|record| (record.message.received.0, record.offset)));
                    }
                }
                Step::Read(partition, from, most) => {
                    let list = &lists[usize::from(partition)];
                    let from = list.get(from).map_or(0, |(_, offset)| *offset);
                    let limit = ReadLimit { records: most, bytes: usize::MAX };
                    let (records, missing) = all(&log, Partition(partition), from, limit);
                    let expected: Vec<u64> = list.iter().map(|(_, offset)| *offset).filter(|offset| *offset >= from).collect();
                    let found: Vec<u64> = records.iter().map(|record| record.offset).collect();
                    // Only what was trimmed may be gone, and only from the front.
                    prop_assert!(expected.ends_with(&found));
                    let least = expected.iter().filter(|offset| **offset >= trimmed[usize::from(partition)]).count();
                    prop_assert!(found.len() >= least);
                    prop_assert_eq!(missing.is_empty(), found.len() == expected.len());
                }
                Step::Trim(partition, before) => {
                    let before = lists[usize::from(partition)].get(before).map_or(0, |(_, offset)| *offset);
                    let trimmed = &mut trimmed[usize::from(partition)];
                    *trimmed = before.max(*trimmed);
                    log.trim(Partition(partition), before);
                }
                Step::Find(partition, time) => {
                    let found = suite::wait(log.find(Partition(partition), Timestamp(u64::from(time)))).unwrap();
                    let records = all(&log, Partition(partition), 0, EVERYTHING).0;
                    let first = records.iter().find(|record| record.message.received.0 >= u64::from(time));
                    prop_assert_eq!(found, first.map_or_else(|| log.bounds(Partition(partition)).end, |record| record.offset));
                }
                Step::Restart => {
                    drop(log);
                    log = open(dir.path(), &options);
                }
            }
            prop_assert_eq!(log.marks(GroupId(1)).last().unwrap().messages, appended);
        }
    }
}
