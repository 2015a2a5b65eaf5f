//! Records of stores for which much waits: each ends once it has enough, and never within a unit.

use std::sync::Arc;

use gateway_core::{
    Commit, Journal as _, Message, Origin, Partition, QoS, QueueEntry, QueueId, QueueOp, SharedMessage,
    Timestamp,
};
use ledger::{Cleaned, Position, RECORD_BYTES, Shipped, Shipping};
use parking_lot::{Mutex, RwLock};
use segment_log::{EmbeddedLog, LogOptions};
use store::{
    DataDir, PartitionedLog as _, RecordKind, RecordStore as _,
    suite::{log as log_suite, records::put},
};

use super::{EmbeddedRecords, EmbeddedState, RecordOptions, StateOptions};

/// Bytes of a message.
const MESSAGE: usize = 100 << 10;

/// A ledger that answers while nobody writes to `stopped`, and the records that it has.
#[derive(Default)]
struct Stoppable {
    stopped: RwLock<()>,
    records: Mutex<Vec<Vec<u8>>>,
}

impl Shipping for Stoppable {
    fn ship(&self, changes: &[u8], _cleaned: Cleaned) -> Shipped {
        self.records.lock().push(changes.to_vec());
        let _going = self.stopped.read();
        Shipped::Done(Position { epoch: 1, n: self.records.lock().len() as u64, sum: 1 })
    }

    fn wanted_repeats(&self, _alive: u64) -> usize {
        0
    }

    fn begin_at(&self, _epoch: u64, _n: u64) {}
}

impl Stoppable {
    /// Waits until a record is on its way: what comes from now on waits for it.
    fn is_busy(&self, before: usize) {
        while self.records.lock().len() == before {
            std::thread::yield_now();
        }
    }

    /// Sizes of the records from that one on.
    fn sizes(&self, from: usize) -> Vec<usize> {
        self.records.lock()[from..].iter().map(Vec::len).collect()
    }

    /// Records that hold this text, and how often each does.
    fn with(&self, text: &str) -> Vec<usize> {
        let found =
            |record: &Vec<u8>| record.windows(text.len()).filter(|part| *part == text.as_bytes()).count();
        self.records.lock().iter().map(found).filter(|times| *times > 0).collect()
    }
}

fn message(text: &str) -> Arc<SharedMessage> {
    let payload = format!("{text}{}", "x".repeat(MESSAGE));
    let mut message =
        Message::new("some/topic", payload.as_bytes(), Timestamp(1_700_000_000_000), Origin::BACKEND);
    message.qos = QoS::AtLeastOnce;
    Arc::clone(message.share())
}

fn append(store: &EmbeddedState, seq: u64, message: &Arc<SharedMessage>, commit: &Arc<Commit>) {
    let queue = QueueId(1 + seq);
    let entry = QueueEntry::new(queue, seq, Arc::clone(message), QoS::AtLeastOnce, Some(Arc::clone(commit)));
    store.submit(QueueOp::Append(Arc::new(entry)));
}

/// The failures: all that had waited for a ledger was one record; a record ended in the middle of a unit; the receivers of one message
/// counted as so many messages.
#[tokio::test]
async fn queues_fill_records_with_about_a_mebibyte_and_split_no_unit() {
    let (dir, stream) = (tempfile::tempdir().unwrap(), Arc::new(Stoppable::default()));
    let options = StateOptions { shipping: Some(Arc::clone(&stream) as _), ..StateOptions::default() };
    let store = EmbeddedState::open(&DataDir::open(dir.path()).unwrap(), &options).unwrap();
    let (commit, unit) = (Commit::new(), Commit::of_unit());

    let stop = stream.stopped.write();
    let before = stream.records.lock().len();
    append(&store, 0, &message("first"), &commit);
    store.hurry();
    stream.is_busy(before);
    for seq in 1..80 {
        let (text, commit) =
            if (30..50).contains(&seq) { ("of the unit", &unit) } else { ("alone", &commit) };
        append(&store, seq, &message(text), commit);
        if seq == 49 {
            store.submit(QueueOp::Receive { queue: QueueId(1), packet_id: 1, commit: unit.part() });
        }
    }
    store.hurry();
    drop(stop);
    for commit in [&commit, &unit] {
        commit.done();
        commit.wait().await.unwrap();
    }
    assert_eq!(stream.with("of the unit"), [20], "the unit is whole");
    let sizes = stream.sizes(before);
    let large: Vec<_> = sizes.iter().filter(|bytes| **bytes > RECORD_BYTES + MESSAGE + 10_000).collect();
    assert!(large.len() == 1 && *large[0] < RECORD_BYTES + 21 * MESSAGE, "{sizes:?}");
    assert!((6..12).contains(&sizes.len()), "{sizes:?}");

    let stop = stream.stopped.write();
    let before = stream.records.lock().len();
    let (commit, shared) = (Commit::new(), message("to many"));
    append(&store, 100, &message("next"), &commit);
    store.hurry();
    stream.is_busy(before);
    (0..500).for_each(|seq| append(&store, 200 + seq, &shared, &commit));
    store.hurry();
    drop(stop);
    commit.done();
    commit.wait().await.unwrap();
    assert_eq!(stream.sizes(before).len(), 2, "{:?}", stream.sizes(before));
}

/// The failure: all lanes together made records of several mebibytes.
#[tokio::test]
async fn small_records_fill_records_with_about_a_mebibyte() {
    let (dir, stream) = (tempfile::tempdir().unwrap(), Arc::new(Stoppable::default()));
    let mut options = RecordOptions::default();
    options.durable.shipping = Some(Arc::clone(&stream) as _);
    let store = EmbeddedRecords::open(&DataDir::open(dir.path()).unwrap(), &options).unwrap();
    let commit = Commit::new();
    let stop = stream.stopped.write();
    let before = stream.records.lock().len();
    for n in 0..60 {
        let kind = [RecordKind::Commands, RecordKind::Groups, RecordKind::Shadows][n % 3];
        store.submit(vec![put(kind, &format!("{n}\0x"), &"x".repeat(MESSAGE))], Some(commit.part()));
        if n == 0 {
            stream.is_busy(before);
        }
    }
    drop(stop);
    commit.done();
    commit.wait().await.unwrap();
    let sizes = stream.sizes(before);
    assert!(sizes.iter().all(|bytes| *bytes <= RECORD_BYTES + MESSAGE), "{sizes:?}");
    assert!((7..15).contains(&sizes.len()), "{sizes:?}");
}

/// The failure: a batch of the log was a record of eight mebibytes.
#[tokio::test]
async fn the_log_fills_records_with_about_a_mebibyte() {
    let (dir, stream) = (tempfile::tempdir().unwrap(), Arc::new(Stoppable::default()));
    let options = LogOptions { shipping: Some(Arc::clone(&stream) as _), ..LogOptions::default() };
    let log = EmbeddedLog::open(&DataDir::open(dir.path()).unwrap(), &options).unwrap();
    let commit = Commit::new();
    let stop = stream.stopped.write();
    let before = stream.records.lock().len();
    for n in 0..60 {
        log.append(Partition(n), &log_suite::groups(&[1]), &message("logged"), Some(commit.part())).unwrap();
        if n == 0 {
            stream.is_busy(before);
        }
    }
    drop(stop);
    commit.done();
    commit.wait().await.unwrap();
    let sizes = stream.sizes(before);
    assert!(sizes.iter().all(|bytes| *bytes <= RECORD_BYTES + 10_000), "{sizes:?}");
    assert!((7..12).contains(&sizes.len()), "{sizes:?}");
}
