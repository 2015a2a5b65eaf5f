//! The tools on a directory with sessions, retained messages and latest values.

use std::sync::Arc;

use gateway_core::{Commit, Journal, Message, Origin, QoS, QueueEntry, QueueId, QueueOp, Timestamp};

use super::*;
use crate::{
    DurableOptions, EmbeddedLatest, EmbeddedOptions, EmbeddedRecords, EmbeddedState, RecordOptions,
    StateOptions,
};
use segment_log::{EmbeddedLog, LogOptions};
use store::{
    LatestStore, RecordStore, SessionOp, ShadowRecord, StateStore, shadow_change,
    suite::{latest::value, shadows::record},
};

fn state(path: &Path) -> EmbeddedState {
    EmbeddedState::open(&DataDir::open(path).unwrap(), &StateOptions::default()).unwrap()
}

fn fill(store: &EmbeddedState, topics: std::ops::Range<u32>) {
    for n in topics {
        let topic = format!("t/{n}");
        let message = Arc::clone(Message::new(&topic, &[7; 500], Timestamp(0), Origin::SERVER).share());
        store.set_retained(message, None);
    }
}

fn count(store: &EmbeddedState) -> usize {
    let mut found = 0;
    store.restore_retained(&mut |_| found += 1).unwrap();
    found
}

#[tokio::test]
async fn a_check_finds_what_is_damaged_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let store = state(dir.path());
    fill(&store, 0..100);
    drop(store);
    let latest =
        EmbeddedLatest::open(&DataDir::open(dir.path()).unwrap(), &EmbeddedOptions::default()).unwrap();
    latest.upsert(Arc::from([value("d", "t", 1)])).await.unwrap();
    assert!(check(dir.path(), &mut |_| {}).is_err(), "the directory is in use");
    drop(latest);
    let mut last = None;
    let sound = check(dir.path(), &mut |progress| last = Some((progress.done, progress.total))).unwrap();
    assert_eq!(last, Some((100, 100)));
    let found = |reports: &[StoreReport]| {
        reports.iter().map(|r| (r.store, r.records, r.damaged, r.problem.is_some())).collect::<Vec<_>>()
    };
    assert_eq!(found(&sound), [("latest", 1, 0, false), ("state", 100, 0, false)]);

    let file = dir.path().join("state/data.mdb");
    let mut bytes = fs::read(&file).unwrap();
    // A payload byte of one record, also where an older page still has it.
    let topic = b"\x04t/42\x07";
    let places: Vec<_> = (0..bytes.len() - 6).filter(|&at| bytes[at..at + 6] == *topic).collect();
    for at in places {
        bytes[at + 40] ^= 1;
    }
    fs::write(&file, &bytes).unwrap();
    let damaged = check(dir.path(), &mut |_| {}).unwrap();
    assert_eq!(found(&damaged), [("latest", 1, 0, false), ("state", 100, 1, false)]);

    fs::write(&file, &bytes[..8192]).unwrap();
    let cut = check(dir.path(), &mut |_| {}).unwrap();
    assert_eq!(found(&cut), [("latest", 1, 0, false), ("state", 0, 0, true)]);
    assert_eq!(fs::metadata(&file).unwrap().len(), 8192);
}

/// A check said twice as many as an export of the same directory, since it also counted what the stores note to find
/// records again: nobody could tell from the numbers whether anything was left out.
#[test]
fn a_check_an_export_and_an_import_count_the_same_records() {
    let dir = tempfile::tempdir().unwrap();
    fill(&state(dir.path()), 0..100);
    let data = DataDir::open(dir.path()).unwrap();
    let latest = EmbeddedLatest::open(&data, &EmbeddedOptions::default()).unwrap();
    let written = latest.upsert((0..50).map(|n| value("d", &format!("t/{n}"), 1)).collect());
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(written).unwrap();
    let state = EmbeddedState::open(&data, &StateOptions::default()).unwrap();
    state.submit_session(SessionOp::Group(QueueId(1 << 63 | 1), "$share/g/t".to_owned()));
    // Three queues with a message of all and one of their own, each with a time at which it expires.
    let message = |payload: &[u8]| {
        let mut message = Message::new("t", payload, Timestamp(0), Origin::SERVER);
        message.expires = Some(Timestamp(4_000_000_000_000));
        Arc::clone(message.share())
    };
    let shared = message(b"shared");
    for queue in 1..4 {
        for (seq, message) in [Arc::clone(&shared), message(b"own")].into_iter().enumerate() {
            let entry = QueueEntry::new(QueueId(queue), seq as u64, message, QoS::AtLeastOnce, None);
            state.submit(QueueOp::Append(Arc::new(entry)));
        }
    }
    let records = EmbeddedRecords::open(&data, &RecordOptions::default()).unwrap();
    let deleted = ShadowRecord { document: None, ..record("d", "deleted", 7) };
    for shadow in [record("d", "", 3), deleted] {
        records.submit(vec![shadow_change(&shadow, 0).unwrap()], Some(Commit::new()));
    }
    drop((latest, state, records, data));

    let counted = |reports: Vec<StoreReport>| {
        reports.iter().map(|report| (report.store, report.records, report.damaged)).collect::<Vec<_>>()
    };
    let (file, new) = (dir.path().join("all.export"), dir.path().join("new"));
    let checked = counted(check(dir.path(), &mut |_| {}).unwrap());
    assert_eq!(checked, [("latest", 50, 0), ("state", 111, 0), ("records", 2, 0)]);
    assert_eq!(counted(export(dir.path(), &file, &mut |_| {}).unwrap()), checked);
    assert_eq!(counted(import(&file, &new, &mut |_| {}).unwrap()), checked);
    assert_eq!(counted(check(&new, &mut |_| {}).unwrap()), checked);
}

#[test]
fn compaction_keeps_every_record_and_frees_space() {
    let dir = tempfile::tempdir().unwrap();
    let store = state(dir.path());
    fill(&store, 0..3000);
    drop(store);
    let store = state(dir.path());
    for n in 100..3000 {
        store.clear_retained(format!("t/{n}").into(), None);
    }
    drop(store);
    let before = size(&dir.path().join("state"));
    let reports = compact(dir.path(), &mut |_| ()).unwrap();
    assert_eq!(reports.len(), 1);
    assert!(reports[0].bytes * 2 < before, "{} of {before}", reports[0].bytes);
    let store = state(dir.path());
    assert_eq!(count(&store), 100);
    fill(&store, 100..200);
    drop(store);
    assert_eq!(count(&state(dir.path())), 200);
}

#[test]
fn what_is_no_data_directory_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    assert!(check(dir.path(), &mut |_| {}).is_err());
    assert!(compact(dir.path(), &mut |_| ()).is_err());
    assert!(backup(dir.path(), &dir.path().join("b"), &mut |_| ()).is_err());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_backup_of_a_closed_directory_starts_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let store = state(dir.path());
    fill(&store, 0..500);
    drop(store);
    let target = tempfile::tempdir().unwrap();
    backup(dir.path(), target.path(), &mut |_| ()).unwrap();
    assert_eq!(count(&state(target.path())), 500);
    assert!(backup(dir.path(), target.path(), &mut |_| ()).is_err(), "the target is not empty");
}

#[tokio::test]
async fn a_newer_format_is_neither_read_nor_called_damaged() {
    let dir = tempfile::tempdir().unwrap();
    let store = state(dir.path());
    fill(&store, 0..10);
    drop(store);
    {
        let data = DataDir::open(dir.path()).unwrap();
        let options = DurableOptions::default().environment("state", 9);
        let environment = crate::environment::Environment::open(&data, options).unwrap();
        environment.writing(|txn| environment.set_format(txn, 7)).unwrap();
    }
    let reports = check(dir.path(), &mut |_| {}).unwrap();
    let problem = reports[0].problem.as_deref().unwrap();
    assert!(problem.contains("format 7") && reports[0].records == 0, "{problem}");
    let file = dir.path().join("all.export");
    assert!(matches!(export(dir.path(), &file, &mut |_| {}), Err(StoreError::Format(_))));
    assert!(!file.exists());
}

/// The failure: a backup is made, or a store written anew, by a version that does not know what is in it.
#[test]
fn a_newer_format_is_neither_backed_up_nor_compacted() {
    let dir = tempfile::tempdir().unwrap();
    drop(EmbeddedLatest::open(&DataDir::open(dir.path()).unwrap(), &EmbeddedOptions::default()).unwrap());
    fill(&state(dir.path()), 0..10);
    drop(EmbeddedLog::open(&DataDir::open(dir.path()).unwrap(), &LogOptions::default()).unwrap());
    let id = dir.path().join("log/log");
    let known = fs::read_to_string(&id).unwrap();
    let target = tempfile::tempdir().unwrap();
    let refused = |result: Result<Vec<StoreReport>, StoreError>, of: &str| {
        let Err(StoreError::Format(text)) = &result else { panic!("{result:?}") };
        assert!(text.contains(of) && text.contains("use the version that wrote"), "{text}");
        assert_eq!(fs::read_dir(target.path()).unwrap().count(), 0, "a gateway would start from it");
    };
    fs::write(&id, known.replacen('1', "2", 1)).unwrap();
    refused(backup(dir.path(), target.path(), &mut |_| ()), "format 2");
    fs::write(&id, known).unwrap();
    {
        let data = DataDir::open(dir.path()).unwrap();
        let options = DurableOptions::default().environment("state", 9);
        let environment = crate::environment::Environment::open(&data, options).unwrap();
        environment.writing(|txn| environment.set_format(txn, 7)).unwrap();
    }
    let file = dir.path().join("state/data.mdb");
    let before = fs::read(&file).unwrap();
    refused(backup(dir.path(), target.path(), &mut |_| ()), "format 7");
    {
        let _gateway = DataDir::open(dir.path()).unwrap();
        refused(backup(dir.path(), target.path(), &mut |_| ()), "format 7");
    }
    refused(compact(dir.path(), &mut |_| ()), "format 7");
    assert_eq!(fs::read(&file).unwrap(), before);
}
