//! Suite that every [`LatestStore`] must pass. Each backend runs all of it.

use std::sync::Arc;

use bytes::Bytes;
use gateway_core::{ClientId, Properties, QoS, Timestamp};

use crate::{LatestQuery, LatestStore, LatestValue, StoreError};

/// A value whose payload tells its version.
pub fn value(device: &str, topic: &str, version: u64) -> LatestValue {
    LatestValue {
        device: ClientId::new(device),
        topic: Arc::from(topic),
        payload: Bytes::from(format!("{device} {version}")),
        qos: QoS::AtLeastOnce,
        retain: false,
        properties: None,
        received: Timestamp(version / 1000),
        version,
        server: None,
    }
}

/// All pages of `query`, checked for order and page size.
pub async fn list_all(store: &dyn LatestStore, mut query: LatestQuery) -> Vec<LatestValue> {
    let mut all: Vec<LatestValue> = Vec::new();
    for _ in 0..10_000 {
        let page = store.list(query.clone()).await.unwrap();
        assert!(page.values.len() <= query.limit);
        all.extend(page.values);
        if page.next.is_empty() {
            let key = |v: &LatestValue| (v.device.clone(), Arc::clone(&v.topic));
            assert!(all.windows(2).all(|w| key(&w[0]) < key(&w[1])), "pages are in order without repeats");
            return all;
        }
        query.page_token = page.next;
    }
    panic!("pages do not end");
}

/// All pages of `query` for all devices; `None` from a store that does not have to list them, and says so.
async fn list_everyone(store: &dyn LatestStore, query: LatestQuery, lists: bool) -> Option<Vec<LatestValue>> {
    let query = LatestQuery { devices: Vec::new(), ..query };
    if lists {
        return Some(list_all(store, query).await);
    }
    assert!(matches!(store.list(query).await, Err(StoreError::NeedsDevices)));
    None
}

/// Runs the whole suite on an empty store with room for `topics_per_device` (at least 25) topics, which lists the
/// values of all devices if `everyone`, and otherwise refuses to.
pub async fn run(store: &dyn LatestStore, topics_per_device: usize, everyone: bool) {
    newer_versions_replace_older_ones(store).await;
    values_are_found_by_device_and_newest(store).await;
    every_field_comes_back(store).await;
    lists_are_filtered_ordered_and_paged(store, everyone).await;
    long_names_work_like_short_ones(store, everyone).await;
    foreign_page_tokens_are_refused(store).await;
    what_is_removed_is_gone_and_what_is_newer_stays(store).await;
    topics_per_device_are_bounded(store, topics_per_device).await;
}

async fn put(store: &dyn LatestStore, values: &[LatestValue]) {
    store.upsert(Arc::from(values)).await.unwrap();
}

async fn newer_versions_replace_older_ones(store: &dyn LatestStore) {
    let (old, new) = (value("order", "t/order", 10), value("order", "t/order", 11));
    put(store, std::slice::from_ref(&new)).await;
    put(store, std::slice::from_ref(&old)).await;
    assert_eq!(store.get("t/order", Some("order")).await.unwrap(), Some(new.clone()));
    put(store, &[old.clone(), new.clone(), old]).await;
    assert_eq!(store.get("t/order", Some("order")).await.unwrap(), Some(new.clone()), "idempotent");
    assert_eq!(store.get("t/order", None).await.unwrap(), Some(new));
}

async fn what_is_removed_is_gone_and_what_is_newer_stays(store: &dyn LatestStore) {
    let (topic, other) = ("t/removed", "t/removed/other");
    put(store, &[value("r1", topic, 10), value("r1", other, 30), value("r2", topic, 5)]).await;
    let removal = [value("r1", topic, 20), value("r1", other, 20), value("r3", topic, 20)];
    for _ in 0..2 {
        store.remove(Arc::from(&removal[..])).await.unwrap();
        assert_eq!(store.get(topic, Some("r1")).await.unwrap(), None);
        assert_eq!(store.get(other, Some("r1")).await.unwrap(), Some(value("r1", other, 30)), "newer");
        assert_eq!(store.get(other, None).await.unwrap(), Some(value("r1", other, 30)));
        assert_eq!(store.get(topic, Some("r2")).await.unwrap(), Some(value("r2", topic, 5)), "not its own");
        assert_eq!(store.get(topic, None).await.unwrap(), None);
    }
    let listed =
        LatestQuery { devices: vec!["r1".into()], filter: None, limit: 10, page_token: String::new() };
    assert_eq!(list_all(store, listed).await, [value("r1", other, 30)]);
    put(store, &[value("r1", topic, 40)]).await;
    assert_eq!(store.get(topic, None).await.unwrap(), Some(value("r1", topic, 40)), "the next one is seen");
}

async fn values_are_found_by_device_and_newest(store: &dyn LatestStore) {
    let topic = "t/newest";
    put(store, &[value("n1", topic, 100), value("n2", topic, 300), value("n3", topic, 200)]).await;
    assert_eq!(store.get(topic, Some("n1")).await.unwrap(), Some(value("n1", topic, 100)));
    assert_eq!(store.get(topic, None).await.unwrap(), Some(value("n2", topic, 300)));
    put(store, &[value("n1", topic, 400)]).await;
    assert_eq!(store.get(topic, None).await.unwrap(), Some(value("n1", topic, 400)));
    assert_eq!(store.get(topic, Some("n4")).await.unwrap(), None);
    assert_eq!(store.get("", None).await.unwrap(), None);
    assert_eq!(store.get("", Some("")).await.unwrap(), None);
    assert_eq!(store.get("t/none", None).await.unwrap(), None);
}

async fn every_field_comes_back(store: &dyn LatestStore) {
    let properties = Properties {
        payload_format: Some(1),
        content_type: Some("text/plain".to_owned()),
        response_topic: Some(String::new()),
        correlation_data: Some(Bytes::from_static(&[0, 255, 7])),
        user: vec![("b".into(), "2".into()), ("a".into(), String::new()), ("b".into(), "1".into())],
    };
    for (n, properties) in [Some(properties), Some(Properties::default()), None].into_iter().enumerate() {
        let mut full = value("fields", &format!("t/fields/{n}"), 7_000_001);
        full.properties = properties.map(Arc::new);
        full.qos = QoS::ExactlyOnce;
        full.retain = n == 1;
        full.payload = Bytes::from(vec![0xA5; n * 100_000]);
        put(store, std::slice::from_ref(&full)).await;
        assert_eq!(store.get(&full.topic, Some("fields")).await.unwrap(), Some(full));
    }
}

async fn lists_are_filtered_ordered_and_paged(store: &dyn LatestStore, everyone: bool) {
    let mut values = Vec::new();
    for device in ["list", "list\u{1}", "list-a", "list/b", "listé"] {
        for topic in ["l/1", "l/1/x", "l/2", "l/\u{1}", "m/é"] {
            values.push(value(device, topic, 500));
        }
    }
    put(store, &values).await;
    let devices: Vec<String> = values.iter().map(|v| v.device.as_str().to_owned()).rev().collect();
    values.sort_by(|a, b| (&a.device, &a.topic).cmp(&(&b.device, &b.topic)));
    for limit in [1, 2, 3, 7, 100] {
        let query = LatestQuery { devices: devices.clone(), filter: None, limit, page_token: String::new() };
        assert_eq!(list_all(store, query.clone()).await, values, "limit {limit}");
        let some = LatestQuery { filter: Some("l/+".to_owned()), ..query.clone() };
        let expected: Vec<_> =
            values.iter().filter(|v| v.topic.starts_with("l/") && &*v.topic != "l/1/x").cloned().collect();
        assert_eq!(list_all(store, some.clone()).await, expected);
        if let Some(found) = list_everyone(store, some, everyone).await {
            assert_eq!(found, expected);
        }
        let one = LatestQuery { devices: vec!["list".into(), "absent".into()], ..query };
        assert_eq!(list_all(store, one).await.len(), 5);
    }
}

async fn long_names_work_like_short_ones(store: &dyn LatestStore, everyone: bool) {
    let long = "x".repeat(600);
    let mut values = Vec::new();
    for topic in
        ["a".to_owned(), format!("b/{long}"), format!("b/{long}/1"), format!("b/{long}/0"), "c".into()]
    {
        values.push(value("long", &topic, 600));
    }
    for n in 0..20 {
        // Many names with the same first 480 bytes, in both parts, around lengths where keys change form.
        values.push(value("long", &format!("b/{}{n}", "y".repeat(460 + n)), 600));
        values.push(value(&format!("long{long}{n}"), "t", 600));
    }
    values.push(value(&format!("long{long}0"), "s", 600));
    values.push(value(&format!("long{long}0"), &"t/".repeat(30_000), 600));
    put(store, &values).await;
    put(store, &values).await;
    values.sort_by(|a, b| (&a.device, &a.topic).cmp(&(&b.device, &b.topic)));
    let mut devices: Vec<String> = values.iter().map(|v| v.device.as_str().to_owned()).collect();
    devices.dedup();
    for limit in [1, 4, 1000] {
        let query = LatestQuery { devices: devices.clone(), limit, ..LatestQuery::default() };
        assert_eq!(list_all(store, query.clone()).await, values, "limit {limit}");
        if let Some(found) = list_everyone(store, query, everyone).await {
            let found: Vec<_> = found.into_iter().filter(|v| v.device.as_str().starts_with("long")).collect();
            assert_eq!(found, values);
        }
    }
    for value in &values {
        assert_eq!(store.get(&value.topic, Some(value.device.as_str())).await.unwrap().as_ref(), Some(value));
    }
    let topic = format!("b/{long}/1");
    put(store, &[value("long-2", &topic, 601)]).await;
    assert_eq!(store.get(&topic, None).await.unwrap(), Some(value("long-2", &topic, 601)));
}

async fn foreign_page_tokens_are_refused(store: &dyn LatestStore) {
    for token in ["x", "5:abc", "1:é", ":"] {
        let query = LatestQuery { limit: 1, page_token: token.to_owned(), ..LatestQuery::default() };
        assert!(matches!(store.list(query).await, Err(StoreError::BadPageToken)), "{token}");
    }
}

async fn topics_per_device_are_bounded(store: &dyn LatestStore, bound: usize) {
    let values: Vec<_> = (0..bound + 5).map(|n| value("bound", &format!("b/{n}"), 900)).collect();
    put(store, &values).await;
    let query = LatestQuery { devices: vec!["bound".into()], limit: 1000, ..LatestQuery::default() };
    let kept = list_all(store, query.clone()).await;
    assert_eq!(kept.len(), bound);
    let again: Vec<_> = values.iter().map(|v| LatestValue { version: 901, ..v.clone() }).collect();
    put(store, &again).await;
    let updated = list_all(store, query).await;
    assert_eq!(updated.len(), bound);
    assert!(updated.iter().all(|v| v.version == 901), "known topics go on");
}
