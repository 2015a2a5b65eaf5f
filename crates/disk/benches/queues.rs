//! Speed of the queues of sessions: `cargo bench -p disk --bench queues`.
#![expect(clippy::print_stdout, clippy::disallowed_methods, clippy::unwrap_used, reason = "a measurement")]

mod support;

use std::{collections::VecDeque, fs, sync::Arc, time::Instant};

use disk::{EmbeddedState, StateOptions};
use gateway_core::{
    ClientId, Commit, Journal as _, Message, Origin, OriginKind, QoS, QueueEntry, QueueId, QueueOp,
    SharedMessage, Timestamp,
};
use store::{DataDir, StateStore as _};
use support::Watch;

const QUEUES: u64 = 1000;
const MESSAGES: u64 = 1_000_000;

fn message(n: u64) -> Arc<SharedMessage> {
    let device = ClientId::new("publisher1");
    let origin = Origin { kind: OriginKind::Device, client_id: Some(&device), slot: 1 };
    let topic = format!("fleet/{:010}", n % QUEUES);
    let message = Message::new(&topic, &[b'x'; 256], Timestamp(1_700_000_000_000), origin);
    Arc::clone(message.share())
}

fn main() {
    let dir = tempfile::tempdir_in(".").unwrap();
    let store = EmbeddedState::open(&DataDir::open(dir.path()).unwrap(), &StateOptions::default()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    // Number of messages that a publisher may have unacknowledged.
    for window in [20_000, 1_000] {
        let messages: Vec<_> = (0..MESSAGES).map(message).collect();
        let commits = disk::counters::totals().store_commits;
        let watch = Watch::start();
        let mut open = VecDeque::new();
        for (n, message) in (0..MESSAGES).zip(messages) {
            let commit = Commit::new();
            let (queue, seq) = (QueueId(1 + n % QUEUES), n / QUEUES);
            let entry = QueueEntry::new(queue, seq, message, QoS::AtLeastOnce, Some(Arc::clone(&commit)));
            store.submit(QueueOp::Append(Arc::new(entry)));
            store.hurry();
            commit.done();
            open.push_back(commit);
            if open.len() >= window {
                while let Some(commit) = open.pop_front() {
                    runtime.block_on(commit.wait()).unwrap();
                    if open.len() < window / 2 {
                        break;
                    }
                }
            }
        }
        for commit in open {
            runtime.block_on(commit.wait()).unwrap();
        }
        watch.report(&format!("append, window {window}"), MESSAGES);
        let commits = disk::counters::totals().store_commits - commits;
        let bytes = fs::metadata(dir.path().join("queues/data.mdb")).unwrap().len();
        println!("  {commits} commits, {:.0} bytes on disk each", bytes as f64 / MESSAGES as f64);
        let began = Instant::now();
        assert_eq!(store.summaries().unwrap().len(), QUEUES as usize);
        println!("  summaries: {:?}", began.elapsed());
        let watch = Watch::start();
        runtime.block_on(async {
            let tasks: Vec<_> = (1..=QUEUES).map(|queue| drain(&store, QueueId(queue))).collect();
            let mut read = 0;
            let mut tasks = tasks.into_iter();
            // 64 devices at a time, each asks for more when it has acknowledged what it got.
            loop {
                let some: Vec<_> = tasks.by_ref().take(64).map(Box::pin).collect();
                if some.is_empty() {
                    break;
                }
                read += join(some).await;
            }
            assert_eq!(read, MESSAGES);
        });
        watch.report("drain", MESSAGES);
        let began = Instant::now();
        while store.gauges().depth > 0 {
            std::thread::yield_now();
        }
        println!("  all removed after {:?} more", began.elapsed());
    }
}

async fn drain(store: &EmbeddedState, queue: QueueId) -> u64 {
    let (mut from, mut read) = (0, 0);
    loop {
        let loaded = store.load(queue, from, 100, 1 << 20).await.unwrap();
        for entry in &loaded.entries {
            store.submit(QueueOp::Remove { queue, seq: entry.seq, unit: None });
        }
        read += loaded.entries.len() as u64;
        from = loaded.next;
        if loaded.end {
            return read;
        }
    }
}

async fn join<F: Future<Output = u64> + Unpin>(mut open: Vec<F>) -> u64 {
    let mut sum = 0;
    std::future::poll_fn(|cx| {
        open.retain_mut(|future| match std::pin::Pin::new(future).poll(cx) {
            std::task::Poll::Ready(read) => {
                sum += read;
                false
            }
            std::task::Poll::Pending => true,
        });
        if open.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    sum
}
