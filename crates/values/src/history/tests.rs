//! The queue: what [`History`] promises whatever the store does.

use std::sync::atomic::Ordering::SeqCst;

use gateway_core::{ClientId, Effort, Origin, QoS};

use store::{
    MemoryHistory,
    suite::history::{self as suite, START},
};

use super::*;

const NOW: Timestamp = Timestamp(START);

fn rule(filter: &str, seconds: u64) -> HistoryRule {
    HistoryRule { filter: filter.to_owned(), ttl: Duration::from_secs(seconds) }
}

fn options() -> HistoryOptions {
    HistoryOptions { rules: vec![rule("kept/#", 3_600)], ..HistoryOptions::default() }
}

fn setup(options: HistoryOptions) -> (Arc<MemoryHistory>, Arc<History>) {
    let store = Arc::new(MemoryHistory::default());
    (Arc::clone(&store), History::new(store, options))
}

fn record(history: &History, topic: &str, payload: &[u8]) {
    let device = ClientId::new("d");
    let origin = Origin { kind: OriginKind::Device, client_id: Some(&device), slot: 1 };
    history.record(&Message::new(topic, payload, NOW, origin), &mut Effort::default());
}

fn query(topic: &str) -> HistoryQuery {
    HistoryQuery {
        device: "d".to_owned(),
        topic: topic.to_owned(),
        to: Timestamp(u64::MAX),
        oldest_first: true,
        limit: 1_000,
        ..HistoryQuery::default()
    }
}

async fn payloads(history: &History, topic: &str) -> Vec<Vec<u8>> {
    let page = history.page(query(topic), NOW).await.unwrap();
    assert_eq!(page.next, "");
    page.values.iter().map(|value| value.payload.to_vec()).collect()
}

#[tokio::test]
async fn the_suite_passes_in_memory() {
    suite::run(&MemoryHistory::default()).await;
}

#[tokio::test]
async fn every_message_of_a_topic_with_a_rule_is_kept_and_no_other() {
    let (store, history) = setup(options());
    for n in 0..5_u8 {
        record(&history, "kept/a", &[n]);
        record(&history, "other", &[n]);
    }
    record(&history, "$kept", b"x");
    for origin in [Origin::SERVER, Origin::BACKEND] {
        history.record(&Message::new("kept/a", b"x", NOW, origin), &mut Effort::default());
    }
    assert_eq!(history.gauges().pending, 5);
    history.flush().await.unwrap();
    assert_eq!(payloads(&history, "kept/a").await, [[0], [1], [2], [3], [4]]);
    assert_eq!(store.len(), 5);
    assert_eq!(history.gauges(), HistoryGauges { pending: 0, pending_bytes: 0, healthy: true });
}

#[test]
fn the_first_rule_that_matches_says_how_long() {
    let rules = vec![rule("a/+", 10), rule("a/#", 20), rule("#", 30)];
    let (_, history) = setup(HistoryOptions { rules, ..options() });
    for topic in ["a/b", "a/b/c", "c", "a"] {
        record(&history, topic, b"");
    }
    let batch = history.take();
    assert_eq!(batch.iter().map(|entry| entry.ttl).collect::<Vec<_>>(), [10, 20, 30, 20]);
}

#[tokio::test]
async fn a_full_queue_refuses_the_newest_until_the_store_is_back() {
    let (store, history) = setup(HistoryOptions { max_messages: 6, ..options() });
    store.away.store(true, SeqCst);
    for n in 0..5_u8 {
        record(&history, "kept/a", &[n]);
        let _ = history.flush().await.unwrap_err();
    }
    assert_eq!(history.gauges().pending, 4, "those under way are counted");
    assert!(!history.gauges().healthy);
    store.away.store(false, SeqCst);
    history.flush().await.unwrap();
    record(&history, "kept/a", &[9]);
    history.flush().await.unwrap();
    assert_eq!(payloads(&history, "kept/a").await, [[0], [1], [2], [3], [9]]);
    assert_eq!(history.gauges(), HistoryGauges { pending: 0, pending_bytes: 0, healthy: true });
}

#[tokio::test]
async fn a_device_that_floods_does_not_take_the_room_of_another() {
    let (_, history) = setup(HistoryOptions { max_messages: 1_000, ..options() });
    for _ in 0..2_000 {
        for flooder in ["f1", "f2", "f3", "f4"] {
            record_from(&history, flooder, QoS::AtMostOnce);
        }
    }
    let before = history.gauges().pending;
    for _ in 0..50 {
        record_from(&history, "bystander", QoS::AtLeastOnce);
    }
    assert_eq!(history.gauges().pending, before + 50);
    history.flush().await.unwrap();
    assert_eq!((history.gauges().pending, history.shares.total()), (0, 0), "all room is given back");
}

fn record_from(history: &History, device: &str, qos: QoS) {
    let id = ClientId::new(device);
    let origin = Origin { kind: OriginKind::Device, client_id: Some(&id), slot: 0 };
    let mut message = Message::new("kept/a", b"x", NOW, origin);
    message.qos = qos;
    history.record(&message, &mut Effort::default());
}

#[tokio::test]
async fn bytes_are_bounded_and_too_large_ones_never_come_in() {
    let (_, history) = setup(HistoryOptions { max_bytes: 100_000, max_message_bytes: 40_000, ..options() });
    record(&history, "kept/a", &[0; 40_001]);
    record(&history, &format!("kept/{}", "x".repeat(MAX_NAMES)), b"");
    assert_eq!(history.gauges().pending, 0);
    for _ in 0..5 {
        record(&history, "kept/a", &[0; 40_000]);
    }
    let gauges = history.gauges();
    assert_eq!(gauges.pending, 2);
    assert!(gauges.pending_bytes > 80_000 && gauges.pending_bytes <= 100_000);
}

#[tokio::test]
async fn many_shards_together_keep_to_the_bound_and_to_distinct_versions() {
    let (store, history) = setup(HistoryOptions { max_messages: 1_000, ..options() });
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..500).for_each(|_| record(&history, "kept/a", b"x")));
        }
    });
    assert!(history.gauges().pending <= 1_000);
    let pending = history.gauges().pending;
    history.flush().await.unwrap();
    assert_eq!(store.len(), pending, "no two messages are one row");
}

#[tokio::test(start_paused = true)]
async fn a_write_that_hangs_or_is_cut_off_is_written_again() {
    let (store, history) = setup(options());
    store.hangs.store(true, SeqCst);
    record(&history, "kept/a", b"1");
    let hung = history.flush().await;
    assert!(matches!(hung, Err(StoreError::Unavailable(_))), "{hung:?}");
    timeout(Duration::from_secs(1), history.flush()).await.unwrap_err();
    store.hangs.store(false, SeqCst);
    record(&history, "kept/a", b"2");
    history.flush().await.unwrap();
    assert_eq!(payloads(&history, "kept/a").await, [b"1", b"2"]);
    assert_eq!(store.appends.load(SeqCst), 4, "what failed, then what came later");
}

#[tokio::test]
async fn what_a_lost_node_does_not_take_waits_and_holds_nothing_else_up() {
    let (store, history) = setup(options());
    store.partly.store(true, SeqCst);
    for payload in [b"1".as_slice(), b"", b"2", b""] {
        record(&history, "kept/a", payload);
    }
    for more in [b"3", b"4"] {
        history.flush().await.unwrap_err();
        assert_eq!(history.gauges().pending, 2);
        record(&history, "kept/a", more);
    }
    store.partly.store(false, SeqCst);
    history.flush().await.unwrap();
    assert_eq!(payloads(&history, "kept/a").await, [b"1".as_slice(), b"", b"2", b"", b"3", b"4"]);
    assert_eq!(history.gauges(), HistoryGauges { pending: 0, pending_bytes: 0, healthy: true });
}

#[tokio::test(start_paused = true)]
async fn it_flushes_by_itself_goes_on_after_an_outage_and_once_more_at_the_end() {
    let (store, history) = setup(options());
    let (stop, stopped) = watch::channel(false);
    let running = tokio::spawn(Arc::clone(&history).run(stopped));
    store.away.store(true, SeqCst);
    record(&history, "kept/a", b"1");
    sleep(Duration::from_secs(60)).await;
    assert_eq!(store.len(), 0);
    let attempts = store.appends.load(SeqCst);
    assert!((10..30).contains(&attempts), "{attempts} attempts in a minute: it backs off, and not for ever");
    store.away.store(false, SeqCst);
    sleep(BACKOFF.1).await;
    assert_eq!(store.len(), 1);
    record(&history, "kept/a", b"2");
    stop.send(true).unwrap();
    running.await.unwrap();
    assert_eq!(store.len(), 2);
}

#[tokio::test(start_paused = true)]
async fn the_end_is_not_delayed_by_a_store_that_hangs() {
    let (store, history) = setup(options());
    let (stop, stopped) = watch::channel(false);
    let running = tokio::spawn(Arc::clone(&history).run(stopped));
    store.hangs.store(true, SeqCst);
    record(&history, "kept/a", b"1");
    sleep(Duration::from_secs(1)).await;
    stop.send(true).unwrap();
    timeout(2 * history.options.last_flush, running).await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn reads_reach_back_to_the_longest_rule_and_fail_without_the_store() {
    let rules = vec![rule("kept/short", 60), rule("kept/#", 3_600)];
    let (store, history) = setup(HistoryOptions { rules, ..options() });
    record(&history, "kept/short", b"1");
    history.flush().await.unwrap();
    let at = |seconds: u64| Timestamp(NOW.0 + seconds * 1_000);
    for (now, found) in [(0, 1), (3_600, 1), (3_601, 0)] {
        assert_eq!(history.page(query("kept/short"), at(now)).await.unwrap().values.len(), found);
    }
    // From the beginning of time: not a bucket more than an hour can have.
    assert_eq!(history.page(query("kept/a"), NOW).await.unwrap().next, "");
    store.away.store(true, SeqCst);
    assert!(matches!(history.page(query("kept/a"), NOW).await, Err(StoreError::Unavailable(_))));
    store.away.store(false, SeqCst);
    store.hangs.store(true, SeqCst);
    assert!(matches!(history.page(query("kept/a"), NOW).await, Err(StoreError::Unavailable(_))));
}
