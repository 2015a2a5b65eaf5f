//! The embedded log beyond what every log must do: restarts, and what the disk does to it.

mod crash;
mod damage;
mod failures;
mod model;

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use super::*;
use store::{
    MissingReason,
    suite::log::{self as suite, EVERYTHING, all, groups, message, text},
};

fn open(dir: &Path, options: &LogOptions) -> EmbeddedLog {
    EmbeddedLog::open(&DataDir::open(dir).unwrap(), options).unwrap()
}

/// Segments of a few records, and nothing in memory.
fn small() -> LogOptions {
    LogOptions { segment_bytes: 4096, cache_bytes: 0, ..LogOptions::default() }
}

/// Appends and waits until it is durable, or refused.
fn append(log: &EmbeddedLog, partition: u8, text: &str) -> bool {
    suite::append(log, Partition(partition), &[1, 5], &message(text, 1_000), &|| ())
}

fn texts(log: &EmbeddedLog, partition: u8) -> Vec<String> {
    all(log, Partition(partition), 0, EVERYTHING).0.iter().map(text).collect()
}

fn missing(log: &EmbeddedLog, partition: u8) -> Vec<MissingReason> {
    all(log, Partition(partition), 0, EVERYTHING).1
}

/// The segment files, in order.
fn segments(dir: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> =
        fs::read_dir(dir.join("log")).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "log"));
    files.sort();
    files
}

/// Copies the whole data directory.
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to.join("log")).unwrap();
    for entry in fs::read_dir(from.join("log")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, to.join("log").join(path.file_name().unwrap())).unwrap();
    }
}

#[test]
fn the_suite() {
    let uncached = LogOptions { cache_bytes: 0, ..LogOptions::default() };
    for options in [LogOptions::default(), small(), uncached] {
        let dir = tempfile::tempdir().unwrap();
        suite::run(&open(dir.path(), &options), &|| ());
    }
}

#[test]
fn what_was_committed_is_there_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let mut expected = vec![Vec::new(); 3];
    let mut id = None;
    for round in 0..4 {
        let log = open(dir.path(), &small());
        assert_eq!(*id.get_or_insert_with(|| log.id()), log.id());
        for n in 0..30 {
            let text = format!("message {n} of round {round}");
            assert!(append(&log, n % 3, &text));
            expected[usize::from(n % 3)].push(text);
        }
        let ends = [0, 1, 2].map(|partition| log.bounds(Partition(partition)));
        let marks = log.marks(GroupId(5));
        drop(log);
        let log = open(dir.path(), &small());
        assert_eq!([0, 1, 2].map(|partition| log.bounds(Partition(partition))), ends);
        let exact = |marks: &[Mark]| marks.iter().map(|mark| (mark.messages, mark.bytes)).collect::<Vec<_>>();
        assert_eq!(exact(&log.marks(GroupId(5))), exact(&marks));
        assert_eq!(marks.last().unwrap().messages, 30 * (round + 1));
        assert!(marks.len() > 2, "{marks:?}");
        for (partition, expected) in (0..3).zip(&expected) {
            assert_eq!(texts(&log, partition), *expected, "round {round}");
        }
        assert_eq!(
            log.bytes(),
            segments(dir.path()).iter().map(|file| fs::metadata(file).unwrap().len()).sum::<u64>()
        );
    }
}

#[test]
fn who_keeps_up_reads_from_memory_and_memory_is_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let options = LogOptions { cache_bytes: 100_000, ..LogOptions::default() };
    let log = open(dir.path(), &options);
    let mut place = 0;
    for n in 0..1_000 {
        assert!(append(&log, 1, &n.to_string()));
        let LogRead::Now(slice) = log.read(Partition(1), place, EVERYTHING) else { panic!("on the disk") };
        assert_eq!(slice.records.len(), 1);
        place = slice.next;
        if n % 10 == 0 {
            log.trim(Partition(1), place);
        }
        assert!(log.memory().cached <= 100_000);
    }
    assert!(matches!(log.read(Partition(1), 0, EVERYTHING), LogRead::Later(_)));
    assert!(matches!(log.read(Partition(2), 0, EVERYTHING), LogRead::Now(_)), "nothing is there to be read");
    assert_eq!(log.memory().waiting, 0);
    assert_eq!(texts(&log, 1).len(), 1_000);
}

#[test]
fn segments_that_nobody_needs_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path(), &small());
    assert!(append(&log, 9, "of a quiet device"));
    for n in 0..100 {
        assert!(append(&log, n % 3, &n.to_string()));
    }
    let many = segments(dir.path()).len();
    assert!(many > 2, "{many}");
    for partition in 0..3 {
        log.trim(Partition(partition), log.bounds(Partition(partition)).end);
    }
    // One message that somebody needs keeps the rest.
    assert_eq!(segments(dir.path()).len(), many);
    assert_eq!(texts(&log, 9), ["of a quiet device"]);
    log.trim(Partition(9), log.bounds(Partition(9)).end);
    while segments(dir.path()).len() > 1 {
        std::thread::yield_now();
    }
    drop(log);
    let log = open(dir.path(), &small());
    let bounds = log.bounds(Partition(9));
    assert_eq!(bounds.start, bounds.end);
    assert_eq!(log.marks(GroupId(1)).last().unwrap().messages, 101);
    let (records, missing) = all(&log, Partition(0), 0, EVERYTHING);
    assert!(records.len() < 10, "{}", records.len());
    assert_eq!(missing, [MissingReason::Trimmed]);
}

#[test]
fn a_newer_format_is_refused_and_nothing_is_changed() {
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path(), &small()));
    let log = open(dir.path(), &small());
    assert!(append(&log, 1, "kept"));
    drop(log);
    let file = segments(dir.path()).pop().unwrap();
    let sound = fs::read(&file).unwrap();
    let mut newer = sound.clone();
    newer[8..12].copy_from_slice(&2_u32.to_le_bytes());
    let sum = crc32fast::hash(&newer[..16]);
    newer[16..20].copy_from_slice(&sum.to_le_bytes());
    fs::write(&file, &newer).unwrap();
    let refused = || {
        let result = EmbeddedLog::open(&DataDir::open(dir.path()).unwrap(), &small());
        assert!(matches!(result, Err(StoreError::Format(_))));
    };
    refused();
    assert_eq!(fs::read(&file).unwrap(), newer);
    fs::write(&file, &sound).unwrap();
    let name = dir.path().join("log/log");
    let text = fs::read_to_string(&name).unwrap();
    fs::write(&name, text.replacen('1', "2", 1)).unwrap();
    refused();
    fs::write(&name, text).unwrap();
    assert_eq!(texts(&open(dir.path(), &small()), 1), ["kept"]);
}

#[test]
fn a_backup_of_a_running_log_has_what_was_durable_before_it() {
    let (dir, target) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let log = open(dir.path(), &small());
    for n in 0..60 {
        assert!(append(&log, 1, &n.to_string()));
    }
    let copied = super::copy(&dir.path().join("log"), &target.path().join("log")).unwrap();
    assert_eq!(copied.map(|bytes| bytes > 6_000), Some(true));
    let backup = open(target.path(), &small());
    assert_eq!((backup.id(), texts(&backup, 1)), (log.id(), texts(&log, 1)));
    let absent = target.path().join("absent");
    assert_eq!(super::copy(&absent, &target.path().join("to")).unwrap(), None);
}
