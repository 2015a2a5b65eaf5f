//! The suites on LMDB, and what is LMDB's own: restarts, damage, a disk that fails or stands still, turns.

use std::{
    io,
    path::Path,
    pin::pin,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    task::{Context, Poll, Waker},
    time::Duration,
};

use gateway_core::CommitRefused;
use parking_lot::{Mutex, RwLock, RwLockWriteGuard};

use super::*;
use RecordKind::{Answers, Commands, Groups, Scheduled, Shadows};
use store::{
    RecordShadows, ShadowPut, ShadowRecord, ShadowStore,
    suite::{
        records::{self as suite, put, remove, restored, submit, write},
        shadows::{self, names, record},
    },
};

fn open_with(dir: &Path, options: &RecordOptions) -> EmbeddedRecords {
    EmbeddedRecords::open(&DataDir::open(dir).unwrap(), options).unwrap()
}

fn open(dir: &Path) -> EmbeddedRecords {
    open_with(dir, &RecordOptions::default())
}

fn open_small(dir: &Path, max_shadow_bytes: u64) -> Arc<EmbeddedRecords> {
    Arc::new(open_with(dir, &RecordOptions { max_shadow_bytes, ..RecordOptions::default() }))
}

fn with_hook(hook: crate::CommitHook) -> RecordOptions {
    let mut options = RecordOptions::default();
    options.durable.hook = Some(hook);
    options
}

fn shadows(store: &Arc<EmbeddedRecords>) -> RecordShadows {
    RecordShadows::new(Arc::clone(store) as _)
}

/// A disk that fails when told to.
fn failing_disk() -> (Arc<AtomicBool>, RecordOptions) {
    let fails = Arc::new(AtomicBool::new(false));
    let disk = Arc::clone(&fails);
    let hook =
        move |_: &crate::Redo| if disk.load(SeqCst) { Err(io::ErrorKind::Other.into()) } else { Ok(()) };
    (fails, with_hook(Arc::new(hook)))
}

/// A disk that stands still while somebody has the lock, and its number of commits.
#[derive(Default)]
struct SlowDisk {
    gate: RwLock<()>,
    commits: AtomicUsize,
}

impl SlowDisk {
    fn new() -> (Arc<Self>, RecordOptions) {
        let slow = Arc::<Self>::default();
        let disk = Arc::clone(&slow);
        let options = with_hook(Arc::new(move |_| {
            disk.commits.fetch_add(1, SeqCst);
            drop(disk.gate.read());
            Ok(())
        }));
        (slow, options)
    }

    /// The disk stands still, with a write of `store` in hand.
    fn stall(&self, store: &EmbeddedRecords) -> RwLockWriteGuard<'_, ()> {
        let gate = self.gate.write();
        let before = self.commits.load(SeqCst);
        drop(store.write(RecordWrite { changes: vec![put(Commands, "stalls", "")], fence: None }));
        while self.commits.load(SeqCst) == before {
            std::thread::yield_now();
        }
        gate
    }
}

/// The result if it is there at once.
fn at_once<T>(future: impl Future<Output = T>) -> Option<T> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}

fn damage(store: &EmbeddedRecords, kind: RecordKind, key: &str) {
    let damage =
        |txn: &mut crate::table::WriteTxn<'_>| store.tables.of(kind).put(txn, key.as_bytes(), b"damaged");
    store.environment.writing(damage).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_suites() {
    let dir = tempfile::tempdir().unwrap();
    suite::run(&open(dir.path())).await;
    let dir = tempfile::tempdir().unwrap();
    let (fails, options) = failing_disk();
    let store = open_with(dir.path(), &options);
    suite::run_failing(&store, &|failing| fails.store(failing, SeqCst)).await;
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    suite::run_damaged(&store, &|kind, key| damage(&store, kind, key)).await;
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn ShadowStore> = Arc::new(shadows(&open_small(dir.path(), u64::MAX)));
    shadows::run(&store).await;
}

#[tokio::test]
async fn records_of_all_kinds_survive_a_restart_and_removals_too() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    for kind in RecordKind::ALL {
        submit(&store, vec![put(kind, "a", "1"), put(kind, "b", "2")]).await.unwrap();
    }
    store.submit(vec![remove(Scheduled, "a")], None);
    drop(store);
    let store = open(dir.path());
    let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    for kind in RecordKind::ALL {
        let expected = [pair("a", "1"), pair("b", "2")];
        assert_eq!(restored(&store, kind), expected[usize::from(kind == Scheduled)..], "{kind:?}");
    }
}

#[tokio::test]
async fn shadows_and_the_versions_of_deleted_ones_survive_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let store = shadows(&open_small(dir.path(), u64::MAX));
    store.put(record("a", "", 1), 0).await.unwrap();
    store.put(record("a", "x", 1), 0).await.unwrap();
    store.put(ShadowRecord { document: None, ..record("a", "x", 2) }, 1).await.unwrap();
    drop(store);
    let store = shadows(&open_small(dir.path(), u64::MAX));
    assert_eq!(names(&store, "a", 9).await, [(String::new(), 1, true), ("x".to_owned(), 2, false)]);
    assert_eq!(store.put(record("a", "x", 1), 0).await.unwrap(), ShadowPut::Conflict);
}

/// The bytes of keys and records are those of the stores that were one environment each.
#[tokio::test]
async fn a_shadow_is_stored_as_before() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_small(dir.path(), u64::MAX);
    shadows(&store).put(record("d", "n", 7), 0).await.unwrap();
    let table = store.tables.of(Shadows);
    let (key, value) = store
        .environment
        .reading(|txn| Ok(table.first(txn)?.map(|(key, value)| (key.to_vec(), value.to_vec()))))
        .unwrap()
        .unwrap();
    assert_eq!(key, b"d\0n");
    let mut expected = Vec::new();
    fields::begin(&mut expected);
    expected.extend_from_slice(&7_u64.to_le_bytes());
    expected.extend_from_slice(&1_700_000_000_007_u64.to_le_bytes());
    expected.push(1);
    expected.extend_from_slice(b"d n 7");
    fields::seal(&mut expected);
    assert_eq!(value, expected);
}

#[tokio::test]
async fn a_disk_that_stands_still_takes_a_bounded_number_of_writes() {
    let value = "x".repeat(900);
    for kind in RecordKind::ALL {
        let dir = tempfile::tempdir().unwrap();
        let (disk, mut options) = SlowDisk::new();
        options.durable.max_waiting_bytes = 100_000;
        (options.max_waiting_groups, options.max_waiting_shadows) = (100_000, 100_000);
        let store = open_with(dir.path(), &options);
        let stalled = disk.stall(&store);
        let taken = (0..1000).take_while(|n| {
            let commit = Commit::new();
            store.submit(vec![put(kind, &n.to_string(), &value)], Some(commit.part()));
            commit.done();
            commit.result().is_none()
        });
        let taken = taken.count();
        assert!((50..300).contains(&taken), "{taken}");
        let refused = at_once(write(&store, vec![put(kind, "one more", &value)]));
        assert!(matches!(refused, Some(Err(StoreError::Unavailable(_)))));
        // Removals are taken, and other kinds have their own room.
        let other = if kind == Groups { Shadows } else { Groups };
        assert!(at_once(write(&store, vec![put(other, "other", &value)])).is_none());
        for _ in 0..10_000 {
            store.submit(vec![remove(kind, "0")], None);
        }
        drop(stalled);
        drop(store);
        assert_eq!(restored(&open(dir.path()), kind).len(), taken - 1 + usize::from(kind == Commands));
    }
}

/// Changes nobody waits for pile up only as far as there are keys.
#[test]
fn of_changes_nobody_waits_for_only_the_last_of_each_key_waits() {
    let (mut turns, [mut inbox, _]) = Turns::new([usize::MAX; turns::LANES]);
    use crate::committer::Inbox as _;
    for round in 0..100 {
        for key in ["a", "b"] {
            let changes = vec![put(Commands, key, &format!("{:03}", round)), remove(Commands, "c")];
            inbox
                .push(RecordOp { write: RecordWrite { changes, fence: None }, waiter: RecordWaiter::Nobody });
        }
        if round % 10 == 0 {
            turns.accept(&mut inbox);
        }
    }
    turns.accept(&mut inbox);
    assert!(turns.plan(usize::MAX));
    let changes: Vec<_> = turns.planned().flat_map(|op| op.write.changes.clone()).collect();
    assert_eq!(changes, [put(Commands, "a", "099"), put(Commands, "b", "099"), remove(Commands, "c")]);
    // Failed changes are tried again, unless something later came for the record.
    turns.failed();
    let later = RecordWrite { changes: vec![remove(Commands, "a")], fence: None };
    inbox.push(RecordOp { write: later, waiter: RecordWaiter::Nobody });
    turns.accept(&mut inbox);
    let mut left = Vec::new();
    while turns.plan(usize::MAX) {
        left.extend(turns.planned().flat_map(|op| op.write.changes.clone()));
        let outcomes = turns.planned().count();
        turns.committed(&mut vec![RecordOutcome::Done; outcomes]);
    }
    assert_eq!(left, [put(Commands, "b", "099"), remove(Commands, "c"), remove(Commands, "a")]);
}

/// 10,000 updates of shadows that wait delay the acknowledgement of a group by the commit under way, and so does one device's
/// flood those of another.
#[tokio::test]
async fn a_flood_delays_others_by_one_commit() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, options) = SlowDisk::new();
    let store = Arc::new(open_with(dir.path(), &options));
    let finished = Arc::new(Mutex::new(Vec::new()));
    let noted = |name: &'static str, key: String, kind| {
        let commit = Commit::new();
        store.submit(vec![put(kind, &key, &"x".repeat(300))], Some(commit.part()));
        let (finished, disk) = (Arc::clone(&finished), Arc::clone(&disk));
        commit.then(move |result| {
            assert_eq!(result, Ok(()));
            finished.lock().push((name, disk.commits.load(SeqCst)));
        });
        commit.done();
    };
    let stalled = disk.stall(&store);
    let begun = disk.commits.load(SeqCst);
    (0..10_000).for_each(|n| noted("flood", format!("greedy\0{n:05}"), Shadows));
    noted("other device", "other\0".to_owned(), Shadows);
    noted("group", "\0\0\0\u{1}\u{1}acknowledged".to_owned(), Groups);
    noted("command", "1".to_owned(), Commands);
    (0..10_000).for_each(|n| noted("answers", n.to_string(), Answers));
    noted("another command", "2".to_owned(), Commands);
    drop(stalled);
    while finished.lock().len() < 20_004 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let finished = finished.lock();
    for name in ["other device", "group", "command", "another command"] {
        let commits = finished.iter().find(|(found, _)| *found == name).unwrap().1;
        assert_eq!(commits, begun + 1, "{name} is in the next commit");
    }
    let flood: Vec<_> = finished.iter().filter(|(found, _)| *found == "flood").collect();
    assert!(flood.is_sorted_by_key(|(_, commits)| *commits) && flood[9_999].1 >= begun + 5);
}

/// A group that cannot note acknowledgements on a full disk frees nothing; what adds beside it must not be in its way.
#[tokio::test]
async fn on_a_full_disk_notes_of_groups_are_made_beside_a_flood() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = RecordOptions::default();
    (options.durable.map_size, options.durable.max_map_size) = (1 << 20, 16 << 20);
    let store = Arc::new(open_with(dir.path(), &options));
    let large = "x".repeat(100_000);
    let mut filled = 0;
    while submit(&*store, vec![put(Shadows, &format!("d{filled}\0"), &large)]).await.is_ok() {
        filled += 1;
        assert!(filled < 1_000);
    }
    let flooding = Arc::new(AtomicBool::new(true));
    let flood = {
        let (store, flooding, large) = (Arc::clone(&store), Arc::clone(&flooding), large.clone());
        std::thread::spawn(move || {
            while flooding.load(SeqCst) {
                let shadow =
                    store.write(RecordWrite { changes: vec![put(Shadows, "more\0", &large)], fence: None });
                drop(shadow);
                std::thread::sleep(Duration::from_micros(200));
            }
        })
    };
    for round in 0..20 {
        let note = vec![put(Groups, "\0\0\0\u{1}\u{1}n", &round.to_string())];
        let note = tokio::time::timeout(Duration::from_secs(10), write(&*store, note)).await;
        assert_eq!(note.expect("in time").unwrap(), RecordOutcome::Done, "{round}");
        let removal = submit(&*store, vec![remove(Shadows, "none\0")]);
        assert_eq!(tokio::time::timeout(Duration::from_secs(10), removal).await, Ok(Ok(())));
    }
    flooding.store(false, SeqCst);
    flood.join().unwrap();
    assert!(submit(&*store, vec![put(Shadows, "more\0", &large)]).await.is_err());
    for n in 0..filled {
        assert_eq!(submit(&*store, vec![remove(Shadows, &format!("d{n}\0"))]).await, Ok(()));
    }
    let mut again = submit(&*store, vec![put(Shadows, "again\0", &large)]).await;
    for _ in 0..100 {
        if again == Err(CommitRefused) {
            tokio::time::sleep(Duration::from_millis(100)).await;
            again = submit(&*store, vec![put(Shadows, "again\0", &large)]).await;
        }
    }
    assert_eq!(again, Ok(()));
}

/// Checks that a damaged shadow is not taken for an absent one: it would begin at version 1 again, and a device would take newer
/// versions for older ones.
#[tokio::test]
async fn a_damaged_shadow_is_not_taken_for_one_that_is_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_small(dir.path(), u64::MAX);
    let all = shadows(&store);
    for name in ["", "x"] {
        all.put(record("a", name, 1), 0).await.unwrap();
    }
    damage(&store, Shadows, "a\0");
    assert!(matches!(all.get("a", "").await, Err(StoreError::Damaged(_))));
    assert_eq!(all.put(record("a", "", 1), 0).await.unwrap(), ShadowPut::Conflict);
    assert_eq!(names(&all, "a", 9).await, [("x".to_owned(), 1, true)]);
    assert_eq!(names(&all, "a", 1).await.len(), 1);
}

fn large(device: &str, name: &str, version: u64, bytes: usize) -> ShadowRecord {
    ShadowRecord { document: Some(vec![b'x'; bytes].into()), ..record(device, name, version) }
}

/// Before, 8 clients that came again and again under new ids wrote 79 MB in 10 s.
#[tokio::test]
async fn ever_new_devices_fill_no_more_than_the_bound() {
    const MOST: u64 = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    let records = open_small(dir.path(), MOST);
    let store = shadows(&records);
    store.put(large("old", "", 1, 1_000), 0).await.unwrap();
    let mut full = 0;
    for number in 0..1_500 {
        match store.put(large(&format!("d{number}"), "", 1, 1_000), 0).await.unwrap() {
            ShadowPut::Written => assert_eq!(full, 0, "once full it stays so"),
            ShadowPut::Full => full += 1,
            ShadowPut::Conflict => panic!("{number} is new"),
        }
        assert!(records.shadow_bytes() <= MOST, "{}", records.shadow_bytes());
    }
    assert!(full > 0);
    // Changes that need no more room go on, and deletions make some.
    assert_eq!(store.put(large("old", "", 2, 900), 1).await.unwrap(), ShadowPut::Written);
    for number in 0..50 {
        let gone = ShadowRecord { document: None, ..record(&format!("d{number}"), "", 2) };
        assert_eq!(store.put(gone, 1).await.unwrap(), ShadowPut::Written);
    }
    assert_eq!(store.put(large("new", "", 1, 1_000), 0).await.unwrap(), ShadowPut::Written);
    drop((store, records));
    let records = open_small(dir.path(), MOST);
    assert!(records.shadow_bytes() > MOST / 2, "what is there counts after a restart");
    let store = shadows(&records);
    assert_eq!(store.put(large("newer", "", 1, 200_000), 0).await.unwrap(), ShadowPut::Full);
    submit(&*records, vec![put(Commands, "c", &"x".repeat(200_000))]).await.expect("it bounds shadows only");
}

#[tokio::test]
async fn one_device_leaves_room_for_others() {
    let dir = tempfile::tempdir().unwrap();
    let store = shadows(&open_small(dir.path(), 1 << 20));
    let mut taken = 0;
    while store.put(large("greedy", &format!("n{taken}"), 1, 3_000), 0).await.unwrap() == ShadowPut::Written {
        taken += 1;
        assert!(taken < 1_000);
    }
    assert!(taken > 50, "{taken}");
    assert_eq!(store.put(large("another", "", 1, 3_000), 0).await.unwrap(), ShadowPut::Written);
}
