//! Every operation of durable queues, their order, failures, damage and kills.

use std::{
    io::{self, BufRead, BufReader, Write},
    path::Path,
    process::{Command, Stdio},
    sync::{
        atomic::{AtomicBool, AtomicU32, Ordering::SeqCst},
        mpsc,
    },
    task::Wake,
};

use parking_lot::Condvar;
use tempfile::TempDir;

use super::*;
use crate::{
    store::StoredEntry,
    types::{Entry, Message, Origin, QoS, SharedMessage, Ticket},
};

const Q: QueueId = QueueId(7);
const OTHER: QueueId = QueueId(8);

pub(super) fn open(dir: &Path, options: &QueueOptions) -> EmbeddedQueues {
    EmbeddedQueues::open(&DataDir::open(dir).unwrap(), options).unwrap()
}

fn new() -> (TempDir, EmbeddedQueues) {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), &QueueOptions::default());
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

fn entry(queue: QueueId, seq: u64) -> Entry {
    Entry::new(queue, seq, message(&text(seq), None), QoS::AtLeastOnce, None)
}

fn append(store: &EmbeddedQueues, entry: Entry) -> Arc<Entry> {
    let entry = Arc::new(entry);
    store.submit(QueueOp::Append(Arc::clone(&entry)));
    if entry.ticket.as_ref().is_some_and(|ticket| !ticket.is_unit()) {
        store.hurry();
    }
    entry
}

fn remove(store: &EmbeddedQueues, queue: QueueId, seq: u64) {
    store.submit(QueueOp::Remove { queue, seq, unit: None });
}

/// In several reads on a slow machine: one lasts 50 ms at most.
async fn all(store: &EmbeddedQueues, queue: QueueId) -> Vec<StoredEntry> {
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

async fn seqs(store: &EmbeddedQueues, queue: QueueId) -> Vec<u64> {
    all(store, queue).await.iter().map(|entry| entry.seq).collect()
}

/// Waits until the store has written all before this call.
async fn written(store: &EmbeddedQueues) {
    let ticket = Ticket::new();
    store.submit(QueueOp::Forget { queue: QueueId(1 << 30), packet_id: 1, ticket: Arc::clone(&ticket) });
    ticket.wait().await.unwrap();
}

fn bodies(store: &EmbeddedQueues) -> (u64, u64) {
    let tables = store.tables;
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
    fn new() -> (Arc<Self>, QueueOptions) {
        let disk = Arc::new(Self::default());
        let commits = Arc::clone(&disk);
        let hook: CommitHook = Arc::new(move || commits.commit());
        (disk, QueueOptions { hook: Some(hook), ..QueueOptions::default() })
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
    fn stop(&self, store: &EmbeddedQueues) {
        *self.stopped.lock() = true;
        let commits = self.commits.load(SeqCst);
        let ticket = Ticket::new();
        store.submit(QueueOp::Forget { queue: QueueId(1 << 30), packet_id: 2, ticket });
        while self.commits.load(SeqCst) == commits {
            std::thread::yield_now();
        }
    }

    fn go_on(&self) {
        *self.stopped.lock() = false;
        self.changed.notify_all();
    }
}

fn ticketed(queue: QueueId, seq: u64, ticket: &Arc<Ticket>) -> Entry {
    Entry::new(queue, seq, message(&text(seq), None), QoS::AtLeastOnce, Some(Arc::clone(ticket)))
}

/// Drops a store in the thread that wakes it, and says so.
struct Last(Mutex<Option<Arc<EmbeddedQueues>>>, mpsc::SyncSender<()>);

impl Wake for Last {
    fn wake(self: Arc<Self>) {
        let store = self.0.lock().take();
        drop(store);
        self.1.send(()).unwrap();
    }
}

/// Whoever waits for the disk may be the last to have the store.
#[test]
fn a_store_that_ends_in_its_own_writer_thread_does_not_wait_for_itself() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, options) = Disk::new();
    let store = Arc::new(open(dir.path(), &options));
    let environment = Arc::downgrade(&store.environment);
    disk.stop(&store);
    let ticket = Ticket::new();
    append(&store, ticketed(Q, 0, &ticket));
    ticket.done();
    let (sender, ended) = mpsc::sync_channel(1);
    let last = Arc::new(Last(Mutex::new(Some(Arc::clone(&store))), sender));
    assert!(ticket.poll(&last.into()).is_none());
    drop(store);
    disk.go_on();
    ended.recv().expect("the thread goes on");
    while environment.strong_count() > 0 {
        std::thread::yield_now();
    }
    let store = open(dir.path(), &QueueOptions::default());
    assert_eq!(store.summaries().unwrap()[0].messages, 1);
}

#[tokio::test]
async fn entries_come_back_whole_and_in_order_after_a_reopen() {
    let (dir, store) = new();
    let mut full = entry(Q, 3);
    full.retain = true;
    full.sent = true;
    full.group = QueueId(99);
    full.ids = Some([5, 700].into());
    append(&store, full);
    for seq in [4, 5, 9] {
        append(&store, entry(Q, seq));
    }
    append(&store, entry(OTHER, 0));
    assert_eq!(seqs(&store, Q).await, [3, 4, 5, 9]);
    drop(store);
    let store = open(dir.path(), &QueueOptions::default());
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
    let ticket = Ticket::new();
    for seq in 0..4 {
        append(&store, ticketed(Q, seq, &ticket));
    }
    remove(&store, Q, 1);
    store.submit(QueueOp::Release { queue: Q, seq: 2, ticket: Ticket::new() });
    store.submit(QueueOp::Release { queue: Q, seq: 3, ticket: Ticket::new() });
    remove(&store, Q, 3);
    disk.go_on();
    ticket.done();
    ticket.wait().await.unwrap();
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
        append(&store, Entry::new(QueueId(queue), 0, Arc::clone(&shared), QoS::AtLeastOnce, None));
    }
    remove(&store, QueueId(4), 0);
    disk.go_on();
    written(&store).await;
    assert_eq!(bodies(&store), (1, 1));
    remove(&store, QueueId(1), 0);
    store.submit(QueueOp::Release { queue: QueueId(2), seq: 0, ticket: Ticket::new() });
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
    store.submit(QueueOp::Receive { queue: Q, packet_id: 9, ticket: Ticket::new() });
    store.submit(QueueOp::Receive { queue: OTHER, packet_id: 9, ticket: Ticket::new() });
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
        append(&store, Entry::new(Q, seq, Arc::clone(&shared), QoS::AtLeastOnce, None));
        append(&store, Entry::new(OTHER, seq, Arc::clone(&shared), QoS::AtLeastOnce, None));
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
async fn a_released_entry_keeps_its_place_even_if_its_message_was_gone() {
    let (dir, store) = new();
    append(&store, entry(Q, 1));
    for seq in [1, 2] {
        let ticket = Ticket::new();
        ticket.add();
        store.submit(QueueOp::Release { queue: Q, seq, ticket: Arc::clone(&ticket) });
        ticket.done();
        ticket.wait().await.unwrap();
    }
    drop(store);
    let store = open(dir.path(), &QueueOptions::default());
    let found = all(&store, Q).await;
    assert_eq!(
        found.iter().map(|e| (e.seq, e.message.is_some())).collect::<Vec<_>>(),
        [(1, false), (2, false)]
    );
    assert_eq!(bodies(&store), (0, 0));
}

#[tokio::test]
async fn summaries_tell_what_the_start_needs_after_a_drop_that_wrote_all() {
    let (dir, store) = new();
    for seq in 5..8 {
        append(&store, entry(Q, seq));
    }
    store.submit(QueueOp::Receive { queue: QueueId(2), packet_id: 700, ticket: Ticket::new() });
    store.submit(QueueOp::Receive { queue: Q, packet_id: 1, ticket: Ticket::new() });
    store.submit(QueueOp::Receive { queue: Q, packet_id: 2, ticket: Ticket::new() });
    store.submit(QueueOp::Forget { queue: Q, packet_id: 1, ticket: Ticket::new() });
    drop(store);
    let store = open(dir.path(), &QueueOptions::default());
    let bytes = 3 * message(&text(5), None).cost() as u64;
    let expected = [
        QueueSummary { queue: QueueId(2), received: vec![700], ..QueueSummary::default() },
        QueueSummary { queue: Q, messages: 3, bytes, first: 5, next: 8, exact: 0, received: vec![2] },
    ];
    assert_eq!(store.summaries().unwrap(), expected);
    assert_eq!(store.gauges(), QueueGauges { waiting_bytes: 0, depth: 3 });
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

#[tokio::test]
async fn a_unit_is_written_with_its_last_operation_or_not_at_all() {
    for fails in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let (disk, options) = Disk::new();
        let store = open(dir.path(), &options);
        disk.stop(&store);
        let (before, unit, behind) = (Ticket::new(), Ticket::unit(), Ticket::new());
        append(&store, ticketed(OTHER, 0, &before));
        append(&store, ticketed(Q, 0, &unit));
        append(&store, ticketed(OTHER, 1, &behind));
        disk.go_on();
        before.done();
        before.wait().await.unwrap();
        assert_eq!(store.summaries().unwrap().iter().map(|s| s.messages).sum::<usize>(), 1);
        disk.fails.store(fails, SeqCst);
        append(&store, ticketed(Q, 1, &unit));
        unit.add();
        store.submit(QueueOp::Receive { queue: QueueId(1), packet_id: 5, ticket: Arc::clone(&unit) });
        unit.done();
        behind.done();
        assert_eq!((unit.wait().await.is_err(), behind.wait().await.is_err()), (fails, fails));
        disk.fails.store(false, SeqCst);
        let queues: Vec<_> = store.summaries().unwrap();
        let received = queues.iter().map(|s| s.received.len()).sum::<usize>();
        let messages = queues.iter().map(|s| s.messages).sum::<usize>();
        assert_eq!((messages, received), if fails { (1, 0) } else { (4, 1) });
    }
}

#[tokio::test]
async fn a_failed_commit_refuses_what_is_new_keeps_the_rest_and_recovers() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, options) = Disk::new();
    let store = open(dir.path(), &options);
    for seq in 0..4 {
        append(&store, entry(Q, seq));
    }
    written(&store).await;
    disk.stop(&store);
    disk.fails.store(true, SeqCst);
    let (new, moved, release) = (Ticket::new(), Ticket::unit(), Ticket::new());
    append(&store, ticketed(Q, 4, &new));
    remove(&store, Q, 0);
    append(&store, ticketed(OTHER, 0, &moved));
    moved.add();
    store.submit(QueueOp::Remove { queue: Q, seq: 1, unit: Some(Arc::clone(&moved)) });
    release.add();
    store.submit(QueueOp::Release { queue: Q, seq: 2, ticket: Arc::clone(&release) });
    disk.go_on();
    for ticket in [&new, &moved] {
        ticket.done();
        assert!(ticket.wait().await.is_err());
    }
    assert_eq!(store.health(), StoreHealth::Failing);
    let probes = (0..1000).filter(|_| store.accepts()).count();
    assert!(probes <= 2, "{probes} publishes were let through");
    // Another queue can be read though the disk takes nothing.
    assert!(seqs(&store, OTHER).await.is_empty());
    disk.fails.store(false, SeqCst);
    release.done();
    release.wait().await.unwrap();
    assert_eq!(store.health(), StoreHealth::Sound);
    assert!(store.accepts());
    assert_eq!(seqs(&store, Q).await, [1, 2, 3]);
    assert_eq!(store.gauges().waiting_bytes, 0);
}

#[tokio::test]
async fn a_full_map_refuses_and_harms_nothing_that_was_there() {
    let dir = tempfile::tempdir().unwrap();
    let options = QueueOptions { map_size: 1 << 20, max_map_size: 2 << 20, ..QueueOptions::default() };
    let store = open(dir.path(), &options);
    let large = message(&[7; 1000], None);
    let mut kept = 0;
    loop {
        let ticket = Ticket::new();
        append(&store, Entry::new(Q, kept, Arc::clone(&large), QoS::AtLeastOnce, Some(Arc::clone(&ticket))));
        ticket.done();
        match ticket.wait().await {
            Ok(()) => kept += 1,
            Err(_) => break,
        }
    }
    assert!(kept > 500, "{kept}");
    assert_eq!(store.health(), StoreHealth::Failing);
    assert_eq!(seqs(&store, Q).await.len() as u64, kept);
    // A device takes all that waits; nothing is started anew.
    for seq in 0..kept {
        remove(&store, Q, seq);
        if seq % 50 == 0 {
            written(&store).await;
        }
    }
    while store.gauges().depth > 0 {
        // A removal that found no room is tried again.
        let ticket = Ticket::new();
        store.submit(QueueOp::Forget { queue: QueueId(1 << 30), packet_id: 1, ticket: Arc::clone(&ticket) });
        let _ = ticket.wait().await;
    }
    for seq in kept..kept + 500 {
        let ticket = Ticket::new();
        append(&store, Entry::new(Q, seq, Arc::clone(&large), QoS::AtLeastOnce, Some(Arc::clone(&ticket))));
        ticket.done();
        ticket.wait().await.unwrap();
    }
    assert_eq!(store.health(), StoreHealth::Sound);
    assert_eq!(seqs(&store, Q).await.len(), 500);
}

#[tokio::test]
async fn a_full_disk_is_left_by_removals_alone() {
    let dir = tempfile::tempdir().unwrap();
    let full = Arc::new(AtomicBool::new(false));
    let (disk, reserve) = (Arc::clone(&full), dir.path().join("queues/reserve"));
    let kept_room = reserve.clone();
    // Commits succeed as long as the reserve's room is free for them.
    let hook = move || match disk.load(SeqCst) && kept_room.exists() {
        true => Err(io::ErrorKind::StorageFull.into()),
        false => Ok(()),
    };
    let store = open(dir.path(), &QueueOptions { hook: Some(Arc::new(hook)), ..QueueOptions::default() });
    for seq in 0..10 {
        append(&store, entry(Q, seq));
    }
    written(&store).await;
    assert!(reserve.exists());
    full.store(true, SeqCst);
    let ticket = Ticket::new();
    append(&store, ticketed(Q, 10, &ticket));
    ticket.done();
    assert!(ticket.wait().await.is_err());
    assert!(!reserve.exists());
    // Nothing can be made where the reserve was: the disk has no room for it.
    std::fs::create_dir(&reserve).unwrap();
    full.store(false, SeqCst);
    for seq in 0..10 {
        remove(&store, Q, seq);
    }
    written(&store).await;
    assert_eq!(store.gauges().depth, 0);
    assert_eq!(store.health(), StoreHealth::Failing, "a removal does not make room for more");
    let ticket = Ticket::new();
    append(&store, ticketed(Q, 11, &ticket));
    ticket.done();
    assert!(ticket.wait().await.is_err(), "added what only removals have room for");
    std::fs::remove_dir(&reserve).unwrap();
    while store.health() == StoreHealth::Failing {
        std::thread::yield_now();
        let _ = tokio::task::yield_now().await;
        let ticket = Ticket::new();
        append(&store, ticketed(Q, 12, &ticket));
        ticket.done();
        let _ = ticket.wait().await;
    }
    assert!(reserve.exists());
}

#[tokio::test]
async fn a_disk_that_stands_still_costs_no_memory_for_what_is_acknowledged() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, options) = Disk::new();
    let options = QueueOptions { max_waiting_bytes: 1 << 20, ..options };
    let store = open(dir.path(), &options);
    disk.stop(&store);
    let ticket = Ticket::new();
    for seq in 0..200_000 {
        let one = append(&store, ticketed(Q, seq, &ticket));
        assert!(one.settle());
        assert!(store.accepts());
    }
    for seq in 200_000..220_000 {
        append(&store, entry(Q, seq));
    }
    assert!(!store.accepts());
    disk.go_on();
    written(&store).await;
    assert_eq!(store.gauges(), QueueGauges { waiting_bytes: 0, depth: 20_000 });
    ticket.done();
    assert_eq!(ticket.result(), Some(Ok(())));
}

/// Of earlier processes at most the first `begun` entries were in flight.
#[tokio::test]
async fn the_start_knows_up_to_where_qos_2_may_have_been_sent() {
    let dir = tempfile::tempdir().unwrap();
    let options = QueueOptions { begun: 3, ..QueueOptions::default() };
    let store = open(dir.path(), &options);
    for (queue, qos) in [(1, [1, 2, 1, 2]), (2, [1, 1, 1, 2]), (3, [2, 2, 2, 2])] {
        for (seq, qos) in (10..).zip(qos) {
            let qos = QoS::from_bits(qos).unwrap();
            append(&store, Entry::new(QueueId(queue), seq, message(b"x", None), qos, None));
        }
    }
    written(&store).await;
    let exact: Vec<u64> = store.summaries().unwrap().iter().map(|summary| summary.exact).collect();
    assert_eq!(exact, [12, 0, 13]);
}

static NOW: AtomicU64 = AtomicU64::new(1_700_000_000_000);

/// A receiver that has begun with some places.
#[derive(Default)]
struct Receiver {
    begun: Vec<u64>,
    told: Mutex<Vec<(QueueId, usize, u64)>>,
}

impl Expiry for Receiver {
    fn keeps(&self, _queue: QueueId, seq: u64, _qos: QoS) -> bool {
        self.begun.contains(&seq)
    }
    fn expired(&self, queue: QueueId, messages: usize, bytes: u64) {
        self.told.lock().push((queue, messages, bytes));
    }
}

#[tokio::test]
async fn expired_messages_go_and_their_queue_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let options = QueueOptions { clock: || Timestamp(NOW.load(SeqCst)), ..QueueOptions::default() };
    let store = open(dir.path(), &options);
    let receiver = Arc::new(Receiver::default());
    store.begin_expiry(Arc::clone(&receiver) as _);
    let at = |seq, seconds: u64| {
        let message = message(b"x", Some(1_700_000_000_000 + seconds * 1000));
        Entry::new(Q, seq, message, QoS::AtLeastOnce, None)
    };
    append(&store, at(0, 5));
    append(&store, at(1, 500));
    append(&store, at(2, 6));
    let mut sent = at(3, 5);
    sent.sent = true;
    append(&store, sent);
    append(&store, at(4, 5));
    remove(&store, Q, 4);
    append(&store, entry(Q, 5));
    written(&store).await;
    NOW.fetch_add(4_999, SeqCst);
    written(&store).await;
    assert_eq!(seqs(&store, Q).await, [0, 1, 2, 3, 5]);
    NOW.fetch_add(2_000, SeqCst);
    written(&store).await;
    assert_eq!(seqs(&store, Q).await, [1, 3, 5]);
    assert_eq!(*receiver.told.lock(), [(Q, 2, 2 * message(b"x", None).cost() as u64)]);
    assert_eq!(bodies(&store), (3, 0));
}

/// What a session may have sent is left to it and read back as expired. What has time left is read back as it was
/// published. Before anybody can say what was sent, nothing goes.
#[tokio::test]
async fn an_entry_may_expire_before_its_message_and_goes_unless_it_may_have_been_sent() {
    static NOW: AtomicU64 = AtomicU64::new(1_700_000_000_000);
    let dir = tempfile::tempdir().unwrap();
    let options = QueueOptions { clock: || Timestamp(NOW.load(SeqCst)), ..QueueOptions::default() };
    let store = open(dir.path(), &options);
    let body = message(b"x", Some(1_700_000_500_000));
    for seq in 0..4 {
        let qos = if seq == 0 { QoS::AtLeastOnce } else { QoS::ExactlyOnce };
        let mut entry = Entry::new(Q, seq, Arc::clone(&body), qos, None);
        if seq != 2 {
            entry.expires = Some(Timestamp(1_700_000_005_000));
        }
        append(&store, entry);
    }
    written(&store).await;
    let read = async || {
        let loaded = store.load(Q, 0, 10, 1 << 20).await.unwrap();
        let expires = |message: &Arc<SharedMessage>| message.expires.map(|at| at.0);
        let seen = |entry: &StoredEntry| (entry.seq, entry.message.as_ref().and_then(expires));
        loaded.entries.iter().map(seen).collect::<Vec<_>>()
    };
    let whole = Some(1_700_000_500_000);
    assert_eq!(read().await, [(0, whole), (1, whole), (2, whole), (3, whole)]);
    NOW.fetch_add(6_000, SeqCst);
    written(&store).await;
    assert_eq!(read().await, [(0, Some(0)), (1, Some(0)), (2, whole), (3, Some(0))]);
    store.begin_expiry(Arc::new(Receiver { begun: vec![1], ..Receiver::default() }));
    NOW.fetch_add(1_000, SeqCst);
    written(&store).await;
    assert_eq!(read().await, [(1, Some(0)), (2, whole)]);
    remove(&store, Q, 1);
    remove(&store, Q, 2);
    written(&store).await;
    assert_eq!(bodies(&store), (0, 0));
    assert!(store.environment.reading(|txn| store.tables.expiry.is_empty(txn)).unwrap());
}

#[tokio::test]
async fn a_damaged_record_is_skipped_counted_and_removed() {
    let (_dir, store) = new();
    for seq in 0..4 {
        append(&store, entry(Q, seq));
    }
    written(&store).await;
    let tables = store.tables;
    let damage = |txn: &mut heed::RwTxn<'_>| {
        let (key, record) = tables.bodies.first(txn)?.unwrap();
        let (key, mut record) = (key.to_vec(), record.to_vec());
        record[20] ^= 1;
        tables.bodies.put(txn, &key, &record)?;
        tables.entries.put(txn, &tables::entry_key(Q, 2).unwrap(), b"bad")
    };
    store.environment.writing(damage).unwrap();
    let counted = || crate::telemetry::totals().store_damaged_records;
    let before = counted();
    let loaded = store.load(Q, 0, usize::MAX, usize::MAX).await.unwrap();
    assert_eq!(loaded.damaged, 2, "told to whoever knows the session's name");
    assert_eq!(loaded.entries.iter().map(|entry| entry.seq).collect::<Vec<_>>(), [1, 3]);
    // At least: other tests count in the same process.
    assert!(counted() >= before + 2);
    written(&store).await;
    assert_eq!(store.summaries().unwrap()[0].messages, 2);
}

#[test]
fn a_newer_format_is_refused_and_left_as_it_is() {
    let (dir, store) = new();
    store.environment.writing(|txn| store.environment.set_format(txn, 2)).unwrap();
    drop(store);
    let file = dir.path().join("queues/data.mdb");
    let before = std::fs::read(&file).unwrap();
    let data = DataDir::open(dir.path()).unwrap();
    let error = EmbeddedQueues::open(&data, &QueueOptions::default()).err().unwrap();
    assert!(matches!(&error, StoreError::Format(text) if text.contains("format 2")), "{error}");
    assert!(before == std::fs::read(&file).unwrap());
}

#[test]
fn a_damaged_store_is_set_aside_and_says_so() {
    let (dir, store) = new();
    assert_eq!(store.set_aside(), None);
    drop(store);
    std::fs::write(dir.path().join("queues/data.mdb"), [0x5A; 8192]).unwrap();
    let store = open(dir.path(), &QueueOptions::default());
    let aside = store.set_aside().unwrap();
    assert!(aside.exists() && aside.to_string_lossy().contains("data.mdb.damaged-1"), "{aside:?}");
}

#[tokio::test]
async fn what_a_groups_member_did_not_acknowledge_goes_back_to_the_group_in_order() {
    let (dir, store) = new();
    let group = QueueId(50);
    append(&store, entry(group, 10));
    for (queue, seq, qos) in [(Q, 0, 1), (OTHER, 5, 1), (Q, 1, 2), (Q, 2, 1), (OTHER, 6, 0)] {
        let mut entry = Entry::new(queue, seq, message(&text(seq), None), QoS::AtLeastOnce, None);
        entry.group = if qos == 0 { QueueId::NONE } else { group };
        entry.qos = if qos == 2 { QoS::ExactlyOnce } else { QoS::AtLeastOnce };
        entry.ids = Some([1].into());
        append(&store, entry);
    }
    drop(store);
    let store = open(dir.path(), &QueueOptions::default());
    assert_eq!(store.regroup().unwrap(), 3);
    assert_eq!(seqs(&store, Q).await, [1]);
    assert_eq!(seqs(&store, OTHER).await, [6]);
    let found = all(&store, group).await;
    let payloads: Vec<_> = found.iter().map(|e| e.message.as_ref().unwrap().payload.to_vec()).collect();
    assert_eq!(payloads, [text(10), text(0), text(5), text(2)]);
    assert_eq!(found.iter().map(|e| e.seq).collect::<Vec<_>>(), [10, 11, 12, 13]);
    assert!(found.iter().all(|e| e.group == QueueId::NONE && !e.sent));
    assert_eq!(store.regroup().unwrap(), 0);
}

/// Tells the kill test's child where to write.
const CHILD: &str = "MQTT_SERVER_TEST_QUEUES_CHILD";
const WIDTH: u64 = 5;

/// Not a test by itself: the process that `acknowledged_entries_survive_kill_9` kills.
#[tokio::test]
async fn child_that_appends_until_killed() {
    let Ok(path) = std::env::var(CHILD) else { return };
    let store = open(Path::new(&path), &QueueOptions::default());
    let summaries = store.summaries().unwrap();
    let start = summaries.iter().filter(|s| s.queue.0 < WIDTH).map(|s| s.next).min().unwrap_or(0);
    let mut out = io::stdout();
    for seq in start.. {
        let ticket = Ticket::new();
        for queue in 1..=WIDTH {
            append(&store, ticketed(QueueId(queue), seq, &ticket));
        }
        if seq % 3 == 0 {
            remove(&store, QueueId(WIDTH), seq);
        }
        ticket.done();
        ticket.wait().await.unwrap();
        writeln!(out, "\nacked {seq}").unwrap();
        out.flush().unwrap();
    }
}

#[tokio::test]
async fn acknowledged_entries_survive_kill_9() {
    let dir = tempfile::tempdir().unwrap();
    let mut acked = 0;
    for _ in 0..3 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "store::embedded::queues::tests::child_that_appends_until_killed",
                "--nocapture",
            ])
            .env(CHILD, dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let number = |line: String| line.strip_prefix("acked ").and_then(|n| n.parse::<u64>().ok());
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let reached = lines.by_ref().filter_map(number).find(|&n| n >= acked + 40);
        child.kill().unwrap();
        child.wait().unwrap();
        acked = lines.filter_map(number).last().or(reached).unwrap();
        let store = open(dir.path(), &QueueOptions::default());
        for queue in 1..WIDTH {
            let found = all(&store, QueueId(queue)).await;
            assert!(found.len() as u64 > acked, "queue {queue} has {} of {acked}", found.len());
            for (seq, entry) in (0..).zip(found) {
                assert_eq!(entry.seq, seq);
                assert_eq!(entry.message.unwrap().payload, text(seq));
            }
        }
    }
}
