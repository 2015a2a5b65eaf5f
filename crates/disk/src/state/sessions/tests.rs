//! The sessions' store against a model, failing and stalled disks.

mod damage;

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use gateway_core::{ClientId, Commit, CommitRefused, Message, Origin, Protocol, QoS, QueueId, Timestamp};
use proptest::prelude::*;

use super::*;
use crate::{
    keys::first_hash,
    state::{EmbeddedState, StateOptions},
    table::Table,
};
use store::{DataDir, SessionOp, StateStore, StoreHealth, StoredWill};

/// Tells the kill test's child where to write.
const CHILD: &str = "MQTT_SERVER_TEST_SESSIONS_CHILD";

#[derive(Debug, Default, Clone, PartialEq)]
struct Model {
    sessions: BTreeMap<u64, (String, BTreeMap<String, StoredSubscription>)>,
    groups: BTreeMap<u64, String>,
}

impl Restore for Model {
    fn session(&mut self, session: StoredSession, subscriptions: Vec<StoredSubscription>) {
        assert!(self.sessions.last_key_value().is_none_or(|(last, _)| *last < session.queue.0), "order");
        let subscriptions = subscriptions.into_iter().map(|s| (s.filter.clone(), s)).collect();
        self.sessions.insert(session.queue.0, (format!("{session:?}"), subscriptions));
    }

    fn group(&mut self, queue: QueueId, full_name: &str) {
        self.groups.insert(queue.0, full_name.to_owned());
    }
}

fn open(path: &Path) -> EmbeddedState {
    open_with(path, &StateOptions { map_size: 1 << 20, ..StateOptions::default() }).unwrap()
}

fn open_with(path: &Path, options: &StateOptions) -> Result<EmbeddedState, StoreError> {
    EmbeddedState::open(&DataDir::open(path).unwrap(), options)
}

fn restored(store: &EmbeddedState) -> Model {
    let mut model = Model::default();
    store.restore_sessions(&mut model).unwrap();
    model
}

fn session(number: u64, version: u64) -> StoredSession {
    session_of(number, &format!("client-{number}"), version)
}

fn session_of(number: u64, client_id: &str, version: u64) -> StoredSession {
    let message = Arc::clone(Message::new("will", &[7; 900], Timestamp(version), Origin::SERVER).share());
    StoredSession {
        queue: QueueId(number),
        client_id: ClientId::new(client_id),
        expiry: if version.is_multiple_of(3) { u32::MAX } else { 60 },
        since: version.is_multiple_of(2).then_some(Timestamp(1_700_000_000_000 + version)),
        protocol: if version.is_multiple_of(5) { Protocol::V4 } else { Protocol::V5 },
        listener: Arc::new(format!("listener-{}", version % 2)),
        username: (version % 4 == 1).then(|| "user".into()),
        proved: version % 8 == 1,
        tenant: (version % 7 == 1).then(|| "tenant".into()),
        will: (version % 5 == 1).then(|| StoredWill {
            message,
            expiry: (version % 2 == 1).then_some(5),
            delay: 300,
            author: (version % 4 == 1).then(|| Arc::new(format!("author {version}"))),
        }),
    }
}

fn subscription(filter: &str, version: u64) -> StoredSubscription {
    StoredSubscription {
        filter: filter.to_owned(),
        qos: QoS::from_bits((version % 3) as u8).unwrap(),
        no_local: version % 2 == 1,
        retain_as_published: version % 4 == 1,
        id: (version % 5 > 1).then_some(version as u32 * 1000),
    }
}

/// Submits with a commit and waits for it.
fn sure(store: &EmbeddedState, op: impl FnOnce(Arc<Commit>) -> SessionOp) -> Result<(), CommitRefused> {
    let commit = Commit::new();
    commit.add();
    store.submit_session(op(Arc::clone(&commit)));
    finish(&commit)
}

fn finish(commit: &Commit) -> Result<(), CommitRefused> {
    commit.done();
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(commit.wait())
}

fn put(store: &EmbeddedState, session: StoredSession) -> Result<(), CommitRefused> {
    sure(store, |commit| SessionOp::Put(Box::new(session), Some(commit)))
}

fn subscribe(store: &EmbeddedState, number: u64, filter: &str, version: u64) -> Result<(), CommitRefused> {
    sure(store, |commit| SessionOp::Subscribe(QueueId(number), subscription(filter, version), commit))
}

fn unsubscribe(store: &EmbeddedState, number: u64, filter: &str) -> Result<(), CommitRefused> {
    sure(store, |commit| SessionOp::Unsubscribe(QueueId(number), filter.to_owned(), commit))
}

/// A switch that makes commits fail, and the options with it.
fn failing() -> (Arc<AtomicBool>, StateOptions) {
    let failing = Arc::new(AtomicBool::new(false));
    let switch = Arc::clone(&failing);
    let hook = move |_: &crate::Redo| match switch.load(Relaxed) {
        true => Err(std::io::Error::other("disk full")),
        false => Ok(()),
    };
    (failing, StateOptions { hook: Some(Arc::new(hook)), ..StateOptions::default() })
}

/// A change of a random session.
#[derive(Debug, Clone)]
enum Step {
    Put(u64, u64, bool),
    Remove(u64, bool),
    Subscribe(u64, usize, u64),
    Unsubscribe(u64, usize),
    Group(u64),
    RemoveGroup(u64),
    Wait,
    Reopen,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let number = || prop_oneof![1..6u64, Just(256), Just((1 << 48) - 1)];
    let step = prop_oneof![
        5 => (number(), 0..60u64, any::<bool>()).prop_map(|(n, v, t)| Step::Put(n, v, t)),
        1 => (number(), any::<bool>()).prop_map(|(n, t)| Step::Remove(n, t)),
        5 => (number(), 0..5usize, 0..60u64).prop_map(|(n, f, v)| Step::Subscribe(n, f, v)),
        2 => (number(), 0..5usize).prop_map(|(n, f)| Step::Unsubscribe(n, f)),
        1 => number().prop_map(Step::Group),
        1 => number().prop_map(Step::RemoveGroup),
        2 => Just(Step::Wait),
        1 => Just(Step::Reopen),
    ];
    proptest::collection::vec(step, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]
    #[test]
    fn what_is_read_back_is_what_a_model_says(steps in steps()) {
        let filters = ["a", "a/#", "$share/g/+", "", &"long/".repeat(2000)];
        let dir = tempfile::tempdir().unwrap();
        let mut store = open(dir.path());
        let mut model = Model::default();
        let mut commits = Vec::new();
        let commit = |wanted: bool, commits: &mut Vec<Arc<Commit>>| wanted.then(|| {
            let commit = Commit::new();
            commit.add();
            commits.push(Arc::clone(&commit));
            commit
        });
        for step in steps {
            match step {
                Step::Put(n, version, wait) => {
                    let session = session(n, version);
                    model.sessions.entry(n).or_default().0 = format!("{session:?}");
                    store.submit_session(SessionOp::Put(Box::new(session), commit(wait, &mut commits)));
                }
                Step::Remove(n, wait) => {
                    model.sessions.remove(&n);
                    store.submit_session(SessionOp::Remove(QueueId(n), commit(wait, &mut commits)));
                }
                Step::Subscribe(n, filter, version) => {
                    let value = subscription(filters[filter], version);
                    let known = model.sessions.entry(n).or_default();
                    known.1.insert(value.filter.clone(), value.clone());
                    let commit = commit(true, &mut commits).unwrap();
                    store.submit_session(SessionOp::Subscribe(QueueId(n), value, commit));
                }
                Step::Unsubscribe(n, filter) => {
                    let filter = filters[filter].to_owned();
                    if let Some(known) = model.sessions.get_mut(&n) {
                        known.1.remove(&filter);
                    }
                    let commit = commit(true, &mut commits).unwrap();
                    store.submit_session(SessionOp::Unsubscribe(QueueId(n), filter, commit));
                }
                Step::Group(n) => {
                    model.groups.insert(n, format!("$share/{n}/a"));
                    store.submit_session(SessionOp::Group(QueueId(n), format!("$share/{n}/a")));
                }
                Step::RemoveGroup(n) => {
                    model.groups.remove(&n);
                    store.submit_session(SessionOp::RemoveGroup(QueueId(n)));
                }
                Step::Wait => {}
                Step::Reopen => {
                    drop(store);
                    store = open(dir.path());
                }
            }
            if matches!(step, Step::Wait | Step::Reopen) {
                for commit in commits.drain(..) {
                    prop_assert_eq!(finish(&commit), Ok(()));
                }
            }
        }
        drop(store);
        for commit in commits {
            prop_assert_eq!(finish(&commit), Ok(()));
        }
        // Subscriptions without a session are not given.
        model.sessions.retain(|_, (session, _)| !session.is_empty());
        let store = open(dir.path());
        prop_assert_eq!(restored(&store), model.clone());
        prop_assert_eq!(restored(&store), model);
    }
}

#[test]
fn a_failed_commit_refuses_what_is_new_and_removes_later_what_was_to_go() {
    let dir = tempfile::tempdir().unwrap();
    let (fails, options) = failing();
    let store = open_with(dir.path(), &options).unwrap();
    for number in 1..=3 {
        put(&store, session(number, 0)).unwrap();
        subscribe(&store, number, "a", 0).unwrap();
        subscribe(&store, number, "b", 0).unwrap();
    }
    fails.store(true, Relaxed);
    // Operations that nobody waits for are kept too.
    store.submit_session(SessionOp::Put(Box::new(session(3, 1)), None));
    store.submit_session(SessionOp::Group(QueueId(9), "$share/g/a".to_owned()));
    assert_eq!(put(&store, session(4, 0)), Err(CommitRefused));
    assert_eq!(subscribe(&store, 2, "c", 0), Err(CommitRefused));
    assert_eq!(unsubscribe(&store, 2, "b"), Err(CommitRefused));
    assert_eq!(sure(&store, |commit| SessionOp::Remove(QueueId(1), Some(commit))), Err(CommitRefused));
    assert_eq!(store.health(), StoreHealth::Failing);
    fails.store(false, Relaxed);
    subscribe(&store, 3, "d", 2).unwrap();
    assert_eq!(store.health(), StoreHealth::Sound);
    drop(store);
    let found = restored(&open(dir.path()));
    assert_eq!(found.sessions.keys().copied().collect::<Vec<_>>(), [2, 3]);
    assert_eq!(found.sessions[&2].1.keys().collect::<Vec<_>>(), ["a"]);
    assert_eq!(found.sessions[&3].0, format!("{:?}", session(3, 1)));
    assert_eq!(found.sessions[&3].1.keys().collect::<Vec<_>>(), ["a", "b", "d"]);
    assert_eq!(found.groups.len(), 1);
}

#[test]
fn a_full_disk_harms_nothing_that_was_stored() {
    let dir = tempfile::tempdir().unwrap();
    let options = StateOptions { map_size: 128 << 10, max_map_size: 512 << 10, ..StateOptions::default() };
    let store = open_with(dir.path(), &options).unwrap();
    let mut stored = 0;
    while put(&store, session(stored + 1, 1)).is_ok() {
        stored += 1;
        assert!(stored < 10_000, "the map never gets full");
    }
    assert!(stored > 20, "{stored}");
    // Removing needs a little room itself, and LMDB has kept it back or not; what was acknowledged is there.
    assert_eq!(restored(&store).sessions.len() as u64, stored);
    drop(store);
    assert_eq!(restored(&open(dir.path())).sessions.len() as u64, stored);
}

#[test]
fn a_stalled_disk_does_not_make_waiting_changes_grow_without_end() {
    let dir = tempfile::tempdir().unwrap();
    let gate = Arc::new(parking_lot::RwLock::new(()));
    let hook = Arc::clone(&gate);
    let options = StateOptions {
        hook: Some(Arc::new(move |_| {
            drop(hook.read());
            Ok(())
        })),
        max_waiting_changes: 100_000,
        ..StateOptions::default()
    };
    let store = open_with(dir.path(), &options).unwrap();
    put(&store, session(1, 0)).unwrap();
    let stalled = gate.write();
    let refused = |commit: &Arc<Commit>| {
        commit.done();
        commit.result() == Some(Err(CommitRefused))
    };
    // One record that changes for ever takes one place; everybody who waits for it goes on waiting.
    let commit = Commit::new();
    for version in 0..2000 {
        store.submit_session(SessionOp::Put(Box::new(session(1, version)), None));
    }
    commit.add();
    store.submit_session(SessionOp::Put(Box::new(session(1, 7)), Some(Arc::clone(&commit))));
    assert!(!refused(&commit));
    let taken = (2..4000).take_while(|&number| {
        let commit = Commit::new();
        commit.add();
        store.submit_session(SessionOp::Put(Box::new(session(number, 0)), Some(Arc::clone(&commit))));
        !refused(&commit)
    });
    let taken = taken.count();
    assert!((200..1000).contains(&taken), "{taken}");
    drop(stalled);
    drop(store);
    assert_eq!(commit.result(), Some(Ok(())));
    let found = restored(&open(dir.path()));
    assert_eq!(found.sessions.len(), taken + 1);
    assert_eq!(found.sessions[&1].0, format!("{:?}", session(1, 7)));
}

#[test]
fn of_two_sessions_with_one_client_id_the_newer_stays() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    for (number, client_id) in [(3, "a"), (4, "b"), (7, "a"), (9, "a"), (10, "c")] {
        put(&store, session_of(number, client_id, 0)).unwrap();
        subscribe(&store, number, "x", number).unwrap();
    }
    for _ in 0..2 {
        assert_eq!(restored(&store).sessions.keys().copied().collect::<Vec<_>>(), [4, 9, 10]);
    }
    let environment = &store.environment;
    let left = environment.reading(|txn| store.tables.sessions.subscriptions.len(txn)).unwrap();
    assert_eq!(left, 3);
}

#[test]
fn filters_with_one_hash_are_kept_apart() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    put(&store, session(1, 0)).unwrap();
    let place = tables::subscription_key(QueueId(1), first_hash(b"mine"));
    let mut record = Vec::new();
    record::encode_subscription(&subscription("other", 0), &mut record);
    store.environment.writing(|txn| store.tables.sessions.subscriptions.put(txn, &place, &record)).unwrap();
    subscribe(&store, 1, "mine", 1).unwrap();
    let filters = || restored(&store).sessions[&1].1.keys().cloned().collect::<Vec<_>>();
    assert_eq!(filters(), ["mine", "other"]);
    // The first place is free again; "mine" is in the second and is found there.
    store.environment.writing(|txn| store.tables.sessions.subscriptions.delete(txn, &place)).unwrap();
    subscribe(&store, 1, "mine", 2).unwrap();
    assert_eq!(store.environment.reading(|txn| store.tables.sessions.subscriptions.len(txn)).unwrap(), 1);
    unsubscribe(&store, 1, "mine").unwrap();
    assert!(filters().is_empty());
}
