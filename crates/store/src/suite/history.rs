//! Suite that every [`HistoryStore`] must pass. Each backend runs all of it.

use bytes::Bytes;
use gateway_core::{ClientId, Properties, QoS};

use std::sync::Arc;

use gateway_core::Timestamp;

use crate::{
    BUCKET_MS, HistoryEntry, HistoryQuery, HistoryRemoval, HistoryStore, LatestValue, StoreError, bucket,
};

/// The first message of the tests, just before the end of a bucket.
pub const START: u64 = 1_700_000_000_000 / BUCKET_MS * BUCKET_MS - 2;

fn entry(device: &str, topic: &str, received: u64, version: u64) -> HistoryEntry {
    let value = LatestValue {
        device: ClientId::new(device),
        topic: Arc::from(topic),
        payload: Bytes::from(format!("{received} {version}")),
        qos: QoS::AtLeastOnce,
        retain: false,
        properties: None,
        received: Timestamp(received),
        version,
        server: Some("suite".into()),
    };
    HistoryEntry { value, ttl: 3_600 }
}

fn query(device: &str, topic: &str) -> HistoryQuery {
    HistoryQuery {
        device: device.to_owned(),
        topic: topic.to_owned(),
        from: Timestamp(START - 1_000),
        to: Timestamp(START + 1_000 * BUCKET_MS),
        limit: 1_000,
        ..HistoryQuery::default()
    }
}

/// All pages, and how many there were.
async fn read(store: &dyn HistoryStore, mut query: HistoryQuery) -> (Vec<LatestValue>, usize) {
    let mut all: Vec<LatestValue> = Vec::new();
    for pages in 1..1_000 {
        let page = store.page(query.clone()).await.unwrap();
        assert!(page.values.len() <= query.limit);
        all.extend(page.values);
        if page.next.is_empty() {
            return (all, pages);
        }
        assert_ne!(page.next, query.page_token, "a page goes on");
        query.page_token = page.next;
    }
    panic!("pages do not end");
}

async fn append(store: &dyn HistoryStore, entries: &[HistoryEntry]) {
    store.append(entries.into()).await.unwrap();
}

/// Runs the whole suite on an empty store.
pub async fn run(store: &dyn HistoryStore) {
    messages_come_in_both_orders_on_pages_of_any_size(store).await;
    a_repeated_entry_changes_nothing(store).await;
    from_is_included_and_to_is_not(store).await;
    devices_and_topics_are_apart(store).await;
    every_field_comes_back(store).await;
    empty_buckets_end_a_page_and_not_the_walk(store).await;
    foreign_tokens_are_refused(store).await;
    what_is_removed_stays_away_and_what_is_newer_stays(store).await;
}

async fn messages_come_in_both_orders_on_pages_of_any_size(store: &dyn HistoryStore) {
    // Over the edge of a bucket, several in one millisecond, and one that comes late.
    let mut entries: Vec<_> = (0..23).map(|n| entry("order", "t", START + n / 5, 1_000 + n)).collect();
    entries.push(entry("order", "t", START + 2 * BUCKET_MS, 5));
    let mut late = entries.clone();
    late.rotate_left(7);
    append(store, &late).await;
    let oldest: Vec<_> = entries.into_iter().map(|entry| entry.value).collect();
    let newest: Vec<_> = oldest.iter().rev().cloned().collect();
    for limit in [1, 4, 24, 1_000] {
        let query = HistoryQuery { limit, ..query("order", "t") };
        assert_eq!(read(store, query.clone()).await.0, newest, "newest first, limit {limit}");
        assert_eq!(
            read(store, HistoryQuery { oldest_first: true, ..query }).await.0,
            oldest,
            "limit {limit}"
        );
    }
}

async fn a_repeated_entry_changes_nothing(store: &dyn HistoryStore) {
    let entries: Vec<_> = (0..3).map(|n| entry("again", "t", START + n, 7)).collect();
    for _ in 0..3 {
        append(store, &entries).await;
    }
    assert_eq!(read(store, query("again", "t")).await.0.len(), 3);
}

async fn from_is_included_and_to_is_not(store: &dyn HistoryStore) {
    append(store, &[0, 1, 2, 3].map(|n| entry("bounds", "t", START + n, 7))).await;
    for oldest_first in [false, true] {
        let read = async |from, to| {
            let bounds = (Timestamp(START + from), Timestamp(START + to));
            let query = HistoryQuery { from: bounds.0, to: bounds.1, oldest_first, ..query("bounds", "t") };
            let mut found: Vec<_> =
                read(store, query).await.0.iter().map(|value| value.received.0 - START).collect();
            found.sort_unstable();
            found
        };
        assert_eq!(read(1, 3).await, [1, 2]);
        assert_eq!(read(0, 2).await, [0, 1], "up to the edge of a bucket");
        assert_eq!(read(2, 4).await, [2, 3], "from the edge of a bucket");
        assert_eq!(read(2, 2).await, [0_u64; 0]);
        assert_eq!(read(3, 1).await, [0_u64; 0]);
    }
}

async fn devices_and_topics_are_apart(store: &dyn HistoryStore) {
    for (device, topic) in [("a", "b/c"), ("a", "b"), ("ab", "/c"), ("a", "c")] {
        append(store, &[entry(device, topic, START, 1)]).await;
    }
    let found = read(store, query("a", "b")).await.0;
    assert_eq!(found, [entry("a", "b", START, 1).value]);
    assert!(read(store, query("b", "b")).await.0.is_empty());
}

async fn every_field_comes_back(store: &dyn HistoryStore) {
    let mut full = entry("fields", "t/ü", START, 1);
    full.value.qos = QoS::ExactlyOnce;
    full.value.retain = true;
    full.value.payload = Bytes::from_static(b"\0\xff");
    full.value.properties = Some(Arc::new(Properties {
        payload_format: Some(1),
        content_type: Some(String::new()),
        response_topic: Some("r".into()),
        correlation_data: Some(Bytes::from_static(b"\x01")),
        user: vec![("k".into(), "v".into()), ("k".into(), String::new())],
    }));
    let mut empty = entry("fields", "t/ü", START + 1, 2);
    empty.value.payload = Bytes::new();
    append(store, &[full.clone(), empty.clone()]).await;
    assert_eq!(read(store, query("fields", "t/ü")).await.0, [empty.value, full.value]);
}

async fn empty_buckets_end_a_page_and_not_the_walk(store: &dyn HistoryStore) {
    let far = entry("far", "t", START + 700 * BUCKET_MS, 2);
    let near = entry("far", "t", START, 1);
    append(store, &[near.clone(), far.clone()]).await;
    let (found, pages) = read(store, query("far", "t")).await;
    assert_eq!(found, [far.value.clone(), near.value.clone()]);
    assert_eq!(pages, 4, "about a thousand buckets, 256 for a page");
    let (found, pages) = read(store, HistoryQuery { oldest_first: true, ..query("far", "t") }).await;
    assert_eq!((found, pages), (vec![near.value, far.value], 4));
    let first = store.page(query("nobody", "t")).await.unwrap();
    assert!(first.values.is_empty() && !first.next.is_empty(), "an empty page may have a next one");
}

async fn foreign_tokens_are_refused(store: &dyn HistoryStore) {
    for token in ["x", "1", "-1-1", "1--1", "+1-1", "1-1-1", "1-", "9223372036854775808-0", " 1-1"] {
        let query = HistoryQuery { page_token: token.to_owned(), ..query("d", "t") };
        assert!(matches!(store.page(query).await, Err(StoreError::BadPageToken)), "{token}");
    }
    // Beyond what is asked for is the end, whatever it says.
    for oldest_first in [false, true] {
        let page_token = if oldest_first { "9223372036854775807-0" } else { "0-0" }.to_owned();
        let query = HistoryQuery { page_token, oldest_first, ..query("order", "t") };
        assert_eq!(read(store, query).await.0, []);
    }
}

/// Rules out that a deleted device's messages are read until they expire, or come back with a write that was under way.
async fn what_is_removed_stays_away_and_what_is_newer_stays(store: &dyn HistoryStore) {
    let old: Vec<_> = (0..3).map(|n| entry("gone", "t", START + n * BUCKET_MS, 7 + n)).collect();
    let others = [entry("gone", "u", START, 7), entry("other", "t", START, 7)];
    append(store, &old).await;
    append(store, &others).await;
    append(store, &[entry("gone", "t", START, 11)]).await;
    let topics = vec![(Arc::from("t"), bucket(START), bucket(START + 2 * BUCKET_MS))];
    store.remove(HistoryRemoval { device: "gone".to_owned(), topics, version: 10 }).await.unwrap();
    for _ in 0..2 {
        let left: Vec<_> =
            read(store, query("gone", "t")).await.0.iter().map(|value| value.version).collect();
        assert_eq!(left, [11]);
        append(store, &old).await;
    }
    for other in others {
        let name = other.value.device.as_str();
        assert_eq!(read(store, query(name, &other.value.topic)).await.0.len(), 1);
    }
}
