//! The suite on LMDB, and what is LMDB's own: restarts, damage, a disk that fails.

use std::{
    io,
    path::Path,
    sync::atomic::{AtomicBool, Ordering::SeqCst},
};

use super::*;
use crate::suite_shadows::{self, names, record};

fn open(dir: &Path, options: &DurableOptions) -> EmbeddedShadows {
    EmbeddedShadows::open(&DataDir::open(dir).unwrap(), options).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_suite() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn ShadowStore> = Arc::new(open(dir.path(), &DurableOptions::default()));
    suite_shadows::run(&store).await;
}

#[tokio::test]
async fn shadows_and_the_versions_of_deleted_ones_survive_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), &DurableOptions::default());
    store.put(record("a", "", 1), 0).await.unwrap();
    store.put(record("a", "x", 1), 0).await.unwrap();
    store.put(ShadowRecord { document: None, ..record("a", "x", 2) }, 1).await.unwrap();
    drop(store);
    let store = open(dir.path(), &DurableOptions::default());
    assert_eq!(names(&store, "a", 9).await, [(String::new(), 1, true), ("x".to_owned(), 2, false)]);
    assert_eq!(store.put(record("a", "x", 1), 0).await.unwrap(), ShadowPut::Conflict);
}

#[tokio::test]
async fn a_failed_commit_is_told_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let fails = Arc::new(AtomicBool::new(false));
    let disk = Arc::clone(&fails);
    let hook = move || if disk.load(SeqCst) { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) };
    let store = open(dir.path(), &DurableOptions { hook: Some(Arc::new(hook)), ..DurableOptions::default() });
    store.put(record("a", "", 1), 0).await.unwrap();
    fails.store(true, SeqCst);
    assert!(matches!(store.put(record("a", "", 2), 1).await, Err(StoreError::Unavailable(_))));
    assert_eq!(store.health(), StoreHealth::Failing);
    assert_eq!(store.get("a", "").await.unwrap().unwrap().version, 1, "reads go on");
    fails.store(false, SeqCst);
    assert_eq!(store.put(record("a", "", 2), 1).await.unwrap(), ShadowPut::Written);
    assert_eq!(store.health(), StoreHealth::Sound);
}

#[tokio::test]
async fn what_waits_for_a_disk_that_stands_still_is_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let gate = Arc::new(parking_lot::RwLock::new(()));
    let hook = Arc::clone(&gate);
    let hook: super::super::CommitHook = Arc::new(move || {
        drop(hook.read());
        Ok(())
    });
    let options = DurableOptions { hook: Some(hook), max_waiting_bytes: 20_000, ..DurableOptions::default() };
    let store = open(dir.path(), &options);
    let stalled = gate.write();
    let device = |number: usize| format!("d{number}");
    let mut waiting = Vec::new();
    let refused = loop {
        assert!(waiting.len() < 1000, "it is bounded");
        let mut put = store.put(record(&device(waiting.len()), "", 1), 0);
        match at_once(&mut put) {
            Some(result) => break result,
            None => waiting.push(put),
        }
    };
    assert!(matches!(refused, Err(StoreError::Unavailable(_))));
    drop(stalled);
    for put in waiting {
        assert_eq!(put.await.unwrap(), ShadowPut::Written);
    }
}

/// The result if it is there at once.
fn at_once<T>(future: &mut BoxFuture<'_, T>) -> Option<T> {
    match future.as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop())) {
        std::task::Poll::Ready(value) => Some(value),
        std::task::Poll::Pending => None,
    }
}

/// It would begin at version 1 again, and a device would take what is newer for older.
#[tokio::test]
async fn a_damaged_shadow_is_not_taken_for_one_that_is_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), &DurableOptions::default());
    for name in ["", "x"] {
        store.put(record("a", name, 1), 0).await.unwrap();
    }
    store.environment.writing(|txn| store.table.put(txn, &keys::name("a", ""), b"damaged")).unwrap();
    assert!(matches!(store.get("a", "").await, Err(StoreError::Damaged(_))));
    assert_eq!(store.put(record("a", "", 1), 0).await.unwrap(), ShadowPut::Conflict);
    assert_eq!(names(&store, "a", 9).await, [("x".to_owned(), 1, true)]);
}
