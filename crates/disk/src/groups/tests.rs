//! The suite on LMDB, and what is LMDB's own: restarts, damage, a disk that fails.

use std::{
    io,
    path::Path,
    sync::atomic::{AtomicBool, Ordering::SeqCst},
};

use super::{keys::EPOCH, *};
use store::suite::group_state::{self as suite, own, records, set};

const G: GroupId = GroupId(7);

fn open(dir: &Path, options: &DurableOptions) -> EmbeddedGroupState {
    EmbeddedGroupState::open(&DataDir::open(dir).unwrap(), options).unwrap()
}

#[tokio::test]
async fn the_suite() {
    let dir = tempfile::tempdir().unwrap();
    suite::run(&open(dir.path(), &DurableOptions::default())).await;
}

#[tokio::test]
async fn records_and_epochs_are_there_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let mut last = Epoch(0);
    for round in 0..3 {
        let state = open(dir.path(), &DurableOptions::default());
        let epoch = own(&state, G).await;
        assert!(epoch > last);
        assert!(matches!(state.write(G, last, vec![set("a", "old")]).await, Err(StateError::Fenced)));
        last = epoch;
        assert_eq!(records(&state, G, "", 10).await.len(), round);
        state.write(G, epoch, vec![set(&round.to_string(), "x")]).await.unwrap();
        assert_eq!(state.groups().await.unwrap(), [G]);
    }
}

#[tokio::test]
async fn a_failed_commit_is_told_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let fails = Arc::new(AtomicBool::new(false));
    let disk = Arc::clone(&fails);
    let hook = move || if disk.load(SeqCst) { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) };
    let state = open(dir.path(), &DurableOptions { hook: Some(Arc::new(hook)), ..DurableOptions::default() });
    let epoch = own(&state, G).await;
    fails.store(true, SeqCst);
    assert!(matches!(state.write(G, epoch, vec![set("a", "1")]).await, Err(StateError::Store(_))));
    assert!(state.acquire(G, epoch).await.is_err());
    assert_eq!(state.health(), StoreHealth::Failing);
    assert_eq!(records(&state, G, "", 10).await, []);
    fails.store(false, SeqCst);
    state.write(G, epoch, vec![set("a", "2")]).await.unwrap();
    assert_eq!(state.health(), StoreHealth::Sound);
}

#[tokio::test]
async fn what_waits_is_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let gate = Arc::new(parking_lot::Mutex::new(()));
    let disk = Arc::clone(&gate);
    let hook = move || {
        drop(disk.lock());
        Ok(())
    };
    let options = DurableOptions {
        max_waiting_bytes: 100_000,
        hook: Some(Arc::new(hook)),
        ..DurableOptions::default()
    };
    let state = open(dir.path(), &options);
    let epoch = own(&state, G).await;
    let stopped = gate.lock();
    let value = "x".repeat(1_000);
    let writes: Vec<_> = (0..1_000).map(|_| state.write(G, epoch, vec![set("a", &value)])).collect();
    drop(stopped);
    let mut made = 0;
    for write in writes {
        match write.await {
            Ok(()) => made += 1,
            Err(error) => assert!(matches!(error, StateError::Store(_)), "{error}"),
        }
    }
    assert!((50..200).contains(&made), "{made}");
    state.write(G, epoch, vec![set("a", "small")]).await.unwrap();
}

#[tokio::test]
async fn a_damaged_record_is_left_out_and_is_not_what_was_expected() {
    let dir = tempfile::tempdir().unwrap();
    let state = open(dir.path(), &DurableOptions::default());
    let epoch = own(&state, G).await;
    state.write(G, epoch, vec![set("a", "1"), set("b", "1")]).await.unwrap();
    let damage = |txn: &mut heed::RwTxn<'_>, name: &[u8]| {
        let key = key(G, if name.is_empty() { EPOCH } else { RECORD }, name);
        let mut value = state.table.get(txn, &key)?.unwrap().to_vec();
        *value.last_mut().unwrap() ^= 1;
        state.table.put(txn, &key, &value)
    };
    state.environment.writing(|txn| damage(txn, b"a")).unwrap();
    assert_eq!(records(&state, G, "", 10).await, [("b".into(), "1".into())]);
    let expected = StateChange { expect: store::Expect::Value(Bytes::from("1")), ..set("a", "2") };
    assert!(matches!(state.write(G, epoch, vec![expected]).await, Err(StateError::Conflict)));
    state.environment.writing(|txn| damage(txn, b"")).unwrap();
    assert!(matches!(state.write(G, epoch, vec![set("a", "2")]).await, Err(StateError::Fenced)));
    assert!(own(&state, G).await > epoch);
}
