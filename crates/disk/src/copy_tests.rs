//! Stores with a ledger, and copies made of it: what a standby has after any record is what the owner had.

use std::{
    collections::{BTreeMap, VecDeque},
    fs, io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    task::Waker,
    time::Duration,
};

use gateway_core::{Commit, Partition};
use ledger::Position;
use parking_lot::Mutex;
use store::{
    ClockMark, DataDir, PartitionedLog as _, RecordKind, RecordRange, RecordStore as _,
    suite::{
        log::{self as log_suite, EVERYTHING, message, text},
        records::{put, remove},
    },
};

use super::{DirectoryCopy, EmbeddedRecords, RecordOptions, ShippedFiles, ShippedStore};
use ledger::{Cleaned, Shipped, Shipping};
use segment_log::{EmbeddedLog, LogOptions};

/// A stream in memory.
#[derive(Default)]
struct Stream {
    records: Mutex<Vec<Vec<u8>>>,
    /// Numbers of the records with marks that are not passed, and of the last that was.
    marks: Mutex<VecDeque<usize>>,
    passed: AtomicUsize,
    begin: AtomicU64,
    repeats: AtomicBool,
    lost: AtomicBool,
}

impl Shipping for Stream {
    fn ship(&self, changes: &[u8], cleaned: Cleaned) -> Shipped {
        if self.lost.load(SeqCst) {
            return Shipped::Lost;
        }
        let mut records = self.records.lock();
        records.push(changes.to_vec());
        let mut marks = self.marks.lock();
        marks.extend(cleaned.marks.then_some(records.len() - 1));
        if let Some(passed) = marks.drain(..cleaned.passed).next_back() {
            self.passed.store(passed, SeqCst);
        }
        Shipped::Done(position(records.len() - 1))
    }

    fn wanted_repeats(&self, _alive: u64) -> usize {
        self.repeats.load(SeqCst).into()
    }

    fn begin_at(&self, _epoch: u64, n: u64) {
        self.begin.store(n, SeqCst);
    }
}

fn position(n: usize) -> Position {
    Position { epoch: 1, n: n as u64, sum: n as u32 + 7 }
}

fn with_ledger(stream: &Arc<Stream>) -> RecordOptions {
    let mut options = RecordOptions::default();
    options.durable.shipping = Some(Arc::clone(stream) as _);
    options
}

/// Applies the records from `from` on to the directory, in two goes.
fn copy_to(directory: &Path, store: ShippedStore, stream: &Stream, from: usize) {
    let directory = DataDir::open(directory).unwrap();
    let records = stream.records.lock().clone();
    let half = from.midpoint(records.len());
    for (begin, end) in [(from, half), (half, records.len())] {
        let mut copy = DirectoryCopy::open(&directory).unwrap();
        let found = copy.position(store);
        assert_eq!(found, (begin > from).then(|| position(begin - 1)));
        for (n, record) in records.iter().enumerate().take(end).skip(begin) {
            copy.apply(store, position(n), record).unwrap();
        }
        copy.sync().unwrap();
    }
}

async fn contents(records: &EmbeddedRecords) -> BTreeMap<(&'static str, Vec<u8>), Vec<u8>> {
    let mut all = BTreeMap::new();
    for kind in RecordKind::ALL {
        let range = RecordRange {
            kind,
            prefix: bytes::Bytes::new(),
            after: None,
            limit: usize::MAX,
            value_bytes: usize::MAX,
        };
        for record in records.read(range).await.unwrap() {
            all.insert((kind.name(), record.key.to_vec()), record.value.unwrap().to_vec());
        }
    }
    all
}

fn change(n: u32) -> store::RecordChange {
    let kind = RecordKind::ALL[n as usize % 4];
    let key = format!("key {}", n % 37);
    if n.is_multiple_of(5) { remove(kind, &key) } else { put(kind, &key, &format!("value {n}")) }
}

/// The failures: a standby's records differ from the owner's; a key is left out by those that were repeated since a mark.
#[tokio::test]
async fn a_copy_has_the_records_of_its_owner_also_from_the_last_mark_on() {
    let dir = tempfile::tempdir().unwrap();
    let stream = Arc::new(Stream::default());
    let store = EmbeddedRecords::open(&DataDir::open(dir.path()).unwrap(), &with_ledger(&stream)).unwrap();
    for n in 0..400 {
        stream.repeats.store(n > 100, SeqCst);
        let write = store::RecordWrite { changes: vec![change(n)], fence: None };
        store.write(write).await.unwrap();
    }
    let expected = contents(&store).await;
    assert!(expected.len() > 60);
    drop(store);
    let passed = stream.passed.load(SeqCst);
    assert!(passed > 300, "the last mark that was passed is {passed}");
    for from in [0, passed] {
        let dir = tempfile::tempdir().unwrap();
        copy_to(dir.path(), ShippedStore::Records, &stream, from);
        let options = RecordOptions::default();
        let copy = EmbeddedRecords::open(&DataDir::open(dir.path()).unwrap(), &options).unwrap();
        assert_eq!(contents(&copy).await, expected, "from record {from}");
    }
}

/// The failure: a record repeats what its predecessor has repeated, too, so that each is larger than the one before.
#[tokio::test]
async fn a_record_repeats_about_as_much_as_was_changed() {
    const VALUE: usize = 10_000;
    let dir = tempfile::tempdir().unwrap();
    let stream = Arc::new(Stream::default());
    let store = EmbeddedRecords::open(&DataDir::open(dir.path()).unwrap(), &with_ledger(&stream)).unwrap();
    for n in 0..150 {
        stream.repeats.store(n >= 100, SeqCst);
        let value = if n < 100 { "x".repeat(VALUE) } else { "small".to_owned() };
        let changes = vec![put(RecordKind::Commands, &format!("{n}"), &value)];
        store.write(store::RecordWrite { changes, fence: None }).await.unwrap();
    }
    // The first repeats as much as the large one before it.
    let sizes: Vec<usize> = stream.records.lock().iter().map(Vec::len).collect();
    let small = &sizes[sizes.len() - 49..];
    assert!(small.iter().all(|size| (VALUE..2 * VALUE).contains(size)), "{small:?}");
}

/// The failures: the batch that found the map full was run again, on other data than the ledger has; it was refused.
#[tokio::test]
async fn a_full_map_grows_and_what_was_shipped_is_committed_once() {
    let dir = tempfile::tempdir().unwrap();
    let stream = Arc::new(Stream::default());
    let mut options = with_ledger(&stream);
    options.durable.map_size = 64 << 10;
    let store = EmbeddedRecords::open(&DataDir::open(dir.path()).unwrap(), &options).unwrap();
    for n in 0..100_u32 {
        let change = put(RecordKind::Commands, &format!("{n}"), &"x".repeat(20_000));
        let write = store::RecordWrite { changes: vec![change], fence: None };
        assert_eq!(store.write(write).await.unwrap(), store::RecordOutcome::Done);
    }
    assert_eq!(contents(&store).await.len(), 100);
    let shipped = stream.records.lock().len();
    assert!(shipped <= 102, "{shipped}: some were shipped twice");
}

/// The failures: a transaction that finds the map full is refused, is shipped twice, or is other here than in the ledger. Each first size
/// of the map is full at another place of the same transactions.
#[tokio::test]
async fn a_map_that_is_full_at_any_place_loses_and_repeats_nothing() {
    for pages in (16..=160).step_by(16) {
        let dir = tempfile::tempdir().unwrap();
        let stream = Arc::new(Stream::default());
        let mut options = with_ledger(&stream);
        options.durable.map_size = pages << 12;
        let store = EmbeddedRecords::open(&DataDir::open(dir.path()).unwrap(), &options).unwrap();
        for n in 0..40_u32 {
            stream.repeats.store(n > 20, SeqCst);
            let value = "x".repeat((n as usize * 7_919) % 30_000);
            let changes =
                vec![put(RecordKind::ALL[n as usize % 4], &format!("{}", n % 13), &value), change(n)];
            let write = store::RecordWrite { changes, fence: None };
            assert_eq!(store.write(write).await.unwrap(), store::RecordOutcome::Done);
        }
        let expected = contents(&store).await;
        drop(store);
        let shipped = stream.records.lock().len();
        assert!((40..=42).contains(&shipped), "{shipped} records of 40 transactions in {pages} pages");
        let dir = tempfile::tempdir().unwrap();
        copy_to(dir.path(), ShippedStore::Records, &stream, 0);
        let copy =
            EmbeddedRecords::open(&DataDir::open(dir.path()).unwrap(), &RecordOptions::default()).unwrap();
        assert_eq!(contents(&copy).await, expected, "{pages} pages");
    }
}

/// The failure: somebody is told of what another process will never know.
#[tokio::test]
async fn whoever_waits_for_a_home_that_is_lost_is_told_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let stream = Arc::new(Stream::default());
    let store = EmbeddedRecords::open(&DataDir::open(dir.path()).unwrap(), &with_ledger(&stream)).unwrap();
    stream.lost.store(true, SeqCst);
    let commit = Commit::new();
    commit.add();
    store.submit(vec![put(RecordKind::Commands, "lost", "x")], Some(Arc::clone(&commit)));
    commit.done();
    tokio::time::sleep(Duration::from_millis(100)).await;
    drop(store);
    assert_eq!(commit.poll(Waker::noop()), None);
    let store =
        EmbeddedRecords::open(&DataDir::open(dir.path()).unwrap(), &RecordOptions::default()).unwrap();
    assert!(contents(&store).await.is_empty());
}

fn wait<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

fn small(stream: &Arc<Stream>) -> LogOptions {
    let shipping = Some(Arc::clone(stream) as _);
    LogOptions { segment_bytes: 8192, cache_bytes: 0, shipping, ..LogOptions::default() }
}

fn append(log: &EmbeddedLog, partition: u8, text: &str) -> bool {
    log_suite::append(log, Partition(partition), &[1], &message(text, 1_000), &|| ())
}

fn texts(log: &EmbeddedLog, partition: u8) -> Vec<String> {
    log_suite::all(log, Partition(partition), 0, EVERYTHING).0.iter().map(text).collect()
}

/// The failures: a standby's log lacks messages, has another id, or has some that were not acknowledged; the ledger keeps what is
/// trimmed.
#[test]
fn a_copy_has_the_log_of_its_owner() {
    let dir = tempfile::tempdir().unwrap();
    let stream = Arc::new(Stream::default());
    let mut expected = vec![Vec::new(); 3];
    let mut id = 0;
    for round in 0..3 {
        let log = EmbeddedLog::open(&DataDir::open(dir.path()).unwrap(), &small(&stream)).unwrap();
        for n in 0..60_u8 {
            let text = format!("message {n} of round {round} {}", "x".repeat(200));
            assert!(append(&log, n % 3, &text));
            expected[usize::from(n % 3)].push(text);
        }
        id = log.id();
        drop(log);
        // As it is when a home opens.
        drop(DirectoryCopy::open(&DataDir::open(dir.path()).unwrap()).unwrap());
    }
    let copied = tempfile::tempdir().unwrap();
    copy_to(copied.path(), ShippedStore::Log, &stream, 0);
    let log = EmbeddedLog::open(&DataDir::open(copied.path()).unwrap(), &small(&stream)).unwrap();
    assert_eq!(log.id(), id);
    for (partition, expected) in (0..3).zip(&expected) {
        assert_eq!(texts(&log, partition), *expected);
    }
    // The copy goes on, and trimmed segments go.
    let end = log.bounds(Partition(0)).end;
    for partition in 0..=u8::MAX {
        log.trim(Partition(partition), end);
    }
    assert!(append(&log, 0, "after"));
    let mut waited = 0;
    while stream.begin.load(SeqCst) == 0 {
        assert!(waited < 200, "nothing is removed");
        std::thread::sleep(Duration::from_millis(10));
        waited += 1;
    }
    assert!(append(&log, 0, "last"));
    let after = texts(&log, 0);
    drop(log);
    let copied = tempfile::tempdir().unwrap();
    copy_to(copied.path(), ShippedStore::Log, &stream, stream.begin.load(SeqCst) as usize);
    let log = EmbeddedLog::open(&DataDir::open(copied.path()).unwrap(), &small(&stream)).unwrap();
    assert!(after.ends_with(&texts(&log, 0)), "{:?} {after:?}", texts(&log, 0));
    assert!(texts(&log, 0).ends_with(&["after".to_owned(), "last".to_owned()]));
}

/// The failure: bytes that no ledger has look like messages that were acknowledged.
#[test]
fn what_is_behind_the_place_that_a_copy_has_reached_is_cut() {
    let dir = tempfile::tempdir().unwrap();
    let stream = Arc::new(Stream::default());
    let log = EmbeddedLog::open(&DataDir::open(dir.path()).unwrap(), &small(&stream)).unwrap();
    assert!(append(&log, 0, "one"));
    let mark = fs::read(dir.path().join("log/ledger")).unwrap();
    assert!(append(&log, 0, "two"));
    drop(log);
    fs::write(dir.path().join("log/ledger"), mark).unwrap();
    let copy = DirectoryCopy::open(&DataDir::open(dir.path()).unwrap()).unwrap();
    assert_eq!(copy.position(ShippedStore::Log), Some(position(0)));
    drop(copy);
    let log = EmbeddedLog::open(&DataDir::open(dir.path()).unwrap(), &LogOptions::default()).unwrap();
    assert_eq!(texts(&log, 0), ["one"]);
}

/// The failure: a gateway that takes over tells messages as lost that its directory has damaged, and the ledger whole.
#[test]
fn a_log_that_is_damaged_anywhere_is_no_copy() {
    let dir = tempfile::tempdir().unwrap();
    let stream = Arc::new(Stream::default());
    let log = EmbeddedLog::open(&DataDir::open(dir.path()).unwrap(), &small(&stream)).unwrap();
    for n in 0..40_u8 {
        assert!(append(&log, n % 3, &format!("message {n} {}", "x".repeat(700))));
    }
    drop(log);
    let position =
        || DirectoryCopy::open(&DataDir::open(dir.path()).unwrap()).unwrap().position(ShippedStore::Log);
    assert!(position().is_some());
    let mut files: Vec<_> =
        fs::read_dir(dir.path().join("log")).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "log"));
    assert!(files.len() > 2, "{files:?}");
    let mark = dir.path().join("log/ledger");
    let reached = fs::read(&mark).unwrap();
    for path in files {
        let sound = fs::read(&path).unwrap();
        // In the header, and in frames behind it; what a segment has behind them is made anew if it is damaged.
        let head = u32::from_le_bytes(sound[12..16].try_into().unwrap()) as usize;
        for place in [12, head / 2, head + 40, (head + 2_000).min(sound.len() - 1)] {
            let mut damaged = sound.clone();
            damaged[place] ^= 0x10;
            fs::write(&path, damaged).unwrap();
            assert_eq!(position(), None, "byte {place} of {}", path.display());
        }
        fs::remove_file(&path).unwrap();
        let is_first = path.ends_with("0000000000000000.log");
        assert!(is_first || position().is_none(), "without {}", path.display());
        fs::write(&path, sound).unwrap();
        fs::write(&mark, &reached).unwrap();
    }
    assert!(position().is_some());
}

/// The failure: a store that was damaged has no position for as long as its process lives, and is made anew for ever.
#[tokio::test]
async fn a_store_that_was_damaged_has_a_position_once_it_is_made_anew() {
    let dir = tempfile::tempdir().unwrap();
    let stream = Arc::new(Stream::default());
    let store = EmbeddedRecords::open(&DataDir::open(dir.path()).unwrap(), &with_ledger(&stream)).unwrap();
    for n in 0..40 {
        store.write(store::RecordWrite { changes: vec![change(n)], fence: None }).await.unwrap();
    }
    drop(store);
    let file = dir.path().join("records/data.mdb");
    let mut bytes = fs::read(&file).unwrap();
    bytes.chunks_mut(4096).skip(2).for_each(|page| page[12] ^= 0xFF);
    fs::write(&file, bytes).unwrap();
    let mut copy = DirectoryCopy::open(&DataDir::open(dir.path()).unwrap()).unwrap();
    let records = ShippedStore::Records;
    assert_eq!(copy.position(records), None);
    copy.clear(records).unwrap();
    assert_eq!(copy.position(records), None);
    for (n, record) in stream.records.lock().iter().enumerate() {
        copy.apply(records, position(n), record).unwrap();
        assert_eq!(copy.position(records), Some(position(n)));
    }
}

#[test]
fn files_come_along_and_go_again() {
    let (dir, copied) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let stream = Arc::new(Stream::default());
    let directory = DataDir::open(dir.path()).unwrap();
    directory.ship_files(Arc::new(ShippedFiles::open(dir.path(), Arc::clone(&stream) as _)));
    ClockMark::resume(&directory, None).keep().unwrap();
    let id = store::server_id(&directory).unwrap();
    stream.repeats.store(true, SeqCst);
    directory.replace_file("versions", "7\n").unwrap();
    let last = stream.records.lock().len() - 1;
    copy_to(copied.path(), ShippedStore::Files, &stream, last);
    assert_eq!(store::server_id(&DataDir::open(copied.path()).unwrap()).unwrap(), id);
    assert!(copied.path().join("clock").exists());
    let mut copy = DirectoryCopy::open(&DataDir::open(copied.path()).unwrap()).unwrap();
    for escaping in ["../bans", "lock/x", ".hidden", "ledger", ""] {
        let mut changes = Vec::new();
        store::encoding::fields::put_bytes(&mut changes, escaping.as_bytes());
        store::encoding::fields::put_bytes(&mut changes, b"x");
        assert!(copy.apply(ShippedStore::Files, position(9), &changes).is_err(), "{escaping}");
    }
    copy.clear(ShippedStore::Files).unwrap();
    assert!(!copied.path().join("server_id").exists() && copy.position(ShippedStore::Files).is_none());
    stream.lost.store(true, SeqCst);
    assert!(directory.replace_file("versions", "8\n").is_err());
    assert_eq!(fs::read_to_string(dir.path().join("versions")).unwrap(), "7\n");
}

/// The failure: a directory that was used alone is not whole in the ledger that it is given to.
#[test]
fn a_directory_that_was_used_alone_is_exported_whole() {
    let (dir, copied) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let directory = DataDir::open(dir.path()).unwrap();
    let store = EmbeddedRecords::open(&directory, &RecordOptions::default()).unwrap();
    let log = EmbeddedLog::open(&directory, &LogOptions::default()).unwrap();
    let id = store::server_id(&directory).unwrap();
    for n in 0..300_u32 {
        let change = put(RecordKind::ALL[n as usize % 4], &format!("{n}"), &"x".repeat(20_000));
        wait(store.write(store::RecordWrite { changes: vec![change], fence: None })).unwrap();
        assert!(append(&log, (n % 3) as u8, &format!("{n} {}", "y".repeat(10_000))));
    }
    let expected = wait(contents(&store));
    drop((store, log));
    let streams = ShippedStore::ALL.map(|_| Stream::default());
    let mut copy = DirectoryCopy::open(&directory).unwrap();
    assert!(copy.has_own_content());
    let mut ship = |store: ShippedStore, changes: &[u8]| -> io::Result<Position> {
        assert!(changes.len() < 3 << 20);
        match streams[store as usize].ship(changes, Cleaned::default()) {
            Shipped::Done(position) => Ok(position),
            Shipped::Lost | Shipped::Refused => Err(io::ErrorKind::Other.into()),
        }
    };
    copy.export(true, &mut ship).unwrap();
    assert!(!copy.has_own_content());
    for store in [ShippedStore::Records, ShippedStore::Log, ShippedStore::Files] {
        copy_to(copied.path(), store, &streams[store as usize], 0);
        let last = streams[store as usize].records.lock().len() - 1;
        assert_eq!(copy.position(store), Some(position(last)), "{store:?}");
    }
    drop(copy);
    let directory = DataDir::open(copied.path()).unwrap();
    assert_eq!(store::server_id(&directory).unwrap(), id);
    let store = EmbeddedRecords::open(&directory, &RecordOptions::default()).unwrap();
    assert_eq!(wait(contents(&store)), expected);
    let log = EmbeddedLog::open(&directory, &LogOptions::default()).unwrap();
    assert_eq!((0..3).map(|partition| texts(&log, partition).len()).sum::<usize>(), 300);
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]

    /// The failure: a row of another's hand ends the process, or fills the disk. Its checksum is not what keeps it out here.
    #[test]
    fn whatever_a_record_holds_it_is_applied_or_refused(
        number in 0..ShippedStore::ALL.len(),
        tags in proptest::collection::vec(0..6_u8, 0..4),
        bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..200),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let mut copy = DirectoryCopy::open(&DataDir::open(dir.path()).unwrap()).unwrap();
        let store = ShippedStore::ALL[number];
        for tag in tags {
            let changes = [&[tag], &bytes[..]].concat();
            let _ = copy.apply(store, position(0), &changes);
            let _ = copy.apply(store, position(1), &bytes);
        }
        copy.sync().unwrap();
        drop(copy);
        let size: u64 = walk(dir.path());
        proptest::prop_assert!(size < 64 << 20, "{size} bytes");
    }
}

/// Bytes of all files below a folder.
fn walk(folder: &Path) -> u64 {
    fs::read_dir(folder)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let data = entry.metadata().unwrap();
            if data.is_dir() { walk(&entry.path()) } else { data.len() }
        })
        .sum()
}
