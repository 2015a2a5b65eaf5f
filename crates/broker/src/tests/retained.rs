use std::task::{Context, Poll, Waker};

use gateway_core::units::ByteSize;

use super::{disk::Disk, *};

fn retain(bench: &mut Bench, topic: &str, payload: &str) -> Published {
    bench.publish_with(topic, payload, |message| message.retain = true)
}

fn poll(cursor: &mut RetainedCursor, bench: &Bench) -> Poll<Option<Option<Arc<SharedMessage>>>> {
    cursor.poll_next(&bench.broker, bench.now, &mut 1000, &mut Context::from_waker(Waker::noop()))
}

fn next(cursor: &mut RetainedCursor, bench: &Bench) -> Option<Option<Arc<SharedMessage>>> {
    let Poll::Ready(next) = poll(cursor, bench) else { panic!("the cursor waits") };
    next
}

fn get(bench: &Bench, topic: &str) -> Option<Arc<SharedMessage>> {
    ready(bench.broker.retained(topic, bench.now)).unwrap()
}

fn replay(bench: &Bench, mut cursor: RetainedCursor) -> (Vec<String>, usize) {
    let mut topics = Vec::new();
    let mut calls = 0;
    while let Some(next) = next(&mut cursor, bench) {
        calls += 1;
        topics.extend(next.map(|message| message.topic.to_string()));
    }
    assert!(next(&mut cursor, bench).is_none());
    (topics, calls)
}

#[test]
fn retained_messages_are_set_replaced_and_cleared() {
    let mut bench = Bench::new(Limits::default());
    retain(&mut bench, "a", "1");
    retain(&mut bench, "a", "2");
    assert_eq!(&*get(&bench, "a").unwrap().payload, b"2");
    assert_eq!(bench.broker.gauges().retained, 1);
    retain(&mut bench, "a", "");
    assert!(get(&bench, "a").is_none());
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
    assert!(get(&bench, "c").is_none());
    retain(&mut bench, "b", &"y".repeat(300));
    assert_eq!(get(&bench, "b").unwrap().payload.len(), 1);
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
    assert!(get(&bench, "t/0").is_none());
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
        assert!(cursor.offer().retain);
        let (topics, calls) = replay(&bench, cursor);
        assert_eq!(topics.len(), matching, "{filter}");
        assert!(topics.is_sorted() && calls <= most_calls, "{filter}: {calls}");
    }
    let list =
        |bytes| ready(bench.broker.list_retained("t/+/7", Some("t/10007/7"), 5, bytes, bench.now)).unwrap();
    let page = list(usize::MAX);
    assert_eq!(page.messages.len(), 5);
    assert!(&*page.messages[0].topic > "t/10007/7");
    assert_eq!(page.next.as_ref(), page.messages.last().map(|message| &message.topic));
    assert_eq!(list(1).messages.len(), 1);
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
        assert!(replay.iter().all(|cursor| cursor.offer().ids == [9]));
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

/// A payload that does not stay in memory.
fn long(text: &str) -> String {
    text.repeat(300)
}

fn on_shelf() -> (Bench, Disk) {
    let shelf = Disk::prompt();
    let bench = Bench::with_stores(Limits::default(), false, Some(shelf.stores()));
    (bench, shelf)
}

/// Lets so much time pass that large messages leave memory.
fn forget(bench: &mut Bench) {
    bench.pass(61);
}

/// The failure: a peer can make the list as long as it likes.
#[test]
fn a_topic_set_and_cleared_repeatedly_waits_once_to_leave_memory() {
    let (mut bench, shelf) = on_shelf();
    for _ in 0..100 {
        retain(&mut bench, "a", &long("x"));
        retain(&mut bench, "a", "");
    }
    let retained = &bench.broker.inner.retained;
    assert_eq!(retained.leaving_len(), 0);
    // Also if it is cleared and set while it is being read.
    retain(&mut bench, "a", &long("x"));
    shelf.set_holding(true);
    forget(&mut bench);
    retain(&mut bench, "a", "");
    retain(&mut bench, "a", &long("x"));
    shelf.answer();
    assert_eq!(bench.broker.inner.retained.leaving_len(), 1);
    shelf.set_holding(false);
    forget(&mut bench);
    assert_eq!((bench.broker.inner.retained.leaving_len(), shelf.references("a")), (0, 1));
}

#[test]
fn large_messages_leave_memory_after_a_while_and_are_read_when_wanted() {
    let (mut bench, shelf) = on_shelf();
    for topic in ["a", "b", "c"] {
        retain(&mut bench, topic, &long(topic));
    }
    retain(&mut bench, "bb", "small");
    bench.pass(59);
    let bytes = bench.broker.gauges().retained_bytes;
    assert_eq!((shelf.loads(), shelf.references("a")), (0, 2));
    bench.pass(2);
    assert_eq!((shelf.references("a"), shelf.references("bb")), (1, 2), "only the disk has it");
    assert_eq!(bench.broker.gauges().retained_bytes, bytes, "it counts all the same");
    let loads = shelf.loads();
    let device = bench.device("d");
    let cursor = bench.subscribe(&device, "#").replay.unwrap();
    assert_eq!(replay(&bench, cursor).0, ["a", "b", "bb", "c"]);
    assert_eq!(shelf.loads(), loads + 1, "all in one read");
    let cursor = bench.subscribe(&device, "b").replay.unwrap();
    assert_eq!(replay(&bench, cursor).0, ["b"]);
    assert_eq!(get(&bench, "c").unwrap().payload, long("c"));
    let page = ready(bench.broker.list_retained("#", None, 10, usize::MAX, bench.now)).unwrap();
    assert_eq!((page.messages.len(), page.next), (4, None));
    // Replaced, cleared, counted.
    retain(&mut bench, "a", "new");
    assert_eq!(&*get(&bench, "a").unwrap().payload, b"new");
    for topic in ["a", "b", "bb", "c"] {
        retain(&mut bench, topic, "");
    }
    let gauges = bench.broker.gauges();
    assert_eq!((gauges.retained, gauges.retained_bytes), (0, 0));
}

#[test]
fn a_message_that_the_disk_does_not_have_stays_in_memory() {
    let (mut bench, shelf) = on_shelf();
    retain(&mut bench, "a", &long("old"));
    forget(&mut bench);
    shelf.set_failing(true);
    retain(&mut bench, "a", &long("new"));
    for _ in 0..3 {
        forget(&mut bench);
        assert_eq!(get(&bench, "a").unwrap().payload, long("new"));
    }
    shelf.set_failing(false);
    retain(&mut bench, "a", &long("newer"));
    forget(&mut bench);
    assert_eq!(shelf.references("a"), 1);
    assert_eq!(get(&bench, "a").unwrap().payload, long("newer"));
}

#[test]
fn a_message_that_changes_while_it_is_read_is_the_new_one() {
    let (mut bench, shelf) = on_shelf();
    for topic in ["a", "b", "c"] {
        retain(&mut bench, topic, &long("old"));
    }
    forget(&mut bench);
    let device = bench.device("d");
    let mut cursor = bench.subscribe(&device, "#").replay.unwrap();
    shelf.set_holding(true);
    assert!(poll(&mut cursor, &bench).is_pending());
    retain(&mut bench, "a", &long("new"));
    retain(&mut bench, "b", "");
    shelf.answer();
    let mut got = Vec::new();
    while let Some(next) = next(&mut cursor, &bench) {
        got.extend(next.map(|message| (message.topic.to_string(), message.payload.len())));
    }
    assert_eq!(got, [("a".to_owned(), 900), ("c".to_owned(), 900)]);
    assert_eq!(get(&bench, "a").unwrap().payload, long("new"));
    // One that left memory while it was being read again, and was set meanwhile.
    shelf.set_holding(true);
    bench.pass(61);
    retain(&mut bench, "a", &long("last"));
    shelf.answer();
    assert_eq!(get(&bench, "a").unwrap().payload, long("last"));
    forget(&mut bench);
    assert_eq!(shelf.references("a"), 1);
}

#[test]
fn an_unreadable_disk_ends_no_replay_and_gaps_are_counted() {
    let unread = || counters::totals().retained_unread;
    let before = unread();
    let (mut bench, shelf) = on_shelf();
    retain(&mut bench, "a", &long("a"));
    retain(&mut bench, "b", "small");
    forget(&mut bench);
    shelf.set_unreadable(true);
    let device = bench.device("d");
    let cursor = bench.subscribe(&device, "#").replay.unwrap();
    assert_eq!(replay(&bench, cursor).0, ["b"]);
    assert_eq!(unread() - before, 1);
    assert!(ready(bench.broker.retained("a", bench.now)).is_err());
}

#[test]
fn a_start_keeps_no_large_message_in_memory() {
    let (mut bench, shelf) = on_shelf();
    retain(&mut bench, "a", &long("a"));
    retain(&mut bench, "b", "small");
    let now = bench.now;
    bench = Bench::with_stores(Limits::default(), false, Some(shelf.stores()));
    let restored = bench.broker.restore(|_| panic!("there is no session"), false, now).unwrap();
    assert_eq!(restored.retained, 2);
    assert_eq!((shelf.references("a"), shelf.references("b")), (1, 2));
    assert_eq!(get(&bench, "a").unwrap().payload, long("a"));
}

/// The failure: a bridge gets its own retained messages back with each subscription.
#[test]
fn no_local_keeps_own_retained_messages_back() {
    let mut bench = Bench::new(Limits::default());
    let (me, other) = (bench.device("me"), bench.device("other"));
    bench.publish_from(&me, "t/mine", "x", true);
    bench.publish_from(&other, "t/other", "x", true);
    for (no_local, expected) in [(true, &["t/other"][..]), (false, &["t/mine", "t/other"])] {
        let wanted = SubscribeRequest { no_local, ..request("t/#") };
        let cursor = bench.try_subscribe(&me, &wanted).unwrap().replay.unwrap();
        let mut topics = replay(&bench, cursor).0;
        topics.sort();
        assert_eq!(topics, expected, "no_local {no_local}");
    }
    let wanted = SubscribeRequest { no_local: true, ..request("t/mine") };
    let cursor = bench.try_subscribe(&me, &wanted).unwrap().replay.unwrap();
    assert_eq!(replay(&bench, cursor).0, Vec::<String>::new(), "without a wildcard");
}
