//! Latest values with a ledger in memory, and copies made of it.

use std::{
    collections::{BTreeMap, VecDeque},
    path::Path,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    thread,
    time::Duration,
};

use ledger::{Cleaned, Position, Shipped, Shipping};
use parking_lot::Mutex;
use store::suite::latest::{list_all, value};
use tempfile::TempDir;
use tokio::time::timeout;

use super::{changed::MOST_REMOVALS, *};
use crate::{DirectoryCopy, ShippedStore, counters, keys, table};

/// No lap comes by itself.
const NEVER: Duration = Duration::from_secs(100_000);

const SOON: Duration = Duration::from_millis(20);

/// A stream in memory.
#[derive(Default)]
struct Stream {
    records: Mutex<Vec<Vec<u8>>>,
    /// Numbers of the records with marks that are not passed, and of the last that was.
    marks: Mutex<VecDeque<usize>>,
    passed: AtomicUsize,
    repeats: AtomicBool,
    lost: AtomicBool,
    /// The ledger does not answer.
    hangs: AtomicBool,
    /// Appends that have begun.
    begun: AtomicUsize,
}

impl Shipping for Stream {
    fn ship(&self, changes: &[u8], cleaned: Cleaned) -> Shipped {
        self.begun.fetch_add(1, SeqCst);
        while self.hangs.load(SeqCst) {
            thread::sleep(Duration::from_millis(1));
        }
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

    fn begin_at(&self, _epoch: u64, _n: u64) {}
}

fn position(n: usize) -> Position {
    Position { epoch: 1, n: n as u64, sum: n as u32 + 7 }
}

fn open(path: &Path, stream: &Arc<Stream>, interval: Duration, bytes: usize) -> EmbeddedLatest {
    let ledger = Some(LatestLedger { shipping: Arc::clone(stream) as _, interval, bytes });
    let options = EmbeddedOptions { ledger, ..EmbeddedOptions::default() };
    EmbeddedLatest::open(&DataDir::open(path).unwrap(), &options).unwrap()
}

/// With as many bytes a second as it takes.
fn fast(path: &Path, stream: &Arc<Stream>, interval: Duration) -> EmbeddedLatest {
    open(path, stream, interval, 1 << 40)
}

fn alone(path: &Path) -> EmbeddedLatest {
    EmbeddedLatest::open(&DataDir::open(path).unwrap(), &EmbeddedOptions::default()).unwrap()
}

async fn contents(store: &EmbeddedLatest) -> BTreeMap<(String, String), LatestValue> {
    let all = list_all(store, LatestQuery { limit: 10_000, ..LatestQuery::default() }).await;
    all.into_iter().map(|value| ((value.device.to_string(), value.topic.to_string()), value)).collect()
}

async fn put(store: &EmbeddedLatest, values: impl IntoIterator<Item = LatestValue>) {
    store.upsert(values.into_iter().collect()).await.unwrap();
}

/// A directory of the records from `from` on.
fn copy_of(stream: &Stream, from: usize) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut copy = DirectoryCopy::open(&DataDir::open(dir.path()).unwrap()).unwrap();
    for (n, record) in stream.records.lock().iter().enumerate().skip(from) {
        copy.apply(ShippedStore::Latest, position(n), record).unwrap();
    }
    dir
}

async fn copied(stream: &Stream, from: usize) -> BTreeMap<(String, String), LatestValue> {
    contents(&alone(copy_of(stream, from).path())).await
}

/// Times that a value is in the records.
fn times(store: &EmbeddedLatest, stream: &Stream, device: &str, topic: &str) -> usize {
    let key = keys::key(&keys::name(device, topic), 0);
    let records = stream.records.lock();
    let of =
        |record: &Vec<u8>| table::keys(record, store.tables.latest).filter(|found| *found == key).count();
    records.iter().map(of).sum()
}

async fn until(what: &str, is_so: impl Fn() -> bool) {
    let waiting = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(Duration::from_secs(60), waiting).await.unwrap_or_else(|_| panic!("not in a minute: {what}"));
}

fn waiting(store: &EmbeddedLatest) -> u64 {
    store.ledger_figures().unwrap().waiting
}

/// The failures: a key that changes all the time fills the ledger; an older value is shipped; a removal is not, or brings others down.
#[tokio::test]
async fn a_key_goes_once_for_each_interval_with_its_newest_value() {
    let dir = tempfile::tempdir().unwrap();
    let stream = Arc::new(Stream::default());
    let store = fast(dir.path(), &stream, NEVER);
    for version in 1..=50 {
        let others = (0..10).map(|n| value("other", &format!("t/{n}"), version));
        put(&store, others.chain([value("d", "busy", version)])).await;
    }
    put(&store, [value("d", "gone", 60), value("d", "kept", 61)]).await;
    store.end_shipping().await;
    assert_eq!((times(&store, &stream, "d", "busy"), times(&store, &stream, "other", "t/3")), (1, 1));
    assert_eq!((waiting(&store), copied(&stream, 0).await), (0, contents(&store).await));
    drop(store);

    let store = fast(dir.path(), &stream, NEVER);
    store.remove([value("d", "gone", 70), value("d", "never", 70)].into()).await.unwrap();
    put(&store, [value("d", "new", 71), value("other", "gone", 72)]).await;
    store.end_shipping().await;
    assert_eq!(times(&store, &stream, "d", "busy"), 1, "it has not changed");
    let expected = contents(&store).await;
    assert!(!expected.contains_key(&("d".to_owned(), "gone".to_owned())) && expected.len() == 14);
    let copy = copy_of(&stream, 0);
    let taken = alone(copy.path());
    assert_eq!(contents(&taken).await, expected);
    for topic in ["busy", "gone", "never", "t/3"] {
        assert_eq!(taken.get(topic, None).await.unwrap(), store.get(topic, None).await.unwrap(), "{topic}");
    }
}

/// The failures: writers wait for a ledger that does not answer; what changed meanwhile is taken for shipped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_waits_for_a_ledger_that_does_not_answer() {
    let dir = tempfile::tempdir().unwrap();
    let stream = Arc::new(Stream::default());
    stream.hangs.store(true, SeqCst);
    let store = fast(dir.path(), &stream, SOON);
    put(&store, [value("d", "t", 1)]).await;
    until("an append begins", || stream.begun.load(SeqCst) == 1).await;
    let written = async {
        for version in 2..=100 {
            put(&store, [value("d", "t", version), value("d", &format!("t/{version}"), version)]).await;
        }
        store.remove([value("d", "t/7", 200)].into()).await.unwrap();
    };
    timeout(Duration::from_secs(60), written).await.expect("writers wait for the ledger");
    assert_eq!(stream.begun.load(SeqCst), 1, "one append is under way");
    assert!(stream.records.lock().is_empty() && waiting(&store) == 100);
    stream.hangs.store(false, SeqCst);
    until("all is shipped", || waiting(&store) == 0).await;
    assert_eq!(copied(&stream, 0).await, contents(&store).await);
    assert_eq!(store.ledger_figures().unwrap().lag, Duration::ZERO);
}

/// The failures: what a killed process had not shipped never goes; a home of an earlier version, or one that was used alone, stays out.
#[tokio::test]
async fn what_was_not_shipped_goes_after_the_next_start() {
    let dir = tempfile::tempdir().unwrap();
    let stream = Arc::new(Stream::default());
    let store = alone(dir.path());
    let long = "x".repeat(600);
    put(&store, (0..2_500).map(|n| value("old", &format!("t/{n}"), n + 1))).await;
    put(&store, [value("old", &long, 3_000)]).await;
    drop(store);
    let store = fast(dir.path(), &stream, NEVER);
    store.end_shipping().await;
    assert_eq!(copied(&stream, 0).await, contents(&store).await);
    let shipped = stream.records.lock().len();
    drop(store);

    let store = fast(dir.path(), &stream, NEVER);
    put(&store, [value("new", "t", 4_000), value("old", &long, 4_001)]).await;
    store.remove([value("old", "t/5", 5_000)].into()).await.unwrap();
    let expected = contents(&store).await;
    // As if it were killed: it does not go once more through what it has.
    drop(store);
    assert_eq!(stream.records.lock().len(), shipped);
    let store = fast(dir.path(), &stream, SOON);
    until("all is shipped", || waiting(&store) == 0).await;
    assert_eq!(copied(&stream, 0).await, expected);
    assert_eq!((times(&store, &stream, "old", "t/6"), times(&store, &stream, "new", "t")), (1, 1));
}

/// The failures: many values at once take the database from what is acknowledged; some of them are left out.
#[tokio::test]
async fn bytes_a_second_are_bounded_and_values_are_put_off() {
    let dir = tempfile::tempdir().unwrap();
    let stream = Arc::new(Stream::default());
    let late = || counters::totals().ledger_latest_put_off_bytes;
    let before = late();
    let store = open(dir.path(), &stream, SOON, 1 << 20);
    let large = |n: u64| LatestValue { payload: vec![7; 10_000].into(), ..value("d", &format!("t/{n}"), n) };
    put(&store, (1..=60).map(large)).await;
    until("all is shipped", || waiting(&store) == 0).await;
    assert!(late() > before, "all at once");
    let records = stream.records.lock().clone();
    assert!(records.iter().all(|record| record.len() < 150_000) && records.len() >= 4);
    assert_eq!(copied(&stream, 0).await, contents(&store).await);
}

/// The failures: the ledger grows for ever; a round leaves out what it passed, or what changed behind it.
#[tokio::test]
async fn a_copy_has_everything_also_from_the_last_round_on() {
    let dir = tempfile::tempdir().unwrap();
    let stream = Arc::new(Stream::default());
    stream.repeats.store(true, SeqCst);
    let filled = |n: u64, version| LatestValue {
        payload: vec![version as u8; 1_000].into(),
        ..value(&format!("d{}", n % 7), &format!("t/{n}"), version)
    };
    for round in 1..=3_u64 {
        let store = fast(dir.path(), &stream, NEVER);
        put(&store, (0..400).filter(|n| n % round == 0).map(|n| filled(n, round * 1_000 + n))).await;
        let gone = (0..400).filter(|n| n % 5 == round).map(|n| filled(n, round * 1_000 + 500 + n));
        store.remove(gone.collect()).await.unwrap();
        store.end_shipping().await;
    }
    let expected = contents(&alone(dir.path())).await;
    let passed = stream.passed.load(SeqCst);
    assert!(passed > 0, "no mark was passed");
    for from in [0, passed] {
        assert_eq!(copied(&stream, from).await, expected, "from record {from}");
    }
}

/// The failures: the directory of a gateway that has served hides what the next one got; what it alone has is never shipped.
#[tokio::test]
async fn a_directory_that_was_ahead_of_the_ledger_follows_it() {
    let dir = tempfile::tempdir().unwrap();
    let stream = Arc::new(Stream::default());
    let store = fast(dir.path(), &stream, NEVER);
    put(&store, [value("d", "one", 1), value("d", "two", 2)]).await;
    store.end_shipping().await;
    drop(store);
    let store = fast(dir.path(), &stream, NEVER);
    put(&store, [value("d", "one", 3), value("d", "three", 4)]).await;
    store.remove([value("d", "two", 5)].into()).await.unwrap();
    drop(store);

    let other = copy_of(&stream, 0);
    let taken = fast(other.path(), &stream, NEVER);
    put(&taken, [value("d", "one", 10), value("d", "two", 11)]).await;
    taken.end_shipping().await;
    let mut copy = DirectoryCopy::open(&DataDir::open(dir.path()).unwrap()).unwrap();
    let found = copy.position(ShippedStore::Latest).unwrap();
    let records = stream.records.lock().clone();
    for (n, record) in records.iter().enumerate().skip(found.n as usize + 1) {
        copy.apply(ShippedStore::Latest, position(n), record).unwrap();
    }
    drop(copy);
    let store = fast(dir.path(), &stream, NEVER);
    assert_eq!(waiting(&store), 1);
    store.end_shipping().await;
    let expected =
        [("one", 10), ("three", 4), ("two", 11)].map(|(topic, version)| value("d", topic, version));
    assert_eq!(contents(&store).await.into_values().collect::<Vec<_>>(), expected);
    assert_eq!(copied(&stream, 0).await, contents(&store).await);
}

/// The failure: removals that no ledger takes fill the disk.
#[tokio::test]
async fn removals_that_wait_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let stream = Arc::new(Stream::default());
    let values = || (1..=300).map(|n| value("d", &format!("t/{n}"), n));
    let store = fast(dir.path(), &stream, NEVER);
    put(&store, values()).await;
    store.end_shipping().await;
    drop(store);
    let untold = || counters::totals().ledger_latest_dropped_removals;
    let before = untold();
    let store = fast(dir.path(), &stream, NEVER);
    store.remove(values().map(|value| LatestValue { version: 1_000, ..value }).collect()).await.unwrap();
    let noted = waiting(&store);
    assert!((MOST_REMOVALS..300).contains(&noted), "{noted}");
    assert_eq!(untold() - before, 300 - noted);
    assert!(contents(&store).await.is_empty());
}

/// The failure: the thread of a home that was lost goes on, or keeps its directory.
#[tokio::test]
async fn a_home_that_is_lost_ends_it() {
    let dir = tempfile::tempdir().unwrap();
    let stream = Arc::new(Stream::default());
    stream.lost.store(true, SeqCst);
    let store = fast(dir.path(), &stream, SOON);
    put(&store, [value("d", "t", 1)]).await;
    until("an append begins", || stream.begun.load(SeqCst) == 1).await;
    store.end_shipping().await;
    drop(store);
    assert_eq!(contents(&alone(dir.path())).await.len(), 1);
    assert_eq!(stream.begun.load(SeqCst), 1);
}
