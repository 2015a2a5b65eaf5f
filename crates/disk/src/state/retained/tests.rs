//! The store of retained messages against a model, failing and stalled disks, kills and damage.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Command, Stdio},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use gateway_core::{ClientId, Commit, CommitRefused, Message, Origin, OriginKind, QoS, Timestamp};
use proptest::prelude::*;

use super::*;
use crate::{
    keys,
    state::{EmbeddedState, StateOptions},
};
use store::{DataDir, StateStore, StoreHealth};

/// Tells the kill test's child where to write.
const CHILD: &str = "MQTT_SERVER_TEST_RETAINED_CHILD";

fn open(path: &Path) -> EmbeddedState {
    open_with(path, &StateOptions { map_size: 1 << 20, ..StateOptions::default() }).unwrap()
}

fn open_with(path: &Path, options: &StateOptions) -> Result<EmbeddedState, StoreError> {
    EmbeddedState::open(&DataDir::open(path).unwrap(), options)
}

fn message(topic: &str, version: u64) -> Arc<SharedMessage> {
    let client_id = ClientId::new("device");
    let origin = Origin { kind: OriginKind::Device, client_id: Some(&client_id), slot: 0 };
    let payload = version.to_string().repeat(1 + 300 * (version % 3) as usize);
    let mut message = Message::new(topic, payload.as_bytes(), Timestamp(1_700_000_000_000), origin);
    message.qos = QoS::from_bits((version % 3) as u8).unwrap();
    message.retain = true;
    message.expires = (version % 4 == 1).then_some(Timestamp(200_000_000_000_000));
    Arc::clone(message.share())
}

fn restored(store: &EmbeddedState) -> Vec<(String, String)> {
    let mut found = Vec::new();
    store
        .restore_retained(&mut |message| found.push((message.topic.to_string(), format!("{message:?}"))))
        .unwrap();
    found
}

fn topics(store: &EmbeddedState) -> Vec<String> {
    restored(store).into_iter().map(|(topic, _)| topic).collect()
}

/// The future is ready at once or soon: the reader's thread answers.
fn load(store: &EmbeddedState, topics: &[&str]) -> Vec<Option<String>> {
    let topics = topics.iter().map(|topic| Arc::from(*topic)).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let loaded = runtime.block_on(store.load_retained(topics)).unwrap();
    loaded.into_iter().map(|message| message.map(|message| format!("{message:?}"))).collect()
}

#[test]
fn what_is_read_by_topic_is_what_is_on_disk_in_the_order_asked_for() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    let long = |end: &str| format!("{}{end}", "l/".repeat(400));
    let names = ["a", "b", &long("1"), &long("2")];
    for (version, name) in names.iter().enumerate() {
        sure(|commit| store.set_retained(message(name, version as u64), commit)).unwrap();
    }
    sure(|commit| store.clear_retained(Arc::from("b"), commit)).unwrap();
    let text = |version: usize| Some(format!("{:?}", message(names[version], version as u64)));
    let asked = [names[3], "none", names[0], names[1], "", names[2], &long("3")];
    assert_eq!(load(&store, &asked), [text(3), None, text(0), None, None, text(2), None]);
    assert!(load(&store, &[]).is_empty());
}

fn sure(submit: impl FnOnce(Option<Arc<Commit>>)) -> Result<(), CommitRefused> {
    let commit = Commit::new();
    commit.add();
    submit(Some(Arc::clone(&commit)));
    finish(&commit)
}

fn finish(commit: &Commit) -> Result<(), CommitRefused> {
    commit.done();
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(commit.wait())
}

fn set(store: &EmbeddedState, topic: &str, version: u64) -> Result<(), CommitRefused> {
    sure(|commit| store.set_retained(message(topic, version), commit))
}

#[derive(Debug, Clone)]
enum Step {
    Set(usize, u64, bool),
    Clear(usize, bool),
    Wait,
    Reopen,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..8usize, 0..60u64, any::<bool>()).prop_map(|(t, v, w)| Step::Set(t, v, w)),
        2 => (0..8usize, any::<bool>()).prop_map(|(t, w)| Step::Clear(t, w)),
        2 => Just(Step::Wait),
        1 => Just(Step::Reopen),
    ];
    proptest::collection::vec(step, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]
    #[test]
    fn what_is_read_back_in_order_is_what_a_model_says(steps in steps()) {
        let long = "x".repeat(keys::CUT);
        let names = ["a", "a/b", "b", &long[1..], &long, &format!("{long}/3"), &format!("{long}/1"),
            &format!("{long}/2")];
        let dir = tempfile::tempdir().unwrap();
        let mut store = open(dir.path());
        let mut model = BTreeMap::new();
        let mut commits = Vec::new();
        let commit = |wanted: bool, commits: &mut Vec<Arc<Commit>>| wanted.then(|| {
            let commit = Commit::new();
            commit.add();
            commits.push(Arc::clone(&commit));
            commit
        });
        for step in steps {
            match step {
                Step::Set(topic, version, wait) => {
                    let message = message(names[topic], version);
                    model.insert(names[topic].to_owned(), format!("{message:?}"));
                    store.set_retained(message, commit(wait, &mut commits));
                }
                Step::Clear(topic, wait) => {
                    model.remove(names[topic]);
                    store.clear_retained(Arc::from(names[topic]), commit(wait, &mut commits));
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
        let store = open(dir.path());
        prop_assert_eq!(restored(&store), model.into_iter().collect::<Vec<_>>());
    }
}

#[test]
fn a_failed_commit_refuses_what_is_new_and_keeps_the_rest_for_later() {
    let dir = tempfile::tempdir().unwrap();
    let fails = Arc::new(AtomicBool::new(false));
    let switch = Arc::clone(&fails);
    let hook = move |_: &crate::Redo| match switch.load(Relaxed) {
        true => Err(std::io::Error::other("disk full")),
        false => Ok(()),
    };
    let options = StateOptions { hook: Some(Arc::new(hook)), ..StateOptions::default() };
    let store = open_with(dir.path(), &options).unwrap();
    for topic in ["gone", "same", "lazy"] {
        set(&store, topic, 1).unwrap();
    }
    fails.store(true, Relaxed);
    store.set_retained(message("lazy", 2), None);
    assert_eq!(set(&store, "lazy", 3), Err(CommitRefused));
    assert_eq!(set(&store, "same", 2), Err(CommitRefused));
    assert_eq!(set(&store, "new", 2), Err(CommitRefused));
    assert_eq!(sure(|commit| store.clear_retained("gone".into(), commit)), Err(CommitRefused));
    assert_eq!(store.health(), StoreHealth::Failing);
    fails.store(false, Relaxed);
    set(&store, "other", 5).unwrap();
    assert_eq!(store.health(), StoreHealth::Sound);
    let expected = [("lazy", 2), ("other", 5), ("same", 1)]
        .map(|(topic, version)| (topic.to_owned(), format!("{:?}", message(topic, version))));
    assert_eq!(restored(&store), expected);
}

#[test]
fn a_stalled_disk_does_not_make_waiting_messages_grow_without_end() {
    let dir = tempfile::tempdir().unwrap();
    let gate = Arc::new(parking_lot::RwLock::new(()));
    let begun = Arc::new(AtomicBool::new(false));
    let (hook, begins) = (Arc::clone(&gate), Arc::clone(&begun));
    let options = StateOptions {
        hook: Some(Arc::new(move |_| {
            begins.store(true, Relaxed);
            drop(hook.read());
            Ok(())
        })),
        max_waiting_changes: 100_000,
        ..StateOptions::default()
    };
    let store = open_with(dir.path(), &options).unwrap();
    let stalled = gate.write();
    // A waiting message gets room when the writer begins: after that it keeps its room.
    begun.store(false, Relaxed);
    store.set_retained(message("busy", 0), None);
    while !begun.load(Relaxed) {
        std::thread::yield_now();
    }
    let last = Commit::new();
    last.add();
    for version in 0..2000 {
        store.set_retained(message("busy", version), (version == 1500).then(|| Arc::clone(&last)));
    }
    last.done();
    assert_eq!(last.result(), None, "a topic that changes for ever takes one place");
    let taken = (0..4000).take_while(|number| {
        let commit = Commit::new();
        commit.add();
        store.set_retained(message(&format!("t/{number:04}"), 0), Some(Arc::clone(&commit)));
        commit.done();
        commit.result().is_none()
    });
    let taken = taken.count();
    assert!((100..1000).contains(&taken), "{taken}");
    let counted = || crate::counters::totals().store_refused_retained;
    let before = counted();
    store.set_retained(message("one/more", 0), None);
    assert!(counted() > before);
    drop(stalled);
    drop(store);
    assert_eq!(last.result(), Some(Ok(())));
    let found = topics(&open(dir.path()));
    assert_eq!(found.len(), taken + 1);
    assert!(!found.contains(&"one/more".to_owned()));
}

#[test]
fn a_sender_that_floods_does_not_take_the_room_of_another() {
    let dir = tempfile::tempdir().unwrap();
    let gate = Arc::new(parking_lot::RwLock::new(()));
    let begun = Arc::new(AtomicBool::new(false));
    let (hook, begins) = (Arc::clone(&gate), Arc::clone(&begun));
    let options = StateOptions {
        hook: Some(Arc::new(move |_| {
            begins.store(true, Relaxed);
            drop(hook.read());
            Ok(())
        })),
        max_waiting_changes: 200_000,
        ..StateOptions::default()
    };
    let store = open_with(dir.path(), &options).unwrap();
    let stalled = gate.write();
    // Opening commits, too: what counts is the writer at work on the first message.
    begun.store(false, Relaxed);
    // True if the message is taken; refused ones are known at once.
    let set = |device: &str, topic: String, qos| {
        let id = ClientId::new(device);
        let origin = Origin { kind: OriginKind::Device, client_id: Some(&id), slot: 0 };
        let mut message = Message::new(&topic, b"p", Timestamp(1), origin);
        (message.qos, message.retain) = (qos, true);
        let commit = Commit::new();
        commit.add();
        store.set_retained(Arc::clone(message.share()), Some(Arc::clone(&commit)));
        commit.done();
        commit.result().is_none()
    };
    assert!(set("first", "first".to_owned(), QoS::AtLeastOnce));
    while !begun.load(Relaxed) {
        std::thread::yield_now();
    }
    for flooder in ["f1", "f2", "f3", "f4"] {
        let taken = (0..4000).filter(|n| set(flooder, format!("{flooder}/{n}"), QoS::AtLeastOnce)).count();
        assert!(taken < 4000, "{flooder}");
    }
    assert!((0..5).all(|n| set("bystander", format!("b/{n}"), QoS::AtLeastOnce)));
    drop(stalled);
}

#[test]
fn expired_and_damaged_messages_are_left_out_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let long = format!("{}/long", "x".repeat(keys::CUT));
    let mut old = Message::new("old", b"p", Timestamp(0), Origin::SERVER);
    old.expires = Some(Timestamp(1_700_000_000_000));
    sure(|commit| store.set_retained(Arc::clone(old.share()), commit)).unwrap();
    for topic in ["a", "b", "c", &long] {
        set(&store, topic, 1).unwrap();
    }
    let table = store.tables.retained.table();
    let spoilt = store.environment.writing(|txn| {
        for key in [b"b".to_vec(), keys::key(long.as_bytes(), 0)] {
            let mut record = table.get(txn, &key)?.unwrap().to_vec();
            *record.last_mut().unwrap() ^= 1;
            table.put(txn, &key, &record)?;
        }
        Ok(())
    });
    spoilt.unwrap();
    let counted = || crate::counters::totals().store_damaged_records;
    let before = counted();
    assert_eq!(topics(&store), ["a", "c"]);
    // At least: other tests count in the same process.
    assert!(counted() >= before + 2);
    assert_eq!(store.environment.reading(|txn| table.len(txn)).unwrap(), 2);
    set(&store, "b", 2).unwrap();
    set(&store, &long, 2).unwrap();
    assert_eq!(topics(&store), ["a", "b", "c", &long]);
}

#[test]
fn topics_with_one_hash_are_kept_apart() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let head = "x".repeat(keys::CUT);
    let [mine, other] = ["mine", "other"].map(|end| format!("{head}/{end}"));
    let table = store.tables.retained.table();
    let place = keys::key(mine.as_bytes(), 0);
    let mut record = Vec::new();
    store::encoding::message::encode(&message(&other, 1), &mut record);
    store.environment.writing(|txn| table.put(txn, &place, &record)).unwrap();
    set(&store, &mine, 1).unwrap();
    assert_eq!(topics(&store), [mine.as_str(), &other]);
    // The first place is free again; the message is in the second and is found there.
    store.environment.writing(|txn| table.delete(txn, &place)).unwrap();
    set(&store, &mine, 2).unwrap();
    assert_eq!(topics(&store), [mine.as_str()]);
    sure(|commit| store.clear_retained(mine.as_str().into(), commit)).unwrap();
    assert!(topics(&store).is_empty());
}

#[test]
fn a_newer_format_is_refused_and_left_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    set(&store, "a", 0).unwrap();
    store.environment.writing(|txn| store.environment.set_format(txn, 7)).unwrap();
    drop(store);
    let file = dir.path().join("state/data.mdb");
    let before = fs::read(&file).unwrap();
    let error = open_with(dir.path(), &StateOptions::default()).err().unwrap();
    assert!(matches!(error, StoreError::Format(_)) && error.to_string().contains('7'), "{error}");
    assert!(fs::read(&file).unwrap() == before, "the file was changed");
}

/// Not a test by itself: the process that `acknowledged_messages_survive_kill_9` kills.
#[test]
fn child_that_writes_until_killed() {
    let Ok(path) = std::env::var(CHILD) else { return };
    let store = open(Path::new(&path));
    let mut out = std::io::stdout();
    let first = topics(&store).len() as u64;
    for number in first.. {
        set(&store, &format!("t/{number:06}"), number).unwrap();
        writeln!(out, "\nacked {number}").unwrap();
        out.flush().unwrap();
    }
}

#[test]
fn acknowledged_messages_survive_kill_9() {
    let dir = tempfile::tempdir().unwrap();
    let mut acked = None;
    for round in 1..=3u64 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "state::retained::tests::child_that_writes_until_killed", "--nocapture"])
            .env(CHILD, dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let mut numbers =
            lines.filter_map(|line| line.strip_prefix("acked ").and_then(|n| n.parse::<u64>().ok()));
        acked = numbers.by_ref().find(|&number| number >= round * 40).max(acked);
        child.kill().unwrap();
        child.wait().unwrap();
        acked = numbers.last().max(acked);
        let found = restored(&open(dir.path()));
        for number in 0..=acked.unwrap() {
            let topic = format!("t/{number:06}");
            let expected = format!("{:?}", message(&topic, number));
            assert_eq!(found[number as usize], (topic, expected));
        }
    }
    assert!(acked >= Some(120));
}
