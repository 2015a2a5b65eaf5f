//! Every operation of durable queues and their order; what failures, expiry, damage and a start do to them is in the
//! files beside this one.

mod damage;
mod expiry;
mod failures;
mod start;

use std::{
    io,
    path::Path,
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst},
    time::Duration,
};

use parking_lot::Condvar;
use tempfile::TempDir;

use super::*;
#[cfg(target_os = "linux")]
use crate::latest::tests::mapped;
use crate::{CommitHook, state::EmbeddedState};
use gateway_core::{Commit, Journal, Origin, QoS, QueueEntry, SharedMessage, StoredEntry, Timestamp};
use store::{DataDir, StateStore, StoreHealth};

const Q: QueueId = QueueId(7);
const OTHER: QueueId = QueueId(8);

pub(super) fn open(dir: &Path, options: &StateOptions) -> EmbeddedState {
    EmbeddedState::open(&DataDir::open(dir).unwrap(), options).unwrap()
}

fn new() -> (TempDir, EmbeddedState) {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), &StateOptions::default());
    (dir, store)
}

pub(super) fn message(payload: &[u8], expires: Option<u64>) -> Arc<SharedMessage> {
    let mut message = Message::new("some/topic", payload, Timestamp(1_700_000_000_000), Origin::BACKEND);
    message.qos = QoS::AtLeastOnce;
    message.expires = expires.map(Timestamp);
    Arc::clone(message.share())
}

fn text(n: u64) -> Vec<u8> {
    format!("message {n}").into_bytes()
}

fn entry(queue: QueueId, seq: u64) -> QueueEntry {
    QueueEntry::new(queue, seq, message(&text(seq), None), QoS::AtLeastOnce, None)
}

fn append(store: &EmbeddedState, entry: QueueEntry) -> Arc<QueueEntry> {
    let entry = Arc::new(entry);
    store.submit(QueueOp::Append(Arc::clone(&entry)));
    if entry.commit.as_ref().is_some_and(|commit| !commit.is_unit()) {
        store.hurry();
    }
    entry
}

fn remove(store: &EmbeddedState, queue: QueueId, seq: u64) {
    store.submit(QueueOp::Remove { queue, seq, unit: None });
}

/// In several reads on a slow machine: one lasts 50 ms at most.
async fn all(store: &EmbeddedState, queue: QueueId) -> Vec<StoredEntry> {
    let mut entries = Vec::new();
    let mut from = 0;
    loop {
        let loaded = store.load(queue, from, usize::MAX, usize::MAX).await.unwrap();
        entries.extend(loaded.entries);
        if loaded.end {
            return entries;
        }
        from = loaded.next;
    }
}

async fn seqs(store: &EmbeddedState, queue: QueueId) -> Vec<u64> {
    all(store, queue).await.iter().map(|entry| entry.seq).collect()
}

/// Waits until the store has written all before this call.
async fn written(store: &EmbeddedState) {
    let commit = Commit::new();
    store.submit(QueueOp::Forget { queue: QueueId(1 << 30), packet_id: 1, commit: Arc::clone(&commit) });
    commit.wait().await.unwrap();
}

fn bodies(store: &EmbeddedState) -> (u64, u64) {
    let tables = store.tables.queues;
    store.environment.reading(|txn| Ok((tables.bodies.len(txn)?, tables.refs.len(txn)?))).unwrap()
}

/// Stands in for the disk: stops or fails commits.
#[derive(Default)]
struct Disk {
    stopped: Mutex<bool>,
    changed: Condvar,
    fails: AtomicBool,
    /// Commits begun.
    commits: AtomicU32,
}

impl Disk {
    fn new() -> (Arc<Self>, StateOptions) {
        let disk = Arc::new(Self::default());
        let commits = Arc::clone(&disk);
        let hook: CommitHook = Arc::new(move |_| commits.commit());
        (disk, StateOptions { hook: Some(hook), ..StateOptions::default() })
    }

    fn commit(&self) -> io::Result<()> {
        self.commits.fetch_add(1, SeqCst);
        let mut stopped = self.stopped.lock();
        while *stopped {
            self.changed.wait(&mut stopped);
        }
        if self.fails.load(SeqCst) { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }

    /// The next commit does not end, and it is one of nothing that matters.
    fn stop(&self, store: &EmbeddedState) {
        *self.stopped.lock() = true;
        let commits = self.commits.load(SeqCst);
        let commit = Commit::new();
        store.submit(QueueOp::Forget { queue: QueueId(1 << 30), packet_id: 2, commit });
        while self.commits.load(SeqCst) == commits {
            std::thread::yield_now();
        }
    }

    fn go_on(&self) {
        *self.stopped.lock() = false;
        self.changed.notify_all();
    }
}

fn waited_for(queue: QueueId, seq: u64, commit: &Arc<Commit>) -> QueueEntry {
    QueueEntry::new(queue, seq, message(&text(seq), None), QoS::AtLeastOnce, Some(Arc::clone(commit)))
}

#[tokio::test]
async fn entries_come_back_whole_and_in_order_after_a_reopen() {
    let (dir, store) = new();
    let mut full = entry(Q, 3);
    full.retain = true;
    full.note_sent();
    full.group = QueueId(99);
    full.ids = Some([5, 700].into());
    append(&store, full);
    for seq in [4, 5, 9] {
        append(&store, entry(Q, seq));
    }
    append(&store, entry(OTHER, 0));
    assert_eq!(seqs(&store, Q).await, [3, 4, 5, 9]);
    drop(store);
    let store = open(dir.path(), &StateOptions::default());
    let found = all(&store, Q).await;
    let first = &found[0];
    assert_eq!(
        (first.qos, first.retain, first.sent, first.group),
        (QoS::AtLeastOnce, true, true, QueueId(99))
    );
    assert_eq!(first.ids.as_deref(), Some(&[5, 700][..]));
    let message = first.message.as_ref().unwrap();
    assert_eq!((&*message.topic, &message.payload[..]), ("some/topic", &text(3)[..]));
    assert_eq!(found.len(), 4);
    assert_eq!(seqs(&store, OTHER).await, [0]);
}

#[tokio::test]
async fn what_is_added_and_removed_in_one_batch_is_never_written() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, options) = Disk::new();
    let store = open(dir.path(), &options);
    disk.stop(&store);
    let commit = Commit::new();
    for seq in 0..4 {
        append(&store, waited_for(Q, seq, &commit));
    }
    remove(&store, Q, 1);
    store.submit(QueueOp::Release { queue: Q, seq: 2, commit: Commit::new() });
    store.submit(QueueOp::Release { queue: Q, seq: 3, commit: Commit::new() });
    remove(&store, Q, 3);
    disk.go_on();
    commit.done();
    commit.wait().await.unwrap();
    let found = all(&store, Q).await;
    assert_eq!(
        found.iter().map(|e| (e.seq, e.message.is_some())).collect::<Vec<_>>(),
        [(0, true), (2, false)]
    );
    assert_eq!(bodies(&store), (1, 0));
    remove(&store, Q, 0);
    remove(&store, Q, 2);
    written(&store).await;
    assert_eq!(bodies(&store), (0, 0));
    assert_eq!(store.summaries().unwrap(), []);
}

#[tokio::test]
async fn a_fan_out_is_stored_once_and_goes_with_its_last_entry() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, options) = Disk::new();
    let store = open(dir.path(), &options);
    disk.stop(&store);
    let shared = message(b"for all", None);
    for queue in 1..=4 {
        append(&store, QueueEntry::new(QueueId(queue), 0, Arc::clone(&shared), QoS::AtLeastOnce, None));
    }
    remove(&store, QueueId(4), 0);
    disk.go_on();
    written(&store).await;
    assert_eq!(bodies(&store), (1, 1));
    remove(&store, QueueId(1), 0);
    store.submit(QueueOp::Release { queue: QueueId(2), seq: 0, commit: Commit::new() });
    written(&store).await;
    assert_eq!(bodies(&store), (1, 1));
    assert_eq!(all(&store, QueueId(3)).await[0].message.as_ref().unwrap().payload, "for all");
    store.submit(QueueOp::Purge { queue: QueueId(3) });
    written(&store).await;
    assert_eq!(bodies(&store), (0, 0));
}

#[tokio::test]
async fn trim_and_purge_stay_within_their_queue_and_what_was_there() {
    let (_dir, store) = new();
    for seq in 0..30 {
        append(&store, entry(Q, seq));
        append(&store, entry(OTHER, seq));
    }
    store.submit(QueueOp::Trim { queue: Q, from: 5, count: 20 });
    append(&store, entry(Q, 30));
    assert_eq!(seqs(&store, Q).await, [0, 1, 2, 3, 4, 25, 26, 27, 28, 29, 30]);
    store.submit(QueueOp::Trim { queue: Q, from: 26, count: 100 });
    append(&store, entry(Q, 31));
    assert_eq!(seqs(&store, Q).await, [0, 1, 2, 3, 4, 25, 31]);
    store.submit(QueueOp::Receive { queue: Q, packet_id: 9, commit: Commit::new() });
    store.submit(QueueOp::Receive { queue: OTHER, packet_id: 9, commit: Commit::new() });
    store.submit(QueueOp::Purge { queue: Q });
    assert!(seqs(&store, Q).await.is_empty());
    assert_eq!(seqs(&store, OTHER).await.len(), 30);
    let summaries = store.summaries().unwrap();
    assert_eq!(summaries.len(), 1);
    assert_eq!((summaries[0].queue, &summaries[0].received[..]), (OTHER, &[9][..]));
}

#[tokio::test]
async fn nothing_of_a_long_purged_queue_is_seen_while_it_goes_in_parts() {
    let (_dir, store) = new();
    let shared = message(b"x", None);
    for seq in 0..25_000 {
        append(&store, QueueEntry::new(Q, seq, Arc::clone(&shared), QoS::AtLeastOnce, None));
        append(&store, QueueEntry::new(OTHER, seq, Arc::clone(&shared), QoS::AtLeastOnce, None));
    }
    store.submit(QueueOp::Purge { queue: Q });
    append(&store, entry(Q, 7));
    assert_eq!(seqs(&store, Q).await, [7]);
    store.submit(QueueOp::Purge { queue: OTHER });
    written(&store).await;
    assert!(seqs(&store, OTHER).await.is_empty());
    remove(&store, Q, 7);
    written(&store).await;
    assert_eq!(bodies(&store), (0, 0));
}

#[tokio::test]
async fn what_is_added_to_a_queue_being_emptied_is_not_removed_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, options) = Disk::new();
    let store = open(dir.path(), &options);
    let shared = message(b"x", None);
    for seq in 0..25_000 {
        append(&store, QueueEntry::new(Q, seq, Arc::clone(&shared), QoS::AtLeastOnce, None));
    }
    written(&store).await;
    store.submit(QueueOp::Purge { queue: Q });
    disk.stop(&store);
    let commit = Commit::new();
    for seq in [30_000, 24_990, 31_000] {
        append(&store, waited_for(Q, seq, &commit));
    }
    commit.done();
    store.hurry();
    disk.go_on();
    commit.wait().await.unwrap();
    assert_eq!(seqs(&store, Q).await, [24_990, 30_000, 31_000]);
}

#[tokio::test]
async fn a_released_entry_keeps_its_place_even_if_its_message_was_gone() {
    let (dir, store) = new();
    append(&store, entry(Q, 1));
    for seq in [1, 2] {
        let commit = Commit::new();
        commit.add();
        store.submit(QueueOp::Release { queue: Q, seq, commit: Arc::clone(&commit) });
        commit.done();
        commit.wait().await.unwrap();
    }
    drop(store);
    let store = open(dir.path(), &StateOptions::default());
    let found = all(&store, Q).await;
    assert_eq!(
        found.iter().map(|e| (e.seq, e.message.is_some())).collect::<Vec<_>>(),
        [(1, false), (2, false)]
    );
    assert_eq!(bodies(&store), (0, 0));
}

#[tokio::test]
async fn a_load_sees_all_that_was_submitted_before_it_and_ends_at_its_bounds() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, options) = Disk::new();
    let store = open(dir.path(), &options);
    disk.stop(&store);
    for seq in 0..10 {
        append(&store, entry(Q, seq));
    }
    let cost = message(&text(0), None).cost();
    let loads = [(0, 3, usize::MAX), (4, 100, 2 * cost), (8, 100, 0), (9, 2, usize::MAX), (10, 1, 1)]
        .map(|(from, messages, bytes)| store.load(Q, from, messages, bytes));
    disk.go_on();
    let mut found = Vec::new();
    for load in loads {
        let loaded = load.await.unwrap();
        let seqs: Vec<_> = loaded.entries.iter().map(|entry| entry.seq).collect();
        found.push((seqs, loaded.next, loaded.end));
    }
    let expected = [
        (vec![0, 1, 2], 3, false),
        (vec![4, 5], 6, false),
        (vec![8], 9, false),
        (vec![9], 10, true),
        (vec![], 10, true),
    ];
    assert_eq!(found, expected);
}

static NOW: AtomicU64 = AtomicU64::new(1_700_000_000_000);

/// Tells the kill test's child where to write.
const CHILD: &str = "MQTT_SERVER_TEST_QUEUES_CHILD";
const WIDTH: u64 = 5;

/// Once a burst was drained its file counted as memory until the end of the process.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_burst_leaves_memory_after_it_is_drained() {
    let dir = tempfile::tempdir().unwrap();
    let unmap_interval = Duration::from_millis(50);
    let store = open(dir.path(), &StateOptions { unmap_interval, ..StateOptions::default() });
    for seq in 0..80 {
        append(&store, QueueEntry::new(Q, seq, message(&[1; 1 << 20], None), QoS::AtLeastOnce, None));
    }
    let path = dir.path().join("state/data.mdb");
    // Half of it, since after 64 MiB that were read the map is replaced. Pages read before a map that was too small was
    // replaced are read again.
    let stays = async {
        while mapped(&path) <= 32 << 20 {
            assert_eq!(store.load(Q, 0, 40, usize::MAX).await.unwrap().entries.len(), 40);
        }
    };
    tokio::time::timeout(Duration::from_secs(30), stays).await.expect("it was read");
    (0..80).for_each(|seq| remove(&store, Q, seq));
    written(&store).await;
    let leaves = async {
        while mapped(&path) > 8 << 20 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), leaves).await.expect("it stayed");
}
