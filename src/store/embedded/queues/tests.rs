//! Every operation of durable queues, their order, failures, damage and kills.

use std::{
    io::{self, BufRead, BufReader, Write},
    path::Path,
    process::{Command, Stdio},
    sync::atomic::AtomicBool,
};

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
    entry
}

fn remove(store: &EmbeddedQueues, queue: QueueId, seq: u64) {
    store.submit(QueueOp::Remove { queue, seq, unit: None });
}

async fn all(store: &EmbeddedQueues, queue: QueueId) -> Vec<StoredEntry> {
    let loaded = store.load(queue, 0, usize::MAX, usize::MAX).await.unwrap();
    assert!(loaded.end);
    loaded.entries
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
