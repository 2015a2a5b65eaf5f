//! Write-behind: what `LatestCache` promises whatever the store does.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use gateway_core::{ClientId, Effort, Message, Origin, OriginKind, Timestamp};
use parking_lot::Mutex;
use store::{
    BoxFuture, DataDir, HistoryQuery, LatestPage, LatestQuery, LatestStore, LatestValue, MemoryHistory,
    MemoryLatest, Recorder as _, StoreError, VersionMark, suite::latest as stores,
};
use tokio::sync::watch;

use super::*;

pub(super) const NOW: Timestamp = Timestamp(1_700_000_000_000);

/// A memory store that can be away.
pub(super) struct Flaky {
    pub(super) inner: MemoryLatest,
    pub(super) away: AtomicBool,
    /// Neither answers nor fails.
    pub(super) hangs: AtomicBool,
    /// Of each batch only every other value is written.
    pub(super) partly: AtomicBool,
    /// Larger batches hang.
    pub(super) most: AtomicUsize,
    pub(super) upserts: AtomicUsize,
    pub(super) written: AtomicUsize,
}

impl Flaky {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            inner: MemoryLatest::new(10_000),
            away: AtomicBool::new(false),
            hangs: AtomicBool::new(false),
            partly: AtomicBool::new(false),
            most: AtomicUsize::new(usize::MAX),
            upserts: AtomicUsize::new(0),
            written: AtomicUsize::new(0),
        })
    }

    async fn check(&self) -> Result<(), StoreError> {
        if self.hangs.load(SeqCst) {
            std::future::pending::<()>().await;
        }
        if self.away.load(SeqCst) { Err(StoreError::Unavailable("away".into())) } else { Ok(()) }
    }
}

impl LatestStore for Flaky {
    fn upsert(&self, batch: Arc<[LatestValue]>) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            self.upserts.fetch_add(1, SeqCst);
            tokio::task::yield_now().await;
            self.check().await?;
            if batch.len() > self.most.load(SeqCst) {
                std::future::pending::<()>().await;
            }
            let odd = |place: usize| self.partly.load(SeqCst) && place % 2 == 1;
            let poison = |place: &usize| odd(*place) || &*batch[*place].topic == "poison";
            let (unwritten, written): (Vec<_>, Vec<_>) = (0..batch.len()).partition(poison);
            self.written.fetch_add(written.len(), SeqCst);
            if !unwritten.is_empty() {
                let written: Vec<_> = written.into_iter().map(|place| batch[place].clone()).collect();
                self.inner.upsert(written.into()).await?;
                return Err(StoreError::Partly { unwritten, reason: "away".into() });
            }
            self.inner.upsert(batch).await
        })
    }

    fn remove(&self, batch: Arc<[LatestValue]>) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            self.check().await?;
            self.inner.remove(batch).await
        })
    }

    fn get<'a>(
        &'a self,
        topic: &'a str,
        device: Option<&'a str>,
    ) -> BoxFuture<'a, Result<Option<LatestValue>, StoreError>> {
        Box::pin(async move {
            self.check().await?;
            self.inner.get(topic, device).await
        })
    }

    fn list(&self, query: LatestQuery) -> BoxFuture<'_, Result<LatestPage, StoreError>> {
        Box::pin(async move {
            self.check().await?;
            self.inner.list(query).await
        })
    }
}

pub(super) fn record(latest: &LatestCache, device: &str, topic: &str, payload: &[u8]) {
    let device = ClientId::new(device);
    let origin = Origin { kind: OriginKind::Device, client_id: Some(&device), slot: 1 };
    latest.record(&Message::new(topic, payload, NOW, origin), &mut Effort::default());
}

/// The failure: a publisher of ever new topics has as many turns as one of a known topic, and keeps all others waiting.
#[tokio::test]
async fn a_new_topic_costs_its_publisher_effort() {
    let latest = LatestCache::new(Flaky::new(), LatestOptions::default());
    let device = ClientId::new("d");
    let origin = Origin { kind: OriginKind::Device, client_id: Some(&device), slot: 1 };
    let cost = |topic: &str| {
        let mut effort = Effort::default();
        latest.record(&Message::new(topic, b"x", NOW, origin), &mut effort);
        effort.spent()
    };
    assert_eq!(
        (cost("new"), cost("new"), cost("other")),
        (u64::from(Effort::VALUE), 0, u64::from(Effort::VALUE))
    );
}

pub(super) async fn payload(latest: &LatestCache, topic: &str, device: Option<&str>) -> Option<Vec<u8>> {
    latest.get(topic, device).await.unwrap().map(|value| value.payload.to_vec())
}

pub(super) async fn list_all(latest: &LatestCache, mut query: LatestQuery) -> Vec<LatestValue> {
    let mut all = Vec::new();
    loop {
        let page = latest.list(query.clone()).await.unwrap();
        all.extend(page.values);
        if page.next.is_empty() {
            return all;
        }
        query.page_token = page.next;
    }
}

#[tokio::test]
async fn the_suite_passes_in_memory() {
    stores::run(&MemoryLatest::new(40), 40, true).await;
}

#[tokio::test]
async fn reads_see_writes_before_and_after_the_flush() {
    let latest = LatestCache::new(Flaky::new(), LatestOptions::default());
    record(&latest, "d1", "t", b"1");
    record(&latest, "d2", "t", b"2");
    for _ in 0..2 {
        assert_eq!(payload(&latest, "t", Some("d1")).await.as_deref(), Some(&b"1"[..]));
        assert_eq!(payload(&latest, "t", None).await.as_deref(), Some(&b"2"[..]));
        assert_eq!(payload(&latest, "t", Some("d3")).await, None);
        latest.flush().await.unwrap();
    }
    assert_eq!(
        latest.gauges(),
        LatestGauges { pending_values: 0, pending_bytes: 0, spilled: 0, healthy: true }
    );
    record(&latest, "d1", "t", b"3");
    assert_eq!(payload(&latest, "t", None).await.as_deref(), Some(&b"3"[..]));
}

#[tokio::test]
async fn a_value_that_cannot_be_written_keeps_only_itself_waiting() {
    let store = Flaky::new();
    let latest = LatestCache::new(Arc::clone(&store) as Arc<dyn LatestStore>, LatestOptions::default());
    for n in 0..5000 {
        record(&latest, &format!("d{n}"), if n == 7 { "poison" } else { "t" }, b"1");
    }
    let partly = latest.flush().await;
    assert!(matches!(partly, Err(StoreError::Partly { .. })), "{partly:?}");
    assert_eq!((latest.gauges().pending_values, latest.healthy()), (1, false));
    assert_eq!(store.written.load(SeqCst), 4999);
    assert_eq!(payload(&latest, "poison", Some("d7")).await.as_deref(), Some(&b"1"[..]));
}

/// A store during whose writes all devices publish again.
#[derive(Default)]
struct Chased {
    latest: OnceLock<Arc<LatestCache>>,
    seen: Mutex<BTreeSet<Arc<str>>>,
}

impl Chased {
    const KEYS: usize = 10_000;

    fn publish(latest: &LatestCache) {
        for n in 0..Self::KEYS {
            record(latest, &format!("d{n}"), &format!("t{n}"), b"1");
        }
    }
}

impl LatestStore for Chased {
    fn upsert(&self, batch: Arc<[LatestValue]>) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            self.seen.lock().extend(batch.iter().map(|value| Arc::clone(&value.topic)));
            Self::publish(self.latest.get().unwrap());
            Ok(())
        })
    }

    fn remove(&self, _: Arc<[LatestValue]>) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async { Ok(()) })
    }

    fn get<'a>(
        &'a self,
        _: &'a str,
        _: Option<&'a str>,
    ) -> BoxFuture<'a, Result<Option<LatestValue>, StoreError>> {
        Box::pin(async { Ok(None) })
    }

    fn list(&self, _: LatestQuery) -> BoxFuture<'_, Result<LatestPage, StoreError>> {
        Box::pin(async { Ok(LatestPage::default()) })
    }
}

#[tokio::test]
async fn no_value_waits_for_ever_while_all_change_faster_than_they_are_written() {
    let store = Arc::new(Chased::default());
    let latest = LatestCache::new(Arc::clone(&store) as Arc<dyn LatestStore>, LatestOptions::default());
    assert!(store.latest.set(Arc::clone(&latest)).is_ok());
    Chased::publish(&latest);
    for _ in 0..10 {
        latest.flush().await.unwrap();
    }
    assert_eq!(store.seen.lock().len(), Chased::KEYS);
}

#[tokio::test]
async fn values_of_one_topic_coalesce() {
    let store = Flaky::new();
    let latest = LatestCache::new(Arc::clone(&store) as Arc<dyn LatestStore>, LatestOptions::default());
    for n in 0..1000u32 {
        record(&latest, "d", "t", &n.to_le_bytes());
    }
    assert_eq!(latest.gauges().pending_values, 1);
    latest.flush().await.unwrap();
    assert_eq!(store.written.load(SeqCst), 1);
    assert_eq!(payload(&latest, "t", Some("d")).await.unwrap(), 999u32.to_le_bytes());
    latest.flush().await.unwrap();
    assert_eq!(store.upserts.load(SeqCst), 1, "nothing to write, nothing written");
}

#[tokio::test]
async fn only_device_messages_on_included_topics_are_kept() {
    let options = LatestOptions { excluded: vec!["noise/#".into(), "+/raw".into()], ..Default::default() };
    let latest = LatestCache::new(Flaky::new(), options);
    for topic in ["noise", "noise/1", "a/raw", "$SYS/x"] {
        record(&latest, "d", topic, b"x");
    }
    for origin in [Origin::SERVER, Origin::BACKEND] {
        latest.record(&Message::new("t", b"x", NOW, origin), &mut Effort::default());
    }
    assert_eq!(latest.gauges().pending_values, 0);
    record(&latest, "d", "a/b", b"x");
    assert_eq!(latest.gauges().pending_values, 1);
}

#[tokio::test(start_paused = true)]
async fn an_outage_loses_nothing_that_fits() {
    let store = Flaky::new();
    let latest = LatestCache::new(Arc::clone(&store) as Arc<dyn LatestStore>, LatestOptions::default());
    let (stop, stopped) = watch::channel(false);
    let task = tokio::spawn(Arc::clone(&latest).run(stopped));
    store.away.store(true, SeqCst);
    for n in 0..5000 {
        record(&latest, &format!("d{}", n % 100), &format!("t/{n}"), b"old");
    }
    // Virtual time: the flusher runs whenever all else waits.
    while latest.healthy() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    for n in 0..2500 {
        record(&latest, &format!("d{}", n % 100), &format!("t/{n}"), b"newer");
    }
    assert_eq!(latest.gauges().pending_values, 5000);
    assert_eq!(payload(&latest, "t/7", Some("d7")).await.unwrap(), b"newer", "read while the store is away");
    store.away.store(false, SeqCst);
    stop.send(true).unwrap();
    task.await.unwrap();
    assert_eq!(
        latest.gauges(),
        LatestGauges { pending_values: 0, pending_bytes: 0, spilled: 0, healthy: true }
    );
    for n in 0..5000 {
        let value =
            store.inner.get(&format!("t/{n}"), Some(&format!("d{}", n % 100))).await.unwrap().unwrap();
        assert_eq!(&*value.payload, if n < 2500 { &b"newer"[..] } else { b"old" });
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_hangs_stalls_nothing_and_gets_everything_once_it_answers() {
    let store = Flaky::new();
    let latest = LatestCache::new(Arc::clone(&store) as Arc<dyn LatestStore>, LatestOptions::default());
    let (stop, stopped) = watch::channel(false);
    let task = tokio::spawn(Arc::clone(&latest).run(stopped));
    store.hangs.store(true, SeqCst);
    record(&latest, "d", "a", b"1");
    while latest.healthy() {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert!(store.upserts.load(SeqCst) >= 1);
    record(&latest, "d", "a", b"2");
    record(&latest, "d", "b", b"2");
    assert_eq!(payload(&latest, "a", Some("d")).await.unwrap(), b"2", "read while the store hangs");
    let unknown = latest.get("c", Some("d")).await;
    assert!(matches!(unknown, Err(StoreError::Unavailable(_))), "{unknown:?}");
    assert!(latest.list(LatestQuery { limit: 10, ..Default::default() }).await.is_err());
    let attempts = store.upserts.load(SeqCst);
    while store.upserts.load(SeqCst) < attempts + 2 {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(latest.gauges().pending_values, 2);
    store.hangs.store(false, SeqCst);
    while latest.gauges().pending_values > 0 {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert!(latest.healthy());
    assert_eq!(store.inner.get("a", Some("d")).await.unwrap().unwrap().payload, "2");
    stop.send(true).unwrap();
    task.await.unwrap();
}

/// The failure: each read waits for the whole `read_timeout`, as long as the database is away.
#[tokio::test(start_paused = true)]
async fn reads_fail_at_once_while_the_database_is_known_to_be_away() {
    let store = Flaky::new();
    let options = LatestOptions { probe: Some(Duration::from_secs(5)), ..LatestOptions::default() };
    let reads = Arc::clone(&options.reads);
    let history = History::new(
        Arc::new(MemoryHistory::default()),
        HistoryOptions { reads: Arc::clone(&reads), ..HistoryOptions::default() },
    );
    let latest = LatestCache::new(Arc::clone(&store) as Arc<dyn LatestStore>, options);
    let (stop, stopped) = watch::channel(false);
    let task = tokio::spawn(Arc::clone(&latest).run(stopped));
    let query = || LatestQuery { limit: 10, ..LatestQuery::default() };
    let asked = HistoryQuery {
        device: "d".to_owned(),
        topic: "a".to_owned(),
        from: Timestamp(0),
        to: NOW,
        oldest_first: true,
        limit: 10,
        page_token: String::new(),
    };
    for hangs in [true, false] {
        if hangs { &store.hangs } else { &store.away }.store(true, SeqCst);
        assert!(latest.get("a", Some("d")).await.is_err(), "it finds out");
        while reads.check().is_ok() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        record(&latest, "d", "waits", b"1");
        let began = tokio::time::Instant::now();
        for _ in 0..100 {
            let got = latest.get("a", Some("d")).await;
            assert!(matches!(got, Err(StoreError::Unavailable(_))), "{got:?}");
            assert!(matches!(latest.list(query()).await, Err(StoreError::Unavailable(_))));
            let page = history.page(asked.clone(), NOW).await;
            assert!(matches!(page, Err(StoreError::Unavailable(_))), "{page:?}");
            assert_eq!(payload(&latest, "waits", Some("d")).await.unwrap(), b"1");
        }
        assert_eq!(began.elapsed(), Duration::ZERO, "in virtual time");
        store.hangs.store(false, SeqCst);
        store.away.store(false, SeqCst);
        // Nobody asks, and it is found out all the same; before the next attempt to write, which is up to five seconds away.
        let back = tokio::time::Instant::now();
        while reads.check().is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert!(hangs || back.elapsed() <= Duration::from_millis(500), "{:?}", back.elapsed());
        assert!(latest.list(query()).await.is_ok() && latest.get("a", Some("d")).await.is_ok());
        latest.flush().await.unwrap();
    }
    // A database that takes no writes still answers.
    store.most.store(0, SeqCst);
    record(&latest, "d", "waits", b"2");
    while latest.healthy() {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    for _ in 0..100 {
        assert!(latest.get("a", Some("d")).await.is_ok());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    store.most.store(usize::MAX, SeqCst);
    stop.send(true).unwrap();
    task.await.unwrap();
}

#[tokio::test]
async fn a_flush_that_is_dropped_half_way_loses_nothing() {
    let latest = LatestCache::new(Flaky::new(), LatestOptions::default());
    record(&latest, "d", "t", b"1");
    {
        let mut flush = Box::pin(latest.flush());
        std::future::poll_fn(|cx| {
            assert!(flush.as_mut().poll(cx).is_pending());
            std::task::Poll::Ready(())
        })
        .await;
    }
    assert_eq!(latest.gauges().pending_values, 1);
    latest.flush().await.unwrap();
    assert_eq!(latest.gauges().pending_values, 0);
    assert_eq!(payload(&latest, "t", Some("d")).await.unwrap(), b"1");
}

#[tokio::test]
async fn over_the_byte_bound_known_values_are_replaced_and_new_ones_refused() {
    let store = Flaky::new();
    store.away.store(true, SeqCst);
    let options = LatestOptions { max_bytes: 100_000, ..Default::default() };
    let latest = LatestCache::new(Arc::clone(&store) as Arc<dyn LatestStore>, options);
    for n in 0..1000 {
        record(&latest, "d", &format!("t/{n:03}"), &[1; 500]);
    }
    let held = latest.gauges();
    assert!(held.pending_bytes <= 100_000 && held.pending_values > 50, "{held:?}");
    assert!(latest.flush().await.is_err());
    record(&latest, "d", "t/000", &[2; 500]);
    assert_eq!(payload(&latest, "t/000", Some("d")).await.unwrap(), [2; 500]);
    for n in 0..1000 {
        record(&latest, "d", &format!("t/{n:03}"), &[3; 5000]);
    }
    assert!(latest.gauges().pending_bytes <= 125_000);
    store.away.store(false, SeqCst);
    latest.flush().await.unwrap();
    assert_eq!(latest.gauges().pending_bytes, 0);
    record(&latest, "d", "t/999", b"x");
    assert_eq!(latest.gauges().pending_values, 1, "room again");
}

#[tokio::test]
async fn a_device_that_floods_an_absent_store_leaves_room_for_others() {
    let store = Flaky::new();
    store.away.store(true, SeqCst);
    let options = LatestOptions { max_bytes: 200_000, ..Default::default() };
    let latest = LatestCache::new(Arc::clone(&store) as Arc<dyn LatestStore>, options);
    for n in 0..1000 {
        for flooder in ["f1", "f2", "f3", "f4"] {
            record(&latest, flooder, &format!("t/{n:03}"), &[1; 500]);
        }
    }
    let before = latest.gauges().pending_values;
    for n in 0..3 {
        record(&latest, "bystander", &format!("t/{n}"), &[1; 500]);
    }
    assert_eq!(latest.gauges().pending_values, before + 3);
}

#[tokio::test]
async fn idle_entries_leave_memory() {
    let latest = LatestCache::new(Flaky::new(), LatestOptions::default());
    for n in 0..20 {
        record(&latest, "d", &format!("t/{n}"), b"x");
        record(&latest, &format!("other{n}"), "t", b"x");
    }
    latest.flush().await.unwrap();
    assert_eq!(latest.entries(), 40);
    for _ in 0..12 {
        latest.flush().await.unwrap();
    }
    assert_eq!(latest.entries(), 0);
}

#[tokio::test]
async fn a_device_over_its_topics_keeps_no_stale_value_of_a_known_one() {
    suite::known_topics_stay_current(Arc::new(MemoryLatest::new(30)), 30).await;
}

#[tokio::test]
async fn lists_merge_memory_and_store_in_order() {
    let latest = LatestCache::new(Flaky::new(), LatestOptions::default());
    for n in (0..300).step_by(2) {
        record(&latest, &format!("d{}", n % 3), &format!("t/{n:03}"), b"stored");
    }
    latest.flush().await.unwrap();
    for n in (0..300).step_by(3) {
        record(&latest, &format!("d{}", n % 3), &format!("t/{n:03}"), b"pending");
    }
    let mut expected: Vec<_> = (0..300)
        .filter(|n| n % 2 == 0 || n % 3 == 0)
        .map(|n| (format!("d{}", n % 3), format!("t/{n:03}"), if n % 3 == 0 { "pending" } else { "stored" }))
        .collect();
    expected.sort();
    for limit in [1, 7, 100, 1000] {
        let query = LatestQuery { limit, ..Default::default() };
        let found = list_all(&latest, query.clone()).await;
        assert_eq!(found.len(), expected.len(), "limit {limit}");
        for (value, (device, topic, payload)) in found.iter().zip(&expected) {
            assert_eq!((value.device.as_str(), &*value.topic), (&**device, &**topic));
            assert_eq!(value.payload, payload.as_bytes());
        }
        let one = LatestQuery { devices: vec!["d1".into()], filter: Some("t/+".into()), ..query };
        assert_eq!(list_all(&latest, one).await.len(), 50);
    }
}

#[tokio::test]
async fn versions_never_go_back_over_restarts() {
    let dir = tempfile::tempdir().unwrap();
    let mut last = 0;
    for clean in [true, false, true, false] {
        let data = DataDir::open(dir.path()).unwrap();
        let mark = Arc::new(VersionMark::open(&data).unwrap());
        let options = LatestOptions { mark: Some(mark), ..Default::default() };
        let latest = LatestCache::new(Flaky::new(), options);
        // The wall clock stands still; only the mark makes versions grow.
        record(&latest, "d", "t", b"1");
        latest.flush().await.unwrap();
        record(&latest, "d", "t", b"2");
        latest.flush().await.unwrap();
        let version = latest.get("t", Some("d")).await.unwrap().unwrap().version;
        assert!(version > last + 1, "{version} after {last}");
        last = version;
        if clean {
            let (stop, stopped) = watch::channel(true);
            Arc::clone(&latest).run(stopped).await;
            drop(stop);
        }
    }
    std::fs::write(dir.path().join("versions"), "rubbish").unwrap();
    assert_eq!(VersionMark::open(&DataDir::open(dir.path()).unwrap()).unwrap().ceiling(), 0);
}

#[test]
fn shards_record_while_the_flusher_writes() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let store = Flaky::new();
    let options = LatestOptions { flush_interval: Duration::from_millis(1), ..Default::default() };
    let latest = LatestCache::new(Arc::clone(&store) as Arc<dyn LatestStore>, options);
    let (stop, stopped) = watch::channel(false);
    let task = runtime.spawn(Arc::clone(&latest).run(stopped));
    std::thread::scope(|scope| {
        for shard in 0..3 {
            let (latest, store) = (&latest, &store);
            scope.spawn(move || {
                for n in 0..20_000u32 {
                    record(
                        latest,
                        &format!("s{shard}-{}", n % 7),
                        &format!("t/{}", n % 501),
                        &n.to_le_bytes(),
                    );
                    store.away.store(n % 4000 < 1000, SeqCst);
                }
            });
        }
    });
    store.away.store(false, SeqCst);
    stop.send(true).unwrap();
    runtime.block_on(task).unwrap();
    assert_eq!(latest.gauges().pending_bytes, 0);
    let query = LatestQuery { limit: 10_000, ..Default::default() };
    let values = runtime.block_on(list_all(&latest, query));
    assert_eq!(values.len(), 3 * 7 * 501);
    let mut newest: Vec<u32> =
        values.iter().map(|v| u32::from_le_bytes(v.payload[..].try_into().unwrap())).collect();
    newest.sort_unstable();
    newest.dedup();
    assert_eq!(
        newest,
        (20_000 - 7 * 501..20_000).collect::<Vec<u32>>(),
        "the newest of every pair is stored"
    );
}

/// The failure: other users of the machine read what devices say and what their sessions queue.
#[test]
fn a_data_directory_is_made_for_its_user_alone() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("deeper/data");
    let _data = DataDir::open(&path).unwrap();
    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&path), mode(&path.join("lock"))), (0o700, 0o600));
}
