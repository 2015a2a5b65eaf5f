//! All parts in one transaction.

use std::{
    io,
    path::Path,
    sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst},
};

use gateway_core::{CommitRefused, QoS, QueueEntry};
use parking_lot::{Condvar, Mutex};
use proptest::prelude::*;

use super::*;
use store::{
    MemoryState, StoredSession, StoredSubscription,
    suite::state::{self, message, subscription},
};

const PUBLISHER: QueueId = QueueId(1);
const SUBSCRIBER: QueueId = QueueId(2);

fn open(dir: &Path, options: &StateOptions) -> EmbeddedState {
    EmbeddedState::open(&DataDir::open(dir).unwrap(), options).unwrap()
}

fn session(queue: QueueId, since: Option<u64>) -> Box<StoredSession> {
    let client_id = format!("client-{}", queue.0);
    Box::new(StoredSession { since: since.map(Timestamp), ..state::session(queue, &client_id) })
}

fn append(
    store: &dyn StateStore,
    queue: QueueId,
    seq: u64,
    message: &Arc<SharedMessage>,
    unit: &Arc<Commit>,
) -> Arc<QueueEntry> {
    let entry = QueueEntry::new(queue, seq, Arc::clone(message), QoS::ExactlyOnce, Some(Arc::clone(unit)));
    let entry = Arc::new(entry);
    store.submit(QueueOp::Append(Arc::clone(&entry)));
    entry
}

fn receive(store: &dyn StateStore, packet_id: u16, unit: &Arc<Commit>) {
    store.submit(QueueOp::Receive { queue: PUBLISHER, packet_id, commit: unit.part() });
}

/// Content of the disk.
#[derive(Debug, Default, PartialEq)]
struct Contents {
    sessions: Vec<String>,
    groups: Vec<(QueueId, String)>,
    queues: Vec<QueueSummary>,
    entries: Vec<(QueueId, u64, bool, Option<Vec<u8>>)>,
    retained: Vec<(String, Vec<u8>)>,
}

impl Restore for Contents {
    fn session(&mut self, session: StoredSession, mut subscriptions: Vec<StoredSubscription>) {
        subscriptions.sort_by(|a, b| a.filter.cmp(&b.filter));
        self.sessions.push(format!("{session:?} {subscriptions:?}"));
    }

    fn group(&mut self, queue: QueueId, full_name: &str) {
        self.groups.push((queue, full_name.to_owned()));
    }
}

async fn contents(store: &EmbeddedState) -> Contents {
    contents_of(store, || ()).await
}

/// Reads are answered after `commit`.
async fn contents_of(store: &dyn StateStore, commit: impl Fn()) -> Contents {
    let mut found = Contents::default();
    store.restore_sessions(&mut found).unwrap();
    found.queues = store.summaries().unwrap();
    for queue in found.queues.iter().map(|summary| summary.queue) {
        let loaded = store.load(queue, 0, usize::MAX, usize::MAX);
        commit();
        let loaded = loaded.await.unwrap();
        found.entries.extend(loaded.entries.into_iter().map(|entry| {
            let payload = entry.message.map(|message| message.payload.to_vec());
            (queue, entry.seq, entry.sent, payload)
        }));
    }
    let retained = &mut found.retained;
    let mut take = |message: Arc<SharedMessage>| {
        retained.push((message.topic.to_string(), message.payload.to_vec()));
    };
    store.restore_retained(&mut take).unwrap();
    found
}

/// Stands in for the disk: stops or fails commits.
#[derive(Default)]
struct Disk {
    stopped: Mutex<bool>,
    changed: Condvar,
    fails: AtomicBool,
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
        self.changed.wait_while(&mut self.stopped.lock(), |stopped| *stopped);
        if self.fails.load(SeqCst) { Err(io::Error::other("a test says so")) } else { Ok(()) }
    }

    /// From now on commits wait for [`Self::go_on`]. One has begun when this returns.
    fn stop(&self, store: &EmbeddedState) {
        *self.stopped.lock() = true;
        let begun = self.commits.load(SeqCst);
        store.clear_retained(Arc::from("nothing"), None);
        store.hurry();
        while self.commits.load(SeqCst) == begun {
            std::thread::yield_now();
        }
    }

    fn go_on(&self) {
        *self.stopped.lock() = false;
        self.changed.notify_all();
    }
}

#[tokio::test]
async fn passes_the_suite() {
    async fn on_new(test: impl AsyncFn(&dyn StateStore)) {
        let dir = tempfile::tempdir().unwrap();
        test(&open(dir.path(), &StateOptions { map_size: 1 << 20, ..StateOptions::default() })).await;
    }
    on_new(state::sessions_and_groups).await;
    on_new(state::queues).await;
    on_new(state::retained_messages).await;
    on_new(state::units).await;
}

/// Entry, packet identifier and retained message came with one PUBLISH: after a crash a repeated one is known with all of it there, or
/// new with none of it.
#[tokio::test]
async fn a_retained_qos_2_message_for_a_session_is_one_transaction() {
    for fails in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let (disk, options) = Disk::new();
        let store = open(dir.path(), &options);
        let (unit, message) = (Commit::of_unit(), message("t", "new"));
        store.set_retained(Arc::clone(&message), Some(unit.part()));
        append(&store, SUBSCRIBER, 0, &message, &unit);
        // Another commit writes none of it while the unit is open.
        let other = Commit::new();
        store.submit_session(SessionOp::Put(session(SUBSCRIBER, None), Some(other.part())));
        other.done();
        other.wait().await.unwrap();
        let found = contents(&store).await;
        assert_eq!((found.retained.len(), found.entries.len(), found.sessions.len()), (0, 0, 1));
        let commits = disk.commits.load(SeqCst);
        disk.fails.store(fails, SeqCst);
        receive(&store, 7, &unit);
        unit.done();
        assert_eq!(unit.wait().await, if fails { Err(CommitRefused) } else { Ok(()) });
        assert_eq!(disk.commits.load(SeqCst), commits + 1);
        disk.fails.store(false, SeqCst);
        drop(store);
        let found = contents(&open(dir.path(), &StateOptions::default())).await;
        let received: usize = found.queues.iter().map(|queue| queue.received.len()).sum();
        let expected = if fails { (0, 0, 0) } else { (1, 1, 1) };
        assert_eq!((found.retained.len(), found.entries.len(), received), expected);
    }
}

/// The failure: the older message, whose unit was open for longer, replaces the one that everybody has been told is retained.
#[tokio::test]
async fn the_last_retained_message_stays_whichever_unit_is_closed_first() {
    for closed_first in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let store = open(dir.path(), &StateOptions::default());
        let [older, newer] = [Commit::of_unit(), Commit::of_unit()];
        store.set_retained(message("units", "older"), Some(older.part()));
        store.set_retained(message("plain", "older"), None);
        store.set_retained(message("units", "newer"), Some(newer.part()));
        let plain = Commit::of_unit();
        store.set_retained(message("plain", "unit"), Some(plain.part()));
        store.clear_retained(Arc::from("plain"), None);
        let order = if closed_first { [&older, &newer] } else { [&newer, &older] };
        for (packet_id, unit) in (1..).zip(order.into_iter().chain([&plain])) {
            receive(&store, packet_id, unit);
            unit.done();
            unit.wait().await.unwrap();
        }
        let found = contents(&store).await.retained;
        assert_eq!(found, [("units".to_owned(), b"newer".to_vec())]);
    }
}

/// The failure: the next process takes entries for unsent, as their session was without a connection, and sends them again without
/// DUP.
#[tokio::test]
async fn a_record_says_that_the_connection_has_ended_with_what_was_sent() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, options) = Disk::new();
    let store = open(dir.path(), &options);
    let sent = |store: &EmbeddedState| {
        let mut sent = Vec::new();
        let look = |txn: &heed::RoTxn<'_, heed::WithoutTls>| {
            let mut take = |record| {
                if let QueueRecord::Entry(_, seq, head) = record {
                    sent.push((seq, head.sent));
                }
                Ok::<(), ()>(())
            };
            let _ = queues::transfer::export(&store.tables.queues, txn, &mut take);
            Ok(())
        };
        store.environment.reading(look).unwrap();
        sent
    };
    store.submit_session(SessionOp::Put(session(SUBSCRIBER, None), None));
    append(&store, SUBSCRIBER, 0, &message("t", "a"), &Commit::new());
    // An entry that waits for a unit of another queue's message is written later and says so itself.
    let unit = Commit::of_unit();
    append(&store, SUBSCRIBER, 1, &message("t", "b"), &unit);
    let behind = Arc::new(QueueEntry::new(SUBSCRIBER, 2, message("t", "c"), QoS::AtLeastOnce, None));
    store.submit(QueueOp::Append(Arc::clone(&behind)));
    store.hurry();
    while store.gauges().depth == 0 {
        std::thread::yield_now();
    }
    disk.stop(&store);
    behind.note_sent();
    store.submit(QueueOp::NoteSent { queue: SUBSCRIBER, below: 3 });
    let commit = Commit::new();
    store.submit_session(SessionOp::Put(session(SUBSCRIBER, Some(5)), Some(commit.part())));
    let commits = disk.commits.load(SeqCst);
    disk.go_on();
    commit.done();
    commit.wait().await.unwrap();
    assert_eq!(disk.commits.load(SeqCst), commits + 1, "one transaction");
    let mut found = Contents::default();
    store.restore_sessions(&mut found).unwrap();
    assert!(found.sessions[0].contains("since: Some"), "{}", found.sessions[0]);
    assert_eq!(sent(&store), [(0, true)]);
    receive(&store, 1, &unit);
    unit.done();
    unit.wait().await.unwrap();
    let commit = Commit::new();
    store.submit(QueueOp::Forget { queue: SUBSCRIBER, packet_id: 1, commit: Arc::clone(&commit) });
    commit.wait().await.unwrap();
    assert_eq!(sent(&store), [(0, true), (1, true), (2, true)]);
}

#[tokio::test]
async fn a_flood_of_messages_delays_a_session_by_one_commit() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, options) = Disk::new();
    let store = open(dir.path(), &options);
    disk.stop(&store);
    let message = message("t", "x");
    for seq in 0..70_000 {
        let entry = QueueEntry::new(SUBSCRIBER, seq, Arc::clone(&message), QoS::AtLeastOnce, None);
        store.submit(QueueOp::Append(Arc::new(entry)));
    }
    let commit = Commit::new();
    store.submit_session(SessionOp::Put(session(PUBLISHER, None), Some(commit.part())));
    let commits = disk.commits.load(SeqCst);
    let done = Arc::new(AtomicU32::new(0));
    let (when, counted) = (Arc::clone(&done), Arc::clone(&disk));
    commit.then(move |_| when.store(counted.commits.load(SeqCst), SeqCst));
    commit.done();
    disk.go_on();
    while done.load(SeqCst) == 0 {
        std::thread::yield_now();
    }
    assert_eq!((done.load(SeqCst), commit.result()), (commits + 1, Some(Ok(()))));
    store.load(SUBSCRIBER, 0, 1, 1).await.unwrap();
    assert!(disk.commits.load(SeqCst) > commits + 2, "the messages took several");
}

/// The failure: each transaction has something new, which is refused and what removes with it, so that the disk stays full.
#[tokio::test]
async fn on_a_full_disk_what_is_new_does_not_hold_up_what_removes() {
    let dir = tempfile::tempdir().unwrap();
    let full = Arc::new(AtomicBool::new(false));
    let (disk, reserve) = (Arc::clone(&full), dir.path().join("state/reserve"));
    let kept_room = reserve.clone();
    let hook = move |_: &crate::Redo| match disk.load(SeqCst) && kept_room.exists() {
        true => Err(io::ErrorKind::StorageFull.into()),
        false => Ok(()),
    };
    let store =
        Arc::new(open(dir.path(), &StateOptions { hook: Some(Arc::new(hook)), ..StateOptions::default() }));
    for seq in 0..10 {
        append(&*store, SUBSCRIBER, seq, &message("t", "x"), &Commit::new());
    }
    store.load(SUBSCRIBER, 0, 1, 1).await.unwrap();
    full.store(true, SeqCst);
    let refused = Mutex::new(0);
    let subscribe = || {
        let commit = Commit::new();
        store.submit_session(SessionOp::Subscribe(PUBLISHER, subscription("a"), commit.part()));
        commit.done();
        commit
    };
    assert!(subscribe().wait().await.is_err());
    // Nothing can be made where the reserve was.
    std::fs::create_dir(&reserve).unwrap();
    full.store(false, SeqCst);
    store.submit(QueueOp::Purge { queue: SUBSCRIBER });
    for _ in 0..3 {
        *refused.lock() += u32::from(subscribe().wait().await.is_err());
    }
    assert_eq!(*refused.lock(), 3, "there is no room for more");
    while store.gauges().depth > 0 {
        std::thread::yield_now();
        subscribe();
    }
}

/// A change of the state, and of its twin in memory.
#[derive(Debug, Clone)]
enum Step {
    Put(u64, Option<u64>),
    Remove(u64),
    Subscribe(u64, bool),
    Group(u64, bool),
    /// A message: to these queues, retained on a topic, in a unit.
    Publish(Vec<u64>, Option<usize>, bool),
    /// Closes the oldest, or the newest open unit.
    Close(bool),
    Clear(usize),
    Drop(u64),
    /// The connection has ended.
    NoteSent(u64),
    Purge(u64),
    Reopen,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let queue = || 2..5_u64;
    let step = prop_oneof![
        3 => (queue(), any::<Option<u16>>()).prop_map(|(q, since)| Step::Put(q, since.map(u64::from))),
        1 => queue().prop_map(Step::Remove),
        2 => (queue(), any::<bool>()).prop_map(|(q, add)| Step::Subscribe(q, add)),
        1 => (queue(), any::<bool>()).prop_map(|(q, add)| Step::Group(q, add)),
        8 => (proptest::collection::vec(queue(), 0..3), proptest::option::of(0..3_usize), any::<bool>())
            .prop_map(|(queues, topic, unit)| Step::Publish(queues, topic, unit)),
        5 => any::<bool>().prop_map(Step::Close),
        1 => (0..3_usize).prop_map(Step::Clear),
        2 => queue().prop_map(Step::Drop),
        1 => queue().prop_map(Step::NoteSent),
        1 => queue().prop_map(Step::Purge),
        1 => Just(Step::Reopen),
    ];
    proptest::collection::vec(step, 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
    #[test]
    fn any_changes_leave_what_the_twin_in_memory_has(steps in steps()) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let options = StateOptions { map_size: 1 << 20, ..StateOptions::default() };
        let twin = MemoryState::default();
        let mut store = Some(open(dir.path(), &options));
        let (mut place, mut packet_id) = (0, 0);
        let mut open_units: Vec<(u16, [Arc<Commit>; 2])> = Vec::new();
        let mut entries: Vec<Arc<QueueEntry>> = Vec::new();
        // A store that is closed refuses units that are open, and what comes after them.
        let close = |stores: [&dyn StateStore; 2], (packet_id, units): (u16, [Arc<Commit>; 2])| {
            for (store, unit) in stores.into_iter().zip(units) {
                receive(store, packet_id, &unit);
                unit.done();
            }
        };
        for step in steps {
            let stores: [&dyn StateStore; 2] = [store.as_ref().unwrap(), &twin];
            match step {
                Step::Publish(queues, topic, in_unit) => {
                    let units = [(); 2].map(|()| if in_unit { Commit::of_unit() } else { Commit::new() });
                    place += 1;
                    for (store, unit) in stores.into_iter().zip(&units) {
                        let message = message(&format!("t/{}", topic.unwrap_or(9)), &place.to_string());
                        if topic.is_some() {
                            store.set_retained(Arc::clone(&message), Some(unit.part()));
                        }
                        for (at, queue) in queues.iter().enumerate() {
                            entries.push(append(store, QueueId(*queue), 10 * place + at as u64, &message, unit));
                        }
                    }
                    packet_id += 1;
                    if in_unit {
                        open_units.push((packet_id, units));
                    } else {
                        units.iter().for_each(|commit| commit.done());
                    }
                }
                Step::Close(oldest) if !open_units.is_empty() => {
                    let unit = if oldest { open_units.remove(0) } else { open_units.pop().unwrap() };
                    close(stores, unit);
                }
                Step::Close(_) => store.as_ref().unwrap().hurry(),
                Step::Reopen => {
                    open_units.drain(..).for_each(|unit| close(stores, unit));
                    twin.commit();
                    drop(store.take());
                    store = Some(open(dir.path(), &options));
                }
                Step::NoteSent(queue) => {
                    let queue = QueueId(queue);
                    entries.iter().filter(|entry| entry.queue == queue).for_each(|entry| entry.note_sent());
                    for store in stores {
                        store.submit(QueueOp::NoteSent { queue, below: 10 * (place + 1) });
                    }
                }
                step => stores.into_iter().for_each(|store| match step {
                    Step::Put(queue, since) => {
                        store.submit_session(SessionOp::Put(session(QueueId(queue), since), None));
                    }
                    Step::Remove(queue) => store.submit_session(SessionOp::Remove(QueueId(queue), None)),
                    Step::Subscribe(queue, add) => {
                        store.submit_session(match add {
                            true => SessionOp::Subscribe(QueueId(queue), subscription("a/#"), Commit::new()),
                            false => {
                                SessionOp::Unsubscribe(QueueId(queue), "a/#".to_owned(), Commit::new())
                            }
                        });
                    }
                    Step::Group(queue, true) => {
                        store.submit_session(SessionOp::Group(QueueId(queue), format!("$share/{queue}/a")));
                    }
                    Step::Group(queue, false) => store.submit_session(SessionOp::RemoveGroup(QueueId(queue))),
                    Step::Clear(topic) => store.clear_retained(Arc::from(format!("t/{topic}")), None),
                    Step::Drop(queue) => {
                        let seq = 10 * place;
                        store.submit(QueueOp::Remove { queue: QueueId(queue), seq, unit: None });
                    }
                    Step::Purge(queue) => store.submit(QueueOp::Purge { queue: QueueId(queue) }),
                    Step::Publish(..) | Step::Close(_) | Step::NoteSent(_) | Step::Reopen => {}
                }),
            }
        }
        let stores: [&dyn StateStore; 2] = [store.as_ref().unwrap(), &twin];
        open_units.drain(..).for_each(|unit| close(stores, unit));
        twin.commit();
        drop(store);
        let on_disk = runtime.block_on(contents(&open(dir.path(), &options)));
        let in_memory = runtime.block_on(contents_of(&twin, || {
            twin.commit();
        }));
        prop_assert_eq!(on_disk, in_memory);
    }
}
