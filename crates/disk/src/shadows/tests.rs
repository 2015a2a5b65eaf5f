//! The suite on LMDB, and what is LMDB's own: restarts, damage, a disk that fails.

use std::{
    io,
    path::Path,
    sync::atomic::{AtomicBool, Ordering::SeqCst},
};

use super::*;
use store::suite::shadows::{self as suite, names, record};

fn open(dir: &Path, options: &DurableOptions) -> EmbeddedShadows {
    EmbeddedShadows::open(&DataDir::open(dir).unwrap(), options, u64::MAX).unwrap()
}

fn open_small(dir: &Path, max_bytes: u64) -> EmbeddedShadows {
    let options = DurableOptions::default();
    EmbeddedShadows::open(&DataDir::open(dir).unwrap(), &options, max_bytes).unwrap()
}

fn large(device: &str, name: &str, version: u64, bytes: usize) -> ShadowRecord {
    ShadowRecord { document: Some(vec![b'x'; bytes].into()), ..record(device, name, version) }
}

/// Before, 8 clients that came again and again under new ids wrote 79 MB in 10 s.
#[tokio::test]
async fn ever_new_devices_fill_no_more_than_the_bound() {
    const MOST: u64 = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    let store = open_small(dir.path(), MOST);
    store.put(large("old", "", 1, 1_000), 0).await.unwrap();
    let mut full = 0;
    for number in 0..1_500 {
        match store.put(large(&format!("d{number}"), "", 1, 1_000), 0).await.unwrap() {
            ShadowPut::Written => assert_eq!(full, 0, "once full it stays so"),
            ShadowPut::Full => full += 1,
            ShadowPut::Conflict => panic!("{number} is new"),
        }
        assert!(store.stored_bytes() <= MOST, "{}", store.stored_bytes());
    }
    assert!(full > 0);
    // Changes that need no more room go on, and deletions make some.
    assert_eq!(store.put(large("old", "", 2, 900), 1).await.unwrap(), ShadowPut::Written);
    for number in 0..50 {
        let gone = ShadowRecord { document: None, ..record(&format!("d{number}"), "", 2) };
        assert_eq!(store.put(gone, 1).await.unwrap(), ShadowPut::Written);
    }
    assert_eq!(store.put(large("new", "", 1, 1_000), 0).await.unwrap(), ShadowPut::Written);
    drop(store);
    let store = open_small(dir.path(), MOST);
    assert!(store.stored_bytes() > MOST / 2, "what is there counts after a restart");
    assert_eq!(store.put(large("newer", "", 1, 200_000), 0).await.unwrap(), ShadowPut::Full);
}

#[tokio::test]
async fn one_device_leaves_room_for_others() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_small(dir.path(), 1 << 20);
    let mut taken = 0;
    while store.put(large("greedy", &format!("n{taken}"), 1, 3_000), 0).await.unwrap() == ShadowPut::Written {
        taken += 1;
        assert!(taken < 1_000);
    }
    assert!(taken > 50, "{taken}");
    assert_eq!(store.put(large("another", "", 1, 3_000), 0).await.unwrap(), ShadowPut::Written);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_suite() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn ShadowStore> = Arc::new(open(dir.path(), &DurableOptions::default()));
    suite::run(&store).await;
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

/// Checks that a damaged shadow is not taken for an absent one: it would begin at version 1 again, and a device would take newer
/// versions for older ones.
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
