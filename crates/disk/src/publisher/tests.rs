use std::{
    collections::BTreeMap,
    path::Path,
    sync::atomic::{AtomicBool, Ordering::SeqCst},
    thread,
};

use gateway_core::CommitRefused;

use super::*;

fn open_with(path: &Path, options: &DurableOptions) -> EmbeddedPublisher {
    EmbeddedPublisher::open(&DataDir::open(path).unwrap(), options).unwrap()
}

fn open(path: &Path) -> EmbeddedPublisher {
    open_with(path, &DurableOptions::default())
}

fn change(table: PublisherTable, key: &str, value: Option<&str>) -> PublisherChange {
    let bytes = |text: &str| Bytes::copy_from_slice(text.as_bytes());
    PublisherChange { table, key: bytes(key), value: value.map(bytes) }
}

fn write(store: &EmbeddedPublisher, changes: Vec<PublisherChange>) -> Result<(), CommitRefused> {
    let commit = Commit::new();
    store.submit(changes, Some(commit.part()));
    commit.done();
    loop {
        match commit.result() {
            Some(result) => return result,
            None => thread::yield_now(),
        }
    }
}

fn all(store: &EmbeddedPublisher, table: PublisherTable) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let text = |bytes: Bytes| String::from_utf8(bytes.to_vec()).unwrap();
    store.restore(table, &mut |key, value| drop(found.insert(text(key), text(value)))).unwrap();
    found
}

const BOTH: [PublisherTable; 2] = [PublisherTable::Answers, PublisherTable::Scheduled];
const ALL: [PublisherTable; 3] = [BOTH[0], BOTH[1], PublisherTable::Commands];

#[test]
fn records_of_all_tables_survive_a_restart_and_removals_too() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    for table in ALL {
        write(&store, vec![change(table, "a", Some("1")), change(table, "b", Some("2"))]).unwrap();
    }
    store.submit(vec![change(PublisherTable::Scheduled, "a", None)], None);
    drop(store);
    let store = open(dir.path());
    let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    assert_eq!(all(&store, PublisherTable::Answers), BTreeMap::from([pair("a", "1"), pair("b", "2")]));
    assert_eq!(all(&store, PublisherTable::Scheduled), BTreeMap::from([pair("b", "2")]));
    assert_eq!(all(&store, PublisherTable::Commands), BTreeMap::from([pair("a", "1"), pair("b", "2")]));
}

/// One without the other would be a message that comes again, or never.
#[test]
fn what_a_failing_disk_refuses_is_refused_whole() {
    let dir = tempfile::tempdir().unwrap();
    let fails = Arc::new(AtomicBool::new(false));
    let hook = Arc::clone(&fails);
    let hook: super::super::CommitHook = Arc::new(move || match hook.load(SeqCst) {
        true => Err(std::io::ErrorKind::Other.into()),
        false => Ok(()),
    });
    let store = open_with(dir.path(), &DurableOptions { hook: Some(hook), ..DurableOptions::default() });
    write(&store, vec![change(BOTH[0], "old", Some("1"))]).unwrap();
    fails.store(true, SeqCst);
    let both = vec![change(BOTH[0], "new", Some("2")), change(BOTH[1], "new", Some("3"))];
    assert_eq!(write(&store, both), Err(CommitRefused));
    assert_eq!(store.health(), StoreHealth::Failing);
    fails.store(false, SeqCst);
    write(&store, vec![change(BOTH[0], "later", Some("4"))]).unwrap();
    assert_eq!(all(&store, BOTH[0]).into_keys().collect::<Vec<_>>(), ["later", "old"]);
    assert!(all(&store, BOTH[1]).is_empty());
}

#[test]
fn a_disk_that_stands_still_takes_a_bounded_number_of_records() {
    let dir = tempfile::tempdir().unwrap();
    let gate = Arc::new(parking_lot::RwLock::new(()));
    let hook = Arc::clone(&gate);
    let hook: super::super::CommitHook = Arc::new(move || {
        drop(hook.read());
        Ok(())
    });
    let options =
        DurableOptions { hook: Some(hook), max_waiting_bytes: 100_000, ..DurableOptions::default() };
    let store = open_with(dir.path(), &options);
    let stalled = gate.write();
    let value = "x".repeat(900);
    let taken = (0..1000).take_while(|n| {
        let commit = Commit::new();
        store.submit(vec![change(BOTH[0], &n.to_string(), Some(&value))], Some(commit.part()));
        commit.done();
        commit.result().is_none()
    });
    let taken = taken.count();
    drop(stalled);
    assert!((50..300).contains(&taken), "{taken}");
    drop(store);
    assert_eq!(all(&open(dir.path()), BOTH[0]).len(), taken);
}

#[test]
fn a_damaged_record_is_left_out_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    write(&store, vec![change(BOTH[0], "a", Some("1")), change(BOTH[0], "b", Some("2"))]).unwrap();
    let damage = |txn: &mut heed::RwTxn<'_>| {
        let table: super::super::environment::Table =
            store.environment.env.open_database(txn, Some("answers"))?.unwrap();
        table.put(txn, b"a", b"damaged")
    };
    store.environment.writing(damage).unwrap();
    for _ in 0..2 {
        assert_eq!(all(&store, BOTH[0]).into_keys().collect::<Vec<_>>(), ["b"]);
    }
}
