use super::*;
use crate::config::ByteSize;

fn retain(bench: &mut Bench, topic: &str, payload: &str) -> Published {
    bench.publish_with(topic, payload, |message| message.retain = true)
}

fn replay(bench: &Bench, mut cursor: RetainedCursor) -> (Vec<String>, usize) {
    let mut topics = Vec::new();
    let mut calls = 0;
    while let Some(next) = cursor.next(&bench.broker, bench.now) {
        calls += 1;
        topics.extend(next.map(|message| message.topic.to_string()));
    }
    assert!(cursor.next(&bench.broker, bench.now).is_none());
    (topics, calls)
}

#[test]
fn retained_messages_are_set_replaced_and_cleared() {
    let mut bench = Bench::new(Limits::default());
    retain(&mut bench, "a", "1");
    retain(&mut bench, "a", "2");
    assert_eq!(&*bench.broker.retained("a", bench.now).unwrap().payload, b"2");
    assert_eq!(bench.broker.gauges().retained, 1);
    retain(&mut bench, "a", "");
    assert!(bench.broker.retained("a", bench.now).is_none());
    let gauges = bench.broker.gauges();
    assert_eq!((gauges.retained, gauges.retained_bytes), (0, 0));
    let message = Message::new("b", b"x", bench.now, Origin::BACKEND);
    assert_eq!(bench.broker.set_retained(&message), Ok(false));
    assert_eq!(bench.broker.set_retained(&message), Ok(true));
    let clear = Message::new("b", b"", bench.now, Origin::BACKEND);
    assert_eq!(bench.broker.set_retained(&clear), Ok(true));
    assert_eq!(bench.broker.set_retained(&clear), Ok(false));
}

#[test]
fn limits_refuse_to_store_but_not_to_route() {
    let limits = Limits { retained_messages: 2, retained_bytes: ByteSize(400), ..Limits::default() };
    let mut bench = Bench::new(limits);
    let device = bench.device("d");
    bench.subscribe(&device, "#");
    for topic in ["a", "b", "c"] {
        retain(&mut bench, topic, "x");
    }
    assert_eq!(device.payloads().len(), 3);
    assert!(bench.broker.retained("c", bench.now).is_none());
    retain(&mut bench, "b", &"y".repeat(300));
    assert_eq!(bench.broker.retained("b", bench.now).unwrap().payload.len(), 1);
    let message = Message::new("c", b"x", bench.now, Origin::BACKEND);
    assert_eq!(bench.broker.set_retained(&message), Err(RetainError::Quota));
    let mut off = Bench::new(Limits { retain_available: false, ..Limits::default() });
    retain(&mut off, "a", "x");
    assert_eq!(off.broker.set_retained(&message), Err(RetainError::Unavailable));
    assert_eq!(off.broker.gauges().retained, 0);
}

#[test]
fn expired_messages_are_not_seen_and_are_swept() {
    let mut bench = Bench::new(Limits::default());
    for number in 0..15_000 {
        let expires = (number % 2 == 0).then(|| bench.now.plus_secs(10));
        bench.publish_with(&format!("t/{number}"), "x", |message| {
            message.retain = true;
            message.expires = expires;
        });
    }
    bench.now = bench.now.plus_secs(10);
    assert!(bench.broker.retained("t/0", bench.now).is_none());
    let device = bench.device("d");
    let cursor = bench.subscribe(&device, "t/#").replay.unwrap();
    assert_eq!(replay(&bench, cursor).0.len(), 7500);
    assert_eq!(bench.broker.gauges().retained, 15_000);
    bench.pass(0);
    bench.pass(0);
    assert_eq!(bench.broker.gauges().retained, 7500);
}

#[test]
fn a_cursor_over_100_000_topics_is_complete_and_bounded() {
    let mut bench = Bench::new(Limits::default());
    for number in 0..100_000 {
        retain(&mut bench, &format!("t/{number}/{}", number % 1000), "x");
    }
    retain(&mut bench, "$SYS/x", "x");
    retain(&mut bench, "t", "x");
    retain(&mut bench, "t!", "x");
    let device = bench.device("d");
    for (filter, matching, most_calls) in [
        ("t/#", 100_001, 100_102),
        ("#", 100_002, 100_103),
        ("t/+/7", 100, 210),
        ("t/5/5", 1, 1),
        ("u/#", 0, 0),
    ] {
        let cursor = bench.subscribe(&device, filter).replay.unwrap();
        assert!(cursor.options().replay);
        let (topics, calls) = replay(&bench, cursor);
        assert_eq!(topics.len(), matching, "{filter}");
        assert!(topics.is_sorted() && calls <= most_calls, "{filter}: {calls}");
    }
    let list = bench.broker.list_retained("t/+/7", Some("t/10007/7"), 5, bench.now);
    assert_eq!(list.len(), 5);
    assert!(&*list[0].topic > "t/10007/7");
}

#[test]
fn replay_follows_retain_handling_and_its_limit() {
    let mut bench = Bench::new(Limits { retained_per_subscribe: 2, ..Limits::default() });
    let device = bench.device("d");
    for topic in ["a/1", "a/2", "a/3"] {
        retain(&mut bench, topic, "x");
    }
    let mut replays = |filter: &str, handling| {
        let request = SubscribeRequest { retain_handling: handling, id: Some(9), ..request(filter) };
        let replay = bench.try_subscribe(&device, &request).unwrap().replay;
        assert!(replay.iter().all(|cursor| cursor.options().ids == [9]));
        replay.map(|cursor| replay_all(&bench, cursor))
    };
    assert_eq!(replays("a/+", 2), None);
    assert_eq!(replays("a/+", 1), None);
    assert_eq!(replays("a/+", 0), Some(2));
    assert_eq!(replays("a/#", 1), Some(2));
    assert_eq!(replays("$share/g/a/#", 0), None);
    assert_eq!(replays("a/1", 0), Some(1));
}

fn replay_all(bench: &Bench, cursor: RetainedCursor) -> usize {
    replay(bench, cursor).0.len()
}
