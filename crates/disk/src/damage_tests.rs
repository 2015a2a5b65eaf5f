//! Pages of every environment damaged, and every file cut, emptied and removed, after a clean stop and after a kill: the store
//! opens, and each part is there whole unless it was the one that was hit.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    sync::Arc,
};

use gateway_core::{Commit, Journal as _, QoS, QueueEntry, QueueId, QueueOp, StoredEntry};

use crate::{EmbeddedLatest, EmbeddedOptions, EmbeddedRecords, EmbeddedState, RecordOptions, StateOptions};
use store::{
    DataDir, LatestQuery, LatestStore as _, QueueSummary, RecordChange, RecordKind, RecordStore as _,
    Restore, SessionOp, StateStore as _, StoredSession, StoredSubscription,
    suite::{
        latest::{self, value},
        state::{message, session, subscription},
    },
};

const PAGE: usize = 4096;
const ENVIRONMENTS: [&str; 3] = ["state", "records", "latest"];
const DUMMY: &str = "dummy";

/// The records of each part.
type Parts = BTreeMap<&'static str, Vec<String>>;

fn open_state(dir: &Path) -> EmbeddedState {
    EmbeddedState::open(&DataDir::open(dir).unwrap(), &StateOptions::default()).unwrap()
}

fn open_records(dir: &Path) -> EmbeddedRecords {
    EmbeddedRecords::open(&DataDir::open(dir).unwrap(), &RecordOptions::default()).unwrap()
}

fn open_latest(dir: &Path) -> EmbeddedLatest {
    EmbeddedLatest::open(&DataDir::open(dir).unwrap(), &EmbeddedOptions::default()).unwrap()
}

/// Ends a commit and waits for it.
async fn written(commit: Arc<Commit>) {
    commit.done();
    commit.wait().await.unwrap();
}

/// Writes all parts, and afterwards nothing that stays: the commit before the last one has the same.
async fn fill(dir: &Path) {
    let state = open_state(dir);
    let commit = Commit::new();
    for n in 1..20_u64 {
        let queue = QueueId(n);
        let client = session(queue, &format!("client-{n}"));
        state.submit_session(SessionOp::Put(Box::new(client), Some(commit.part())));
        state.submit_session(SessionOp::Subscribe(queue, subscription("to/#"), commit.part()));
        state.submit_session(SessionOp::Group(QueueId(100 + n), format!("$share/g{n}/to/#")));
        let queued = message("to/1", "queued");
        let entry = QueueEntry::new(queue, 0, queued, QoS::AtLeastOnce, Some(Arc::clone(&commit)));
        state.submit(QueueOp::Append(Arc::new(entry)));
        state.submit(QueueOp::Receive { queue, packet_id: 7, commit: commit.part() });
        state.set_retained(message(&format!("kept/{n}"), "kept"), Some(commit.part()));
    }
    state.hurry();
    written(commit).await;
    for _ in 0..2 {
        let commit = Commit::new();
        state.set_retained(message(DUMMY, DUMMY), Some(commit.part()));
        state.hurry();
        written(commit).await;
        let commit = Commit::new();
        state.clear_retained(Arc::from(DUMMY), Some(commit.part()));
        state.hurry();
        written(commit).await;
    }

    drop(state);
    let records = open_records(dir);
    let commit = Commit::new();
    for kind in RecordKind::ALL {
        let put = |n: u8| RecordChange::put(kind, format!("{n:04}\0key").into(), vec![n; 30].into());
        records.submit((1..20).map(put).collect(), Some(commit.part()));
    }
    written(commit).await;
    for _ in 0..2 {
        let change = RecordChange::put(RecordKind::Answers, DUMMY.into(), DUMMY.into());
        let removal = RecordChange::remove(RecordKind::Answers, DUMMY.into());
        for change in [change, removal] {
            let commit = Commit::new();
            records.submit(vec![change], Some(commit.part()));
            written(commit).await;
        }
    }

    drop(records);
    let latest = open_latest(dir);
    let values: Vec<_> = (1..20).map(|n| value("device", &format!("topic/{n}"), n)).collect();
    latest.upsert(values.into()).await.unwrap();
    for _ in 0..2 {
        latest.upsert([value(DUMMY, DUMMY, 1)].into()).await.unwrap();
        latest.remove([value(DUMMY, DUMMY, 1)].into()).await.unwrap();
    }
}

/// Opens a store; returns whether a file was set aside, and its parts.
async fn parts(dir: &Path, name: &str) -> (bool, Parts) {
    let mut parts = Parts::new();
    let was_set_aside = match name {
        "state" => {
            let state = open_state(dir);
            let mut found = FoundSessions::default();
            state.restore_sessions(&mut found).unwrap();
            parts.extend([("sessions", found.sessions), ("shared groups", found.groups)]);
            let (mut queued, mut received) = (Vec::new(), Vec::new());
            for QueueSummary { queue, received: ids, .. } in state.summaries().unwrap() {
                received.extend(ids.iter().map(|id| format!("{queue:?} {id}")));
                let loaded = state.load(queue, 0, usize::MAX, usize::MAX).await.unwrap();
                let payload = |entry: StoredEntry| entry.message.map(|message| message.payload.clone());
                queued.extend(
                    loaded.entries.into_iter().map(|entry| format!("{queue:?} {:?}", payload(entry))),
                );
            }
            let mut retained = Vec::new();
            state.restore_retained(&mut |message| retained.push(message.topic.to_string())).unwrap();
            parts.extend([("queued", queued), ("received", received), ("retained", retained)]);
            state.set_aside().is_some()
        }
        "records" => {
            let records = open_records(dir);
            for kind in RecordKind::ALL {
                let mut found = Vec::new();
                records.restore(kind, &mut |key, value| found.push(format!("{key:?} {value:?}"))).unwrap();
                parts.insert(kind.name(), found);
            }
            records.set_aside().is_some()
        }
        _ => {
            let latest = open_latest(dir);
            let query = LatestQuery { limit: 1000, ..LatestQuery::default() };
            let values = latest::list_all(&latest, query).await;
            parts.insert("latest", values.iter().map(|value| value.topic.to_string()).collect());
            latest.set_aside().is_some()
        }
    };
    for records in parts.values_mut() {
        records.retain(|record| !record.contains(DUMMY));
    }
    (was_set_aside, parts)
}

#[derive(Default)]
struct FoundSessions {
    sessions: Vec<String>,
    groups: Vec<String>,
}

impl Restore for FoundSessions {
    fn session(&mut self, session: StoredSession, subscriptions: Vec<StoredSubscription>) {
        self.sessions.push(format!("{session:?} {subscriptions:?}"));
    }

    fn group(&mut self, queue: QueueId, full_name: &str) {
        self.groups.push(format!("{queue:?} {full_name}"));
    }
}

/// A damage of a file; `None` removes it.
fn damaged(sound: &[u8], kind: &str, page: usize) -> Option<Vec<u8>> {
    let mut bytes = sound.to_vec();
    let range = page * PAGE..(page + 1) * PAGE;
    match kind {
        "flip" => bytes[range].iter_mut().skip(8).take(24).for_each(|byte| *byte ^= 0xA5),
        "zero" => bytes[range].fill(0),
        "page" => {
            // Another page in its place.
            let other = (page + 1) % (sound.len() / PAGE);
            bytes.copy_within(other * PAGE..(other + 1) * PAGE, range.start);
        }
        "cut" => bytes.truncate(sound.len() / 2 / PAGE * PAGE),
        "empty" => bytes.clear(),
        _ => return None,
    }
    Some(bytes)
}

/// The failure: a bad page of retained messages costs sessions.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn damage_costs_the_part_that_it_hits() {
    let dir = tempfile::tempdir().unwrap();
    fill(dir.path()).await;
    let (mut cases, mut lost_parts) = (0, BTreeSet::new());
    for name in ENVIRONMENTS {
        let (_, whole) = parts(dir.path(), name).await;
        assert!(whole.values().all(|records| records.len() == 19), "{whole:?}");
        let folder = dir.path().join(name);
        let sound = fs::read(folder.join("data.mdb")).unwrap();
        let pages = sound.len() / PAGE;
        let kinds =
            ["flip", "zero", "page"].into_iter().flat_map(|kind| (0..pages).map(move |page| (kind, page)));
        let files = ["cut", "empty", "gone"].into_iter().flat_map(|kind| [(kind, 0), (kind, 1)]);
        for (kind, page) in kinds.chain(files) {
            let is_killed = cases % 2 == 0;
            cases += 1;
            fs::remove_dir_all(&folder).unwrap();
            fs::create_dir(&folder).unwrap();
            fs::write(folder.join("format"), "1\n").unwrap();
            if let Some(bytes) = damaged(&sound, kind, page) {
                fs::write(folder.join("data.mdb"), bytes).unwrap();
            }
            fs::write(folder.join("state"), if is_killed { "open\n" } else { "closed 1 1\n" }).unwrap();
            let case = format!("{name}: {kind} {page}");
            let (was_set_aside, found) = parts(dir.path(), name).await;
            let lost: Vec<_> = whole.keys().copied().filter(|part| found[part] != whole[part]).collect();
            for part in &lost {
                assert!(found[part].is_empty(), "{case}: a part of {part} is left: {:?}", found[part]);
            }
            assert!(lost.is_empty() || was_set_aside, "{case}: nobody was told of {lost:?}");
            match kind {
                "flip" | "zero" | "page" => {
                    assert!(lost.len() <= 1, "{case}: {lost:?}");
                    lost_parts.extend(lost);
                }
                "cut" => {}
                _ => assert!(was_set_aside && lost.len() == whole.len(), "{case}: {lost:?}"),
            }
        }
        fs::remove_dir_all(&folder).unwrap();
    }
    // The others were in the last commits, so that there are two copies of them.
    assert!(cases >= 88 && lost_parts.len() >= 8, "{cases} cases, of which pages cost {lost_parts:?}");
}
