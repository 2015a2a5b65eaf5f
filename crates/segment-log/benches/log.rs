//! Cost of the log of consumer groups: `cargo bench -p segment-log --bench log`. With `LOG_GIB=20`, that of a log of 20 GiB, too: its
//! start, reads from the disk, and commits during a trim.
#![expect(clippy::print_stdout, clippy::disallowed_methods, clippy::unwrap_used, reason = "a measurement")]

#[path = "../../disk/benches/support/mod.rs"]
mod support;

use std::{
    collections::VecDeque,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use gateway_core::{
    ClientId, Commit, GroupId, Message, Origin, OriginKind, PARTITIONS, Partition, QoS, SharedMessage,
    Timestamp,
};
use segment_log::{EmbeddedLog, LogOptions};
use store::{DataDir, LogRead, PartitionedLog as _, ReadLimit};
use support::Watch;

const MESSAGES: u64 = 1_000_000;

fn message(n: u64) -> (Partition, Arc<SharedMessage>) {
    let device = ClientId::new(&format!("device-{:05}", n % 1000));
    let origin = Origin { kind: OriginKind::Device, client_id: Some(&device), slot: 1 };
    let topic = format!("fleet/{:010}", n % 1000);
    let mut message = Message::new(&topic, &[b'x'; 256], Timestamp(1_700_000_000_000 + n), origin);
    message.qos = QoS::AtLeastOnce;
    (Partition::of(Some(device.as_str()), &topic), Arc::clone(message.share()))
}

fn open(dir: &Path) -> EmbeddedLog {
    EmbeddedLog::open(&DataDir::open(dir).unwrap(), &LogOptions::default()).unwrap()
}

/// Appends `messages`, of which `window` may wait for the disk. `each` is called with every group that was written.
fn append(
    log: &EmbeddedLog,
    messages: &[(Partition, Arc<SharedMessage>)],
    window: usize,
    mut each: impl FnMut(),
) {
    let groups: Arc<[GroupId]> = Arc::from([GroupId(1)]);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let mut open = VecDeque::new();
    for some in messages.chunks((window / 2).max(1)) {
        let commit = Commit::new();
        for (partition, message) in some {
            log.append(*partition, &groups, message, Some(commit.part())).unwrap();
        }
        commit.done();
        open.push_back(commit);
        if open.len() == 2 {
            runtime.block_on(open.pop_front().unwrap().wait()).unwrap();
            each();
        }
    }
    for commit in open {
        runtime.block_on(commit.wait()).unwrap();
    }
    each();
}

/// Reads all that is new of every partition, and trims it.
fn consume(log: &EmbeddedLog, places: &mut [u64]) -> u64 {
    let limit = ReadLimit { records: 1000, bytes: usize::MAX };
    let mut read = 0;
    for partition in Partition::all() {
        let place = &mut places[usize::from(partition.0)];
        loop {
            let LogRead::Now(slice) = log.read(partition, *place, limit) else { panic!("not in memory") };
            *place = slice.next;
            if slice.records.is_empty() {
                break;
            }
            read += slice.records.len() as u64;
        }
        log.trim(partition, *place);
    }
    read
}

fn append_read_and_trim() {
    for window in [20_000, 2_000] {
        let dir = tempfile::tempdir_in(".").unwrap();
        let log = open(dir.path());
        let messages: Vec<_> = (0..MESSAGES).map(message).collect();
        let watch = Watch::start();
        append(&log, &messages, window, || ());
        watch.report(&format!("append, window {window}"), MESSAGES);
        drop(log);
        let dir = tempfile::tempdir_in(".").unwrap();
        let log = open(dir.path());
        let (mut places, mut read) = ([0; PARTITIONS], 0);
        let watch = Watch::start();
        append(&log, &messages, window, || read += consume(&log, &mut places));
        assert_eq!(read, MESSAGES);
        watch.report(&format!("append, read from memory, trim, window {window}"), MESSAGES);
    }
}

fn start_read_and_trim(gib: u64) {
    let dir = tempfile::tempdir_in(".").unwrap();
    let log = open(dir.path());
    let messages: Vec<_> = (0..200_000).map(message).collect();
    let (watch, mut appended) = (Watch::start(), 0);
    while log.bytes() < gib << 30 {
        append(&log, &messages, 40_000, || ());
        appended += messages.len() as u64;
    }
    watch.report(&format!("{gib} GiB appended"), appended);
    drop(log);
    let began = Instant::now();
    let log = open(dir.path());
    println!("start: {:?}, memory {:?}", began.elapsed(), log.memory());
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let (watch, mut read) = (Watch::start(), 0);
    for partition in Partition::all().take(16) {
        let (mut place, end) = (0, log.bounds(partition).end);
        while place < end {
            let limit = ReadLimit { records: 1000, bytes: usize::MAX };
            let slice = match log.read(partition, place, limit) {
                LogRead::Now(slice) => slice,
                LogRead::Later(slice) => runtime.block_on(slice).unwrap(),
            };
            place = slice.next;
            read += slice.records.len() as u64;
        }
    }
    watch.report("16 of 256 partitions read from the disk", read);
    for partition in Partition::all() {
        log.trim(partition, log.bounds(partition).end);
    }
    let (mut longest, mut commits) = (Duration::ZERO, 0);
    while log.bytes() > 256 << 20 {
        let began = Instant::now();
        append(&log, &messages[..100], 200, || ());
        longest = longest.max(began.elapsed());
        commits += 1;
    }
    println!("trimmed during {commits} commits, the longest took {longest:?}");
}

fn main() {
    append_read_and_trim();
    if let Some(gib) = std::env::var("LOG_GIB").ok().and_then(|text| text.parse().ok()) {
        start_read_and_trim(gib);
    }
}
