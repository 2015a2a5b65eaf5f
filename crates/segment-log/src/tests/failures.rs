//! Disks that fail, are full or hang.

use std::sync::atomic::AtomicU32;

use gateway_core::{ClientId, Origin, OriginKind, QoS};

use super::*;
use crate::format::Prefix;

/// Stands in for the disk.
#[derive(Default)]
struct Disk {
    stopped: Mutex<bool>,
    changed: Condvar,
    /// Number of syncs that fail from now on, and of writes.
    sync_failures: AtomicU32,
    write_failures: AtomicU32,
    syncs: AtomicU32,
}

impl Disk {
    fn new(options: LogOptions) -> (Arc<Self>, LogOptions) {
        let disk = Arc::new(Self::default());
        let hook = Arc::clone(&disk);
        let hook: LogHook = Arc::new(move |step| hook.step(step));
        (disk, LogOptions { hook: Some(hook), ..options })
    }

    fn step(&self, step: LogStep) -> io::Result<()> {
        let mut stopped = self.stopped.lock();
        while *stopped {
            self.changed.wait(&mut stopped);
        }
        drop(stopped);
        let one =
            |failures: &AtomicU32| failures.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok();
        let fails = match step {
            LogStep::Sync => {
                self.syncs.fetch_add(1, SeqCst);
                one(&self.sync_failures)
            }
            LogStep::Write | LogStep::Create => one(&self.write_failures),
        };
        if fails { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }

    fn stop(&self, stopped: bool) {
        *self.stopped.lock() = stopped;
        self.changed.notify_all();
    }
}

#[test]
fn a_sync_that_fails_once_loses_and_repeats_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, options) = Disk::new(LogOptions::default());
    let log = open(dir.path(), &options);
    for round in 0..3 {
        assert!(append(&log, 1, &format!("before {round}")));
        disk.sync_failures.store(1, SeqCst);
        assert!(
            append(&log, 1, &format!("meanwhile {round}")),
            "it is written again, and nobody sees more of it"
        );
        assert_eq!(log.health(), StoreHealth::Sound);
    }
    let expected: Vec<String> =
        (0..3).flat_map(|round| [format!("before {round}"), format!("meanwhile {round}")]).collect();
    assert_eq!(texts(&log, 1), expected);
    assert_eq!(segments(dir.path()).len(), 4, "none is written to again after a sync that failed");
    drop(log);
    for options in [LogOptions::default(), small()] {
        let log = open(dir.path(), &options);
        assert_eq!(texts(&log, 1), expected);
        assert!(missing(&log, 1).is_empty());
        assert_eq!(log.marks(GroupId(1)).last().unwrap().messages, 6);
    }
}

#[test]
fn what_was_not_synced_does_not_count_though_the_file_has_it() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, options) = Disk::new(LogOptions::default());
    let log = open(dir.path(), &options);
    assert!(append(&log, 1, "kept"));
    disk.sync_failures.store(1, SeqCst);
    assert!(append(&log, 1, "moved"));
    drop(log);
    // The file could not be cut, and what was not synced is still there.
    let files = segments(dir.path());
    let mut bytes = fs::read(&files[0]).unwrap();
    let Prefix::Length(head) = format::prefix(&bytes) else { panic!("no header") };
    let offset = (bytes.len() - head) as u64;
    format::put_batch(offset, &mut bytes);
    let at = (bytes.len() - head) as u64;
    format::put_record(Partition(1), &[GroupId(1)], 1, &message("never synced", 1), at, &mut bytes);
    fs::write(&files[0], bytes).unwrap();
    let log = open(dir.path(), &small());
    assert_eq!(texts(&log, 1), ["kept", "moved"]);
    assert!(missing(&log, 1).is_empty());
}

#[test]
fn a_disk_that_takes_nothing_refuses_and_gives_what_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, options) = Disk::new(small());
    let log = open(dir.path(), &options);
    let fail = |fails| {
        let failures = if fails { u32::MAX } else { 0 };
        disk.write_failures.store(failures, SeqCst);
    };
    suite::what_is_refused_is_never_read(&log, &fail, &|| ());
    disk.sync_failures.store(2, SeqCst);
    assert!(!append(&log, 9, "twice not synced"));
    let probes = (0..1000).filter(|_| suite::accepts(&log)).count();
    assert!(probes <= 2, "{probes} were let through");
    assert!(append(&log, 9, "at last"));
    assert_eq!(texts(&log, 9), ["kept", "again", "at last"]);
    drop(log);
    let log = open(dir.path(), &small());
    assert_eq!(texts(&log, 9), ["kept", "again", "at last"]);
}

#[test]
fn what_waits_is_bounded_while_the_disk_stands_still() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, options) = Disk::new(LogOptions { max_waiting_bytes: 100_000, ..LogOptions::default() });
    let log = open(dir.path(), &options);
    disk.stop(true);
    let taken = suite::a_full_log_gives_the_part_back(&log, &|| disk.stop(false), &|| ());
    assert!((40..60).contains(&taken), "one sender has two thirds: {taken}");
    assert_eq!(log.memory().waiting, 0);
}

/// Before, QoS 0 took the room of those who wait, and every QoS 1 beside four flooders was refused.
#[test]
fn floods_of_qos_0_take_no_room_of_a_bystander() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, options) = Disk::new(LogOptions { max_waiting_bytes: 1 << 20, ..LogOptions::default() });
    let log = open(dir.path(), &options);
    disk.stop(true);
    let from = |device: &str, qos| {
        let id = ClientId::new(device);
        let origin = Origin { kind: OriginKind::Device, client_id: Some(&id), slot: 0 };
        let mut message = Message::new("t", &[b'x'; 500], Timestamp(1), origin);
        message.qos = qos;
        Arc::clone(message.share())
    };
    let append =
        |message: &Arc<SharedMessage>| log.append(Partition(1), &groups(&[1]), message, None).is_ok();
    for flooder in ["f1", "f2", "f3", "f4"] {
        let message = from(flooder, QoS::AtMostOnce);
        assert!((0..10_000).filter(|_| append(&message)).count() > 0);
        assert!(!append(&message), "the flood is refused");
    }
    let bystander = from("bystander", QoS::AtLeastOnce);
    for number in 0..100 {
        assert_eq!(log.admit(&bystander.borrow()), Ok(()), "{number}");
        assert!(append(&bystander), "{number}");
    }
    // Nor does a flood of QoS 1.
    let flood = from("f5", QoS::AtLeastOnce);
    while append(&flood) {}
    assert_eq!(log.admit(&flood.borrow()), Err(NoRoom::Share));
    assert!(append(&from("another", QoS::AtLeastOnce)));
    disk.stop(false);
    let commit = Commit::new();
    log.append(Partition(2), &groups(&[1]), &bystander, Some(commit.part())).unwrap();
    commit.done();
    suite::wait(commit.wait()).unwrap();
    assert_eq!(log.memory().waiting, 0, "all room is given back");
}

#[test]
fn what_waits_goes_with_one_sync() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, options) = Disk::new(LogOptions::default());
    let log = open(dir.path(), &options);
    disk.stop(true);
    let commit = Commit::new();
    for _ in 0..1_000 {
        log.append(Partition(1), &groups(&[1]), &message("x", 1), Some(commit.part())).unwrap();
    }
    disk.stop(false);
    commit.done();
    suite::wait(commit.wait()).unwrap();
    assert!(disk.syncs.load(SeqCst) <= 2, "the first may have gone alone");
}

/// Drops the log in its writer thread, where a waiter for the disk may be the last to hold it.
#[test]
fn a_log_that_ends_in_its_own_writer_thread_does_not_wait_for_itself() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, options) = Disk::new(LogOptions::default());
    let log = Arc::new(open(dir.path(), &options));
    disk.stop(true);
    let commit = Commit::new();
    log.append(Partition(1), &groups(&[1]), &message("x", 1), Some(commit.part())).unwrap();
    let (sender, ended) = std::sync::mpsc::sync_channel(1);
    commit.then(move |_| {
        drop(log);
        sender.send(()).unwrap();
    });
    commit.done();
    disk.stop(false);
    ended.recv().expect("the thread goes on");
    let log = open(dir.path(), &options);
    assert_eq!(texts(&log, 1), ["x"]);
}
