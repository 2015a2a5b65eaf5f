//! The embedded log beyond what every log must do: damage, failures, restarts.

use std::path::Path;

use gateway_core::{ClientId, Message, Origin, OriginKind, QoS};

use super::*;
use crate::Slice;

const EVERYTHING: ReadLimit = ReadLimit { records: usize::MAX, bytes: usize::MAX };

fn open(dir: &Path, options: &LogOptions) -> EmbeddedLog {
    EmbeddedLog::open(&DataDir::open(dir).unwrap(), options).unwrap()
}

fn message(text: &str) -> Arc<SharedMessage> {
    let device = ClientId::new("device");
    let origin = Origin { kind: OriginKind::Device, client_id: Some(&device), slot: 0 };
    let mut message = Message::new("some/topic", text.as_bytes(), Timestamp(1_700_000_000_000), origin);
    message.qos = QoS::AtLeastOnce;
    Arc::clone(message.share())
}

fn groups(ids: &[u32]) -> Arc<[GroupId]> {
    ids.iter().map(|id| GroupId(*id)).collect()
}

/// Appends and waits until it is durable.
fn append(log: &EmbeddedLog, partition: u8, text: &str) {
    let commit = Commit::new();
    log.append(Partition(partition), &groups(&[1, 5]), &message(text), Some(commit.part())).unwrap();
    commit.done();
    wait(commit.wait()).unwrap();
}

fn wait<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

fn slice(log: &EmbeddedLog, partition: u8, from: u64, limit: ReadLimit) -> Slice {
    match log.read(Partition(partition), from, limit) {
        Reading::Now(slice) => slice,
        Reading::Later(slice) => wait(slice).unwrap(),
    }
}

fn texts(log: &EmbeddedLog, partition: u8) -> Vec<String> {
    let mut all = Vec::new();
    let mut from = 0;
    loop {
        let slice = slice(log, partition, from, EVERYTHING);
        let text = |payload: &[u8]| String::from_utf8(payload.to_vec()).unwrap();
        all.extend(slice.records.iter().map(|record| text(&record.message.payload)));
        if slice.next == from || from >= log.bounds(Partition(partition)).end {
            return all;
        }
        from = slice.next;
    }
}

#[test]
fn what_was_committed_is_there_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let options = LogOptions { segment_bytes: 4096, ..LogOptions::default() };
    let mut expected = vec![Vec::new(); 3];
    let mut id = None;
    for round in 0..4 {
        let log = open(dir.path(), &options);
        assert_eq!(*id.get_or_insert_with(|| log.id()), log.id());
        for n in 0..50 {
            let text = format!("message {n} of round {round}");
            append(&log, n % 3, &text);
            expected[usize::from(n % 3)].push(text);
        }
        for (partition, expected) in (0..3).zip(&expected) {
            assert_eq!(texts(&log, partition), *expected, "round {round}");
        }
        let marks = log.marks(GroupId(5));
        assert_eq!(marks.last().unwrap().messages, 50 * (round + 1));
        assert!(marks.len() > 2, "{marks:?}");
        assert_eq!(log.marks(GroupId(2)).last().unwrap().messages, 0);
    }
}

#[test]
fn the_suite() {
    let small = LogOptions { segment_bytes: 2048, ..LogOptions::default() };
    let uncached = LogOptions { cache_bytes: 0, ..small.clone() };
    for options in [LogOptions::default(), small, uncached] {
        let dir = tempfile::tempdir().unwrap();
        crate::suite_log::run(&open(dir.path(), &options), &|| ());
    }
}
