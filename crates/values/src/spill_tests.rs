//! The spill: what the store does not take is kept on this machine, seen by reads, and written later.

use std::{
    path::Path,
    sync::{Arc, atomic::Ordering::SeqCst},
    time::Duration,
};

use disk::{EmbeddedLatest, EmbeddedOptions};
use gateway_core::{ClientId, Timestamp};
use store::{
    DataDir, LatestQuery, LatestStore, LatestValue, Recorder as _, SpillStore, VersionClock,
    counters::totals, suite::latest::value, version_offset,
};
use tokio::sync::watch;

use super::{
    tests::{Flaky, NOW, list_all, payload, record},
    *,
};

fn open(dir: &Path) -> Arc<EmbeddedLatest> {
    let data = DataDir::open(dir).unwrap();
    Arc::new(EmbeddedLatest::open(&data, &EmbeddedOptions::default()).unwrap())
}

fn latest(store: &Arc<Flaky>, spill: &Arc<EmbeddedLatest>, options: LatestOptions) -> Arc<LatestCache> {
    LatestCache::with_spill(Arc::clone(store) as _, Some(Arc::clone(spill) as _), options)
}

fn brief() -> LatestOptions {
    LatestOptions {
        flush_interval: Duration::from_millis(1),
        last_write: Duration::from_millis(10),
        // A write that hangs should hang the test.
        write_timeout: Duration::from_secs(24 * 3600),
        ..LatestOptions::default()
    }
}

async fn end(latest: &Arc<LatestCache>) {
    Arc::clone(latest).run(watch::channel(true).1).await;
}

/// Runs until nothing waits anywhere.
async fn settle(latest: &Arc<LatestCache>) {
    let (stop, stopped) = watch::channel(false);
    let task = tokio::spawn(Arc::clone(latest).run(stopped));
    let waits = || {
        let gauges = latest.gauges();
        gauges.pending_values + gauges.spilled > 0
    };
    while waits() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    stop.send(true).unwrap();
    task.await.unwrap();
}

#[tokio::test]
async fn a_deleted_value_returns_from_neither_memory_spill_nor_store() {
    let dir = tempfile::tempdir().unwrap();
    let store = Flaky::new();
    store.away.store(true, SeqCst);
    {
        let latest = latest(&store, &open(dir.path()), brief());
        record(&latest, "d", "t/spilled", b"1");
        record(&latest, "other", "t/spilled", b"1");
        end(&latest).await;
    }
    store.away.store(false, SeqCst);
    let latest = latest(&store, &open(dir.path()), brief());
    assert_eq!(latest.gauges().spilled, 2);
    record(&latest, "d", "t/written", b"1");
    latest.flush().await.unwrap();
    record(&latest, "d", "t/written", b"2");
    record(&latest, "d", "t/waiting", b"1");
    record(&latest, "d", "kept", b"1");

    store.away.store(true, SeqCst);
    assert!(latest.delete("d", "t/#", NOW).await.is_err(), "the store could bring it back");
    store.away.store(false, SeqCst);
    let mut deleted = latest.delete("d", "t/#", NOW).await.unwrap();
    deleted.sort();
    assert_eq!(
        deleted.iter().map(|topic| &**topic).collect::<Vec<_>>(),
        ["t/spilled", "t/waiting", "t/written"]
    );
    for round in 0..2 {
        for topic in ["t/spilled", "t/written", "t/waiting"] {
            assert_eq!(payload(&latest, topic, Some("d")).await, None, "{topic} {round}");
        }
        settle(&latest).await;
    }
    assert_eq!(payload(&latest, "kept", Some("d")).await.as_deref(), Some(&b"1"[..]));
    assert_eq!(payload(&latest, "t/spilled", Some("other")).await.as_deref(), Some(&b"1"[..]));
    record(&latest, "d", "t/waiting", b"again");
    assert_eq!(payload(&latest, "t/waiting", Some("d")).await.as_deref(), Some(&b"again"[..]));
    assert!(latest.delete("nobody", "#", NOW).await.unwrap().is_empty());
}

#[tokio::test]
async fn what_shutdown_leaves_is_written_after_the_next_start_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let store = Flaky::new();
    let mut versions = Vec::new();
    {
        let latest = latest(&store, &open(dir.path()), brief());
        store.away.store(true, SeqCst);
        for n in 0..3000 {
            record(&latest, &format!("d{}", n % 7), &format!("t/{n}"), b"1");
        }
        assert!(latest.flush().await.is_err());
        for value in list_all_pending(&latest).await {
            versions.push((value.device, value.topic, value.version));
        }
        end(&latest).await;
        let gauges = latest.gauges();
        assert_eq!((gauges.pending_values, gauges.spilled), (0, 3000));
    }
    let spill = open(dir.path());
    let latest = latest(&store, &spill, brief());
    assert_eq!(latest.gauges().spilled, 3000);
    store.away.store(false, SeqCst);
    settle(&latest).await;
    assert_eq!(spill.count(), 0, "what is in the store is not kept twice");
    assert_eq!(versions.len(), 3000);
    for (device, topic, version) in versions {
        let stored = store.inner.get(&topic, Some(device.as_str())).await.unwrap().unwrap();
        assert_eq!(stored.version, version);
    }
}

async fn list_all_pending(latest: &LatestCache) -> Vec<LatestValue> {
    let mut values = Vec::new();
    for n in 0..3000 {
        values.extend(latest.get(&format!("t/{n}"), Some(&format!("d{}", n % 7))).await.unwrap());
    }
    values
}

#[tokio::test]
async fn a_replay_moves_no_value_back_and_reads_see_the_newest_meanwhile() {
    let dir = tempfile::tempdir().unwrap();
    let store = Flaky::new();
    let spill = open(dir.path());
    let first = latest(&store, &spill, brief());
    store.away.store(true, SeqCst);
    for topic in ["a", "b", "c"] {
        record(&first, "d", topic, b"old");
    }
    end(&first).await;
    let second = latest(&store, &spill, LatestOptions { version_start: u64::MAX / 2, ..brief() });
    record(&second, "d", "a", b"new");
    record(&second, "e", "b", b"new");
    assert!(second.flush().await.is_err());
    assert_eq!(payload(&second, "a", Some("d")).await.unwrap(), b"new");
    assert_eq!(payload(&second, "b", Some("d")).await.unwrap(), b"old", "a read finds what was spilled");
    assert_eq!(payload(&second, "b", None).await.unwrap(), b"new");
    assert_eq!(payload(&second, "c", None).await.unwrap(), b"old");
    store.away.store(false, SeqCst);
    second.flush().await.unwrap();
    let query = LatestQuery { limit: 2, ..LatestQuery::default() };
    let listed = list_all(&second, query).await;
    let seen: Vec<_> = listed.iter().map(|v| (v.device.as_str(), &*v.topic, &v.payload[..])).collect();
    let wanted: [(&str, &str, &[u8]); 4] =
        [("d", "a", b"new"), ("d", "b", b"old"), ("d", "c", b"old"), ("e", "b", b"new")];
    assert_eq!(seen, wanted, "the list has memory, spill and store");
    settle(&second).await;
    assert_eq!(store.inner.get("a", Some("d")).await.unwrap().unwrap().payload, "new");
    assert_eq!(store.inner.get("b", Some("d")).await.unwrap().unwrap().payload, "old");
    assert_eq!(store.inner.get("b", None).await.unwrap().unwrap().payload, "new");
}

#[tokio::test]
async fn a_store_that_hangs_does_not_hold_up_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let store = Flaky::new();
    store.hangs.store(true, SeqCst);
    let spill = open(dir.path());
    let latest = latest(&store, &spill, brief());
    let (stop, stopped) = watch::channel(false);
    let task = tokio::spawn(Arc::clone(&latest).run(stopped));
    record(&latest, "d", "t", b"1");
    while store.upserts.load(SeqCst) == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    record(&latest, "d", "t", b"2");
    stop.send(true).unwrap();
    task.await.unwrap();
    assert_eq!(spill.get("t", Some("d")).await.unwrap().unwrap().payload, "2");
}

#[tokio::test]
async fn a_spill_while_running_gives_memory_back_and_loses_no_value() {
    let dir = tempfile::tempdir().unwrap();
    let store = Flaky::new();
    store.away.store(true, SeqCst);
    let options = LatestOptions { max_bytes: 100_000, spill_running: true, ..brief() };
    let latest = latest(&store, &open(dir.path()), options);
    let (stop, stopped) = watch::channel(false);
    let task = tokio::spawn(Arc::clone(&latest).run(stopped));
    let mut sent = 0;
    while sent < 1000 || latest.gauges().spilled == 0 {
        while latest.gauges().pending_bytes < 90_000 && sent < 1000 {
            record(&latest, "d", &format!("t/{sent}"), &[1; 500]);
            sent += 1;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    record(&latest, "d", "t/0", b"newest");
    store.away.store(false, SeqCst);
    stop.send(true).unwrap();
    task.await.unwrap();
    settle(&latest).await;
    assert_eq!(store.inner.get("t/0", Some("d")).await.unwrap().unwrap().payload, "newest");
    for n in 1..1000 {
        assert!(store.inner.get(&format!("t/{n}"), Some("d")).await.unwrap().is_some(), "t/{n} is lost");
    }
}

/// With one small commit after the other the end did not come to all of them in its time.
#[tokio::test]
async fn values_go_to_the_spill_in_large_commits_so_the_end_finds_few() {
    let dir = tempfile::tempdir().unwrap();
    let store = Flaky::new();
    store.away.store(true, SeqCst);
    let spill = open(dir.path());
    let latest = latest(&store, &spill, brief());
    let (stop, stopped) = watch::channel(false);
    let task = tokio::spawn(Arc::clone(&latest).run(stopped));
    record(&latest, "d", "first", b"x");
    while latest.gauges().spilled == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    for n in 0..30_000 {
        record(&latest, &format!("d{}", n % 100), &format!("t/{n}"), b"x");
    }
    while latest.gauges().pending_values > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(latest.gauges().spilled, 30_001, "before anybody asked for the end");
    record(&latest, "d", "last", b"x");
    stop.send(true).unwrap();
    task.await.unwrap();
    assert_eq!((latest.gauges().pending_values, spill.count()), (0, 30_002));
    let commits = spill.commits();
    assert!(commits < 100, "{commits} commits");
}

/// Each restart while the database was away put as much again on the disk of sessions and queues, without an end.
#[tokio::test]
async fn no_number_of_restarts_makes_the_spill_larger_than_its_bound() {
    let dir = tempfile::tempdir().unwrap();
    let store = Flaky::new();
    store.away.store(true, SeqCst);
    let spill = open(dir.path());
    let max_bytes = 200_000;
    let lost = totals().latest_dropped_shutdown;
    let (mut kept, mut sent) = (0, 0);
    for process in 0..20 {
        let latest = latest(&store, &spill, LatestOptions { max_bytes, ..brief() });
        for n in 0..100 {
            record(&latest, &format!("d{process}"), &format!("t/{n}"), &[1; 1_000]);
            sent += 1;
        }
        end(&latest).await;
        kept = spill.count() as u64;
    }
    // Twice, and what one commit of the end adds.
    let bytes = SpillStore::bytes(&*spill);
    assert!(bytes < 3 * max_bytes as u64, "{bytes} bytes");
    assert!(kept >= 200, "{kept} values, as many as there is room for");
    assert!(totals().latest_dropped_shutdown - lost >= sent - kept, "what is lost is counted");
}

#[tokio::test]
async fn only_the_rest_of_a_batch_written_in_part_is_written_again() {
    let dir = tempfile::tempdir().unwrap();
    let store = Flaky::new();
    let latest = latest(&store, &open(dir.path()), brief());
    for n in 0..101 {
        record(&latest, "d", &format!("t/{n}"), b"x");
    }
    store.partly.store(true, SeqCst);
    assert!(latest.flush().await.is_err());
    assert_eq!((store.written.load(SeqCst), latest.gauges().pending_values), (51, 50));
    assert!(!latest.healthy());
    end(&latest).await;
    assert_eq!(latest.gauges().spilled, 50);
    let (stop, stopped) = watch::channel(false);
    let task = tokio::spawn(Arc::clone(&latest).run(stopped));
    while latest.gauges().spilled == 50 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    stop.send(true).unwrap();
    task.await.unwrap();
    store.partly.store(false, SeqCst);
    settle(&latest).await;
    assert_eq!(store.written.load(SeqCst), 101, "each value once");
    for n in 0..101 {
        assert!(store.inner.get(&format!("t/{n}"), Some("d")).await.unwrap().is_some(), "t/{n} is lost");
    }
}

#[tokio::test]
async fn a_removal_leaves_what_is_newer() {
    let dir = tempfile::tempdir().unwrap();
    let spill = open(dir.path());
    let value = |device: &str, version| value(device, "t", version);
    spill.upsert(Arc::from([value("d", 2), value("e", 1)])).await.unwrap();
    spill.remove(Arc::from([value("d", 1), value("x", 9)])).await.unwrap();
    assert_eq!(spill.get("t", Some("d")).await.unwrap().unwrap().version, 2);
    assert_eq!(spill.get("t", None).await.unwrap().unwrap().version, 2);
    spill.remove(Arc::from([value("d", 2)])).await.unwrap();
    assert!(spill.get("t", Some("d")).await.unwrap().is_none());
    assert!(spill.get("t", None).await.unwrap().is_none(), "the newest is what was removed");
    assert_eq!(spill.count(), 1);
    spill.upsert(Arc::from([value("d", 1)])).await.unwrap();
    assert_eq!(spill.get("t", Some("d")).await.unwrap().unwrap().version, 1, "removed is not remembered");
}

#[tokio::test(start_paused = true)]
async fn many_failures_change_condition_once_and_an_idle_store_is_watched() {
    let store = Flaky::new();
    let options = LatestOptions { probe: Some(Duration::from_secs(2)), ..LatestOptions::default() };
    let latest = LatestCache::new(Arc::clone(&store) as _, options);
    let mut condition = latest.condition();
    assert!(!latest.healthy() && condition.borrow_and_update().trouble().is_some(), "nothing is known yet");
    let (stop, stopped) = watch::channel(false);
    let task = tokio::spawn(Arc::clone(&latest).run(stopped));
    condition.changed().await.unwrap();
    assert_eq!(*condition.borrow_and_update(), StoreCondition::Up);
    store.away.store(true, SeqCst);
    // Nothing is written: only a sign of life is missing.
    condition.changed().await.unwrap();
    assert!(condition.borrow_and_update().trouble().unwrap().contains("away"));
    record(&latest, "d", "t", b"1");
    while store.upserts.load(SeqCst) < 20 {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert!(!condition.has_changed().unwrap(), "a failure after another is no news");
    store.away.store(false, SeqCst);
    condition.changed().await.unwrap();
    assert_eq!(*condition.borrow_and_update(), StoreCondition::Up);
    stop.send(true).unwrap();
    task.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_store_too_slow_for_a_whole_batch_gets_smaller_ones() {
    let store = Flaky::new();
    store.most.store(200, SeqCst);
    let latest = LatestCache::new(Arc::clone(&store) as _, LatestOptions::default());
    for n in 0..5000 {
        record(&latest, &format!("d{}", n % 100), &format!("t/{n}"), b"x");
    }
    let (stop, stopped) = watch::channel(false);
    let task = tokio::spawn(Arc::clone(&latest).run(stopped));
    let written = async {
        while latest.gauges().pending_values > 0 {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    };
    // Virtual: for ever.
    tokio::time::timeout(Duration::from_secs(24 * 3600), written).await.unwrap();
    stop.send(true).unwrap();
    task.await.unwrap();
}

#[tokio::test]
async fn the_oldest_value_waits_from_when_it_came_until_it_is_written() {
    let store = Flaky::new();
    let latest = LatestCache::new(Arc::clone(&store) as _, LatestOptions::default());
    let at = |seconds: u64| Timestamp(NOW.0 + seconds * 1000);
    let record = |topic: &str, seconds| {
        let device = ClientId::new("d");
        let origin = gateway_core::Origin {
            kind: gateway_core::OriginKind::Device,
            client_id: Some(&device),
            slot: 1,
        };
        latest.record(
            &gateway_core::Message::new(topic, b"x", at(seconds), origin),
            &mut gateway_core::Effort::default(),
        );
    };
    assert!(latest.oldest_pending(NOW).is_zero());
    record("a", 0);
    record("b", 3);
    record("a", 5);
    assert_eq!(latest.oldest_pending(at(10)), Duration::from_secs(10));
    store.away.store(true, SeqCst);
    assert!(latest.flush().await.is_err());
    record("a", 6);
    assert_eq!(latest.oldest_pending(at(10)), Duration::from_secs(10), "a failed write changes nothing");
    store.away.store(false, SeqCst);
    latest.flush().await.unwrap();
    assert!(latest.oldest_pending(at(10)).is_zero());
    record("b", 9);
    assert_eq!(latest.oldest_pending(at(10)), Duration::from_secs(1));
}

#[tokio::test]
async fn with_memory_reads_an_absent_store_is_an_empty_one() {
    let store = Flaky::new();
    store.away.store(true, SeqCst);
    let options = LatestOptions { memory_reads: true, ..LatestOptions::default() };
    let latest = LatestCache::new(Arc::clone(&store) as _, options);
    record(&latest, "d", "t", b"1");
    for _ in 0..2 {
        assert_eq!(payload(&latest, "t", Some("d")).await.unwrap(), b"1");
        assert_eq!(payload(&latest, "u", Some("d")).await, None);
        assert_eq!(list_all(&latest, LatestQuery { limit: 10, ..LatestQuery::default() }).await.len(), 1);
        // Before the failure is known, and after.
        assert!(latest.flush().await.is_err());
    }
}

#[test]
fn gateways_on_one_store_give_a_millisecond_different_versions() {
    let offsets = ["a", "b"].map(version_offset);
    assert!(offsets[0] != offsets[1] && offsets.iter().all(|offset| *offset < 1000));
    let [a, b] = offsets.map(|offset| VersionClock::new(0, offset).next(NOW));
    assert!(a != b && a / 1000 == NOW.0 && b / 1000 == NOW.0);
}
