//! Suite that every [`ShadowStore`] must pass. Each backend runs all of it.

use std::sync::Arc;

use bytes::Bytes;
use gateway_core::{ClientId, Timestamp};

use crate::{MAX_SHADOW_DEVICE, MAX_SHADOW_NAME, ShadowPut, ShadowRecord, ShadowStore};

pub fn record(device: &str, name: &str, version: u64) -> ShadowRecord {
    ShadowRecord {
        device: ClientId::new(device),
        name: Arc::from(name),
        version,
        changed: Timestamp(1_700_000_000_000 + version),
        document: Some(Bytes::from(format!("{device} {name} {version}"))),
    }
}

fn deleted(device: &str, name: &str, version: u64) -> ShadowRecord {
    ShadowRecord { document: None, ..record(device, name, version) }
}

/// Names, versions, and whether there is a document, of all records, read `limit` at a time.
pub async fn names(store: &dyn ShadowStore, device: &str, limit: usize) -> Vec<(String, u64, bool)> {
    let mut all: Vec<ShadowRecord> = Vec::new();
    loop {
        let after = all.last().map(|record| record.name.to_string());
        let some = store.list(device, after.as_deref(), limit, false).await.unwrap();
        assert!(some.len() <= limit);
        if some.is_empty() {
            let short = |record: ShadowRecord| {
                assert!(
                    record.device.as_str() == device && record.document.as_ref().is_none_or(Bytes::is_empty)
                );
                (record.name.to_string(), record.version, record.document.is_some())
            };
            return all.into_iter().map(short).collect();
        }
        all.extend(some);
    }
}

/// Runs the whole suite on an empty store.
pub async fn run(store: &Arc<dyn ShadowStore>) {
    every_field_comes_back(store.as_ref()).await;
    a_write_needs_the_version_it_was_made_from(store.as_ref()).await;
    a_deleted_shadow_keeps_its_version_until_it_is_forgotten(store.as_ref()).await;
    a_device_has_its_own_in_the_order_of_their_names(store.as_ref()).await;
    the_longest_names_and_a_large_document_fit(store.as_ref()).await;
    of_many_at_once_each_is_made_once(store).await;
}

async fn every_field_comes_back(store: &dyn ShadowStore) {
    assert_eq!(store.get("a", "").await.unwrap(), None);
    for name in ["", "n", "n2"] {
        let record = record("a", name, 1);
        assert_eq!(store.put(record.clone(), 0).await.unwrap(), ShadowPut::Written);
        assert_eq!(store.get("a", name).await.unwrap(), Some(record));
    }
    assert_eq!(store.get("a", "n3").await.unwrap(), None);
    assert_eq!(store.get("b", "").await.unwrap(), None);
    let empty = ShadowRecord { document: Some(Bytes::new()), ..record("a", "", 2) };
    assert_eq!(store.put(empty.clone(), 1).await.unwrap(), ShadowPut::Written);
    assert_eq!(store.get("a", "").await.unwrap(), Some(empty), "an empty document is one");
}

async fn a_write_needs_the_version_it_was_made_from(store: &dyn ShadowStore) {
    let first = record("v", "", 1);
    assert_eq!(store.put(first.clone(), 7).await.unwrap(), ShadowPut::Conflict, "there is none");
    assert_eq!(store.get("v", "").await.unwrap(), None);
    assert_eq!(store.put(first.clone(), 0).await.unwrap(), ShadowPut::Written);
    for expected in [0, 2, u64::from(u32::MAX)] {
        assert_eq!(store.put(record("v", "", 3), expected).await.unwrap(), ShadowPut::Conflict);
        assert_eq!(store.get("v", "").await.unwrap(), Some(first.clone()));
    }
    assert_eq!(store.put(record("v", "", 2), 1).await.unwrap(), ShadowPut::Written);
    assert_eq!(store.put(record("v", "", 2), 1).await.unwrap(), ShadowPut::Conflict, "not twice");
    assert_eq!(store.put(record("v", "", 9), 2).await.unwrap(), ShadowPut::Written, "the caller counts");
    assert_eq!(store.get("v", "").await.unwrap(), Some(record("v", "", 9)));
}

async fn a_deleted_shadow_keeps_its_version_until_it_is_forgotten(store: &dyn ShadowStore) {
    assert_eq!(store.put(record("d", "x", 1), 0).await.unwrap(), ShadowPut::Written);
    assert_eq!(store.forget("d", "x", 1).await.unwrap(), ShadowPut::Conflict, "it is not deleted");
    assert_eq!(store.put(deleted("d", "x", 2), 1).await.unwrap(), ShadowPut::Written);
    assert_eq!(store.get("d", "x").await.unwrap(), Some(deleted("d", "x", 2)));
    assert_eq!(names(store, "d", 10).await, [("x".to_owned(), 2, false)]);
    assert_eq!(store.put(record("d", "x", 1), 0).await.unwrap(), ShadowPut::Conflict);
    assert_eq!(store.put(record("d", "x", 3), 2).await.unwrap(), ShadowPut::Written);
    assert_eq!(store.put(deleted("d", "x", 4), 3).await.unwrap(), ShadowPut::Written);
    assert_eq!(store.forget("d", "x", 3).await.unwrap(), ShadowPut::Conflict);
    assert_eq!(store.forget("d", "x", 4).await.unwrap(), ShadowPut::Written);
    assert_eq!(store.forget("d", "x", 4).await.unwrap(), ShadowPut::Conflict);
    assert_eq!(store.get("d", "x").await.unwrap(), None);
    assert_eq!(names(store, "d", 10).await, []);
    assert_eq!(store.put(record("d", "x", 1), 0).await.unwrap(), ShadowPut::Written, "it begins anew");
}

async fn a_device_has_its_own_in_the_order_of_their_names(store: &dyn ShadowStore) {
    for device in ["l", "l/m", "l ", "k", "m"] {
        for number in (0..20).rev() {
            let name = if number == 0 { String::new() } else { format!("n{number:02}") };
            assert_eq!(store.put(record(device, &name, 1), 0).await.unwrap(), ShadowPut::Written);
        }
    }
    for limit in [1, 7, 100] {
        let found = names(store, "l", limit).await;
        assert_eq!(found.len(), 20, "{limit}");
        assert!(found.is_sorted() && found[0].0.is_empty());
    }
    let all = store.list("l", None, 2, true).await.unwrap();
    assert_eq!(all, [record("l", "", 1), record("l", "n01", 1)]);
    assert_eq!(store.list("l", Some("n17a"), 9, true).await.unwrap().len(), 2);
    assert_eq!(store.list("nobody", None, 9, true).await.unwrap(), []);
}

async fn the_longest_names_and_a_large_document_fit(store: &dyn ShadowStore) {
    let (device, name) = ("d".repeat(MAX_SHADOW_DEVICE), "n".repeat(MAX_SHADOW_NAME));
    let document = Some(Bytes::from(vec![b'x'; 300_000]));
    let large = ShadowRecord { document, ..record(&device, &name, 1) };
    assert_eq!(store.put(large.clone(), 0).await.unwrap(), ShadowPut::Written);
    assert_eq!(store.get(&device, &name).await.unwrap(), Some(large.clone()));
    assert_eq!(store.list(&device, None, 9, true).await.unwrap(), [large]);
}

/// An update would otherwise be lost.
async fn of_many_at_once_each_is_made_once(store: &Arc<dyn ShadowStore>) {
    let add = |store: Arc<dyn ShadowStore>| async move {
        for _ in 0..5 {
            loop {
                let there = store.get("count", "").await.unwrap();
                let version = there.map_or(0, |there| there.version);
                if store.put(record("count", "", version + 1), version).await.unwrap() == ShadowPut::Written {
                    break;
                }
            }
        }
    };
    let tasks: Vec<_> = (0..4).map(|_| tokio::spawn(add(Arc::clone(store)))).collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(store.get("count", "").await.unwrap().unwrap().version, 20);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MemoryRecords, RecordShadows, StoreError};

    #[tokio::test]
    async fn memory() {
        let records = Arc::new(MemoryRecords::new());
        run(&(Arc::new(RecordShadows::new(records)) as Arc<dyn ShadowStore>)).await;
    }

    #[tokio::test]
    async fn memory_that_is_held_and_fails() {
        let records = Arc::new(MemoryRecords::new());
        let store = Arc::new(RecordShadows::new(Arc::clone(&records) as _));
        records.hold(true);
        let held = Arc::clone(&store);
        let put = tokio::spawn(async move { held.put(record("a", "", 1), 0).await });
        tokio::task::yield_now().await;
        assert!(!put.is_finished());
        records.fail(true);
        records.hold(false);
        assert!(matches!(put.await.unwrap(), Err(StoreError::Unavailable(_))));
        records.fail(false);
        assert_eq!(store.get("a", "").await.unwrap(), None);
    }
}
