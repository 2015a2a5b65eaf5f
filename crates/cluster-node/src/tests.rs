//! Nodes of one process over the ledger in memory, with stores on disk.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use disk::{EmbeddedRecords, RecordOptions, ShippedStore, empty_directory};
use gateway_core::Budget;
use ledger::{
    Beat, BoxFuture, Finding, Inserted, Ledger, Owner, Row, Rows, Segment, StoredView, Swapped, Unknown,
    twin::{Engine, Twin},
};
use store::{
    DataDir, RecordChange, RecordKind, RecordOutcome, RecordRange, RecordStore as _, RecordWrite, Verify,
    server_id,
};
use tempfile::TempDir;
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
    time::timeout,
};

use crate::{
    ClusterNode, HomeDirectories, HomeEnd, ImportError, NodeError, NodeSettings, NodeState, OwnedHome, Phase,
    create, leave_cluster, order_takeover, status,
};

pub(crate) const NAME: &str = "plant";

/// A node that runs, until it is dropped.
pub(crate) struct Started {
    pub(crate) state: watch::Receiver<NodeState>,
    pub(crate) homes: mpsc::Receiver<OwnedHome>,
    pub(crate) running: JoinHandle<Result<(), NodeError>>,
}

impl Started {
    /// The next home that becomes the node's.
    pub(crate) async fn home(&mut self) -> OwnedHome {
        soon(self.homes.recv()).await.unwrap()
    }

    /// Waits for a state.
    pub(crate) async fn is(&mut self, is_so: impl FnMut(&NodeState) -> bool) {
        soon(self.state.wait_for(is_so)).await.unwrap();
    }

    pub(crate) async fn error(mut self) -> NodeError {
        soon(&mut self.running).await.unwrap().unwrap_err()
    }

    /// Ends the process, whose homes are handed over already or go on by themselves. Its directory is free afterwards.
    pub(crate) async fn end(mut self) {
        self.running.abort();
        let _ = (&mut self.running).await;
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        self.running.abort();
    }
}

pub(crate) fn start(
    ledger: &Arc<impl Ledger + 'static>,
    name: &str,
    incarnation: u64,
    directory: &Path,
    takes_over: bool,
) -> Started {
    let settings = NodeSettings {
        cluster: NAME.to_owned(),
        name: name.to_owned(),
        address: format!("{name}.example:10000"),
        link: String::new(),
        takes_over,
        incarnation,
        move_every: Duration::from_millis(100),
    };
    let ledger = Arc::clone(ledger) as Arc<dyn Ledger>;
    let directories = HomeDirectories::open(directory, Verify::default()).unwrap();
    let (node, state) = ClusterNode::new(ledger, settings, directories);
    let (sender, homes) = mpsc::channel(1);
    Started { state, homes, running: tokio::spawn(node.run(sender)) }
}

pub(crate) async fn soon<T>(future: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(30), future).await.unwrap()
}

pub(crate) fn open(home: &OwnedHome) -> EmbeddedRecords {
    let mut options = RecordOptions::default();
    options.durable.shipping = Some(home.streams().of(ShippedStore::Records));
    EmbeddedRecords::open(home.directory(), &options).unwrap()
}

pub(crate) async fn put(store: &EmbeddedRecords, key: &str, value: &str) {
    let change = RecordChange::put(RecordKind::Commands, key.to_owned().into(), value.to_owned().into());
    let written = store.write(RecordWrite { changes: vec![change], fence: None }).await;
    assert_eq!(written.unwrap(), RecordOutcome::Done);
}

pub(crate) async fn contents(store: &EmbeddedRecords) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let range = RecordRange {
        kind: RecordKind::Commands,
        prefix: bytes::Bytes::new(),
        after: None,
        limit: usize::MAX,
        value_bytes: usize::MAX,
    };
    let read = store.read(range).await.unwrap();
    read.into_iter().map(|record| (record.key.to_vec(), record.value.unwrap().to_vec())).collect()
}

pub(crate) fn directory() -> TempDir {
    tempfile::tempdir().unwrap()
}

/// The failures: what was acknowledged is missing at the next owner; a process that was replaced acknowledges; a clean stop leaves
/// others waiting.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_home_goes_from_node_to_node_with_all_that_was_acknowledged() {
    for engine in [Engine::Stored, Engine::Owned] {
        let ledger = Arc::new(Twin::reliable(engine));
        create(Arc::clone(&ledger) as _, (NAME, 1), 1, 1, None, true).await.unwrap();
        let (a, b) = (directory(), directory());
        let mut one = start(&ledger, "a", 10, a.path(), true);
        let first = one.home().await;
        let id = server_id(first.directory()).unwrap();
        let store = open(&first);
        for n in 0..200 {
            put(&store, &format!("{}", n % 50), &format!("value {n}")).await;
        }
        let mut other = start(&ledger, "b", 11, b.path(), false);
        other.is(|state| state.warm && state.active == "a").await;
        assert_eq!(other.state.borrow().address, "a.example:10000");
        put(&store, "last", "value").await;
        let expected = contents(&store).await;

        assert_eq!(order_takeover(&(Arc::clone(&ledger) as _), 0, "b").await.unwrap(), 1);
        assert_eq!(soon(first.ends()).await, HomeEnd::Ordered);
        // The owner does not hand over, as if it were paused.
        let second = other.home().await;
        assert_eq!(soon(first.ends()).await, HomeEnd::Lost);
        let late = RecordChange::put(RecordKind::Commands, "late".into(), "value".into());
        let late = store.write(RecordWrite { changes: vec![late], fence: None });
        assert!(timeout(Duration::from_millis(300), late).await.is_err(), "nobody is told anything");
        let taken = open(&second);
        assert_eq!(contents(&taken).await, expected);
        assert_eq!(server_id(second.directory()).unwrap(), id);
        put(&taken, "of b", "value").await;
        let expected = contents(&taken).await;

        // The one that lost it stands by in the same process, and a clean stop gives it back.
        drop((store, first));
        one.is(|state| state.warm && state.active == "b").await;
        drop(taken);
        second.hand_over().await.unwrap();
        let third = one.home().await;
        let store = open(&third);
        assert_eq!(contents(&store).await, expected);
        other.is(|state| state.phase == Phase::Standby && state.active == "a").await;
    }
}

/// The failures: the cluster begins empty though the directory was not; a directory that is not of the cluster is emptied.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_that_was_used_alone_becomes_the_home_of_a_cluster() {
    let ledger = Arc::new(Twin::reliable(Engine::Stored));
    let folder = directory();
    let a = DataDir::open(folder.path()).unwrap();
    let store = EmbeddedRecords::open(&a, &RecordOptions::default()).unwrap();
    for n in 0..100 {
        put(&store, &format!("{n}"), &"x".repeat(30_000)).await;
    }
    let expected = contents(&store).await;
    drop(store);
    let id = server_id(&a).unwrap();
    let many = create(Arc::clone(&ledger) as _, (NAME, 2), 1, 1, Some(Arc::clone(&a)), true).await;
    assert!(matches!(many, Err(ImportError::SeveralHomes(2))));
    let bytes = create(Arc::clone(&ledger) as _, (NAME, 1), 1, 1, Some(Arc::clone(&a)), true).await.unwrap();
    assert!(bytes > 3_000_000);
    let again = create(Arc::clone(&ledger) as _, (NAME, 1), 2, 1, Some(Arc::clone(&a)), true).await;
    assert!(matches!(again, Err(ImportError::View(_))));
    drop(a);
    let other = directory();
    for (name, directory) in [("b", other.path()), ("a", folder.path())] {
        let mut node = start(&ledger, name, 11, directory, true);
        let home = node.home().await;
        let store = open(&home);
        assert_eq!(contents(&store).await, expected);
        assert_eq!(server_id(home.directory()).unwrap(), id);
        drop(store);
        node.end().await;
        home.hand_over().await.unwrap();
        if name == "b" {
            continue;
        }
        // Alone again, it has everything, and does not come back by mistake.
        let alone = DataDir::open(directory).unwrap();
        leave_cluster(&alone).unwrap();
        let store = EmbeddedRecords::open(&alone, &RecordOptions::default()).unwrap();
        assert_eq!(contents(&store).await, expected);
        drop((store, alone));
        let refused = start(&ledger, name, 12, directory, true).error().await;
        assert!(matches!(refused, NodeError::OwnContent(_)));
    }
}

/// The failure: a store that is changed again and again fills the ledger.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ledger_stays_within_a_few_times_of_what_is_alive() {
    let ledger = Arc::new(Twin::reliable(Engine::Owned));
    create(Arc::clone(&ledger) as _, (NAME, 1), 1, 1, None, true).await.unwrap();
    let folder = directory();
    let mut node = start(&ledger, "a", 10, folder.path(), true);
    let home = node.home().await;
    let store = open(&home);
    for n in 0..4_000 {
        put(&store, &format!("{}", n % 40), &"x".repeat(20_000)).await;
    }
    let expected = contents(&store).await;
    let rows: usize = ledger.rows().iter().map(|row| row.data.len()).sum();
    // Two segments, and a little.
    assert!(rows < 38_000_000, "{rows} bytes of 80,000,000 are in the ledger");
    assert_eq!(home.figures()().epoch, 1);
    drop(store);
    node.end().await;
    home.hand_over().await.unwrap();
    empty_directory(folder.path()).unwrap();
    let home = start(&ledger, "a", 11, folder.path(), true).home().await;
    assert_eq!(contents(&open(&home)).await, expected);
}

/// A node's way to the ledger: segments are read slowly, and nothing is answered any more once it is cut.
struct SlowWay {
    ledger: Arc<Twin>,
    reads: Duration,
    is_cut: AtomicBool,
}

impl SlowWay {
    fn to(ledger: &Arc<Twin>, reads: Duration) -> Arc<Self> {
        Arc::new(Self { ledger: Arc::clone(ledger), reads, is_cut: AtomicBool::new(false) })
    }

    fn pass<'a, T: Send + 'a>(&'a self, call: BoxFuture<'a, T>) -> BoxFuture<'a, T> {
        if self.is_cut.load(SeqCst) { Box::pin(std::future::pending()) } else { call }
    }
}

impl Ledger for SlowWay {
    fn insert(&self, owner: &Owner, rows: Arc<[Row]>) -> BoxFuture<'_, Result<Inserted, Unknown>> {
        self.pass(self.ledger.insert(owner, rows))
    }

    fn owners(&self) -> BoxFuture<'_, Result<Vec<Owner>, Unknown>> {
        self.pass(self.ledger.owners())
    }

    fn read(&self, segment: Segment, from: (u64, u16), bytes: usize) -> BoxFuture<'_, Result<Rows, Unknown>> {
        self.pass(Box::pin(async move {
            tokio::time::sleep(self.reads).await;
            self.ledger.read(segment, from, bytes).await
        }))
    }

    fn delete(&self, segment: Segment) -> BoxFuture<'_, Result<(), Unknown>> {
        self.pass(self.ledger.delete(segment))
    }

    fn view(&self) -> BoxFuture<'_, Result<Option<StoredView>, Unknown>> {
        self.pass(self.ledger.view())
    }

    fn swap(&self, new: &StoredView) -> BoxFuture<'_, Result<Swapped, Unknown>> {
        self.pass(self.ledger.swap(new))
    }

    fn beat(&self, beat: &Beat) -> BoxFuture<'_, Result<Vec<Owner>, Unknown>> {
        self.pass(self.ledger.beat(beat))
    }

    fn beats(&self) -> BoxFuture<'_, Result<Vec<Beat>, Unknown>> {
        self.pass(self.ledger.beats())
    }

    fn create(&self) -> BoxFuture<'_, Result<(), Unknown>> {
        self.pass(self.ledger.create())
    }

    fn findings(&self) -> BoxFuture<'_, Result<Vec<Finding>, Unknown>> {
        self.pass(self.ledger.findings())
    }
}

/// The failure: a node whose copy is read slowly does not look at the signs of life often enough to miss any, and never takes over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_copy_does_not_hide_that_the_owner_is_gone() {
    let ledger = Arc::new(Twin::reliable(Engine::Stored));
    create(Arc::clone(&ledger) as _, (NAME, 1), 1, 1, None, true).await.unwrap();
    let (a, b) = (directory(), directory());
    let way = SlowWay::to(&ledger, Duration::ZERO);
    let mut one = start(&way, "a", 10, a.path(), true);
    let first = one.home().await;
    put(&open(&first), "key", "value").await;
    let mut other = start(&SlowWay::to(&ledger, Duration::from_millis(400)), "b", 11, b.path(), true);
    other.is(|state| state.active == "a").await;
    way.is_cut.store(true, SeqCst);
    let second = other.home().await;
    assert_eq!(contents(&open(&second)).await.len(), 1);
}

/// An account without a bound.
#[derive(Default)]
struct Counted {
    held: AtomicUsize,
    most: AtomicUsize,
}

impl Budget for Counted {
    fn charge(&self, _held: usize, _bytes: usize) -> bool {
        false
    }

    fn force(&self, bytes: usize) {
        let held = self.held.fetch_add(bytes, SeqCst) + bytes;
        self.most.fetch_max(held, SeqCst);
    }

    fn release(&self, bytes: usize) {
        self.held.fetch_sub(bytes, SeqCst);
    }
}

/// The failures: records that wait for the ledger are on no account; they stay on it; one is refused for want of memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_is_on_the_account_while_it_is_on_its_way() {
    let ledger = Arc::new(Twin::reliable(Engine::Owned));
    create(Arc::clone(&ledger) as _, (NAME, 1), 1, 1, None, true).await.unwrap();
    let a = directory();
    let mut node = start(&ledger, "a", 10, a.path(), true);
    let home = node.home().await;
    let store = open(&home);
    let (redo, account) = (home.streams().redo(), Arc::new(Counted::default()));
    redo.charge_to(Arc::clone(&account) as _);
    for _ in 0..3 {
        put(&store, "key", &"x".repeat(100_000)).await;
        let most = account.most.load(SeqCst);
        assert!((300_000..320_000).contains(&most), "{most}");
        assert_eq!((account.held.load(SeqCst), redo.held()), (0, 0));
    }
}

/// The failures: a node that is dead is shown as one that stands by, or none is shown; what the ledger has is not counted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_and_segments_are_told_by_the_ledger_and_by_the_owner() {
    let ledger = Arc::new(Twin::reliable(Engine::Owned));
    create(Arc::clone(&ledger) as _, (NAME, 1), 1, 1, None, true).await.unwrap();
    let (a, b) = (directory(), directory());
    let mut node = start(&ledger, "a", 10, a.path(), true);
    let home = node.home().await;
    let store = open(&home);
    for n in 0..90 {
        put(&store, &format!("{n}"), &"x".repeat(200_000)).await;
    }
    let dead = Beat { node: "dead".into(), incarnation: 1, number: 1, about: bytes::Bytes::new() };
    ledger.beat(&dead).await.unwrap();
    let mut other = start(&ledger, "b", 11, b.path(), false);
    other.is(|state| state.warm).await;

    let found = status(&(Arc::clone(&ledger) as _), 0).await.unwrap();
    assert_eq!((&*found.owner, found.epoch), ("a", 1));
    let mut nodes: Vec<_> =
        found.nodes.iter().map(|node| (&*node.name, node.beaten.is_some(), node.is_warm)).collect();
    nodes.sort_unstable();
    assert_eq!(nodes, [("a", true, true), ("b", true, true), ("dead", false, false)]);
    let records = found.streams.iter().find(|stream| stream.store == ShippedStore::Records).unwrap();
    assert_eq!((records.segments, records.most_bytes(), records.start.n), (2, 32 << 20, 0));

    let figures = home.figures();
    soon(async {
        while figures().nodes.len() < 3 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    let figures = figures();
    assert_eq!((&*figures.node, figures.epoch, figures.redo), ("a", 1, 0));
    let b = figures.nodes.iter().find(|node| node.name == "b").unwrap();
    assert!(b.beaten.is_some() && b.is_warm);
}

#[test]
fn a_state_is_a_line() {
    let state =
        NodeState { phase: Phase::Standby, active: "a".to_owned(), warm: true, ..NodeState::default() };
    assert_eq!(state.line(), "standby: a serves, the copy is warm");
    assert_eq!(NodeState::default().line(), "standby: the ledger does not answer");
}
